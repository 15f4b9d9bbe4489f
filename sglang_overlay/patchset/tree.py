"""An SGLang source tree on disk, and the one writer of files in it.

The tree may be a checkout, an unpacked copy of one, or a ``site-packages``
folder. Writing needs no git: every new file lies complete beside the tree's
package before the first one is moved into place, a journal names them
meanwhile, and each move is a rename. So whenever a run dies, every file is
whole, either old or new, and blob ids tell which.
"""

import errno
import fcntl
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import EnvironmentFailure, UnsafeTree, Usage

if TYPE_CHECKING:
    from .checkout import Checkout

_JOURNAL = ".sglang-overlay"
_REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write",
    errno.EPERM: "the file system does not permit it",
}


@dataclass(frozen=True)
class FileChange:
    """One file's bytes as they are and as they shall be; ``None`` where there is no file."""

    path: str
    old: bytes | None
    new: bytes | None
    mode: str


#: What git has for a file: its mode and its blob.
Entry = tuple[str, str]


class Tree:
    """A tree at ``top``; its paths are a checkout's less ``prefix`` (``python/`` or nothing)."""

    layout = "folder"

    def __init__(self, top: Path, prefix: str = "") -> None:
        self.top = top
        self.prefix = prefix
        if prefix:
            self.layout = "site-packages"

    def locate(self, path: str) -> Path | None:
        """Where the checkout path ``path`` lies; ``None`` if this layout has no such place."""
        if not path.startswith(self.prefix):
            return None
        return self.top / path.removeprefix(self.prefix)

    def read(self, path: str) -> bytes | None:
        """The file's bytes, ``None`` when there is none.

        Raises ``UnsafeTree`` for a link or a folder on the way or in its place.
        """
        place = self.locate(path)
        assert place is not None, path
        if os.path.realpath(place) != str(place):
            raise UnsafeTree(f"{place} is a symbolic link or lies behind one")
        try:
            return place.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError as error:
            raise UnsafeTree(f"{place} is a folder; a file was expected") from error
        except OSError as error:
            raise _failure(error, place) from error

    def version(self) -> str | None:
        """The version that the tree says it has; ``None`` when it says nothing."""
        text = self.read("python/sglang/_version.py") or b""
        found = re.search(rb"^__version__ = .*'([^']+)'", text, re.MULTILINE)
        return found[1].decode() if found else None

    def committed(self, path: str) -> str | None:
        """The blob that is committed for ``path``; ``None`` where there is no git."""
        return None

    def repository(self) -> "Checkout":
        """The tree as a place for commits. Raises ``Usage`` where there is no git."""
        raise Usage(f"{self.top} is not a git checkout", "leave --commit out")

    def unstage(self, known: Mapping[str, Mapping[str, object]]) -> None:
        """Take blobs of ``known`` that are staged, but not committed, out of the index."""

    def idle(self) -> None:
        """Raise ``UnsafeTree`` when an operation is under way that writing would disturb."""

    def guard(self, changes: Sequence[FileChange]) -> None:
        """Raise when ``changes`` cannot, or should not, be written here now."""
        self.idle()
        device = self.top.stat().st_dev
        for place in map(self._place, changes):
            folder = next(f for f in place.parents if f.exists())
            for needed in (self.top, folder):
                if not os.access(needed, os.W_OK | os.X_OK):
                    raise EnvironmentFailure(f"{needed}: no permission to write in this folder")
            if folder.stat().st_dev != device:
                raise EnvironmentFailure(
                    f"{folder} is on another file system than {self.top}",
                    "copy the tree onto one file system, or use the overlay wheel",
                )
            if not place.exists():
                continue
            status = place.stat()
            if not status.st_mode & 0o222:
                raise EnvironmentFailure(f"{place} is read-only", f"chmod u+w {place}")
            if os.geteuid() not in (0, status.st_uid):
                raise EnvironmentFailure(f"{place} belongs to user {status.st_uid}, not to you")

    def interrupted(self) -> dict[str, Any] | None:
        """What a killed run was about (``command``, ``files``); ``None`` when none was."""
        journal = self.top / _JOURNAL
        try:
            names = {path.name for path in journal.iterdir()}
        except (FileNotFoundError, NotADirectoryError):
            return None
        if any(not name.isdigit() for name in names - {"journal.json"}):
            return None  # not ours
        try:
            table = json.loads((journal / "journal.json").read_bytes())
            lists = {key: [str(entry) for entry in table[key]] for key in ("files", "folders")}
            return {"command": str(table["command"]), **lists}
        except (OSError, ValueError, KeyError, TypeError):
            return {"command": "unknown", "files": [], "folders": []}

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other runs off this tree. Raises ``EnvironmentFailure`` if one is at work."""
        handle = os.open(self.top, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise EnvironmentFailure(f"{self.top}: another run is at work here") from error
            raise _failure(error, self.top) from error
        try:
            yield
        finally:
            os.close(handle)

    def write(self, changes: Sequence[FileChange], command: str) -> None:
        """Make ``changes``, all or none. Hold the lock.

        Raises ``UnsafeTree`` when a file is no longer what the plan saw, and
        ``EnvironmentFailure`` when the machine refuses; either way every file is
        as it was before.
        """
        places = [self._place(change) for change in changes]
        for change in changes:
            if self.read(change.path) != change.old:
                raise UnsafeTree(f"{change.path} changed while the run was under way")
        done: list[tuple[FileChange, os.stat_result | None]] = []
        try:
            self._sweep()
            if not changes:
                return
            self._stage(changes, places, command)
            for number, (change, place) in enumerate(zip(changes, places, strict=True)):
                done.append((change, place.stat() if place.exists() else None))
                self._move(number, place, change.new)
            for folder in {place.parent for place in places}:
                sync(folder)
            self._sweep()
        except BaseException as error:
            self._undo(done)
            if isinstance(error, OSError):
                raise _failure(error, self.top) from error
            raise

    def _place(self, change: FileChange) -> Path:
        place = self.locate(change.path)
        assert place is not None, change.path
        return place

    def _fragile_folders(self, changes: Sequence[FileChange]) -> list[str]:
        """The folders that must go if they end up empty: new ones, and those of deleted files."""
        folders = set()
        for change in changes:
            inside = self._place(change).relative_to(self.top).parents[:-1]
            folders |= {str(f) for f in inside if change.new is None or not (self.top / f).exists()}
        return sorted(folders)

    def _stage(self, changes: Sequence[FileChange], places: Sequence[Path], command: str) -> None:
        journal = self.top / _JOURNAL
        table = {
            "command": command,
            "files": [change.path for change in changes],
            "folders": self._fragile_folders(changes),
        }
        journal.mkdir()
        _put(journal / "journal.json", json.dumps(table).encode())
        for number, (change, place) in enumerate(zip(changes, places, strict=True)):
            if change.new is None:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            staged = journal / str(number)
            _put(staged, change.new)
            if place.exists():
                _own_like(staged, place.stat())
            elif change.mode == "100755":
                staged.chmod(staged.stat().st_mode | (staged.stat().st_mode & 0o444) >> 2)
        sync(journal)

    def _move(self, number: int, place: Path, content: bytes | None) -> None:
        if content is None:
            place.unlink()
        else:
            (self.top / _JOURNAL / str(number)).replace(place)

    def _undo(self, done: Sequence[tuple[FileChange, os.stat_result | None]]) -> None:
        """Put back what was ``done``; on a second failure the journal stays and names it."""
        spare = self.top / _JOURNAL / "0"
        try:
            for change, status in reversed(done):
                place = self._place(change)
                if self.read(change.path) == change.old:
                    continue  # the one that failed
                if change.old is None or status is None:
                    place.unlink()
                    continue
                _put(spare, change.old)
                _own_like(spare, status)
                spare.replace(place)
            self._sweep()
        except OSError as error:
            raise EnvironmentFailure(
                f"{self.top}: stopped half-way, and going back failed too: {error}",
                "mend that, then run apply or reverse again: either finishes it",
            ) from error

    def _sweep(self) -> None:
        """Remove the journal, its staged files and the empty folders that it names."""
        journal = self.top / _JOURNAL
        left = self.interrupted()
        if left is None:
            return
        for folder in reversed(left["folders"]):
            place = self.top / folder
            with suppress(OSError):
                if place.resolve().is_relative_to(self.top):
                    place.rmdir()
        for staged in journal.iterdir():
            if staged.name.isdigit():
                staged.unlink()
        (journal / "journal.json").unlink(missing_ok=True)
        journal.rmdir()


def open_tree(given: Path) -> Tree:
    """The tree that ``given`` names: a checkout's top, an unpacked tree, ``site-packages``
    or the ``sglang`` folder in it.

    Raises ``Usage`` when it is none of these, ``UnsafeTree`` for a folder inside a checkout.
    """
    if not given.is_dir():
        raise Usage(f"{given}: no such folder")
    top = given.resolve()
    repository = next((f for f in (top, *top.parents) if (f / ".git").exists()), None)
    if _is_sglang(top / "python"):
        if repository == top:
            from .checkout import Checkout

            return Checkout(top)
        return Tree(top)
    packages = top.parent if top.name == "sglang" else top
    inside = repository is not None and _is_sglang(repository / "python")
    if _is_sglang(packages) and not (inside and packages.parent == repository):
        return Tree(packages, "python/")
    if inside:
        raise UnsafeTree(
            f"{given} is a folder inside the checkout {repository}", f"--sglang-dir {repository}"
        )
    raise Usage(f"{given} is not an SGLang tree: no python/sglang and no sglang package in it")


def _is_sglang(packages: Path) -> bool:
    return (packages / "sglang" / "srt").is_dir() and (packages / "sglang/__init__.py").is_file()


def _put(file: Path, content: bytes) -> None:
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _own_like(file: Path, status: os.stat_result) -> None:
    """Give ``file`` the mode and owner that ``status`` says."""
    mine = file.stat()
    if (status.st_uid, status.st_gid) != (mine.st_uid, mine.st_gid):
        os.chown(file, status.st_uid, status.st_gid)
    file.chmod(status.st_mode & 0o7777)


def sync(path: Path) -> None:
    """Let what ``path``, a file or a folder, holds survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _failure(error: OSError, place: Path) -> EnvironmentFailure:
    reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
    where = error.filename2 or error.filename or place
    return EnvironmentFailure(f"{where}: {reason}; nothing was changed")
