"""The driver's own view, through NVML: what ``nvidia-smi`` and ``nvidia-smi topo`` print."""

from collections.abc import Callable
from itertools import combinations
from typing import Any

from .facts import Driver, Facts, Gpu, Maybe, Pair, T, Unknown

_LEVELS = {0: "X", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_PEER = (
    "ok",
    "the chipset does not support it",
    "the GPU does not support it",
    "the topology does not support it",
    "disabled by the driver's registry key",
    "not supported",
    "unknown",
)
_READ, _NVLINK = 0, 2  # NVML_P2P_CAPS_INDEX_*; pynvml has READ as a tuple by mistake
_COMPUTE = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_FABRIC = {0: "not supported", 1: "not started", 2: "in progress", 3: "completed"}


def read_nvml() -> tuple[Maybe[Driver], Maybe[tuple[Gpu, ...]], Maybe[tuple[Pair, ...]]]:
    """Driver, cards, and every two of them; unknown without a driver."""
    try:
        import pynvml
    except ImportError:
        missing = Unknown("nvidia-ml-py is not installed: pip install nvidia-ml-py")
        return missing, missing, missing
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        gone = Unknown(f"NVML: {error}: no NVIDIA driver here, or it is not in this container")
        return gone, gone, gone
    try:
        return _read(pynvml)
    except pynvml.NVMLError as error:
        failed = Unknown(f"NVML: {error}")
        return failed, failed, failed
    finally:
        pynvml.nvmlShutdown()


def visible(facts: Facts) -> Maybe[tuple[Gpu, ...]]:
    """The cards that ``CUDA_VISIBLE_DEVICES`` leaves, in its order.

    CUDA's own order is by PCI address only with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; on a machine
    with cards of one kind it is the same.
    """
    chosen = facts.settings.environ.get("CUDA_VISIBLE_DEVICES")
    if isinstance(facts.gpus, Unknown) or chosen is None:
        return facts.gpus
    found = []
    for name in filter(None, (part.strip() for part in chosen.split(","))):
        fitting = [g for g in facts.gpus if name == str(g.index) or g.uuid.startswith(name)]
        if len(fitting) != 1:
            break  # CUDA stops at the first name that it does not know
        found += fitting
    return tuple(found)


def _read(nvml: Any) -> tuple[Driver, tuple[Gpu, ...], tuple[Pair, ...]]:
    cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
    handles: dict[int, Any] = {}
    gpus: list[Gpu] = []
    lost: list[str] = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(_gpu(nvml, index, handle))
            handles[index] = handle
        except nvml.NVMLError as error:
            lost.append(f"card {index}: {error}")
    pairs = tuple(_pair(nvml, handles, a, b) for a, b in combinations(handles, 2))
    version = nvml.nvmlSystemGetDriverVersion()
    driver = Driver(version, (cuda // 1000, cuda % 1000 // 10), tuple(lost))
    return driver, tuple(gpus), pairs


def _ask(nvml: Any, question: Callable[..., T], *about: object) -> Maybe[T]:
    try:
        return question(*about)
    except nvml.NVMLError as error:
        return Unknown(f"NVML: {error}")


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    bar1 = _ask(nvml, nvml.nvmlDeviceGetBAR1MemoryInfo, handle)
    busy = _ask(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
    mode = _ask(nvml, nvml.nvmlDeviceGetComputeMode, handle)
    mig = _ask(nvml, nvml.nvmlDeviceGetMigMode, handle)
    domain, _, rest = nvml.nvmlDeviceGetPciInfo(handle).busId.lower().partition(":")
    return Gpu(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        bus=f"{int(domain, 16):04x}:{rest}",
        capability=tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory=memory.total,
        used=memory.used,
        uuid=nvml.nvmlDeviceGetUUID(handle),
        bar1=bar1 if isinstance(bar1, Unknown) else bar1.bar1Total,
        width=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        width_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        speed=_ask(nvml, nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
        speed_max=_ask(nvml, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        busy=busy if isinstance(busy, Unknown) else busy.gpu,
        compute_mode="default" if isinstance(mode, Unknown) else _COMPUTE.get(mode, str(mode)),
        mig=not isinstance(mig, Unknown) and mig[0] == 1,
        fabric=_fabric(nvml, handle),
    )


def _fabric(nvml: Any, handle: Any) -> str:
    info = nvml.c_nvmlGpuFabricInfoV_t()
    asked = _ask(nvml, nvml.nvmlDeviceGetGpuFabricInfoV, handle, nvml.byref(info))
    return _FABRIC[0] if isinstance(asked, Unknown) else _FABRIC.get(info.state, "unknown")


def _pair(nvml: Any, handles: dict[int, Any], a: int, b: int) -> Pair:
    level = _ask(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, handles[a], handles[b])
    link = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _NVLINK)
    peer = _ask(nvml, nvml.nvmlDeviceGetP2PStatus, handles[a], handles[b], _READ)
    return Pair(
        a=a,
        b=b,
        level=level if isinstance(level, Unknown) else _LEVELS.get(level, str(level)),
        nvlink=link if isinstance(link, Unknown) else link == 0,
        peer=peer if isinstance(peer, Unknown) else _PEER[min(peer, 6)],
    )
