import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.cli import main
from sglang_overlay.patchset import source
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series, load_series

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def series(pin: Pin) -> Series:
    return load_series(pin)


def runner(executable: Path) -> Python:
    """Runs ``executable`` on the SGLang source at ``source``."""

    def run(source: Path, *args: object, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [executable, *map(str, args)],
            cwd=source,
            env={**os.environ, "PYTHONPATH": str(source / "python"), **env},
            capture_output=True,
            text=True,
            check=False,
        )

    return run


@pytest.fixture(scope="session")
def python(pin: Pin) -> Python:
    """Runs the python that has the dependencies of the pin's SGLang."""
    return runner(sglang_python(pin.version))


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pin, bool], Path]:
    """Lays a pin's source out, with the whole series or as it is, once."""

    @cache
    def lay_out(pin: Pin, patched: bool) -> Path:
        place = tmp_path_factory.mktemp("sglang") / ("patched" if patched else "stock")
        assert source.fetch(pin, place, lambda what, done, total: None)
        assert not patched or main(["apply", "--sglang-dir", str(place)]) == 0
        return place

    return lay_out


@pytest.fixture(scope="session")
def stock(pin: Pin, trees: Callable[[Pin, bool], Path]) -> Path:
    """The pinned source as it is."""
    return trees(pin, False)


@pytest.fixture(scope="session")
def patched(pin: Pin, trees: Callable[[Pin, bool], Path]) -> Path:
    """The pinned source with the whole series."""
    return trees(pin, True)
