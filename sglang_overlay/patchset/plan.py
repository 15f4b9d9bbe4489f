"""What is applied in a tree, and what to write to change that. Nothing is written here."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from .blobs import ABSENT, blob_id, short
from .errors import DamagedPatchSet, Drift, UnsafeTree, Usage
from .manifest import Manifest
from .pin import Pin
from .series import Patch, Series
from .tree import Entry, FileChange, Tree
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
    there = [file for file in files.values() if file.content is not None]
    if there and all(file.crlf for file in there):
        absent = {p: replace(f, crlf=True) for p, f in files.items() if f.blob == ABSENT}
        files.update(absent)
    return TreeState(series, manifest, files)


def recognise(tree: Tree, pins: list[Pin], load: Callable[[Pin], TreeState]) -> TreeState:
    """The state of ``tree`` under the pin that it is of.

    The version that an installed or unpacked tree names decides. In a checkout that file is
    generated and not git's, so it may be another commit's, and a dirty or untagged build writes
    a ``.dev`` one: there the share of known blobs decides, of equals the pin that is named, then
    the newest. (Pins have many files in common: their number would favour the pin with more
    patches.) Raises ``Usage`` when there is no such pin.
    """
    told = tree.version()
    told = None if told and ".dev" in told else told
    named = [pin for pin in pins if pin.version == told]
    names = ", ".join(pin.name for pin in pins)
    other = Usage(f"{tree.top} holds SGLang {told}; there are patches for {names}")
    checkout = tree.layout == "checkout"
    if told and not named and not checkout:
        raise other
    states = [load(pin) for pin in (named if told and not checkout else pins)[::-1]]
    best = max(states, key=lambda state: (_recognised(state), state.series.pin in named))
    if told and not named and best.drifted:
        raise other
    if not named and not _recognised(best):
        raise Usage(f"{tree.top} holds none of the files that the patches for {names} change")
    return best


def _recognised(state: TreeState) -> float:
    """The share of files with content that we know, of those that are there or should be."""
    known = sum(f.holds is not None and f.content is not None for f in state.files.values())
    return known / (known + len(state.drifted)) if known else 0


def check_known(tree: Tree, state: TreeState, paths: set[str]) -> None:
    """Raise unless each of ``paths`` holds content that we know.

    ``UnsafeTree`` where git shows that the change is local, ``Drift`` otherwise.
    """
    wrong = [file for file in state.drifted if file.path in paths]
    if not wrong:
        return
    tree.idle()  # what a rebase leaves in a file is not drift
    file = wrong[0]
    versions = state.manifest.versions[file.path]
    pristine = state.manifest.blob(file.path, ())
    patches = ", ".join(c.patch for c in state.series.weaves[file.path].changes)
    found = f"{file.path} (of {patches}): found {short(file.blob)}, pin {short(pristine)}"
    if len(wrong) > 1:
        found += f" (and {len(wrong) - 1} more)"
    committed = tree.committed(file.path)
    if committed == ABSENT and file.content is not None:
        raise UnsafeTree(f"{found}: a file of your own is where a patch adds one", "move it away")
    if committed in versions and file.content is None:
        raise UnsafeTree(
            f"{found}: it is committed, but not in the work tree",
            f"git -C {tree.top} checkout -- {file.path}, or git sparse-checkout add its folder",
        )
    if committed in versions:
        raise UnsafeTree(
            f"{found}: it has local changes", f"git -C {tree.top} stash push {file.path}"
        )
    raise Drift(
        f"{found}: not {state.series.pin.name} with any of our patches. It was edited, or "
        "patched by another release of this patch set: reverse it with that one",
        f"to compare: sglang-overlay fetch --pin {state.series.pin.version} FOLDER",
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
            changes.append(FileChange(path, file.content, new, _mode(state, path)))
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
    tree: Tree,
    state: TreeState,
    committed: dict[str, Entry],
    chosen: frozenset[str],
    *,
    add: bool,
) -> list[Step]:
    """The commits that ``add`` what HEAD, whose entries are ``committed``, lacks of ``chosen``,
    first to last; or that take out what it has of them, last to first.

    Raises ``Drift`` when HEAD holds content that we do not know, and as
    ``check_known`` does for the work tree.
    """
    versions = state.manifest.versions
    for path, (_, blob) in committed.items():
        if blob not in versions[path]:
            raise Drift(f"{path}: HEAD has {short(blob)}, no version of {state.series.pin.name}")
    head = {path: frozenset(versions[path][blob]) for path, (_, blob) in committed.items()}
    patches = state.series.patches if add else state.series.patches[::-1]
    pristine: dict[str, bytes | None] = {}
    steps = []
    for patch in patches:
        here = [diff.path for diff in patch.diffs if diff.path in head]
        paths = [path for path in here if (patch.name in head[path]) != add]
        if patch.name not in chosen or not paths:
            continue
        check_known(tree, state, set(paths))
        changes = []
        for path in paths:
            if path not in pristine:
                pristine[path] = _pristine(state, path)
            names = head[path] | {patch.name} if add else head[path] - {patch.name}
            weave = state.series.weaves[path]
            old, new = (
                _version(state, path, pristine[path], weave.restrict(frozenset(held)))
                for held in (head[path], names)
            )
            mode = _mode(state, path) if old is None else committed[path][0]
            changes.append(FileChange(path, old, new, mode))
            head[path] = frozenset(names)
        steps.append(Step(patch, add, changes))
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


def _mode(state: TreeState, path: str) -> str:
    return state.series.weaves[path].changes[0].diff.mode
