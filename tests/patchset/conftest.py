from pathlib import Path

import pytest

from .workshop import Workshop, numbered

A, B, NEW, OLD = (f"python/sglang/{n}.py" for n in ("a", "b", "sub/new", "old"))
TEST = "test/registered/test_it.py"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """Three patches: two that change one file far apart, a third that needs the first."""
    shop = Workshop(tmp_path, {A: numbered(40), B: numbered(9), OLD: b"old\n"})
    shop.patch("head", {A: numbered(40, l3="three\nand more"), NEW: b"new = 1\n", TEST: b"pass\n"})
    shop.patch("tail", {A: numbered(40, l30="thirty"), OLD: None, B: numbered(9)[:-1]})
    shop.patch("more", {A: numbered(40, l3="three\nand most"), NEW: b"new = 2\n"}, "head")
    shop.seal()
    return shop
