"""For series and edits that nobody chose: refresh gives what git gives, or refuses."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ..conftest import EXPORT, IMPORT, git
from ..patchset.test_properties import Edits, clean, spliced
from ..patchset.workshop import Workshop, snapshot
from .conftest import A, commit, mails

LINES, SLOT = 120, 10
#: No carriage return: git am takes it away, so refresh refuses it.
TEXT = st.lists(st.binary(max_size=4).map(lambda text: text.replace(b"\r", b".")), max_size=3)
#: Three patches of up to two edits, one edit's new content, and an order to commit them in.
SERIES = st.lists(
    st.lists(st.tuples(st.integers(0, 3), TEXT), min_size=1, max_size=2), min_size=3, max_size=3
)
SLOTS = st.permutations(range(LINES // SLOT))
SETTINGS = settings(deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def series(folder: Path, base: list[bytes], made: dict[str, Edits]) -> tuple[Workshop, Path]:
    """A patch set of ``made``, each patch on the pristine ``base``, and a checkout of the pin."""
    shop = Workshop(folder, {A: b"".join(base)})
    for name, edits in made.items():
        content = b"".join(spliced(base, edits))
        assume(content != b"".join(base))
        shop.patch(name, {A: content})
    (shop.folder / "series").write_text("".join(f"{name}\n" for name in made))
    assume(shop.run("lint", "--write") == 0)  # else patches touch
    place = shop.tree("checkout")
    git(place, "tag", "v1.0.0")
    return shop, place


def commit_all(place: Path, base: list[bytes], made: dict[str, Edits], order: list[str]) -> None:
    """A commit for each patch in ``order``, on top of each other, with the patches' messages."""
    edits: Edits = []
    text = b"".join(base)
    for number, name in enumerate(order):
        edits += made[name]
        before, text = text, b"".join(spliced(base, edits))
        assume(text != before)
        date = f"--date=2026-01-01T00:00:0{number}+0000"
        commit(place, {A: text}, "--no-edit", "-C", name, date)


def placed(series_: list[list[tuple[int, list[bytes]]]], slots: list[int]) -> dict[str, Edits]:
    """The edits, each in a slot of its own, so that no two patches touch."""
    free = iter(slots)
    return {
        f"p{number}": clean(
            [(next(free) * SLOT, removed, added) for removed, added in edits], b"%d:" % number
        )
        for number, edits in enumerate(series_)
    }


@SETTINGS
@given(old=SERIES, new=SERIES, slots=SLOTS, order=st.permutations(["p0", "p1", "p2"]))
def test_patches_apart_become_what_git_makes_of_each_edit_on_the_pristine_pin(
    old: list[list[tuple[int, list[bytes]]]],
    new: list[list[tuple[int, list[bytes]]]],
    slots: list[int],
    order: list[str],
) -> None:
    base = [b"line %d\n" % number for number in range(LINES)]
    before, edited = placed(old, slots), placed(old[:2] + new[2:], slots)
    with TemporaryDirectory() as folder:
        shop, place = series(Path(folder), base, before)
        commit_all(place, base, edited, order)
        assert shop.on(place, "refresh") == 0
        assert (shop.folder / "series").read_text().split() == order
        for name, edits in edited.items():  # the same commit, made on the pin alone
            git(shop.source, "checkout", "-q", "pin")
            date = f"--date=2026-01-01T00:00:0{order.index(name)}+0000"
            content = b"".join(spliced(base, edits))
            commit(shop.source, {A: content}, "--no-edit", "-C", name, date)
            assert mails(shop)[name] == git(shop.source, *EXPORT)
        assert shop.run("lint") == 0
        now = snapshot(shop.folder)
        assert shop.on(place, "refresh") == 0
        assert snapshot(shop.folder) == now


EDIT = st.tuples(st.integers(0, 40), st.integers(0, 3), TEXT)
ANY = st.lists(EDIT, min_size=1, max_size=2)


@SETTINGS
@given(edits=st.lists(ANY, min_size=3, max_size=3), unique=st.booleans())
def test_any_commits_become_patches_that_git_makes_the_same_tree_of_or_are_refused(
    edits: list[Edits], unique: bool
) -> None:
    base = [b"line %d\n" % (number if unique else number % 3) for number in range(40)]
    with TemporaryDirectory() as folder:
        shop, place = series(Path(folder), base, {"p0": [(0, 1, [b"x\n"])]})
        assert shop.on(place, "apply", "--commit") == 0
        lines = [b"x\n", *base[1:]]
        for number, made in enumerate(edits):
            before = lines
            lines = spliced(lines, clean(made, b"%d:" % number))
            assume(lines != before)
            message = git(place, "log", "-1", "--format=%B", "p0").decode()
            subject, _, body = message.partition("\n")
            commit(place, {A: b"".join(lines)}, message=f"{subject} {number}\n{body}")
        names = [part for n in range(3) for part in ("--name", f"n{n}=HEAD~{2 - n}")]
        was = snapshot(shop.folder)
        code = shop.on(place, "refresh", *names)
        if code:
            assert code == 1
            assert snapshot(shop.folder) == was
            return
        order = (shop.folder / "series").read_text().split()
        there = shop.root / "am"
        git(shop.root, "clone", "-q", str(shop.source), str(there))
        git(there, "checkout", "-q", "-B", "main", "pin")
        assert shop.on(there, "apply") == 0
        assert (there / A).read_bytes() == (place / A).read_bytes()
        if unique:  # git am finds a hunk by its text, so only then is it sure of the place
            git(there, "checkout", "-q", "--", ".")
            git(there, *IMPORT, data=b"".join(mails(shop)[name] for name in order))
            assert (there / A).read_bytes() == (place / A).read_bytes()
