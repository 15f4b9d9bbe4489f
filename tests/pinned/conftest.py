import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_overlay.patchset import manifest, source
from sglang_overlay.patchset.manifest import Manifest
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series, load_series

from ..pins import PINS


@pytest.fixture(scope="session", params=PINS, ids=lambda pin: pin.name)
def pin(request: pytest.FixtureRequest) -> Pin:
    """Each pin that has patches."""
    assert isinstance(request.param, Pin)
    return request.param


@pytest.fixture(scope="session")
def series(pin: Pin) -> Series:
    return load_series(pin)


@pytest.fixture(scope="session")
def versions(series: Series) -> Manifest:
    return manifest.load(series)


@pytest.fixture(scope="session")
def fetched(pin: Pin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source as ``fetch`` lays it out; not to be written to."""
    place = tmp_path_factory.mktemp("pinned") / pin.name
    assert source.fetch(pin, place, lambda what, done, total: None)
    return place


@pytest.fixture
def checkout(fetched: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it that a test may write to."""
    place = tmp_path / "checkout"
    shutil.copytree(fetched, place)
    yield place
    shutil.rmtree(place)
