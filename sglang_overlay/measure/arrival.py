"""How a setting comes to the workers, and whether it came."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..patchset.errors import PatchsetError
from ..worker_env import from_server, name_of
from . import secret, stream
from .experiment import Experiment, Value

_PROBE = (
    "import sglang.srt.arg_groups.fields.parallel as p\n"
    "print('worker_env' in p.Parallel.__struct_fields__)"
)
_PROBE_S = 180.0


@dataclass(frozen=True)
class Arrival:
    """What the running server says of an experiment's settings."""

    wrong: tuple[str, ...] = ()  # variables that a worker has differently
    overridden: tuple[str, ...] = ()  # arguments of which SGLang made something else
    unknown: tuple[str, ...] = ()  # why some, or all, could not be checked

    def __str__(self) -> str:
        kinds = {"no": self.wrong, "overridden": self.overridden, "not checked": self.unknown}
        return (
            "; ".join(f"{kind}: {', '.join(told)}" for kind, told in kinds.items() if told) or "yes"
        )


def takes_worker_env(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the SGLang that ``command`` starts has ``--worker-env``, by its own word.

    Only a command that begins with a Python is asked; it takes the time of an import.
    """
    if not Path(command[0]).name.startswith("python"):
        return False
    try:
        done = subprocess.run(
            [command[0], "-c", _PROBE],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=_PROBE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.stdout.split()[-1:] == ["True"]


def deliver(experiment: Experiment, patched: bool) -> tuple[list[str], dict[str, str]]:
    """Words for the end of the command line, and the environment of the process to start.

    A ``patched`` server takes the workers' variables by ``--worker-env`` and reports each; secrets
    for all workers it inherits, since a command line is public.
    """
    if not patched:
        return [], {**experiment.env, **experiment.environ}
    hidden = {
        name: value
        for name, value in experiment.env.items()
        if secret.is_secret(name) and "@" not in name
    }
    words = [
        word
        for name, value in experiment.env.items()
        if name not in hidden
        for word in ("--worker-env", f"{name}={value}")
    ]
    names = ",".join(sorted({name.partition("@")[0] for name in experiment.env}))
    return words, {"SGLANG_WORKER_ENV_REPORT_NAMES": names, **experiment.environ, **hidden}


def check(url: str, experiment: Experiment, key: str | None = None) -> Arrival:
    """Ask the server at ``url`` what became of the settings of ``experiment``.

    Variables by ``GET /worker_env`` (patch worker-env-report), from every scheduler; arguments
    by ``/server_info``.
    """
    varied = {flag: value for flag, value in experiment.args.items() if flag in experiment.settings}
    overridden, unknown = _arguments(url, varied, key) if varied else ([], [])
    wrong: list[str] = []
    if experiment.env:
        try:
            reports = from_server(url, key)
        except PatchsetError:
            unknown.append("variables, for want of the patch worker-env-report")
        else:
            wrong = [text for report in reports for text in _variables(report, experiment.env)]
    return Arrival(tuple(wrong), tuple(overridden), tuple(unknown))


def _variables(report: dict[str, Any], env: Mapping[str, str]) -> list[str]:
    """What of ``env`` this worker has differently."""
    ranks = {f"{kind}{rank}" for kind, rank in report["ranks"].items()}
    wanted = {name: value for name, value in env.items() if "@" not in name}
    for name, value in env.items():
        plain, selected, selector = name.partition("@")
        if selected and selector in ranks:
            wanted[plain] = value
    found = []
    for name, value in wanted.items():
        entry = report["env"].get(name) or {"value": None, "late": None}
        if entry["value"] not in (value, "<redacted>"):
            has = "not set" if entry["value"] is None else entry["value"]
            found.append(f"{name} is {has} in {name_of(report)}")
        elif entry["late"]:
            found.append(f"{name} came too late in {name_of(report)}: {entry['late']}")
    return found


def _arguments(url: str, args: Mapping[str, Value], key: str | None) -> tuple[list[str], list[str]]:
    """Of which the server made something else, and which it does not name."""
    overridden, unknown = [], []
    with stream.connect(url, key) as client:
        try:
            info = stream.get(client, "/server_info")
        except PatchsetError as error:
            return [], [error.message]
    for flag, value in args.items():
        name = flag.lstrip("-").replace("-", "_")
        if name not in info:
            unknown.append(flag)
        elif value is not False and _plain(info[name]) != _plain(value):
            overridden.append(f"{flag} is {secret.shown(flag, str(info[name]))}")
    return overridden, unknown


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
