"""Writes docs/drift.md: what other SGLang releases make of the patches.

usage: python -m ci.drift_table        (fetches the wheels, 25 to 40 MB each, once)
"""

from pathlib import Path

from sglang_overlay.drift import cell, judge
from sglang_overlay.patchset.pin import Pin, load_pins, patches_folder
from sglang_overlay.patchset.release import released
from sglang_overlay.patchset.series import load_series

PAGE = Path(__file__).resolve().parents[1] / "docs/drift.md"
VERSIONS = ("0.5.23", "0.5.22", "0.5.21", "0.5.20", "0.5.18", "0.5.17")
_TEXT = """# The patches against other SGLang releases

What `sglang-overlay drift --version X` says, written by `python -m ci.drift_table`.

- **clean**: every hunk fits where it is. **offset**: every hunk fits, some on other lines.
- **conflict**: lines that a hunk names were changed. "merge" counts the hunks that a three-way
  merge takes all the same, because only their surroundings changed.
- **upstreamed**: the change is there already. **obsolete**: what a hunk changes is gone.

The last three need work; `--markdown` shows each such hunk three ways. A wheel has no `test/`
folder, so the patches' own tests are not counted.
"""


def column(pin: Pin, version: str) -> dict[str, str]:
    """The verdict on each patch of ``pin`` against ``version``, in a few words."""
    verdicts = judge(load_series(pin), released(version, pin))
    return {verdict.name: cell(verdict) for verdict in verdicts}


def table(pin: Pin, versions: tuple[str, ...]) -> str:
    """The table of one pin."""
    columns = {version: column(pin, version) for version in versions}
    lines = [
        f"| patch | {' | '.join(versions)} |",
        f"| --- |{' --- |' * len(versions)}",
    ]
    for name in load_series(pin).names:
        lines.append(f"| `{name}` | {' | '.join(columns[v][name] for v in versions)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parts = [_TEXT]
    for pin in load_pins(patches_folder())[::-1]:
        versions = tuple(version for version in VERSIONS if version != pin.version)
        parts.append(f"## Patches for {pin.name}\n\n{table(pin, versions)}")
    PAGE.write_text("\n".join(parts), encoding="utf-8")
    print(PAGE)


if __name__ == "__main__":
    main()
