"""What every worker's environment really is, from a running server or from its log.

Both need the patch ``worker-env-report``: ``/proc/PID/environ`` of an SGLang worker is
overwritten memory, so only the worker itself can say what it has.
"""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import click

from . import show
from .options import options
from .patchset.errors import EnvironmentFailure, Usage

Report = dict[str, Any]
_LINE = re.compile(r'worker_env=(\{"process": .*\})\s*$')


def from_server(url: str, key: str | None) -> list[Report]:
    """One report for each scheduler rank of the server at ``url``.

    Raises ``Usage`` when there is no such answer, ``EnvironmentFailure`` when there is none.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/worker_env", headers=headers, timeout=30)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise EnvironmentFailure(f"{url}: {error}", "see that the server is up") from error
    if answer.status_code in (401, 403):
        raise Usage(f"{url}: the server wants its admin key", "--key KEY")
    try:
        answer.raise_for_status()
        return list(answer.json()["workers"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise Usage(
            f"{url}/worker_env: {answer.status_code}, no report: the server does not run the "
            "patch worker-env-report",
            "apply it and start the server again",
        ) from error


def from_log(file: Path) -> list[Report]:
    """One report for each worker that logged one in ``file``. Raises ``Usage``."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise Usage(f"{file}: {error.strerror}") from error
    found = [match[1] for line in lines if (match := _LINE.search(line))]
    if not found:
        raise Usage(f"{file}: no line with worker_env=, of the patch worker-env-report")
    return [json.loads(text) for text in found]


def name_of(report: Report) -> str:
    """What a column is called: ``scheduler tp0 dp1``."""
    ranks = [f"{kind}{rank}" for kind, rank in report["ranks"].items()]
    return " ".join([report["process"], *ranks])


def compare(reports: list[Report]) -> dict[str, Any]:
    """The variables of all ``reports``: for each the values by worker, and who is different.

    A worker is different when its value is not the one that most workers have.
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
                "different": [n for n, value in enumerate(values) if value != usual],
            }
        )
    return {"workers": [name_of(report) for report in reports], "variables": variables}


@click.command("env")
@click.option("--url", help="A running server, http://HOST:PORT.")
@click.option("--key", envvar="SGLANG_ADMIN_KEY", help="The server's admin key.")
@click.option("--log", type=click.Path(path_type=Path), help="A server's log, in place of --url.")
@options("json")
def environment(url: str | None, key: str | None, log: Path | None, as_json: bool) -> int:
    """Print what environment every worker has. Exit 1 when workers differ, or one came late.

    The server runs the patch worker-env-report.
    """
    if (url is None) == (log is None):
        raise Usage("give either --url or --log")
    reports = from_log(log) if log else from_server(url or "", key)
    result = compare(reports)
    show.emit(result, as_json, show.environment_table)
    wrong = [v for v in result["variables"] if v["different"] or any(v["late"])]
    return 1 if wrong else 0
