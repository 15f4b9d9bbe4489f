"""Symptoms that people have reported in public: the machine as each reporter described it gives
the finding that names the cause. What a report does not say is as on a healthy machine."""

from dataclasses import replace

import pytest

from sglang_overlay.doctor.checks import examine
from sglang_overlay.doctor.facts import Copy, Driver, Facts, Unknown
from sglang_overlay.doctor.finding import State

from .machine import (
    GIB,
    WANTED,
    behind_switch,
    cache,
    cards,
    conf,
    environ,
    fused,
    graph_file,
    healthy,
    host,
    pairs,
    python,
    server,
    slots,
    torch,
    versions,
)

MIB = 2**20
DOCKER_SHM = {"shm": 64 * MIB, "shm_free": 64 * MIB, "container": True}
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def nvlinked(facts: Facts, name: str, capability: tuple[int, int]) -> Facts:
    """Cards of a data centre, all linked."""
    return pairs(cards(facts, name=name, capability=capability), nvlink=True)


def geforce(count: int, **changes: object) -> Facts:
    """RTX 4090s, for which the stock driver has no peer access."""
    change = {"name": "NVIDIA GeForce RTX 4090", "capability": (8, 9), "memory": 24 * GIB}
    facts = cards(healthy(count), **{"bar1": 32 * GIB, **change, **changes})
    return pairs(facts, peer="not supported")


def broken(facts: Facts, result: str, **changes: object) -> Facts:
    """Every copy between two cards comes out like this, although peer access is granted."""
    one = replace(Copy(0, 1, result, True), **changes)  # type: ignore[arg-type]
    return replace(facts, copies=(one, replace(one, source=1, target=0)))


def flashinfer(version: str, wanted: str) -> Facts:
    """FlashInfer of another version than SGLang asks for."""
    facts = versions(healthy(1), flashinfer_python=version)
    return python(facts, wanted={**WANTED, "flashinfer-python": wanted})


def mixed() -> Facts:
    """An A4000 with 16 GB beside a 3090 with 24."""
    one, two = healthy(2).cards
    a4000 = replace(one, name="NVIDIA RTX A4000", capability=(8, 6), memory=16 * GIB)
    return replace(healthy(2), gpus=(a4000, replace(two, name="NVIDIA GeForce RTX 3090")))


def ncv4(count: int) -> Facts:
    """A virtual machine whose image brings a graph file for four cards."""
    path = "/opt/microsoft/ncv4/graph.xml"
    facts = nvlinked(healthy(count), "NVIDIA A100 80GB PCIe", (8, 0))
    return conf(graph_file(facts, 4, path), NCCL_GRAPH_FILE=path)


W, E, OK = State.WARNING, State.ERROR, State.OK
#: The report, the machine, the finding that names the cause, and how bad it is.
SYMPTOMS: list[tuple[str, Facts, str, State]] = [
    # All-reduce hangs; booting with intel_iommu=off resolved it.
    ("NVIDIA/nccl#257", slots(healthy(4), iommu="DMA"), "iommu", W),
    # Silent corruption of data moved between cards; the AMD IOMMU was on.
    ("pytorch/pytorch#84803", slots(healthy(4), iommu="DMA-FQ"), "iommu", W),
    # Copied tensors are allocated but zero; iommu=pt is enough.
    ("tinygrad/open-gpu-kernel-modules#18", broken(healthy(2), "wrong"), "copies", E),
    ("tinygrad/open-gpu-kernel-modules#18", slots(healthy(2), iommu="DMA"), "iommu", W),
    # Hangs between cards below one switch, works across sockets; pointed at ACS.
    (
        "NVIDIA/nccl#667",
        behind_switch(healthy(4), ("SrcValid", "ReqRedir", "UpstreamFwd")),
        "acs",
        W,
    ),
    # In a guest, peer access is granted, and writes go to a private mirror.
    ("NVIDIA/nccl#2335", broken(host(healthy(2), virtual=True), "wrong"), "copies", E),
    ("NVIDIA/nccl#2335", host(healthy(2), virtual=True), "virtual-machine", W),
    # Two RTX PRO 6000: the first all-reduce hangs while peer access is reported as fine.
    ("NVIDIA/nccl#1999", broken(healthy(2), "hangs"), "copies", E),
    ("local-inference-lab/rtx6kpro#15", broken(healthy(2), "hangs"), "copies", E),
    # "Is there harm in NCCL_P2P_DISABLE=1?": less speed, and a cause that is not mended.
    ("NVIDIA/nccl#631", environ(healthy(4), NCCL_P2P_DISABLE="1"), "nccl-p2p", W),
    # No peer access: custom all-reduce crashes, or the switch is slower than the socket.
    ("sgl-project/sglang#4814", geforce(8), "peer-access", W),
    ("NVIDIA/nccl#1309", geforce(4), "peer-access", W),
    # BAR1 without Resizable BAR, and one smaller than a modified card's memory.
    ("tinygrad/open-gpu-kernel-modules#13", geforce(2, bar1=256 * MIB), "bar1", W),
    ("aikitoria/open-gpu-kernel-modules#14", cards(geforce(4), memory=48 * GIB), "bar1", W),
    # Links
    ("Syllo/nvtop#6", cards(healthy(2), speed=1, busy=0), "link-speed", OK),
    ("local-inference-lab/rtx6kpro#88", cards(healthy(8), speed=2, busy=100), "link-speed", W),
    ("NVIDIA/NVSentinel#890", cards(healthy(8), width=8, speed=3), "link-width", W),
    # The topology that a guest sees
    ("NVIDIA/nccl#1674", host(healthy(8), virtual=True), "virtual-machine", W),
    ("NVIDIA/nccl#1843", host(healthy(8), virtual=True), "virtual-machine", W),
    # Shared memory of containers
    ("NVIDIA/nccl#290", host(healthy(4), **DOCKER_SHM), "shm", E),
    ("NVIDIA/nccl#342", host(healthy(4), **DOCKER_SHM), "shm", E),
    ("vllm-project/vllm#1710", host(healthy(2), **DOCKER_SHM), "shm", E),
    ("pytorch/torchtitan#853", host(healthy(8), **DOCKER_SHM | {"shm_free": 16 * MIB}), "shm", E),
    ("ggml-org/llama.cpp#23523", host(healthy(2), **DOCKER_SHM), "shm", E),
    ("NVIDIA/nccl#473", host(healthy(4), own_ipc=True, container=True), "ipc-namespace", W),
    # NCCL's own settings
    ("NVIDIA/nccl#317", environ(healthy(2), NCCL_ALGO="Tree"), "nccl-algo", E),
    ("NVIDIA/nccl#1008", ncv4(2), "nccl-graph-file", E),
    ("NVIDIA/nccl#1008", ncv4(2), "nccl-conf", W),
    ("NVIDIA/nccl#1240", ncv4(1), "nccl-graph-file", E),
    ("Azure/azhpc-images#327", ncv4(1), "nccl-graph-file", E),
    ("NVIDIA/nccl#1837", environ(healthy(8), NCCL_SOCKET_IFNAME="eth2"), "nccl-interface", E),
    # Which all-reduce
    (
        "vllm-project/vllm#56128",
        environ(healthy(4), SGLANG_ENABLE_PCIE_IPC_ALLREDUCE="0"),
        "all-reduce",
        W,
    ),
    ("sgl-project/sglang#15650", server(healthy(2), fusion="trtllm"), "fusion", E),
    # Stock refuses SM120; let in for everything it lost at TP=4. Patched, `auto` measures.
    ("sgl-project/sglang#32330", server(healthy(4), fusion="auto"), "fusion", E),
    (
        "sgl-project/sglang#32330",
        fused(healthy(4), "auto", "allreduce-fusion-measured"),
        "fusion",
        OK,
    ),
    ("vllm-project/vllm#42609", environ(healthy(2), **SEGMENTS), "expandable-segments", E),
    (
        "sgl-project/sglang#25996",
        environ(healthy(2), CUDA_VISIBLE_DEVICES="GPU-00000000,GPU-00000001"),
        "visible-devices",
        W,
    ),
    (
        "vllm-project/vllm#13815",
        environ(healthy(1), CUDA_VISIBLE_DEVICES="GPU-52a3a85d-3c55-ca3a-a955-82c69ed360fc"),
        "visible-devices",
        W,
    ),
    # Versions and builds
    ("pytorch/pytorch#150733", torch(healthy(1), archs=("sm_80", "sm_86", "sm_90")), "torch", E),
    ("pytorch/pytorch#167244", torch(healthy(2), archs=("sm_80", "sm_90")), "torch", E),
    (
        "sgl-project/sglang#11395",
        replace(healthy(8), driver=Driver("550.90", (12, 4))),
        "driver",
        E,
    ),
    ("sgl-project/sglang#10891", flashinfer("0.3.1", wanted="0.4.0rc1"), "versions", E),
    ("redai-studio/Relax#8", flashinfer("0.6.3", wanted="0.6.4"), "versions", E),
    ("pytorch/pytorch#186591", versions(healthy(1), nvidia_nccl_cu12="2.29.3"), "nccl-library", E),
    ("verl-project/verl#6621", torch(healthy(8), nccl="2.28.9"), "nccl-library", W),
    ("vllm-project/vllm#49497", python(healthy(1), nvcc=Unknown("no nvcc")), "nvcc", W),
    (
        "vllm-project/vllm#36077",
        python(healthy(2), nvcc=Unknown("no nvcc below :/usr/local/cuda-12.8")),
        "nvcc",
        W,
    ),
    ("pytorch/pytorch#173679", cache(healthy(8), filesystem="nfs4"), "cache-filesystem", W),
    # CUDA does not start
    ("pytorch/pytorch#35710", cards(healthy(8), fabric="not started"), "fabric", E),
    ("NVIDIA/DIGITS#2005", cards(healthy(2), compute_mode="exclusive process"), "compute-mode", E),
    # Cards that others use, or of two kinds
    ("sgl-project/sglang#1533", cards(healthy(8), used=30 * GIB), "gpu-memory", W),
    ("sgl-project/sglang#1533", mixed(), "gpus", W),
    # An eager pass
    (
        "sgl-project/sglang#6805",
        python(server(healthy(8), attention_backend="flashinfer", mla=True), patches=()),
        "eagle-graphs",
        W,
    ),
    # The host
    ("deepseek-ai/DeepEP#624", host(healthy(8), numa_balancing=True), "numa-balancing", W),
    (
        "pypa/virtualenv#629",
        python(healthy(1), sitecustomize=("/usr/lib/python2.7/s.py", "/venv/lib/python2.7/s.py")),
        "sitecustomize",
        W,
    ),
]


@pytest.mark.parametrize(("report", "facts", "id", "state"), SYMPTOMS)
def test_a_reported_symptom_gives_the_finding_that_names_its_cause(
    report: str, facts: Facts, id: str, state: State
) -> None:
    found = [f for f in examine(facts) if (f.id, f.state) == (id, state)]
    assert found
    assert found[0] not in examine(healthy(len(facts.cards)))


def test_thirty_reports_and_more() -> None:
    assert len({report for report, *_ in SYMPTOMS}) >= 30
