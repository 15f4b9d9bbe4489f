"""Writes a patch set: the whole folder at once, so that no reader ever sees half of it.

The new folder lies complete beside the old one before the two change places, in one
step of the file system. A run that is killed leaves the old set or the new one.
"""

import ctypes
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from . import manifest
from .errors import Conflict, DamagedPatchSet, EnvironmentFailure
from .rework import PatchSet, Read
from .series import load_series
from .tree import sync

_STAGING = ".staging"
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


@contextmanager
def shelf_lock(patches: Path) -> Iterator[None]:
    """Keep other writers of ``patches`` out meanwhile. Raises ``EnvironmentFailure``."""
    handle = os.open(patches, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EnvironmentFailure(f"{patches}: another run is at work here") from error
    finally:
        os.close(handle)


def write(made: PatchSet, read: Read) -> bool:
    """Make ``made`` the content of its pin's folder, its manifest with it.

    Returns ``False``, and writes nothing, when it is there already. Hold ``shelf_lock``.
    Raises ``Conflict`` when two patches of it touch and neither says so, ``EnvironmentFailure``
    when the machine refuses; the folder is then as it was.
    """
    folder = made.series.pin.folder.resolve()  # beside what a link names
    staging = folder.parent / _STAGING
    staged = staging / folder.name
    try:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(folder, staged)
        _lay_out(made, staged)
        series = load_series(replace(made.series.pin, folder=staged))
        manifest.write(manifest.compute(series, read), staged)
        changed = _files(staged) != _files(folder)
        if changed:
            for path in (*staged.rglob("*"), staged):
                sync(path)
            _exchange(staged, folder)
            sync(folder.parent)
    except DamagedPatchSet as error:
        raise Conflict(error.message, error.next_step) from error
    except OSError as error:
        step = ""
        if error.errno in (errno.EXDEV, errno.EBUSY):
            step = f"have {folder} and {folder.parent} on one file system"
        message = f"{folder}: {error.strerror or error}; not changed"
        raise EnvironmentFailure(message, step) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return changed


def _lay_out(made: PatchSet, folder: Path) -> None:
    for file in folder.glob("*.patch"):
        if file.stem not in made.mails:
            file.unlink()
    for name, mail in made.mails.items():
        (folder / f"{name}.patch").write_bytes(mail)
    series = folder / "series"
    series.write_text(reordered(series.read_text("utf-8"), made.series.names), "utf-8")


def reordered(text: str, names: tuple[str, ...]) -> str:
    """The series file ``text`` with ``names`` in it; comments stay above the name they precede."""
    above: dict[str, str] = {}
    block = ""
    for line in text.splitlines(keepends=True):
        if line.strip() and not line.startswith("#"):
            above[line.strip()], block = block, ""
        else:
            block += line
    return "".join(f"{above.get(name, '')}{name}\n" for name in names) + block


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _exchange(one: Path, other: Path) -> None:
    """Let two folders change places in one step. Python has no call for it."""
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(
        _AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), ctypes.c_uint(_EXCHANGE)
    )
    if done != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"two folders cannot change places: {os.strerror(number)}")
