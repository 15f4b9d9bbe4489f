"""The layer boundary of tensor parallelism on this machine, by each way that SGLang has for it.

    torchrun --nproc-per-node 8 -m sglang_overlay.measure.collectives

An all-reduce, the residual and RMSNorm, for a few rows of a hidden state: what a decode or an
EAGLE verify pass does twice a layer. Needs torch, and SGLang and FlashInfer of the pin; of this
package it imports nothing that needs more. Each way runs in processes of its own, is checked
against float64 before it is timed, and is left out, with the reason, where one rank says so.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import combinations
from typing import Any

from ..patchset.errors import EnvironmentFailure, PatchsetError, Usage
from .candidates import CANDIDATES, Seat
from .ensemble import Cell, Plan, Table, measure

COMMAND = "torchrun --nproc-per-node N -m sglang_overlay.measure.collectives"
#: The names of NVML's topology levels, as ``nvidia-smi topo`` prints them.
_LINKS = {0: "INT", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print. Exit 1 when no candidate could be measured, else as everywhere."""
    args = _parser().parse_args(argv)
    rank = int(os.environ.get("RANK", "0"))
    try:
        seat, plan = _settle(args, rank)
        return _run(args, seat, plan)
    except PatchsetError as error:
        if rank == 0:
            print(f"error: {error.message}\n  next: {error.next_step}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=COMMAND,
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def option(name: str, kind: type, default: Any, text: str, **more: Any) -> None:
        parser.add_argument(name, type=kind, default=default, help=text, **more)

    option("--rows", str, "1,2,3,4,6,8,12,16,32,64", "row counts, with commas")
    option("--hidden", int, 7168, "the model's hidden size")
    option("--dtype", str, "bfloat16", "of the hidden states", choices=["bfloat16", "float16"])
    option(
        "--boundary", str, "norm", "with residual and RMSNorm, or not", choices=["norm", "plain"]
    )
    option("--boundaries", int, 122, "boundaries of one verify pass: twice the layers")
    option("--calls", int, 20, "boundaries in one CUDA graph")
    option("--replays", int, 11, "replays of it in one round; their median counts")
    option("--rounds", int, 5, "rounds, each candidate in turn; the median round counts")
    option("--timeout", float, 180, "seconds before a silent candidate is left out")
    option("--build-timeout", float, 1800, "the same while kernels are built")
    parser.add_argument("--one-gpu", action="store_true", help="two ranks on one GPU")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _settle(args: argparse.Namespace, rank: int) -> tuple[Seat, Plan]:
    """Raises ``Usage`` or ``EnvironmentFailure`` where there is nothing to measure."""
    try:
        import torch
    except ImportError as error:
        raise EnvironmentFailure(
            "torch is not installed here", f"beside SGLang: {COMMAND}"
        ) from error
    if not torch.cuda.is_available():
        raise EnvironmentFailure(
            "no CUDA device: torch sees none on this machine",
            f"on the machine with GPUs: {COMMAND}",
        )
    if "RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        raise Usage("one process is needed for each GPU", COMMAND)
    world, gpus = int(os.environ["WORLD_SIZE"]), torch.cuda.device_count()
    if world != int(os.environ["LOCAL_WORLD_SIZE"]):
        raise Usage("it measures one node, and torchrun started several", COMMAND)
    if world < 2 or (not args.one_gpu and world > gpus):
        raise Usage(f"{world} ranks on {gpus} GPUs", f"{COMMAND}, N from 2 to {gpus}, or --one-gpu")
    try:
        rows = tuple(sorted({int(text) for text in args.rows.split(",")}))
    except ValueError as error:
        raise Usage(
            f"--rows {args.rows}: not numbers with commas between", "--rows 1,4,8"
        ) from error
    if rows[0] < 1 or min(args.hidden, args.calls, args.replays, args.rounds) < 1:
        raise Usage("rows, --hidden, --calls, --replays and --rounds have to be positive", COMMAND)
    names = ("hidden", "dtype", "boundary", "rounds", "replays", "calls", "boundaries")
    chosen = {name: getattr(args, name) for name in (*names, "timeout", "build_timeout")}
    device = f"cuda:{0 if args.one_gpu else int(os.environ['LOCAL_RANK'])}"
    seat = Seat(rank, world, device, args.hidden, args.dtype, rows[-1], args.one_gpu)
    return seat, Plan(rows=rows, **chosen)


def _run(args: argparse.Namespace, seat: Seat, plan: Plan) -> int:
    import torch.distributed as dist

    # Before FlashInfer, which then builds where a server does, here and in the processes to come.
    with suppress(ImportError):
        import sglang  # noqa: F401
    dist.init_process_group("gloo")
    try:
        begun = time.monotonic()

        def tell(text: str) -> None:
            if seat.rank == 0:
                print(f"{time.monotonic() - begun:4.0f} s  {text}", file=sys.stderr, flush=True)

        tell("the first time, FlashInfer builds its trtllm module for minutes (273 s on 16 cores)")
        table = measure(plan, seat, CANDIDATES, tell)
        if seat.rank == 0:
            machine = _machine(1 if seat.one_gpu else seat.world)
            _print_json(machine, table) if args.json else _print_text(machine, table)
    finally:
        dist.destroy_process_group()
    return 0 if table.cells else 1


def _machine(gpus: int) -> dict[str, Any]:
    """What was measured on: GPUs, their links, and the versions that matter."""
    from importlib import metadata

    import torch

    def version(package: str) -> str | None:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            return None

    return {
        "gpus": [torch.cuda.get_device_name(n) for n in range(gpus)],
        **_from_nvml(gpus),
        "python": sys.version.partition(" ")[0],
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        **{name: version(name) for name in ("sglang", "sglang-kernel", "flashinfer-python")},
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "SGLANG_", "FLASHINFER_", "CUDA_VISIBLE", "PYTORCH_"))
        },
    }


def _from_nvml(gpus: int) -> dict[str, Any]:
    """The driver, and how each pair of GPUs is linked. Empty where NVML does not say."""
    import torch

    try:
        import pynvml as nvml
    except ImportError:
        return {}
    links = {}
    try:
        nvml.nvmlInit()
        uuids = [f"GPU-{torch.cuda.get_device_properties(n).uuid}" for n in range(gpus)]
        handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        for a, b in combinations(range(gpus), 2):
            pair = handles[a], handles[b]
            nvlink = nvml.nvmlDeviceGetP2PStatus(*pair, nvml.NVML_P2P_CAPS_INDEX_NVLINK)
            level = nvml.nvmlDeviceGetTopologyCommonAncestor(*pair)
            links[f"{a}-{b}"] = "NVLINK" if nvlink == 0 else _LINKS.get(level, str(level))
        return {"driver": nvml.nvmlSystemGetDriverVersion(), "links": links}
    except nvml.NVMLError as error:
        return {"nvml": str(error)}


def results(table: Table) -> list[dict[str, Any]]:
    """One value for each cell, and one for each candidate that is left out."""
    plan, values = table.plan, []
    shared = {"name": "collective", "world": table.world, "boundary": plan.boundary}
    shared |= {"hidden": plan.hidden, "dtype": plan.dtype}
    for cell in table.cells:
        value = {**shared, "candidate": cell.candidate, "rows": cell.rows}
        if cell.reason:
            value["reason"] = cell.reason
        for mode, us in cell.us.items():
            value[f"{mode}_us"] = round(us, 2)
            value[f"{mode}_bus_gb_s"] = round(table.bus_gb_s(cell.rows, us), 3)
            value[f"{mode}_verify_ms"] = round(table.verify_ms(us), 3)
        if cell.launches is not None:
            value["launches"] = round(cell.launches, 2)
        if cell.error is not None:
            value["worst_error"] = round(cell.error, 5)
        values.append(value)
    return values + [
        {**shared, "candidate": name, "left_out": reason} for name, reason in table.left_out.items()
    ]


def _print_json(machine: dict[str, Any], table: Table) -> None:
    value = {"machine": machine, "plan": asdict(table.plan), "results": results(table)}
    print(json.dumps(value, indent=2))


def _print_text(machine: dict[str, Any], table: Table) -> None:
    for mode in table.plan.modes:
        where = "in a CUDA graph" if mode == "graph" else "eager"
        _grid(f"microseconds a boundary, {where}", table, mode, lambda cell, us: us)
    first = table.plan.modes[0]
    _grid(
        f"bus bandwidth of the whole boundary, GB/s (2 (n - 1) / n x bytes / time), {first}",
        table,
        first,
        lambda cell, us: table.bus_gb_s(cell.rows, us),
    )
    _grid(
        f"projected: the {table.plan.boundaries} boundaries of one verify pass, ms, {first}",
        table,
        first,
        lambda cell, us: table.verify_ms(us),
    )
    counts: dict[str, set[float]] = {}
    for cell in table.cells:
        if cell.launches is not None:
            counts.setdefault(cell.candidate, set()).add(round(cell.launches, 2))
    for name, found in counts.items():
        print(f"launches a boundary: {name}: {', '.join(f'{count:g}' for count in sorted(found))}")
    for name, reason in table.left_out.items():
        print(f"left out: {name}: {reason}")
    for value in [{"name": "machine", **machine}, *results(table)]:
        print("RESULT", json.dumps(value))


def _grid(title: str, table: Table, mode: str, figure: Callable[[Cell, float], float]) -> None:
    names = list(dict.fromkeys(cell.candidate for cell in table.cells if cell.us))
    cells = {(cell.candidate, cell.rows): cell for cell in table.cells if mode in cell.us}
    lines = [["rows", *names, "fastest"]]
    for rows in table.plan.rows:
        row = [cells.get((name, rows)) for name in names]
        best = table.fastest(rows, mode)
        figures = [f"{figure(cell, cell.us[mode]):.2f}" if cell else "-" for cell in row]
        lines.append([str(rows), *figures, best.candidate if best else "-"])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(title)
    for line in lines:
        print("  " + "  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)))
    print()


if __name__ == "__main__":
    sys.exit(main())
