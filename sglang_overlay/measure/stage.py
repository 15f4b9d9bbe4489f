"""Checks and times one candidate on one rank. Every rank is given the same orders."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from .candidates import Candidate, Tensor

EPS = 1e-6
TRIALS = 3


@dataclass(frozen=True)
class Meeting:
    """Where the ranks' processes meet: a torch ``TCPStore``; they wait ``seconds`` there."""

    host: str
    port: int
    seconds: float


class Stage:
    """A candidate, the inputs it is given, and the clock.

    A ``boundary`` is ``norm`` (all-reduce, residual, RMSNorm) or ``plain`` (the all-reduce).
    """

    def __init__(self, candidate: Candidate, meeting: Meeting) -> None:
        self.candidate, self.seat, self.meeting = candidate, candidate.seat, meeting
        self._cuda = self.seat.device.startswith("cuda")
        self._runs: dict[tuple[Any, ...], Callable[[], Any]] = {}
        self._kept: list[Any] = []

    def missing(self) -> str | None:
        """Why this rank cannot use the candidate."""
        if self._cuda:
            import torch

            torch.cuda.set_device(self.seat.device)
        return self.candidate.missing()

    def build(self) -> None:
        """Build and load its kernels."""
        self.candidate.build()

    def open(self) -> None:
        """Meet the other ranks, and make the communicator."""
        from datetime import timedelta

        import torch.distributed as dist

        store = dist.TCPStore(self.meeting.host, self.meeting.port, is_master=False)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(type(self.candidate).__name__, store),
            rank=self.seat.rank,
            world_size=self.seat.world,
            timeout=timedelta(seconds=self.meeting.seconds),
        )
        self.candidate.open()

    def refuses(self, rows: int) -> str | None:
        """Why the candidate does not take ``rows`` rows."""
        return self.candidate.refuses(self._given(rows)[0])

    def rehearse(self, boundary: str, rows: int, graph: bool) -> dict[str, float]:
        """The worst ``error`` against float64 of fresh random inputs, and the ``bound`` on it.

        An element's error is taken against its own size plus the typical size; the bound is
        eight units in the last place. Outputs hold NaN before each call.
        """
        import torch

        x, residual = self._given(rows)
        call, worst = self._boundary(boundary), 0.0
        outputs = call(x, residual)
        replay = self._capture(lambda: outputs.__setitem__(slice(None), call(x, residual)), graph)
        for trial in range(1, 1 + TRIALS):
            xs, r = self._inputs(rows, trial)
            _poison(outputs)
            if not graph:
                outputs.clear()  # so that the call is given their memory
            x.copy_(xs[self.seat.rank])
            residual.copy_(r)
            replay()
            for got, want in zip(outputs, self._wanted(boundary, xs, r), strict=True):
                off = (got.double().cpu() - want).abs() / (want.abs() + want.square().mean().sqrt())
                worst = max(worst, float(off.nan_to_num(torch.inf).max()))
        return {"error": worst, "bound": 8 * torch.finfo(self._dtype).eps}

    def perform(self, boundary: str, rows: int, graph: bool, calls: int, replays: int) -> float:
        """Microseconds for one boundary: the median of ``replays`` runs of ``calls`` of them."""
        import torch.distributed as dist

        key = (boundary, rows, graph, calls)
        if key not in self._runs:
            x, residual = self._given(rows)
            call = self._boundary(boundary)
            call(x, residual)

            def all_calls() -> None:
                for _ in range(calls):
                    call(x, residual)

            self._runs[key] = self._capture(all_calls, graph)
        dist.barrier()
        run = self._runs[key]
        return median(self._on_gpu(run, replays) if self._cuda else _on_cpu(run, replays)) / calls

    def launches(self, boundary: str, rows: int, calls: int) -> float:
        """Kernels, copies and fills for one boundary, in the graph that ``perform`` captured."""
        import torch.distributed as dist
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        run = self._runs[(boundary, rows, True, calls)]
        dist.barrier()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
            self._on_gpu(run, 1)
        on_gpu = [one for one in seen.events() if one.device_type == DeviceType.CUDA]
        return len(on_gpu) / (2 * calls)  # one run goes before

    def _capture(self, work: Callable[[], Any], graph: bool) -> Callable[[], Any]:
        """``work`` itself, or a replay of it."""
        if not graph:
            return work
        import torch

        torch.cuda.synchronize()
        captured = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog asks for events while this thread captures.
        with (
            self.candidate.capturing(),
            torch.cuda.graph(captured, capture_error_mode="thread_local"),
        ):
            work()
        self._kept += [captured, work]  # other ranks may hold addresses in both
        replay: Callable[[], Any] = captured.replay
        return replay

    def _on_gpu(self, run: Callable[[], Any], replays: int) -> list[float]:
        """Microseconds of each; one goes before, in which the ranks find each other."""
        import torch

        marks = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(replays)]
        run()
        for begin, end in marks:
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in marks]

    @property
    def _dtype(self) -> Any:
        import torch

        return getattr(torch, self.seat.dtype)

    def _inputs(self, rows: int, trial: int) -> tuple[list[Tensor], Tensor]:
        """Every rank's x and the residual, on the host; the same on every rank."""
        import torch

        draw = torch.Generator().manual_seed(1000 * rows + trial)
        shape = (rows, self.seat.hidden)
        drawn = [torch.randn(shape, generator=draw) for _ in range(self.seat.world + 1)]
        *xs, residual = (one.to(self._dtype) for one in drawn)
        return xs, residual

    def _given(self, rows: int) -> tuple[Tensor, Tensor]:
        """This rank's x and residual, on its device."""
        xs, residual = self._inputs(rows, 0)
        return xs[self.seat.rank].to(self.seat.device), residual.to(self.seat.device)

    def _weight(self) -> Tensor:
        import torch

        draw = torch.Generator().manual_seed(1)
        return (1 + torch.randn(self.seat.hidden, generator=draw) / 8).to(self._dtype)

    def _boundary(self, boundary: str) -> Callable[[Tensor, Tensor], list[Tensor]]:
        if boundary == "plain":
            return lambda x, residual: [self.candidate.plain(x)]
        weight = self._weight().to(self.seat.device)
        return lambda x, residual: self.candidate.norm(x, residual, weight, EPS)

    def _wanted(self, boundary: str, xs: list[Tensor], residual: Tensor) -> list[Tensor]:
        """The same in float64."""
        total = sum(x.double() for x in xs)
        if boundary == "plain":
            return [total]
        total = total + residual.double()
        scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return [total * scale * self._weight().double(), total]


def _poison(outputs: list[Tensor]) -> None:
    for output in outputs:
        output.fill_(float("nan"))


def _on_cpu(run: Callable[[], Any], replays: int) -> list[float]:
    """Microseconds of each."""
    times = []
    for _ in range(replays):
        begin = time.perf_counter_ns()
        run()
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return times
