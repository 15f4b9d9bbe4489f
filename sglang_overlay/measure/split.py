"""Where the time of a cycle goes, from the cycles of a trace."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..patchset.errors import Usage
from .kernels import ALL_REDUCE, ATTENTION, COLLECTIVE, COPY, GEMM, REST
from .runs import Breakdown
from .trace import DECODE, DRAFT, EXTEND, OTHER, VERIFY, Cycle, Span

PASSES = (DRAFT, VERIFY, EXTEND, DECODE, OTHER)
_LONGER = "a longer window: --steps 16"
Label = tuple[str, str]  # (pass, kind of kernel)
Spent = dict[Label, float]  # microseconds
#: Who has a moment in which several kernels run: the first of these. So an all-reduce has only
#: what no computation hides, and what the scheduler copies beside a pass costs nothing.
_ORDER: tuple[Label, ...] = tuple(
    (name, kind)
    for name in (VERIFY, DRAFT, EXTEND, DECODE, OTHER)
    for kind in (ATTENTION, GEMM, REST, COPY, COLLECTIVE, ALL_REDUCE)
)


@dataclass(frozen=True)
class Pass:
    """One pass of a cycle. Numbers are means over the cycles, times milliseconds."""

    name: str
    gpu_ms: float  # its kernels run
    gap_ms: float  # nothing runs, and one of its kernels comes next
    host_ms: float  # the scheduler's thread is in it
    kernels: float
    all_reduces: float
    graph_launches: float
    mode: str  # graph, eager, "graph in 3 of 10"; "" where no GPU was traced
    kinds: Mapping[str, float] = field(default_factory=dict)  # of gpu_ms, by kind of kernel


@dataclass(frozen=True)
class Kernel:
    """All kernels of one name in a pass."""

    name: str  # without template and arguments
    kind: str
    count: float  # a cycle
    ms: float  # a cycle, all of them; beside each other they count twice
    each_us: float  # the median


@dataclass(frozen=True)
class Split:
    """The mean cycle of a trace. On a GPU, all ``gpu_ms`` and ``gap_ms`` make up ``cycle_ms``."""

    cycles: int
    batch_size: int  # the largest
    cycle_ms: float  # under the profiler, which slows the host down
    cycle_ms_all: tuple[float, ...]
    gpu: bool  # else the host alone was traced
    passes: tuple[Pass, ...]
    main_kernels: tuple[Kernel, ...]  # of the main pass, the longest first

    @property
    def all_reduces(self) -> tuple[Kernel, ...]:
        """Those of the main pass."""
        return tuple(one for one in self.main_kernels if one.kind == ALL_REDUCE)

    @property
    def main(self) -> Pass:
        """The verify pass, or the decode step."""
        return next(one for one in self.passes if one.name in (VERIFY, DECODE))

    def breakdown(self, cycle_ms: float | None = None) -> Breakdown:
        """What the store keeps. ``host`` is all of a cycle in which the GPU runs no pass.

        ``cycle_ms`` is that of a cycle without the profiler, which makes ``host`` longer.
        """
        kinds = dict.fromkeys((ALL_REDUCE, ATTENTION, GEMM, REST), 0.0)
        for kind, ms in self.main.kinds.items():
            kinds[kind if kind in kinds else REST] += ms
        phases = {one.name: one.gpu_ms for one in self.passes if one.name != OTHER}
        host = max((cycle_ms or self.cycle_ms) - sum(phases.values()), 0.0)
        return Breakdown(
            cycles=self.cycles,
            phases=phases | {"host": round(host, 4)},
            verify={kind: round(ms, 4) for kind, ms in kinds.items()},
            allreduces=self.main.all_reduces,
            graphs={one.name: one.mode for one in self.passes if one.name != OTHER},
        )


def split(cycles: Sequence[Cycle]) -> Split:
    """The mean of ``cycles`` but the first, in which the profiler was still starting.

    Raises ``Usage`` where no two of them follow each other.
    """
    if len(cycles) < 2:
        raise Usage("no whole cycle in the trace: nothing was decoded in its window", _LONGER)
    whole = [one for one, after in pairwise(cycles[1:]) if one.then(after)]
    if not whole:
        raise Usage("no two cycles follow each other in the trace", _LONGER)
    busy: Spent = defaultdict(float)
    gaps: Spent = defaultdict(float)
    windows = _windows(cycles[1:])
    labelled = [
        (work.start, work.end, (cycle.pass_of(work.launched), work.kind))
        for cycle in cycles
        for work in cycle.work
    ]
    for window, first in windows:
        inside = [one for one in labelled if one[0] < window[1] and one[1] > window[0]]
        _share(inside, window, (first, REST), busy, gaps)
    spans = [window for window, _ in windows] or [(one.batch[0], one.until) for one in whole]
    count = len(spans)
    names = [name for name in PASSES if any(name == p[0] for one in whole for p in one.passes)]
    passes = [
        _pass(name, whole, _per(busy, name, count), sum(_per(gaps, name, count).values()))
        for name in [*names, OTHER]
    ]
    lengths = tuple(round((end - start) / 1e3, 3) for start, end in spans)
    return Split(
        cycles=count,
        batch_size=max(one.size for one in whole),
        cycle_ms=round(statistics.fmean(lengths), 3),
        cycle_ms_all=lengths,
        gpu=bool(windows),
        passes=tuple(passes),
        main_kernels=_kernels(whole),
    )


def _windows(cycles: Sequence[Cycle]) -> list[tuple[Span, str]]:
    """Each cycle on the GPU, and the name of the pass that ends it: the next cycle's first.

    A cycle there lasts from the first kernel of its first pass to the next cycle's.
    """
    starts = [one.gpu_start for one in cycles]
    return [
        ((begun, ended), after.passes[0][0])
        for one, after, begun, ended in zip(cycles, cycles[1:], starts, starts[1:], strict=False)
        if one.then(after) and begun is not None and ended is not None
    ]


def _share(
    work: Iterable[tuple[float, float, Label]],
    window: Span,
    last: Label,
    busy: Spent,
    gaps: Spent,
) -> None:
    """Give each moment of ``window`` to one piece of ``work``, or to the gap before the next.

    The gap at the window's end is one before ``last``. Both tables are added to.
    """
    points = [(window[1], 0, last)]
    for start, end, label in work:
        points.append((max(start, window[0]), 1, label))
        points.append((min(end, window[1]), -1, label))
    running: Counter[Label] = Counter()
    before = window[0]
    for moment, change, label in sorted(points, key=lambda point: point[0]):
        if owner := next((one for one in _ORDER if running[one]), None):
            busy[owner] += moment - before
        else:
            gaps[label] += moment - before
        running[label] += change
        before = moment


def _per(counter: Spent, name: str, count: int) -> dict[str, float]:
    """Milliseconds a cycle by kind, of the pass ``name``."""
    mine = {kind: us / count / 1e3 for (owner, kind), us in counter.items() if owner == name}
    return {kind: round(ms, 4) for kind, ms in sorted(mine.items(), key=lambda one: -one[1]) if ms}


def _pass(name: str, cycles: Sequence[Cycle], kinds: dict[str, float], gap_ms: float) -> Pass:
    count = len(cycles)
    work = [one for cycle in cycles for one in cycle.work if cycle.pass_of(one.launched) == name]
    launches = [
        sum(cycle.pass_of(moment) == name for moment in cycle.graph_launches) for cycle in cycles
    ]
    host = sum(
        end - start for cycle in cycles for owner, start, end in cycle.passes if owner == name
    )
    if name == OTHER:
        inside = (end - start for cycle in cycles for _, start, end in cycle.passes)
        host = sum(cycle.until - cycle.batch[0] for cycle in cycles) - sum(inside)
    with_graph = sum(map(bool, launches))
    mode = {0: "eager", count: "graph"}.get(with_graph, f"graph in {with_graph} of {count}")
    return Pass(
        name=name,
        gpu_ms=round(sum(kinds.values()), 4),
        gap_ms=round(gap_ms, 4),
        host_ms=round(host / count / 1e3, 4),
        kernels=round(len(work) / count, 1),
        all_reduces=round(sum(one.kind == ALL_REDUCE for one in work) / count, 1),
        graph_launches=round(sum(launches) / count, 1),
        mode=mode if work and name != OTHER else "",
        kinds=kinds,
    )


def _kernels(cycles: Sequence[Cycle]) -> tuple[Kernel, ...]:
    """Those of the main pass, the longest first."""
    lasted: dict[Label, list[float]] = {}
    for cycle in cycles:
        for one in cycle.work:
            if cycle.pass_of(one.launched) in (VERIFY, DECODE):
                lasted.setdefault((_short(one.name), one.kind), []).append(one.end - one.start)
    found = [
        Kernel(
            name=name,
            kind=kind,
            count=round(len(times) / len(cycles), 1),
            ms=round(sum(times) / len(cycles) / 1e3, 4),
            each_us=round(statistics.median(times), 2),
        )
        for (name, kind), times in lasted.items()
    ]
    return tuple(sorted(found, key=lambda one: -one.ms))


def _short(name: str) -> str:
    """A kernel's name without what a template and its arguments add."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return plain.partition("<")[0].partition("(")[0].strip()[:60]
