"""A patch set that is wrong is refused as a whole, with the patch and the file named."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_overlay.patchset.header import lint, split_mail

from ..conftest import git
from .conftest import NEW, A, B
from .workshop import Workshop, numbered, snapshot


def replace(old: str, new: str) -> Callable[[bytes], bytes]:
    def change(mail: bytes) -> bytes:
        assert old.encode() in mail
        return mail.replace(old.encode(), new.encode())

    return change


def cut_at(text: str) -> Callable[[bytes], bytes]:
    return lambda mail: mail[: mail.index(text.encode())]


def add(text: str) -> Callable[[bytes], bytes]:
    return lambda mail: mail + text.encode()


BINARY = (
    f"diff --git a/{B} b/{B}\nindex {'1' * 40}..{'2' * 40} 100644\nBinary files a and b differ\n"
)
RENAME = "diff --git a/x.py b/y.py\nsimilarity index 100%\nrename from x.py\nrename to y.py\n"
LINK = f"diff --git a/l b/l\nnew file mode 120000\nindex {'0' * 40}..{'2' * 40}\n"
MODULE = f"diff --git a/l b/l\nnew file mode 160000\nindex {'0' * 40}..{'2' * 40}\n"
CHMOD = f"diff --git a/{B} b/{B}\nold mode 100644\nnew mode 100755\n"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut_at("+and more"), "Hunk is shorter than expected"),
        (cut_at(f"diff --git a/{NEW}"), "cut short, or edited"),
        (cut_at("diff --git"), "holds no git diff"),
        (lambda mail: b"", "does not start with the 'From <id>"),
        (lambda mail: mail.replace(b"From: A T", b"From: \xff T"), "its header is not UTF-8"),
        (replace("@@ -1,6 +1,7 @@", "@@ -1,6 +1,8 @@"), "Hunk diff line expected"),
        (replace("@@ -1,6 +1,7 @@", "@@ -1,6 +1,6 @@"), "onger than expected"),
        (replace("@@ -1,6 +1,7 @@", "@@ -3,6 +3,7 @@"), "cut short, or edited"),
        (add("one more line\n"), "holds lines that belong to no hunk"),
        (
            replace("@@ -1,6 +1,7 @@\n", "@@ -1,6 +1,7 @@\n\\ No newline at end of file\n"),
            "a hunk begins",
        ),
        (replace("python/sglang/a.py", ".sglang-overlay/0"), "the path leaves the tree"),
        (add("\n"), "an empty line follows a hunk"),
        (replace("python/sglang/a.py", "../outside.py"), "the path leaves the tree"),
        (replace("python/sglang/a.py", "python/../../outside.py"), "the path leaves the tree"),
        (replace("python/sglang/a.py", "/etc/passwd"), "the path leaves the tree"),
        (replace("python/sglang/a.py", ".git/config"), "the path leaves the tree"),
        (replace("python/sglang/a.py", "a file.py"), "the path leaves the tree"),
        (replace(NEW, A), f"changes {A} twice"),
        (replace(f"{'0' * 40}..", f"{'1' * 40}.."), "the index line and the file's state disagree"),
        (
            lambda m: re.sub(rb"index (\w{7})\w+\.\.(\w{7})\w+", rb"index \1..\2", m),
            "two full blob ids",
        ),
        (add(BINARY), "binary files are not allowed"),
        (add(RENAME), "renames and unusual prefixes are not allowed"),
        (add(LINK), "mode 120000 is not allowed"),
        (add(MODULE), "mode 160000 is not allowed"),
        (add(CHMOD), "mode changes, renames and files without a change"),
    ],
)
def test_a_damaged_patch_stops_every_command(
    shop: Workshop,
    damage: Callable[[bytes], bytes],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = shop.folder / "head.patch"
    file.write_bytes(damage(file.read_bytes()))
    place = shop.tree("folder")
    before = snapshot(place)
    for command in ("apply", "reverse", "status", "verify", "check"):
        capsys.readouterr()
        assert shop.on(place, command) == 5
        printed = capsys.readouterr().err
        assert message in printed, printed
        assert "patch head" in printed
    assert shop.run("lint") == 5
    assert shop.run("lint", "--write") == 5 or "edited" in message
    assert snapshot(place) == before


@pytest.mark.parametrize(
    ("series", "message"),
    [
        ("head\ntail\nmore\nhead\n", "names head twice"),
        ("head\ntail\nmore\nlost\n", "names lost, but there is no lost.patch"),
        ("head\ntail\n", "does not name more.patch, which lies beside it"),
        ("tail\nmore\nhead\n", "patch more: depends on head, which is not before it"),
        ("head\n../tail\nmore\n", "'../tail' is not a patch name"),
        (None, "No such file"),
    ],
)
def test_a_wrong_series_is_named(
    shop: Workshop, series: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shop.folder / "series"
    file.unlink() if series is None else file.write_text(series)
    assert shop.on(shop.tree("folder"), "apply") == 5
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("manifest.json", "{", "JSONDecodeError"),
        ("manifest.json", "{}", "KeyError"),
        ("manifest.json", '{"patches": [], "versions": []}', "manifest.json"),
        ("pin.toml", "version = 1", "pin.toml"),
        ("pin.toml", "version = [", "pin.toml"),
        ("pin.toml", 'version = "1.0.0"\nwheel = "x"\nsha256 = 5\ntree = ""', "wheel = 'x'"),
    ],
)
def test_a_wrong_manifest_or_pin_is_named(
    shop: Workshop, file: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (shop.folder / file).write_text(text)
    assert shop.on(shop.tree("folder"), "apply") == 5
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (dict(l10="ten"), dict(l10="TEN")),
        (dict(l10="ten"), dict(l12="twelve")),
        (dict(l10="ten\nand more"), dict(l13="thirteen")),
        (dict(l1="one"), dict(l2="two")),
        (dict(l1="before\nline 1"), dict(l4="four")),
        (dict(l40="forty\nand more"), dict(l38="x")),
        (dict(l9="nine", l20="twenty"), dict(l5="x", l22="y", l35="z")),
    ],
)
def test_patches_that_touch_need_depends_on(
    tmp_path: Path,
    first: dict[str, str],
    second: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    shop = Workshop(tmp_path, {A: numbered(40)})
    shop.patch("one", {A: numbered(40, **first)})
    shop.patch("two", {A: numbered(40, **second)})
    with pytest.raises(AssertionError):
        shop.seal()
    printed = capsys.readouterr().err
    assert re.search(rf"patch two: {A}: hunk \d touches lines that one changes", printed)
    assert "add 'Depends-On: one'" in printed
    git(shop.source, "tag", "-d", "two")
    shop.names.remove("two")
    shop.patch("two", {A: numbered(40, **(first | second))}, "one")
    shop.seal()


def test_a_hunk_without_context_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(tmp_path, {A: numbered(40)})
    shop.patch("one", {A: numbered(40, l20="twenty")})
    file = shop.folder / "one.patch"
    mail = file.read_bytes()
    start = mail.index(b"@@ -17,7")
    file.write_bytes(mail[:start] + b"@@ -20 +20 @@\n-line 20\n+twenty\n")
    with pytest.raises(AssertionError):
        shop.seal()
    assert "the hunk at line 20 has no context" in capsys.readouterr().err


def test_a_manifest_with_more_than_the_series_is_refused(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    file = shop.folder / "manifest.json"
    table = json.loads(file.read_text())
    table["versions"]["python/sglang/else.py"] = {"1" * 40: []}
    file.write_text(json.dumps(table))
    assert shop.on(shop.tree("folder"), "status") == 5
    assert "are not the series's" in capsys.readouterr().err


def test_two_patches_that_add_the_same_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(tmp_path, {})
    for name in ("one", "two"):
        shop.patch(name, {NEW: f"{name}\n".encode()})
    with pytest.raises(AssertionError):
        shop.seal()
    assert "patch two" in capsys.readouterr().err


def test_lint_holds_the_manifest_against_the_pinned_source(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shop.run("lint") == 0
    file = shop.folder / "manifest.json"
    good = file.read_text()
    blob = re.search(r'"([0-9a-f]{40})": \[\s+"head"\s+\]', good)
    assert blob
    file.write_text(good.replace(blob[1], "1" * 40))
    capsys.readouterr()
    assert shop.run("lint") == 5
    assert "is not what lint --write makes" in capsys.readouterr().out
    place = shop.tree("folder")
    before = snapshot(place)
    assert shop.on(place, "apply", "--only", "head") == 5
    assert "the manifest says 11111111" in capsys.readouterr().err
    assert snapshot(place) == before


def test_lint_keeps_modules_that_use_their_own_path_out_of_the_overlay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [b"here = __file__\n", *(b"x%d = 0\n" % n for n in range(40))]
    shop = Workshop(tmp_path, {A: b"".join(lines)})
    shop.patch("one", {A: b"".join([*lines[:20], b"y = 1\n", *lines[20:]])})
    with pytest.raises(AssertionError):
        shop.seal()
    assert f"{A}: uses __file__, which an overlay changes: one must be" in capsys.readouterr().out


GOOD = {
    "Subject": "engine: keep what the user set",
    "From": "A Tester <tester@example.org>",
    "Date": "Sun, 29 Nov 2026 12:00:00 +0000",
    "body": "Because " + "word " * 30,
    "Origin": "vendor",
    "Upstream-Status": "Pending",
    "Remove-When": "upstream does it",
    "Overlay": "module",
    "Switch": "SGLANG_X=0",
    "Signed-off-by": "A Tester <tester@example.org>",
}


def findings(**changed: str) -> list[str]:
    fields = GOOD | {key.replace("_", "-"): value for key, value in changed.items()}
    top = "".join(f"{key}: {fields.pop(key)}\n" for key in ("From", "Date", "Subject"))
    body = fields.pop("body")
    trailers = "".join(f"{key}: {value}\n" for key, value in fields.items() if value)
    mail = (
        f"From {'0' * 40} Mon Sep 17 00:00:00 2001\n{top}\n{body}\n\n{trailers}\ndiff --git a b\n"
    )
    return lint(split_mail(mail.encode(), "x")[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"Subject": "keep what the user set"}, "is not '<area>: short imperative"),
        ({"Subject": "engine: keep it."}, "is not '<area>: short imperative"),
        ({"Subject": "engine: " + "keep " * 20}, "78 at most"),
        ({"From": "tester"}, "is not 'Name <mail>'"),
        ({"Date": "yesterday"}, "is not a mail date"),
        ({"body": "Because."}, "does not say why"),
        ({"body": GOOD["body"] + "\n\ndiff -u says so"}, "git am would cut the body"),
        ({"body": GOOD["body"] + "\n\n--- a cut"}, "git am would cut the body"),
        ({"Origin": "found it"}, "Origin: 'found it' is none of"),
        ({"Upstream_Status": "Submitted"}, "Upstream-Status: 'Submitted' is none of"),
        ({"Remove_When": ""}, "no Remove-When: line"),
        ({"Switch": ""}, "no Switch: line"),
        ({"Overlay": "perhaps"}, "Overlay: 'perhaps' is none of"),
        ({"Signed_off_by": "me"}, "Signed-off-by: 'me' is none of"),
    ],
)
def test_lint_names_what_a_header_lacks(changed: dict[str, str], message: str) -> None:
    found = findings(**changed)
    assert len(found) == 1
    assert message in found[0]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {
            "Origin": "upstream, https://example.org/pull/1",
            "Overlay": "checkout-only",
            "Switch": "",
        },
        {"Origin": f"backport, {'1' * 40}", "Upstream_Status": f"Backport [{'1' * 40}]"},
        {"Upstream_Status": "Submitted [https://example.org/pull/1]"},
        {"Upstream_Status": "Inappropriate [only for our cards]"},
    ],
)
def test_lint_accepts_every_form_that_is_allowed(changed: dict[str, str]) -> None:
    assert findings(**changed) == []
