from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine import make_model, serve


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and a tokenizer."""
    return make_model(tmp_path_factory.mktemp("measure") / "model")


@pytest.fixture(scope="package")
def server(model: Path) -> Iterator[str]:
    """A real engine on the CPU; one start for all tests here. Idle, it keeps a core busy."""
    with serve(model) as url:
        yield url
