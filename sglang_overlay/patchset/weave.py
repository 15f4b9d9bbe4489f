"""Every version of a file that a subset of the patches gives, exactly.

A version is a list of line *identities*. A patch names places in the version it
was written against (the pristine file plus what it depends on); a place is
found again in another version by the identity of its lines, never by searching
for text. So a hunk goes to exactly one place or is refused, and the same
arithmetic runs forward (pristine text is known) and backward (it is not yet).
"""

from dataclasses import dataclass
from itertools import combinations

from .blobs import ABSENT, split_lines
from .diff import FileDiff, Hunk
from .errors import DamagedPatchSet

#: Names of the patches that are in a version, in series order.
Subset = tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """A patch's change to the file, and the patches of the same file that it needs."""

    patch: str
    requires: frozenset[str]
    diff: FileDiff


@dataclass(eq=False, slots=True)
class _Line:
    text: bytes | None = None
    added_by: str = ""
    removed_by: str = ""


@dataclass(frozen=True)
class Weave:
    """The versions of the file at ``path``; ``changes`` stand in series order."""

    path: str
    changes: tuple[Change, ...]

    def subsets(self) -> list[Subset]:
        """Every subset that holds what its members require, smallest first."""
        names = [change.patch for change in self.changes]
        needs = {change.patch: change.requires for change in self.changes}
        return [
            subset
            for size in range(len(names) + 1)
            for subset in combinations(names, size)
            if all(needs[name] <= set(subset) for name in subset)
        ]

    def restrict(self, names: frozenset[str]) -> Subset:
        """The members of ``names`` that change this file, in series order."""
        return tuple(change.patch for change in self.changes if change.patch in names)

    def forward(self, pristine: bytes | None, subset: Subset) -> bytes | None:
        """``pristine`` with ``subset`` applied; ``None`` is a file that does not exist.

        Raises ``DamagedPatchSet`` when a hunk does not fit.
        """
        return _text(_Versions(self, _base(pristine)).version(subset))

    def moved(
        self, pristine: bytes | None, change: Change, held: Subset, onto: Subset
    ) -> bytes | None:
        """The file with ``onto`` and ``change``, which was written against the file with ``held``.

        Raises ``DamagedPatchSet`` when lines that it names or stands between are not in both.
        """
        versions = _Versions(self, _base(pristine))
        current, wrote_against = versions.version(onto), versions.version(held)
        return _text(versions.apply(change, current, wrote_against, (*onto, change.patch)))

    def backward(self, content: bytes | None, subset: Subset) -> bytes | None:
        """The pristine file, from ``content`` that is known to hold ``subset``."""
        if not subset:
            return content
        lines = [] if content is None else split_lines(content)
        applied = [change.diff for change in self.changes if change.patch in subset]
        base = None
        if not any(diff.before == ABSENT for diff in applied):
            grown = sum(hunk.growth for diff in applied for hunk in diff.hunks)
            base = [_Line() for _ in range(len(lines) - grown)]
        version = _Versions(self, base).version(subset)
        for line, text in zip(version or [], lines, strict=True):
            line.text = text
        return _text(base)


def _base(pristine: bytes | None) -> list[_Line] | None:
    return None if pristine is None else [_Line(text) for text in split_lines(pristine)]


def _text(version: list[_Line] | None) -> bytes | None:
    return None if version is None else b"".join(line.text or b"" for line in version)


class _Versions:
    """Versions over one pristine line list, each built once."""

    def __init__(self, weave: Weave, base: list[_Line] | None) -> None:
        self._path = weave.path
        self._changes = {change.patch: change for change in weave.changes}
        self._versions: dict[Subset, list[_Line] | None] = {(): base}
        self._added: dict[tuple[str, int], list[_Line]] = {}

    def version(self, subset: Subset) -> list[_Line] | None:
        if subset not in self._versions:
            *others, name = subset
            change = self._changes[name]
            current = self.version(tuple(others))
            wrote_against = self.version(tuple(p for p in others if p in change.requires))
            self._versions[subset] = self.apply(change, current, wrote_against, subset)
        return self._versions[subset]

    def apply(
        self,
        change: Change,
        current: list[_Line] | None,
        wrote_against: list[_Line] | None,
        subset: Subset,
    ) -> list[_Line] | None:
        diff = change.diff
        if (wrote_against is None) != (diff.before == ABSENT) or (
            (current is None) != (wrote_against is None)
        ):
            raise self._damaged(change, "creates or deletes a file that another patch changes")
        result = list(current or ())
        # From the last hunk to the first, so that places ahead stay where they are.
        for number, hunk in reversed(list(enumerate(diff.hunks))):
            old = (wrote_against or [])[hunk.start : hunk.start + len(hunk.old)]
            if len(old) != len(hunk.old):
                raise self._damaged(change, f"hunk {number + 1} lies beyond the end")
            place = result.index(old[0]) if old and old[0] in result else 0
            # As git has it: a hunk at line 1 is at the beginning, one that ends in a change
            # at the end.
            end = place + len(old)
            loose = (hunk.start == 0 and place > 0) or (
                hunk.lines[-1][0] != " " and end < len(result)
            )
            if result[place:end] != old or loose:
                raise self._touches(change, number, old, result, subset)
            result[place:end] = self._woven(change, number, hunk, old)
        if diff.after == ABSENT:
            if result:
                raise self._damaged(change, "deletes the file but leaves lines of it")
            return None
        return result

    def _woven(self, change: Change, number: int, hunk: Hunk, old: list[_Line]) -> list[_Line]:
        """``hunk``'s new lines: its context kept, its additions new (the same each time)."""
        texts = [text for kind, text in hunk.lines if kind == "+"]
        added = self._added.setdefault(
            (change.patch, number), [_Line(text, change.patch) for text in texts]
        )
        before, after = iter(old), iter(added)
        woven = []
        for kind, text in hunk.lines:
            line = next(after if kind == "+" else before)
            if line.text is None:
                line.text = text
            if line.text != text:
                raise self._damaged(change, f"hunk {number + 1} does not match: {text!r}")
            if kind == "-":
                line.removed_by = change.patch
            else:
                woven.append(line)
        return woven

    def _touches(
        self, change: Change, number: int, old: list[_Line], result: list[_Line], subset: Subset
    ) -> DamagedPatchSet:
        """Name whose lines stand where ``old`` should, or who removed some of it."""
        here = {id(line) for line in result}
        others = {line.removed_by for line in old if id(line) not in here}
        if not others:  # all there, so lines stand between them, or before or after
            hunk = change.diff.hunks[number]
            first = 0 if hunk.start == 0 or not old else result.index(old[0])
            last = len(result) if hunk.lines[-1][0] != " " else result.index(old[-1])
            others = {line.added_by for line in result[first:last]}
        names = [name for name in subset[:-1] if name in others - change.requires]
        return self._damaged(
            change,
            f"hunk {number + 1} touches lines that {' and '.join(names) or 'another'} changes",
            f"rewrite it on top of that and add 'Depends-On: {', '.join(names)}'",
        )

    def _damaged(self, change: Change, why: str, step: str = "") -> DamagedPatchSet:
        return DamagedPatchSet(f"patch {change.patch}: {self._path}: {why}", step)
