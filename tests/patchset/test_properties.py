"""What the engine makes is what git makes, for patches nobody chose by hand."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sglang_overlay.patchset.blobs import blob_id, split_lines
from sglang_overlay.patchset.diff import FileDiff, parse_diff
from sglang_overlay.patchset.errors import DamagedPatchSet
from sglang_overlay.patchset.weave import Change, Weave

from ..conftest import git

PATH = "f.py"
DIFF = ["diff", "--full-index", "--no-color", "--no-ext-diff", "-U3", "pin"]
#: (place, lines removed there, lines added there), of a file of 60 lines
Edits = list[tuple[int, int, list[bytes]]]
EDIT = st.tuples(st.integers(0, 60), st.integers(0, 3), st.lists(st.binary(max_size=4), max_size=3))
PATCHES = st.lists(st.lists(EDIT, min_size=1, max_size=3), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def repository() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        git(Path(folder), "init", "-q")
        yield Path(folder)


def spliced(lines: list[bytes], edits: Edits) -> list[bytes]:
    """``lines`` with ``edits`` made from the last to the first."""
    lines = list(lines)
    for place, removed, added in sorted(edits, key=lambda edit: edit[0], reverse=True):
        lines[place : place + removed] = added
    return lines


def git_diff(repository: Path, before: bytes, after: bytes) -> bytes:
    (repository / PATH).write_bytes(before)
    git(repository, "add", PATH)
    git(repository, "commit", "-q", "--allow-empty", "-m", "pin")
    git(repository, "tag", "-f", "pin")
    (repository / PATH).write_bytes(after)
    return git(repository, *DIFF)


def clean(edits: Edits, tag: bytes) -> list[tuple[int, int, list[bytes]]]:
    """Edits of plain text lines: no newline or NUL inside, the patch's tag in front."""
    return [
        (place, removed, [tag + text.translate(None, b"\n\0") + b"\n" for text in added])
        for place, removed, added in edits
    ]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(patches=PATCHES, unique=st.booleans(), end=st.sampled_from([b"\n", b""]))
def test_every_subset_is_what_git_apply_or_plain_splicing_makes(
    repository: Path,
    patches: list[Edits],
    unique: bool,
    end: bytes,
) -> None:
    base = [b"line %d\r\n" % (n if unique else n % 3) for n in range(60)]
    base[-1] = base[-1].removesuffix(b"\n") + end
    pristine = b"".join(base)
    edits = {f"p{n}": clean(made, b"%d:" % n) for n, made in enumerate(patches)}
    diffs: dict[str, bytes] = {}
    changes = []
    for name, made in edits.items():
        diffs[name] = git_diff(repository, pristine, b"".join(spliced(base, made)))
        assume(diffs[name])
        changes.append(Change(name, frozenset(), parse_diff(diffs[name], name)[0]))
    weave = Weave(PATH, tuple(changes))
    try:
        weave.forward(pristine, tuple(edits))
    except DamagedPatchSet as error:
        assert "touches" in error.message
        assume(False)
    for subset in weave.subsets():
        made = weave.forward(pristine, subset)
        assert weave.backward(made, subset) == pristine
        if unique:  # git apply finds a hunk by its text, so only then is it sure of the place
            (repository / PATH).write_bytes(pristine)
            for name in subset:
                git(repository, "apply", data=diffs[name])
            assert made == (repository / PATH).read_bytes()
        else:
            assert made == pristine_splice(pristine, weave, subset)


def pristine_splice(pristine: bytes, weave: Weave, subset: tuple[str, ...]) -> bytes:
    """Every hunk of ``subset`` put into the pristine lines, from the last to the first."""
    lines = split_lines(pristine)
    hunks = [h for c in weave.changes if c.patch in subset for h in c.diff.hunks]
    edits = []
    for hunk in hunks:
        place = hunk.start
        for kind, text in hunk.lines:
            if kind == "+":
                edits.append((place, 0, text))
            else:
                edits.append((place, 1, b"" if kind == "-" else text))
                place += 1
    removed = {place for place, kind, text in edits if kind and not text}
    added: dict[int, list[bytes]] = {}
    for place, kind, text in edits:
        if not kind:
            added.setdefault(place, []).append(text)
    out = []
    for place in range(len(lines) + 1):
        out += added.get(place, [])
        if place < len(lines) and place not in removed:
            out.append(lines[place])
    return b"".join(out)


@given(st.binary(max_size=200))
def test_lines_are_cut_and_joined_without_loss(content: bytes) -> None:
    lines = split_lines(content)
    assert b"".join(lines) == content
    assert all(line.endswith(b"\n") for line in lines[:-1])
    assert all(b"\n" not in line[:-1] for line in lines)


@settings(deadline=None, max_examples=30, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300))
def test_blob_ids_are_gits(repository: Path, content: bytes) -> None:
    assert (
        blob_id(content) == git(repository, "hash-object", "--stdin", data=content).decode().strip()
    )


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=400), st.integers(0, 400))
def test_no_diff_makes_the_parser_do_anything_but_parse_or_refuse(noise: bytes, cut: int) -> None:
    start = b"diff --git a/f.py b/f.py\nindex " + b"1" * 40 + b".." + b"2" * 40 + b" 100644\n"
    text = start + b"--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n-a\n+b\n c\n"
    for diff in (noise, start + noise, text + noise, (text + noise)[:cut], text[:cut] + noise):
        try:
            files = parse_diff(diff, "x")
        except DamagedPatchSet:
            continue
        assert all(isinstance(file, FileDiff) for file in files)
