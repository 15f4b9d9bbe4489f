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
from .header import Header, lint, name_and_mail, split_mail
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
    born = {patch.name: (patch.header.who, patch.header.date) for patch in patches}
    dates = Counter(born.values())
    births = {birth: name for name, birth in born.items() if dates[birth] == 1}
    if strangers := {*named} - {commit.id for commit in commits}:
        other = strangers.pop()
        raise Usage(f"--name {named[other]}={other[:10]}: not one of the commits since the pin")
    found: dict[str, Commit] = {}
    for commit in commits:
        name = named.get(commit.id) or subjects.get(commit.subject)
        name = name or births.get((name_and_mail(commit.author), commit.date))
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
    Raises ``Usage`` for what cannot be a patch, has another's subject or would not survive as
    a mail, ``Drift`` for a commit on content that no patches give, ``Conflict`` where a
    ``Depends-On`` is missing.
    """
    earlier = made.series.by_name
    for other in earlier.values():
        if other.header.subject == commit.subject:
            raise Usage(f"{commit} has the subject of {other.name}", "git commit --amend")
    files = [_file(made.series, change, commit, read(change.path)) for change in commit.changes]
    try:
        mail = _mail(commit, name, files, earlier, press)
        patch = parse_patch(name, mail, earlier)
    except DamagedPatchSet as error:
        raise Usage(f"{commit}: {error.message}", error.next_step) from error
    before = old.series.by_name.get(name)
    if before and _essence(before) == _essence(patch):
        mail = old.mails[name]
        patch = parse_patch(name, mail, earlier)
    else:
        if findings := lint(patch.header):
            raise Usage(f"{commit}: {'; '.join(findings)}", "git commit --amend, or git rebase -i")
        _survive(commit, mail, name, press)
    series = Series(made.series.pin, (*made.series.patches, patch))
    for file in files:
        _prove(commit, file, series.weaves[file.change.path], name)
    return PatchSet(series, {**made.mails, name: mail})


@dataclass(frozen=True)
class _File:
    """A file that the commit changes, and the patches that it ``held`` before."""

    change: FileChange
    weave: Weave
    pristine: bytes | None
    held: Subset


def _file(series: Series, change: FileChange, commit: Commit, pristine: bytes | None) -> _File:
    weave = series.weaves.get(change.path, Weave(change.path, ()))
    for subset in reversed(weave.subsets()):
        if weave.forward(pristine, subset) == change.old:
            return _File(change, weave, pristine, subset)
    raise Drift(
        f"{commit}: the {change.path} that it changes is neither the pin's nor the pin's with "
        "patches of the commits before it"
    )


def _mail(
    commit: Commit,
    name: str,
    files: Sequence[_File],
    earlier: Mapping[str, Patch],
    press: Press,
) -> bytes:
    """``commit`` as the mail of one that stands on the pristine pin and its ``Depends-On``."""
    mail = press.mail(commit.author, commit.date, commit.message, commit.changes)
    header, diff = split_mail(mail, name)
    if header.message.strip() != commit.message.strip():
        raise Usage(
            f"{commit}: its message would not survive as a mail; it is one line, an empty line, "
            "and text without lines that start with '--- ', 'diff -' or 'Index: '"
        )
    requires = _requires(commit, header, files, earlier)
    if all(requires >= {*file.held} for file in files):
        return mail
    moved, needs = [], frozenset[str]()
    for file, change in zip(files, parse_diff(diff, name), strict=True):
        more, there = _moved(file, Change(name, requires, change), requires)
        moved.append(there)
        needs |= more
    if needs := needs.difference(*(earlier[other].requires for other in needs)):
        names = ", ".join(sorted(needs))
        raise Conflict(
            f"{commit} changes lines that {names} changes, or stands beside",
            f"add 'Depends-On: {names}' to its message",
        )
    return press.mail(commit.author, commit.date, commit.message, moved)


def _survive(commit: Commit, mail: bytes, name: str, press: Press) -> None:
    """Raise ``Usage`` unless ``git am`` makes of ``mail`` what ``commit`` says and changes."""
    taken = press.taken(mail)
    if taken is None:
        raise Usage(
            f"{commit}: git am would take its mail for several: its message has a line that "
            "begins as a mail does ('From ...')",
            "git commit --amend, or git rebase -i",
        )
    _, diff = split_mail(mail, name)
    whole = (
        ("author", taken.author == commit.author),
        ("date", taken.date == commit.date),
        ("message", taken.message == commit.message),
        ("content", taken.diff == diff),
    )
    if lost := [what for what, kept in whole if not kept]:
        raise Usage(
            f"{commit}: git am would not give back its {' and '.join(lost)}; there may be no "
            "CRLF line end, no 'From: ' line at the start of the message, and no tab, double "
            "blank or blank at a line's end in it",
            "git commit --amend, or git rebase -i",
        )


def _requires(
    commit: Commit, header: Header, files: Sequence[_File], earlier: Mapping[str, Patch]
) -> frozenset[str]:
    """What the commit depends on, with all that those need, and stands on."""
    for other in header.depends_on:
        if other not in earlier:
            raise Usage(f"{commit}: depends on {other}, which is not before it")
    found = frozenset(header.depends_on).union(*(earlier[n].requires for n in header.depends_on))
    for file in files:
        if missing := {*file.weave.restrict(found)} - {*file.held}:
            names = ", ".join(sorted(missing))
            raise Usage(f"{commit}: depends on {names}, but does not stand on it")
    return found


def _moved(
    file: _File, change: Change, requires: frozenset[str]
) -> tuple[frozenset[str], FileChange]:
    """The change on the pristine file with ``requires`` alone, and nothing else; or with the
    fewest others that it cannot do without."""
    weave, path = file.weave, file.change.path
    more = [name for name in file.held if name not in requires]
    for extra in (e for size in range(len(more) + 1) for e in combinations(more, size)):
        onto = weave.restrict(requires | {*extra})
        if onto not in weave.subsets():
            continue
        try:
            new = weave.moved(file.pristine, change, file.held, onto)
        except DamagedPatchSet:
            continue
        old = weave.forward(file.pristine, onto)
        return frozenset(extra), FileChange(path, old, new, file.change.mode)
    raise AssertionError(f"{path}: the change does not fit where it was made")


def _essence(patch: Patch) -> tuple[object, ...]:
    """What makes two patches the same, however git cut their hunks."""
    files = sorted((diff.path, diff.before, diff.after, diff.mode) for diff in patch.diffs)
    return patch.header, files


def _prove(commit: Commit, file: _File, weave: Weave, name: str) -> None:
    """Raise unless patch ``name``, on what ``commit`` stood on, gives what it has."""
    try:
        content = weave.forward(file.pristine, (*file.held, name))
    except DamagedPatchSet as error:
        raise Conflict(f"{commit}: {error.message}", error.next_step) from error
    if content != file.change.new:
        raise Conflict(
            f"{commit}: {weave.path} cannot be told apart from {' + '.join(file.held)}",
            f"add 'Depends-On: {', '.join(file.held)}' to its message",
        )
