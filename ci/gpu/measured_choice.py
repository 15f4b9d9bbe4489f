"""The measured choice of the all-reduce, by its own children, without a server.

    torchrun --nproc-per-node 2 measured_choice.py [--hidden 7168] [--draft-tokens 3]

Needs the patch ``allreduce-fusion-measured`` in SGLang. Prints the table as a server logs it
and one RESULT line: seconds until the children were ready, seconds of measuring, and whether
a second start took the table from the cache.
"""

import argparse
import json
import logging
import os
import tempfile
import time

import torch
import torch.distributed as dist
from sglang.srt.layers import allreduce_calibration, allreduce_choice, allreduce_measured
from sglang.srt.layers.allreduce_candidates import PLACES


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--without", default="", help="candidates to leave away, with commas")
    args = parser.parse_args()
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    if rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ["SGLANG_CACHE_DIR"] = folder[0]
    places = {name: place for name, place in PLACES.items() if name not in args.without.split(",")}

    ready: list[float] = []
    measure_rows = allreduce_calibration.Calibration._measure_rows

    def timed(calibration, *rest):  # type: ignore[no-untyped-def]
        ready.append(time.monotonic())
        return measure_rows(calibration, *rest)

    allreduce_calibration.Calibration._measure_rows = timed
    begin = time.monotonic()
    start(args, places, rank)
    end = time.monotonic()
    table = allreduce_choice.installed()
    allreduce_choice.install(None)
    start(args, places, rank)
    if rank == 0:
        result = {
            "name": "measured-choice",
            "gpu": torch.cuda.get_device_name(0),
            "world": dist.get_world_size(),
            "ready_s": round(ready[0] - begin, 1) if ready else None,
            "measured_s": round(end - ready[0], 1) if ready else None,
            "rows": sorted(table.plain),
            "left_out": table.left_out,
            "plain": table.plain_ranges,
            "norm": table.norm_ranges,
            "cached": time.monotonic() - end < 5 and allreduce_choice.installed() == table,
        }
        print("RESULT", json.dumps(result), flush=True)
    dist.barrier()


def start(args: argparse.Namespace, places: dict[str, str], rank: int) -> None:
    """What a server does around the loading of its weights."""
    allreduce_measured.Measurement(
        dist.group.WORLD,
        places,
        [name for name in ("custom", "nccl") if name in places],
        allreduce_measured.machine_facts(),
        args.hidden,
        torch.bfloat16,
        f"cuda:{rank}",
        allreduce_measured.row_counts(64, args.draft_tokens, 8),
        900.0,
        20.0,
    ).finish()


if __name__ == "__main__":
    main()
