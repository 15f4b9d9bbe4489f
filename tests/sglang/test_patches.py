"""Each patch's own unit tests, in the style and place that SGLang has for them."""

import re
import shutil
from pathlib import Path

import pytest

from sglang_overlay.patchset.series import Series

from ..pinned.conftest import PINS
from .conftest import Python

PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
NAMES = [name for name in (PINS[-1].folder / "series").read_text().split() if name]


def own_tests(series: Series, name: str) -> list[str]:
    """The test files that the patch adds."""
    paths = [diff.path for diff in series.by_name[name].diffs]
    return [path for path in paths if re.fullmatch(r"test/registered/.*test_\w+\.py", path)]


@pytest.mark.parametrize("name", NAMES)
def test_a_patchs_tests_pass_with_the_series(
    series: Series, python: Python, patched: Path, name: str
) -> None:
    assert own_tests(series, name)
    done = python(patched, *PYTEST, *own_tests(series, name))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("ray" in line.lower() for line in skipped), skipped  # Ray is not installed here


@pytest.mark.parametrize("name", NAMES)
def test_a_patchs_tests_fail_without_it(
    series: Series, python: Python, stock: Path, patched: Path, name: str
) -> None:
    for path in own_tests(series, name):
        (stock / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(patched / path, stock / path)
        done = python(stock, *PYTEST, path)
        assert done.returncode in (1, 2), done.stdout[-6000:]
