"""Does this overlay belong to this SGLang? Every blob is read before anything runs."""

import hashlib
import json
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FILES = Path(__file__).resolve().parents[1] / "_files"
_ABSENT = "0" * 40
_REINSTALL = "Next: install the overlay wheel again, or set SGLANG_OVERLAY=0"


class Refusal(Exception):
    """Why ``import sglang`` must fail, and what to do."""


class Module(NamedTuple):
    """A patched module: its place below ``site-packages``, its blob in the pin and in the
    overlay, and those that some of the patches give."""

    place: str
    base: str
    blob: str
    partial: list[str]

    @property
    def file(self) -> Path:
        """The patched file in the overlay."""
        return FILES / "modules" / self.place


class Manifest(NamedTuple):
    """What the wheel was built from. ``patches`` gives each patch's own runtime switch."""

    file: Path
    version: str
    sglang: str
    patches: dict[str, str]
    modules: dict[str, Module]


def load() -> Manifest:
    """Read the overlay's manifest. Raises ``Refusal`` when it is damaged."""
    file = FILES / "manifest.json"
    try:
        table = json.loads(file.read_text(encoding="utf-8"))
        modules = {name: Module(**entry) for name, entry in table["modules"].items()}
        return Manifest(file, table["version"], table["sglang"], dict(table["patches"]), modules)
    except FileNotFoundError as error:
        raise Refusal(
            f"{file} is missing: a source tree of the overlay may hide the installed one. "
            f"Next: take it off PYTHONPATH. {_REINSTALL}"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{file} is damaged ({error!r}). {_REINSTALL}") from error


def switched_off() -> bool:
    """Whether ``SGLANG_OVERLAY`` is 0. Raises ``Refusal`` unless it is 0, 1, empty or unset."""
    value = os.environ.get("SGLANG_OVERLAY", "")
    if value not in ("", "0", "1"):
        raise Refusal(f"SGLANG_OVERLAY={value}: it is 0 for off, or 1. Next: set one of them")
    return value == "0"


def check(manifest: Manifest, folders: list[str], *, imported_early: bool) -> Path | None:
    """``None`` when the overlay's files shall be used; else the ``sglang`` folder that holds
    the same patches itself. ``folders`` are those of the ``sglang`` package.

    Raises ``Refusal`` when the overlay and what is installed do not belong together.
    """
    if imported_early:
        raise Refusal(
            "sglang was imported before the overlay's hook, by another .pth file or a "
            "sitecustomize. Next: remove that import, or set SGLANG_OVERLAY=0"
        )
    if skipped := os.environ.get("SGLANG_OVERLAY_SKIP"):
        known = ", ".join(manifest.patches)
        switch = manifest.patches.get(skipped, f"no such patch; there is {known}")
        raise Refusal(
            f"SGLANG_OVERLAY_SKIP={skipped}: a built overlay is all or nothing. "
            f"Next: unset it; to switch that patch off: {switch}"
        )
    _check_alone()
    for name, module in manifest.modules.items():
        if blob_of(module.file) != module.blob:
            raise Refusal(f"{module.file} (module {name}) is not as it was built. {_REINSTALL}")
    if len(folders) != 1:
        raise Refusal(f"sglang is not one folder but {folders}. Next: leave one installed")
    if not Path(folders[0], "__init__.py").is_file():  # as beside a checkout, editable or not
        raise Refusal(f"{folders[0]} is no package, but hides one. Next: start in another folder")
    return _check_base(manifest, Path(folders[0]))


def blob_of(file: Path) -> str:
    """The git blob id of ``file``; forty zeros when there is none."""
    try:
        content = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def _check_alone() -> None:
    ours = FILES / "manifest.json"
    for entry in sys.path:
        other = Path(entry, "sglang_overlay", "_files", "manifest.json")
        with suppress(OSError):  # an entry that cannot be read cannot be imported from either
            if other.is_file() and not other.samefile(ours):
                raise Refusal(f"two overlays: {ours} and {other}. Next: pip uninstall one of them")


def _check_base(manifest: Manifest, package: Path) -> Path | None:
    """Hold the files in ``package``, the ``sglang`` folder, against the pin's."""
    with suppress(FileNotFoundError):  # a git checkout has none
        text = (package / "_version.py").read_text(encoding="utf-8")
        version = re.search(r"^__version__ = .*'([^']+)'", text, re.MULTILINE)
        if version and version[1] != manifest.sglang:
            raise Refusal(
                f"{package} is not SGLang {manifest.sglang}'s but {version[1]}'s. Next: "
                f"pip install sglang=={manifest.sglang}, or install the overlay for yours"
            )
    modules = manifest.modules.values()
    found = [(module, blob_of(package.parent / module.place)) for module in modules]
    if all(blob == module.base for module, blob in found):
        return None
    if all(blob == module.blob for module, blob in found):
        return package
    for module, blob in found:
        if blob not in (module.base, module.blob, *module.partial):
            raise Refusal(
                f"{package.parent / module.place} is not SGLang {manifest.sglang}'s (expected "
                f"{module.base[:8]}, found {blob[:8]}). Next: pip install --force-reinstall "
                f"--no-deps sglang=={manifest.sglang}, or uninstall the overlay"
            )
    raise Refusal(
        f"{package} holds some of the patches itself. "
        f"Next: sglang-overlay reverse --sglang-dir {package.parent}"
    )
