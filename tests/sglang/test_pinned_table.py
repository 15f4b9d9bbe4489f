"""``ci/gpu/pinned_table.py``: a server takes the table that it writes."""

import json
from pathlib import Path

import pytest

from ..pins import each_pin_with
from .conftest import Python

SCRIPT = Path(__file__).resolve().parents[2] / "ci/gpu/pinned_table.py"
MEASURED = """
from sglang.srt.layers import allreduce_choice as choice
key = {"world_size": 4, "hidden_dim": 64, "dtype": "torch.bfloat16", "stock": STOCK, "rows": [1]}
times = {1: {name: [3.0] for name in STOCK}}
choice.save(choice.AllReduceTable(key, tuple(STOCK), times, times), choice.cache_path(key))
"""
PINNED = """
import json, sys
from sglang.srt.layers import allreduce_choice as choice
[path] = choice.cache_folder().glob("*.json")
table = choice.load_pinned(sys.argv[1], choice.AllReduceTable.from_json(path.read_text()).key)
print(json.dumps([table.plain_ranges, table.norm_ranges, table.rows_of("pcie_ipc")]))
"""


@each_pin_with("allreduce-fusion-measured")
@pytest.mark.parametrize("stock", [["nccl"], ["custom", "nccl"]])
def test_it_is_of_the_server_that_measured(
    python: Python, patched: Path, tmp_path: Path, stock: list[str]
) -> None:
    cache, pinned = {"SGLANG_CACHE_DIR": str(tmp_path)}, tmp_path / "pinned.json"
    done = python(patched, "-c", f"STOCK = {stock}{MEASURED}", **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    done = python(patched, SCRIPT, pinned, "--world", 4, "--hidden", 64, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    done = python(patched, "-c", PINNED, pinned, **cache)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[[1, 64, "pcie_ipc"]], [], [1, 64]]
    done = python(patched, SCRIPT, pinned, "--world", 2, "--hidden", 64, **cache)
    assert done.returncode == 2
    assert f"no table of 2 GPUs, width 64, in {tmp_path}/allreduce" in done.stderr
