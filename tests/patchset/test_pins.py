"""Several pins side by side: every command that looks at a tree finds the one that it is of."""

import json
import shutil
from pathlib import Path

import pytest

from ..conftest import git
from .conftest import A
from .workshop import Files, Workshop, contents, numbered

#: Files that both releases have alike, and that the newer pin's patches change.
COMMON = [f"python/sglang/srt/common{n}.py" for n in range(6)]


@pytest.fixture
def shops(tmp_path: Path) -> tuple[Workshop, Workshop]:
    """Two pins in one folder of patch sets. The newer one's patches change seven files, of
    which six are the same in the older release; the older one's change one."""
    same: Files = {path: numbered(9) for path in COMMON}
    older = Workshop(tmp_path / "older", {**same, A: numbered(40)}, "1.9.0")
    newer = Workshop(tmp_path / "newer", {**same, A: b"# new\n" + numbered(40)}, "1.10.0")
    older.patch("head", {A: numbered(40, l3="three")})
    newer.patch("head", {A: b"# new\n" + numbered(40, l3="three")})
    newer.patch("wide", {path: numbered(9, l5="five") for path in COMMON})
    older.seal()
    newer.seal()
    shutil.copytree(older.folder, newer.folder.parent / older.folder.name)
    older.folder = newer.folder.parent / older.folder.name
    return older, newer


def told(shop: Workshop, capsys: pytest.CaptureFixture[str], *args: str | Path) -> dict[str, str]:
    capsys.readouterr()
    shop.run(*args, "--json")
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("which", [0, 1])
def test_the_pin_is_found_from_the_tree_pristine_patched_and_edited(
    shops: tuple[Workshop, Workshop], which: int, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = shops[which]
    place = shop.tree("checkout")
    status = ("status", "--sglang-dir", place)
    assert told(shop, capsys, *status)["pin"] == f"v{shop.version}"
    assert shop.on(place, "apply") == 0
    assert contents(place) == shop.expected(*shop.names)
    assert told(shop, capsys, *status)["pin"] == f"v{shop.version}"
    assert shop.on(place, "reverse") == 0
    assert contents(place) == shop.expected()
    (place / COMMON[0]).write_text("mine\n")
    assert told(shop, capsys, *status)["pin"] == f"v{shop.version}"


def test_a_tree_that_tells_its_version_decides(
    shops: tuple[Workshop, Workshop], capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = shops
    place = older.tree("site-packages")
    (place / "sglang/_version.py").write_text("__version__ = version = '1.10.0'\n")
    capsys.readouterr()
    assert newer.on(place, "apply") == 1
    assert "not v1.10.0 with any of our patches" in capsys.readouterr().err
    (place / "sglang/_version.py").write_text("__version__ = version = '1.8.0'\n")
    assert newer.on(place, "apply") == 2
    assert "there are patches for v1.9.0, v1.10.0" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["1.10.0", "0.0.0.dev0", "1.9.1.dev0+g1a2b3c4.d20261129"])
def test_in_a_checkout_the_generated_version_is_a_hint_alone(
    shops: tuple[Workshop, Workshop], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    older, _ = shops
    place = older.tree("checkout")
    (place / "python/sglang/_version.py").write_text(f"__version__ = version = '{said}'\n")
    assert told(older, capsys, "status", "--sglang-dir", place)["pin"] == "v1.9.0"
    assert older.on(place, "apply") == 0


def test_of_two_pins_that_fit_alike_the_newest_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("1.9.0", "1.10.0"):
        shop = Workshop(tmp_path / version, {A: numbered(40)}, version)
        shop.patch("head", {A: numbered(40, l3="three")})
        shop.seal()
    shutil.copytree(tmp_path / "1.9.0/patches/v1.9.0", shop.folder.parent / "v1.9.0")
    status = ("status", "--sglang-dir", shop.tree("checkout"))
    assert told(shop, capsys, *status)["pin"] == "v1.10.0"
    assert told(shop, capsys, *status, "--pin", "1.9.0")["pin"] == "v1.9.0"


def test_fetch_and_export_take_the_newest_pin_but_a_branch_stands_on_a_tag_that_is_there(
    shops: tuple[Workshop, Workshop], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newer = shops
    assert told(newer, capsys, "fetch", tmp_path / "new")["pin"] == "v1.10.0"
    assert told(newer, capsys, "fetch", tmp_path / "old", "--pin", "1.9.0")["pin"] == "v1.9.0"
    assert told(newer, capsys, "export", "head", tmp_path / "mails")["pin"] == "v1.10.0"
    branch = ("export", "head", "--branch", "up", "--sglang-dir")
    assert told(newer, capsys, *branch, tmp_path / "old")["pin"] == "v1.9.0"
    git(tmp_path / "old", "checkout", "-q", "up")
    assert (tmp_path / "old" / A).read_bytes() == older.expected("head")[A]
    git(tmp_path / "new", "fetch", "-q", "--no-tags", str(tmp_path / "old"), "tag", "v1.9.0")
    assert told(newer, capsys, *branch, tmp_path / "new")["pin"] == "v1.10.0"
    git(tmp_path / "old", "fetch", "-q", "--no-tags", str(tmp_path / "new"), "tag", "v1.10.0")
    assert told(newer, capsys, *branch, tmp_path / "old")["pin"] == "v1.9.0"  # HEAD decides
