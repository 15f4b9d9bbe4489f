"""Commits made with ordinary git become the series again, exactly."""

import json
import shutil
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sglang_overlay.patchset import manifest, rework, shelf
from sglang_overlay.patchset.history import History, press
from sglang_overlay.patchset.pin import load_pins
from sglang_overlay.patchset.series import load_series
from sglang_overlay.patchset.source import pinned_reader

from ..conftest import IMPORT, git
from ..patchset.test_kills import killed_at
from ..patchset.workshop import (
    BODY,
    TRAILERS,
    Files,
    Workshop,
    contents,
    lay_out,
    numbered,
    snapshot,
)
from .conftest import NEW, A, B, commit, mails, rebase

ALL = {"head": "kept", "tail": "kept", "more": "kept"}

#: A sed script: the first two commits change places.
SWAP = "1{h;d};2{p;x}"


#: The date that git gives every mail.
MAILED = "Mon Sep 17 00:00:00 2001"


def message(subject: str, needs: str = "") -> str:
    return f"{subject}\n\n{BODY}\n{f'Depends-On: {needs}' + chr(10) if needs else ''}{TRAILERS}"


def refreshed(
    shop: Workshop, place: Path, capsys: pytest.CaptureFixture[str], *args: str
) -> dict[str, str]:
    """What ``refresh`` says of each patch; the set is sound, and git takes it."""
    capsys.readouterr()
    assert shop.on(place, "refresh", "--json", *args) == 0
    result = json.loads(capsys.readouterr().out)
    sound(shop, place)
    return {patch["name"]: patch["state"] for patch in result["patches"]}


def sound(shop: Workshop, place: Path) -> None:
    """The set passes lint, is what git exports, and git am makes HEAD's tree of it."""
    assert shop.run("lint") == 0
    assert shop.run("export", "--check") == 0
    there = shop.root / "am"
    shutil.rmtree(there, ignore_errors=True)
    git(shop.root, "clone", "-q", str(shop.source), str(there))
    git(there, "checkout", "-q", "-B", "main", "pin")
    names = (shop.folder / "series").read_text().split()
    git(there, *IMPORT, data=b"".join(mails(shop)[name] for name in names))
    log = ["log", "--format=%T %an %ae %ad %B", "pin..HEAD"]
    assert git(there, *log) == git(place, *log)


def test_the_round_trip_gives_the_same_bytes(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(shop.folder)
    assert refreshed(shop, work, capsys) == ALL
    assert snapshot(shop.folder) == before
    assert shop.on(work, "refresh") == 0
    assert "nothing to change" in capsys.readouterr().out


def test_bytes_of_another_gits_are_kept_where_the_content_did_not_change(
    shop: Workshop, work: Path
) -> None:
    file = shop.folder / "tail.patch"
    text = file.read_bytes().replace(b" @@ line 26", b" @@")  # another idea of what is a function
    assert text != file.read_bytes()
    file.write_bytes(text)
    assert shop.run("lint", "--write") == 0
    commit(work, {NEW: b"new = 9\n"}, "--fixup=:/make more")
    rebase(work, "")
    assert shop.on(work, "refresh") == 0
    assert file.read_bytes() == text


def test_an_amended_patch_changes_and_the_others_keep_their_bytes(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = mails(shop)
    text = (work / A).read_bytes().replace(b"thirty\n", b"thirty\nand one\n")
    commit(work, {A: text, B: b"all new\n"}, "--fixup=:/make tail")
    rebase(work, "")
    assert refreshed(shop, work, capsys) == ALL | {"tail": "changed"}
    after = mails(shop)
    assert after["tail"] != before.pop("tail")
    assert {name: after[name] for name in before} == before


def test_a_patch_below_another_changes_both_that_stand_on_it(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(work, {NEW: b"new = 2\n\n\n\n\nold = 1\n"}, "--fixup=HEAD")
    rebase(work, "")
    git(work, "checkout", "-q", "HEAD~2")
    commit(work, {"python/sglang/third.py": b"3\n"}, "--amend", "--no-edit")
    git(work, "cherry-pick", "main~1", "main")
    states = refreshed(shop, work, capsys)
    assert states == {"head": "changed", "tail": "kept", "more": "changed"}


def test_a_reworded_patch_is_known_by_its_date(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ["--date=2026-03-04T05:06:07+0100"]
    git(work, "commit", "-q", "--amend", "--no-edit", *late)
    assert refreshed(shop, work, capsys) == ALL | {"more": "changed"}
    text = message("test: say it otherwise", "head").encode()
    git(work, "commit", "-q", "--amend", "-F", "-", data=text)
    assert refreshed(shop, work, capsys) == ALL | {"more": "changed"}
    assert b"Subject: test: say it otherwise\n" in mails(shop)["more"]


@pytest.mark.parametrize("name", ["J. R. Smith", "Zoë Ünal", "Smith, J", 'J "B" S', "A \\ B"])
def test_whoever_wrote_it_a_reworded_patch_is_known(
    shop: Workshop, work: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    author = ["--author", f"{name} <j@example.org>"]
    git(work, "commit", "-q", "--amend", "--no-edit", *author)
    assert refreshed(shop, work, capsys) == ALL | {"more": "changed"}
    text = message("test: say it otherwise, é", "head").encode()
    git(work, "commit", "-q", "--amend", "-F", "-", data=text)
    assert refreshed(shop, work, capsys) == ALL | {"more": "changed"}
    place = shop.tree("checkout")
    git(place, "tag", "v1.0.0")
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "log", "-1", "--format=%an <%ae>").decode() == f"{name} <j@example.org>\n"


def test_two_patches_with_one_subject_are_found(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shop.folder / "tail.patch"
    file.write_bytes(file.read_bytes().replace(b"test: make tail", b"test: make head"))
    assert shop.run("lint", "--write") == 5
    assert "v1.0.0/tail: has the subject of head" in capsys.readouterr().out


def test_patches_are_reordered_dropped_and_split(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = mails(shop)
    rebase(work, SWAP)
    assert refreshed(shop, work, capsys) == ALL
    assert (shop.folder / "series").read_text() == "tail\nhead\nmore\n"
    assert mails(shop) == before

    git(work, "reset", "-q", "--hard", "HEAD~1")
    assert shop.on(work, "refresh") == 1 + 1
    assert "no commit is more" in capsys.readouterr().err
    assert refreshed(shop, work, capsys, "--drop", "more") == {
        "tail": "kept",
        "head": "kept",
        "more": "dropped",
    }
    assert not (shop.folder / "more.patch").exists()

    git(work, "reset", "-q", "HEAD~1")  # split head: its file first, then the rest
    git(work, "add", NEW)
    git(work, "commit", "-q", "-F", "-", data=message("test: make new").encode())
    git(work, "commit", "-q", "-a", "-C", "ORIG_HEAD")
    assert shop.on(work, "refresh") == 2
    assert "(test: make new) is no patch of the series" in capsys.readouterr().err
    states = refreshed(shop, work, capsys, "--name", "new=HEAD~1")
    assert states == {"tail": "kept", "new": "new", "head": "changed"}
    assert (shop.folder / "series").read_text() == "tail\nnew\nhead\n"


def test_comments_of_the_series_stay_above_their_patch(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (shop.folder / "series").write_text("# one\nhead\n\n# two\ntail\nmore\n# end\n")
    rebase(work, SWAP)
    assert shop.on(work, "refresh") == 0
    text = "\n# two\ntail\n# one\nhead\nmore\n# end\n"
    assert (shop.folder / "series").read_text() == text


@pytest.mark.parametrize("on", ["pin", "HEAD"])
def test_a_new_patch_is_written_against_the_pin_wherever_it_was_made(
    shop: Workshop, work: Path, on: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = mails(shop)
    git(work, "checkout", "-q", on)
    text = (work / A).read_bytes().replace(b"line 50\n", b"fifty\n")
    commit(work, {A: text}, message=message("test: make fifty"))
    assert shop.on(work, "new-patch", "fifty") == 0
    assert mails(shop) == before | {"fifty": mails(shop)["fifty"]}
    assert (shop.folder / "series").read_text() == "head\ntail\nmore\nfifty\n"
    assert numbered(60, l50="fifty") == shop_with(shop, "fifty")[A]
    assert shop.run("lint") == 0
    assert shop.run("export", "--check") == 0
    assert shop.on(work, "new-patch", "fifty") == 2
    assert "there is a patch fifty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "wanted"),
    [(["x", "nowhere"], "no commit nowhere"), (["X"], "'X' is not a patch name")],
)
def test_a_new_patch_needs_a_commit_and_a_name(
    shop: Workshop, work: Path, args: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shop.on(work, "new-patch", *args) == 2
    assert wanted in capsys.readouterr().err


def shop_with(shop: Workshop, name: str) -> dict[str, bytes]:
    """What git am of one patch makes of the pristine source."""
    there = shop.root / "am"
    git(shop.root, "clone", "-q", str(shop.source), str(there))
    git(there, "checkout", "-q", "-B", "main", "pin")
    git(there, *IMPORT, data=mails(shop)[name])
    return contents(there)


def test_a_patch_beside_others_has_to_name_them(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: Files = {
        A: (work / A).read_bytes().replace(b"line 5\n", b"five\n").replace(b"line 32\n", b"32\n"),
        NEW: b"new = 3\n",
    }
    commit(work, files, message=message("test: make five"))
    before = snapshot(shop.folder)
    assert shop.on(work, "new-patch", "five") == 1
    error = capsys.readouterr().err
    assert "changes lines that more, tail changes" in error
    assert "add 'Depends-On: more, tail' to its message" in error
    assert snapshot(shop.folder) == before
    text = message("test: make five", "more, tail").encode()
    git(work, "commit", "-q", "--amend", "-F", "-", data=text)
    assert shop.on(work, "new-patch", "five") == 0
    sound(shop, work)


@pytest.mark.parametrize(
    ("files", "text", "code", "wanted"),
    [
        ({B: b"x\n"}, "test: short", 2, "no Origin: line"),
        ({B: b"x\n"}, message("Short"), 2, "is not '<area>: short imperative summary'"),
        ({B: b"x\n"}, message("test: two\nlines"), 2, "would not survive as a mail"),
        (
            {B: b"x\n"},
            message("test: cut").replace("\nWhy", "\n--- a\nWhy"),
            2,
            "would cut the body",
        ),
        ({B: b"x\n"}, message("test: needs", "nobody"), 2, "depends on nobody, which is not"),
        ({B: b"x\n"}, message("test: beside"), 1, "hunk 1 touches lines that tail changes"),
        ({A: b"x\n"}, message("test: needs", "more"), 2, "depends on head, more, but does not"),
        ({B: b"\0\n"}, message("test: binary"), 2, "binary files are not allowed"),
        ({"a b": b"x\n"}, message("test: blank"), 2, "not plain"),
        ({B: b"x\r\n"}, message("test: returns"), 2, "not give back its content;"),
        ({B: b"x\n"}, message("test: two  blanks"), 2, "not give back its message;"),
        ({B: b"x\n"}, message("test: a\ttab"), 2, "not give back its message;"),
        ({B: b"x\n"}, message("re: it"), 2, "not give back its message;"),
        ({B: b"x\n"}, message("test: end") + "\n \n", 2, "not give back its message;"),
        (
            {B: b"x\n"},
            message("test: other").replace("\nWhy", "\nFrom: B <b@example.org>\n\nWhy"),
            2,
            "not give back its author and message;",
        ),
        (
            {B: b"x\n"},
            message("test: two").replace("\nWhy", f"\nFrom {'1' * 40} {MAILED}\n\nWhy"),
            2,
            "take its mail for several",
        ),
        ({B: b"x\n"}, message("test: make tail"), 2, "has the subject of tail"),
    ],
)
def test_what_cannot_be_a_patch_is_refused_and_nothing_is_written(
    shop: Workshop,
    work: Path,
    files: Files,
    text: str,
    code: int,
    wanted: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    git(work, "checkout", "-q", "pin")
    before = snapshot(shop.folder)
    commit(work, files, "--cleanup=verbatim", message=text)
    assert shop.on(work, "new-patch", "x") == code
    assert wanted in capsys.readouterr().err
    assert snapshot(shop.folder) == before


@pytest.mark.parametrize(
    ("spoil", "code", "wanted"),
    [
        ("edit", 3, f"not everything is committed: M {A}"),
        ("stage", 3, "not everything is committed"),
        ("merge", 2, "has 2 parents"),
        ("mode", 2, "changes its mode"),
        ("link", 2, "is not a plain file"),
        ("empty", 2, "changes nothing"),
        ("twice", 2, "are both more"),
        ("untagged", 2, "HEAD does not come after a tag v1.0.0"),
        ("foreign", 1, "is neither the pin's nor"),
        ("rebase", 3, "a rebase is under way"),
    ],
)
def test_a_checkout_that_is_no_series_is_refused_and_nothing_is_written(
    shop: Workshop,
    work: Path,
    spoil: str,
    code: int,
    wanted: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = snapshot(shop.folder)
    if spoil in ("edit", "stage"):
        lay_out(work, {A: b"mine\n"})
        git(work, *(["add", A] if spoil == "stage" else ["status"]))
    if spoil == "merge":
        git(work, "checkout", "-q", "-b", "side", "pin")
        commit(work, {B: b"x\n"}, message="side")
        git(work, "checkout", "-q", "main")
        git(work, "merge", "-q", "-s", "ours", "-m", "merge", "side")
    if spoil == "mode":
        (work / B).chmod(0o755)
        commit(work, {}, message="mode")
    if spoil == "link":
        (work / "link").symlink_to("a")
        commit(work, {}, message="link")
    if spoil == "empty":
        git(work, "commit", "-q", "--allow-empty", "-m", "empty")
    if spoil == "twice":
        commit(work, {B: b"x\n"}, message=message("test: make more"))
    if spoil == "untagged":
        git(work, "tag", "-d", "v1.0.0")
    if spoil == "foreign":
        git(work, "checkout", "-q", "--detach", "pin")
        commit(work, {A: b"mine\n"}, message="mine")
        git(work, "tag", "-f", "v1.0.0")
        commit(work, {A: b"other\n"}, message=message("test: make head"))
        commit(work, {B: b"other\n"}, message=message("test: make tail"))
        commit(work, {NEW: b"other\n"}, message=message("test: make more", "head"))
    if spoil == "rebase":
        (work / ".git/rebase-merge").mkdir()
    assert shop.on(work, "refresh") == code
    assert wanted in capsys.readouterr().err
    assert snapshot(shop.folder) == before


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--name", "x"], "write NAME=COMMIT"),
        (["--name", "x=nowhere"], "no commit nowhere"),
        (["--name", "X=HEAD"], "is not a patch name"),
        (["--name", "x=v1.0.0"], "not one of the commits since the pin"),
        (["--drop", "more"], "shall be dropped, but there is a commit"),
        (["--drop", "nobody"], "no patch nobody"),
    ],
)
def test_a_wrong_option_is_a_usage_error(
    shop: Workshop, work: Path, args: list[str], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(shop.folder)
    assert shop.on(work, "refresh", *args) == 2
    assert wanted in capsys.readouterr().err
    assert snapshot(shop.folder) == before


def test_a_kill_at_any_step_leaves_the_old_set_or_the_new_one_whole(
    shop: Workshop, work: Path
) -> None:
    old = snapshot(shop.folder)
    commit(work, {B: b"all new\n"}, "--fixup=:/make tail")
    rebase(work, "")
    rebase(work, SWAP)
    (pin,) = load_pins(shop.folder.parent)
    read, before = pinned_reader(pin), rework.load(load_series(pin))
    commits = rework.attribute(History(work).commits("pin"), before.series.patches, {})
    with press() as maker:
        made = rework.remake(before, commits, maker, read)
    seen = []
    for step in count(1):
        done = not killed_at(step, lambda: not shelf.write(made, read))
        left = snapshot(shop.folder)
        seen.append(left != old)
        manifest.load(load_series(pin))
        assert shelf.write(made, read) == (left == old)  # the next run finishes
        new = snapshot(shop.folder.parent)
        assert left in (old, snapshot(shop.folder)), step
        assert not any(path.startswith(".") for path in new)
        if done:
            break
        shutil.rmtree(shop.folder)
        lay_out(shop.folder, {path: entry[1] for path, entry in old.items() if entry})
    assert step > 20
    assert seen == sorted(seen)  # from one step on it is the new set
    assert seen.count(True) > 2  # and some of the kills came after it


def test_a_series_is_taken_over_to_another_pin_by_a_rebase(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = shop.files | {A: b"# one more line\n" + numbered(60), B: b"first\n" + numbered(9)}
    other = Workshop(shop.root / "other", files, "2.0.0")
    folder = shop.folder.with_name("v2.0.0")
    shutil.copytree(other.folder, folder)
    (folder / "series").write_text("")
    old = mails(shop)
    git(other.source, "tag", "v2.0.0")
    git(work, "fetch", "-q", "--no-tags", str(other.source), "tag", "v2.0.0")
    git(work, "rebase", "-q", "--onto", "v2.0.0", "v1.0.0")
    capsys.readouterr()
    assert shop.on(work, "refresh", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["pin"] == "v2.0.0"
    states = {patch["name"]: patch["state"] for patch in result["patches"]}
    assert states == dict.fromkeys(ALL, "new")
    assert shop.run("lint") == 0
    assert mails(shop) == old
    made = {file.stem: file.read_bytes() for file in folder.glob("*.patch")}
    git(work, "checkout", "-q", "-B", "am", "v2.0.0")
    git(work, *IMPORT, data=made["head"] + made["tail"] + made["more"])
    assert git(work, "rev-parse", "am^{tree}") == git(work, "rev-parse", "main^{tree}")
    (new,) = [hunk for hunk in made["head"].split(b"\n@@")[1:] if b"new = 1" in hunk]
    assert new in old["head"]  # what is the same file there is the same diff


def test_a_pin_that_is_a_link_is_written_where_it_lies(shop: Workshop, work: Path) -> None:
    place = shop.root / "elsewhere" / shop.folder.name
    place.parent.mkdir()
    shop.folder.rename(place)
    shop.folder.symlink_to(place)
    commit(work, {A: (work / A).read_bytes() + b"end\n"}, message=message("test: end", "tail"))
    assert shop.on(work, "new-patch", "end") == 0
    assert shop.folder.is_symlink()
    assert (place / "end.patch").is_file()
    assert [f.name for f in (*shop.folder.parent.iterdir(), *place.parent.iterdir())] == [
        place.name,
        place.name,
    ]


def test_two_file_systems_are_told_and_nothing_is_written(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = snapshot(shop.folder)
    commit(work, {A: (work / A).read_bytes() + b"end\n"}, message=message("test: end", "tail"))
    with TemporaryDirectory(dir="/dev/shm") as other:
        assert Path(other).stat().st_dev != shop.root.stat().st_dev
        (shop.folder.parent / ".staging").symlink_to(other)
        assert shop.on(work, "new-patch", "end") == 4
    error = capsys.readouterr().err
    assert "two folders cannot change places" in error
    assert f"have {shop.folder} and {shop.folder.parent} on one file system" in error
    assert snapshot(shop.folder) == before


def test_a_second_run_is_kept_out(
    shop: Workshop, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with shelf.shelf_lock(shop.folder.parent):
        assert shop.on(work, "refresh") == 4
    assert "another run is at work here" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["folder", "site-packages"])
def test_there_is_nothing_to_take_back_without_git(shop: Workshop, layout: str) -> None:
    assert shop.on(shop.tree(layout), "refresh") == 2
