"""What was read of a machine: plain values, each of which may be unknown.

Sizes are bytes, link speeds PCIe generations (5 = 32 GT/s a lane), times seconds, unless a
name says otherwise. The defaults are those of a machine of which nothing could be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Unknown:
    """A fact that could not be read, and why."""

    why: str = "not read"


Maybe: TypeAlias = T | Unknown
_UNREAD = Unknown()


@dataclass(frozen=True)
class Gpu:
    """A card as NVML describes it. ``bus`` is the PCI address as sysfs writes it."""

    index: int
    name: str
    bus: str
    capability: tuple[int, int]
    memory: int
    used: int = 0
    uuid: str = ""
    bar1: Maybe[int] = _UNREAD
    width: Maybe[int] = _UNREAD
    width_max: Maybe[int] = _UNREAD
    speed: Maybe[int] = _UNREAD
    speed_max: Maybe[int] = _UNREAD
    busy: Maybe[int] = _UNREAD  # percent of the last moment that a kernel ran
    compute_mode: str = "default"
    mig: bool = False
    fabric: str = "not supported"  # NVSwitch: "not started", "in progress", "completed"


@dataclass(frozen=True)
class Pair:
    """Two cards by NVML index, ``a`` below ``b``. ``level`` as ``nvidia-smi topo -m`` has it:
    PIX, PXB, PHB, NODE or SYS. ``peer`` is "ok", or why NVML says that there is none."""

    a: int
    b: int
    level: Maybe[str] = _UNREAD
    nvlink: Maybe[bool] = _UNREAD
    peer: Maybe[str] = _UNREAD


@dataclass(frozen=True)
class Driver:
    """``cuda`` is the newest CUDA that the driver runs; ``lost`` the cards that it counts and
    that do not answer, with the reason."""

    version: str
    cuda: tuple[int, int]
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bridge:
    """A PCI bridge above a card. ``acs`` are the names of the ACS controls that are on, as
    lspci writes them; ``None`` when the bridge has no ACS."""

    bus: str
    acs: Maybe[tuple[str, ...] | None] = _UNREAD


@dataclass(frozen=True)
class Slot:
    """A card as sysfs describes it: the bridges above it, the nearest first."""

    bus: str
    numa: Maybe[int] = _UNREAD
    iommu: Maybe[str | None] = _UNREAD  # None: no IOMMU; else "DMA", "DMA-FQ", "identity"
    bridges: tuple[Bridge, ...] = ()
    root: str = ""
    width: Maybe[int] = _UNREAD
    width_max: Maybe[int] = _UNREAD
    speed: Maybe[int] = _UNREAD
    speed_max: Maybe[int] = _UNREAD


@dataclass(frozen=True)
class Host:
    """``boot`` are the words of the kernel command line that concern the IOMMU, PCI and NUMA."""

    boot: Maybe[tuple[str, ...]] = _UNREAD
    cpu_vendor: Maybe[str] = _UNREAD
    virtual: Maybe[bool] = _UNREAD
    numa_nodes: Maybe[int] = _UNREAD
    numa_balancing: Maybe[bool] = _UNREAD
    governors: Maybe[tuple[str, ...]] = _UNREAD
    huge_pages: Maybe[str] = _UNREAD  # of transparent huge pages: always, madvise, never
    container: Maybe[bool] = _UNREAD
    own_ipc: Maybe[bool] = _UNREAD  # an IPC namespace that is not the host's
    shm: Maybe[int] = _UNREAD
    shm_free: Maybe[int] = _UNREAD
    memlock: Maybe[int] = _UNREAD  # -1: unlimited
    open_files: Maybe[int] = _UNREAD  # the hard limit
    interfaces: Maybe[tuple[str, ...]] = _UNREAD


@dataclass(frozen=True)
class Torch:
    """What torch says in a process of its own. ``problem`` is why CUDA does not work there."""

    version: str
    cuda: str
    nccl: str
    archs: tuple[str, ...]
    devices: int
    problem: str = ""


@dataclass(frozen=True)
class Python:
    """The environment that runs the server. ``versions`` has the installed distributions of
    interest, ``wanted`` what SGLang's and torch's own metadata ask for (``==`` only)."""

    executable: str
    version: str
    versions: Mapping[str, str] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)
    sitecustomize: tuple[str, ...] = ()
    nvcc: Maybe[str | None] = _UNREAD
    torch: Maybe[Torch] = _UNREAD
    patches: Maybe[tuple[str, ...]] = _UNREAD
    patch_problems: tuple[str, ...] = ()
    nccl_names: Maybe[frozenset[str]] = _UNREAD


@dataclass(frozen=True)
class Settings:
    """``environ`` holds the variables of interest, secrets redacted; ``nccl_conf`` what NCCL's
    configuration files set; ``files`` the text of files that a variable names."""

    environ: Mapping[str, str] = field(default_factory=dict)
    nccl_conf: Mapping[str, str] = field(default_factory=dict)
    nccl_conf_file: str = ""
    files: Mapping[str, Maybe[str]] = field(default_factory=dict)

    @property
    def nccl(self) -> dict[str, str]:
        """The NCCL variables as NCCL sees them: the environment wins over its files."""
        env = {k: v for k, v in self.environ.items() if k.startswith("NCCL_")}
        return {**self.nccl_conf, **env}

    def origin(self, name: str) -> str:
        """Where NCCL's variable ``name`` comes from, in brackets."""
        return f"(from {'the environment' if name in self.environ else self.nccl_conf_file})"

    @property
    def expandable_segments(self) -> str:
        """The variable that gives torch's allocator expandable segments, with its value."""
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            value = self.environ.get(name, "")
            if "expandable_segments:true" in value.replace(" ", "").lower().split(","):
                return f"{name}={value}"
        return ""


@dataclass(frozen=True)
class Cache:
    """Where kernels that are built at start are kept. ``peers`` is SGLang's own file of which
    card reaches which, by CUDA index."""

    folder: str
    free: Maybe[int] = _UNREAD
    filesystem: Maybe[str] = _UNREAD
    writable: Maybe[bool] = _UNREAD
    built: Maybe[int] = _UNREAD
    peers_file: str = ""
    peers: Maybe[Mapping[str, bool] | None] = _UNREAD


@dataclass(frozen=True)
class Server:
    """What the user means to start. ``None`` where the command line does not say; a backend
    for prefill or decode alone falls back to ``attention_backend``."""

    tp: int | None = None
    pp: int = 1
    cards: int | None = None  # of this machine, from the first on; None: not known, or all
    nodes: int = 1
    attention_backend: str | None = None
    prefill_backend: str | None = None
    decode_backend: str | None = None
    draft_backend: str | None = None
    attention_mode: str = "prefill"  # of verify and draft-extend
    mla: bool | None = None  # of the target
    own_drafter: bool = False  # a draft model of its own; else layers of the target draft
    draft_mla: bool | None = None  # of that draft model
    algorithm: str | None = None
    draft_decode: bool = True  # draft tokens after the one that draft-extend makes
    dcp: int = 1
    fusion: str | None = None
    custom_all_reduce: bool = True
    deterministic: bool = False
    cuda_graph: bool = True
    unread: tuple[str, ...] = ()  # arguments that hold others, which are not read here

    @property
    def group_nodes(self) -> int:
        """Over how many nodes one tensor-parallel group goes: pipeline stages come first."""
        return max(self.nodes // self.pp, 1)

    @property
    def local_tp(self) -> int | None:
        """How many ranks of one tensor-parallel group are on this machine."""
        return self.tp and max(self.tp // self.group_nodes, 1)


@dataclass(frozen=True)
class Copy:
    """A real copy from card ``source`` to card ``target`` (CUDA indices). ``result`` is
    "right", "wrong" (``wrong_bytes`` says how many), "hangs", "failed" or "not tried"."""

    source: int
    target: int
    result: str
    peer: bool | None = None
    wrong_bytes: int = 0
    latency_us: float | None = None  # each of 100 copies of 4 KiB back to back, median
    bandwidth: float | None = None  # GB/s, copies of 64 MiB, median
    detail: str = ""


@dataclass(frozen=True)
class Facts:
    """All that is known. ``copies`` is ``None`` without ``--deep``; ``pins`` are the patches of
    each pin, by its version, the newest last."""

    driver: Maybe[Driver] = _UNREAD
    gpus: Maybe[tuple[Gpu, ...]] = _UNREAD
    pairs: Maybe[tuple[Pair, ...]] = _UNREAD
    slots: Maybe[tuple[Slot, ...]] = _UNREAD
    host: Host = Host()
    python: Maybe[Python] = _UNREAD
    settings: Settings = Settings()
    cache: Maybe[Cache] = _UNREAD
    server: Server = Server()
    copies: Maybe[tuple[Copy, ...]] | None = None
    pins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pin(self) -> str:
        """The pin that the installed SGLang is, the newest where it is none."""
        versions = {} if isinstance(self.python, Unknown) else self.python.versions
        have = versions.get("sglang", "").partition("+")[0]
        return have if have in self.pins else [*self.pins][-1]

    def has_patch(self, name: str) -> bool:
        """Whether there is such a patch of ours for the pin."""
        return name in self.pins[self.pin]

    @property
    def active(self) -> tuple[str, ...] | None:
        """Our patches that a server started here would run; ``None`` when they are not known."""
        if isinstance(self.python, Unknown) or isinstance(self.python.patches, Unknown):
            return None
        return () if self.settings.environ.get("SGLANG_OVERLAY") == "0" else self.python.patches

    @property
    def cards(self) -> tuple[Gpu, ...]:
        """The cards, none when they are not known."""
        return () if isinstance(self.gpus, Unknown) else self.gpus

    def with_cards(self, gpus: tuple[Gpu, ...]) -> "Facts":
        """The facts of a machine that has only these of its cards."""
        pairs, slots = self.pairs, self.slots
        order = {gpu.index for gpu in gpus}
        if not isinstance(pairs, Unknown):
            pairs = tuple(pair for pair in pairs if {pair.a, pair.b} <= order)
        if not isinstance(slots, Unknown):
            buses = {gpu.bus for gpu in gpus}
            slots = tuple(slot for slot in slots if slot.bus in buses)
        return replace(self, gpus=gpus, pairs=pairs, slots=slots)

    @property
    def world(self) -> int:
        """How many ranks of one tensor-parallel group the server has on this machine."""
        return self.server.local_tp or len(self.cards)

    @property
    def nvlinked(self) -> bool | None:
        """Whether every two cards have an NVLink; ``None`` when that is not known."""
        if isinstance(self.pairs, Unknown) or not self.pairs:
            return None
        links = [pair.nvlink for pair in self.pairs]
        if any(link is False for link in links):
            return False
        return None if any(isinstance(link, Unknown) for link in links) else True
