"""The ways to do a layer boundary between tensor-parallel ranks: all-reduce, residual, RMSNorm.

Each is what SGLang of the pin would run. All live in a process of their own (``stage``), so
that none can hang or break another. The heavy imports stand where they are used.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

#: A torch tensor; torch is no dependency of this package.
Tensor = Any


@dataclass(frozen=True)
class Seat:
    """Where one rank's process sits: its ``device``, and the shapes that it will see."""

    rank: int
    world: int
    device: str
    hidden: int
    dtype: str
    max_rows: int
    one_gpu: bool = False

    @property
    def index(self) -> int:
        """The CUDA device's number."""
        return int(self.device.partition(":")[2])


class Candidate:
    """One way. Every rank calls every method, in the same order."""

    name = ""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def missing(self) -> str | None:
        """Why this rank cannot use it, as far as the rank alone can tell."""
        return None

    def build(self) -> None:
        """Build and load its kernels."""

    def open(self) -> None:
        """Make its communicator; a collective. Raises ``RuntimeError`` when it is refused."""

    def refuses(self, x: Tensor) -> str | None:
        """Why it does not take ``x``: the same on every rank, for it looks at the shape alone."""
        return None

    def capturing(self) -> AbstractContextManager[Any]:
        """What has to be around a CUDA graph's capture."""
        return nullcontext()

    def plain(self, x: Tensor) -> Tensor:
        """The sum of ``x`` [rows, hidden] over the ranks; may overwrite ``x``."""
        raise NotImplementedError

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """RMSNorm of residual + sum of ``x``, and that sum; may overwrite both inputs."""
        raise NotImplementedError


class Unfused(Candidate):
    """An all-reduce, then SGLang's fused add and RMSNorm."""

    def missing(self) -> str | None:
        """SGLang and its kernels have to be there."""
        import sglang.srt.distributed.parallel_state  # noqa: F401
        from sgl_kernel import fused_add_rmsnorm

        self._add_norm = fused_add_rmsnorm
        return None

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """Two launches or more."""
        y = self.plain(x)
        self._add_norm(y, residual, weight, eps)
        return [y, residual]


class Nccl(Unfused):
    """NCCL as SGLang calls it."""

    name = "nccl"

    def missing(self) -> str | None:
        """NCCL refuses two ranks on one GPU."""
        return "NCCL refuses two ranks on one GPU" if self.seat.one_gpu else super().missing()

    def open(self) -> None:
        """SGLang's own NCCL communicator."""
        import torch.distributed as dist
        from sglang.srt.distributed.device_communicators.pynccl import PyNcclCommunicator

        with _heard("sglang") as said:
            self._nccl = PyNcclCommunicator(dist.group.WORLD, self.seat.device)
        if not self._nccl.available:
            raise RuntimeError(said[-1] if said else "NCCL could not be loaded")
        self._nccl.disabled = False  # SGLang switches it on where it uses it

    def plain(self, x: Tensor) -> Tensor:
        """In place."""
        self._nccl.all_reduce(x)
        return x


class CustomAllReduce(Unfused):
    """SGLang's custom all-reduce, of the version that SGLang picks here."""

    name = "custom"

    def missing(self) -> str | None:
        """A rank's buffers are on a GPU of its own."""
        return "SGLang wants a GPU for each rank" if self.seat.one_gpu else super().missing()

    def build(self) -> None:
        """The kernel of version 2, which SGLang builds at its first call and needs with NVLink.

        Where it cannot be built, ``open`` takes the other version or says what is wrong.
        """
        import torch
        from sglang.kernels.ops.communication.all_reduce import get_all_reduce_module

        with suppress(Exception):
            get_all_reduce_module(getattr(torch, self.seat.dtype), self.seat.world)

    def open(self) -> None:
        """Raises ``RuntimeError`` with what SGLang logged when SGLang refuses.

        Peer access is taken for granted, as by a server without ``--enable-p2p-check``.
        """
        import torch
        import torch.distributed as dist
        from sglang.srt.distributed.device_communicators import custom_all_reduce
        from sglang.srt.utils.common import monkey_patch_p2p_access_check

        monkey_patch_p2p_access_check()
        group, device = dist.group.WORLD, torch.device(self.seat.device)
        with _heard("sglang") as said:
            kind = custom_all_reduce.dispatch_custom_allreduce(group=group, device=device)
            self._reduce = kind(group=group, device=device)
        if self._reduce.disabled:
            raise RuntimeError(said[-1] if said else f"{kind.__name__} is disabled here")

    def refuses(self, x: Tensor) -> str | None:
        """SGLang's own rule."""
        return None if self._reduce.should_custom_ar(x) else "SGLang does not use it for this shape"

    def capturing(self) -> AbstractContextManager[Any]:
        """The inputs in the graph are shown to the other ranks afterwards."""
        context: AbstractContextManager[Any] = self._reduce.capture()
        return context

    def plain(self, x: Tensor) -> Tensor:
        """Into a new tensor."""
        return self._reduce.custom_all_reduce(x)


class PcieIpc(Unfused):
    """FlashInfer's PCIe-IPC all-reduce behind SGLang's communicator, tuned first."""

    name = "pcie-ipc"

    def missing(self) -> str | None:
        """SGLang gives it bfloat16 alone."""
        if self.seat.dtype != "bfloat16":
            return "SGLang uses it for bfloat16 alone"
        from flashinfer.comm import PcieIpcAllReduceWorkspace  # noqa: F401

        return super().missing() or _no_peer_access(self.seat)

    def build(self) -> None:
        """FlashInfer's ``pcie_ipc_comm`` module."""
        from flashinfer.comm.pcie_ipc_ar import get_pcie_ipc_comm_module

        get_pcie_ipc_comm_module()

    def open(self) -> None:
        """Workspace and tuning; tactics are kept in FlashInfer's own cache."""
        import torch
        import torch.distributed as dist
        from sglang.srt.distributed.device_communicators.pcie_ipc_ar import PcieIpcCommunicator

        seat, cpu = self.seat, dist.group.WORLD
        group = cpu if seat.one_gpu else dist.new_group(backend="nccl")
        with _heard("sglang") as said:
            self._ipc = PcieIpcCommunicator(group, torch.device(seat.device), cpu_group=cpu)
            self._ipc.prepare(hidden=seat.hidden, max_rows=seat.max_rows)
        if self._ipc.disabled:
            world = f"not between {seat.world} ranks"
            raise RuntimeError(said[-1] if said else world)

    def refuses(self, x: Tensor) -> str | None:
        """SGLang's own rule."""
        return None if self._ipc.should_pcie_ipc_ar(x) else "no kernel for this shape"

    def plain(self, x: Tensor) -> Tensor:
        """Into a new tensor."""
        return self._ipc.pcie_ipc_all_reduce(x)


class FusedTrtllm(Candidate):
    """FlashInfer's fused kernel: one-shot, completion at its end, sums in float32."""

    name = "fused-trtllm"

    def missing(self) -> str | None:
        """Rows are moved in packs of 16 bytes."""
        import flashinfer.comm as comm

        self._comm = comm
        if self.seat.hidden * 2 % 16:
            return f"hidden size {self.seat.hidden} is no multiple of 16 bytes"
        return _no_peer_access(self.seat)

    def build(self) -> None:
        """FlashInfer's ``trtllm_comm`` module: minutes, the first time."""
        from flashinfer.comm.trtllm_ar import get_trtllm_comm_module

        get_trtllm_comm_module()

    def open(self) -> None:
        """A workspace for ``max_rows`` rows."""
        import torch
        import torch.distributed as dist
        from flashinfer.comm.comm_backend import TorchDistBackend

        self._workspace = self._comm.create_allreduce_fusion_workspace(
            backend="trtllm",
            world_size=self.seat.world,
            rank=self.seat.rank,
            max_token_num=self.seat.max_rows,
            hidden_dim=self.seat.hidden,
            dtype=getattr(torch, self.seat.dtype),
            comm_backend=TorchDistBackend(dist.group.WORLD),
            group=dist.group.WORLD,
        )

    def plain(self, x: Tensor) -> Tensor:
        """Into a new tensor."""
        import torch

        out = torch.empty_like(x)
        self._run(x, self._comm.AllReduceFusionPattern.kAllReduce, output=out)
        return out

    def norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> list[Tensor]:
        """One launch."""
        import torch

        out, total = torch.empty_like(x), torch.empty_like(residual)
        self._run(
            x,
            self._comm.AllReduceFusionPattern.kARResidualRMSNorm,
            residual_in=residual,
            residual_out=total,
            norm_out=out,
            rms_gamma=weight,
            rms_eps=eps,
        )
        return [out, total]

    def _run(self, x: Tensor, pattern: int, **tensors: Any) -> None:
        self._comm.allreduce_fusion(
            input=x,
            workspace=self._workspace,
            pattern=pattern,
            launch_with_pdl=True,
            trigger_completion_at_end=True,
            use_oneshot=True,
            fp32_acc=True,
            **tensors,
        )


#: What is measured, in the order of the table's columns: where each class is, by name.
CANDIDATES = {
    kind.name: f"{__name__}:{kind.__name__}"
    for kind in (FusedTrtllm, Nccl, CustomAllReduce, PcieIpc)
}


def _no_peer_access(seat: Seat) -> str | None:
    import torch

    if seat.one_gpu:
        return None
    for peer in range(seat.world):
        if peer != seat.index and not torch.cuda.can_device_access_peer(seat.index, peer):
            return f"no peer access from GPU {seat.index} to GPU {peer}"
    return None


@contextmanager
def _heard(logger: str) -> Iterator[list[str]]:
    """The warnings of ``logger`` while it lasts: SGLang logs why it declines, and goes on."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(logger).addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger(logger).removeHandler(handler)
