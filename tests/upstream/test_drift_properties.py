"""For edits that nobody chose: what drift says fits, git applies."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from sglang_overlay.patchset.drift import Judge, PatchVerdict
from sglang_overlay.patchset.history import Press, press
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.release import Release
from sglang_overlay.patchset.series import Series, parse_patch
from sglang_overlay.patchset.tree import FileChange

from ..patchset.test_properties import Edits, clean, spliced
from .conftest import A

LINES = 24
WHO, DATE = "A Tester <tester@example.org>", "Fri, 2 Jan 2026 03:04:05 +0000"
#: Small places are often chosen, and so are the ends.
PLACE = st.sampled_from([0, 1, 2, LINES - 2, LINES - 1, LINES]) | st.integers(0, LINES)
EDIT = st.tuples(
    PLACE,
    st.sampled_from([0, 0, 1, 2, 12]),
    st.lists(st.sampled_from([b"a", b"b"]), max_size=2),
)
EDITS = st.lists(EDIT, min_size=1, max_size=2)
#: An edit of everything, and nothing.
WHOLE: Edits = [(0, LINES, [])]


@pytest.fixture(scope="module")
def maker() -> Iterator[Press]:
    with press() as made:
        yield made


def drift(maker: Press, mail: bytes, base: bytes, newer: bytes) -> PatchVerdict:
    """The verdict on the patch in ``mail``, written on ``base``, against ``newer``."""
    pin = Pin("v1.0.0", "1.0.0", "", "", "", Path())
    patch = parse_patch("one", mail, {})
    release = Release("newer", {A: newer}.get, lambda _: True, lambda: [A])
    return Judge(Series(pin, (patch,)), {A: base}.get, release, maker).patch(patch)


NL = [b"\n"] * 3
ADD, MORE = [b"a"], [b"b"]


@example(patched=[(0, 1, ADD)], newer=[(0, 0, MORE)], kinds=LINES, empty=False, ends=NL)
@example(patched=[(LINES, 0, ADD)], newer=[(LINES, 0, MORE)], kinds=LINES, empty=False, ends=NL)
@example(patched=[(0, 0, ADD)], newer=[(0, 0, MORE)], kinds=1, empty=True, ends=NL)
@example(patched=WHOLE, newer=[(0, 1, MORE)], kinds=LINES, empty=False, ends=NL)
@example(
    patched=[(4, 1, ADD), (16, 1, ADD)],
    newer=[(0, 12, [])],
    kinds=12,  # the two places look the same, and one of them is gone
    empty=False,
    ends=NL,
)
@settings(deadline=None, max_examples=120, suppress_health_check=list(HealthCheck))
@given(
    patched=EDITS | st.just(WHOLE),
    newer=EDITS | st.just(WHOLE),
    kinds=st.sampled_from([1, 2, 5, LINES]),
    empty=st.sampled_from([False, False, False, True]),
    ends=st.lists(st.sampled_from([b"\n", b""]), min_size=3, max_size=3),
)
def test_git_applies_every_patch_that_drift_says_fits(
    maker: Press, patched: Edits, newer: Edits, kinds: int, empty: bool, ends: list[Any]
) -> None:
    lines = [b"line %d\n" % (n % kinds) for n in range(0 if empty else LINES)]
    texts = [
        b"".join(made).removesuffix(b"\n") + end if made else b""
        for made, end in zip(
            (lines, spliced(lines, clean(patched, b"p:")), spliced(lines, clean(newer, b"n:"))),
            ends,
            strict=True,
        )
    ]
    assume(texts[0] != texts[1])
    mail = maker.mail(WHO, DATE, "test: it\n", [FileChange(A, texts[0], texts[1], "100644")])
    verdict = drift(maker, mail, texts[0], texts[2])
    with TemporaryDirectory() as folder:
        file = Path(folder, A)
        file.parent.mkdir(parents=True)
        file.write_bytes(texts[2])
        command = ["git", "apply", "--check"]
        done = subprocess.run(command, cwd=folder, input=mail, capture_output=True, check=False)
        refused = done.returncode != 0
    if not verdict.needs_action:
        assert not refused, verdict
    elif kinds == LINES and set(ends) == {b"\n"}:  # each line is one of its kind
        assert refused or verdict.word == "upstreamed", verdict
