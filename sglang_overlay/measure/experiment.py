"""Experiments as data: a TOML file of a server, settings, and what is measured.

name = "nccl"
[values]                      # what $name stands for; -D name=value changes it
model = "/models/Kimi-K2.5"
[server]
command = ["python3", "-m", "sglang.launch_server", "--model-path", "$model"]
args = { "--tp" = 8 }         # true: the flag alone; false: left out
env = { NCCL_DEBUG = "WARN" } # for the workers: --worker-env where the server has it
environ = { HF_HOME = "/hf" } # for the process that is started
port = 30000                  # 0: any that is free
ready_s = 900
stop_s = 60
[bench]                       # any field of runs.Protocol
[profile]                     # none: no profile is taken
steps = 16
[stop]                        # the sweep ends ...
failures = 3                  # after as many failed starts in a row
seconds = 36000               # (no experiment begins after that)
tok_s = 90.0                  # once a setting is as fast
[[experiment]]
name = "channels"
baseline = "none"             # another experiment: the one without speculation
env = { NCCL_MAX_NCHANNELS = [1, 2, 4] }  # a list: an experiment for each value
"""

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from string import Template
from typing import Any

from ..patchset.errors import Usage
from . import prompts as texts
from . import secret
from .prompts import Prompt
from .runs import Protocol

Value = str | int | float | bool
_TABLE = dict[str, Any]
_PORT = "port"


@dataclass(frozen=True)
class Stop:
    """When a sweep ends before its last experiment."""

    failures: int | None = None  # in a row
    seconds: float | None = None  # since it was started; none begins after that
    tok_s: float | None = None  # reached


@dataclass(frozen=True)
class Experiment:
    """One server, started once and measured."""

    name: str
    command: tuple[str, ...]  # $port is still in it
    args: Mapping[str, Value]
    env: Mapping[str, str]  # for the workers
    environ: Mapping[str, str]  # for the process that is started
    settings: Mapping[str, str]  # what makes it differ from the others, without secrets
    baseline: str = ""

    def argv(self, port: int) -> list[str]:
        """The whole command line, without what brings ``env`` to the workers."""
        words = [*self.command]
        for name, value in self.args.items():
            if value is not False:
                words += [name] if value is True else [name, str(value)]
        return [Template(word).substitute({_PORT: port}) for word in words]

    def hide(self, text: str) -> str:
        """``text`` without the secrets among arguments and variables."""
        pairs = [*self.env.items(), *self.environ.items()]
        values = {value for name, value in pairs if secret.is_secret(name)}
        return secret.hide(text, values | {*secret.of_words(self.argv(0))})


@dataclass(frozen=True)
class Sweep:
    """What a file says."""

    name: str
    about: str
    experiments: tuple[Experiment, ...]
    protocol: Protocol
    profile_steps: int = 0  # 0: no profile
    port: int = 0  # 0: any that is free
    ready_s: float = 900.0
    stop_s: float = 60.0
    stop: Stop = field(default_factory=Stop)
    prompts: tuple[Prompt, ...] = ()  # of the file that the protocol names, or random ids

    def digest(self, experiment: Experiment) -> str:
        """What names a result: the same for the same server and protocol, and only then."""
        told = [asdict(experiment), asdict(self.protocol), self.profile_steps]
        if self.prompts and self.protocol.prompts != texts.RANDOM_IDS:
            told.append(texts.digest(self.prompts))
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def load(file: Path, given: Mapping[str, str] | None = None) -> Sweep:
    """The sweep in ``file``, with ``given`` in place of its ``[values]``.

    Raises ``Usage`` with file, line and key for what it does not understand.
    """
    try:
        text = file.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise Usage(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Usage(f"{file}: {error}") from error
    return _Reader(file, text, table, dict(given or {})).sweep()


class _Reader:
    def __init__(self, file: Path, text: str, table: _TABLE, given: dict[str, str]) -> None:
        self.file, self.lines, self.table, self.given = file, text.splitlines(), table, given

    def sweep(self) -> Sweep:
        top = self.take(
            self.table, (), name=str, about=str, values=dict, server=dict, bench=dict,
            profile=dict, stop=dict, experiment=list,
        )  # fmt: skip
        server = self.take(
            top.get("server", {}), ("server",), command=list, args=dict, env=dict, environ=dict,
            port=int, ready_s=float, stop_s=float,
        )  # fmt: skip
        if not (name := top.get("name")) or not re.fullmatch(r"[\w.-]+", name):
            raise self.wrong(
                ("name",) if name else (), "wants a name of letters, digits, '.', '-' and '_'"
            )
        if not server.get("command"):
            raise self.wrong(("server",), "wants a command")
        if not 0 <= server.get("port", 0) < 2**16:
            raise self.wrong(("server", "port"), f"{server['port']} is no port")
        steps = self.take(top.get("profile", {}), ("profile",), steps=int).get("steps", 16)
        if steps < 1:
            raise self.wrong(("profile", "steps"), f"{steps} is too few: 1 or more")
        stop = self.take(top.get("stop", {}), ("stop",), failures=int, seconds=float, tok_s=float)
        protocol = self.protocol(top.get("bench", {}))
        return Sweep(
            name=name,
            about=top.get("about", ""),
            experiments=self.experiments(top, server),
            protocol=protocol,
            prompts=self.prompts(protocol.prompts),
            profile_steps=steps if "profile" in top else 0,
            stop=Stop(**stop),
            **{key: server[key] for key in ("port", "ready_s", "stop_s") if key in server},
        )

    def protocol(self, table: _TABLE) -> Protocol:
        kinds = {entry.name: type(entry.default) for entry in fields(Protocol)}
        protocol = Protocol(**self.take(table, ("bench",), **kinds))
        name, why = protocol.fault()
        if why:
            raise self.wrong(("bench", name), why)
        return protocol

    def prompts(self, source: str) -> tuple[Prompt, ...]:
        if source == texts.BUILT_IN:
            return ()
        if source == texts.RANDOM_IDS:
            return tuple(texts.random_ids())
        try:
            return tuple(texts.read(Path(source)))
        except Usage as error:
            raise self.wrong(("bench", "prompts"), error.message) from error

    def experiments(self, top: _TABLE, server: _TABLE) -> tuple[Experiment, ...]:
        values = {key: str(value) for key, value in top.get("values", {}).items()}
        if unknown := sorted(self.given.keys() - values.keys()):
            raise Usage(f"{self.file}: no value {', '.join(unknown)}: {', '.join(values)}")
        values |= self.given | {_PORT: f"${_PORT}"}
        found: dict[str, Experiment] = {}
        for number, table in enumerate(top.get("experiment", ())):
            place = ("experiment", number)
            known = self.take(
                table, place, name=str, baseline=str, args=dict, env=dict, environ=dict
            )
            if not known.get("name"):
                raise self.wrong(place, "wants a name")
            for one in self.expand(known, server, values, place):
                if one.name in found:
                    raise self.wrong((*place, "name"), f"there is already one named {one.name!r}")
                found[one.name] = one
        if not found:
            raise Usage(f"{self.file}: no [[experiment]] in it")
        for one in found.values():
            if one.baseline and one.baseline not in found:
                raise Usage(f"{self.file}: {one.name!r}: no experiment {one.baseline!r}")
        return tuple(found.values())

    def expand(
        self, table: _TABLE, server: _TABLE, values: dict[str, str], place: tuple[Any, ...]
    ) -> Iterator[Experiment]:
        """Every combination of the values that are lists."""
        kinds = ("args", "env", "environ")
        keys = [(kind, key) for kind in kinds for key in table.get(kind, {})]
        choices = []
        for kind, key in keys:
            value = table[kind][key]
            choices.append(value if isinstance(value, list) else [value])
            if not choices[-1]:
                raise self.wrong((*place, kind, key), "an empty list")
        varied = {pair for pair in keys if isinstance(table[pair[0]][pair[1]], list)}
        for combination in itertools.product(*choices):
            chosen = dict(zip(keys, combination, strict=True))
            tables: dict[str, dict[str, Value]] = {}
            for kind in kinds:
                own = {key: value for (which, key), value in chosen.items() if which == kind}
                tables[kind] = {**server.get(kind, {}), **own}
                for key, value in tables[kind].items():
                    tables[kind][key] = self.fill(value, values, (*place, kind, key))
            settings = {key: secret.shown(key, str(tables[kind][key])) for kind, key in keys}
            for kind, key in varied:
                if secret.is_secret(key):  # told apart by its place in the list
                    number = table[kind][key].index(chosen[kind, key]) + 1
                    settings[key] = f"{settings[key]} {number}"
            label = " ".join(
                f"{key}={settings[key]}" for kind, key in keys if (kind, key) in varied
            )
            yield Experiment(
                name=f"{table['name']} {label}".strip(),
                command=tuple(
                    str(self.fill(word, values, ("server", "command")))
                    for word in server["command"]
                ),
                args=tables["args"],
                env={key: str(value) for key, value in tables["env"].items()},
                environ={key: str(value) for key, value in tables["environ"].items()},
                settings=settings,
                baseline=table.get("baseline", ""),
            )

    def fill(self, value: Any, values: dict[str, str], place: tuple[Any, ...]) -> Value:
        """``value`` with what its $names stand for."""
        if not isinstance(value, Value):
            raise self.wrong(place, f"{value!r} is no text, number, true or false")
        if not isinstance(value, str):
            return value
        try:
            return Template(value).substitute(values)
        except (KeyError, ValueError) as error:
            known = ", ".join(f"${name}" for name in values)
            told = secret.shown(str(place[-1]), value)
            raise self.wrong(
                place, f"{told!r} names no value; there is {known}, and $$ is a dollar"
            ) from error

    def take(self, table: Any, place: tuple[Any, ...], **kinds: type) -> _TABLE:
        """``table``, whose keys and kinds of values must be those of ``kinds``."""
        if not isinstance(table, dict):
            raise self.wrong(place, "wants a table")
        for key, value in table.items():
            if key not in kinds:
                raise self.wrong((*place, key), f"not known here: {', '.join(kinds)}")
            kind = kinds[key]
            number = kind is float and type(value) is int
            if not number and (not isinstance(value, kind) or (kind is int and value is True)):
                raise self.wrong((*place, key), f"{value!r} is no {_WORDS[kind]}")
            if kind is float and not math.isfinite(value):
                raise self.wrong((*place, key), f"{value!r} is no number to count with")
        return table

    def wrong(self, place: tuple[Any, ...], why: str) -> Usage:
        if not place:
            return Usage(f"{self.file}: {why}")
        path = ".".join(str(part) for part in place)
        return Usage(f"{self.file}:{self.line(place)}: {path}: {why}")

    def line(self, place: tuple[Any, ...]) -> int:
        """The line, from 1, of the last part of ``place`` that is found in the text."""
        at = 0
        for number, part in enumerate(place):
            name = re.escape(str(place[number - 1] if isinstance(part, int) else part))
            if isinstance(part, int):
                found = [n for n, line in enumerate(self.lines) if _header(line, name)][part:]
            else:
                key = re.compile(rf"""(?:^|[\s{{,."']){name}["']?\s*[=.]""")
                found = [
                    n
                    for n, line in enumerate(self.lines)
                    if n >= at and (_header(line, name) or key.search(line))
                ]
            at = found[0] if found else at
        return at + 1


def _header(line: str, name: str) -> bool:
    return bool(re.match(rf"\s*\[+\s*(?:\w+\.)*{name}\s*\]", line))


_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "table",
    list: "list",
}
