"""What is applied in a tree, and what to write to change that. Nothing is written here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from .blobs import ABSENT, blob_id, short
from .errors import DamagedPatchSet, Drift, UnsafeTree, Usage
from .manifest import Manifest
from .pin import Pin
from .series import Patch, Series
from .tree import FileChange, Tree
from .weave import Subset


@dataclass(frozen=True)
class FileState:
    """One file as it is: its blob, and the patches in it (``None``: content we do not know).

    ``crlf`` tells that the bytes on disk are the known content with CRLF line ends,
    or would be, for a file that is not there.
    """

    path: str
    content: bytes | None
    blob: str
    holds: Subset | None
    crlf: bool = False


@dataclass(frozen=True)
class TreeState:
    """Every file of the series that the tree's layout has."""

    series: Series
    manifest: Manifest
    files: dict[str, FileState]

    def of_patch(self, name: str) -> str:
        """``applied``, ``not applied``, ``partial``, ``drifted``, or ``not for this layout``."""
        holds = [
            None if file.holds is None else name in file.holds
            for file in (self.files.get(diff.path) for diff in self.series.by_name[name].diffs)
            if file is not None
        ]
        if not holds:
            return "not for this layout"
        if None in holds:
            return "drifted"
        return "applied" if all(holds) else "partial" if any(holds) else "not applied"

    def of_file(self, name: str, path: str) -> str:
        """The same for one file of the patch."""
        file = self.files.get(path)
        if file is None:
            return "not for this layout"
        if file.holds is None:
            return "drifted"
        return "applied" if name in file.holds else "not applied"

    @cached_property
    def here(self) -> tuple[str, ...]:
        """The patches that change something in this layout."""
        return tuple(n for n in self.series.names if self.of_patch(n) != "not for this layout")

    @cached_property
    def applied(self) -> frozenset[str]:
        """The patches that are in, whole or in part."""
        return frozenset(n for f in self.files.values() for n in f.holds or ())

    @property
    def drifted(self) -> list[FileState]:
        """The files whose content is no version we know."""
        return [file for file in self.files.values() if file.holds is None]

    @property
    def word(self) -> str:
        """``pristine``, ``applied k of n``, ``complete``, ``drifted`` or ``mixed``."""
        states = [self.of_patch(name) for name in self.here]
        if "drifted" in states:
            return "drifted"
        if "partial" in states:
            return "mixed"
        count = states.count("applied")
        if count == 0:
            return "pristine"
        return "complete" if count == len(states) else f"applied {count} of {len(states)}"


def observe(tree: Tree, series: Series, manifest: Manifest) -> TreeState:
    """Read the state of ``tree`` from blob ids alone."""
    files = {}
    for path, versions in manifest.versions.items():
        if tree.locate(path) is None:
            continue
        content = tree.read(path)
        blob, crlf = blob_id(content), False
        if blob not in versions and content is not None:
            unix = content.replace(b"\r\n", b"\n")
            crlf = blob_id(unix) in versions and unix.replace(b"\n", b"\r\n") == content
            blob = blob_id(unix) if crlf else blob
        files[path] = FileState(path, content, blob, versions.get(blob), crlf)
    if any(file.crlf for file in files.values()):
        absent = {p: replace(f, crlf=True) for p, f in files.items() if f.blob == ABSENT}
        files.update(absent)
    return TreeState(series, manifest, files)


def recognise(tree: Tree, pins: list[Pin], load: Callable[[Pin], TreeState]) -> TreeState:
    """The state of ``tree`` under the pin that it is of.

    The version that the tree names decides; a checkout names none, and then the pin
    with the most known blobs does. Raises ``Usage`` when there is no such pin.
    """
    version = tree.version()
    states = [load(pin) for pin in pins if version in (None, pin.version)]
    names = ", ".join(pin.name for pin in pins)
    if not states:
        raise Usage(f"{tree.top} holds SGLang {version}; there are patches for {names}")
    best = max(states, key=lambda state: len(state.files) - len(state.drifted))
    if version is None and len(best.drifted) == len(best.files):
        raise Usage(f"{tree.top} holds none of the files that the patches for {names} change")
    return best


def check_known(tree: Tree, state: TreeState, paths: set[str]) -> None:
    """Raise unless each of ``paths`` holds content that we know.

    ``UnsafeTree`` where git shows that the change is local, ``Drift`` otherwise.
    """
    for file in state.drifted:
        if file.path not in paths:
            continue
        versions = state.manifest.versions[file.path]
        pristine = state.manifest.blob(file.path, ())
        patches = ", ".join(c.patch for c in state.series.weaves[file.path].changes)
        found = f"{file.path} (of {patches}): found {short(file.blob)}, pin {short(pristine)}"
        if tree.committed(file.path) in versions:
            raise UnsafeTree(
                f"{found}: it has local changes", f"git stash push {file.path}, or commit them"
            )
        raise Drift(
            f"{found}: not {state.series.pin.name} with any of our patches",
            f"compare it with the pin: sglang-overlay fetch {state.series.pin.name}",
        )


def plan(tree: Tree, state: TreeState, target: frozenset[str]) -> list[FileChange]:
    """What to write so that exactly ``target`` is applied.

    Raises as ``check_known`` does for a file that has to change.
    """
    wanted = {path: state.series.weaves[path].restrict(target) for path in state.files}
    check_known(tree, state, {p for p, f in state.files.items() if f.holds != wanted[p]})
    changes = []
    for path, file in state.files.items():
        if file.holds != wanted[path]:
            new = _version(state, path, _pristine(state, path), wanted[path])
            if file.crlf and new is not None:
                new = new.replace(b"\n", b"\r\n")
            changes.append(_change(state, path, file.content, new))
    return changes


@dataclass(frozen=True)
class Step:
    """One commit to make: ``patch`` is added, or taken out again."""

    patch: Patch
    added: bool
    changes: list[FileChange]

    @property
    def message(self) -> str:
        """The commit's message: the patch's own, or one that says what is undone."""
        if self.added:
            return self.patch.header.message
        return (
            f'Revert "{self.patch.header.subject}"\n\nsglang-overlay reverse: {self.patch.name}\n'
        )


def plan_commits(
    tree: Tree, state: TreeState, committed: dict[str, str], target: frozenset[str]
) -> list[Step]:
    """The commits after which HEAD, whose blobs are ``committed``, has exactly ``target``.

    Patches go out from the last to the first, then in from the first to the last.
    Raises ``Drift`` when HEAD holds content that we do not know, and as
    ``check_known`` does for the work tree.
    """
    versions = state.manifest.versions
    for path, blob in committed.items():
        if blob not in versions[path]:
            raise Drift(f"{path}: HEAD has {short(blob)}, no version of {state.series.pin.name}")
    head = {path: frozenset(versions[path][blob]) for path, blob in committed.items()}
    there = frozenset().union(*head.values())
    patches = state.series.patches
    moves = [(p, False) for p in reversed(patches) if p.name in there - target]
    moves += [(p, True) for p in patches if p.name in target]
    pristine: dict[str, bytes | None] = {}
    steps = []
    for patch, added in moves:
        paths = [
            d.path for d in patch.diffs if d.path in head and (patch.name in head[d.path]) != added
        ]
        check_known(tree, state, set(paths))
        changes = []
        for path in paths:
            if path not in pristine:
                pristine[path] = _pristine(state, path)
            names = head[path] | {patch.name} if added else head[path] - {patch.name}
            weave = state.series.weaves[path]
            old, new = (
                _version(state, path, pristine[path], weave.restrict(frozenset(held)))
                for held in (head[path], names)
            )
            changes.append(_change(state, path, old, new))
            head[path] = frozenset(names)
        if changes:
            steps.append(Step(patch, added, changes))
    return steps


@dataclass(frozen=True)
class Proof:
    """One file: the blob found, and the blob expected, made anew from the patches."""

    path: str
    found: str
    expected: str

    @property
    def holds(self) -> bool:
        """Whether the two are the same."""
        return self.found == self.expected


def prove(state: TreeState, target: frozenset[str]) -> list[Proof]:
    """Hold every file against ``target`` applied to the pristine file.

    The pristine file is made from what is on disk and must have the pin's blob; the
    patches are applied to it again. Nothing is taken from the manifest on trust but
    the pin's blobs. A file that we do not know is held against the manifest.
    """
    proofs = []
    for path, file in state.files.items():
        wanted = state.series.weaves[path].restrict(target)
        expected = state.manifest.blob(path, wanted)
        if file.holds is not None:
            expected = blob_id(_version(state, path, _pristine(state, path), wanted))
        proofs.append(Proof(path, file.blob, expected))
    return proofs


def _pristine(state: TreeState, path: str) -> bytes | None:
    file = state.files[path]
    content = file.content
    assert file.holds is not None, path
    if file.crlf and content is not None:
        content = content.replace(b"\r\n", b"\n")
    pristine = state.series.weaves[path].backward(content, file.holds)
    return _proved(state, path, pristine, ())


def _version(state: TreeState, path: str, pristine: bytes | None, subset: Subset) -> bytes | None:
    return _proved(state, path, state.series.weaves[path].forward(pristine, subset), subset)


def _proved(state: TreeState, path: str, content: bytes | None, subset: Subset) -> bytes | None:
    """``content``, once its blob is the manifest's. Raises ``DamagedPatchSet``."""
    expected = state.manifest.blob(path, subset)
    if blob_id(content) != expected:
        raise DamagedPatchSet(
            f"{path} with {' + '.join(subset) or 'no patch'}: made {short(blob_id(content))}, "
            f"the manifest says {short(expected)}",
            "sglang-overlay lint",
        )
    return content


def _change(state: TreeState, path: str, old: bytes | None, new: bytes | None) -> FileChange:
    return FileChange(path, old, new, state.series.weaves[path].changes[0].diff.mode)
