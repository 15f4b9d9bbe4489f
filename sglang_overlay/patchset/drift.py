"""What another SGLang makes of each patch. Everything is decided on the content of the hunks.

A line of the pinned file is followed into the other release by git's diff. A hunk
fits where all the lines that it names still stand side by side; it is upstreamed
where the lines that it would leave already do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .blobs import split_lines
from .diff import Hunk
from .history import Press
from .release import Release
from .rework import Read
from .series import Patch, Series
from .symbols import Symbol, enclosing, find_symbol, symbols
from .weave import Change, Weave

#: From the one that needs nothing to the one that needs most. ``not looked at`` is a patch of
#: files that the release's layout has no place for.
WORDS = ("clean", "offset", "not looked at", "upstreamed", "conflict", "obsolete")
_FITS = ("clean", "offset")
_TELLING = 12  # letters that added lines must have before their presence proves anything
_CONTEXT = 3


@dataclass(frozen=True)
class HunkVerdict:
    """One hunk (or a whole file, ``number`` 0) against the other release.

    ``line`` is where it stands in the pinned file, from 1. ``shift`` is by how many lines it
    moved; ``merges`` tells that a three-way merge takes it although the lines around it changed;
    ``likely`` names the probable new places. ``pristine``, ``patched`` and ``newer`` are the
    three ways of a hunk that does not fit.
    """

    path: str
    number: int
    line: int
    word: str
    shift: int = 0
    merges: bool = False
    symbol: str = ""
    likely: tuple[str, ...] = ()
    pristine: str = ""
    patched: str = ""
    newer: str = ""


@dataclass(frozen=True)
class PatchVerdict:
    """A patch: its hunks, and one word for all of them."""

    name: str
    subject: str
    hunks: tuple[HunkVerdict, ...]

    @cached_property
    def word(self) -> str:
        """The worst word of its hunks; ``upstreamed`` when all but its tests are."""
        words = {h.word for h in self.hunks}
        code = {h.word for h in self.hunks if not h.path.startswith("test/")} or words
        if code == {"upstreamed"}:
            return "upstreamed"
        if "upstreamed" in words:
            return max("conflict", *words, key=WORDS.index)  # the rest cannot go in as it is
        return max(words, key=WORDS.index, default="not looked at")

    @property
    def needs_action(self) -> bool:
        """Whether somebody has to look at it."""
        return self.word not in _FITS


@dataclass(frozen=True)
class _Alignment:
    """Where each line of one text is in another; ``None`` where it is not."""

    places: tuple[int | None, ...]
    size: int

    def run(self, start: int, count: int) -> int | None:
        """Where the ``count`` lines from ``start`` stand, if they stand side by side."""
        found = self.places[start : start + count]
        if count == 0:  # an empty text is found in an empty one alone
            return 0 if not self.places and self.size == 0 else None
        if not found or found[0] is None:
            return None
        return found[0] if list(found) == list(range(found[0], found[0] + count)) else None

    def around(self, start: int, count: int) -> tuple[int, int]:
        """The other text's lines between the nearest known neighbours of those lines."""
        before = [p for p in self.places[:start] if p is not None]
        after = [p for p in self.places[start + count :] if p is not None]
        return (before[-1] + 1 if before else 0), (after[0] if after else self.size)


class Judge:
    """Holds the patches of ``series`` against ``release``."""

    def __init__(self, series: Series, read: Read, release: Release, press: Press) -> None:
        self._series, self._read, self._release, self._press = series, read, release, press

    def patch(self, patch: Patch) -> PatchVerdict:
        """The verdict on one patch: every hunk in files that the release's layout has."""
        hunks: list[HunkVerdict] = []
        for path in (d.path for d in patch.diffs if self._release.holds(d.path)):
            weave, current = self._series.weaves[path], self._release.read(path)
            for change in weave.changes:
                if change.patch in patch.requires:
                    _, current = self._file(weave, change, current)
                elif change.patch == patch.name:
                    hunks += self._file(weave, change, current)[0]
        return PatchVerdict(patch.name, patch.header.subject, tuple(hunks))

    def _file(
        self, weave: Weave, change: Change, current: bytes | None
    ) -> tuple[list[HunkVerdict], bytes | None]:
        """The verdicts on one file, and the file with what fits of the change."""
        pristine, path, diff = self._read(weave.path), weave.path, change.diff
        base = weave.forward(pristine, weave.restrict(change.requires))
        patched = weave.forward(pristine, weave.restrict(change.requires | {change.patch}))
        if base is not None and patched is not None and current is not None:
            return self._hunks(path, diff.hunks, base, patched, current)
        if current == patched:
            return [HunkVerdict(path, 0, 1, "upstreamed")], current
        if current == base:
            return [HunkVerdict(path, 0, 1, "clean")], patched
        if current is None:
            gone = base or b""
            return [
                self._gone(path, number, hunk, gone) for number, hunk in _numbered(diff.hunks)
            ], None
        return [
            HunkVerdict(
                path,
                0,
                1,
                "conflict",
                pristine=_show(base),
                patched=_show(patched),
                newer=_show(current),
            )
        ], current

    def _gone(self, path: str, number: int, hunk: Hunk, base: bytes) -> HunkVerdict:
        symbol = _symbol(base, hunk)
        return HunkVerdict(
            path,
            number,
            hunk.start + 1,
            "obsolete",
            symbol=".".join(symbol),
            likely=tuple(self._release.likely(path, symbol)),
            pristine=_show(b"".join(hunk.old)),
            patched=_show(b"".join(_new(hunk))),
        )

    def _hunks(
        self, path: str, hunks: Sequence[Hunk], base: bytes, patched: bytes, current: bytes
    ) -> tuple[list[HunkVerdict], bytes]:
        before, after = self._align(base, current), self._align(patched, current)
        lines, verdicts = split_lines(current), []
        fits: list[tuple[int, Hunk]] = []
        merges: list[bytes] = []
        grown = 0
        for number, hunk in _numbered(hunks):
            start, old = hunk.start, hunk.old
            place = before.run(start, len(old))
            there = after.run(start + grown, len(_new(hunk)))
            grown += hunk.growth
            if place is None and there is None:
                place = _only_place(lines, old)
            if place is not None and _git_takes(hunk, place, len(lines), fits):
                fits.append((place, hunk))
                word = "clean" if place == start else "offset"
                verdicts.append(HunkVerdict(path, number, start + 1, word, shift=place - start))
            elif there is not None or _added_there(hunk, base, current, before):
                verdicts.append(HunkVerdict(path, number, start + 1, "upstreamed"))
            else:
                alone = _spliced(split_lines(base), [(start, hunk)])
                merged = self._press.merge(current, base, alone)
                merges += [] if merged is None else [alone]
                span = before.around(start, len(old))
                verdicts.append(
                    self._misfit(path, number, hunk, base, current, span, merged is not None)
                )
        content = _spliced(lines, fits)
        for alone in merges:
            content = self._press.merge(content, base, alone) or content
        return verdicts, content

    def _misfit(
        self,
        path: str,
        number: int,
        hunk: Hunk,
        base: bytes,
        current: bytes,
        span: tuple[int, int],
        merges: bool,
    ) -> HunkVerdict:
        symbol = _symbol(base, hunk)
        if symbol and not merges and find_symbol(current, symbol) is None:
            return self._gone(path, number, hunk, base)
        first, last = max(span[0] - _CONTEXT, 0), span[1] + _CONTEXT
        return HunkVerdict(
            path,
            number,
            hunk.start + 1,
            "conflict",
            merges=merges,
            symbol=".".join(symbol),
            pristine=_show(b"".join(hunk.old)),
            patched=_show(b"".join(_new(hunk))),
            newer=_show(b"".join(split_lines(current)[first:last])),
        )

    def _align(self, old: bytes, new: bytes) -> _Alignment:
        places: list[int | None] = []
        other = 0
        for start, count, place, more in self._press.compare(old, new):
            places += range(other, place)
            assert len(places) == start, (len(places), start)
            places += [None] * count
            other = place + more
        size = len(split_lines(new))
        places += range(other, size)
        return _Alignment(tuple(places), size)


def _numbered(hunks: Sequence[Hunk]) -> list[tuple[int, Hunk]]:
    return list(enumerate(hunks, 1))


def _new(hunk: Hunk) -> list[bytes]:
    return [text for kind, text in hunk.lines if kind != "-"]


def _spliced(lines: list[bytes], fits: Sequence[tuple[int, Hunk]]) -> bytes:
    lines = list(lines)
    for place, hunk in sorted(fits, key=lambda fit: fit[0], reverse=True):
        lines[place : place + len(hunk.old)] = _new(hunk)
    return b"".join(lines)


def _git_takes(hunk: Hunk, place: int, size: int, fits: Sequence[tuple[int, Hunk]]) -> bool:
    """Whether git applies ``hunk`` at ``place`` of ``size`` lines, after those that ``fits`` holds.

    As git has it: a hunk at line 1 stays at the beginning, one that ends in a change at the
    end, and no line belongs to two hunks.
    """
    end = place + len(hunk.old)
    loose = (hunk.start == 0 and place > 0) or (hunk.lines[-1][0] != " " and end < size)
    return not loose and all(
        end <= other or other + len(earlier.old) <= place for other, earlier in fits
    )


def _places(lines: list[bytes], wanted: list[bytes]) -> list[int]:
    """Every place where ``wanted`` stands in ``lines``; none for nothing."""
    starts = range(len(lines) - len(wanted) + 1) if wanted else range(0)
    return [place for place in starts if lines[place : place + len(wanted)] == wanted]


def _only_place(lines: list[bytes], wanted: list[bytes]) -> int | None:
    """Where ``wanted`` stands in ``lines``, if that is in one place only."""
    found = _places(lines, wanted)
    return found[0] if len(found) == 1 else None


def _added_there(hunk: Hunk, base: bytes, current: bytes, before: _Alignment) -> bool:
    """Whether upstream made the hunk's change in other surroundings: in the function or class
    that it changes, else between the lines around it, each run of lines that it adds stands more
    often than in ``base``, and the lines that it removes are gone."""
    runs: list[list[bytes]] = [[]]
    gone, place = True, hunk.start
    for kind, text in hunk.lines:
        if kind == "+":
            runs[-1].append(text)
            continue
        if kind == "-":
            gone = gone and before.places[place] is None
        elif runs[-1]:
            runs.append([])
        place += 1
    added = [run for run in runs if b"".join(run).strip()]
    telling = sum(chr(c).isalnum() for run in added for c in b"".join(run)) >= _TELLING
    if not telling or not gone:
        return False
    old, new = _surroundings(hunk, base, current, before)
    return all(len(_places(new, run)) > len(_places(old, run)) for run in added)


def _surroundings(
    hunk: Hunk, base: bytes, current: bytes, before: _Alignment
) -> tuple[list[bytes], list[bytes]]:
    """The lines around ``hunk`` in both texts: of its function or class where it is in one,
    else those between the nearest lines before and after it that both have."""
    olds, news = split_lines(base), split_lines(current)
    if symbol := _symbol(base, hunk):
        return _body(olds, base, symbol), _body(news, current, symbol)
    end = hunk.start + len(hunk.old)
    first = next((n for n in range(hunk.start, 0, -1) if before.places[n - 1] is not None), 0)
    last = next((n for n in range(end, len(olds)) if before.places[n] is not None), len(olds))
    start, stop = before.around(hunk.start, len(hunk.old))
    return olds[first:last], news[start:stop]


def _body(lines: list[bytes], source: bytes, symbol: Symbol) -> list[bytes]:
    """The lines of every function or class in ``source`` that is called ``symbol``."""
    spans = [(first, last) for name, first, last in symbols(source) if name == symbol]
    return [line for first, last in spans for line in lines[first - 1 : last]]


def _symbol(base: bytes, hunk: Hunk) -> Symbol:
    """The function or class around the lines that ``hunk`` changes."""
    places, line = [], hunk.start
    for kind, _ in hunk.lines:
        if kind == "+":
            places += [line, line + 1]  # the lines before and after, from 1
        else:
            line += 1
            places += [line] if kind == "-" else []
    return enclosing(base, min(places), max(places)) if base.strip() else ()


def _show(text: bytes | None) -> str:
    return "" if text is None else text.decode("utf-8", "replace")
