"""Ways to do a layer boundary on the CPU: one that is right, and one for each way to be wrong."""

import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from sglang_overlay.measure.candidates import Candidate


class Sound(Candidate):
    """gloo's all-reduce, and torch."""

    def plain(self, x: Any) -> Any:
        dist.all_reduce(x)
        return x

    def norm(self, x: Any, residual: Any, weight: Any, eps: float) -> list[Any]:
        total = self.plain(x).float() + residual.float()
        out = torch.nn.functional.rms_norm(total, total.shape[-1:], weight.float(), eps)
        return [out.to(x.dtype), total.to(x.dtype)]


class Picky(Sound):
    def refuses(self, x: Any) -> str | None:
        return "two rows at most" if x.shape[0] > 2 else None


class MissingOnOneRank(Sound):
    def missing(self) -> str | None:
        return "not installed" if self.seat.rank == 1 else None


class FailsOnOneRank(Sound):
    def open(self) -> None:
        if self.seat.rank == 1:
            raise RuntimeError("no peer access")
        dist.barrier()


class DiesOnOneRank(Sound):
    def build(self) -> None:
        if self.seat.rank == 1:
            os._exit(7)


class HangsOnOneRank(Sound):
    def plain(self, x: Any) -> Any:
        if self.seat.rank == 1 and x.shape[0] == 3:
            time.sleep(3600)
        return super().plain(x)


class WrongOnOneRank(Sound):
    """One element of the last call, on one rank."""

    calls = 0

    def norm(self, x: Any, residual: Any, weight: Any, eps: float) -> list[Any]:
        out, total = super().norm(x, residual, weight, eps)
        self.calls += 1
        if self.seat.rank == 1 and self.calls == 4:
            out[0, -1] += 1
        return [out, total]


class LeavesAHole(Sound):
    """Writes all but the last element of its output."""

    def norm(self, x: Any, residual: Any, weight: Any, eps: float) -> list[Any]:
        out, total = super().norm(x, residual, weight, eps)
        if not hasattr(self, "out"):
            self.out = torch.zeros_like(out)
        self.out.view(-1)[:-1] = out.view(-1)[:-1]
        return [self.out, total]


KINDS = (Sound, Picky, MissingOnOneRank, FailsOnOneRank, DiesOnOneRank, HangsOnOneRank)
CANDIDATES: Mapping[str, str] = {
    kind.__name__: f"{__name__}:{kind.__name__}" for kind in (*KINDS, WrongOnOneRank, LeavesAHole)
}
