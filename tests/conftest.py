"""What every tier shares: a git that knows nothing of this machine's."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from ci.browser import chromium
from sglang_overlay.patchset.pin import Pin

from .pins import NEWEST

if TYPE_CHECKING:
    from playwright.sync_api import Browser

_GIT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": "A Tester",
    "GIT_AUTHOR_EMAIL": "tester@example.org",
    "GIT_AUTHOR_DATE": "2026-01-02T03:04:05+0000",
    "GIT_COMMITTER_NAME": "A Tester",
    "GIT_COMMITTER_EMAIL": "tester@example.org",
    "GIT_COMMITTER_DATE": "2026-01-02T03:04:05+0000",
    "LC_ALL": "C",
}
#: The config.json of the smallest model that a real engine runs on a CPU.
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_positions": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
# How a commit becomes a patch file, and how it is taken back.
EXPORT = (
    "format-patch -1 -k --no-renames --no-stat --no-signature --zero-commit --full-index "
    "--no-thread --no-base --no-encode-email-headers --no-ext-diff --no-color -U3 --stdout"
).split()
IMPORT = "am -q --keep-non-patch --keep-cr --no-scissors --committer-date-is-author-date".split()


def git(folder: Path, *args: str, data: bytes = b"") -> bytes:
    """Run git in ``folder`` with a fixed identity, clock and configuration."""
    done = subprocess.run(
        ["git", *args],
        cwd=folder,
        env={**os.environ, **_GIT},
        input=data,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(autouse=True)
def _hermetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def pin(request: pytest.FixtureRequest) -> Pin:
    """The newest pin, or the one that a test is marked with (``tests/pins.py``)."""
    pin = getattr(request, "param", NEWEST)
    assert isinstance(pin, Pin)
    return pin


@pytest.fixture(scope="module")
def browser() -> "Iterator[Browser]":
    """A headless Chromium; where none can be had the test is skipped and says so."""
    from playwright.sync_api import sync_playwright

    try:
        path = chromium()
    except SystemExit as missing:
        pytest.skip(str(missing))
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path)
