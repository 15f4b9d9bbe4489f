"""What the host's kernel does to the thread that launches each pass."""

from ..facts import Facts, Unknown
from ..finding import Finding, ok, unknown, warning


def numa_balancing(facts: Facts) -> list[Finding]:
    """The kernel does not move pages about while a pass is launched."""
    on, nodes = facts.host.numa_balancing, facts.host.numa_nodes
    if isinstance(on, Unknown):
        return [unknown("numa-balancing", on.why)]
    if not on or nodes == 1:
        return [ok("numa-balancing", "off" if not on else "on, with one node: nothing to move")]
    return [
        warning(
            "numa-balancing",
            "automatic NUMA balancing is on",
            f"/proc/sys/kernel/numa_balancing, {nodes} nodes",
            "the kernel unmaps the scheduler's pages to see who uses them; single passes then take "
            "milliseconds longer",
            "sudo sysctl -w kernel.numa_balancing=0",
        )
    ]


def governor(facts: Facts) -> list[Finding]:
    """The CPUs run at full clock."""
    governors = facts.host.governors
    if isinstance(governors, Unknown):
        return [unknown("governor", governors.why)]
    if set(governors) <= {"performance"}:
        return [ok("governor", "performance")]
    return [
        warning(
            "governor",
            f"CPU governor is {', '.join(governors)}",
            "/sys/devices/system/cpu/*/cpufreq/scaling_governor",
            "each cycle has eager work on the host (sampling, planning, launches), which grows as "
            "the clock falls; eager passes suffer most",
            "sudo cpupower frequency-set -g performance",
        )
    ]


def huge_pages(facts: Facts) -> list[Finding]:
    """Transparent huge pages are available to those who ask for them."""
    chosen = facts.host.huge_pages
    if isinstance(chosen, Unknown):
        return [unknown("huge-pages", chosen.why)]
    if chosen in ("madvise", "always"):
        return [ok("huge-pages", chosen)]
    return [
        warning(
            "huge-pages",
            "transparent huge pages are off",
            "/sys/kernel/mm/transparent_hugepage/enabled",
            "loading weights and host KV caches take more page faults; a verify pass itself does "
            "not change",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )
    ]
