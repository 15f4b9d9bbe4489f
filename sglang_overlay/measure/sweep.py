"""``sweep``: experiments from a TOML file, one after the other, and a ranked table."""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

from .. import show
from ..options import options
from ..patchset.errors import Usage
from . import bench, secret
from .breakeven import Acceptance, Case
from .campaign import Campaign, Voice, campaign
from .compare import compare, drafter
from .experiment import Experiment, Sweep, load
from .runs import Session
from .signals import terminated

_EVERY = 30.0  # seconds between two lines of progress in a log
SHIPPED = Path(__file__).with_name("sweeps")


@click.command("sweep")
@click.argument("file")
@click.option("-D", "values", multiple=True, metavar="NAME=VALUE", help="One of its [values].")
@click.option("--only", multiple=True, metavar="PATTERN", help="Experiments by name, as 'tree*'.")
@click.option("--again", is_flag=True, help="Start those that failed once more.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Folder for results, logs and traces.  [default: sweep-NAME]",
)
@click.option("--key", envvar="SGLANG_ADMIN_KEY", help="The servers' admin key.")
@click.option("--dry-run", is_flag=True, help="Print each experiment's command; start nothing.")
@options("json")
def sweep(
    file: str,
    values: tuple[str, ...],
    only: tuple[str, ...],
    again: bool,
    out: Path | None,
    key: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Start, measure and stop a server for each experiment in FILE; rank what came out.

    FILE is a path, or the name of a sweep that comes with this package. The same command goes on
    where a sweep was stopped or killed. A server that does not start is a result. Exit 1 when
    the sweep ended before its last experiment.
    """
    chosen, wanted = _chosen(file, values, only)
    if dry_run:
        show.emit(_commands(wanted), as_json, _command_lines)
        return 0
    with (
        _voice() as voice,
        terminated(),
        campaign(chosen, out or Path(f"sweep-{chosen.name}"), voice) as work,
    ):
        work.key = key
        ended = work.run(wanted, again)
        result = _ranked(work, ended)
    show.emit(result, as_json, _table)
    return 1 if ended else 0


def find(name: str) -> Path:
    """The file of the sweep ``name``: a path, or one that is shipped. Raises ``Usage``."""
    shipped = sorted(path.stem for path in SHIPPED.glob("*.toml"))
    if not Path(name).exists() and name in shipped:
        return SHIPPED / f"{name}.toml"
    if not Path(name).exists():
        raise Usage(f"{name}: no such file; sweeps that come along: {', '.join(shipped)}")
    return Path(name)


def _chosen(
    file: str, values: tuple[str, ...], only: tuple[str, ...]
) -> tuple[Sweep, list[Experiment]]:
    given = {}
    for pair in values:
        name, equals, value = pair.partition("=")
        if not equals:
            raise Usage(f"-D {pair}: wants NAME=VALUE")
        given[name] = value
    sweep = load(find(file), given)
    wanted = [
        one
        for one in sweep.experiments
        if not only or any(fnmatchcase(one.name, pattern) for pattern in only)
    ]
    if not wanted:
        names = ", ".join(one.name for one in sweep.experiments)
        raise Usage(f"{file}: none is called {' or '.join(only)}: {names}")
    return sweep, wanted


@contextmanager
def _voice() -> Iterator[Voice]:
    """All goes to standard error. What goes on at the moment stays only where nobody looks on,
    and there every 30 s."""
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    if not sys.stderr.isatty():
        last = [time.monotonic()]

        def tell(text: str) -> None:
            print(text, file=sys.stderr, flush=True)
            last[0] = time.monotonic()

        yield Voice(tell, lambda text: tell(text) if time.monotonic() - last[0] > _EVERY else None)
        return
    with console.status("") as status:
        yield Voice(
            lambda text: console.print(text, markup=False), lambda text: status.update(_safe(text))
        )


def _safe(text: str) -> str:
    return text.replace("[", r"\[")


def _ranked(work: Campaign, ended: str) -> dict[str, Any]:
    """The results, fastest first, failures last; and what has none yet."""
    results, notes = work.results(), work.notes()
    named = {one.name: one for one in work.sweep.experiments}
    rows = [
        _row(named[name], session, results, notes.get(name, ""))
        for name, session in results.items()
    ]
    rows.sort(key=lambda row: (bool(row["failure"]), -(row["tok_s"] or 0.0)))
    return {
        "command": "sweep",
        "sweep": work.sweep.name,
        "store": str(work.store.path),
        "ended": ended,
        "results": rows,
        "left": [name for name in named if name not in results],
    }


def _row(
    one: Experiment, session: Session, results: Mapping[str, Session], note: str
) -> dict[str, Any]:
    base = results.get(one.baseline)
    speed, before = session.median("tok_s"), base and base.median("tok_s")
    parts = session.breakdown
    return {
        "experiment": one.name,
        "settings": dict(one.settings),
        "session": session.key,
        "tok_s": speed,
        "spread": session.spread,
        "cycle_ms": session.median("cycle_ms"),
        "accept_length": session.median("accept_length"),
        "accept_below": _below(session, results),
        "baseline": one.baseline,
        "speedup": speed / before if speed and before else None,
        "predicted": _predicted(session, base) if base else None,
        "all_reduce_ms": parts.verify.get("all-reduce") if parts else None,
        "graphs": dict(parts.graphs) if parts else {},
        "note": note,
        "warnings": [] if session.failure else bench.warnings(session),
        "failure": session.failure,
    }


def _below(session: Session, results: Mapping[str, Session]) -> str:
    """The first experiment with the same drafter, if the accept length fell below its own."""
    if not session.counted:
        return ""
    name, first = next(
        (name, one)
        for name, one in results.items()
        if one.counted and drafter(one) == drafter(session)
    )
    try:
        return name if compare(first, session).accept_fell else ""
    except Usage:  # without numpy nothing is compared; a sweep of hours does not fail for it
        return ""


def _predicted(session: Session, base: Session) -> float | None:
    """The break-even formula's speed-up: of decoding alone, so without the time to first token."""
    decode, cycle = base.median("cycle_ms"), session.median("cycle_ms")
    length = session.median("accept_length") or 1.0
    if not decode or not cycle:
        return None
    return Case(decode, cycle, Acceptance(length)).speedup


def _table(result: dict[str, Any]) -> None:
    rows = [
        (
            str(number),
            row["experiment"],
            *(_figure(row[key]) for key in ("tok_s", "cycle_ms")),
            _figure(row["accept_length"]) + (" fell" if row["accept_below"] else ""),
            f"{row['spread']:.1%}",
            *(_figure(row[key]) for key in ("speedup", "predicted", "all_reduce_ms")),
            row["note"].partition(":")[0],
            row["failure"][:90],
        )
        for number, row in enumerate(result["results"], 1)
    ]
    titles = (
        *("", "experiment", "tok/s", "cycle ms", "accept", "spread", "speed-up", "predicted"),
        *("all-reduce ms", "arrived", "failure"),
    )
    show.table(titles, rows)
    for row in result["results"]:
        if row["accept_below"]:
            print(
                f"{row['experiment']}: accept length below that of {row['accept_below']}, "
                "beyond noise: suspect wrong numbers"
            )
        for text in row["warnings"]:
            print(f"{row['experiment']}: {text}")
        eager = [name for name, mode in row["graphs"].items() if mode and mode != "graph"]
        if eager:
            modes = ", ".join(f"{name} {row['graphs'][name]}" for name in eager)
            print(f"{row['experiment']}: {modes}")
    if result["left"]:
        print(f"not measured: {', '.join(result['left'])}")
    if result["ended"]:
        print(f"ended before its last experiment: {result['ended']}")
    print(f"results: {result['store']}")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _commands(wanted: list[Experiment]) -> dict[str, Any]:
    return {
        "command": "sweep",
        "experiments": [
            {
                "name": one.name,
                "argv": secret.words(one.argv(0)),
                "env": {name: secret.shown(name, value) for name, value in one.env.items()},
                "environ": {name: secret.shown(name, value) for name, value in one.environ.items()},
            }
            for one in wanted
        ],
    }


def _command_lines(result: dict[str, Any]) -> None:
    for one in result["experiments"]:
        pairs = {**one["env"], **one["environ"]}
        words = [f"{name}={value}" for name, value in pairs.items()] + one["argv"]
        print(f"{one['name']}:\n  {shlex.join(words)}")
