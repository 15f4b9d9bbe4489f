"""``drift``: what another SGLang release makes of the patches."""

import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from . import show
from .options import options
from .patchset.drift import WORDS, HunkVerdict, Judge, PatchVerdict
from .patchset.errors import Usage
from .patchset.history import press
from .patchset.pin import choose_pin, load_pins, patches_folder
from .patchset.release import Release, open_release, released
from .patchset.series import Series, load_series
from .patchset.source import pinned_reader


@click.command()
@options("tree")
@click.option("--version", help="A release on the package index, in place of --sglang-dir.")
@options("pin", "patches")
@click.option("--markdown", is_flag=True, help="Print Markdown, with every hunk that needs work.")
@options("json")
def drift(
    sglang_dir: Path | None,
    version: str | None,
    pin: str | None,
    patches: Path | None,
    markdown: bool,
    as_json: bool,
) -> int:
    """Hold every patch against another SGLang. Exit 1 when one of them needs work.

    A patch is clean; offset (only its line numbers change); upstreamed (the change is there
    already); in conflict; or obsolete (what it changes is gone). One whose files the release
    has no place for is not looked at.
    """
    if (sglang_dir is None) == (version is None):
        raise Usage("give either --sglang-dir or --version")
    if version and not re.fullmatch(r"\d[\w.]*", version):
        raise Usage(f"{version!r} is no version, such as 0.5.22")
    pins = load_pins(patches or patches_folder())
    series = load_series(choose_pin(pins, pin) if pin else pins[-1])
    release = released(version, series.pin) if version else open_release(sglang_dir or Path())
    verdicts = judge(series, release)
    result = {
        "command": "drift",
        "pin": series.pin.name,
        "against": release.name,
        "patches": [
            {"name": v.name, "verdict": v.word, "hunks": [asdict(h) for h in v.hunks]}
            for v in verdicts
        ],
        "needs_action": [v.name for v in verdicts if v.needs_action],
    }
    if markdown and not as_json:
        print(summary(series, release.name, verdicts), end="")
    else:
        show.emit(result, as_json, lambda _: _table(series, release.name, verdicts))
    return 1 if result["needs_action"] else 0


def judge(series: Series, release: Release) -> list[PatchVerdict]:
    """The verdict on every patch of ``series`` against ``release``."""
    with press() as maker:
        judging = Judge(series, pinned_reader(series.pin), release, maker)
        return [judging.patch(patch) for patch in series.patches]


def cell(verdict: PatchVerdict) -> str:
    """A patch's verdict in a few words: ``conflict (2 of 14 hunks; 1 merges)``."""
    found = Counter(hunk.word for hunk in verdict.hunks)
    if set(found) <= {verdict.word}:
        return verdict.word
    parts = [f"{found[word]} {word}" for word in reversed(WORDS) if found[word] and word != "clean"]
    merges = sum(hunk.merges for hunk in verdict.hunks)
    note = f"; {merges} of them {'merge' if merges > 1 else 'merges'}" if merges else ""
    return f"{verdict.word} ({', '.join(parts)} of {len(verdict.hunks)} hunks{note})"


def summary(series: Series, name: str, verdicts: list[PatchVerdict]) -> str:
    """The verdicts in Markdown: a table, then the three ways of each hunk that needs work."""
    lines = [
        f"## SGLang {name} against the patches for {series.pin.name}",
        "",
        "| patch | verdict |",
        "| --- | --- |",
        *(f"| `{verdict.name}` | {cell(verdict)} |" for verdict in verdicts),
        "",
    ]
    for verdict in verdicts:
        for hunk in verdict.hunks if verdict.needs_action else ():
            if hunk.word not in ("clean", "offset"):
                lines += _hunk(verdict.name, hunk)
    return "\n".join(lines)


def _hunk(patch: str, hunk: HunkVerdict) -> list[str]:
    where = f"`{hunk.path}` line {hunk.line}" + (f", in `{hunk.symbol}`" if hunk.symbol else "")
    text = f"### {patch}: {hunk.word}\n\n{where}"
    if hunk.merges:
        text += "; a three-way merge takes it, since only the lines around it changed"
    if hunk.word == "obsolete":
        text += "; likely now in " + (", ".join(f"`{p}`" for p in hunk.likely) or "no place at all")
    ways = (("pristine", hunk.pristine), ("patched", hunk.patched), ("newer", hunk.newer))
    blocks = [f"{title}:\n\n{_fenced(body)}" for title, body in ways if body]
    return ["\n\n".join([text, *blocks]), ""]


def _fenced(text: str) -> str:
    fence = "```"
    while fence in text:
        fence += "`"
    return f"{fence}python\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}"


def _table(series: Series, name: str, verdicts: list[PatchVerdict]) -> None:
    show.table(("patch", "verdict"), [(v.name, cell(v)) for v in verdicts])
    for verdict in verdicts:
        for hunk in verdict.hunks:
            if hunk.word in ("conflict", "obsolete"):
                new = f"; likely now {', '.join(hunk.likely)}" if hunk.likely else ""
                takes = "; a three-way merge takes it" if hunk.merges else ""
                print(f"{verdict.name}: {hunk.path}:{hunk.line}: {hunk.word}{takes}{new}")
    count = sum(verdict.needs_action for verdict in verdicts)
    print(f"{series.pin.name} against {name}: {count} of {len(verdicts)} patches need work")
