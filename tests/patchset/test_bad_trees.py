"""Trees that must not be written to: one message, the right exit code, nothing changed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from sglang_overlay.patchset.tree import FileChange, Tree

from ..conftest import EXPORT, IMPORT, git
from .conftest import NEW, A, B
from .workshop import Workshop, lay_out, numbered, snapshot


def refused(
    shop: Workshop, place: Path, code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both ``apply`` and ``check`` end with ``code`` and ``message``, and write nothing."""
    before = snapshot(place) if place.is_dir() else None
    for command in ("apply", "check"):
        capsys.readouterr()
        assert shop.on(place, command) == code
        printed = capsys.readouterr()
        assert message in printed.err, printed.err
        assert len(printed.err.splitlines()) <= 2
    assert (snapshot(place) if place.is_dir() else None) == before


Edit = Callable[[Workshop, Path], Path | None]


def _other_version(shop: Workshop, place: Path) -> None:
    text = b"__version__ = version = '0.9.9'\n"
    lay_out(place, {"python/sglang/_version.py": text})


def _nothing_known(shop: Workshop, place: Path) -> None:
    for path in (A, B, "python/sglang/old.py"):
        lay_out(place, {path: b"something else\n"})


def _link(shop: Workshop, place: Path) -> None:
    (place / A).rename(place / "elsewhere.py")
    (place / A).symlink_to(place / "elsewhere.py")


def _linked_folder(shop: Workshop, place: Path) -> None:
    (shop.root / "outside").mkdir()
    (place / "python/sglang/sub").symlink_to(shop.root / "outside")


@pytest.mark.parametrize(
    ("layout", "edit", "code", "message"),
    [
        ("folder", lambda s, p: p / "nowhere", 2, "no such folder"),
        ("folder", lambda s, p: p / A, 2, "no such folder"),
        ("folder", lambda s, p: s.root / "patches", 2, "is not an SGLang tree"),
        ("folder", _other_version, 2, "holds SGLang 0.9.9; there are patches for v1.0.0"),
        ("folder", _nothing_known, 2, "none of the files that the patches for v1.0.0 change"),
        ("checkout", lambda s, p: p / "python", 3, "is a folder inside the checkout"),
        ("checkout", lambda s, p: p / "python/sglang", 3, "is a folder inside the checkout"),
        ("checkout", lambda s, p: p / "python/sglang/srt", 3, "is a folder inside the checkout"),
        ("folder", lambda s, p: lay_out(p, {A: b"mine\n"}), 1, f"{A} (of head, tail, more): found"),
        ("folder", lambda s, p: lay_out(p, {NEW: b"mine\n"}), 1, f"{NEW} (of head, more): found"),
        ("folder", lambda s, p: lay_out(p, {B: None}), 1, "found no file"),
        ("checkout", lambda s, p: lay_out(p, {A: b"mine\n"}), 3, "it has local changes"),
        ("checkout", lambda s, p: lay_out(p, {A: None}), 3, "but not in the work tree"),
        ("checkout", lambda s, p: lay_out(p, {NEW: b"mine\n"}), 3, "a file of your own is where"),
        ("folder", lambda s, p: (p / A).chmod(0o444), 4, "is read-only"),
        ("folder", _link, 3, "is a symbolic link or lies behind one"),
        ("folder", _linked_folder, 3, "is a symbolic link or lies behind one"),
        ("folder", lambda s, p: (p / NEW).mkdir(parents=True), 3, "is a folder; a file was"),
    ],
)
def test_a_tree_that_is_not_ours_to_write(
    shop: Workshop,
    layout: str,
    edit: Edit,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = shop.tree(layout)
    other = edit(shop, place)
    refused(shop, other if isinstance(other, Path) else place, code, message, capsys)


def test_committed_content_that_is_not_the_pins_is_drift(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    lay_out(place, {A: numbered(40, l8="edited")})
    git(place, "commit", "-q", "-a", "-m", "an edit of mine")
    refused(shop, place, 1, "not v1.0.0 with any of our patches", capsys)
    assert shop.on(place, "status") == 1


@pytest.mark.parametrize("operation", ["rebase", "am", "merge", "cherry-pick"])
def test_an_operation_under_way_is_not_disturbed(
    shop: Workshop, operation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    other = "python/sglang/srt/x.py"
    for branch, text in (("left", b"x = 2\n"), ("right", b"x = 3\n")):
        git(place, "checkout", "-q", "-b", branch, "pin")
        lay_out(place, {other: text})
        git(place, "commit", "-q", "-a", "-m", branch)
    mail = git(place, *EXPORT)
    git(place, "checkout", "-q", "left")
    args = {"rebase": ["rebase", "right"], "am": IMPORT, "cherry-pick": ["cherry-pick", "right"]}
    with pytest.raises(AssertionError):
        git(place, *args.get(operation, ["merge", "right"]), data=mail)
    before = git(place, "status")
    assert shop.on(place, "apply") == 3
    assert "is under way" in capsys.readouterr().err
    assert git(place, "status") == before


def test_a_conflict_in_a_patched_file_is_a_rebase_not_drift(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    for branch, text in (("left", "1"), ("right", "2")):
        git(place, "checkout", "-q", "-b", branch, "pin")
        lay_out(place, {A: numbered(40, l20=text)})
        git(place, "commit", "-q", "-a", "-m", branch)
    with pytest.raises(AssertionError):
        git(place, "rebase", "left")
    refused(shop, place, 3, "a rebase is under way", capsys)


def test_an_operation_in_a_linked_work_tree_is_seen_and_a_run_with_nothing_to_do_is_let(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    linked = shop.root / "linked"
    git(shop.tree("checkout"), "worktree", "add", "-q", str(linked))
    folder = Path(git(linked, "rev-parse", "--absolute-git-dir").decode().strip())
    for name in ("REVERT_HEAD", "sequencer"):
        (folder / name).touch()
        refused(shop, linked, 3, "is under way", capsys)
        (folder / name).unlink()
    assert shop.on(linked, "apply") == 0
    (folder / "MERGE_HEAD").touch()
    assert shop.on(linked, "apply") == 0
    assert shop.on(linked, "reverse") == 3


def test_unrelated_local_changes_survive(shop: Workshop) -> None:
    place = shop.tree("checkout")
    lay_out(place, {"python/sglang/srt/x.py": b"x = 5\n", "notes.txt": b"mine\n"})
    lay_out(place, {"python/sglang/__init__.py": b"staged = 1\n"})
    git(place, "add", "python/sglang/__init__.py")
    before, status = snapshot(place), git(place, "status", "--porcelain")
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "status", "--porcelain") == status
    assert shop.on(place, "reverse", "--commit") == 0
    assert git(place, "status", "--porcelain") == status
    assert snapshot(place) == before


def test_a_tree_inside_another_repository_is_a_plain_folder(shop: Workshop) -> None:
    outer = shop.root / "outer"
    outer.mkdir()
    git(outer, "init", "-q")
    packages = lay_out(outer / ".venv/site-packages", shop.files, "python/")
    unpacked = lay_out(outer / "vendored", shop.files)
    for place in (packages, packages / "sglang", unpacked):
        assert shop.on(place, "apply") == 0
        assert shop.on(place, "reverse") == 0


def test_a_virtual_environment_inside_an_sglang_checkout_is_site_packages(shop: Workshop) -> None:
    place = shop.tree("checkout")
    packages = lay_out(place / ".venv/lib/site-packages", shop.files, "python/")
    before = snapshot(packages)
    assert shop.on(packages, "apply") == 0
    assert (place / A).read_bytes() == numbered(40)
    assert shop.on(packages, "reverse") == 0
    assert snapshot(packages) == before


def test_a_shallow_clone_and_a_linked_work_tree_work(shop: Workshop) -> None:
    place = shop.tree("checkout")
    git(place, "commit", "-q", "--allow-empty", "-m", "another")
    shallow, linked = shop.root / "shallow", shop.root / "linked"
    git(shop.root, "clone", "-q", "--depth", "1", f"file://{place}", str(shallow))
    git(place, "worktree", "add", "-q", str(linked))
    for copy in (shallow, linked):
        before = snapshot(copy)
        assert shop.on(copy, "apply", "--commit") == 0
        assert git(copy, "status", "--porcelain") == b""
        assert shop.on(copy, "reverse") == 0
        assert snapshot(copy) == before


def test_a_hostile_git_configuration_changes_nothing(
    shop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = shop.tree("checkout")
    assert shop.on(plain, "apply", "--commit") == 0
    wanted = git(plain, "rev-parse", "HEAD")
    place = shop.tree("checkout")
    mark, hook = tmp_path / "a-hook-ran", tmp_path / "hooks" / "any"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch {mark}\nexit 1\n")
    hook.chmod(0o755)
    for name in ("pre-commit", "commit-msg", "post-index-change", "reference-transaction"):
        shutil.copy(hook, hook.parent / name)
    settings = {
        "core.autocrlf": "true",
        "core.hooksPath": str(hook.parent),
        "core.fsmonitor": str(hook),
        "apply.whitespace": "fix",
        "diff.noprefix": "true",
        "diff.external": str(hook),
        "commit.gpgsign": "true",
        "gpg.program": str(hook),
        "alias.write-tree": "!false",
        "i18n.commitEncoding": "latin-1",
        "core.quotePath": "false",
    }
    for key, value in settings.items():
        git(place, "config", key, value)
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "no-such-repository"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(tmp_path / "no-such-index"))
    assert shop.on(place, "apply", "--commit") == 0
    monkeypatch.delenv("GIT_DIR", raising=False)
    monkeypatch.delenv("GIT_INDEX_FILE", raising=False)
    assert not mark.exists()
    assert git(place, "-c", "core.fsmonitor=false", "rev-parse", "HEAD") == wanted


def test_two_runs_at_once_are_kept_apart(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    holder = (
        "import fcntl, os, sys\n"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as other:
        assert other.stdout
        other.stdout.readline()
        assert shop.on(place, "apply") == 4
        assert "another run is at work here" in capsys.readouterr().err
        assert shop.on(place, "status") == 0
        assert other.stdin
        other.stdin.close()
    assert shop.on(place, "apply") == 0


def test_a_full_disk_is_named_and_nothing_is_changed(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.root / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=160k", "tmpfs", str(place)], check=False
    )
    if mounted.returncode != 0:
        pytest.skip("no right to mount a tmpfs; test_kills injects the same failure")
    try:
        lay_out(place, shop.files)
        filler = (place / "filler").open("wb", buffering=0)
        with pytest.raises(OSError, match="No space left"), filler:
            while True:
                filler.write(b"\0" * 4096)
        refused_before = snapshot(place)
        assert shop.on(place, "apply") == 4
        assert "the disk is full; nothing was changed" in capsys.readouterr().err
        assert snapshot(place) == refused_before
        (place / "filler").unlink()
        assert shop.on(place, "apply") == 0
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_file_that_changes_while_a_run_is_under_way_is_left_alone(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    stock = Tree.guard

    def edit_meanwhile(self: Tree, changes: Sequence[FileChange]) -> None:
        stock(self, changes)
        lay_out(place, {B: b"written meanwhile\n"})

    monkeypatch.setattr(Tree, "guard", edit_meanwhile)
    assert shop.on(place, "apply") == 3
    assert f"{B} changed while the run was under way" in capsys.readouterr().err
    assert (place / A).read_bytes() == numbered(40)
    assert (place / B).read_bytes() == b"written meanwhile\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system and becomes another user")
def test_what_check_lets_through_apply_can_write(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    other = place / "python/sglang/sub"
    other.mkdir()
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(other)]
    if subprocess.run(mount, check=False).returncode != 0:
        pytest.skip("no right to mount")
    try:
        refused(shop, place, 4, "is on another file system", capsys)
    finally:
        subprocess.run(["umount", str(other)], check=True)
    other.rmdir()
    for folder in (shop.root, *shop.root.parents[:-2]):
        folder.chmod(0o755)
    for command in ("check", "apply"):
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            os._exit(shop.on(place, command))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4


@pytest.mark.skipif(os.geteuid() != 0, reason="changes the owner of a file")
def test_the_owner_of_a_file_is_kept(shop: Workshop) -> None:
    place = shop.tree("folder")
    os.chown(place / A, 12345, 54321)
    shop.on(place, "apply")
    assert ((place / A).stat().st_uid, (place / A).stat().st_gid) == (12345, 54321)
    shop.on(place, "reverse")
    assert ((place / A).stat().st_uid, (place / A).stat().st_gid) == (12345, 54321)


def test_hard_links_to_a_package_cache_are_not_written_through(shop: Workshop) -> None:
    place = shop.tree("site-packages")
    cache = shop.root / "cache.py"
    os.link(place / "sglang/a.py", cache)
    assert shop.on(place, "apply") == 0
    assert cache.read_bytes() == numbered(40)
