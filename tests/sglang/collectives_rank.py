"""One rank of test_collectives, on the CPU: every rank writes the table that it has."""

import json
import multiprocessing
import sys
from pathlib import Path

import torch.distributed as dist

from sglang_overlay.measure.candidates import Seat
from sglang_overlay.measure.collectives import results
from sglang_overlay.measure.ensemble import Plan, measure
from tests.sglang.gloo_candidates import CANDIDATES

if __name__ == "__main__":
    folder, boundary, *names = sys.argv[1:]
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = Plan(
        (1, 2, 3),
        64,
        "bfloat16",
        boundary,
        modes=("eager",),
        rounds=2,
        replays=3,
        calls=2,
        timeout=10,
    )
    seat = Seat(rank, world, "cpu", plan.hidden, plan.dtype, 3)
    told: list[str] = []
    candidates = {name: CANDIDATES[name] for name in names or CANDIDATES}
    table = measure(plan, seat, candidates, told.append)
    dist.destroy_process_group()
    said = {
        "results": results(table),
        "told": told,
        "still running": len(multiprocessing.active_children()),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(said))
