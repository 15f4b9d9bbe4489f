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
from .settings import REDACTED, SECRET, is_secret

_LIMIT = 20 * 2**20  # bytes of a log that are kept, from its end
# A bare value ends at a space or at a comma before one: better too much hidden than too little.
_ASSIGNED = re.compile(
    rf"""(?<![\w.-])(?P<name>[\w.-]*(?:{SECRET})[\w.-]{{0,100}})"""
    r"""(?P<between>["']?\s*[=:,]\s*|\s+)"""
    r"""(?:(?P<quote>["'])(?P<quoted>.*?)(?P=quote)|(?P<bare>(?:[^\s,]|,(?=\S))+))""",
    re.IGNORECASE,
)
_NOTHING = re.compile(r"(None|True|False|null|true|false)[)}\]]*")
_NUMBER = re.compile(r"-?\d+(\.\d+)?[)}\]]*")
# Tokens are counted, and keys of a cache as well; a password of digits is a password.
_NEVER_COUNTED = re.compile(r"PASS|PWD|SECRET|CREDENTIAL|(API|ACCESS|AUTH)[_-]?KEY", re.IGNORECASE)
# A header's value goes to the end of its quotes; without quotes, of the line.
_HEADER = re.compile(
    r"""(?i)(\b(?:set-)?cookie|\b(?:proxy-)?authorization)(["']?\s*[:=]\s*|["']\s*,\s*b?)"""
    r"""(?:(["'])(.*?)\3|([^\r\n]+))"""
)
_SCHEME = re.compile(r"(?i)(bearer|basic|digest|negotiate|token)\s+\S")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+\S+")
_USER = re.compile(
    r"""(?<![\w-])((?:-[uU]|--(?:proxy-)?user)(?:["'],)?[=\s]*)"""
    r"""(?:(["'])[^"'\n]*?:.*?\2|[^\s"':]+:\S+)"""
)
_IN_ADDRESS = re.compile(r"""(\w://[^\s/:@"']*):(?!\d+/)[^\s"']*@""")
_USER_ALONE = re.compile(r"""(\w://)[^\s/:@"']+@""")
_SHAPES = re.compile(
    r"\b(?:(?:hf_|sk-|ghp_|github_pat_|glpat-|AKIA|nvapi-|xox[a-z]-|AIza|gsk_)[A-Za-z0-9_-]{8,}"
    r"|eyJ[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]+)*)"
)
_BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*-----|\Z)", re.DOTALL)
_KEY_END = re.compile(r"-----END [A-Z ]*PRIVATE KEY-----")
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=]{40,}\r?")
_KEY_TAIL = re.compile(r"(?:[A-Za-z0-9+/=]+\r?\n|[A-Za-z0-9+/=\\]*)\Z")  # a backslash: of \n


def check(target: Path, logs: Sequence[Path]) -> None:
    """See that the archive can be written and the logs read. Raises ``Usage``."""
    try:
        there = target.exists()
    except OSError as error:
        raise Usage(f"{target}: {error.strerror}") from error
    if there:
        raise Usage(f"{target} is there already", "name another file")
    if not target.parent.is_dir():
        raise Usage(f"{target.parent} is no folder")
    for log in logs:
        if not os.access(log, os.R_OK) or not log.is_file():
            raise Usage(f"{log}: cannot be read")


def files(result: Mapping[str, Any], logs: Sequence[Path]) -> dict[str, bytes]:
    """The archive's files by name: findings and facts, versions, and each log's end, redacted.
    Of a log that is cut, the first line is whole."""
    python = result["facts"].get("python", {})
    versions = {"sglang-overlay": result["version"], **python.get("versions", {})}
    hidden = {v for n, v in os.environ.items() if is_secret(n) and len(v) >= 6}
    hide = partial(redact, hidden=hidden)
    shown, told = _strings(result, hide), _strings(versions, hide)
    found = {"doctor.json": json.dumps(shown, indent=2), "versions.json": json.dumps(told)}
    for number, log in enumerate(logs):
        found[f"logs/{number}-{log.name}"] = hide(_end(log))
    return {name: text.encode() for name, text in found.items()}


def _end(log: Path) -> str:
    with log.open("rb") as file:
        start = max(file.seek(0, os.SEEK_END) - _LIMIT, 0)
        file.seek(start)
        if start:  # a line without its beginning may be a secret that nothing gives away
            file.readline()
        return file.read(_LIMIT).decode("utf-8", errors="replace")


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
    """``text`` without the values of names that ``settings.SECRET`` describes and of headers that
    log in, without credentials in addresses, of ``curl -u`` and of well-known shapes, without
    private keys, and without the strings ``hidden``."""
    for value in sorted(hidden, key=len, reverse=True):
        text = text.replace(value, REDACTED)
    text = _without_cut_keys(_BLOCK.sub(REDACTED, text))
    text = _HEADER.sub(_without_header, text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    text = _USER.sub(rf"\1{REDACTED}", text)
    text = _IN_ADDRESS.sub(rf"\1:{REDACTED}@", text)
    text = _USER_ALONE.sub(rf"\1{REDACTED}@", text)
    text = _SHAPES.sub(REDACTED, text)
    return _ASSIGNED.sub(_without_value, text)


def _without_value(match: re.Match[str]) -> str:
    name, between, quote = match["name"], match["between"], match["quote"] or ""
    assigned = name.startswith("-") or "=" in between or ":" in between
    value = match["bare"] if match["quoted"] is None else match["quoted"]
    counted = _NUMBER.fullmatch(value) and not _NEVER_COUNTED.search(name)
    if not assigned or counted or _NOTHING.fullmatch(value):
        return match[0]
    return f"{name}{between}{quote}{REDACTED}{quote}"


def _without_header(match: re.Match[str]) -> str:
    name, between, quote = match[1], match[2], match[3] or ""
    scheme = _SCHEME.match(match[4] or match[5] or "")
    told = f"{scheme[1]} {REDACTED}" if scheme else REDACTED
    return f"{name}{between}{quote}{told}{quote}"


def _without_cut_keys(text: str) -> str:
    """``text`` without private keys of which only the end is there."""
    *before, last = _KEY_END.split(text)
    kept = []
    for part in before:
        lines = _KEY_TAIL.sub("", part).split("\n")
        while len(lines) > 1 and not lines[-1] and _KEY_LINE.fullmatch(lines[-2]):
            del lines[-2]
        kept.append("\n".join(lines) + REDACTED)
    return "".join([*kept, last])


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
