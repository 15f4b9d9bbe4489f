"""A torch.profiler trace of an SGLang scheduler, cut into EAGLE cycles and their passes.

What the cut rests on, all of it in the trace of stock SGLang 0.5.23:

- ``scheduler.run_batch`` spans one batch on the scheduler's thread, ``draft`` and ``draft_extend``
  the drafter's passes in it, ``step[VERIFY bs=..]`` the target's forward, ``step[DECODE bs=..]``
  one without speculation. What is launched between ``draft`` and ``draft_extend`` (planning, the
  forward, sampling) is the verify pass.
- A GPU event and the CUDA call that launched it have one ``correlation``; the kernels of a CUDA
  graph have that of its ``cudaGraphLaunch``. So each kernel belongs to the pass in which it was
  launched, whenever the GPU came to run it.
"""

import gzip
import json
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..patchset.errors import Usage
from .kernels import kind_of

DRAFT, VERIFY, EXTEND, DECODE, OTHER = "draft", "verify", "extend", "decode", "other"
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_CALLS = {"cuda_runtime", "cuda_driver"}
Progress = Callable[[str, int, int], None]
Span = tuple[float, float]


@dataclass(frozen=True)
class Work:
    """One kernel, copy or fill on the GPU. Times in microseconds of the trace's clock."""

    name: str
    start: float
    end: float
    launched: float  # when the host called for it
    graph: bool  # by replaying a CUDA graph

    @property
    def kind(self) -> str:
        """One of ``kernels.KINDS``."""
        return kind_of(self.name)


@dataclass(frozen=True)
class Cycle:
    """One batch of the scheduler that verifies drafts, or decodes without speculation."""

    batch: Span  # scheduler.run_batch
    until: float  # when the next batch begins
    passes: tuple[tuple[str, float, float], ...]  # (name, start, end) on the host, in order
    size: int  # requests
    graph_launches: tuple[float, ...]
    work: tuple[Work, ...]  # by start

    def pass_of(self, moment: float) -> str:
        """The pass that the host was in at ``moment``."""
        return next((name for name, start, end in self.passes if start <= moment < end), OTHER)

    def then(self, after: "Cycle") -> bool:
        """Whether ``after`` is the scheduler's next batch."""
        return self.until == after.batch[0]

    @property
    def gpu_start(self) -> float | None:
        """When the GPU began with the first pass; ``None`` where no GPU was traced."""
        begun = (work.start for work in self.work if self.pass_of(work.launched) != OTHER)
        return min(begun, default=None)


def read(path: Path, progress: Progress = lambda what, done, total: None) -> list[dict[str, Any]]:
    """The events of the trace file ``path``, gzipped or not. Raises ``Usage`` if it is none."""
    pieces: list[bytes] = []
    try:
        total = path.stat().st_size
        with path.open("rb") as raw:
            packed = raw.peek(2)[:2] == b"\x1f\x8b"
            stream = gzip.GzipFile(fileobj=raw) if packed else raw
            while piece := stream.read(1 << 22):
                pieces.append(piece)
                progress(f"reading {path.name}", raw.tell(), total)
        events = json.loads(b"".join(pieces))["traceEvents"]
        return [event for event in events if event.get("ph") == "X"]
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise Usage(f"{path}: the file is cut off or damaged", "take the trace again") from error
    except OSError as error:
        raise Usage(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Usage(f"{path}: not a trace of torch.profiler") from error


def is_whole(path: Path) -> bool:
    """Whether the gzipped file ``path`` is there to its last byte."""
    try:
        with gzip.open(path) as stream:
            while stream.read(1 << 22):
                pass
    except (OSError, EOFError, zlib.error):
        return False
    return True


def cycles(events: Iterable[dict[str, Any]]) -> list[Cycle]:
    """The cycles in ``events`` that another batch follows, in order.

    Raises ``Usage`` where no scheduler of SGLang ran in the trace, or those of several.
    """
    spans: dict[str, list[Span]] = {"scheduler.run_batch": [], DRAFT: [], "draft_extend": []}
    steps: list[tuple[float, str, int]] = []
    launches: dict[int, tuple[float, bool]] = {}
    gpu: list[dict[str, Any]] = []
    processes = set()
    for event in events:
        category, name = event.get("cat"), event["name"]
        if category in _GPU:
            gpu.append(event)
        elif category in _CALLS:
            called = event["ts"], name.startswith(("cudaGraphLaunch", "cuGraphLaunch"))
            launches[event.get("args", {}).get("correlation", -1)] = called
        elif category == "user_annotation":
            if name in spans:
                spans[name].append((event["ts"], event["ts"] + event["dur"]))
                processes.add(event["pid"])
            elif name.startswith("step["):
                stage, _, size = name.removeprefix("step[").partition(" bs=")
                steps.append((event["ts"], stage, int(size.rstrip("]").split()[0])))
    if not spans["scheduler.run_batch"]:
        raise Usage("no scheduler.run_batch in the trace: not one of SGLang's scheduler")
    if len(processes) > 1:
        raise Usage("a merged trace of several ranks", "give one rank's file, ...-TP-0...")
    return _cut({name: sorted(found) for name, found in spans.items()}, steps, launches, gpu)


def _cut(
    spans: dict[str, list[Span]],
    steps: list[tuple[float, str, int]],
    launches: dict[int, tuple[float, bool]],
    gpu: list[dict[str, Any]],
) -> list[Cycle]:
    batches = spans["scheduler.run_batch"]
    starts = [start for start, _ in batches]
    work: list[list[Work]] = [[] for _ in batches]
    for event in gpu:
        called, graph = launches.get(event.get("args", {}).get("correlation"), (None, False))
        place = -1 if called is None else bisect_right(starts, called) - 1
        if called is not None and place >= 0:
            end = event["ts"] + event["dur"]
            work[place].append(Work(event["name"], event["ts"], end, called, graph))
    graphs = sorted(called for called, graph in launches.values() if graph)
    found = []
    for number, batch in enumerate(batches[:-1]):
        until = starts[number + 1]
        stages = {stage: (at, size) for at, stage, size in steps if batch[0] <= at < batch[1]}
        if "EXTEND" in stages or "MIXED" in stages or not {"VERIFY", "DECODE"} & set(stages):
            continue
        at, size = stages.get("VERIFY") or stages["DECODE"]
        passes = [(DECODE, *batch)]
        if "VERIFY" in stages:
            inside = {
                name: [span for span in spans[name] if batch[0] <= span[0] < batch[1]]
                for name in (DRAFT, "draft_extend")
            }
            passes = _passes(batch, at, inside[DRAFT], inside["draft_extend"])
        launched = tuple(moment for moment in graphs if batch[0] <= moment < until)
        ordered = tuple(sorted(work[number], key=lambda one: one.start))
        found.append(Cycle(batch, until, tuple(passes), size, launched, ordered))
    return found


def _passes(
    batch: Span, verify: float, drafts: Sequence[Span], extends: Sequence[Span]
) -> list[tuple[str, float, float]]:
    """The passes of a batch whose target's forward began at ``verify``."""
    begin = max((end for _, end in drafts if end <= verify), default=batch[0])
    end = min((start for start, _ in extends if start > verify), default=batch[1])
    passes = [(DRAFT, *span) for span in drafts] + [(EXTEND, *span) for span in extends]
    return sorted([*passes, (VERIFY, begin, end)], key=lambda one: one[1])
