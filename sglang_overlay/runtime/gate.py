"""Loaders: one that lets ``sglang`` through once all is attested, one for patched modules."""

import mmap
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any

from . import attest
from .finder import Finder

_held: list[mmap.mmap] = []


class Gate:
    """Wraps the loader of ``sglang``: executing the package attests the overlay first."""

    def __init__(self, loader: Any, finder: Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the original loader does."""
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Attest, say so on standard error, and execute what is there.

        Raises ``ImportError`` when the overlay and this SGLang do not belong together:
        stock code is never run unnoticed.
        """
        spec = module.__spec__
        assert spec is not None
        if os.environ.get("SGLANG_OVERLAY") == "0":
            _say("switched off by SGLANG_OVERLAY=0: stock SGLang runs")
        else:
            try:
                manifest = attest.load()
                early = self._finder.imported_early
                patched = attest.check(manifest, spec, imported_early=early)
            except attest.Refusal as refusal:
                raise ImportError(f"sglang-overlay: {refusal}", name="sglang") from None
            names = ", ".join(manifest.patches)
            if patched:
                _say(f"{manifest.version}: {patched} holds the patches itself: {names}")
            else:
                self._finder.activate(manifest)
                _hold(manifest)
                _say(f"{manifest.version} on SGLang {manifest.sglang}: {names}")
                if init := manifest.modules.get("sglang"):
                    self._loader = patched_spec("sglang", init, spec).loader
                    module.__file__ = str(init.file)
        self._loader.exec_module(module)


def patched_spec(name: str, module: attest.Module, original: ModuleSpec | None) -> ModuleSpec:
    """A spec that loads ``module``'s file; a package keeps its own folders and resources."""
    file = module.file
    folders = original.submodule_search_locations if original else None
    if file.name == "__init__.py" and folders is None:
        folders = [str(file.parent)]
    spec = spec_from_file_location(
        name,
        file,
        loader=_Loader(name, str(file), original),
        submodule_search_locations=folders,
    )
    assert spec is not None
    return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, file: str, original: ModuleSpec | None) -> None:
        super().__init__(name, file)
        self._original = original

    def get_resource_reader(self, name: str | None = None) -> Any:
        """Resources lie where the original package lies."""
        theirs = getattr(self._original and self._original.loader, "get_resource_reader", None)
        return theirs(name) if theirs else super().get_resource_reader(name)


def _say(text: str) -> None:
    print(f"sglang-overlay[{os.getpid()}]: {text}", file=sys.stderr, flush=True)


def _hold(manifest: attest.Manifest) -> None:
    """Map the manifest into memory, where ``/proc/PID/maps`` shows it to ``verify --pid``."""
    with manifest.file.open("rb") as stream:
        _held.append(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
