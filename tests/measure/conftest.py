from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_overlay.patchset.pin import Pin

from .engine import make_model, serve


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a tokenizer."""
    return make_model(tmp_path_factory.mktemp("measure") / "model")


@pytest.fixture(scope="module")
def server(model: Path, pin: Pin) -> Iterator[str]:
    """A real engine of the pin on the CPU; one start for a module's tests of it. Idle, it keeps a
    core busy."""
    with serve(model, pin) as url:
        yield url
