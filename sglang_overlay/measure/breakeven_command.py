"""``breakeven``: does speculation pay, and what would have to change."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from .. import show
from ..options import options
from ..patchset.errors import Usage
from .breakeven import (
    PHASES,
    Acceptance,
    Case,
    by_steps,
    from_histogram,
    from_length,
    from_positions,
    targets,
)
from .command import STORE
from .runs import Breakdown, Session
from .store import read_store

_ALLREDUCES_US = (200.0, 100.0, 50.0, 20.0, 10.0, 5.0)


class _Finite(click.FloatRange):
    """A number of a range; nan and inf are in none."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found: float = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number to count with", param, ctx)
        return found


_MS = _Finite(0, min_open=True)
_PART = _Finite(0)


@click.command("breakeven")
@click.option("--decode-ms", type=_MS, help="A token without speculation.")
@click.option("--cycle-ms", type=_MS, help="A cycle: draft, verify, extend.  [default: their sum]")
@click.option("--accept-length", type=_Finite(1), help="Tokens a cycle.")
@click.option(
    "--accepted-at",
    metavar="0.7,0.4,...",
    help="In place of --accept-length: the part of cycles in which draft 1, 2, ... was right.",
)
@click.option("--bench", metavar="SESSION", help="Cycle, acceptance and split of a stored session.")
@click.option("--baseline", metavar="SESSION", help="--decode-ms from one without speculation.")
@click.option("--draft-ms", type=_PART)
@click.option("--verify-ms", type=_PART, help="All of verify, its all-reduces too.")
@click.option("--extend-ms", type=_PART)
@click.option("--allreduce-ms", type=_PART, help="All all-reduces of a verify pass.")
@click.option("--allreduces", type=click.IntRange(1), help="[default: those of --bench, else 122]")
@click.option("--allreduce-us", type=_PART, multiple=True, help="What if one took this long?")
@click.option("--steps", type=click.IntRange(1), help="Draft steps.  [default: 2]")
@click.option(
    "--token-ms", type=_PART, default=0.0, help="What one more token costs the verify pass."
)
@click.option("--plot", type=click.Path(path_type=Path), help="An SVG (or PNG, PDF) to write.")
@STORE
@options("json")
def command(
    allreduce_us: tuple[float, ...], plot: Path | None, store: Path, as_json: bool, **given: Any
) -> int:
    """Say whether speculation wins, by how much, and what has to fall to what if not."""
    stored = _stored(store, given.pop("bench"), given.pop("baseline"))
    case = _case(stored | {name: value for name, value in given.items() if value is not None})
    result = described(case, allreduce_us)
    if plot:
        from . import plots

        plots.write(plots.breakeven(case, _steps(case)[0]), plot)
        result["plot"] = str(plot)
    show.emit(result, as_json, _table)
    return 0


def described(case: Case, allreduce_us: tuple[float, ...] = ()) -> dict[str, Any]:
    """What ``breakeven`` answers: plain values, milliseconds unless named otherwise."""
    chains, why = _steps(case)
    best = max(chains, key=lambda one: one.speedup, default=None)
    known = case.allreduce_ms is not None
    faster = [
        {"us": us, "cycle_ms": round(one.cycle_ms, 4), "speedup": round(one.speedup, 4)}
        for us in allreduce_us or (_ALLREDUCES_US if known else ())
        if (one := case.with_allreduce(us))
    ]
    return {
        "command": "breakeven",
        "decode_ms": case.decode_ms,
        "cycle_ms": round(case.cycle_ms, 4),
        "accept_length": round(case.acceptance.length, 4),
        "speedup": round(case.speedup, 4),
        "wins": case.speedup > 1,
        "breakeven_cycle_ms": round(case.breakeven_ms, 4),
        "targets": {one.part: _rounded(asdict(one)) for one in targets(case)},
        "allreduce": faster,
        "rates": [round(rate, 4) for rate in case.acceptance.rates],
        "steps": [
            {
                "steps": one.steps,
                "draft_tokens": one.steps + 1,
                "accept_length": round(one.acceptance.length, 4),
                "cycle_ms": round(one.cycle_ms, 4),
                "speedup": round(one.speedup, 4),
                "measured": one.steps <= len(case.acceptance.rates),
            }
            for one in chains
        ],
        "best": best and {"steps": best.steps, "draft_tokens": best.steps + 1},
        "why_no_best": why,
    }


def _rounded(target: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in target.items() if k != "part"}


def _steps(case: Case) -> tuple[list[Case], str]:
    try:
        return by_steps(case), ""
    except Usage as error:
        return [], f"{error.message}"


def _stored(store: Path, bench: str | None, baseline: str | None) -> dict[str, Any]:
    """What the named sessions say, by the names of the options."""
    if bench is None and baseline is None:
        return {}
    if not store.is_file():
        raise Usage(f"{store}: no such file", "--store FILE")
    found: dict[str, Any] = {}
    with read_store(store) as kept:
        if baseline:
            found["decode_ms"] = decode_ms(kept.find(baseline))
        if bench:
            found |= _speculative(kept.find(bench))
    return found


def decode_ms(session: Session) -> float:
    """The time of a token in a session without speculation. Raises ``Usage``."""
    found = session.median("cycle_ms")
    if found is None or session.median("verify_cycles") is not None:
        raise Usage(f"{session.name} ({session.key}): no streamed session without speculation")
    return found


def case_of(session: Session, decode: float) -> Case:
    """The case that a session with speculation makes against ``decode`` ms a token.

    Raises ``Usage`` where it has no streamed runs with verify cycles.
    """
    return _case(_speculative(session) | {"decode_ms": decode})


def _speculative(session: Session) -> dict[str, Any]:
    cycle, length = session.median("cycle_ms"), session.median("accept_length")
    if cycle is None or length is None:
        raise Usage(f"{session.name} ({session.key}): no streamed session with speculation")
    found: dict[str, Any] = {"cycle_ms": cycle, "accept_length": length}
    histograms = [run.histogram for run in session.counted if run.histogram]
    arguments = session.context.get("arguments", {})
    found["steps"] = arguments.get("speculative_num_steps")
    if histograms and arguments.get("speculative_eagle_topk", 1) == 1:
        # The server's list ends at the longest run of right drafts: those beyond never were.
        size = max(*map(len, histograms), (found["steps"] or 1) + 1)
        counts = [sum(h[n] for h in histograms if n < len(h)) for n in range(size)]
        found["acceptance"] = Acceptance(length, from_histogram(counts).rates)
    if session.breakdown:
        found |= _split(session, session.breakdown)
    return {name: value for name, value in found.items() if value is not None}


def _split(session: Session, breakdown: Breakdown) -> dict[str, Any]:
    phases, traced = session.phases, breakdown.phases
    found: dict[str, Any] = {f"{name}_ms": ms for name, ms in phases.items()}
    if count := round(breakdown.allreduces):
        part = breakdown.verify.get("all-reduce", 0.0) / (traced.get("verify") or 1.0)
        found |= {"allreduces": count, "allreduce_ms": part * phases.get("verify", 0.0)}
    return found


def _case(given: Mapping[str, Any]) -> Case:
    phases = {name: given[f"{name}_ms"] for name in PHASES if f"{name}_ms" in given}
    whole = {"draft", "verify", "extend"} <= phases.keys()
    if "decode_ms" not in given:
        raise Usage("--decode-ms or --baseline is missing", "breakeven --help")
    if "cycle_ms" not in given and not whole:
        raise Usage("--cycle-ms, all its parts, or --bench is missing", "breakeven --help")
    cycle: float = given.get("cycle_ms") or sum(phases.values())
    if sum(phases.values()) > cycle * 1.001:
        raise Usage(f"the parts are {sum(phases.values()):g} ms, the cycle only {cycle:g}")
    if whole:
        phases.setdefault("host", cycle - sum(phases.values()))
    allreduce, bound = given.get("allreduce_ms"), phases.get("verify", cycle)
    if allreduce is not None and allreduce > bound:
        raise Usage(f"all-reduces of {allreduce:g} ms are more than the {bound:g} ms around them")
    steps = given.get("steps", 2)
    return Case(
        decode_ms=given["decode_ms"],
        cycle_ms=cycle,
        acceptance=_acceptance(given, steps),
        phases=phases,
        allreduce_ms=allreduce,
        allreduces=given.get("allreduces", Case.allreduces),
        steps=steps,
        token_ms=given.get("token_ms", 0.0),
    )


def _acceptance(given: Mapping[str, Any], steps: int) -> Acceptance:
    if positions := given.get("accepted_at"):
        try:
            return from_positions([float(text) for text in positions.split(",")])
        except ValueError as error:
            raise Usage(f"--accepted-at {positions}: {error}") from error
    if found := given.get("acceptance"):
        return Acceptance(given["accept_length"], found.rates)
    if "accept_length" not in given:
        raise Usage("--accept-length or --accepted-at is missing", "breakeven --help")
    length = given["accept_length"]
    # More than steps + 1 is a tree of drafts, or steps not given: no rates then.
    return from_length(length, steps) if length <= steps + 1 else Acceptance(length)


def _table(result: dict[str, Any]) -> None:
    word = "wins" if result["wins"] else "loses"
    print(
        f"speculation {word}: {result['speedup']:.2f} times the speed without it "
        f"({result['accept_length']:g} tokens in {result['cycle_ms']:g} ms against "
        f"{result['decode_ms']:g} ms a token; break-even at {result['breakeven_cycle_ms']:g} ms)"
    )
    rows = []
    for part, one in result["targets"].items():
        known = one["now"] is not None
        alone = "-" if not known else "not alone" if one["target"] is None else f"{one['target']:g}"
        rows.append((part, f"{one['now']:g}" if known else "-", alone, f"{one['fall']:g}"))
    show.table(("for break-even", "now", "target", "has to fall by"), rows)
    for one in result["allreduce"]:
        print(f"all-reduce of {one['us']:g} us: {one['cycle_ms']:g} ms, {one['speedup']:.2f}")
    if result["best"]:
        steps = [
            (
                f"{one['steps']}{'' if one['measured'] else ' (not measured)'}",
                f"{one['draft_tokens']}",
                f"{one['accept_length']:g}",
                f"{one['cycle_ms']:g}",
                f"{one['speedup']:.2f}{' best' if one['steps'] == result['best']['steps'] else ''}",
            )
            for one in result["steps"]
        ]
        show.table(("steps", "draft tokens", "accept length", "cycle ms", "speedup"), steps)
    else:
        print(result["why_no_best"])
