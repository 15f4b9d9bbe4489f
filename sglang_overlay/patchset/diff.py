"""The diff of a patch, read by unidiff and held to what this project allows."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from unidiff import patch as unidiff
from unidiff.errors import UnidiffParseError

from .blobs import ABSENT
from .errors import DamagedPatchSet

_INDEX = re.compile(r"index ([0-9a-f]{40})\.\.([0-9a-f]{40})(?: (\d{6}))?\n")
_CREATED = re.compile(r"(new|deleted) file mode (\d+)\n")
_MODES = ("100644", "100755")
_PATH = re.compile(r"[\w.+-]+(?:/[\w.+-]+)*", re.ASCII)
# unidiff decodes what it is fed; latin-1 maps every byte to one character and back.
_BYTES = "latin-1"


@dataclass(frozen=True)
class Hunk:
    """One hunk. ``start`` is its first old line, counted from 0 in the version
    that the patch was written against; ``lines`` are ``(' ' | '-' | '+', text)``."""

    start: int
    lines: tuple[tuple[str, bytes], ...]

    @property
    def old(self) -> list[bytes]:
        """The lines that must be there: context and removed."""
        return [text for kind, text in self.lines if kind != "+"]

    @property
    def growth(self) -> int:
        """Lines added less lines removed."""
        kinds = [kind for kind, _ in self.lines]
        return kinds.count("+") - kinds.count("-")


@dataclass(frozen=True)
class FileDiff:
    """What a patch does to one file: blobs before and after, mode, hunks.

    ``before`` is ``ABSENT`` for an added file, ``after`` for a deleted one.
    """

    path: str
    before: str
    after: str
    mode: str
    hunks: tuple[Hunk, ...]


def parse_diff(diff: bytes, name: str) -> tuple[FileDiff, ...]:
    """Read the git diff of patch ``name``.

    Every line is accounted for. Raises ``DamagedPatchSet`` for a diff that is
    cut or miscounted, for paths that leave the tree, and for what patches here
    never do: symlinks, submodules, binary files, renames, mode changes.
    """
    try:
        parsed = unidiff.PatchSet(diff.decode(_BYTES))
    except UnidiffParseError as error:
        raise DamagedPatchSet(f"patch {name}: {str(error).strip()}") from error
    files = tuple(_file(entry, name) for entry in parsed)
    understood = sum(len(entry.patch_info or ()) + _length(entry) for entry in parsed)
    if understood != diff.count(b"\n") or not diff.endswith(b"\n"):
        raise DamagedPatchSet(f"patch {name}: holds lines that belong to no hunk")
    paths = [file.path for file in files]
    for path in paths:
        if paths.count(path) > 1:
            raise DamagedPatchSet(f"patch {name}: changes {path} twice")
    return files


def _length(entry: unidiff.PatchedFile) -> int:
    """Lines that ``entry`` takes in the diff, its git header apart."""
    return 2 + sum(1 + len(hunk) for hunk in entry) if entry else 0


def _file(entry: unidiff.PatchedFile, name: str) -> FileDiff:
    first, *info = entry.patch_info or [""]
    path = entry.source_file.removeprefix("a/")
    if entry.source_file == "/dev/null":
        path = entry.target_file.removeprefix("b/")

    def refuse(why: str) -> DamagedPatchSet:
        return DamagedPatchSet(f"patch {name}: {path}: {why}")

    if first != f"diff --git a/{path} b/{path}\n":
        raise refuse("renames and unusual prefixes are not allowed")
    if not _PATH.fullmatch(path) or {".", "..", ".git", ".sglang-overlay"} & set(path.split("/")):
        raise refuse("the path leaves the tree or is not plain")
    if entry.is_binary_file:
        raise refuse("binary files are not allowed")
    created = _CREATED.fullmatch(info[0]) if len(info) == 2 else None
    index = _INDEX.fullmatch(info[-1]) if len(info) == 1 or created else None
    if index is None:
        raise refuse(
            "only an index line with two full blob ids may stand there: "
            "mode changes, renames and files without a change are not allowed"
        )
    before, after, mode = index[1], index[2], index[3] or (created and created[2])
    if mode not in _MODES:
        raise refuse(f"mode {mode} is not allowed: plain files only")
    how = created and created[1]
    if (before == ABSENT, after == ABSENT) != (how == "new", how == "deleted"):
        raise refuse("the index line and the file's state disagree")
    hunks = tuple(_hunk(hunk, refuse) for hunk in entry)
    if any(a.start + len(a.old) > b.start for a, b in pairwise(hunks)):
        raise refuse("its hunks overlap or are out of order")
    return FileDiff(path, before, after, mode, hunks)


def _hunk(hunk: unidiff.Hunk, refuse: Callable[[str], DamagedPatchSet]) -> Hunk:
    lines: list[tuple[str, bytes]] = []
    for line in hunk:
        if line.line_type == "\\":  # "No newline at end of file", of the line before
            if not lines:
                raise refuse("a hunk begins with '\\ No newline at end of file'")
            kind, last = lines[-1]
            lines[-1] = (kind, last.removesuffix(b"\n"))
        elif line.line_type:
            lines.append((line.line_type, line.value.encode(_BYTES)))
        else:
            raise refuse("an empty line follows a hunk")
    start = hunk.source_start - 1 if hunk.source_length else hunk.source_start
    if start > 0 and not any(kind == " " for kind, _ in lines):
        raise refuse(f"the hunk at line {start + 1} has no context (-U3)")
    return Hunk(start, tuple(lines))
