"""Each patch's own unit tests, in the style and place that SGLang has for them."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ci.sglang_env import lock_file, packages, sglang_python
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series

from ..pins import PINS, each_pin
from .conftest import Python

PYTEST = ("-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider")
NAMES = [(pin, name) for pin in PINS for name in (pin.folder / "series").read_text().split()]
each_patch = pytest.mark.parametrize(
    ("pin", "name"),
    [pytest.param(pin, name, id=f"{pin.name}-{name}") for pin, name in NAMES],
    indirect=["pin"],
    scope="session",
)


def own_tests(series: Series, name: str) -> list[str]:
    """The test files that the patch adds."""
    paths = [diff.path for diff in series.by_name[name].diffs]
    return [path for path in paths if re.fullmatch(r"test/registered/.*test_\w+\.py", path)]


@each_patch
def test_a_patchs_tests_pass_with_the_series(
    series: Series, python: Python, patched: Path, name: str
) -> None:
    assert own_tests(series, name)
    done = python(patched, *PYTEST, *own_tests(series, name))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout)
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("ray" in line.lower() for line in skipped), skipped  # Ray is not installed here


@each_patch
def test_a_patchs_tests_fail_without_it(
    series: Series, python: Python, stock: Path, patched: Path, name: str
) -> None:
    for path in own_tests(series, name):
        (stock / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(patched / path, stock / path)
        done = python(stock, *PYTEST, path)
        assert done.returncode in (1, 2), done.stdout[-6000:]


@each_pin
def test_the_environment_is_what_its_lock_says(pin: Pin) -> None:
    freeze = [sglang_python(pin.version), "-m", "pip", "--disable-pip-version-check", "freeze"]
    done = subprocess.run(freeze, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} == packages(lock_file(pin.version))
