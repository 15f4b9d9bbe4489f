"""The import hook: patched modules are loaded from the overlay, all others as ever."""

import sys
from _thread import RLock

TYPE_CHECKING = False  # importing typing would cost every interpreter start some milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from .attest import Manifest


class Finder:
    """A ``MetaPathFinder`` for ``sglang`` and the exact names of the patched modules.

    Looking for ``sglang`` checks nothing and never fails, since other programs look too.
    Executing it, or looking for anything in it, settles once for the process which files
    are used, and raises ``ImportError`` when overlay and SGLang do not belong together.
    """

    def __init__(self, *, imported_early: bool = False) -> None:
        self.imported_early = imported_early
        self.lock = RLock()  # two threads may import at once
        self.settled = False
        self.manifest: Manifest | None = None  # of the files in use; None for those on disk

    def find_spec(
        self,
        name: str,
        path: "Sequence[str] | None" = None,
        target: "ModuleType | None" = None,
    ) -> "ModuleSpec | None":
        """The overlay's spec for a patched module, a guarded one for ``sglang``, else ``None``."""
        if name == "sglang":
            spec = self.original(name, path, target)
            if spec is not None and spec.loader is not None:
                from .gate import Gate

                spec.loader = Gate(spec.loader, self)  # type: ignore[assignment]
            return spec
        if not name.startswith("sglang.") or "sglang" not in sys.modules:
            return None
        from .gate import patched_spec, settle

        manifest = settle(self, sys.modules["sglang"].__path__)
        module = manifest and manifest.modules.get(name)
        if not module:
            return None
        return patched_spec(name, module, self.original(name, path, target))

    def original(self, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
        """What every other finder would give."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
