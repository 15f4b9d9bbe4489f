"""What a check has to say."""

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How bad it is; ``unknown`` is no failure, but says why nothing could be seen."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Finding:
    """``id`` names the matter (``iommu``), whatever its state. ``evidence`` is what was read,
    ``why`` what it does to a verify pass, ``fix`` a command or a setting, if there is one."""

    id: str
    state: State
    title: str
    evidence: str = ""
    why: str = ""
    fix: str = ""


def ok(id: str, title: str, evidence: str = "") -> Finding:
    """Nothing to do."""
    return Finding(id, State.OK, title, evidence)


def warning(id: str, title: str, evidence: str, why: str, fix: str = "") -> Finding:
    """It works, but slower or less surely than it could."""
    return Finding(id, State.WARNING, title, evidence, why, fix)


def error(id: str, title: str, evidence: str, why: str, fix: str = "") -> Finding:
    """A server will not start, will hang, or will compute wrong numbers."""
    return Finding(id, State.ERROR, title, evidence, why, fix)


def unknown(id: str, reason: str, fix: str = "") -> Finding:
    """It could not be seen, and ``reason`` says why."""
    return Finding(id, State.UNKNOWN, "not known", reason, fix=fix)
