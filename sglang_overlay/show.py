"""What commands print: one plain value each, as JSON or as a table."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .patchset.errors import PatchsetError
from .patchset.plan import Proof, TreeState
from .patchset.tree import Tree

if TYPE_CHECKING:
    from .patchset.source import Progress

Result = dict[str, Any]
_COLOURS = {
    "applied": "green",
    "complete": "green",
    "proved": "green",
    "partial": "yellow",
    "mixed": "yellow",
    "drifted": "red",
    "differs": "red",
}


def emit(result: Result, as_json: bool, draw: Callable[[Result], None]) -> None:
    """Print ``result`` as JSON, or have ``draw`` print it."""
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        draw(result)


def error(failure: PatchsetError, as_json: bool) -> None:
    """Print a failure on standard error, and as JSON on standard output where asked."""
    if as_json:
        print(
            json.dumps(
                {
                    "error": type(failure).__name__,
                    "message": failure.message,
                    "next": failure.next_step,
                    "exit_code": failure.exit_code,
                },
                indent=2,
            )
        )
    print(f"error: {failure.message}", file=sys.stderr)
    if failure.next_step:
        print(f"  next: {failure.next_step}", file=sys.stderr)


def status(tree: Tree, state: TreeState) -> Result:
    """The state of the tree, of each patch and of each file."""
    return _head("status", tree, state) | {
        "interrupted": tree.interrupted(),
        "patches": [
            {
                "name": patch.name,
                "subject": patch.header.subject,
                "state": state.of_patch(patch.name),
                "files": [
                    {
                        "path": diff.path,
                        "state": state.of_file(patch.name, diff.path),
                        "blob": state.files[diff.path].blob if diff.path in state.files else None,
                    }
                    for diff in patch.diffs
                ],
            }
            for patch in state.series.patches
        ],
    }


def changed(
    command: str, tree: Tree, state: TreeState, chosen: frozenset[str], written: Sequence[str]
) -> Result:
    """What a command did, or would do, to the ``chosen`` patches' files."""
    return _head(command, tree, state) | {
        "patches": [
            {
                "name": patch.name,
                "subject": patch.header.subject,
                "files": sum(diff.path in state.files for diff in patch.diffs),
                "state": state.of_patch(patch.name),
                "chosen": patch.name in chosen,
            }
            for patch in state.series.patches
        ],
        "written": list(written),
    }


def verified(tree: Tree, state: TreeState, proofs: Sequence[Proof]) -> Result:
    """Each file's blob, found and expected."""
    return _head("verify", tree, state) | {
        "proved": all(proof.holds for proof in proofs),
        "files": [
            {"path": p.path, "found": p.found, "expected": p.expected, "holds": p.holds}
            for p in proofs
        ],
    }


def status_table(result: Result) -> None:
    """Print what ``status`` gives."""
    rows = [
        (patch["name"], file["path"], file["state"])
        for patch in result["patches"]
        for file in patch["files"]
    ]
    table(("patch", "file", "state"), rows)
    _line(result, result["state"])
    if result["interrupted"]:
        print(
            f"a run of {result['interrupted']['command']!r} was killed here, or is at work; "
            "every file is whole, and apply or reverse finishes it"
        )


def change_table(result: Result) -> None:
    """Print what ``changed`` gives."""
    rows = [
        (p["name"], str(p["files"]), p["state"], p["subject"].partition(": ")[2])
        for p in result["patches"]
    ]
    table(("patch", "files", "state", "what it does"), rows)
    if result.get("repaired"):
        print(f"cleared away what a killed {result['repaired']} had left")
    count, would = len(result["written"]), result["command"] == "check"
    done = f"{count} file{'s' * (count != 1)} {'to write' if would else 'written'}"
    _line(result, f"{result['state']}; {done if count else 'nothing to change'}")
    for commit in result.get("commits", ()):
        print(f"committed: {commit}")


def verify_table(result: Result) -> None:
    """Print what ``verified`` gives."""
    rows = [
        (file["path"], file["found"][:12], "proved" if file["holds"] else "differs")
        for file in result["files"]
    ]
    table(("file", "blob", "proof"), rows)
    _line(result, "every blob is as it must be" if result["proved"] else "not as it must be")


def overlay_table(result: Result) -> None:
    """Print what ``verify`` gives for an installed overlay."""
    rows = [(m["name"], m["blob"][:12], m["origin"]) for m in result["modules"]]
    table(("module", "blob", "loaded from"), rows)
    for process in result["processes"]:
        print(f"process {process['pid']} ({process['command']}): {process['state']}")
    for problem in result["problems"]:
        print(f"problem: {problem}")
    state = f"{len(result['problems'])} problems" if result["problems"] else "sound"
    print(f"{result['overlay']}: {state}")


def environment_table(result: Result) -> None:
    """Print what ``env`` gives: workers as columns, differences and late values marked."""
    rows = []
    for variable in result["variables"]:
        cells = []
        for number, value in enumerate(variable["values"]):
            late, expected = variable["late"][number], variable["expected"][number]
            mark = "!" if number in variable["different"] else ""
            text = "-" if value is None else f"{value} ({variable['origins'][number]})"
            text += "" if expected is None else f" NOT {expected}"
            cells.append(f"{mark}{text}{' LATE: ' + late if late else ''}")
        rows.append((variable["name"], *cells))
    table(("variable", *result["workers"]), rows)
    differing = [v["name"] for v in result["variables"] if v["different"]]
    late = [v["name"] for v in result["variables"] if any(v["late"])]
    changed = [v["name"] for v in result["variables"] if any(x is not None for x in v["expected"])]
    print(f"{len(result['workers'])} workers; differing (!): {', '.join(differing) or 'none'}")
    if late:
        print(f"set when it had no effect any more: {', '.join(late)}")
    if changed:
        print(f"not what --worker-env gave (NOT): {', '.join(changed)}")


def fetch_line(result: Result) -> None:
    """Print what ``fetch`` did."""
    how = "is" if result["fetched"] else "was already"
    print(f"SGLang {result['pin']} {how} in {result['directory']}")


def lint_lines(result: Result) -> None:
    """Print what ``lint`` found."""
    for finding in result["findings"]:
        print(finding)
    print(f"{', '.join(result['pins'])}: {len(result['findings'])} findings")


@contextmanager
def progress() -> "Iterator[Progress]":
    """A progress bar on standard error, where that is a terminal; of 0 steps in all, one that only
    shows that time passes."""
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TimeElapsedColumn

    columns = (*Bar.get_default_columns(), TimeElapsedColumn())
    console, unseen = Console(stderr=True), not sys.stderr.isatty()
    with Bar(*columns, console=console, disable=unseen) as bar:
        tasks: dict[str, Any] = {}

        def advance(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bar.add_task(what, total=total or None)
            bar.update(tasks[what], completed=done, total=total or None)

        yield advance


def _head(command: str, tree: Tree, state: TreeState) -> Result:
    return {
        "command": command,
        "tree": str(tree.top),
        "layout": tree.layout,
        "pin": state.series.pin.name,
        "state": state.word,
    }


def _line(result: Result, text: str) -> None:
    print(f"{result['tree']} ({result['layout']}, {result['pin']}): {text}")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: rich where somebody looks at it, plain columns where a program reads it."""
    if not sys.stdout.isatty():
        lines = [titles, *rows]
        widths = [max(len(line[n]) for line in lines) for n in range(len(titles))]
        for line in lines:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            print("  ".join(cells).rstrip())
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        drawn.add_column(title, no_wrap=title == titles[0])
    for row in rows:
        drawn.add_row(*(Text(cell, _COLOURS.get(cell, "")) for cell in row))
    Console().print(drawn)
