"""The findings on a terminal: what is wrong first, what is fine in one line each."""

import sys
from typing import Any

_MARKS = {"error": "ERROR", "warning": "WARN", "unknown": "?", "ok": "ok"}
_COLOURS = {"error": "bold red", "warning": "yellow", "unknown": "cyan", "ok": "green"}
_ORDER = ("error", "warning", "unknown", "ok")


def print_findings(result: dict[str, Any]) -> None:
    """Print what ``doctor`` found; in colours and wrapped where somebody looks at it."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    looked_at = sys.stdout.isatty()
    # Where a program reads it, a finding's parts are a line each, however long.
    console = Console(soft_wrap=not looked_at, highlight=False)
    for state in _ORDER:
        for finding in result["findings"]:
            if finding["state"] != state:
                continue
            mark = Text(f"{_MARKS[state]:<6}", _COLOURS[state])
            console.print(mark + Text(f"{finding['id']}: {finding['title']}", ""))
            for name in ("evidence", "why", "fix") if state != "ok" else ("evidence",):
                if finding[name]:
                    line = Text(f"{name}: ", "dim") + Text(finding[name])
                    console.print(
                        Padding(line, (0, 0, 0, 6)) if looked_at else Text("      ") + line
                    )
    for row in matrix_lines(result["facts"]):
        console.print(Text(row))
    counts = result["counts"]
    console.print(Text(", ".join(f"{counts[state]} {state}" for state in _ORDER)))


def matrix_lines(facts: dict[str, Any]) -> list[str]:
    """The bandwidths in GB/s, a row for each source; nothing without ``--deep``."""
    copies = facts["copies"]
    if not isinstance(copies, list) or not copies:
        return []
    cards = sorted({copy["source"] for copy in copies})
    cells = {(c["source"], c["target"]): c for c in copies}
    lines = ["GB/s from (row) to (column)", "      " + "".join(f"{card:>8}" for card in cards)]
    for a in cards:
        row = [_cell(cells.get((a, b))) for b in cards]
        lines.append(f"{a:>6}" + "".join(f"{cell:>8}" for cell in row))
    return lines


def _cell(copy: dict[str, Any] | None) -> str:
    if copy is None:
        return "-"
    if copy["result"] == "right":
        return f"{copy['bandwidth']:.1f}"
    return str(copy["result"]).split()[0]
