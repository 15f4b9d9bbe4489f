"""What stands between two cards' PCIe traffic: ACS, the IOMMU, a hypervisor."""

from itertools import combinations

from ..facts import Bridge, Facts, Slot, Unknown
from ..finding import Finding, ok, unknown, warning

_REDIRECTS = {"ReqRedir", "CmpltRedir", "UpstreamFwd"}


def acs(facts: Facts) -> list[Finding]:
    """No switch sends peer traffic up to the CPU instead of across."""
    if isinstance(facts.slots, Unknown):
        return [unknown("acs", facts.slots.why)]
    if len(facts.slots) < 2:
        return []
    inside = [b for a, c in combinations(facts.slots, 2) for b in _below_shared(a, c)]
    bridges = {bridge.bus: bridge for bridge in inside}
    if not bridges:
        return [ok("acs", "no two cards share a switch, so ACS has nothing to redirect")]
    on = {bus: flags for bus, bridge in bridges.items() if (flags := _redirects(bridge))}
    if on:
        return [
            warning(
                "acs",
                f"ACS redirects peer traffic on {len(on)} bridges below a shared switch",
                "; ".join(f"{bus}: {', '.join(flags)}" for bus, flags in sorted(on.items())),
                "each copy between neighbours climbs to the CPU and comes back: slower "
                "all-reduces, and with an IOMMU, hangs",
                "; ".join(f"sudo setpci -s {bus} ECAP_ACS+6.w=0000" for bus in sorted(on)),
            )
        ]
    unseen = [bridge.acs.why for bridge in bridges.values() if isinstance(bridge.acs, Unknown)]
    if unseen:
        return [unknown("acs", unseen[0], "sudo sglang-overlay doctor")]
    return [ok("acs", f"ACS redirects nothing on {len(bridges)} bridges below shared switches")]


def iommu(facts: Facts) -> list[Finding]:
    """The IOMMU is off, or passes the cards' addresses through."""
    if isinstance(facts.slots, Unknown):
        return [unknown("iommu", facts.slots.why)]
    if not facts.slots:
        return [unknown("iommu", "no NVIDIA card below /sys/bus/pci")] if facts.cards else []
    boot = facts.host.boot
    words = "not known" if isinstance(boot, Unknown) else " ".join(boot) or "nothing"
    unseen = [slot.iommu.why for slot in facts.slots if isinstance(slot.iommu, Unknown)]
    if unseen:
        return [unknown("iommu", unseen[0])]
    kinds = sorted({str(slot.iommu) for slot in facts.slots if slot.iommu is not None})
    if not kinds:
        return [ok("iommu", "no IOMMU on the cards", f"kernel command line: {words}")]
    if kinds == ["identity"]:
        return [ok("iommu", "the IOMMU passes addresses through", f"command line: {words}")]
    vendor = facts.host.cpu_vendor
    off = "amd_iommu=off" if vendor == "AuthenticAMD" else "intel_iommu=off"
    return [
        warning(
            "iommu",
            "the IOMMU translates the cards' addresses",
            f"domain type {', '.join(kinds)}; kernel command line: {words}; CPU: {vendor}",
            "peer writes are translated at the root complex or dropped there: all-reduces hang or, "
            "worse, give wrong numbers while peer access is reported as granted. Prove it: --deep",
            f"add iommu=pt (if that does not help, {off}) to GRUB_CMDLINE_LINUX in "
            "/etc/default/grub; sudo update-grub; sudo reboot",
        )
    ]


def virtual(facts: Facts) -> list[Finding]:
    """A guest sees the PCI tree that its hypervisor made up."""
    if not facts.host.virtual or isinstance(facts.host.virtual, Unknown):
        return []
    if len(facts.cards) < 2 or facts.nvlinked:
        return []
    return [
        warning(
            "virtual-machine",
            "this is a virtual machine, and its PCI tree need not be the host's",
            "the CPU's flags name a hypervisor",
            "NCCL plans its rings by a tree that is not there, and peer access through a guest's "
            "IOMMU may be granted and yet not work. Prove it: --deep",
            "ask the host for its topology and set NCCL_TOPO_FILE",
        )
    ]


def _below_shared(a: Slot, b: Slot) -> list[Bridge]:
    """The bridges from each card up to the first that they share, without that one."""
    shared = {x.bus for x in a.bridges} & {x.bus for x in b.bridges}
    if not shared:
        return []
    found = []
    for slot in (a, b):
        for bridge in slot.bridges:
            if bridge.bus in shared:
                break
            found.append(bridge)
    return found


def _redirects(bridge: Bridge) -> list[str]:
    if isinstance(bridge.acs, Unknown) or bridge.acs is None:
        return []
    return [name for name in bridge.acs if name in _REDIRECTS]
