"""Settles which files a process uses; loaders for ``sglang`` itself and for patched modules."""

import mmap
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import CodeType, ModuleType
from typing import Any

from . import attest
from .finder import Finder

_held: list[mmap.mmap] = []


def settle(finder: Finder, folders: Iterable[str] | None) -> attest.Manifest | None:
    """Which manifest's files this process uses, ``None`` for SGLang as it is on disk.

    The first call attests, says the outcome on standard error and puts the finder in
    front of any that came later; ``folders`` are those of the ``sglang`` package.
    Raises ``ImportError`` when the overlay and this SGLang do not belong together.
    """
    with finder.lock:
        if not finder.settled:
            try:
                finder.manifest = _attested(finder, list(folders or ()))
            except (attest.Refusal, OSError, TypeError, ValueError) as error:
                raise ImportError(f"sglang-overlay: {error}", name="sglang") from None
            finder.settled = True
            if finder in sys.meta_path[1:]:  # at once: another thread may be looking
                others = [other for other in sys.meta_path if other is not finder]
                sys.meta_path[:] = [finder, *others]
        return finder.manifest


def _attested(finder: Finder, folders: list[str]) -> attest.Manifest | None:
    if attest.switched_off():
        _say("switched off by SGLANG_OVERLAY=0: SGLang runs as it is on disk")
        return None
    manifest = attest.load()
    patched = attest.check(manifest, folders, imported_early=finder.imported_early)
    # What /proc/PID/maps shows to `verify --pid`, while nothing else of a process would.
    with suppress(OSError, ValueError), manifest.file.open("rb") as stream:
        _held.append(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
    names = ", ".join(manifest.patches)
    if patched:
        _say(f"{manifest.version}: {patched} holds the patches itself: {names}")
        return None
    _say(f"{manifest.version} on SGLang {manifest.sglang}: {names}")
    return manifest


class Gate:
    """Stands in for the loader of ``sglang`` until the package is executed: then it settles."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "load_module":  # which would not come by exec_module
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the original loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Settle, then execute what the original loader, or the overlay, has."""
        spec, loader = module.__spec__, self._loader
        assert spec is not None
        manifest = settle(self._finder, spec.submodule_search_locations)
        if manifest and (init := manifest.modules.get("sglang")):
            loader = patched_spec("sglang", init, spec).loader
            module.__file__ = str(init.file)
        spec.loader = module.__loader__ = loader
        loader.exec_module(module)


def patched_spec(name: str, module: attest.Module, original: ModuleSpec | None) -> ModuleSpec:
    """A spec that loads ``module``'s file; a package keeps its own folders and resources."""
    file = module.file
    folders = original.submodule_search_locations if original else None
    if file.name == "__init__.py" and folders is None:
        folders = [str(file.parent)]
    spec = spec_from_file_location(
        name,
        file,
        loader=_Loader(name, module, original),
        submodule_search_locations=folders,
    )
    assert spec is not None
    return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, module: attest.Module, original: ModuleSpec | None) -> None:
        super().__init__(name, str(module.file))
        self._module = module
        self._original = original

    def get_code(self, fullname: str) -> CodeType | None:
        """Nothing runs that was changed after the process had settled."""
        if attest.blob_of(self._module.file) != self._module.blob:
            raise ImportError(
                f"sglang-overlay: {self._module.file} changed under this process. "
                "Next: start it again",
                name=fullname,
            )
        return super().get_code(fullname)

    def get_resource_reader(self, name: str | None = None) -> Any:
        """Resources lie where the original package lies."""
        theirs = getattr(self._original and self._original.loader, "get_resource_reader", None)
        return theirs(name) if theirs else super().get_resource_reader(name)


def _say(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # a closed one must not stop the program
            print(f"sglang-overlay[{os.getpid()}]: {text}", file=sys.stderr, flush=True)
