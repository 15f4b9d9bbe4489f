"""``export``: a patch for SGLang's maintainers, as mails, as a branch, as a pull request's text."""

import re
from pathlib import Path
from typing import Any

import click

from . import show
from .maintain import open_history
from .options import options
from .patchset import manifest
from .patchset.blobs import ABSENT, blob_id, short
from .patchset.checkout import Step
from .patchset.errors import DamagedPatchSet, Drift, EnvironmentFailure, Usage
from .patchset.history import press
from .patchset.pin import Pin, choose_pin, load_pins, patches_folder
from .patchset.rework import Read
from .patchset.series import Patch, Series, load_series, read_mail
from .patchset.source import pinned_reader
from .patchset.tree import FileChange

_TEXT = "pull-request.md"
#: What pytest takes for a file of tests.
_TEST = re.compile(r"test/(?:.+/)?test_[^/]*\.py")
#: Paragraphs of a header that begin so say what was tested and what was measured.
_TESTED, _MEASURED = re.compile(r"Tested\b"), re.compile(r"(Speed|Measured|Figures)\b")


@click.command()
@click.argument("name", required=False)
@click.argument("directory", required=False, type=click.Path(path_type=Path, file_okay=False))
@click.option("--branch", help="Make this branch on the pin's tag in --sglang-dir.")
@click.option("--check", is_flag=True, help="Prove that every patch file is what git exports.")
@options("tree", "pin", "patches", "json")
def export(
    name: str | None,
    directory: Path | None,
    branch: str | None,
    check: bool,
    sglang_dir: Path | None,
    pin: str | None,
    patches: Path | None,
    as_json: bool,
) -> int:
    """Write patch NAME, and what it depends on, to DIRECTORY as mails for git am, with the text
    of a pull request; or make a branch of it. The bytes are the same each time.
    """
    pins = load_pins(patches or patches_folder())
    if check:
        if name or branch:
            raise Usage("--check is about every patch; leave the others out")
        return _check([choose_pin(pins, pin)] if pin else pins, as_json)
    if not name or (directory is None) == (branch is None) or (branch and not sglang_dir):
        raise Usage("give NAME DIRECTORY, or NAME --branch BRANCH --sglang-dir DIR, or --check")
    newest = _newest(pins, sglang_dir if branch else None)
    series = load_series(choose_pin(pins, pin) if pin else newest)
    known = manifest.load(series)
    wanted = series.needed_by(series.select([name]))
    chain = [patch for patch in series.patches if patch.name in wanted]
    result: dict[str, Any] = {
        "command": "export",
        "pin": series.pin.name,
        "patches": [patch.name for patch in chain],
    }
    if directory is not None:
        result["files"] = [str(file) for file in _write(series, chain, directory)]
    elif branch and sglang_dir:
        result |= {"branch": branch, **_branch(series, known, chain, branch, sglang_dir)}
    show.emit(result, as_json, _lines)
    return 0


def _newest(pins: list[Pin], sglang_dir: Path | None) -> Pin:
    """The newest pin that the checkout's HEAD stands on, else whose tag it has, else of all."""
    if sglang_dir:
        history = open_history(sglang_dir)
        below = [pin for pin in pins if history.stands_on(pin.name)]
        pins = below or [pin for pin in pins if history.has(f"refs/tags/{pin.name}")] or pins
    return pins[-1]


def _write(series: Series, chain: list[Patch], directory: Path) -> list[Path]:
    """The mails of ``chain``, numbered, and the pull request's text.

    Raises ``EnvironmentFailure`` when the machine refuses.
    """
    texts = {
        f"{number:04}-{patch.name}.patch": read_mail(series.pin, patch.name)
        for number, patch in enumerate(chain, 1)
    }
    texts[_TEXT] = pull_request(chain[-1], chain[:-1]).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for file in directory.iterdir():
            if file.name not in texts:
                raise Usage(f"{directory} holds {file.name}, which is not of this export")
        for place, content in texts.items():
            (directory / place).write_bytes(content)
    except OSError as error:
        raise EnvironmentFailure(f"{error.filename or directory}: {error.strerror}") from error
    return [directory / place for place in texts]


def _branch(
    series: Series, known: manifest.Manifest, chain: list[Patch], branch: str, sglang_dir: Path
) -> dict[str, Any]:
    history = open_history(sglang_dir)
    base = history.resolve(f"refs/tags/{series.pin.name}")
    pristine = history.files(base, sorted({diff.path for p in chain for diff in p.diffs}))
    for path, content in pristine.items():
        if blob_id(content) != known.blob(path, ()):
            raise Drift(
                f"{path}: tag {series.pin.name} has {short(blob_id(content))}, "
                f"the pin {short(known.blob(path, ()))}"
            )
    commit = history.build(steps(series, chain, pristine.get), onto=base)
    return {"made": history.branch(branch, commit), "commit": commit}


def steps(series: Series, chain: list[Patch], read: Read) -> list[Step]:
    """The commits of ``chain``, one on the other, on the pristine files that ``read`` gives."""
    made: list[Step] = []
    done = frozenset[str]()
    for patch in chain:
        made.append((patch.header, patch.header.message, _changes(series, patch, done, read)))
        done |= {patch.name}
    return made


def _changes(series: Series, patch: Patch, under: frozenset[str], read: Read) -> list[FileChange]:
    """What ``patch`` changes on top of the patches ``under``."""
    changes = []
    for diff in patch.diffs:
        weave, pristine = series.weaves[diff.path], read(diff.path)
        old, new = (
            weave.forward(pristine, weave.restrict(names))
            for names in (under, under | {patch.name})
        )
        changes.append(FileChange(diff.path, old, new, diff.mode))
    return changes


def _check(pins: list[Pin], as_json: bool) -> int:
    findings = []
    with press() as maker:
        for series in map(load_series, pins):
            read = pinned_reader(series.pin)
            for patch in series.patches:
                header, changes = patch.header, _changes(series, patch, patch.requires, read)
                mail = maker.mail(header.author, header.date, header.message, changes)
                if mail != read_mail(series.pin, patch.name):
                    findings.append(f"{series.pin.name}/{patch.name}: git exports other bytes")
    result = {"pins": [pin.name for pin in pins], "findings": findings}
    show.emit(result, as_json, show.lint_lines)
    return DamagedPatchSet.exit_code if findings else 0


def pull_request(patch: Patch, needed: list[Patch]) -> str:
    """The text of a pull request for ``patch``, in the sections that SGLang's have.

    What the header's body says up to its first paragraph that begins with ``Tested`` is
    motivation (the first paragraph) and modifications; a paragraph that begins with
    ``Speed``, ``Measured`` or ``Figures`` starts the speed tests.
    """
    first, *others = patch.header.body.split("\n\n")
    sections: dict[str, list[str]] = {"modifications": [], "tests": [], "speed": []}
    where = "modifications"
    for paragraph in others:
        where = "tests" if _TESTED.match(paragraph) else where
        where = "speed" if _MEASURED.match(paragraph) else where
        sections[where].append(paragraph)
    tests = [d.path for d in patch.diffs if d.after != ABSENT and _TEST.fullmatch(d.path)]
    runs = "\n".join(f"    python3 -m pytest {path}" for path in tests)
    files = "\n".join(
        f"- `{diff.path}`: +{_count(patch, diff.path, '+')} -{_count(patch, diff.path, '-')}"
        for diff in patch.diffs
    )
    after = [f"Comes after: {'; '.join(p.header.subject for p in needed)}."] if needed else []
    parts = [
        f"Title: {patch.header.subject}",
        "## Motivation",
        first,
        "## Modifications",
        *sections["modifications"],
        files,
        *after,
        "## Accuracy Tests",
        *(sections["tests"] or ["None: the header names none."]),
        *([f"The patch's own tests:\n\n{runs}"] if tests else []),
        "## Speed Tests and Profiling",
        *(sections["speed"] or ["None: no speed is claimed."]),
        "## Checklist",
        f"- [{'x' if tests else ' '}] Unit tests added\n"
        "- [ ] Formatted with pre-commit\n"
        "- [ ] Documentation updated\n"
        f"- [{'x' if sections['speed'] else ' '}] Results of accuracy and speed given",
    ]
    return "\n\n".join(parts) + "\n"


def _count(patch: Patch, path: str, kind: str) -> int:
    diff = next(diff for diff in patch.diffs if diff.path == path)
    return sum(line[0] == kind for hunk in diff.hunks for line in hunk.lines)


def _lines(result: dict[str, Any]) -> None:
    for file in result.get("files", ()):
        print(file)
    if "branch" in result:
        state = "made" if result["made"] else "was there already"
        print(f"branch {result['branch']} {state}, at {result['commit'][:10]}")
