"""``refresh`` and ``new-patch``: commits made in a checkout go back into the series."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from . import show
from .options import options
from .patchset import rework, shelf
from .patchset.errors import Usage
from .patchset.history import History, press
from .patchset.pin import Pin, choose_pin, load_pins, patches_folder
from .patchset.series import load_series
from .patchset.source import pinned_reader
from .patchset.tree import open_tree

_TREE = ("sglang-dir", "pin", "patches")


@click.command()
@options(*_TREE)
@click.option(
    "--name", "names", multiple=True, metavar="NAME=COMMIT", help="What a commit is called."
)
@click.option("--drop", multiple=True, metavar="NAME", help="This patch shall go.")
@options("json")
def refresh(
    sglang_dir: Path,
    pin: str | None,
    patches: Path | None,
    names: Sequence[str],
    drop: Sequence[str],
    as_json: bool,
) -> int:
    """Make the series anew from the commits since the pin's tag, in their order.

    A commit is the patch, of this pin or another, with its subject, or with its author and
    date. A patch whose content and message did not change keeps its bytes.
    """
    history, chosen = _open(sglang_dir, pin, patches)
    with shelf.shelf_lock(chosen.folder.resolve().parent):
        old = rework.load(load_series(chosen))
        series, read = old.series, pinned_reader(chosen)
        named = {history.resolve(rev): name for name, rev in map(_pair, names)}
        others = [p for p in load_pins(chosen.folder.parent)[::-1] if p.name != chosen.name]
        known = [p for s in (series, *map(load_series, others)) for p in s.patches]
        commits = rework.attribute(history.commits(f"refs/tags/{chosen.name}"), known, named)
        found = {name for name, _ in commits}
        for name in series.select(drop) & found:
            raise Usage(f"{name} shall be dropped, but there is a commit of it")
        for name in [n for n in series.names if n not in found and n not in drop]:
            raise Usage(f"no commit is {name}", f"if it shall go: --drop {name}")
        with press() as maker:
            made = rework.remake(old, commits, maker, read)
        written = shelf.write(made, read)
    _report("refresh", old, made, written, as_json)
    return 0


@click.command("new-patch")
@click.argument("name")
@click.argument("commit", default="HEAD")
@options(*_TREE, "json")
def new_patch(
    name: str,
    commit: str,
    sglang_dir: Path,
    pin: str | None,
    patches: Path | None,
    as_json: bool,
) -> int:
    """Take COMMIT (HEAD by default) into the series as its last patch, called NAME.

    It may stand on the pristine pin or on commits of any of the patches.
    """
    rework.check_name(name)
    history, chosen = _open(sglang_dir, pin, patches)
    with shelf.shelf_lock(chosen.folder.resolve().parent):
        old = rework.load(load_series(chosen))
        read = pinned_reader(chosen)
        if name in old.series.by_name:
            raise Usage(f"there is a patch {name} in {chosen.name}", "sglang-overlay refresh")
        with press() as maker:
            found = history.commit(history.resolve(commit))
            made = rework.add(old, old, name, found, maker, read)
        written = shelf.write(made, read)
    _report("new-patch", old, made, written, as_json)
    return 0


def open_history(sglang_dir: Path) -> History:
    """The git checkout at ``sglang_dir``. Raises ``Usage`` where there is no git."""
    tree = open_tree(sglang_dir)
    if tree.layout != "checkout":
        raise Usage(f"{tree.top} is not a git checkout", "sglang-overlay fetch FOLDER makes one")
    return History(tree.top)


def _open(sglang_dir: Path, pin: str | None, patches: Path | None) -> tuple[History, Pin]:
    """The checkout, everything in it committed, and the newest pin that its HEAD stands on."""
    history, pins = open_history(sglang_dir), load_pins(patches or patches_folder())
    history.settled()
    below = [p for p in ([choose_pin(pins, pin)] if pin else pins) if history.stands_on(p.name)]
    if not below:
        tags = " or ".join(p.name for p in pins)
        raise Usage(f"{history.top}: HEAD does not come after a tag {pin or tags}")
    return history, below[-1]


def _pair(text: str) -> tuple[str, str]:
    name, given, revision = text.partition("=")
    if not given:
        raise Usage(f"--name {text}: write NAME=COMMIT")
    return name, revision


def _report(
    command: str, old: rework.PatchSet, made: rework.PatchSet, written: bool, as_json: bool
) -> None:
    names = [*made.series.names, *(n for n in old.series.names if n not in made.mails)]
    result: dict[str, Any] = {
        "command": command,
        "pin": made.series.pin.name,
        "folder": str(made.series.pin.folder),
        "patches": [{"name": name, "state": made.word(name, old)} for name in names],
        "written": written,
    }
    show.emit(result, as_json, _lines)


def _lines(result: dict[str, Any]) -> None:
    show.table(("patch", "state"), [(p["name"], p["state"]) for p in result["patches"]])
    print(f"{result['folder']}: {'written' if result['written'] else 'nothing to change'}")
