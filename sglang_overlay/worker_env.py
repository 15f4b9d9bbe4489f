"""What every worker's environment really is, from a running server or from its log.

Both need the patch ``worker-env-report``: ``/proc/PID/environ`` of an SGLang worker is
overwritten memory, so only the worker itself can say what it has.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import click

from . import show
from .options import options
from .patchset.errors import EnvironmentFailure, Usage
from .patchset.pin import load_pins, patches_folder
from .patchset.series import read_names

Report = dict[str, Any]
_PATCH = "worker-env-report"
_START = 'worker_env={"process": '
_OF_EACH_RANK = {"CUDA_VISIBLE_DEVICES"}  # differs by design: each Ray actor has its own GPU


def from_server(url: str, key: str | None) -> list[Report]:
    """One report for each scheduler rank of the server at ``url``.

    Raises ``Usage`` when there is no such answer, ``EnvironmentFailure`` when there is none.
    """
    import httpx

    headers = [(b"Authorization", f"Bearer {key}".encode())] if key else []
    try:
        answer = httpx.get(f"{url.rstrip('/')}/worker_env", headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EnvironmentFailure(f"{url}: {error}", "see that the server is up") from error
    if answer.status_code in (401, 403):
        raise Usage(f"{url}: the server wants its admin key", "--key KEY")
    try:
        answer.raise_for_status()
        reports = list(answer.json()["workers"])
        if not reports or not all(map(_is_whole, reports)):
            raise ValueError("no report in it, or a damaged one")
        return reports
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise Usage(
            f"{url}/worker_env: {answer.status_code}, no report: the server does not run the "
            f"patch {_PATCH}",
            _apply(),
        ) from error


def from_log(file: Path) -> list[Report]:
    """The last report of each worker that logged one in ``file``, in that order.

    Damaged reports are left out, with a note. Raises ``Usage``.
    """
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise Usage(f"{file}: {error.strerror}") from error
    last: list[Report] = []
    damaged = 0
    for line in lines:
        # Ray colours lines; two processes may write into one.
        _, *starts = click.unstyle(line).split(_START)
        for text in starts:
            if report := _parsed(text):
                last = [earlier for earlier in last if not _replaces(report, earlier)]
                last.append(report)
            else:
                damaged += 1
    if damaged:
        click.echo(f"{file}: {damaged} damaged reports left out", err=True)
    if not last:
        raise Usage(f"{file}: no line with worker_env=, of the patch {_PATCH}", _apply())
    return last


def _replaces(report: Report, earlier: Report) -> bool:
    """Whether ``earlier`` was of the same worker: of the process itself, or of another launch.

    Several tokenizer workers and detokenizers of one launch have one name.
    """
    if name_of(report) != name_of(earlier):
        return False
    launch = report.get("launch")
    of_one_launch = launch is not None and launch == earlier.get("launch")
    return not of_one_launch or all(report.get(k) == earlier.get(k) for k in ("host", "pid"))


def _apply() -> str:
    versions = [pin.version for pin in load_pins(patches_folder()) if _PATCH in read_names(pin)]
    return f"apply it (there is one for SGLang {', '.join(versions)}) and start the server again"


def _parsed(text: str) -> Report | None:
    """The report whose text follows ``_START``; None where it is damaged."""
    try:
        report, _ = json.JSONDecoder().raw_decode('{"process": ' + text)
    except ValueError:
        return None
    return report if _is_whole(report) else None


def _is_whole(report: Report) -> bool:
    try:
        name_of(report)
        return all(e.keys() >= {"value", "origin", "late"} for e in report["env"].values())
    except (KeyError, TypeError, AttributeError):
        return False


def name_of(report: Report) -> str:
    """What a worker is called: ``scheduler tp0 dp1``."""
    ranks = [f"{kind}{rank}" for kind, rank in report["ranks"].items()]
    return " ".join([report["process"], *ranks])


def _columns(reports: list[Report]) -> list[str]:
    """What the columns are called: the workers' names, with the pid where two have one name."""
    count = Counter(map(name_of, reports))
    return [
        f"{name} pid{report.get('pid')}" if count[name := name_of(report)] > 1 else name
        for report in reports
    ]


def compare(reports: list[Report]) -> dict[str, Any]:
    """The variables of all ``reports``: for each the values by worker, and who is different.

    A worker is different when its value is not the one that most workers have. ``expected``
    is what --worker-env gave where the worker has another value, else None.
    """
    names = sorted({name for report in reports for name in report["env"]})
    variables = []
    for name in names:
        entries = [report["env"].get(name) for report in reports]
        values = [entry and entry["value"] for entry in entries]
        usual = Counter(values).most_common(1)[0][0]
        variables.append(
            {
                "name": name,
                "values": values,
                "origins": [entry and entry["origin"] for entry in entries],
                "late": [entry and entry["late"] for entry in entries],
                "expected": [entry and entry.get("expected") for entry in entries],
                "different": [
                    n
                    for n, value in enumerate(values)
                    if value != usual and name not in _OF_EACH_RANK
                ],
            }
        )
    return {"workers": _columns(reports), "variables": variables}


@click.command("env")
@click.option("--url", help="A running server, http://HOST:PORT.")
@click.option("--key", envvar="SGLANG_ADMIN_KEY", help="The server's admin key.")
@click.option("--log", type=click.Path(path_type=Path), help="A server's log, in place of --url.")
@options("json")
def environment(url: str | None, key: str | None, log: Path | None, as_json: bool) -> int:
    """Print what environment every worker has.

    Exit 1 when workers differ, a value came too late, or is not what --worker-env gave.
    The server runs the patch worker-env-report.
    """
    if (url is None) == (log is None):
        raise Usage("give either --url or --log")
    reports = from_log(log) if log else from_server(url or "", key)
    result = compare(reports)
    show.emit(result, as_json, show.environment_table)
    return 1 if any(map(_wrong, result["variables"])) else 0


def _wrong(variable: dict[str, Any]) -> bool:
    expected = any(value is not None for value in variable["expected"])
    return bool(variable["different"]) or any(variable["late"]) or expected
