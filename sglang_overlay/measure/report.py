"""``report``: what was measured, as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from .. import show
from ..options import options
from ..patchset.errors import EnvironmentFailure, Usage
from . import bench, plots
from .breakeven import PHASES, Case
from .breakeven_command import case_of, decode_ms
from .compare import Comparison, alike, compare, drafter
from .kernels import KINDS
from .runs import Session
from .store import read_store

_LABELS = 28  # characters of a bar's label


@dataclass(frozen=True)
class Row:
    """One session against the baseline of its group."""

    session: Session
    comparison: Comparison | None  # None for the baseline
    predicted: float | None  # break-even's speedup; None without speculation or baseline
    below: str  # the session with the same drafter that its accept length is below, beyond noise
    warnings: list[str]

    @property
    def verdict(self) -> str:
        """What the page says of it in two words."""
        if self.below:
            return "accept length fell"
        return self.comparison.verdict if self.comparison else "baseline"


@dataclass(frozen=True)
class Group:
    """Sessions that did the same and have one baseline, so that they may be compared."""

    baseline: Session
    rows: list[Row]
    cases: list[tuple[str, Case]]

    @property
    def title(self) -> str:
        """What they did."""
        did = self.baseline.protocol
        many = f"{did.concurrency} at once" if did.concurrency > 1 else "one at a time"
        model = f"{Path(self.baseline.model).name}: " if self.baseline.model else ""
        how = f"{did.tokens} new tokens, {many}, temperature {did.temperature:g}, {did.prompts}"
        return model + how

    @property
    def phases(self) -> list[str]:
        """The phases of all cycles that were split, in their order."""
        splits = [row.session.breakdown for row in self.rows if row.session.breakdown]
        return [name for name in ("decode", *PHASES) if any(name in one.phases for one in splits)]

    @property
    def headline(self) -> str:
        """The fastest against the baseline, or that nothing is faster beyond noise."""
        faster = [row for row in self.rows if row.verdict.startswith("faster")]
        if not faster:
            return f"Nothing is faster than {self.baseline.name} beyond noise."
        best = max(faster, key=lambda row: row.session.median("tok_s") or 0)
        assert best.comparison and best.comparison.speed
        speed = best.comparison.speed
        return (
            f"{best.session.name} is {speed.value:.2f} times as fast as {self.baseline.name} "
            f"(95 %: {speed.low:.2f} to {speed.high:.2f})."
        )


@click.command("report")
@click.argument("source", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    help="The page.",
)
@click.option("--baseline", help="Number or name.  [default: the latest without speculation]")
@options("json")
def command(source: Path, out: Path, baseline: str | None, as_json: bool) -> int:
    """Draw SOURCE, a SQLite file of results or a folder of them, as one HTML page."""
    if not _may_be_replaced(out):
        raise Usage(f"{out}: there already, and no page", "--out FILE.html")
    sessions = read(source)
    with show.progress() as progress:
        text = page(sessions, str(source), baseline, progress)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(f"{out}: {error.strerror}", "--out FILE") from error
    result = {"command": "report", "page": str(out), "sessions": len(sessions)}
    show.emit(result, as_json, lambda _: print(f"{len(sessions)} sessions: {out}"))
    return 0


def _may_be_replaced(out: Path) -> bool:
    """Whether nothing is lost when ``out`` is written: no file, an empty one, or a page."""
    if not out.is_file():
        return True
    try:
        with out.open("rb") as stream:
            return stream.read(15).lower() in (b"", b"<!doctype html>")
    except OSError:
        return False


def read(source: Path) -> list[Session]:
    """The sessions of a file, or of every ``*.sqlite`` in a folder. Raises ``Usage``."""
    files = sorted(source.glob("*.sqlite")) if source.is_dir() else [source]
    if not files or not all(file.is_file() for file in files):
        raise Usage(f"{source}: no results there", "bench --url URL --store FILE.sqlite")
    sessions = []
    for file in files:
        with read_store(file) as store:
            sessions += store.load()
    if not sessions:
        raise Usage(f"{source}: no session in it", "bench --url URL --store FILE.sqlite")
    return sessions


def page(
    sessions: Sequence[Session],
    source: str,
    baseline: str | None,
    progress: bench.Progress = lambda what, done, total: None,
) -> str:
    """The page. Raises ``Usage`` for an unknown baseline, or without the extra ``report``."""
    template = _template()
    current = [one for n, one in enumerate(sessions) if not _replaced(one, sessions[n:])]
    measured = [one for one in current if one.counted]
    if baseline and not any(baseline in (one.name, str(one.key)) for one in measured):
        raise Usage(f"no measured session {baseline!r}", "bench list names them")
    groups, parts = _groups(measured, baseline), []
    for done, group in enumerate(groups):
        progress("drawing", done, len(groups))
        parts.append({"group": group, **_drawn(group)})
    progress("drawing", len(groups), len(groups))
    text: str = template.render(
        source=source,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        parts=parts,
        failed=[one for one in current if not one.counted],
        count=len(sessions),
        replaced=len(sessions) - len(current),
    )
    return text


def _replaced(one: Session, since: Sequence[Session]) -> bool:
    """Whether ``one`` failed, and was measured in the same way again, to the end."""

    def alike_but_for_prompts(other: Session) -> tuple[Any, ...]:
        return alike(replace(other.protocol, prompts=""))  # a server that never was has none

    return bool(one.failure) and any(
        other.name == one.name and alike_but_for_prompts(other) == alike_but_for_prompts(one)
        for other in since
        if not other.failure
    )


def _groups(sessions: Sequence[Session], wanted: str | None) -> list[Group]:
    """The sessions by protocol, and each with its baseline."""
    kinds: dict[Any, list[Session]] = {}
    for one in sessions:
        kinds.setdefault(alike(one.protocol), []).append(one)
    found: dict[int, tuple[Session, list[Session]]] = {}
    for members in kinds.values():
        for one in members:
            baseline = _baseline(one, members, wanted)
            found.setdefault(id(baseline), (baseline, []))[1].append(one)
    return [
        _group(one, members if any(one is other for other in members) else [one, *members])
        for one, members in found.values()
    ]


def _baseline(one: Session, among: Sequence[Session], wanted: str | None) -> Session:
    """The latest that is ``wanted``; else that its sweep names; else without speculation, since
    what another model takes for a token says nothing of this one's, the latest of its model."""
    same = [other for other in among if other.model == one.model]
    candidates = (
        [other for other in among if wanted in (other.name, str(other.key))],
        [other for other in among if one.baseline and other.name == one.baseline],
        [other for other in same if other.name == one.name and _is_baseline(one, among)],
        [other for other in same if other.median("accept_length") is None],
        same,
    )
    return next(found for found in candidates if found)[-1]


def _is_baseline(one: Session, among: Sequence[Session]) -> bool:
    return any(other.baseline == one.name for other in among)


def _group(baseline: Session, members: Sequence[Session]) -> Group:
    rows, cases = [], []
    for one in members:
        case = _case(one, baseline)
        if case:
            cases.append((_label(one, members), case))
        comparison = None if one is baseline else compare(baseline, one)
        notes = bench.warnings(one)
        if below := _below(one, members):
            notes.append(
                f"accept length below that of {below}, beyond noise: suspect wrong numbers"
            )
        rows.append(Row(one, comparison, case.speedup if case else None, below, notes))
    return Group(baseline, rows, cases)


def _below(session: Session, members: Sequence[Session]) -> str:
    """The first session with the same drafter, if the accept length fell below its own."""
    first = next(one for one in members if drafter(one) == drafter(session))
    return _label(first, members) if compare(first, session).accept_fell else ""


def _case(session: Session, baseline: Session) -> Case | None:
    try:
        return case_of(session, decode_ms(baseline))
    except Usage:
        return None


def _drawn(group: Group) -> dict[str, str]:
    sessions = [row.session for row in group.rows]
    names = [_label(one, sessions) for one in sessions]
    split = [(n, one.breakdown) for n, one in zip(names, sessions, strict=True) if one.breakdown]
    drawn = {"rates": plots.svg(plots.rates(names, [one.values("tok_s") for one in sessions]))}
    if group.cases:
        drawn["cases"] = plots.svg(plots.positions(group.cases))
    if split:
        phases = [one.phases for one in sessions if one.breakdown]
        drawn["split"] = plots.svg(plots.breakdown([n for n, _ in split], phases, group.phases))
    if any(one.verify for _, one in split):
        parts = [one.verify for _, one in split]
        drawn["verify"] = plots.svg(plots.breakdown([n for n, _ in split], parts, KINDS))
    return drawn


def _label(session: Session, among: Sequence[Session]) -> str:
    twice = sum(one.name == session.name for one in among) > 1
    name = session.name if len(session.name) <= _LABELS else f"...{session.name[3 - _LABELS :]}"
    return f"{name} ({session.key})" if twice else name


def _template() -> Any:
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise Usage("jinja2 is not installed", "pip install 'sglang-overlay[report]'") from error
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["figure"] = lambda value, digits=2: (
        "–" if value is None else f"{value:.{digits}f}"  # noqa: RUF001
    )
    text = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    return environment.from_string(text)
