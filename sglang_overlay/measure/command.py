"""``bench``, ``bench list`` and ``bench compare``."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import show
from ..options import options
from ..patchset.errors import EnvironmentFailure, Usage
from . import bench
from . import prompts as texts
from .compare import Comparison, compare
from .runs import APIS, Protocol, Session
from .signals import terminated
from .store import open_store, read_store

STORE = click.option(
    "--store",
    type=click.Path(path_type=Path),
    default="bench.sqlite",
    show_default=True,
    help="The SQLite file that keeps results.",
)
_DEFAULT = bench.CAMPAIGN


@click.group("bench", invoke_without_command=True)
@click.option("--url", help="The running server, http://HOST:PORT.")
@click.option("--name", default="", help="What to call this configuration.  [default: the model]")
@click.option("--runs", type=int, default=_DEFAULT.runs, show_default=True)
@click.option("--warmup", type=int, default=_DEFAULT.warmup, show_default=True)
@click.option(
    "--tokens",
    type=int,
    default=_DEFAULT.tokens,
    show_default=True,
    help="New tokens of each request.",
)
@click.option(
    "--concurrency",
    type=int,
    default=_DEFAULT.concurrency,
    show_default=True,
    help="Requests at once; beyond 1 through SGLang's own serving benchmark.",
)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path),
    help="One text a line, or ShareGPT-style .json or .jsonl.  [default: 32 short ones]",
)
@click.option("--input-ids", is_flag=True, help="Random token ids in place of texts.")
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option(
    "--api",
    type=click.Choice(APIS),
    default=_DEFAULT.api,
    show_default=True,
    help="/generate, /v1/completions or /v1/chat/completions.",
)
@click.option("--no-stream", is_flag=True, help="One answer at the end; no times within it.")
@click.option("--stop-at-eos", is_flag=True, help="Let the model end before --tokens.")
@click.option("--key", envvar="SGLANG_API_KEY", help="The server's API key.")
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True),
    help="A python that has SGLang, for --concurrency.  [default: this one]",
)
@click.option(
    "--log",
    type=click.Path(path_type=Path),
    help="The server's log: its overlay line names patches.",
)
@click.option(
    "--sglang-dir",
    "tree",
    type=click.Path(path_type=Path),
    help="The SGLang that the server runs from: which patches it holds.",
)
@STORE
@options("json")
def command(
    url: str | None,
    name: str,
    runs: int,
    warmup: int,
    tokens: int,
    concurrency: int,
    file: Path | None,
    input_ids: bool,
    temperature: float,
    api: str,
    no_stream: bool,
    stop_at_eos: bool,
    store: Path,
    as_json: bool,
    **how: Any,
) -> int:
    """Measure a running server: 2 warm-up runs, 5 counted of 2048 new tokens, one at a time."""
    if click.get_current_context().invoked_subcommand:
        return 0
    if url is None:
        raise Usage("which server?", "bench --url http://HOST:PORT")
    if file and input_ids:
        raise Usage("give either --prompts or --input-ids")
    protocol = Protocol(
        warmup=warmup,
        runs=runs,
        tokens=tokens,
        concurrency=concurrency,
        temperature=temperature,
        stream=not no_stream,
        ignore_eos=not stop_at_eos,
        api=api,
        prompts=file.name if file else texts.RANDOM_IDS if input_ids else texts.BUILT_IN,
    )
    fault, why = protocol.fault()
    if why:
        raise Usage(f"--{fault}: {why}")
    chosen = texts.read(file) if file else []
    with terminated(), open_store(store) as kept, show.progress() as progress:
        session = bench.run(
            url, protocol, name=name, prompts=chosen, store=kept, progress=progress, **how
        )
    show.emit(described(session), as_json, session_table)
    if not session.failure:
        return 0
    kept_as = f"{len(session.counted)} of {runs} runs counted, kept as {session.key} in {store}"
    print(f"error: {session.failure} ({kept_as})", file=sys.stderr)
    return EnvironmentFailure.exit_code


@command.command("list")
@STORE
@options("json")
def listing(store: Path, as_json: bool) -> int:
    """The sessions in the store."""
    with read_store(_existing(store)) as kept:
        result = {"store": str(store), "sessions": [described(one) for one in kept.load()]}
    show.emit(result, as_json, _list_table)
    return 0


@command.command("compare")
@click.argument("a")
@click.argument("b")
@STORE
@options("json")
def comparing(a: str, b: str, store: Path, as_json: bool) -> int:
    """Hold session B against A (numbers or names): ratio, 95 % interval, verdict.

    Exit 1 when B's accept length is lower than A's, beyond noise, with the same drafter.
    """
    with read_store(_existing(store)) as kept:
        found = compare(kept.find(a), kept.find(b))
    show.emit(_compared(found), as_json, _compare_table)
    return 1 if found.accept_fell else 0


def _existing(store: Path) -> Path:
    if not store.is_file():
        raise Usage(f"{store}: no such file", "bench --url URL makes one, or --store FILE")
    return store


def described(session: Session) -> dict[str, Any]:
    """A session as plain values, with what follows from its runs."""
    names = ("tok_s", "ttft_ms", "itl_p50_ms", "itl_p99_ms", "accept_length", "cycle_ms")
    return asdict(session) | {
        "command": "bench",
        "runs": [asdict(r) | {"tok_s": r.tok_s, "cycle_ms": r.cycle_ms} for r in session.runs],
        "median": {name: session.median(name) for name in names},
        "spread": session.spread,
        "warnings": bench.warnings(session),
    }


def _compared(found: Comparison) -> dict[str, Any]:
    problems = []
    if found.accept_fell:
        problems.append(
            f"the accept length of {found.b.name} is {found.accept_ratio:.3f} of that of "
            f"{found.a.name}: drafts that were right are so no more; suspect wrong numbers"
        )
    return {
        "command": "bench compare",
        "a": {"key": found.a.key, "name": found.a.name, "tok_s": found.a.values("tok_s")},
        "b": {"key": found.b.key, "name": found.b.name, "tok_s": found.b.values("tok_s")},
        "speed": found.speed and asdict(found.speed),
        "accept": found.accept and asdict(found.accept),
        "verdict": found.verdict,
        "note": _note(found),
        "problems": problems,
        "differences": {name: list(pair) for name, pair in found.differences.items()},
    }


def _note(found: Comparison) -> str:
    """Why accept lengths that differ say nothing of the numbers."""
    if found.accept_ratio is None or found.same_drafter:
        return ""
    return "another drafter, model or number of steps: accept lengths need not be equal"


def session_table(result: dict[str, Any]) -> None:
    """Print what ``described`` gives."""
    titles = ("run", "tok/s", "first ms", "p50 ms", "p99 ms", "accept", "cycles", "cycle ms")
    keys = ("tok_s", "ttft_ms", "itl_p50_ms", "itl_p99_ms", "accept_length", "verify_cycles")
    rows = [
        (f"{'warm-up ' if run['warmup'] else ''}{run['number']}", *_cells(run, *keys, "cycle_ms"))
        for run in result["runs"]
    ]
    rows.append(("median", *_cells(result["median"], *keys, "cycle_ms")))
    show.table(titles, rows)
    name = result["name"]
    print(f"{name} (session {result['key']}): spread {result['spread']:.1%} of the median")
    for text in result["warnings"]:
        print(f"warning: {text}", file=sys.stderr)


def _cells(values: dict[str, Any], *keys: str) -> list[str]:
    return [_figure(values.get(key)) for key in keys]


def _figure(value: float | None) -> str:
    return "-" if value is None else str(value) if isinstance(value, int) else f"{value:.2f}"


def _list_table(result: dict[str, Any]) -> None:
    rows = [
        (
            str(one["key"]),
            one["name"],
            one["started"],
            *_cells(one["median"], "tok_s", "accept_length", "cycle_ms"),
            f"{one['spread']:.1%}",
            one["failure"][:40],
        )
        for one in result["sessions"]
    ]
    titles = ("key", "name", "started", "tok/s", "accept", "cycle ms", "spread", "failure")
    show.table(titles, rows)


def _compare_table(result: dict[str, Any]) -> None:
    rows = [
        (what, *(_figure(ratio and ratio[key]) for key in ("value", "low", "high")))
        for what, ratio in (("tok/s", result["speed"]), ("accept length", result["accept"]))
    ]
    show.table(("B / A", "ratio", "low", "high"), rows)
    for name, (left, right) in result["differences"].items():
        print(f"{name}: {left} -> {right}")
    print(f"{result['b']['name']} against {result['a']['name']}: {result['verdict']}")
    if result["note"]:
        print(result["note"])
    for problem in result["problems"]:
        print(f"error: {problem}", file=sys.stderr)
