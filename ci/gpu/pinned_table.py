"""A table that gives one all-reduce every row, to see it serve: SGLANG_ALLREDUCE_TABLE=FILE.

    python3 pinned_table.py FILE [--method pcie_ipc] [--world 2] [--hidden 1024]

Needs the patch ``allreduce-fusion-measured`` in SGLang. Nothing is measured: the microseconds say
that the method wins. The order that it replaces is the one of GPUs with a custom all-reduce.
"""

import argparse
from pathlib import Path

from sglang.srt.layers.allreduce_choice import CUSTOM, NCCL, PCIE_IPC, TRTLLM, AllReduceTable

ROWS = (1, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", choices=(TRTLLM, PCIE_IPC, NCCL), default=PCIE_IPC)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="1024 are model.py's")
    args = parser.parse_args()
    stock = (CUSTOM, NCCL)
    times = {rows: {name: [2.0] for name in stock} | {args.method: [1.0]} for rows in ROWS}
    key = {
        "world_size": args.world,
        "hidden_dim": args.hidden,
        "dtype": "torch.bfloat16",
        "stock": list(stock),
        "rows": list(ROWS),
    }
    table = AllReduceTable(key, stock, plain=times, norm=times)
    args.file.write_text(table.to_json())
    print(args.file, table.plain_ranges)


if __name__ == "__main__":
    main()
