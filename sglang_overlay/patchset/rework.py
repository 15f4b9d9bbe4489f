"""Commits become patches again. Nothing is written here.

A commit was made on top of some patches of the series; its patch is written
against the pristine pin and what its ``Depends-On`` names, and nothing else. The
way from the one to the other is the weave's: a hunk goes where its lines are, by
identity. A commit that needs another patch's lines and does not say so is refused.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from .diff import parse_diff
from .errors import Conflict, DamagedPatchSet, Drift, Usage
from .header import Header, lint, split_mail
from .history import Commit, Press
from .series import NAME, Patch, Series, parse_patch, read_mail
from .tree import FileChange
from .weave import Change, Subset, Weave

#: Reads a pristine file; ``None`` where there is none.
Read = Callable[[str], bytes | None]


@dataclass(frozen=True)
class PatchSet:
    """A series, and each patch file's bytes by the patch's name."""

    series: Series
    mails: Mapping[str, bytes]

    def word(self, name: str, before: "PatchSet") -> str:
        """What became of ``name``: ``kept``, ``changed``, ``new`` or ``dropped``."""
        if name not in before.mails:
            return "new"
        if name not in self.mails:
            return "dropped"
        return "kept" if self.mails[name] == before.mails[name] else "changed"


def load(series: Series) -> PatchSet:
    """``series`` with the bytes on disk."""
    return PatchSet(series, {name: read_mail(series.pin, name) for name in series.names})


def check_name(name: str) -> None:
    """Raise ``Usage`` unless a patch may be called ``name``."""
    if not NAME.fullmatch(name):
        raise Usage(f"{name!r} is not a patch name (a-z, 0-9, '-')")


def attribute(
    commits: Sequence[Commit], known: Sequence[Patch], named: Mapping[str, str]
) -> list[tuple[str, Commit]]:
    """Which of the ``known`` patches each of ``commits`` is.

    ``named`` gives names by commit id. Else a commit is the patch with its subject, or the
    only one with its author and date, which survive a rewording. Where two patches have a
    name, the first counts. Raises ``Usage`` for a commit that is none, and for two that are
    the same.
    """
    patches = {patch.name: patch for patch in reversed(known)}.values()
    subjects = {patch.header.subject: patch.name for patch in patches}
    dates = Counter((p.header.author, p.header.date) for p in patches)
    births = {
        (p.header.author, p.header.date): p.name
        for p in patches
        if dates[p.header.author, p.header.date] == 1
    }
    found: dict[str, Commit] = {}
    for commit in commits:
        name = named.get(commit.id) or subjects.get(commit.subject)
        name = name or births.get((commit.author, commit.date))
        example = f"--name NAME={commit.id[:10]}"
        if name is None:
            raise Usage(f"{commit} is no patch of the series", f"name it: {example}")
        check_name(name)
        if name in found:
            raise Usage(f"{found[name]} and {commit} are both {name}", f"name one: {example}")
        found[name] = commit
    return list(found.items())


def remake(
    old: PatchSet, commits: Iterable[tuple[str, Commit]], press: Press, read: Read
) -> PatchSet:
    """The patch set that ``commits`` are, in their order. Raises as ``add`` does."""
    made = PatchSet(Series(old.series.pin, ()), {})
    for name, commit in commits:
        made = add(made, old, name, commit, press, read)
    return made


def add(
    made: PatchSet, old: PatchSet, name: str, commit: Commit, press: Press, read: Read
) -> PatchSet:
    """``made`` and ``commit`` as its last patch, called ``name``.

    A patch that ``old`` has with the same header and the same blobs keeps its bytes.
    Raises ``Usage`` for what cannot be a patch, ``Drift`` for a commit on content that
    no patches give, ``Conflict`` where a ``Depends-On`` is missing.
    """
    earlier = made.series.by_name
    try:
        mail = press.mail(commit.author, commit.date, commit.message, commit.changes)
        header, diff = split_mail(mail, name)
        diffs = {entry.path: entry for entry in parse_diff(diff, name)}
        _check_message(commit, header)
        requires = _requires(commit, header, earlier)
        weaves = {c.path: made.series.weaves.get(c.path, Weave(c.path, ())) for c in commit.changes}
        held = {c.path: _held(weaves[c.path], read(c.path), c, commit) for c in commit.changes}
        for path, weave in weaves.items():
            if missing := set(weave.restrict(requires)) - set(held[path]):
                names = ", ".join(sorted(missing))
                raise Usage(f"{commit}: depends on {names}, but does not stand on it")
        if any(set(held[path]) - requires for path in weaves):
            changes = {path: Change(name, frozenset(requires), diffs[path]) for path in weaves}
            moved = _moved(commit, changes, weaves, held, requires, read, earlier)
            mail = press.mail(commit.author, commit.date, commit.message, moved)
        patch = parse_patch(name, mail, earlier)
    except DamagedPatchSet as error:
        raise Usage(f"{commit}: {error.message}", error.next_step) from error
    before = old.series.by_name.get(name)
    if before and _essence(before) == _essence(patch):
        mail = old.mails[name]
        patch = parse_patch(name, mail, earlier)
    elif findings := lint(patch.header):
        raise Usage(f"{commit}: {'; '.join(findings)}", "git commit --amend, or git rebase -i")
    result = PatchSet(
        Series(made.series.pin, (*made.series.patches, patch)), {**made.mails, name: mail}
    )
    _prove(result, commit, held, read)
    return result


def _check_message(commit: Commit, header: Header) -> None:
    if header.message.strip() != commit.message.strip():
        raise Usage(
            f"{commit}: its message would not survive as a mail; it is one line, an empty line, "
            "and text without lines that start with '--- ', 'diff -' or 'Index: '"
        )


def _requires(commit: Commit, header: Header, earlier: Mapping[str, Patch]) -> frozenset[str]:
    for other in header.depends_on:
        if other not in earlier:
            raise Usage(f"{commit}: depends on {other}, which is not before it")
    return frozenset(header.depends_on).union(*(earlier[n].requires for n in header.depends_on))


def _held(weave: Weave, pristine: bytes | None, change: FileChange, commit: Commit) -> Subset:
    """The patches that the file has where ``commit`` starts."""
    for subset in reversed(weave.subsets()):
        if weave.forward(pristine, subset) == change.old:
            return subset
    raise Drift(
        f"{commit}: the {change.path} that it changes is neither the pin's nor the pin's with "
        "patches of the commits before it"
    )


def _moved(
    commit: Commit,
    changes: Mapping[str, Change],
    weaves: Mapping[str, Weave],
    held: Mapping[str, Subset],
    requires: frozenset[str],
    read: Read,
    earlier: Mapping[str, Patch],
) -> list[FileChange]:
    """The changes of ``commit`` as if it stood on the pristine pin and ``requires`` alone."""
    moved, needs = [], set[str]()
    for change in commit.changes:
        weave, path, pristine = weaves[change.path], change.path, read(change.path)
        known = weave.restrict(requires)
        more = [name for name in held[path] if name not in known]
        for extra in (e for size in range(len(more) + 1) for e in combinations(more, size)):
            onto = weave.restrict(requires | set(extra))
            if onto not in weave.subsets():
                continue
            try:
                new = weave.moved(pristine, changes[path], held[path], onto)
            except DamagedPatchSet:
                continue
            needs |= set(extra)
            moved.append(FileChange(path, weave.forward(pristine, onto), new, change.mode))
            break
    if needs := needs.difference(*(earlier[name].requires for name in needs)):
        names = ", ".join(sorted(needs))
        raise Conflict(
            f"{commit} changes lines that {names} changes, or stands beside",
            f"add 'Depends-On: {names}' to its message",
        )
    return moved


def _essence(patch: Patch) -> tuple[object, ...]:
    """What makes two patches the same, however git cut their hunks."""
    files = sorted((diff.path, diff.before, diff.after, diff.mode) for diff in patch.diffs)
    return patch.header, files


def _prove(made: PatchSet, commit: Commit, held: Mapping[str, Subset], read: Read) -> None:
    """Raise unless the last patch, on what ``commit`` stood on, gives what it has."""
    name = made.series.names[-1]
    for change in commit.changes:
        weave, subset = made.series.weaves[change.path], (*held[change.path], name)
        try:
            content = weave.forward(read(change.path), subset)
        except DamagedPatchSet as error:
            raise Conflict(f"{commit}: {error.message}", error.next_step) from error
        if content != change.new:
            raise Conflict(
                f"{commit}: {change.path} cannot be told apart from {' + '.join(subset[:-1])}",
                f"add 'Depends-On: {', '.join(subset[:-1])}' to its message",
            )
