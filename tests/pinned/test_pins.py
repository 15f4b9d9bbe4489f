"""What two pins have in common is the same, and where they differ the docs say why."""

import re
from pathlib import Path

import pytest

from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Patch, load_series

from ..pins import PINS

ROOT = Path(__file__).parents[2]
NEWEST = load_series(PINS[-1])
older_pins = pytest.mark.parametrize("older", PINS[:-1], ids=lambda pin: pin.name)


def shared(older: Pin) -> list[Patch]:
    """The older pin's patches that the newest has too; one that upstream took is retired there."""
    return [patch for patch in load_series(older).patches if patch.name in NEWEST.by_name]


def changed_lines(patch: Patch) -> dict[str, list[str]]:
    """The lines that ``patch`` takes out and puts in, by file; not where, nor what is around."""
    return {
        diff.path: [line for hunk in diff.hunks for line in hunk.lines if line[0] in "+-"]
        for diff in patch.diffs
    }


@older_pins
def test_a_patch_of_two_pins_changes_the_same_lines_but_for_what_the_docs_name(older: Pin) -> None:
    differ = set()
    for patch in shared(older):
        one, other = changed_lines(patch), changed_lines(NEWEST.by_name[patch.name])
        for path in one.keys() | other.keys():
            if one.get(path) != other.get(path):
                differ.add((patch.name, path))
    text = (ROOT / "docs/adding-a-pin.md").read_text()
    section = text.split(f"## What {older.name} has otherwise\n")[1].split("\n## ")[0]
    assert differ == set(re.findall(r"^\| `([\w-]+)` \| `(\S+)` \|", section, re.MULTILINE))


@older_pins
def test_a_patch_of_two_pins_has_one_message_author_and_date(older: Pin) -> None:
    for patch in shared(older):
        assert patch.header == NEWEST.by_name[patch.name].header, patch.name


@older_pins
def test_the_order_is_the_same_and_what_a_pin_lacks_is_in_the_support_table(older: Pin) -> None:
    names = tuple(patch.name for patch in shared(older))
    assert names == tuple(name for name in NEWEST.names if name in names)
    text = (ROOT / "docs/support.md").read_text()
    table = text.split("## The patches, by pin\n")[1].split("\n## ")[0]
    titles, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    has = {row[0].strip("`"): row[titles.index(older.name)] for row in rows}
    all_names = load_series(older).names
    assert has.keys() >= {*NEWEST.names, *all_names}
    assert {name for name, cell in has.items() if cell == "yes"} == set(all_names)
