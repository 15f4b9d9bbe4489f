"""The findings as one HTML file that needs nothing else."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..patchset.errors import EnvironmentFailure
from .facts import Facts, Unknown
from .finding import Finding, State

_ORDER = (State.ERROR, State.WARNING, State.UNKNOWN, State.OK)
#: How near two cards are, for the colour where nothing was measured.
_NEAR = {"NVLink": 1.0, "PIX": 0.8, "PXB": 0.6, "PHB": 0.5, "NODE": 0.35, "SYS": 0.15}


@dataclass(frozen=True)
class Cell:
    """One square of the heat map: ``heat`` from 0 (bad) to 1 (good), ``None`` for no colour."""

    text: str
    heat: float | None
    title: str = ""


@dataclass(frozen=True)
class Matrix:
    """Rows are sources, columns targets."""

    caption: str
    names: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def write(file: Path, facts: Facts, findings: Sequence[Finding]) -> None:
    """Write the page. Raises ``EnvironmentFailure`` without jinja2, or when it cannot."""
    try:
        import jinja2
    except ImportError as error:
        raise EnvironmentFailure("--html needs jinja2", "pip install jinja2") from error
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    kinds = Counter(gpu.name for gpu in facts.cards)
    ordered = sorted(findings, key=lambda finding: _ORDER.index(finding.state))
    text = environment.get_template("page.html").render(
        findings=ordered,
        counts={state: sum(f.state == state for f in findings) for state in _ORDER},
        cards=", ".join(f"{n} x {name}" for name, n in kinds.items()),
        matrix=matrix(facts),
    )
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise EnvironmentFailure(f"{file}: {error.strerror}") from error


def matrix(facts: Facts) -> Matrix | None:
    """Measured bandwidths where there are any, else distances; ``None`` for one card."""
    if isinstance(facts.copies, tuple) and facts.copies:
        return _measured(facts)
    if isinstance(facts.pairs, Unknown) or not facts.pairs:
        return None
    ends = {(pair.a, pair.b): pair for pair in facts.pairs}
    cards = [gpu.index for gpu in facts.cards]
    rows = []
    for a in cards:
        cells = []
        for b in cards:
            pair = ends.get((min(a, b), max(a, b)))
            if pair is None:
                cells.append(Cell("", None))
                continue
            level = "NVLink" if pair.nvlink is True else pair.level
            text = "?" if isinstance(level, Unknown) else level
            refused = isinstance(pair.peer, str) and pair.peer != "ok"
            heat = 0.0 if refused else _NEAR.get(text)
            cells.append(Cell(text, heat, f"{a} and {b}: peer access {pair.peer}"))
        rows.append(tuple(cells))
    return Matrix("How far cards are apart", tuple(map(str, cards)), tuple(rows))


def _measured(facts: Facts) -> Matrix:
    assert isinstance(facts.copies, tuple)
    cells = {(copy.source, copy.target): copy for copy in facts.copies}
    cards = sorted({copy.source for copy in facts.copies})
    best = max((copy.bandwidth or 0 for copy in facts.copies), default=0) or 1.0
    rows = []
    for a in cards:
        row = []
        for b in cards:
            copy = cells.get((a, b))
            if copy is None:
                row.append(Cell("", None))
            elif copy.result == "right" and copy.bandwidth:
                how = "direct" if copy.peer else "through host memory"
                title = f"{a} to {b}: {copy.latency_us:.1f} us for 4 KiB, {how}"
                row.append(Cell(f"{copy.bandwidth:.1f}", copy.bandwidth / best, title))
            else:
                row.append(Cell(copy.result, 0.0, f"{a} to {b}: {copy.detail}"))
        rows.append(tuple(row))
    return Matrix("GB/s from row to column, measured", tuple(map(str, cards)), tuple(rows))
