"""A run that dies or fails at any step leaves a tree that is named and can be finished."""

import errno
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from ..conftest import git
from .conftest import NEW, OLD, A, B
from .workshop import Workshop, contents, snapshot

_EVENTS = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "subprocess.Popen"}


def killed_at(step: int, run: Callable[[], int]) -> bool:
    """Run in a child that is killed just before its ``step``-th change to the disk.

    ``fsync`` counts as a step too, so that a kill falls between a file's write and its
    arrival on the disk. False when the run ended before that step.
    """
    child = os.fork()
    if child == 0:
        steps = count(1)

        def step_on() -> None:
            if next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        def watch(event: str, args: tuple[object, ...]) -> None:
            writing = event == "open" and isinstance(args[2], int) and args[2] & os.O_WRONLY
            if event in _EVENTS or writing:
                step_on()

        fsync = os.fsync
        os.fsync = lambda handle: (step_on(), fsync(handle))[1]
        sys.addaudithook(watch)
        os._exit(run())
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0
    return False


@pytest.mark.parametrize("layout", ["folder", "site-packages"])
@pytest.mark.parametrize("command", ["apply", "reverse"])
def test_a_kill_at_any_step_leaves_whole_files_that_either_command_finishes(
    shop: Workshop, layout: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree(layout)
    pristine = snapshot(place)
    shop.on(place, "apply")
    complete = snapshot(place)
    wholes = {path: {entry} for path, entry in (pristine | complete).items() if entry}
    for path in wholes:
        wholes[path] |= {pristine.get(path), complete.get(path)}
    seen = set()
    for step, finish in ((s, f) for s in count(1) for f in ("apply", "reverse")):
        shop.on(place, "reverse" if command == "apply" else "apply")
        if not killed_at(step, lambda: shop.on(place, command)):
            break
        left = snapshot(place)
        for path, whole in wholes.items():
            assert left.get(path) in whole, (step, path)
        capsys.readouterr()
        shop.on(place, "status", "--json")
        result = json.loads(capsys.readouterr().out)
        seen.add(result["state"])
        assert result["interrupted"] or snapshot(place) in (pristine, complete), step
        assert shop.on(place, finish) == 0
        assert snapshot(place) == (complete if finish == "apply" else pristine), step
    assert step > 20
    assert seen == {"pristine", "mixed", "complete"}


def test_a_kill_at_any_step_of_a_commit_is_undone_by_reverse(shop: Workshop) -> None:
    for step in count(1):
        place = shop.tree("checkout")
        before = snapshot(place)
        done = not killed_at(step, lambda: shop.on(place, "apply", "--commit"))  # noqa: B023
        assert shop.on(place, "reverse", "--commit") == 0
        assert git(place, "rev-parse", "HEAD^{tree}") == git(place, "rev-parse", "pin^{tree}")
        assert git(place, "status", "--porcelain", "--ignored") == b"", step
        assert snapshot(place) == before
        if done:
            break


def test_a_kill_at_any_step_of_a_commit_is_finished_by_the_next_run(shop: Workshop) -> None:
    wanted = None
    for step in count(1):
        place = shop.tree("checkout")
        done = not killed_at(step, lambda: shop.on(place, "apply", "--commit"))  # noqa: B023
        if not done:
            assert shop.on(place, "status") in (0, 1)
            assert shop.on(place, "apply", "--commit") == 0
        head = git(place, "rev-parse", "HEAD")
        wanted = wanted or head
        assert head == wanted, step
        assert git(place, "status", "--porcelain", "--ignored") == b"", step
        git(place, "fsck", "--strict", "--no-dangling")
        if done:
            break
    assert step > 40


@pytest.mark.parametrize("layout", ["folder", "checkout"])
def test_a_failure_at_any_step_changes_nothing(
    shop: Workshop, layout: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree(layout)
    (place / OLD).chmod(0o750)  # which a patch deletes
    before = snapshot(place)
    for step in count(1):
        with monkeypatch.context() as patch:
            left = _fail_at(patch, step, once=True)
            code = shop.on(place, "apply")
        if left() > 0:
            break
        assert code == 4, step
        assert "the disk is full; nothing was changed" in capsys.readouterr().err
        assert snapshot(place) == before, step
    assert code == 0
    assert step > 20


def test_a_disk_that_stays_full_half_way_is_named_and_finished_later(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    before = snapshot(place)
    messages = set()
    for step in count(1):
        with monkeypatch.context() as patch:
            left = _fail_at(patch, step, once=False)
            code = shop.on(place, "apply")
        if left() > 0:
            break
        assert code == 4
        messages.add("half-way" in capsys.readouterr().err)
        assert shop.on(place, "reverse") == 0
        assert snapshot(place) == before
    assert messages == {True, False}
    assert contents(place) == shop.expected("head", "tail", "more")


@pytest.mark.parametrize("stubborn", [A, B, NEW, OLD])
def test_one_file_that_cannot_be_replaced_leaves_all_others_as_they_were(
    shop: Workshop,
    stubborn: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = shop.tree("folder")
    before = snapshot(place)
    replace, unlink = Path.replace, Path.unlink

    def refuse(file: Path) -> None:
        if file == place / stubborn:
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), str(file))

    def busy_replace(self: Path, target: Path) -> Path:
        refuse(target)
        return replace(self, target)

    def busy_unlink(self: Path, missing_ok: bool = False) -> None:
        refuse(self)
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", busy_replace)
        patch.setattr(Path, "unlink", busy_unlink)
        assert shop.on(place, "apply") == 4
    assert f"{place / stubborn}: Device or resource busy; nothing was" in capsys.readouterr().err
    assert snapshot(place) == before


def test_a_folder_of_the_users_with_the_journals_name_is_left_alone(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    (place / ".sglang-overlay").mkdir()
    (place / ".sglang-overlay/notes").write_text("mine")
    before = snapshot(place)
    assert shop.on(place, "apply") == 4
    assert "File exists; nothing was changed" in capsys.readouterr().err
    assert snapshot(place) == before


@pytest.mark.parametrize("journal", ["[1]", "{}", '{"command": "x", "files": [], "folders": 3}'])
def test_a_strange_journal_removes_nothing_outside(shop: Workshop, journal: str) -> None:
    place = shop.tree("folder")
    (place / ".sglang-overlay").mkdir()
    (place / ".sglang-overlay/journal.json").write_text(journal)
    assert shop.on(place, "status") == 0
    assert shop.on(place, "apply") == 0
    outside = shop.root / "outside"
    outside.mkdir()
    (place / ".sglang-overlay").mkdir()
    table = {"command": "apply", "files": [], "folders": ["../outside", str(outside)]}
    (place / ".sglang-overlay/journal.json").write_text(json.dumps(table))
    assert shop.on(place, "reverse") == 0
    assert outside.is_dir()


def _fail_at(patch: pytest.MonkeyPatch, step: int, once: bool) -> Callable[[], int]:
    """Make the ``step``-th write (and, unless ``once``, all later ones) find a full disk.

    Returns how many steps were left over.
    """
    left = [step]
    temporary = str(Path(tempfile.gettempdir()).resolve())

    def failing(real: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            if str(args[0]).startswith(f"{temporary}/tmp"):  # not the tree's: git's input
                return real(*args, **kwargs)
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and not once):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*args, **kwargs)

        return call

    for owner, name in ((Path, "mkdir"), (Path, "replace"), (Path, "unlink"), (os, "fsync")):
        patch.setattr(owner, name, failing(getattr(owner, name)))
    return lambda: left[0]
