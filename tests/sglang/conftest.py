import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.cli import main
from sglang_overlay.patchset import source
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series, load_series

from ..pinned.conftest import PINS

Python = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def pin(request: pytest.FixtureRequest) -> Pin:
    """The newest pin, or the one that a test is parametrised with."""
    pin = getattr(request, "param", PINS[-1])
    assert isinstance(pin, Pin)
    return pin


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
def stock(series: Series, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source as it is."""
    place = tmp_path_factory.mktemp("sglang") / "stock"
    assert source.fetch(series.pin, place, lambda what, done, total: None)
    return place


@pytest.fixture(scope="session")
def patched(series: Series, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source with the whole series."""
    place = tmp_path_factory.mktemp("sglang") / "patched"
    assert source.fetch(series.pin, place, lambda what, done, total: None)
    assert main(["apply", "--sglang-dir", str(place)]) == 0
    return place
