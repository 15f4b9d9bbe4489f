"""Facts of machines: one on which nothing is wrong, and changes to it."""

from dataclasses import replace
from itertools import combinations
from typing import Any

from sglang_overlay.doctor.facts import (
    Bridge,
    Cache,
    Driver,
    Facts,
    Gpu,
    Host,
    Maybe,
    Pair,
    Python,
    Settings,
    Slot,
    Torch,
)
from sglang_overlay.patchset.series import read_names

from ..pins import PINS

GIB = 2**30
#: The patches of each pin.
PATCHES = {pin.version: tuple(read_names(pin)) for pin in PINS}
WANTED = {
    "sglang-kernel": "0.4.10",
    "flashinfer-python": "0.7.2",
    "torch": "2.14.1",
    "nvidia-nccl-cu13": "2.30.7",
}
NAMES = frozenset({"NCCL_DEBUG", "NCCL_ALGO", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"}) | {
    *("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE", "NCCL_SOCKET_IFNAME", "NCCL_NVLS_ENABLE"),
    *("NCCL_MAX_NCHANNELS", "NCCL_IB_HCA"),
}
TORCH = Torch("2.14.1+cu130", "13.0", "2.30.7", ("sm_90", "sm_100", "sm_120", "compute_120"), 8)


def card(index: int, **changes: Any) -> Gpu:
    """An RTX PRO 6000 Blackwell, idle."""
    gpu = Gpu(
        index=index,
        name="NVIDIA RTX PRO 6000 Blackwell Server Edition",
        bus=f"0000:{16 * (index + 1):02x}:00.0",
        capability=(12, 0),
        memory=96 * GIB,
        used=GIB // 2,
        uuid=f"GPU-{index:08x}",
        bar1=128 * GIB,
        width=16,
        width_max=16,
        speed=5,
        speed_max=5,
        busy=0,
    )
    return replace(gpu, **changes)


def slot(gpu: Gpu, **changes: Any) -> Slot:
    """Its place in the PCI tree: a root port of its own."""
    port = Bridge(f"{gpu.bus[:7]}01.1", ())
    base = Slot(gpu.bus, 0, None, (port,), f"pci{gpu.bus[:7]}", 16, 16, 5, 5)
    return replace(base, **changes)


def healthy(count: int = 8, **changes: Any) -> Facts:
    """``count`` cards on root ports of one NUMA node, and a server as it should be."""
    cards = tuple(card(n) for n in range(count))
    facts = Facts(
        driver=Driver("580.95.05", (13, 0)),
        gpus=cards,
        pairs=tuple(Pair(a, b, "NODE", False, "ok") for a, b in combinations(range(count), 2)),
        slots=tuple(slot(gpu) for gpu in cards),
        host=Host(
            boot=(),
            cpu_vendor="AuthenticAMD",
            virtual=False,
            numa_nodes=2,
            numa_balancing=False,
            governors=("performance",),
            huge_pages="madvise",
            container=False,
            own_ipc=False,
            shm=256 * GIB,
            shm_free=256 * GIB,
            memlock=-1,
            open_files=1048576,
            interfaces=("eth0", "lo"),
        ),
        python=Python(
            executable="/env/bin/python",
            version="3.11.9",
            versions={"sglang": "0.5.23", **WANTED},
            wanted=WANTED,
            nvcc="/usr/local/cuda/bin/nvcc",
            torch=replace(TORCH, devices=count),
            patches=(
                "eagle-flashinfer-mla-draft-extend-graph",
                "eagle-flashinfer-mla-draft-kv-lens",
                "spec-graph-report",
            ),
            nccl_names=NAMES,
        ),
        settings=Settings(environ={"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}),
        cache=Cache("/home/u/.cache/sglang", 500 * GIB, "ext4", True, 12, "", None),
        pins=PATCHES,
    )
    return replace(facts, **changes)


def cards(facts: Facts, **changes: Any) -> Facts:
    """All cards changed alike; the slots and pairs stay."""
    return replace(facts, gpus=tuple(replace(gpu, **changes) for gpu in facts.cards))


def pairs(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.pairs, tuple)
    return replace(facts, pairs=tuple(replace(pair, **changes) for pair in facts.pairs))


def slots(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.slots, tuple)
    return replace(facts, slots=tuple(replace(place, **changes) for place in facts.slots))


def host(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, host=replace(facts.host, **changes))


def python(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.python, Python)
    return replace(facts, python=replace(facts.python, **changes))


def versions(facts: Facts, **changes: str) -> Facts:
    """Packages of other versions; an underscore stands for a dash."""
    assert isinstance(facts.python, Python)
    new = {name.replace("_", "-"): version for name, version in changes.items()}
    return python(facts, versions={**facts.python.versions, **new})


def torch(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.python, Python) and isinstance(facts.python.torch, Torch)
    return python(facts, torch=replace(facts.python.torch, **changes))


def environ(facts: Facts, **variables: str) -> Facts:
    """Variables more; PCIe-IPC stays on unless it is named."""
    settings = facts.settings
    return replace(facts, settings=replace(settings, environ={**settings.environ, **variables}))


def cache(facts: Facts, **changes: Any) -> Facts:
    assert isinstance(facts.cache, Cache)
    return replace(facts, cache=replace(facts.cache, **changes))


def server(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, server=replace(facts.server, **changes))


def fused(facts: Facts, backend: str | None, *patches: str, **changes: Any) -> Facts:
    """A server with this FlashInfer backend, and flashinfer-fusion-sm120 and ``patches`` active."""
    active = ("flashinfer-fusion-sm120", *patches)
    return python(server(facts, fusion=backend, **changes), patches=active)


def conf(facts: Facts, **variables: str) -> Facts:
    """Settings that stand in ``/etc/nccl.conf``."""
    settings = replace(facts.settings, nccl_conf=variables, nccl_conf_file="/etc/nccl.conf")
    return replace(facts, settings=settings)


def graph_file(facts: Facts, count: int, path: str = "/opt/graph.xml") -> Facts:
    """A graph file for ``count`` cards, which lies at ``path``."""
    channel = "".join(f'<gpu dev="{n}"/>' for n in range(count))
    text = f'<graphs version="1"><graph id="0"><channel>{channel}</channel></graph></graphs>'
    return replace(facts, settings=replace(facts.settings, files={path: text}))


def behind_switch(facts: Facts, acs: Maybe[tuple[str, ...]]) -> Facts:
    """Every four cards behind one switch, whose ports have these ACS controls on."""
    assert isinstance(facts.slots, tuple)
    found = []
    for n, place in enumerate(facts.slots):
        top = Bridge(f"0000:{0x80 + n // 4:02x}:00.0", ())
        found.append(replace(place, bridges=(Bridge(f"0000:{0x90 + n:02x}:00.0", acs), top)))
    return replace(facts, slots=tuple(found))


def stock(**changes: object) -> Facts:
    """Eight cards, no patch, and a server like this."""
    return python(server(WELL, **changes), patches=())


WELL, TWO, ONE = healthy(8), healthy(2), healthy(1)
NVLINK = cards(pairs(WELL, nvlink=True), name="NVIDIA H200", capability=(9, 0))
