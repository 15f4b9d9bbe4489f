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
