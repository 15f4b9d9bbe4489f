"""What each check says of a machine that differs in one thing."""

from dataclasses import replace
from itertools import permutations

from sglang_overlay.doctor.facts import Copy, Driver, Facts, Unknown
from sglang_overlay.doctor.finding import State

from .graph_cases import GRAPH_CASES
from .machine import (
    GIB,
    NVLINK,
    ONE,
    TWO,
    WELL,
    behind_switch,
    cache,
    card,
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

NO_IPC = environ(WELL, SGLANG_ENABLE_PCIE_IPC_ALLREDUCE="0")
SEGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}
MEASURED = "allreduce-fusion-measured"
GRAPH = {"NCCL_GRAPH_FILE": "/opt/graph.xml"}


def copied(facts: Facts, **changes: object) -> Facts:
    """Two cards between which real copies were made; the first came out like this."""
    good = Copy(0, 1, "right", True, 0, 5.0, 50.0)
    return replace(facts, copies=(replace(good, **changes), replace(good, source=1, target=0)))  # type: ignore[arg-type]


def narrow_last() -> Facts:
    return replace(WELL, gpus=(*WELL.cards[:7], card(7, width=4)))


def copied_eight() -> Facts:
    copies = [Copy(a, b, "right", True, 0, 5.0, 50.0) for a, b in permutations(range(8), 2)]
    at = next(n for n, copy in enumerate(copies) if (copy.source, copy.target) == (6, 7))
    copies[at] = Copy(6, 7, "hangs")
    return replace(WELL, copies=tuple(copies))


def linked_pairs() -> Facts:
    """Four cards: 0 and 1 have an NVLink, 2 and 3 have one; node 0 has the first two."""
    far = healthy(4)
    assert isinstance(far.pairs, tuple)
    found = [
        replace(p, nvlink=True) if p.a // 2 == p.b // 2 else replace(p, level="SYS")
        for p in far.pairs
    ]
    return replace(far, pairs=tuple(found))


#: (id, state, facts, a pattern of its text)
CASES: list[tuple[str, State, Facts, str]] = [
    # the cards
    ("gpus", State.ERROR, server(WELL, tp=16), "8 cards, and the server wants 16"),
    (
        "gpus",
        State.ERROR,
        replace(WELL, driver=Driver("580", (13, 1), ("card 3: GPU is lost",))),
        "1 of the driver's cards do not answer.*card 3: GPU is lost.*xid",
    ),
    ("gpus", State.OK, server(WELL, tp=16, nodes=2), "8 x NVIDIA RTX PRO 6000"),
    ("gpus", State.OK, server(WELL, tp=8, pp=2, nodes=2), "8 x NVIDIA RTX PRO 6000"),
    ("gpus", State.ERROR, server(TWO, tp=8, nodes=2), "2 cards.*wants 4.*--tp 4"),
    ("gpus", State.ERROR, server(TWO, tp=4, pp=2, nodes=2), "2 cards.*wants 4.*--tp 2"),
    ("gpus", State.ERROR, server(replace(WELL, gpus=()), tp=2), "no card is visible"),
    ("gpus", State.UNKNOWN, replace(WELL, gpus=()), "CUDA_VISIBLE_DEVICES"),
    (
        "gpus",
        State.WARNING,
        replace(TWO, gpus=(card(0), card(1, name="NVIDIA GeForce RTX 5090", memory=32 * GIB))),
        "1 x NVIDIA GeForce RTX 5090, SM120, 32 GiB",
    ),
    ("driver", State.ERROR, torch(WELL, cuda="14.0"), "580.95.05, up to CUDA 13.0.*CUDA 14.0"),
    ("driver", State.OK, torch(WELL, cuda="12.8"), "built for CUDA 12.8"),
    ("driver", State.OK, torch(WELL, cuda=""), "not known"),
    ("mig", State.ERROR, cards(WELL, mig=True), "nvidia-smi -i 0,1,2,3,4,5,6,7 -mig 0"),
    ("compute-mode", State.ERROR, cards(ONE, compute_mode="exclusive process"), "-c DEFAULT"),
    ("gpu-memory", State.WARNING, cards(ONE, used=40 * GIB), "0: 40.0 of 96 GiB"),
    ("gpu-memory", State.OK, cards(ONE, used=GIB), "free"),
    ("fabric", State.ERROR, cards(NVLINK, fabric="in progress"), "nvidia-fabricmanager"),
    # software
    ("versions", State.ERROR, versions(WELL, flashinfer_python="0.7.1"), "asks for 0.7.2"),
    ("versions", State.OK, versions(WELL, torch="2.14.1+cu130"), "SGLang 0.5.23"),
    ("versions", State.OK, versions(WELL, sglang="0.5.22+local"), "SGLang 0.5.22"),
    (
        "versions",
        State.WARNING,
        versions(WELL, sglang="0.5.21"),
        "no pin; there is 0.5.22, 0.5.23.*sglang==0.5.23",
    ),
    ("versions", State.UNKNOWN, python(WELL, versions={}), "not installed"),
    (
        "nccl-library",
        State.ERROR,
        versions(WELL, nvidia_nccl_cu12="2.27.3"),
        "uninstall nvidia-nccl-cu12 && .*nvidia-nccl-cu13==2.30.7",
    ),
    ("nccl-library", State.WARNING, torch(WELL, nccl="2.28.3"), "loaded NCCL 2.28.3"),
    ("torch", State.ERROR, torch(WELL, archs=("sm_80", "sm_90")), "no kernels for sm_120"),
    ("torch", State.OK, torch(WELL, archs=("sm_120a",)), "8 devices"),
    ("torch", State.OK, torch(WELL, archs=("sm_90", "compute_90")), "8 devices"),
    ("torch", State.ERROR, torch(WELL, problem="Error 804: forward compat"), "Error 804"),
    ("torch", State.UNKNOWN, torch(replace(WELL, gpus=()), problem="no driver"), "no driver"),
    ("patches", State.WARNING, python(WELL, patches=()), "is stock"),
    ("patches", State.WARNING, environ(WELL, SGLANG_OVERLAY="0"), "unset SGLANG_OVERLAY"),
    ("patches", State.ERROR, python(WELL, patch_problems=("x is mixed",)), "x is mixed"),
    # topology
    ("topology", State.WARNING, pairs(WELL, level="SYS"), "28 pairs SYS"),
    ("topology", State.OK, pairs(pairs(WELL, level="SYS"), nvlink=True), "NVLink"),
    ("topology", State.OK, pairs(WELL, level="PIX"), "28 pairs PIX"),
    ("topology", State.WARNING, linked_pairs(), "4 pairs SYS; 2 of 6 pairs by NVLink"),
    ("topology", State.OK, server(linked_pairs(), tp=2, cards=2), "every two cards have an NVLink"),
    ("all-reduce", State.OK, server(linked_pairs(), tp=2, cards=2), "2 ranks: custom v2"),
    ("all-reduce", State.OK, linked_pairs(), "4 ranks: pcie-ipc"),
    ("link-width", State.OK, server(narrow_last(), tp=4, cards=4), "as wide as they can be"),
    ("link-width", State.WARNING, narrow_last(), "card 7: x4 of x16"),
    ("copies", State.OK, server(copied_eight(), tp=2, cards=2), "2 copies right"),
    ("copies", State.ERROR, copied_eight(), "6->7 hangs"),
    ("link-width", State.WARNING, cards(ONE, width=4), "x4 of x16, 16 of 63 GB/s"),
    ("link-width", State.WARNING, slots(replace(ONE, gpus=Unknown()), width=8), "x8 of x16"),
    ("link-speed", State.OK, cards(WELL, speed=1), "as those of idle cards are"),
    ("link-speed", State.WARNING, cards(ONE, speed=2, busy=97), "gen 2 of 5, 97 % busy"),
    ("bar1", State.WARNING, cards(TWO, bar1=256 * 2**20), "0.25 of 96 GiB"),
    ("peer-access", State.WARNING, pairs(TWO, peer="not supported"), "0-1: not supported"),
    # what stands between
    ("acs", State.WARNING, behind_switch(WELL, ("SrcValid", "ReqRedir")), "setpci -s 0000:90:00.0"),
    ("acs", State.OK, behind_switch(WELL, ("SrcValid",)), "redirects nothing on 8 bridges"),
    ("acs", State.OK, WELL, "nothing to redirect"),
    ("acs", State.UNKNOWN, behind_switch(WELL, Unknown("as root")), "sudo sglang-overlay doctor"),
    ("iommu", State.WARNING, slots(WELL, iommu="DMA-FQ"), "amd_iommu=off"),
    ("iommu", State.WARNING, host(slots(ONE, iommu="DMA"), cpu_vendor="GenuineIntel"), "intel_"),
    ("iommu", State.OK, slots(WELL, iommu="identity"), "passes addresses through"),
    ("iommu", State.UNKNOWN, slots(WELL, iommu=Unknown("cannot")), "cannot"),
    ("virtual-machine", State.WARNING, host(WELL, virtual=True), "NCCL_TOPO_FILE"),
    # real copies
    ("copies", State.OK, copied(TWO), "2 copies right, bit by bit; 2 of them direct"),
    ("copies", State.ERROR, copied(TWO, result="wrong", wrong_bytes=9), r"0->1 wrong \(9 bytes\)"),
    ("copies", State.ERROR, copied(TWO, result="hangs", detail="no answer"), "hang"),
    ("copies", State.UNKNOWN, copied(TWO, result="not tried", detail="time"), "1 of 2.*time"),
    ("copies", State.UNKNOWN, replace(TWO, copies=Unknown("one card")), "one card"),
    ("copy-speed", State.WARNING, copied(WELL, bandwidth=3.0), "0->1: 3.0"),
    ("copy-speed", State.OK, copied(TWO), "50.0 to 50.0 GB/s"),
    # containers
    ("shm", State.ERROR, host(WELL, shm=64 * 2**20, shm_free=64 * 2**20), "64 of 64 MiB"),
    ("shm", State.OK, host(ONE, shm_free=GIB), "free"),
    ("ipc-namespace", State.WARNING, host(WELL, own_ipc=True, container=True), "--ipc=host"),
    ("ipc-namespace", State.OK, host(WELL, own_ipc=True), "outside a container"),
    ("memlock", State.WARNING, host(WELL, memlock=65536, container=True), "--ulimit memlock=-1"),
    ("open-files", State.WARNING, host(WELL, open_files=4096), "ulimit -n 65535"),
    # NCCL
    ("nccl-algo", State.ERROR, environ(WELL, NCCL_ALGO="Tree"), "allreduce:tree"),
    ("nccl-algo", State.ERROR, conf(WELL, NCCL_ALGO="nvls"), "from /etc/nccl.conf"),
    ("nccl-algo", State.ERROR, environ(WELL, NCCL_ALGO="Tree,NVLS"), "'allreduce:tree,nvls'"),
    ("nccl-algo", State.ERROR, environ(WELL, NCCL_ALGO="^Ring"), r"NCCL_ALGO='allreduce:\^ring'"),
    ("nccl-algo", State.ERROR, environ(WELL, NCCL_ALGO="PAT"), "unset NCCL_ALGO"),
    (
        "nccl-algo",
        State.ERROR,
        environ(WELL, NCCL_ALGO="tree;broadcast:ring"),
        "NCCL_ALGO='allreduce:tree;broadcast:ring'",
    ),
    (
        "nccl-algo",
        State.ERROR,
        environ(WELL, NCCL_ALGO="ring,tree;broadcast:tree;allreduce:tree"),
        "NCCL_ALGO='allreduce:tree'",
    ),
    ("nccl-algo", State.ERROR, environ(WELL, NCCL_ALGO="nvls; ring"), "refuses.*' ring'.*unset"),
    ("nccl-p2p", State.WARNING, environ(WELL, NCCL_P2P_DISABLE="1"), "unset NCCL_P2P_DISABLE"),
    ("nccl-p2p", State.OK, environ(WELL, NCCL_P2P_DISABLE="0"), "=0"),
    ("nccl-p2p", State.WARNING, environ(WELL, NCCL_P2P_LEVEL="LOC"), "unset NCCL_P2P_LEVEL"),
    ("nccl-graph-file", State.ERROR, environ(WELL, **GRAPH), "cannot be read"),
    ("nccl-graph-file", State.ERROR, environ(graph_file(WELL, 4), **GRAPH), "for 4 cards.*uses 8"),
    ("nccl-graph-file", State.OK, environ(graph_file(WELL, 8), **GRAPH), "/opt/graph.xml"),
    (
        "nccl-graph-file",
        State.OK,
        environ(graph_file(server(WELL, tp=16, nodes=2), 8), **GRAPH),
        "/opt/graph.xml",
    ),
    ("nccl-interface", State.ERROR, environ(WELL, NCCL_SOCKET_IFNAME="ib0"), "there is eth0, lo"),
    ("nccl-interface", State.OK, environ(WELL, NCCL_SOCKET_IFNAME="eth"), "eth0"),
    ("nccl-interface", State.ERROR, environ(WELL, NCCL_SOCKET_IFNAME="=eth"), "no interface"),
    ("nccl-interface", State.OK, environ(WELL, NCCL_SOCKET_IFNAME="^docker"), "eth0, lo"),
    ("nccl-names", State.WARNING, environ(WELL, NCCL_MAX_NCHANNEL="4"), "mean NCCL_MAX_NCHANNELS"),
    ("nccl-names", State.OK, environ(WELL, NCCL_DEBUG="WARN"), "NCCL_DEBUG"),
    (
        "nccl-names",
        State.OK,
        environ(WELL, NCCL_VERSION="2.28.9", NCCL_SHARP_DISABLE="1"),
        "no NCCL",
    ),
    ("nccl-names", State.OK, conf(WELL, NVSHMEM_DISABLE_NVLS="1"), "no NCCL"),
    ("nccl-conf", State.WARNING, conf(WELL, NCCL_DEBUG="INFO"), "NCCL_DEBUG=INFO"),
    # all-reduce
    ("all-reduce", State.WARNING, NO_IPC, "export SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1"),
    ("all-reduce", State.WARNING, server(WELL, tp=6), "6 ranks: NCCL"),
    ("all-reduce", State.OK, server(WELL, nodes=2), "several nodes"),
    ("all-reduce", State.UNKNOWN, pairs(WELL, nvlink=Unknown("no answer")), "links"),
    ("fusion", State.ERROR, server(WELL, fusion="auto"), "gate takes SM90 and SM10X"),
    ("fusion", State.OK, server(NVLINK, fusion="auto"), "auto on SM90"),
    ("fusion", State.OK, fused(WELL, "trtllm"), "trtllm on SM120: fused.*not measured here"),
    ("fusion", State.OK, fused(WELL, "auto"), "auto on SM120: fused"),
    ("fusion", State.ERROR, fused(WELL, "mnnvl"), "multicast.*backend trtllm"),
    ("fusion", State.ERROR, fused(WELL, "cutedsl", MEASURED), "multicast.*backend measured"),
    ("fusion", State.ERROR, fused(WELL, "trtllm", nodes=2), "one node.*leave"),
    ("fusion", State.ERROR, fused(WELL, "measured", MEASURED, nodes=2), "one node.*leave"),
    ("fusion", State.WARNING, fused(WELL, "trtllm", tp=6), "for 2, 4, 8 ranks"),
    ("fusion", State.WARNING, fused(WELL, "auto", MEASURED, tp=6), "for 2, 4, 8 ranks"),
    ("fusion", State.WARNING, environ(fused(WELL, "trtllm"), **SEGMENTS), "usual.*unset PYTORCH"),
    ("fusion", State.WARNING, pairs(fused(WELL, "trtllm"), peer="no"), "no peer access"),
    ("fusion", State.WARNING, fused(WELL, "trtllm", deterministic=True), "switches it off"),
    ("fusion", State.OK, fused(WELL, "measured", MEASURED), "measured on SM120: measured at start"),
    ("fusion", State.OK, fused(WELL, "auto", MEASURED), "auto on SM120: measured at start"),
    ("fusion", State.OK, fused(NVLINK, "auto", MEASURED), "auto on SM90: fused"),
    ("fusion", State.OK, fused(ONE, "trtllm"), "one rank"),
    ("fusion", State.ERROR, fused(WELL, "measured"), "of our patch allreduce-fusion-measured"),
    ("fusion", State.ERROR, server(NVLINK, fusion="measured"), "of our patch.*apply the patch, or"),
    (
        "fusion",
        State.ERROR,
        versions(server(WELL, fusion="measured"), sglang="0.5.22"),
        "measured, which there is not for SGLang 0.5.22\nleave",
    ),
    ("fusion", State.ERROR, environ(fused(WELL, "auto"), SGLANG_OVERLAY="0"), "gate takes SM90"),
    ("fusion", State.UNKNOWN, python(fused(WELL, "auto"), patches=Unknown()), "patches"),
    ("all-reduce", State.OK, fused(WELL, "auto", MEASURED), "8 ranks: measured at start"),
    ("all-reduce", State.WARNING, environ(fused(NO_IPC, "trtllm"), **SEGMENTS), "fused: voted out"),
    ("expandable-segments", State.ERROR, environ(TWO, **SEGMENTS), "all-reduce: custom"),
    ("expandable-segments", State.OK, environ(WELL, **SEGMENTS), "pcie-ipc"),
    ("expandable-segments", State.OK, environ(server(TWO, cuda_graph=False), **SEGMENTS), "on"),
    ("expandable-segments", State.OK, environ(fused(NVLINK, "auto"), **SEGMENTS), "custom v2"),
    ("expandable-segments", State.OK, environ(fused(NO_IPC, "trtllm"), **SEGMENTS), "nccl"),
    (
        "expandable-segments",
        State.ERROR,
        environ(fused(TWO, "auto", MEASURED), **SEGMENTS),
        "all-reduce: custom",
    ),
    ("expandable-segments", State.UNKNOWN, environ(Facts(), **SEGMENTS), "is taken is not known"),
    ("expandable-segments", State.OK, environ(NVLINK, **SEGMENTS), "custom v2"),
    ("expandable-segments", State.OK, environ(NO_IPC, **SEGMENTS), "nccl"),
    (
        "visible-devices",
        State.WARNING,
        environ(TWO, CUDA_VISIBLE_DEVICES="GPU-00000000,GPU-00000001"),
        "export CUDA_VISIBLE_DEVICES=0,1",
    ),
    ("visible-devices", State.OK, environ(WELL, CUDA_VISIBLE_DEVICES="0,1"), "0,1"),
    # the host
    ("numa-balancing", State.WARNING, host(WELL, numa_balancing=True), "numa_balancing=0"),
    ("numa-balancing", State.OK, host(WELL, numa_balancing=True, numa_nodes=1), "one node"),
    ("governor", State.WARNING, host(WELL, governors=("powersave",)), "cpupower"),
    ("huge-pages", State.WARNING, host(WELL, huge_pages="never"), "madvise"),
    # caches
    ("cache-disk", State.ERROR, cache(WELL, writable=False), "cannot be written"),
    ("cache-disk", State.ERROR, cache(WELL, free=GIB // 2), "0.5 GiB free"),
    ("cache-disk", State.WARNING, cache(WELL, free=5 * GIB), "5.0 GiB free"),
    ("cache-filesystem", State.WARNING, cache(WELL, filesystem="nfs4"), "nfs4"),
    ("nvcc", State.WARNING, python(WELL, nvcc=Unknown("none")), "CUDA_HOME"),
    ("kernels", State.WARNING, cache(WELL, built=0), "mount /home/u/.cache/sglang"),
    ("peer-file", State.WARNING, cache(TWO, peers_file="/p", peers={"0->1": False}), "rm /p"),
    ("peer-file", State.WARNING, cache(TWO, peers_file="/p", peers={}), "0->1 is not in it"),
    ("peer-file", State.ERROR, cache(TWO, peers_file="/p", peers=Unknown("cut")), "cut"),
    ("peer-file", State.UNKNOWN, cache(TWO, peers=Unknown("denied")), "denied"),
    ("cache-disk", State.UNKNOWN, cache(WELL, writable=Unknown("denied")), "denied.*as the user"),
    ("peer-file", State.OK, cache(TWO, peers_file="/p", peers={"0->1": True}), "/p"),
    (
        "sitecustomize",
        State.WARNING,
        python(WELL, sitecustomize=("/usr/lib/s.py", "/env/s.py")),
        "settings of /env/s.py to the environment of the server or",
    ),
    (
        "sitecustomize",
        State.WARNING,
        python(WELL, sitecustomize=("/s.py", "/env/s.py"), patches=("worker-env",)),
        "settings of /env/s.py to --worker-env or",
    ),
    *GRAPH_CASES,
]
