"""The measured choice of the all-reduce, by its own children, without a server.

    torchrun --nproc-per-node 2 measured_choice.py [--no-autotune] [--hang] [--one-gpu]

Needs the patch ``allreduce-fusion-measured`` in SGLang. Prints the table as a server logs it
and one RESULT line: seconds of building, of opening and tuning, of measuring; MiB that the
children held on this GPU while they built, and after they ended; and whether a second start
took the table from the cache: exit 1 where it did not. `--hang`: the last rank's child never
launches FlashInfer's kernel, for which its peers' children then spin on their GPUs. Exit 1 unless
they were killed there, the candidate left out for that reason, and nothing of them kept.
`--one-gpu`: all ranks on GPU 0, in turns of milliseconds: two row counts, with more time to measure
them, and only the seconds say something. NCCL refuses that, and is left out.
"""

import argparse
import json
import logging
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from sglang.srt.layers import allreduce_calibration, allreduce_choice, allreduce_measured
from sglang.srt.layers.allreduce_candidates import PLACES, Trtllm


class Hanging(Trtllm):
    """Warm on every rank; from then on the last one does not launch."""

    asked = 0

    def launches(self, rows):  # type: ignore[no-untyped-def]
        launches = super().launches(rows)
        self.asked += 1
        if self.asked <= 2 or self.seat.rank < self.seat.world_size - 1:
            return launches  # the warm-up asks twice
        return {key: lambda *given: time.sleep(3600) for key in launches}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--without", default="", help="candidates to leave away, with commas")
    parser.add_argument("--no-autotune", action="store_true", help="PCIe-IPC by its seed policy")
    parser.add_argument("--hang", action="store_true")
    parser.add_argument("--one-gpu", action="store_true")
    args = parser.parse_args()
    # A child, which is no script, finds Hanging there.
    paths = (str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(0 if args.one_gpu else rank)
    dist.init_process_group("gloo")
    if rank == 0:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    os.environ["SGLANG_CACHE_DIR"] = folder[0]
    places = {name: place for name, place in PLACES.items() if name not in args.without.split(",")}
    if args.hang:
        places["trtllm"] = f"measured_choice:{Hanging.__name__}"

    free = [free_mib()]
    look_before(allreduce_calibration.Calibration, "_open", lambda: free.append(free_mib()))
    seconds = start(args, places)
    free.append(free_mib())
    table = allreduce_choice.installed()
    allreduce_choice.install(None)
    again = start(args, places)
    result = {
        "name": "measured-choice",
        "gpu": torch.cuda.get_device_name(),
        "rank": rank,
        "world": dist.get_world_size(),
        "seconds": seconds,
        "held_mib": [free[0] - later for later in free[1:]],
        "rows": sorted(table.plain),
        "left_out": table.left_out,
        "plain": table.plain_ranges,
        "norm": table.norm_ranges,
        "cached": again is None and allreduce_choice.installed() == table,
    }
    print("RESULT", json.dumps(result), flush=True)
    dist.barrier()
    killed = "no answer to prepare" in table.left_out.get("trtllm", "")
    freed = killed and result["held_mib"][-1] <= 0
    if not result["cached"] or (args.hang and not freed):
        raise SystemExit(1)


def free_mib() -> int:
    return torch.cuda.mem_get_info()[0] >> 20


def look_before(kind: type, name: str, look) -> None:  # type: ignore[no-untyped-def]
    method = getattr(kind, name)

    def looking(self, *args):  # type: ignore[no-untyped-def]
        look()
        return method(self, *args)

    setattr(kind, name, looking)


def start(args: argparse.Namespace, places: dict[str, str]) -> dict[str, float] | None:
    """What a server does around the loading of its weights: seconds, None from a cache."""
    rows = allreduce_measured.row_counts(64, args.draft_tokens, range(1, 9))
    if args.one_gpu:
        rows = (1, 64)
    measurement = allreduce_measured.Measurement(
        dist.group.WORLD,
        places,
        [name for name in ("custom", "nccl") if name in places],
        allreduce_measured.machine_facts(),
        args.hidden,
        torch.bfloat16,
        f"cuda:{torch.cuda.current_device()}",
        rows,
        not args.no_autotune,
        900.0,
        20.0 * (dist.get_world_size() if args.one_gpu else 1),
    )
    measurement.finish()
    calibration = measurement.calibration
    return calibration and {name: round(s, 1) for name, s in calibration.seconds.items()}


if __name__ == "__main__":
    main()
