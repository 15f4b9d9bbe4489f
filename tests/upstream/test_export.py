"""A patch leaves as git would send it, the same each time."""

import json
import re
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.series import load_series
from sglang_overlay.upstream import pull_request

from ..conftest import EXPORT, IMPORT, git
from ..patchset.workshop import Workshop, contents, lay_out, snapshot
from .conftest import A, B, mails


def test_git_am_takes_the_mails_of_a_chain_in_order(shop: Workshop, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert shop.run("export", "more", out) == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "0001-head.patch",
        "0002-more.patch",
        "pull-request.md",
    ]
    first = snapshot(out)
    assert shop.run("export", "more", out) == 0
    assert snapshot(out) == first
    place = shop.tree("checkout")
    git(place, *IMPORT, *sorted(str(file) for file in out.glob("*.patch")))
    assert contents(place) == shop.expected("head", "more")


def test_other_files_in_the_folder_are_never_mixed_with_an_export(
    shop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shop.run("export", "more", tmp_path / "out") == 0
    before = snapshot(tmp_path / "out")
    assert shop.run("export", "tail", tmp_path / "out") == 2
    assert "0001-head.patch, which is not of this export" in capsys.readouterr().err
    assert snapshot(tmp_path / "out") == before


def test_a_folder_that_cannot_be_written_is_the_machines_failure(
    shop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert shop.run("export", "tail", tmp_path / "file/out") == 4
    assert f"{tmp_path}/file/out: Not a directory" in capsys.readouterr().err
    (tmp_path / "out/pull-request.md").mkdir(parents=True)
    assert shop.run("export", "tail", tmp_path / "out") == 4
    assert "pull-request.md: Is a directory" in capsys.readouterr().err


def test_a_branch_has_the_same_commit_in_every_checkout_and_nothing_else_moves(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = set()
    for settings in ([], ["diff.noprefix", "commit.gpgSign"]):
        place = shop.tree("checkout")
        git(place, "tag", "v1.0.0")
        for name in settings:
            git(place, "config", name, "true")
        lay_out(place, {A: b"mine\n"})
        git(place, "add", A)
        lay_out(place, {B: b"mine too\n"})
        before = (
            snapshot(place),
            git(place, "status", "--porcelain"),
            git(place, "rev-parse", "HEAD"),
        )
        for made in (True, False):
            capsys.readouterr()
            given = ["more", "--branch", "up/more", "--json"]
            assert shop.on(place, "export", *given) == 0
            result = json.loads(capsys.readouterr().out)
            assert (result["made"], result["patches"]) == (made, ["head", "more"])
            ids.add(result["commit"])
        after = (
            snapshot(place),
            git(place, "status", "--porcelain"),
            git(place, "rev-parse", "HEAD"),
        )
        assert after == before
        git(place, "reset", "-q", "--hard", "up/more")
        assert (place / A).read_bytes() == shop.expected("head", "more")[A]
        log = git(place, "log", "--format=%s", "pin..up/more").decode()
        assert log == "test: make more\ntest: make head\n"
    assert len(ids) == 1


@pytest.mark.parametrize(
    ("spoil", "branch", "code", "message"),
    [
        (["branch", "up", "pin~0"], "up", 3, "branch up is at"),
        (["branch", "up", "pin~0"], "up/it", 2, "no branch up/it can be beside up"),
        (["branch", "up/it", "pin~0"], "up", 2, "no branch up can be beside up/it"),
        ([], "a..b", 2, "is no name for a branch"),
        ([], "@{-1}", 2, "is no name for a branch"),
        ([], "HEAD", 2, "is no name for a branch"),
        (["tag", "-d", "v1.0.0"], "up", 2, "no commit refs/tags/v1.0.0"),
        (["tag", "-f", "v1.0.0", "tail"], "up", 1, f"{A}: tag v1.0.0 has"),
    ],
)
def test_a_branch_that_would_be_wrong_is_refused(
    shop: Workshop,
    spoil: list[str],
    branch: str,
    code: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = shop.tree("checkout")
    git(place, "tag", "v1.0.0")
    if spoil:
        git(place, *spoil)
    refs = git(place, "for-each-ref")
    assert shop.on(place, "export", "head", "--branch", branch) == code
    error = capsys.readouterr().err
    assert message in error
    assert "branch -D" not in error
    assert git(place, "for-each-ref") == refs


@pytest.mark.parametrize(
    "args", [[], ["head"], ["head", "out", "--branch", "b"], ["head", "--check"], ["nobody", "out"]]
)
def test_a_request_without_sense_is_a_usage_error(shop: Workshop, args: list[str]) -> None:
    assert shop.run("export", *args) == 2


def test_check_finds_a_patch_whose_bytes_are_not_what_git_exports(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shop.run("export", "--check") == 0
    file = shop.folder / "tail.patch"
    text = file.read_bytes()
    edited = text.replace(b" @@ line 26", b" @@")  # as a git with another idea of functions has it
    assert edited != text
    file.write_bytes(edited)
    assert shop.run("lint", "--write") == 0
    capsys.readouterr()
    assert shop.run("export", "--check") == 5
    assert "v1.0.0/tail: git exports other bytes" in capsys.readouterr().out


def test_the_mails_are_the_patch_files(shop: Workshop, tmp_path: Path) -> None:
    shop.run("export", "tail", tmp_path / "out")
    assert (tmp_path / "out/0001-tail.patch").read_bytes() == mails(shop)["tail"]


def test_a_pull_request_has_each_paragraph_of_the_header_in_its_section(shop: Workshop) -> None:
    body = (
        "Why it exists.\n\nWhat it does, in\ntwo lines.\n\nTested on CPU: so.\n\nAlso so.\n\n"
        "Speed: twice.\n\nOn one machine."
    )
    test, helper = "test/registered/unit/test_it.py", "test/registered/unit/helper.py"
    file = shop.source / A
    file.write_bytes(b"x\n")
    (shop.source / test).parent.mkdir(parents=True)
    (shop.source / test).write_bytes(b"1\n2\n")
    (shop.source / helper).write_bytes(b"3\n")
    git(shop.source, "add", "-A")
    trailers = "Depends-On: head\nSigned-off-by: A <a@example.org>"
    git(shop.source, "commit", "-q", "-F", "-", data=f"test: it\n\n{body}\n\n{trailers}\n".encode())
    (shop.folder / "it.patch").write_bytes(git(shop.source, *EXPORT))
    (shop.folder / "series").write_text("head\ntail\nmore\nit\n")
    by_name = load_series(load_pins(shop.folder.parent)[0]).by_name
    text = pull_request(by_name["it"], [by_name["head"]])
    headings = [line for line in text.splitlines() if line.startswith("## ")]
    assert headings == [
        "## Motivation",
        "## Modifications",
        "## Accuracy Tests",
        "## Speed Tests and Profiling",
        "## Checklist",
    ]
    sections = dict(zip(headings, text.split("\n## ")[1:], strict=True))
    assert "Why it exists." in sections["## Motivation"]
    assert "What it does, in\ntwo lines." in sections["## Modifications"]
    assert f"- `{A}`: +1 -60" in sections["## Modifications"]
    assert "Comes after: test: make head." in sections["## Modifications"]
    assert "Tested on CPU: so.\n\nAlso so." in sections["## Accuracy Tests"]
    assert f"python3 -m pytest {test}" in sections["## Accuracy Tests"]
    assert f"- `{helper}`: +1 -0" in text
    assert text.count("python3 -m pytest") == 1
    assert "Speed: twice.\n\nOn one machine." in sections["## Speed Tests and Profiling"]
    assert "- [x] Unit tests added" in sections["## Checklist"]


def test_every_patch_of_the_project_has_a_pull_request_and_is_what_git_exports(
    tmp_path: Path,
) -> None:
    assert main(["export", "--check"]) == 0
    for pin in load_pins(patches_folder()):
        for patch in load_series(pin).patches:
            out = tmp_path / pin.name / patch.name
            assert main(["export", patch.name, str(out), "--pin", pin.name]) == 0
            text = (out / "pull-request.md").read_text()
            for diff in patch.diffs:
                assert f"`{diff.path}`" in text
            assert all(p in text for p in patch.header.body.split("\n\n"))
            tests = [d for d in patch.diffs if re.match(r"test/.*/test_\w+\.py$", d.path)]
            assert text.count("python3 -m pytest") == len(tests)
