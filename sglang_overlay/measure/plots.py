"""Plots of cycles and sessions: SVG in which text takes the page's colour."""

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..patchset.errors import EnvironmentFailure, Usage
from .breakeven import Case

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_INK = "#010203"  # stands for the page's text colour until the SVG is written
#: Told apart on light and dark, and by people who see fewer colours (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00")
_HEIGHT = 190  # points, about, of the axes of a break-even plot
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sglang-overlay",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    **{
        f"{name}color": _INK
        for name in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.", "axes.title")
    },
}


def breakeven(case: Case, chains: Sequence[Case]) -> "Figure":
    """The break-even cycle by accept length with the case in it; beside it speed by steps."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots(1, 2 if chains else 1, squeeze=False)[0]
        _line(axes[0], [(f"{case.speedup:.2f}x", case)])
        if chains:
            _by_steps(axes[1], case, chains)

    return _figure((8, 3.4) if chains else (5, 3.4), draw)


def positions(cases: Sequence[tuple[str, Case]]) -> "Figure":
    """Where each case stands against the break-even cycle; all have one baseline."""
    return _figure((8, 3.6), lambda figure: _line(figure.subplots(), cases))


def rates(names: Sequence[str], values: Sequence[Sequence[float]]) -> "Figure":
    """Tokens a second: every counted run of each session, and their median."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for row, found in enumerate(values):
            ordered = sorted(found)
            axes.barh(row, ordered[len(ordered) // 2], color=COLOURS[0], alpha=0.35, height=0.6)
            axes.plot(found, [row] * len(found), "o", color=COLOURS[5], markersize=4)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("tokens a second (dots: runs, bar: median)")

    return _figure((8, 1 + 0.4 * len(names)), draw)


def breakdown(
    names: Sequence[str], parts: Sequence[Mapping[str, float]], order: Sequence[str]
) -> "Figure":
    """Milliseconds of a cycle, stacked by part in this ``order``, a bar for each session."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        left = [0.0] * len(names)
        for number, part in enumerate(order):
            widths = [one.get(part, 0.0) for one in parts]
            colour = COLOURS[number % len(COLOURS)]
            axes.barh(range(len(names)), widths, left=left, color=colour, label=part, height=0.6)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.invert_yaxis()
        axes.set_xlabel("milliseconds a cycle")
        axes.legend(ncols=4, frameon=False, loc="lower left", bbox_to_anchor=(0, 1))

    return _figure((8, 1.5 + 0.4 * len(names)), draw)


def svg(figure: "Figure") -> str:
    """The figure as an ``<svg>`` element to stand in a page."""
    import matplotlib

    stream = io.StringIO()
    with matplotlib.rc_context(_STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    return text[text.index("<svg") :].replace(_INK, "currentColor")


def write(figure: "Figure", file: Path) -> None:
    """Write ``file`` in the format that its name ends with. Raises ``Usage``."""
    import matplotlib

    try:
        if file.suffix == ".svg":
            file.write_text(svg(figure).replace("currentColor", "#808080"), encoding="utf-8")
        else:
            with matplotlib.rc_context(_STYLE):
                figure.savefig(file, dpi=150, facecolor="white")
    except OSError as error:
        raise EnvironmentFailure(f"{file}: {error.strerror}") from error
    except ValueError as error:
        raise Usage(f"{file}: {error}", "--plot FILE.svg") from error


def _line(axes: Any, cases: Sequence[tuple[str, Case]]) -> None:
    decode = cases[0][1].decode_ms
    longest = max(4.0, *(case.acceptance.length + 1 for _, case in cases))
    lengths = [1.0, longest]
    even = [length * decode for length in lengths]
    top = max(even[-1], *(case.cycle_ms for _, case in cases)) * 1.1
    axes.fill_between(lengths, even, top, color=COLOURS[5], alpha=0.15, linewidth=0)
    axes.fill_between(lengths, 0, even, color=COLOURS[2], alpha=0.15, linewidth=0)
    axes.plot(lengths, even, color=_INK, linewidth=1)
    above = 0.0  # where the next name has room, in points
    for name, case in sorted(cases, key=lambda item: item[1].cycle_ms):
        place = (case.acceptance.length, case.cycle_ms)
        height = case.cycle_ms / top * _HEIGHT
        above = max(height + 6, above)
        axes.plot(*place, "o", color=COLOURS[0])
        axes.annotate(
            name, place, xytext=(6, above - height), textcoords="offset points", parse_math=False
        )
        above += 12
    axes.text(1.05, top * 0.93, "speculation loses", va="top")
    axes.text(longest, top * 0.04, "speculation wins", ha="right")
    axes.set(xlim=(1, longest), ylim=(0, top), xlabel="accept length", ylabel="ms a cycle")


def _by_steps(axes: Any, case: Case, chains: Sequence[Case]) -> None:
    steps = [one.steps for one in chains]
    shades = [1.0 if one.steps <= len(case.acceptance.rates) else 0.35 for one in chains]
    for step, one, shade in zip(steps, chains, shades, strict=True):
        axes.bar(step, one.speedup, color=COLOURS[0], alpha=shade)
    axes.axhline(1, color=_INK, linewidth=1)
    axes.set_xticks(steps)
    axes.set(xlabel="draft steps (pale: acceptance not measured)", ylabel="speedup")


def _figure(size: tuple[float, float], draw: "Callable[[Figure], None]") -> "Figure":
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Usage("matplotlib is missing", "pip install 'sglang-overlay[report]'") from error
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure
