from pathlib import Path

import pytest

from ..conftest import git
from ..patchset.workshop import Files, Workshop, lay_out, numbered
from ..pinned.conftest import checkout, fetched, pin, series, versions

__all__ = ["checkout", "fetched", "pin", "series", "versions"]
A, B, NEW = (f"python/sglang/{name}.py" for name in ("a", "b", "sub/new"))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    """Three patches: two that change one file far apart, a third that needs the first."""
    monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path / "cache"))
    shop = Workshop(tmp_path, {A: numbered(60), B: numbered(9)})
    shop.patch("head", {A: numbered(60, l3="three\nand more"), NEW: b"new = 1\n"})
    shop.patch("tail", {A: numbered(60, l30="thirty"), B: numbered(9)[:-1]})
    shop.patch("more", {A: numbered(60, l3="three\nand most"), NEW: b"new = 2\n"}, "head")
    shop.seal()
    return shop


@pytest.fixture
def work(shop: Workshop) -> Path:
    """A checkout on the pin's tag with every patch as a commit."""
    place = shop.tree("checkout")
    git(place, "tag", f"v{shop.version}")
    assert shop.on(place, "apply", "--commit") == 0
    return place


def mails(shop: Workshop) -> dict[str, bytes]:
    """The patch files, by name."""
    return {file.stem: file.read_bytes() for file in shop.folder.glob("*.patch")}


def commit(place: Path, files: Files, *args: str, message: str = "") -> None:
    """Commit ``files`` in ``place``."""
    lay_out(place, files)
    git(place, "add", "-A")
    given = ["-F", "-"] if message else []
    git(place, "commit", "-q", *given, *args, data=message.encode())


def rebase(place: Path, script: str) -> None:
    """An interactive rebase whose todo list the sed ``script`` edits."""
    editor = f"sequence.editor=sed -i -e '{script}'"
    git(place, "-c", editor, "-c", "core.editor=true", "rebase", "-q", "-i", "--autosquash", "pin")
