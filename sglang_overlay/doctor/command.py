"""``sglang-overlay doctor``."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import __version__, show
from ..options import options
from ..patchset.pin import load_pins, patches_folder
from ..patchset.series import read_names
from .checks import examine
from .collect import collect
from .facts import Facts
from .finding import Finding, State
from .table import print_findings


@click.command("doctor")
@click.option("--deep", is_flag=True, help="Copy between every two cards, and check each bit.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the findings as a page.")
@click.option("--bundle", type=click.Path(path_type=Path), help="Write a .tar.gz for a maintainer.")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A log that goes into --bundle.",
)
@click.option("--python", help="The Python that runs the server; this one by default.")
@options("tree", "json")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- SERVER ARGUMENTS]")
def doctor(
    deep: bool,
    html: Path | None,
    bundle: Path | None,
    logs: Sequence[Path],
    python: str | None,
    sglang_dir: Path | None,
    as_json: bool,
    arguments: Sequence[str],
) -> int:
    """Say what this machine will do to EAGLE over PCIe. Exit 1 when there is an error.

    With the server's own arguments after --, the checks are about that server.
    """
    from . import bundle as bundles
    from . import page

    if bundle:
        bundles.check(bundle, logs)
    say = _quiet if as_json else _say
    pins = {pin.version: tuple(read_names(pin)) for pin in load_pins(patches_folder())}
    facts = collect(python or sys.executable, sglang_dir, arguments, pins, deep, say)
    findings = examine(facts)
    result = as_result(facts, findings)
    show.emit(result, as_json, print_findings)
    if html:
        page.write(html, facts, findings)
        say(f"page: {html}")
    if bundle:
        files = bundles.files(result, logs)
        _say(f"{bundle} will hold:")
        for name, content in files.items():
            _say(f"  {name} ({len(content)} bytes)")
        bundles.write(bundle, files)
    return 1 if any(finding.state == State.ERROR for finding in findings) else 0


def as_result(facts: Facts, findings: Sequence[Finding]) -> dict[str, Any]:
    """What ``--json`` prints: the findings, how many of each state, and the facts."""
    counts = Counter(finding.state for finding in findings)
    plain = json.dumps(asdict(facts), default=_plain)
    return {
        "command": "doctor",
        "version": __version__,
        "findings": [asdict(finding) for finding in findings],
        "counts": {state.value: counts[state] for state in State},
        "facts": json.loads(plain),
    }


def _plain(value: object) -> object:
    if isinstance(value, frozenset):  # the names that NCCL knows: hundreds
        return f"{len(value)} names"
    raise TypeError(f"{type(value).__name__} in the facts")


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _quiet(text: str) -> None:
    """With ``--json``, nothing is said on the way; what goes into a bundle is."""
