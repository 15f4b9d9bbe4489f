"""What ``NCCL_ALGO`` leaves to each collective, read as ``parseList`` of NCCL 2.30 reads it.

The rules are those of the patch worker-env-lint; a test holds both to one table, and the
names against the real library.
"""

from ..facts import Facts
from ..finding import Finding, error, ok

_GATHER = frozenset({"ring", "collnetdirect", "nvls", "pat"})
#: The algorithms that NCCL has for each collective, on one machine or another.
ALGORITHMS = {
    "broadcast": frozenset({"ring"}),
    "reduce": frozenset({"ring"}),
    "allgather": _GATHER,
    "reducescatter": _GATHER,
    "allreduce": _GATHER - {"pat"} | {"tree", "collnetchain", "nvlstree"},
}
_KNOWN = frozenset[str]().union(*ALGORITHMS.values())
#: A collective, or "" for all of them; a list of algorithms, "^" before those it may not use.
_Entry = tuple[str, str]


class _Refused(Exception):
    """NCCL makes no communicator with this value."""


def algorithm(facts: Facts) -> list[Finding]:
    """NCCL takes ``NCCL_ALGO``, which leaves each collective an algorithm that it has."""
    value, id = facts.settings.nccl.get("NCCL_ALGO", ""), "nccl-algo"
    origin = facts.settings.origin("NCCL_ALGO")
    try:
        entries = _entries(value)
    except _Refused as refused:
        why = "the server dies with 'invalid usage' when it makes its first communicator"
        title = f"NCCL refuses NCCL_ALGO={value}: {refused}"
        return [error(id, title, origin, why, "unset NCCL_ALGO")]
    allowed = _allowed(entries)
    without = [name for name, chosen in allowed.items() if not chosen & ALGORITHMS[name]]
    if not without:
        return [ok(id, value or "NCCL chooses")]
    return [
        error(
            id,
            f"NCCL_ALGO={value} leaves {', '.join(without)} without an algorithm",
            origin,
            "the server dies with 'no algorithm/protocol available', mostly while it captures "
            "CUDA graphs",
            _mended(entries, without),
        )
    ]


def _entries(value: str) -> list[_Entry]:
    """The lists in ``value``. Raises ``_Refused``."""
    found: list[_Entry] = []
    for number, entry in enumerate(value.lower().split(";")):
        *collectives, algorithms = [part for part in entry.split(":") if part][:2] or [""]
        unknown = _listed(algorithms) - _KNOWN | set(collectives) - ALGORITHMS.keys()
        if unknown:
            raise _Refused(f"it does not know {min(unknown)!r}")
        if number and algorithms and not collectives:
            raise _Refused("only the first entry may name no collective")
        if algorithms:
            found.append(("".join(collectives), algorithms))
    return found


def _listed(algorithms: str) -> frozenset[str]:
    return frozenset(filter(None, algorithms.removeprefix("^").split(",")))


def _allowed(entries: list[_Entry]) -> dict[str, frozenset[str]]:
    allowed = dict.fromkeys(ALGORITHMS, _KNOWN)
    for collective, algorithms in entries:
        listed = _listed(algorithms)
        chosen = _KNOWN - listed if algorithms.startswith("^") else listed
        allowed |= dict.fromkeys([collective] if collective else ALGORITHMS, chosen)
    return allowed


def _mended(entries: list[_Entry], without: list[str]) -> str:
    """What was meant for all goes to all-reduce alone; what cannot be goes."""
    named = {name: algorithms for name, algorithms in entries if name and name not in without}
    for_all = [algorithms for name, algorithms in entries if not name]
    if for_all and "allreduce" not in without:
        named = {"allreduce": for_all[0], **named}
    if not named:
        return "unset NCCL_ALGO"
    return f"NCCL_ALGO='{';'.join(f'{name}:{named[name]}' for name in named)}'"
