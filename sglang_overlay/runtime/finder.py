"""The import hook: patched modules are loaded from the overlay, all others as ever."""

import sys

TYPE_CHECKING = False  # importing typing would cost every interpreter start some milliseconds
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from .attest import Manifest


class Finder:
    """A ``MetaPathFinder`` for ``sglang`` and the exact names of the patched modules.

    Looking for a spec checks nothing and never fails, since other programs look too.
    Executing ``sglang``, which comes before every module in it, checks everything.
    """

    def __init__(self, *, imported_early: bool = False) -> None:
        self.imported_early = imported_early
        self._manifest: Manifest | None = None
        self._active = False

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
        if not self._active or not name.startswith("sglang."):
            return None
        assert self._manifest is not None
        module = self._manifest.modules.get(name)
        if module is None:
            return None
        from .gate import patched_spec

        return patched_spec(name, module, self.original(name, path, target))

    def activate(self, manifest: "Manifest") -> None:
        """Serve ``manifest``'s modules from now on."""
        self._manifest, self._active = manifest, True

    def original(self, name: str, path: "Any", target: "Any") -> "ModuleSpec | None":
        """What every other finder would give."""
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None
