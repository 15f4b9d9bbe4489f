"""The patched SGLang's fused all-reduce between GPUs: votes, self-test, numbers, speed.

usage: torchrun --nproc-per-node 2 ci/gpu/fused_allreduce.py [--one-gpu] [--check] [--fail STAGE]

Runs what a server runs before capture and in a layer, on the path of SM120: on another GPU
SGLang's platform object is told that it is one. Without options: bring-up, and microseconds in
a graph, fused and not. `--check`: numbers against float64. `--fail`: the last rank fails at
STAGE, and every rank has to fall back with right sums, at two widths; after a self-test it may
keep nothing at the second. `--one-gpu`: all ranks on cuda:0, for
numbers and votes alone (a call takes milliseconds). The first bring-up builds FlashInfer's
module for minutes. FUSED_FAIL=STAGE in the environment does what `--fail` does. Exit 1 when a
RESULT is not ok.
"""

import argparse
import hashlib
import json
import logging
import os
import statistics
import sys
import time
from types import SimpleNamespace
from unittest.mock import patch

from sm120_server import STAGES, server

ROWS = (1, 2, 3, 4, 7, 8, 16, 33, 64)
HIDDEN = (2048, 4096, 6144, 7168)
TRIALS = 20
EPS = 1e-6
#: Half a rounding is the best there is, 2^-9 and 2^-12, and the mean is below it.
LIMIT = {"bfloat16": 0.004, "float16": 0.0006}
#: One element, against its size and a typical one's: three roundings.
ELEMENT_LIMIT = {"bfloat16": 3 * 2**-8, "float16": 3 * 2**-11}
CALLS_IN_GRAPH = 20


class Ranks:
    """This process among the others: SGLang's own group over them."""

    def __init__(self, one_gpu):
        import torch
        import torch.distributed as dist
        from sglang.srt.distributed.parallel_state import GroupCoordinator

        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.gpu = torch.cuda.is_available()
        local = 0 if one_gpu else int(os.environ["LOCAL_RANK"])
        self.device = torch.device("cuda", local) if self.gpu else torch.device("cpu")
        if self.gpu:
            torch.cuda.set_device(self.device)
        self.nccl = self.gpu and not one_gpu
        dist.init_process_group("gloo")
        kinds = ("pynccl", "mscclpp", "custom_allreduce", "torch_symm_mem_all_reduce")
        self.group = GroupCoordinator(
            group_ranks=[list(range(self.size))],
            local_rank=local,
            torch_distributed_backend="nccl" if self.nccl else "gloo",
            **{f"use_{kind}": False for kind in kinds},
            use_hpu_communicator=False,
            use_xpu_communicator=False,
            group_name="tp",
        )
        # What tagging does for the group that owns the workspace.
        self.group._fi_workspace_hint = "attn_tp"
        self.code = 0

    def gather(self, value):
        import torch.distributed as dist

        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.group.cpu_group)
        return values

    def result(self, **fields):
        """One line, from rank 0; what differs between ranks must be gathered before."""
        self.code |= not fields.get("ok", True)
        if self.rank == 0:
            print("RESULT", json.dumps({"name": "fused-allreduce", **fields}), flush=True)


def bring_up(ranks, hidden, dtype):
    """What a model runner does before it captures; the lines of SGLang's log, and seconds."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion
    from sglang.srt.model_executor.runner.base_runner import BaseRunner

    config = SimpleNamespace(hidden_size=hidden)
    runner = SimpleNamespace(model_runner=SimpleNamespace(model_config=config, dtype=dtype))
    lines, handler = [], logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    fusion.logger.addHandler(handler)
    fusion.logger.setLevel(logging.INFO)
    start = time.perf_counter()
    try:
        BaseRunner._pre_initialize_flashinfer_allreduce_workspace(runner)
    finally:
        fusion.logger.removeHandler(handler)
    return lines, round(time.perf_counter() - start, 2)


def taken(ranks):
    """MiB of this rank's GPU that are in use, torch's own apart; once every rank is here."""
    import torch

    ranks.gather(None)
    if not ranks.gpu:
        return 0
    free, total = torch.cuda.mem_get_info()
    return (total - free - torch.cuda.memory_reserved()) >> 20


def inputs(ranks, rows, hidden, dtype, trial):
    """This rank's x, the residual, and the float64 sum of everybody's x."""
    import torch

    def random(seed):
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(rows, hidden, generator=generator).to(dtype).to(ranks.device)

    seed = 1_000_003 * trial + 1009 * rows
    everyone = [random(seed + rank) for rank in range(ranks.size)]
    total = sum(x.double() for x in everyone)
    return everyone[ranks.rank], random(seed + 99), total


def gamma(ranks, hidden, dtype):
    import torch

    generator = torch.Generator().manual_seed(7)
    return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype).to(ranks.device)


def layer(x, residual, weight):
    """(norm, residual, plain sum): the two boundaries as a layer calls them."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion
    from sglang.srt.runtime_context import get_parallel

    norm, added = fusion.flashinfer_allreduce_residual_rmsnorm(
        input_tensor=x,
        residual=residual,
        weight=weight,
        eps=EPS,
        max_token_num=fusion.fuse_allreduce_max_batch_size(),
        use_attn_tp_group=True,
    )
    return norm, added, get_parallel().tp_group.all_reduce(x)


def errors(found, residual, total, weight):
    """Against float64: the relative errors of (norm, residual, sum), and their worst element's."""
    added = total + residual.double()
    norm = added / (added.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    whole, element = [], []
    for got, right in zip(found, (norm, added, total), strict=True):
        off = got.double() - right
        whole.append(float(off.norm() / right.norm()))
        element.append(float((off.abs() / (right.abs() + right.pow(2).mean().sqrt())).max()))
    return whole + element


def poisoned(tensor, **kwargs):
    import torch

    return torch.full_like(tensor, float("nan"), **kwargs)


def check(ranks, hidden, dtype):
    """Fresh inputs, outputs full of NaN before each call, eager and replayed from a graph."""
    import torch
    from sglang.srt.layers import flashinfer_fusion_bringup as bringup

    execution = bringup.CudaExecution()
    weight = gamma(ranks, hidden, dtype)
    name = str(dtype).removeprefix("torch.")
    for rows in ROWS:
        worst = {"eager": [0.0] * 6, "graph": [0.0] * 6}
        digest = hashlib.sha256()
        x, residual, _ = inputs(ranks, rows, hidden, dtype, 0)
        with patch.object(torch, "empty_like", poisoned):
            ranks.gather(None)
            replay, outputs = execution.record(lambda x=x, r=residual: layer(x, r, weight))
            for trial in range(TRIALS):
                fresh, fresh_residual, total = inputs(ranks, rows, hidden, dtype, trial)
                x.copy_(fresh)
                residual.copy_(fresh_residual)
                for how, found in (("eager", layer(x, residual, weight)), ("graph", outputs)):
                    if how == "graph":
                        replay()
                    execution.wait()
                    for tensor in found:
                        digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
                    error = errors(found, residual, total, weight)
                    # max() would drop a NaN.
                    worst[how] = [
                        new if not new <= old else old
                        for new, old in zip(error, worst[how], strict=True)
                    ]
        everyone = ranks.gather((worst, digest.hexdigest()))
        whole = [value for one, _ in everyone for six in one.values() for value in six[:3]]
        element = [value for one, _ in everyone for six in one.values() for value in six[3:]]
        alike = len({text for _, text in everyone}) == 1
        ranks.result(
            what="numbers against float64",
            hidden=hidden,
            dtype=name,
            rows=rows,
            trials=TRIALS,
            worst_norm_residual_sum={
                how: [round(value, 6) for value in six[:3]] for how, six in worst.items()
            },
            worst_of_all_ranks=round(max(whole), 6),
            worst_element_of_all_ranks=round(max(element), 6),
            ranks_bit_equal=alike,
            ok=alike
            and all(value <= LIMIT[name] for value in whole)
            and all(value <= ELEMENT_LIMIT[name] for value in element),
        )


def microseconds(ranks, launch):
    """A call inside a graph, the median of seven replays; the slowest rank's."""
    import torch
    from sglang.srt.layers import flashinfer_fusion_bringup as bringup

    execution = bringup.CudaExecution()
    launch()
    execution.wait()
    ranks.gather(None)
    replay, _ = execution.record(lambda: [launch() for _ in range(CALLS_IN_GRAPH)])
    times = []
    for _ in range(8 if ranks.nccl else 3):
        ranks.gather(None)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        end.record()
        execution.wait()
        times.append(start.elapsed_time(end) * 1e3 / CALLS_IN_GRAPH)
    return round(max(ranks.gather(statistics.median(times[1:]))), 2)


def speed(ranks, hidden, dtype):
    import torch
    import torch.distributed as dist
    from flashinfer.norm import fused_add_rmsnorm
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    weight = gamma(ranks, hidden, dtype)
    manager = fusion._get_workspace_manager(True)
    for rows in (1, 4, 16, 64):
        x, residual, _ = inputs(ranks, rows, hidden, dtype, 0)
        sums, copy = x.clone(), torch.zeros_like(residual)

        def nccl_and_norm(sums=sums, copy=copy):
            dist.all_reduce(sums, group=ranks.group.device_group)
            fused_add_rmsnorm(sums, copy, weight, EPS)

        def plain_and_norm(x=x, copy=copy):
            fused_add_rmsnorm(manager.allreduce(x), copy, weight, EPS)

        ranks.result(
            what="microseconds a call in a graph",
            hidden=hidden,
            rows=rows,
            one_gpu=not ranks.nccl,
            fused=microseconds(
                ranks,
                lambda x=x, r=residual: manager.allreduce_residual_rmsnorm(x, r, weight, EPS),
            ),
            plain=microseconds(ranks, lambda x=x: manager.allreduce(x)),
            plain_and_norm=microseconds(ranks, plain_and_norm),
            nccl_and_norm=microseconds(ranks, nccl_and_norm) if ranks.nccl else None,
        )


def decisions(ranks, hidden, dtype):
    """For each row count: whether the fused, and the plain kernel is used; all ranks alike."""
    import torch
    from sglang.srt.layers.layer_boundary.residual.add_norm import flashinfer_ar_fusion_applies

    found = {}
    for rows in (1, 64, 65):
        x = torch.ones(rows, hidden, dtype=dtype, device=ranks.device)
        plain = ranks.group._can_use_flashinfer_allreduce(x)
        sums = ranks.group.all_reduce(x.clone())
        right = bool((sums == ranks.size).all())
        found[rows] = [bool(flashinfer_ar_fusion_applies(rows)), plain, right]
    everyone = ranks.gather(found)
    return {"decisions": found, "ranks_alike": all(one == found for one in everyone)}


def run(ranks, options, hidden, dtype):
    from sglang.srt.layers import flashinfer_comm_fusion as fusion

    with server(ranks, options.fail):
        before = taken(ranks)
        lines, seconds = bring_up(ranks, hidden, dtype)
        kept = ranks.gather(taken(ranks) - before)
        off = fusion.is_flashinfer_allreduce_unavailable()
        found = decisions(ranks, hidden, dtype)
        expected = off == (options.fail is not None) and found["ranks_alike"]
        expected = expected and all(
            [fused, plain, right] == [not off and rows <= 64] * 2 + [True]
            for rows, (fused, plain, right) in found["decisions"].items()
        )
        # Not on one GPU, where a rank sees its peers' memory; the first width loads kernels.
        if options.fail in ("self-test", "replay") and ranks.nccl and hidden != options.hidden[0]:
            expected = expected and max(kept) <= 0
        ranks.result(
            what="bring-up",
            hidden=hidden,
            dtype=str(dtype).removeprefix("torch."),
            world_size=ranks.size,
            one_gpu=not ranks.nccl,
            fail=options.fail,
            off_on_ranks=sum(ranks.gather(off)),
            seconds=seconds,
            kept_mib=kept,
            **found,
            log=lines,
            ok=expected,
        )
        if not off:
            (check if options.check else speed)(ranks, hidden, dtype)
        # No rank unmaps what a peer's kernel may still write to.
        ranks.gather(None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--one-gpu", action="store_true", help="all ranks on cuda:0")
    parser.add_argument("--check", action="store_true", help="numbers instead of speed")
    parser.add_argument("--fail", choices=STAGES, default=os.environ.get("FUSED_FAIL") or None)
    parser.add_argument("--hidden", type=int, nargs="+", default=HIDDEN)
    parser.add_argument("--dtype", nargs="+", choices=LIMIT, default=None)
    options = parser.parse_args()
    if options.fail not in (None, *STAGES):
        parser.error(f"no stage {options.fail}; there is {', '.join(STAGES)}")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun --nproc-per-node 2")
    import torch

    names = options.dtype or (list(LIMIT) if options.check else ["bfloat16"])
    hidden = options.hidden[:2] if options.fail else options.hidden
    ranks = Ranks(options.one_gpu)
    with torch.inference_mode():
        for name in names:
            for width in hidden:
                run(ranks, options, width, getattr(torch, name))
    ranks.gather(None)
    torch.distributed.destroy_process_group()
    return ranks.code


if __name__ == "__main__":
    sys.exit(main())
