"""What ``--flashinfer-allreduce-fusion-backend`` comes to, in stock SGLang and with our patches.

The rules of SM120 are those of the patches flashinfer-fusion-sm120 (``resolve_sm120_backend``,
``FusionShape.objection``, ``allocator_objection``) and allreduce-fusion-measured
(``asked_for``); a test holds the worlds against them.
"""

from dataclasses import dataclass
from enum import Enum

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

OPTION = "--flashinfer-allreduce-fusion-backend"
SM120_WORLDS = (2, 4, 8)
_SM120_PATCH, _MEASURED_PATCH = "flashinfer-fusion-sm120", "allreduce-fusion-measured"


class Result(Enum):
    """What serves; the value is its name."""

    USUAL = "the usual all-reduce"
    FUSED = "fused"
    MEASURED = "measured at start"
    REFUSED = "no server"


@dataclass(frozen=True)
class Outcome:
    """``because`` is the reason; ``without`` what keeps the fused kernel out, although it was
    asked for; ``instead`` what to do where the server refuses."""

    result: Result
    because: str = ""
    without: str = ""
    instead: str = ""


def outcome(facts: Facts) -> Outcome | None:
    """What the option comes to; ``None`` when the cards or the patches are not known."""
    asked, patches = facts.server.fusion, facts.active
    if asked == "measured" and patches is not None and _MEASURED_PATCH not in patches:
        there = facts.has_patch(_MEASURED_PATCH)
        which = "is not active" if there else f"there is not for SGLang {facts.pin}"
        text = f"'measured' is of our patch {_MEASURED_PATCH}, which {which}"
        instead = f"{'apply the patch, or ' * there}leave {OPTION} out"
        return Outcome(Result.REFUSED, text, instead=instead)
    if not facts.cards:
        return None
    name, major = f"SM{_major(facts)}0", _major(facts)
    if asked is None:
        if major in (9, 10):
            return Outcome(Result.USUAL, "by default for some models, which the cards do not tell")
        return Outcome(Result.USUAL, f"not without the option on {name}")
    if patches is None and (asked == "measured" or major == 12):
        return None
    if asked == "measured" or (major == 12 and patches and _SM120_PATCH in patches):
        return _by_the_rules_of_sm120(facts, asked, patches or ())
    if major in (9, 10):
        return Outcome(Result.FUSED, f"{OPTION} {asked}")
    return Outcome(
        Result.REFUSED,
        f"SGLang's gate takes SM90 and SM10X, these are {name}",
        instead=f"leave {OPTION} out; without NVLink: export SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1",
    )


def _by_the_rules_of_sm120(facts: Facts, asked: str, patches: tuple[str, ...]) -> Outcome:
    measures = _MEASURED_PATCH in patches
    if facts.server.nodes > 1:
        return Outcome(Result.REFUSED, "it is for one node", instead=f"leave {OPTION} out")
    if asked in ("mnnvl", "cutedsl"):
        instead = f"{OPTION} {'measured' if measures else 'trtllm'}"
        return Outcome(Result.REFUSED, "SM120 has no NVLink multicast", instead=instead)
    if facts.server.deterministic:
        return Outcome(Result.USUAL, "off", without="deterministic inference switches it off")
    if measures and asked in ("auto", "measured"):
        text = "the fastest of FlashInfer's, PCIe-IPC, custom and NCCL for each number of rows"
        return Outcome(Result.MEASURED, text, _objection(facts))
    if objection := _objection(facts):
        return Outcome(Result.USUAL, f"voted out, {objection}", objection)
    return Outcome(Result.FUSED, f"{OPTION} {asked}")


def _objection(facts: Facts) -> str:
    """Why the ranks vote FlashInfer's kernel out; empty when nothing is known against it."""
    if facts.world not in SM120_WORLDS:
        return f"it is for {', '.join(map(str, SM120_WORLDS))} ranks"
    if set_by := facts.settings.expandable_segments:
        return f"peers cannot map the memory of {set_by}"
    if peers_work(facts) is False:
        return "no peer access between all cards"
    return ""


def backend(facts: Facts) -> list[Finding]:
    """The option is one that the server takes, and that the ranks will not vote out."""
    asked, id = facts.server.fusion, "fusion"
    if asked is None:
        return []
    found = outcome(facts)
    if found is None:
        return [unknown(id, "the cards, or the patches that are active, are not known")]
    title = f"{OPTION} {asked}" + (f" on SM{_major(facts)}0" if facts.cards else "")
    names = facts.cards[0].name if facts.cards else "no card is known"
    if found.result is Result.REFUSED:
        stops = "the server stops while it reads its arguments, or when it sets up the all-reduce"
        return [error(id, title, f"{names}; {found.because}", stops, found.instead)]
    if facts.world == 1:
        return [ok(id, f"{title}: one rank has nothing to reduce")]
    if found.without:
        return [
            warning(
                id,
                f"{title}: {found.result.value}, without the fused kernel",
                found.without,
                "every rank agrees to go on without it: the server works, and the option does "
                "less than it says",
                _mend(facts),
            )
        ]
    text = found.because
    if found.result is Result.FUSED and _major(facts) == 12:
        text = "up to 64 rows, and not measured here: it lost upstream with four cards (#32330)"
    return [ok(id, f"{title}: {found.result.value}", text)]


def _mend(facts: Facts) -> str:
    name = facts.settings.expandable_segments.partition("=")[0]
    return f"unset {name}" if name else f"leave {OPTION} out"


def _major(facts: Facts) -> int:
    return min(gpu.capability[0] for gpu in facts.cards)


def peers_work(facts: Facts) -> bool | None:
    """Whether every pair copies right; by --deep where it was run, else by the driver's word."""
    if isinstance(facts.copies, tuple):
        return all(copy.result == "right" and copy.peer is not False for copy in facts.copies)
    if isinstance(facts.pairs, Unknown):
        return None
    states = [pair.peer for pair in facts.pairs]
    if any(isinstance(state, str) and state != "ok" for state in states):
        return False
    return None if any(isinstance(state, Unknown) for state in states) else True
