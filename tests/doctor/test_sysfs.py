"""The PCI tree and the host, read from real folders."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from sglang_overlay.doctor.checks import examine
from sglang_overlay.doctor.collect import only_visible
from sglang_overlay.doctor.facts import Facts, Host, Slot, Unknown
from sglang_overlay.doctor.finding import Finding, State
from sglang_overlay.doctor.host import read_host
from sglang_overlay.doctor.sysfs import acs_controls, level, read_slots

from .machine import environ, healthy
from .tree import COMPLETION_REDIRECT, REQUEST_REDIRECT, SRC_VALID, UPSTREAM, Tree, config


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def slots(tree: Tree) -> tuple[Slot, ...]:
    found = read_slots(tree.root)
    assert isinstance(found, tuple)
    return found


def finding(tree: Tree, id: str) -> Finding:
    """What is found with this PCI tree and no driver."""
    facts = Facts(slots=read_slots(tree.root), host=read_host(tree.root))
    return next(f for f in examine(facts) if f.id == id)


def two_nodes(tree: Tree) -> None:
    """Eight cards on root ports of their own, four to each NUMA node."""
    for n in range(8):
        domain = 0x10 * (n + 1)
        tree.card([f"0000:{domain:02x}:01.1"], f"0000:{domain + 1:02x}:00.0", numa=n // 4)


def switches(tree: Tree) -> None:
    """Two switches with two cards each: root port, upstream port, a downstream port for each."""
    for n in range(4):
        high = 0x10 * (n // 2 + 1)
        chain = [f"0000:{high:02x}:01.0", f"0000:{high + 1:02x}:00.0"]
        chain.append(f"0000:{high + 2:02x}:{n % 2:02x}.0")
        tree.card(chain, f"0000:{high + 3 + n % 2:02x}:00.0")


def test_eight_cards_on_two_numa_nodes(tree: Tree) -> None:
    two_nodes(tree)
    found = slots(tree)
    assert [slot.numa for slot in found] == [0] * 4 + [1] * 4
    levels = [level(a, b) for a, b in combinations(found, 2)]
    assert (levels.count("NODE"), levels.count("SYS")) == (12, 16)
    topology = finding(tree, "topology")
    assert topology.state == State.WARNING
    assert topology.evidence == "12 pairs NODE, 16 pairs SYS; nodes: 0 0 0 0 1 1 1 1"
    assert finding(tree, "acs").state == finding(tree, "iommu").state == State.OK


def test_cards_behind_switches(tree: Tree) -> None:
    switches(tree)
    levels = [level(a, b) for a, b in combinations(slots(tree), 2)]
    assert levels == ["PIX", "NODE", "NODE", "NODE", "NODE", "PIX"]
    assert [bridge.bus for bridge in slots(tree)[0].bridges] == [
        *("0000:12:00.0", "0000:11:00.0", "0000:10:01.0")
    ]
    assert finding(tree, "topology").title == "2 pairs PIX, 4 pairs NODE"


def test_a_switch_behind_a_switch_and_cards_below_one_host_bridge(tree: Tree) -> None:
    far = ["0000:10:01.0", "0000:11:00.0", "0000:12:00.0", "0000:13:00.0", "0000:14:00.0"]
    tree.card(far, "0000:15:00.0")
    tree.card([*far[:2], "0000:12:01.0"], "0000:16:00.0")
    tree.card(["0000:10:02.0"], "0000:17:00.0")
    tree.card(far[:4], "0000:18:00.0")
    a, b, c, d = slots(tree)
    assert (level(a, b), level(a, c), level(b, c)) == ("PXB", "PHB", "PHB")
    assert (level(b, d), level(a, d)) == ("PXB", "PIX")


@pytest.mark.parametrize(
    ("control", "state"),
    [
        (0, State.OK),
        (SRC_VALID, State.OK),
        (REQUEST_REDIRECT | SRC_VALID, State.WARNING),
        (COMPLETION_REDIRECT, State.WARNING),
        (UPSTREAM, State.WARNING),
    ],
)
def test_acs_on_below_a_switch(tree: Tree, control: int, state: State) -> None:
    switches(tree)
    tree.acs("0000:12:01.0", control)
    acs = finding(tree, "acs")
    assert acs.state == state
    if state == State.WARNING:
        assert acs.fix == "sudo setpci -s 0000:12:01.0 ECAP_ACS+6.w=0000"


def test_acs_on_above_every_switch_redirects_no_neighbour(tree: Tree) -> None:
    switches(tree)
    for bus in ("0000:10:01.0", "0000:11:00.0", "0000:20:01.0", "0000:21:00.0"):
        tree.acs(bus, REQUEST_REDIRECT | UPSTREAM)
    assert finding(tree, "acs").state == State.OK


def test_acs_without_root_is_not_known_and_says_so(tree: Tree) -> None:
    switches(tree)
    for n in (0, 1):
        file = tree.root / f"sys/bus/pci/devices/0000:12:0{n}.0/config"
        file.write_bytes(config(REQUEST_REDIRECT)[:64])
    acs = finding(tree, "acs")
    assert (acs.state, acs.fix) == (State.UNKNOWN, "sudo sglang-overlay doctor")
    assert "run as root" in acs.evidence


def test_every_acs_control_has_its_name() -> None:
    names = acs_controls(config(0x7F))
    assert names == (
        *("SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd"),
        *("EgressCtrl", "DirectTrans"),
    )
    assert acs_controls(config(None)) is None
    assert acs_controls(config(0)) == ()
    looping = bytearray(config(None))
    looping[0x100:0x104] = (0x0001 | 0x100 << 20).to_bytes(4, "little")
    assert acs_controls(bytes(looping)) is None


@pytest.mark.parametrize(
    ("kind", "state"),
    [("DMA", State.WARNING), ("DMA-FQ", State.WARNING), ("identity", State.OK)],
)
def test_the_iommu_on(tree: Tree, kind: str, state: State) -> None:
    two_nodes(tree)
    for n in range(8):
        tree.iommu(f"0000:{0x10 * (n + 1) + 1:02x}:00.0", n, kind)
    tree.write("proc/cmdline", "BOOT_IMAGE=/vmlinuz root=UUID=1 secret=2 amd_iommu=on quiet")
    tree.write("proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\nflags\t\t: fpu vme")
    iommu = finding(tree, "iommu")
    assert iommu.state == state
    assert "amd_iommu=on" in iommu.evidence
    assert "secret" not in iommu.evidence
    assert "amd_iommu=off" in iommu.fix or state == State.OK


def test_a_link_at_x4(tree: Tree) -> None:
    tree.card(["0000:10:01.1"], "0000:11:00.0", width=4)
    tree.card(["0000:20:01.1"], "0000:21:00.0", speed="2.5 GT/s PCIe")
    width = finding(tree, "link-width")
    assert width.state == State.WARNING
    assert width.evidence.startswith("0000:11:00.0: x4 of x16, 16 of 63 GB/s")
    assert [slot.speed for slot in slots(tree)] == [5, 1]
    assert finding(tree, "link-speed").state == State.UNKNOWN  # who is busy, only a driver says


def test_other_makers_cards_and_odd_files_are_no_trouble(tree: Tree) -> None:
    tree.card(["0000:10:01.1"], "0000:11:00.0", vendor="0x1002")
    assert slots(tree) == ()
    place = tree.card([], "0000:12:00.0")
    (place / "current_link_speed").write_text("Unknown\n")
    (place / "numa_node").unlink()
    (only,) = slots(tree)
    assert (only.bridges, only.iommu) == ((), None)
    assert isinstance(only.speed, Unknown)
    assert isinstance(only.numa, Unknown)
    assert isinstance(read_slots(tree.root / "nowhere"), Unknown)


HOSTS: list[tuple[dict[str, str], str, object]] = [
    ({"proc/sys/kernel/numa_balancing": "1"}, "numa_balancing", True),
    ({"proc/sys/kernel/numa_balancing": "0"}, "numa_balancing", False),
    (
        {"sys/devices/system/node/node0/x": "", "sys/devices/system/node/node1/x": ""},
        "numa_nodes",
        2,
    ),
    (
        {
            "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave",
            "sys/devices/system/cpu/cpu11/cpufreq/scaling_governor": "performance",
        },
        "governors",
        ("performance", "powersave"),
    ),
    (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]"},
        "huge_pages",
        "never",
    ),
    ({".dockerenv": ""}, "container", True),
    ({"run/.containerenv": ""}, "container", True),
    ({"proc/1/cgroup": "0::/kubepods.slice/x"}, "container", True),
    ({"proc/1/cgroup": "0::/init.scope"}, "container", False),
    (
        {"proc/1/cgroup": "0::/", "proc/self/mountinfo": "1 2 0:5 / / rw - overlay overlay rw\n"},
        "container",
        True,
    ),
    (
        {"proc/1/cgroup": "0::/", "proc/self/mountinfo": "1 2 8:1 / / rw - ext4 /dev/sda1 rw\n"},
        "container",
        False,
    ),
    ({"proc/cpuinfo": "flags\t\t: fpu hypervisor"}, "virtual", True),
    ({"proc/cpuinfo": "flags\t\t: fpu"}, "virtual", False),
    ({"proc/cpuinfo": "vendor_id\t: GenuineIntel"}, "cpu_vendor", "GenuineIntel"),
    (
        {"proc/cmdline": "quiet iommu=pt intel_iommu=on pci=realloc"},
        "boot",
        ("iommu=pt", "intel_iommu=on", "pci=realloc"),
    ),
]


@pytest.mark.parametrize(("files", "name", "value"), HOSTS)
def test_a_host(tree: Tree, files: dict[str, str], name: str, value: object) -> None:
    assert isinstance(getattr(read_host(tree.root / "nowhere"), name), Unknown)
    for path, text in files.items():
        tree.write(path, text)
    assert getattr(read_host(tree.root), name) == value


@pytest.mark.parametrize(("inode", "own"), [("4026531839", False), ("4026532441", True)])
def test_the_ipc_namespace(tree: Tree, inode: str, own: bool) -> None:
    link = tree.root / "proc/self/ns/ipc"
    link.parent.mkdir(parents=True)
    link.symlink_to(f"ipc:[{inode}]")
    assert read_host(tree.root).own_ipc is own


def test_this_host_can_be_read() -> None:
    host = read_host()
    assert isinstance(host, Host)
    assert isinstance(host.shm, int)
    assert isinstance(host.interfaces, tuple) and "lo" in host.interfaces


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1, 2, 3]), ("2,0", [2, 0]), ("GPU-00000003", [3]), ("1,9,2", [1]), ("", [])],
)
def test_cards_that_cuda_does_not_show_are_left_out(
    visible: str | None, indices: list[int]
) -> None:
    facts = healthy(4) if visible is None else environ(healthy(4), CUDA_VISIBLE_DEVICES=visible)
    seen = only_visible(facts)
    assert [gpu.index for gpu in seen.cards] == indices
    assert isinstance(seen.pairs, tuple) and isinstance(seen.slots, tuple)
    assert len(seen.pairs) == len(indices) * (len(indices) - 1) // 2
    assert len(seen.slots) == len(indices)
    assert only_visible(replace(facts, gpus=Unknown())).gpus == Unknown()
