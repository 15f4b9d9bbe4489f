"""A machine's ``/sys`` and ``/proc`` as real folders, in the formats that the kernel documents."""

from collections.abc import Sequence
from pathlib import Path

#: Bits of the ACS control register, PCI Express Base Specification.
SRC_VALID, REQUEST_REDIRECT, COMPLETION_REDIRECT, UPSTREAM = 1 << 0, 1 << 2, 1 << 3, 1 << 4


def config(acs: int | None) -> bytes:
    """4 KiB of configuration space. The first extended capability is AER (0x0001); behind it
    stands ACS (0x000d) with its control register, or nothing."""
    space = bytearray(4096)
    space[0x100:0x104] = (0x0001 | 1 << 16 | (0x150 if acs is not None else 0) << 20).to_bytes(
        4, "little"
    )
    if acs is not None:
        space[0x150:0x154] = (0x000D | 1 << 16).to_bytes(4, "little")
        space[0x154:0x156] = (0x005F).to_bytes(2, "little")  # capability: all but egress control
        space[0x156:0x158] = acs.to_bytes(2, "little")
    return bytes(space)


class Tree:
    """Below ``root``: PCI devices, where ``chain`` are the bridges from the root port down."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("sys/bus/pci/devices", "sys/kernel/iommu_groups", "proc", "dev/shm"):
            (root / name).mkdir(parents=True)

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def card(
        self,
        chain: Sequence[str],
        bus: str,
        numa: int = 0,
        width: int = 16,
        speed: str = "32.0 GT/s PCIe",
        vendor: str = "0x10de",
    ) -> Path:
        """A GPU behind ``chain``; bridges that are there already are shared."""
        domain = f"pci{chain[0][:7]}" if chain else f"pci{bus[:7]}"
        folder = self.root / "sys/devices" / domain
        for address in chain:
            folder = folder / address
            self._device(folder, "0x1000", "0x060400", numa, 16, speed)
        folder = folder / bus
        self._device(folder, vendor, "0x030200", numa, width, speed)
        return folder

    def _device(
        self, folder: Path, vendor: str, kind: str, numa: int, width: int, speed: str
    ) -> None:
        if folder.exists():
            return
        folder.mkdir(parents=True)
        for name, text in {
            "vendor": vendor,
            "class": kind,
            "numa_node": str(numa),
            "current_link_width": str(width),
            "max_link_width": "16",
            "current_link_speed": speed,
            "max_link_speed": "32.0 GT/s PCIe",
        }.items():
            (folder / name).write_text(text + "\n")
        (folder / "config").write_bytes(config(None))
        link = self.root / "sys/bus/pci/devices" / folder.name
        link.symlink_to(folder)

    def acs(self, bus: str, control: int) -> None:
        """ACS of the bridge ``bus``."""
        (self.root / "sys/bus/pci/devices" / bus / "config").write_bytes(config(control))

    def iommu(self, bus: str, group: int, kind: str) -> None:
        """Put ``bus`` into an IOMMU group of this type."""
        folder = self.root / "sys/kernel/iommu_groups" / str(group)
        folder.mkdir()
        (folder / "type").write_text(kind + "\n")
        (self.root / "sys/bus/pci/devices" / bus / "iommu_group").symlink_to(folder)
