"""A table that gives one all-reduce the rows from 1 to 64, to see it serve: SGLANG_ALLREDUCE_TABLE.

    python3 pinned_table.py FILE [--method pcie_ipc] [--world 2] [--hidden 1024]

Needs the patch ``allreduce-fusion-measured`` in SGLang, and a table in its cache that a server of
so many GPUs and this width has measured: what it has without a table decides whether one fits.
Nothing is measured; the microseconds say that the method wins.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from sglang.srt.layers.allreduce_choice import PCIE_IPC, AllReduceTable, cache_folder

ROWS = (1, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--method", default=PCIE_IPC)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=1024, help="1024 are model.py's")
    args = parser.parse_args()
    shape = args.world, args.hidden
    cached = (AllReduceTable.from_json(path.read_text()) for path in cache_folder().glob("*.json"))
    fits = (one for one in cached if (one.key["world_size"], one.key["hidden_dim"]) == shape)
    like = next(fits, None)
    if like is None:
        parser.error(f"no table of {args.world} GPUs, width {args.hidden}, in {cache_folder()}")
    times = {rows: {name: [2.0] for name in like.stock} | {args.method: [1.0]} for rows in ROWS}
    table = replace(like, plain=times, norm=times, left_out={})
    args.file.write_text(table.to_json())
    print(args.file, table.plain_ranges)


if __name__ == "__main__":
    main()
