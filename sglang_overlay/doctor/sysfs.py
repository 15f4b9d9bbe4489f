"""The PCI tree above each NVIDIA card, as Linux shows it below ``/sys``; needs no driver.

Formats: Documentation/ABI/testing/sysfs-bus-pci and sysfs-kernel-iommu_groups of the kernel;
the ACS capability: PCI Express Base Specification, "ACS Extended Capability".
"""

import re
from collections.abc import Callable
from pathlib import Path

from .facts import Bridge, Maybe, Slot, T, Unknown

_NVIDIA = "0x10de"
_DISPLAY = "0x03"  # base class of display controllers: 0x0300 VGA, 0x0302 3D
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_GENERATIONS = {"2.5": 1, "5.0": 2, "8.0": 3, "16.0": 4, "32.0": 5, "64.0": 6}
_CONTROLS = (
    "SrcValid",
    "TransBlk",
    "ReqRedir",
    "CmpltRedir",
    "UpstreamFwd",
    "EgressCtrl",
    "DirectTrans",
)


def read_slots(root: Path = Path("/")) -> Maybe[tuple[Slot, ...]]:
    """Every NVIDIA card below ``root``, ordered by address."""
    folder = root / "sys/bus/pci/devices"
    try:
        devices = sorted(folder.iterdir())
    except OSError as error:
        return Unknown(f"{folder}: {error.strerror}")
    found = [_slot(device.resolve(), root) for device in devices if _is_card(device)]
    return tuple(found)


def level(a: Slot, b: Slot) -> str:
    """How far two cards are apart, in the words of ``nvidia-smi topo -m``."""
    shared = {bridge.bus for bridge in a.bridges} & {bridge.bus for bridge in b.bridges}
    if not shared:
        if a.root == b.root:
            return "PHB"
        known = not isinstance(a.numa, Unknown) and not isinstance(b.numa, Unknown)
        return "NODE" if known and a.numa == b.numa else "SYS"
    # Below one switch each card hangs on a port of its own, whose bridge is the switch's.
    steps = [next(n for n, x in enumerate(s.bridges) if x.bus in shared) for s in (a, b)]
    return "PIX" if max(steps) <= 1 else "PXB"


def acs_controls(config: bytes) -> Maybe[tuple[str, ...] | None]:
    """The ACS controls that are on, from a device's ``config`` file; ``None`` without ACS."""
    if len(config) <= 0x100:
        return Unknown("only root may read a bridge's extended configuration: run as root")
    place, seen = 0x100, set[int]()
    while place and place not in seen and place + 8 <= len(config):
        seen.add(place)
        header = int.from_bytes(config[place : place + 4], "little")
        if header & 0xFFFF == 0x000D:
            control = int.from_bytes(config[place + 6 : place + 8], "little")
            return tuple(name for bit, name in enumerate(_CONTROLS) if control >> bit & 1)
        place = header >> 20
    return None


def _is_card(device: Path) -> bool:
    vendor, kind = _read(device / "vendor", str), _read(device / "class", str)
    return vendor == _NVIDIA and isinstance(kind, str) and kind.startswith(_DISPLAY)


def _slot(device: Path, root: Path) -> Slot:
    above = [folder for folder in device.parents if _ADDRESS.fullmatch(folder.name)]
    roots = [folder.name for folder in device.parents if folder.name.startswith("pci")]
    return Slot(
        bus=device.name,
        numa=_read(device / "numa_node", int),
        iommu=_iommu(device, root),
        bridges=tuple(Bridge(folder.name, _acs(folder)) for folder in above),
        root=roots[0] if roots else "",
        width=_read(device / "current_link_width", int),
        width_max=_read(device / "max_link_width", int),
        speed=_read(device / "current_link_speed", _generation),
        speed_max=_read(device / "max_link_speed", _generation),
    )


def _iommu(device: Path, root: Path) -> Maybe[str | None]:
    link = device / "iommu_group"
    if not link.exists():
        return None
    return _read(root / "sys/kernel/iommu_groups" / link.resolve().name / "type", str)


def _acs(bridge: Path) -> Maybe[tuple[str, ...] | None]:
    try:
        return acs_controls((bridge / "config").read_bytes())
    except OSError as error:
        return Unknown(f"{bridge.name}: {error.strerror}")


def _generation(text: str) -> int:
    return _GENERATIONS[text.split()[0]]


def _read(file: Path, convert: Callable[[str], T]) -> Maybe[T]:
    try:
        return convert(file.read_text().strip())
    except OSError as error:
        return Unknown(f"{file}: {error.strerror}")
    except (ValueError, KeyError, IndexError):
        return Unknown(f"{file}: not as documented")
