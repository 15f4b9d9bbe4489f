"""NCCL's variables and files, as a server started here would have them."""

import difflib
import re

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

# Names that others read, and NCCL does not: torch, images of NVIDIA (NCCL_VERSION says what they
# hold), NCCL's own loader, and plugins.
_READ_BY_OTHERS = re.compile(
    "NCCL_(ASYNC_ERROR_HANDLING|BLOCKING_WAIT|DESYNC_DEBUG|ENABLE_TIMING"
    "|USE_TENSOR_REGISTER_ALLOCATOR_HOOK|VERSION|CONF_FILE"
    "|(FASTRAK|GPUDIRECTTCPX|PLUGIN|SHARP|TESTS|TUNER_CONFIG)_.*)"
)


def peer_to_peer(facts: Facts) -> list[Finding]:
    """Peer-to-peer is not switched off by a left-over variable."""
    value = facts.settings.nccl.get("NCCL_P2P_DISABLE", "")
    level = facts.settings.nccl.get("NCCL_P2P_LEVEL", "")
    text = f"NCCL_P2P_DISABLE={value or 'unset'}, NCCL_P2P_LEVEL={level or 'unset'}"
    if value in ("", "0") and level.upper() not in ("LOC", "0"):
        return [ok("nccl-p2p", text)]
    name = "NCCL_P2P_DISABLE" if value not in ("", "0") else "NCCL_P2P_LEVEL"
    return [
        warning(
            "nccl-p2p",
            "NCCL may not copy from card to card",
            f"{text} {facts.settings.origin(name)}",
            "all traffic goes through host memory; it hides a broken peer path (iommu, acs) that "
            "is better mended",
            f"unset {name}; or limit it: NCCL_P2P_LEVEL=SYS, PHB or PIX",
        )
    ]


def graph_file(facts: Facts) -> list[Finding]:
    """A graph file, where one is set, is for as many cards as the server uses."""
    path = facts.settings.nccl.get("NCCL_GRAPH_FILE")
    if path is None:
        return [ok("nccl-graph-file", "none")]
    problem = _graph_problem(facts, path)
    if not problem:
        return [ok("nccl-graph-file", path)]
    return [
        error(
            "nccl-graph-file",
            f"NCCL_GRAPH_FILE {problem}",
            f"{path} {facts.settings.origin('NCCL_GRAPH_FILE')}",
            "NCCL takes the file as it is: 'dev not found' at start, or rings of another machine",
            "unset NCCL_GRAPH_FILE, also in /etc/nccl.conf and ~/.nccl.conf; it is for "
            "experiments, and NCCL_GRAPH_DUMP_FILE writes it anew",
        )
    ]


def interface(facts: Facts) -> list[Finding]:
    """The network interface that NCCL is told to use is there."""
    value = facts.settings.nccl.get("NCCL_SOCKET_IFNAME", "")
    have = facts.host.interfaces
    if not value:
        return []
    if isinstance(have, Unknown):
        return [unknown("nccl-interface", have.why)]
    negate, exact = value.startswith("^"), value.lstrip("^").startswith("=")
    names = [name for name in value.lstrip("^=").split(",") if name]
    hit = {i for i in have for n in names if (i == n if exact else i.startswith(n))}
    left = set(have) - hit if negate else hit
    if left:
        return [ok("nccl-interface", f"NCCL_SOCKET_IFNAME={value}: {', '.join(sorted(left))}")]
    return [
        error(
            "nccl-interface",
            f"no interface fits NCCL_SOCKET_IFNAME={value}",
            f"there is {', '.join(have)} {facts.settings.origin('NCCL_SOCKET_IFNAME')}",
            "the ranks cannot meet: NCCL fails at start, on one machine as well",
            "unset NCCL_SOCKET_IFNAME",
        )
    ]


def names(facts: Facts) -> list[Finding]:
    """Every ``NCCL_*`` name is one that this NCCL knows."""
    if isinstance(facts.python, Unknown):
        return []
    known = facts.python.nccl_names
    ours = [name for name in facts.settings.nccl if name.startswith("NCCL_")]
    used = [name for name in ours if not _READ_BY_OTHERS.fullmatch(name)]
    if isinstance(known, Unknown):
        return [unknown("nccl-names", known.why)] if used else []
    wrong = sorted(set(used) - known)
    if not wrong:
        return [ok("nccl-names", ", ".join(used) or "no NCCL variable is set")]
    meant = {n: difflib.get_close_matches(n, sorted(known), n=1, cutoff=0.8) for n in wrong}
    return [
        warning(
            "nccl-names",
            f"NCCL knows no {', '.join(wrong)}",
            f"the installed libnccl was searched for its names {facts.settings.origin(wrong[0])}",
            "such a setting does nothing, in silence",
            "; ".join(f"{n}: did you mean {m[0]}?" if m else f"unset {n}" for n, m in meant.items())
            + " (a plugin may read names of its own)",
        )
    ]


def conf(facts: Facts) -> list[Finding]:
    """Which settings come from a file that nobody remembers."""
    hidden = {k: v for k, v in facts.settings.nccl_conf.items() if k not in facts.settings.environ}
    if not hidden:
        return [ok("nccl-conf", "no settings from NCCL's files")]
    return [
        warning(
            "nccl-conf",
            f"{len(hidden)} NCCL settings come from a file",
            f"{facts.settings.nccl_conf_file}: "
            + ", ".join(f"{name}={value}" for name, value in sorted(hidden.items())),
            "no environment shows them, and every NCCL program on this machine obeys",
            f"look through {facts.settings.nccl_conf_file}",
        )
    ]


def _graph_problem(facts: Facts, path: str) -> str:
    if not path:
        return "is empty"
    text = facts.settings.files.get(path, Unknown())
    if isinstance(text, Unknown):
        return f"cannot be read: {text.why}"
    channels = re.findall(r"<channel>(.*?)</channel>", text, re.DOTALL)
    if not channels:
        return "has no channels"
    cards = {len(re.findall(r"<gpu\s", channel)) for channel in channels}
    if facts.world and cards != {facts.world}:
        return f"is for {' or '.join(map(str, sorted(cards)))} cards, the server uses {facts.world}"
    return ""
