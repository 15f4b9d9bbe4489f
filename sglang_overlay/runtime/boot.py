"""Called by ``sglang_overlay.pth`` (and ``.start``) in every interpreter of the environment."""

import sys

from .finder import Finder


def start() -> None:
    """Put the finder in front of all others. Doing it twice changes nothing."""
    if any(isinstance(finder, Finder) for finder in sys.meta_path):
        return
    early = [name for name in sys.modules if name == "sglang" or name.startswith("sglang.")]
    for name in early:  # its next import comes to the finder, which refuses it
        del sys.modules[name]
    sys.meta_path.insert(0, Finder(imported_early=bool(early)))
