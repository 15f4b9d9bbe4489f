"""What a maintainer needs, in one archive, without secrets."""

import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..patchset.errors import EnvironmentFailure, Usage
from .settings import REDACTED, is_secret

_LIMIT = 20 * 2**20  # bytes of a log that are kept, from its end
# A bare value ends at a space or at a comma before one: better too much hidden than too little.
_ASSIGNED = re.compile(
    r"""(?P<name>[\w.-]*(?:TOKEN|KEY|SECRET|PASSWORD)[\w.-]*)"""
    r"""(?P<between>["']?\s*[=:,]\s*|\s+)"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<bare>(?:[^\s,]|,(?=\S))+))""",
    re.IGNORECASE,
)
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_IN_ADDRESS = re.compile(r"(\w+://[^\s/:@]+):[^\s/@]+@")
_SHAPES = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|glpat-|AKIA)[A-Za-z0-9_-]{8,}")
_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL)
_PLAIN = re.compile(r"(-?\d+(\.\d+)?|None|True|False|null|true|false)[)}\]]*")


def check(target: Path, logs: Sequence[Path]) -> None:
    """See that the archive can be written and the logs read. Raises ``Usage``."""
    if target.exists():
        raise Usage(f"{target} is there already", "name another file")
    if not target.parent.is_dir():
        raise Usage(f"{target.parent} is no folder")
    for log in logs:
        if not os.access(log, os.R_OK) or not log.is_file():
            raise Usage(f"{log}: cannot be read")


def files(result: Mapping[str, Any], logs: Sequence[Path]) -> dict[str, bytes]:
    """The archive's files by name: findings and facts, versions, and each log's end, redacted."""
    python = result["facts"].get("python", {})
    versions = {"sglang-overlay": result["version"], **python.get("versions", {})}
    hidden = {v for n, v in os.environ.items() if is_secret(n) and len(v) >= 6}
    hide = partial(redact, hidden=hidden)
    shown, told = _strings(result, hide), _strings(versions, hide)
    found = {"doctor.json": json.dumps(shown, indent=2), "versions.json": json.dumps(told)}
    for number, log in enumerate(logs):
        text = log.read_bytes()[-_LIMIT:].decode("utf-8", errors="replace")
        found[f"logs/{number}-{log.name}"] = hide(text)
    return {name: text.encode() for name, text in found.items()}


def _strings(value: Any, hide: Callable[[str], str]) -> Any:
    """``value`` with each string in it hidden on its own, so that it stays valid JSON."""
    if isinstance(value, Mapping):
        return {
            name: REDACTED if is_secret(name) and isinstance(one, str) else _strings(one, hide)
            for name, one in value.items()
        }
    if isinstance(value, list):
        return [_strings(one, hide) for one in value]
    return hide(value) if isinstance(value, str) else value


def redact(text: str, hidden: set[str] | frozenset[str] = frozenset()) -> str:
    """``text`` without the values of names with TOKEN, KEY, SECRET or PASSWORD, without
    credentials of well-known shapes, and without the strings ``hidden``."""
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _BLOCK.sub(REDACTED, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _IN_ADDRESS.sub(rf"\1:{REDACTED}@", text)
    text = _SHAPES.sub(REDACTED, text)
    return _ASSIGNED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name, between, quote = match["name"], match["between"], match["quote"] or ""
    assigned = name.startswith("-") or "=" in between or ":" in between
    value = match["bare"] if match["quoted"] is None else match["quoted"]
    if not assigned or _PLAIN.fullmatch(value):
        return match[0]
    return f"{name}{between}{quote}{REDACTED}{quote}"


def write(target: Path, files: Mapping[str, bytes]) -> None:
    """Raises ``EnvironmentFailure`` when ``target`` cannot be written."""
    try:
        with tarfile.open(target, "x:gz") as archive:
            for name, content in files.items():
                entry = tarfile.TarInfo(f"doctor/{name}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    except OSError as error:
        raise EnvironmentFailure(f"{target}: {error.strerror}") from error
