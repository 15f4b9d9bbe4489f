"""Applying, undoing and naming what is there, in every layout."""

import itertools
import json
from pathlib import Path

import pytest

from ..conftest import git
from .conftest import NEW
from .workshop import Workshop, contents, numbered, snapshot

LAYOUTS = ["checkout", "folder", "site-packages"]
SUBSETS = [(), ("head",), ("tail",), ("head", "tail"), ("head", "more"), ("head", "tail", "more")]


def bare(files: dict[str, bytes], layout: str) -> dict[str, bytes]:
    """``files`` as the layout has them."""
    if layout != "site-packages":
        return files
    return {p.removeprefix("python/"): c for p, c in files.items() if p.startswith("python/")}


def select(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ("--only", name)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("now", "then"), [*itertools.product(SUBSETS, SUBSETS)])
def test_any_subset_leads_to_any_other_with_gits_bytes(
    shop: Workshop, layout: str, now: tuple[str, ...], then: tuple[str, ...]
) -> None:
    place = shop.tree(layout)
    before = snapshot(place)
    if now:
        assert shop.on(place, "apply", *select(now)) == 0
    if gone := tuple(name for name in now if name not in then):
        assert shop.on(place, "reverse", *select(gone)) == 0
    if then:
        assert shop.on(place, "apply", *select(then)) == 0
    assert contents(place) == bare(shop.expected(*then), layout)
    assert shop.on(place, "reverse") == 0
    assert snapshot(place) == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_words_for_a_tree(
    shop: Workshop, layout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree(layout)

    def state() -> tuple[int, str]:
        capsys.readouterr()
        code = shop.on(place, "status", "--json")
        return code, json.loads(capsys.readouterr().out)["state"]

    new = place / (NEW.removeprefix("python/") if layout == "site-packages" else NEW)
    assert state() == (0, "pristine")
    shop.on(place, "apply", "--only", "head")
    assert state() == (0, "applied 1 of 3")
    shop.on(place, "apply")
    assert state() == (0, "complete")
    content = new.read_bytes()
    new.unlink()
    assert state() == (1, "mixed")
    new.write_bytes(content + b"# mine\n")
    assert state() == (1, "drifted")


def test_a_second_apply_changes_nothing_and_says_so(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    shop.on(place, "apply")
    stamps = {path: path.stat().st_mtime_ns for path in place.rglob("*")}
    capsys.readouterr()
    assert shop.on(place, "apply") == 0
    assert "nothing to change" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in place.rglob("*")} == stamps


def test_a_mixed_tree_is_finished_either_way(shop: Workshop) -> None:
    place = shop.tree("folder")
    before = snapshot(place)
    shop.on(place, "apply")
    done = snapshot(place)
    (place / "python/sglang/a.py").write_bytes(numbered(40))
    assert shop.on(place, "apply") == 0
    assert snapshot(place) == done
    (place / "python/sglang/a.py").write_bytes(numbered(40))
    assert shop.on(place, "reverse") == 0
    assert snapshot(place) == before


def test_check_says_what_apply_would_write_and_writes_nothing(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("checkout")
    before = snapshot(place)
    assert shop.on(place, "check", "--json", "--only", "more") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["written"] == [
        "python/sglang/a.py",
        "python/sglang/sub/new.py",
        "test/registered/test_it.py",
    ]
    assert [p["chosen"] for p in result["patches"]] == [True, False, True]
    assert snapshot(place) == before


def test_verify_proves_what_is_asked_for(shop: Workshop) -> None:
    place = shop.tree("folder")
    assert shop.on(place, "verify") == 1
    shop.on(place, "apply", "--only", "tail")
    assert shop.on(place, "verify") == 1
    assert shop.on(place, "verify", "--only", "tail") == 0
    (place / "python/sglang/b.py").write_bytes(b"other\n")
    assert shop.on(place, "verify", "--only", "tail") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["apply", "--only", "more", "--skip", "head"], "head is skipped"),
        (["reverse", "--only", "head"], "more is applied and needs"),
        (["apply", "--only", "nonsense"], "no patch nonsense in v1.0.0; there is head, tail, more"),
        (["apply", "--pin", "9"], "no pin 9; there is v1.0.0"),
    ],
)
def test_a_choice_that_makes_no_sense_is_refused(
    shop: Workshop, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("folder")
    shop.on(place, "apply")
    before = snapshot(place)
    assert shop.on(place, *args) == 2
    assert message in capsys.readouterr().err
    assert snapshot(place) == before


def test_executable_files_stay_so(tmp_path: Path) -> None:
    shop = Workshop(tmp_path, {"python/sglang/run.sh": numbered(3)})
    shop.patch("script", {"python/sglang/tool.sh": b"#!/bin/sh\n"}, executable=True)
    shop.patch("line", {"python/sglang/run.sh": numbered(3, l2="two")})
    shop.seal()
    place = shop.tree("folder")
    (place / "python/sglang/run.sh").chmod(0o750)
    assert shop.on(place, "apply") == 0
    assert (place / "python/sglang/run.sh").stat().st_mode & 0o777 == 0o750
    assert (place / "python/sglang/tool.sh").stat().st_mode & 0o111 == 0o111


def test_files_with_dos_line_ends_are_patched_and_restored_as_such(shop: Workshop) -> None:
    place = shop.tree("checkout")
    git(place, "config", "core.autocrlf", "true")
    git(place, "rm", "-q", "-r", "--cached", ".")
    git(place, "reset", "-q", "--hard")
    before = snapshot(place)
    assert b"\r\n" in (place / "python/sglang/a.py").read_bytes()
    assert shop.on(place, "apply") == 0
    expected = shop.expected("head", "tail")["python/sglang/b.py"].replace(b"\n", b"\r\n")
    assert (place / "python/sglang/b.py").read_bytes() == expected
    assert shop.on(place, "reverse") == 0
    assert snapshot(place) == before
    assert git(place, "status", "--porcelain") == b""
