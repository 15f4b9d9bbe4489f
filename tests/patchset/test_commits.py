"""``--commit`` makes the commits that ``git am`` makes of the same mails, and undoes them."""

import pytest

from ..conftest import IMPORT, git
from .conftest import A, B
from .workshop import Workshop, lay_out, snapshot

LOG = ["log", "--format=%T %an %ae %ad %s%n%b", "pin..HEAD"]


def test_the_commits_are_git_ams(shop: Workshop) -> None:
    mails = b"".join((shop.folder / f"{name}.patch").read_bytes() for name in shop.names)
    theirs = shop.tree("checkout")
    git(theirs, *IMPORT, data=mails)
    wanted = git(theirs, *LOG)
    ours = shop.tree("checkout")
    assert shop.on(ours, "apply", "--commit") == 0
    assert git(ours, *LOG) == wanted
    assert git(ours, "status", "--porcelain") == b""


def test_a_subset_is_committed_and_the_rest_later(shop: Workshop) -> None:
    place = shop.tree("checkout")
    assert shop.on(place, "apply", "--commit", "--only", "tail") == 0
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "log", "--format=%s", "pin..HEAD").decode().split("\n") == [
        "test: make more",
        "test: make head",
        "test: make tail",
        "",
    ]
    assert git(place, "status", "--porcelain") == b""


def test_what_was_applied_before_is_committed_on_request(shop: Workshop) -> None:
    place = shop.tree("checkout")
    assert shop.on(place, "apply") == 0
    assert git(place, "status", "--porcelain") != b""
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "status", "--porcelain") == b""
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "rev-list", "--count", "pin..HEAD") == b"3\n"


def test_reverse_commits_give_back_the_pristine_tree_id(shop: Workshop) -> None:
    place = shop.tree("checkout")
    before = snapshot(place)
    shop.on(place, "apply", "--commit")
    assert shop.on(place, "reverse", "--commit", "--only", "tail") == 0
    assert git(place, "log", "-1", "--format=%s") == b'Revert "test: make tail"\n'
    assert shop.on(place, "reverse", "--commit") == 0
    assert git(place, "rev-parse", "HEAD^{tree}") == git(place, "rev-parse", "pin^{tree}")
    assert git(place, "status", "--porcelain") == b""
    assert snapshot(place) == before


def test_on_a_branch_with_other_commits_nothing_else_moves(shop: Workshop) -> None:
    place = shop.tree("checkout")
    lay_out(place, {"python/sglang/srt/x.py": b"x = 7\n"})
    git(place, "commit", "-q", "-a", "-m", "mine")
    head = git(place, "rev-parse", "HEAD")
    git(place, "checkout", "-q", "--detach")
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "rev-parse", "HEAD~3") == head
    assert git(place, "rev-parse", "main") == head


def test_staged_changes_in_the_way_are_refused(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    pristine = (place / A).read_bytes()
    lay_out(place, {A: b"staged\n"})
    git(place, "add", A)
    lay_out(place, {A: pristine})
    before = git(place, "status", "--porcelain")
    assert shop.on(place, "apply", "--commit") == 3
    assert f"{A}: changes of your own are staged" in capsys.readouterr().err
    assert git(place, "status", "--porcelain") == before


def test_a_head_that_is_not_the_pins_is_drift(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    pristine = (place / B).read_bytes()
    lay_out(place, {B: b"mine\n"})
    git(place, "commit", "-q", "-a", "-m", "mine")
    lay_out(place, {B: pristine})
    git(place, "add", B)
    assert shop.on(place, "apply", "--commit") == 1
    assert f"{B}: HEAD has" in capsys.readouterr().err


@pytest.mark.parametrize(("layout", "code"), [("folder", 2), ("site-packages", 2)])
def test_there_is_nothing_to_commit_to_without_git(
    shop: Workshop, layout: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree(layout)
    before = snapshot(place)
    assert shop.on(place, "apply", "--commit") == code
    assert "is not a git checkout" in capsys.readouterr().err
    assert snapshot(place) == before


def test_a_repository_without_a_commit_is_refused(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    git(place, "init", "-q")
    assert shop.on(place, "apply", "--commit") == 3
    assert "no commit to build on" in capsys.readouterr().err
    assert shop.on(place, "apply") == 0


def test_only_what_is_asked_for_is_committed(shop: Workshop) -> None:
    place = shop.tree("checkout")
    shop.on(place, "apply", "--only", "tail")
    assert shop.on(place, "apply", "--commit", "--only", "head") == 0
    assert git(place, "log", "--format=%s", "pin..HEAD") == b"test: make head\n"
    assert git(place, "diff", "--name-only").decode().split() == [A, B, "python/sglang/old.py"]
    assert shop.on(place, "reverse", "--only", "tail") == 0
    assert git(place, "status", "--porcelain") == b""


def test_what_was_staged_of_the_patches_goes_with_them(shop: Workshop) -> None:
    place = shop.tree("checkout")
    for way in (["reverse"], ["reverse", "--commit"]):
        shop.on(place, "apply")
        git(place, "add", "-A")
        assert shop.on(place, *way) == 0
        assert git(place, "status", "--porcelain") == b""


def test_a_staged_deletion_and_a_committed_mode_are_kept(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    git(place, "rm", "-q", "--cached", B)
    assert shop.on(place, "apply", "--commit") == 3
    assert f"{B}: changes of your own are staged" in capsys.readouterr().err
    git(place, "reset", "-q")
    (place / A).chmod(0o755)
    git(place, "commit", "-q", "-a", "-m", "mode")
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "ls-tree", "HEAD", A).startswith(b"100755")
    assert shop.on(place, "reverse", "--commit") == 0
    assert git(place, "status", "--porcelain") == b""


def test_a_locked_branch_is_named_and_the_next_run_finishes(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    lock = place / ".git/refs/heads/main.lock"
    lock.touch()
    assert shop.on(place, "apply", "--commit") == 4
    assert "the files are written, but not committed" in capsys.readouterr().err
    lock.unlink()
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "rev-list", "--count", "pin..HEAD") == b"3\n"
    assert git(place, "status", "--porcelain") == b""


def test_a_locked_index_is_named_and_the_next_run_finishes(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    (place / ".git/index.lock").touch()
    before = snapshot(place)
    assert shop.on(place, "apply", "--commit") == 4
    assert "index.lock: another git is at work" in capsys.readouterr().err
    assert snapshot(place) == before
    (place / ".git/index.lock").unlink()
    assert shop.on(place, "apply", "--commit") == 0
    assert git(place, "status", "--porcelain") == b""
