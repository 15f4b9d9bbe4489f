"""Which all-reduce SGLang will take for a decode or verify pass, and why.

The conditions are those of every pin: ``distributed/parallel_state.py``
(``_resolve_outplace_all_reduce_method``), ``device_communicators/`` (``custom_all_reduce.py``,
``custom_all_reduce_v2.py``, ``custom_all_reduce_utils.py``, ``pcie_ipc_ar.py``) and
``arg_groups/overrides.py``; a test holds them against each source.
"""

from dataclasses import dataclass

from ..facts import Facts
from ..finding import Finding, error, ok, unknown, warning
from .fusion import Result, outcome, peers_work

PCIE_IPC_WORLDS = (2, 4, 8)
CUSTOM_WORLDS = (2, 4, 6, 8)
_TRUE = {"1", "true", "yes", "y"}
# The buffers of PCIe-IPC are FlashInfer's own, of cudaMalloc (its create_shared_buffer).
_SEGMENTS_ALLOWED = ("none", "custom v2", "pcie-ipc", "nccl")
_IPC_VARIABLE = "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"


@dataclass(frozen=True)
class Choice:
    """``name`` is "none", "fused", "measured at start", "custom v2", "custom", "pcie-ipc" or
    "nccl"; ``because`` says why each one before it was passed over."""

    name: str
    because: tuple[str, ...]


def choose(facts: Facts) -> Choice | None:
    """The choice for small messages; ``None`` when the machine is not known well enough."""
    if facts.world == 1 and facts.server.group_nodes == 1:
        return Choice("none", ("one rank",))
    if not facts.cards or not facts.world:
        return None
    fusion = outcome(facts)
    if fusion is None:
        return None
    if fusion.result in (Result.FUSED, Result.MEASURED):
        return Choice(fusion.result.value, (fusion.because,))
    return _usual(facts, f"fused: {fusion.because}")


def _usual(facts: Facts, *before: str) -> Choice | None:
    """The choice without FlashInfer's kernels and without a measured table."""
    reasons, linked = list(before), facts.nvlinked
    if linked is None:
        return None
    if custom := _custom(facts, linked, peers_work(facts)):
        reasons.append(custom)
    else:
        wanted = facts.settings.environ.get("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "1")
        v2 = linked and wanted.lower() in _TRUE
        return Choice("custom v2" if v2 else "custom", tuple(reasons))
    if pcie := _pcie_ipc(facts):
        return Choice("nccl", (*reasons, pcie))
    return Choice("pcie-ipc", tuple(reasons))


def choice(facts: Facts) -> list[Finding]:
    """What the machine and the settings come to."""
    chosen, id = choose(facts), "all-reduce"
    if chosen is None:
        return [unknown(id, "the cards, their links, or the active patches are not known")]
    text = "; ".join(chosen.because)
    if chosen.name != "nccl":
        return [ok(id, f"{facts.world} ranks: {chosen.name}", text)]
    offered = facts.world in PCIE_IPC_WORLDS and facts.server.nodes == 1
    fix = f"export {_IPC_VARIABLE}=1" if offered and _pcie_ipc_is_unset(facts) else ""
    if facts.server.nodes > 1:
        return [ok(id, "several nodes: NCCL", text)]
    return [
        warning(
            id,
            f"{facts.world} ranks: NCCL",
            text,
            "a verify pass has two all-reduces for each layer, and NCCL is slow at their size: on "
            "one host with eight SM120 cards SGLang's authors measured 205 us for 12 KiB, and "
            "5.3 us with the PCIe-IPC all-reduce (pcie_ipc_ar.py)",
            fix,
        )
    ]


def segments(facts: Facts) -> list[Finding]:
    """The allocator's memory can be shared with another process where that has to be."""
    set_by, id = facts.settings.expandable_segments, "expandable-segments"
    if not set_by:
        return [ok(id, "off")]
    if not facts.server.cuda_graph:
        return [ok(id, "on; without CUDA graphs every all-reduce copies into memory of its own")]
    chosen = choose(facts)
    if chosen is not None and chosen.name in (Result.FUSED.value, Result.MEASURED.value):
        chosen = _usual(facts)  # it serves what those do not; their buffers are their own
    if chosen is None:
        return [
            unknown(
                id,
                f"{set_by}, which the custom all-reduce does not stand; which all-reduce is taken "
                "is not known: see all-reduce",
            )
        ]
    if chosen.name in _SEGMENTS_ALLOWED:
        return [ok(id, f"on, and the all-reduce ({chosen.name}) allows it")]
    return [
        error(
            id,
            "expandable_segments:True with an all-reduce over CUDA IPC",
            f"{set_by}; all-reduce: {chosen.name}",
            "such memory has no IPC handle: the server dies with 'invalid argument' after it has "
            "captured its graphs",
            f"unset {set_by.partition('=')[0]}, or --disable-custom-all-reduce",
        )
    ]


def visible_devices(facts: Facts) -> list[Finding]:
    """``CUDA_VISIBLE_DEVICES`` is in the form that SGLang's custom all-reduce can read."""
    value = facts.settings.environ.get("CUDA_VISIBLE_DEVICES")
    if not value:
        return []
    if all(part.strip().isdecimal() for part in value.split(",")):
        return [ok("visible-devices", f"CUDA_VISIBLE_DEVICES={value}")]
    numbers = ",".join(str(gpu.index) for gpu in facts.cards)
    return [
        warning(
            "visible-devices",
            "CUDA_VISIBLE_DEVICES has no numbers",
            f"CUDA_VISIBLE_DEVICES={value}",
            "SGLang converts each part with int(): 'Setup Custom allreduce failed with invalid "
            "literal for int()', and NCCL takes over",
            f"export CUDA_VISIBLE_DEVICES={numbers}" if numbers else "",
        )
    ]


def _custom(facts: Facts, linked: bool, peers: bool | None) -> str:
    """Why neither custom all-reduce is taken; empty when one is."""
    if not facts.server.custom_all_reduce:
        return "custom: --disable-custom-all-reduce"
    if facts.server.nodes > 1:
        return "custom: several nodes"
    value = facts.settings.environ.get("CUDA_VISIBLE_DEVICES", "")
    if value and not all(part.strip().isdecimal() for part in value.split(",")):
        return "custom: CUDA_VISIBLE_DEVICES has no numbers"
    if facts.world not in CUSTOM_WORLDS and not linked:
        return f"custom: for {', '.join(map(str, CUSTOM_WORLDS))} ranks"
    if facts.world > 2 and not linked:
        return "custom: not for more than two cards without NVLink"
    if peers is False:
        return "custom: no peer access between all cards"
    return ""


def _pcie_ipc_is_unset(facts: Facts) -> bool:
    return facts.settings.environ.get(_IPC_VARIABLE, "").lower() not in _TRUE


def _pcie_ipc(facts: Facts) -> str:
    """Why the PCIe-IPC all-reduce is not taken; empty when it is."""
    if _pcie_ipc_is_unset(facts):
        return f"PCIe-IPC: {_IPC_VARIABLE} is not 1"
    if facts.world not in PCIE_IPC_WORLDS or facts.server.nodes > 1:
        return f"PCIe-IPC: for {', '.join(map(str, PCIE_IPC_WORLDS))} ranks of one node"
    if facts.server.deterministic:
        return "PCIe-IPC: off with deterministic inference"
    return ""
