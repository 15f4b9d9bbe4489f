"""A pin: the one SGLang release that a patch set is written for."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from .errors import DamagedPatchSet, Usage

_RULES = {
    "version": r"\d+(\.\d+)+\S*",
    "wheel": r"sglang-[^-]+-cp\d+-cp\d+-\w+\.whl",
    "sha256": r"[0-9a-f]{64}",
    "tree": r"[0-9a-f]{40}",
}


@dataclass(frozen=True)
class Pin:
    """``name`` is the folder's (``v0.5.23``), ``tree`` the git tree id of the pinned
    source laid out as a checkout, ``wheel`` the file it comes from."""

    name: str
    version: str
    wheel: str
    sha256: str
    tree: str
    folder: Path


def patches_folder() -> Path:
    """Where the patch sets are: inside an installed wheel, or beside the package."""
    package = Path(__file__).resolve().parents[1]
    inside = package / "_files" / "patches"
    return inside if inside.is_dir() else package.parent / "patches"


def load_pins(patches: Path) -> list[Pin]:
    """Every pin under ``patches``, the newest last. Raises ``DamagedPatchSet``."""
    pins = [_load(file) for file in patches.glob("*/pin.toml")]
    pins.sort(key=lambda pin: [int(number) for number in re.findall(r"\d+", pin.version)])
    if not pins:
        raise DamagedPatchSet(f"{patches}: no pin (a folder with a pin.toml)")
    return pins


def choose_pin(pins: list[Pin], name: str) -> Pin:
    """The pin called ``name``, with or without its ``v``. Raises ``Usage``."""
    for pin in pins:
        if name in (pin.name, pin.version):
            return pin
    raise Usage(f"no pin {name}; there is {', '.join(pin.name for pin in pins)}")


def _load(file: Path) -> Pin:
    try:
        table = tomllib.loads(file.read_text(encoding="utf-8"))
        for key, rule in _RULES.items():
            if not re.fullmatch(rule, table[key]):
                raise ValueError(f"{key} = {table[key]!r}")
        pin = Pin(name=file.parent.name, folder=file.parent, **{k: table[k] for k in _RULES})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedPatchSet(f"{file}: {error!r}") from error
    if pin.name != f"v{pin.version}":
        raise DamagedPatchSet(f"{file}: version {pin.version} in folder {pin.name}")
    return pin
