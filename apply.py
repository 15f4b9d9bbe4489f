#!/usr/bin/env python3
"""python apply.py --sglang-dir DIR: the command sglang-overlay, from a clone of this repository."""

import sys
from pathlib import Path

try:
    from sglang_overlay.cli import main
except ModuleNotFoundError as missing:
    if (missing.name or "").startswith("sglang_overlay"):
        raise
    print(
        f"error: {missing.name} is not installed\n"
        f"  next: {sys.executable} -m pip install {Path(__file__).resolve().parent}",
        file=sys.stderr,
    )
    sys.exit(4)

if __name__ == "__main__":
    sys.exit(main())
