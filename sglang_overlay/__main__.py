"""python -m sglang_overlay: the command sglang-overlay."""

import sys

from .cli import main

sys.exit(main())
