"""What another release makes of a patch is told by the content of its hunks."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ..patchset.workshop import Files, Workshop, lay_out, numbered
from .conftest import A

MODULE = b"""import os


def first(x):
    a = 1
    b = 2
    c = 3
    return a + b + c + x


class Engine:
    name = "engine"

    def start(self, port):
        host = os.environ["HOST"]
        self.connect(host, port)
        self.ready = True
        return self.ready

    def stop(self):
        self.ready = False
        self.close()
        return None
"""
CONNECT = b"        self.connect(host, port)\n"
RETRY = b"        self.connect_with_retries(host, port, attempts=3)\n"
HOOK = b"        self.before_connecting_call_hooks(port)\n"
LOOP = MODULE.replace(CONNECT, RETRY)
INIT, TEST = "python/sglang/__init__.py", "test/registered/test_n.py"
M, OTHER, ADDED = "python/sglang/m.py", "python/sglang/srt/engines/n.py", "python/sglang/added.py"


@dataclass(frozen=True)
class Case:
    """A patch's content, another release's files, and what drift shall say."""

    newer: Files
    word: str
    edit: bytes = LOOP
    hunk: dict[str, Any] = field(default_factory=dict)


def moved(text: bytes) -> bytes:
    return b"# one\n# two\n" + text


CASES = {
    "the same": Case({}, "clean"),
    "another file changed": Case({A: b"x\n"}, "clean"),
    "far lines changed": Case({M: MODULE.replace(b"a = 1", b"a = 9")}, "clean"),
    "lines above": Case({M: moved(MODULE)}, "offset", hunk={"shift": 2, "line": 13}),
    "lines gone above": Case(
        {M: MODULE.replace(b"    b = 2\n", b"")}, "offset", hunk={"shift": -1}
    ),
    "moved within the file": Case(
        {M: MODULE[MODULE.index(b"class") :] + b"\n\n" + MODULE[: MODULE.index(b"class")]},
        "offset",
    ),
    "moved over more than itself": Case(
        {M: MODULE[MODULE.index(b"class") :] + b"\n\n" + MODULE[: MODULE.index(b"class")]},
        "offset",
        edit=MODULE.replace(b"c = 3", b"c = 4"),
    ),
    "the line itself changed": Case(
        {M: moved(MODULE.replace(b"(host, port)", b"(port)"))},
        "conflict",
        hunk={
            "merges": False,
            "symbol": "Engine.start",
            "pristine": "".join(MODULE.decode().splitlines(keepends=True)[12:19]),
            "patched": "".join(LOOP.decode().splitlines(keepends=True)[12:19]),
        },
    ),
    "the line is gone": Case({M: MODULE.replace(CONNECT, b"")}, "conflict"),
    "only its surroundings changed": Case(
        {M: MODULE.replace(b"return self.ready", b"return 1")}, "conflict", hunk={"merges": True}
    ),
    "upstream has it": Case({M: LOOP}, "upstreamed"),
    "upstream has it on other lines": Case({M: moved(LOOP)}, "upstreamed"),
    "upstream has it in other surroundings": Case(
        {M: LOOP.replace(b"self.ready = True", b"self.up = 1")}, "upstreamed"
    ),
    "upstream has the line, but ours is still there": Case(
        {M: MODULE.replace(b"\n    def stop", RETRY + b"\n    def stop")}, "conflict"
    ),
    "upstream wrote it otherwise": Case({M: LOOP.replace(b"attempts=3", b"tries=3")}, "conflict"),
    "upstream added the same line": Case(
        {M: MODULE.replace(CONNECT, HOOK + CONNECT).replace(b"self.ready = True", b"self.up = 1")},
        "upstreamed",
        edit=MODULE.replace(CONNECT, HOOK + CONNECT),
    ),
    "upstream added the same line to another function": Case(
        {M: MODULE.replace(CONNECT, b"").replace(b"        self.close()\n", RETRY)}, "conflict"
    ),
    "upstream added a line that ends like it": Case(
        {
            M: MODULE.replace(CONNECT, b"        if x: " + HOOK.lstrip() + CONNECT).replace(
                b"= True", b"= 1"
            )
        },
        "conflict",
        edit=MODULE.replace(CONNECT, HOOK.lstrip() + CONNECT),
    ),
    "upstream added the same import there": Case(
        {M: b"import sys\nimport json_of_another_kind\nimport os, io\n" + MODULE[10:]},
        "upstreamed",
        edit=b"import json_of_another_kind\n" + MODULE,
    ),
    "upstream added the same line far away": Case(
        {M: MODULE.replace(b"import os\n", b"import os, io\n") + b"\nimport json_of_a_kind\n"},
        "conflict",
        edit=b"import json_of_a_kind\n" + MODULE,
    ),
    "a line that was there before proves nothing": Case(
        {M: MODULE.replace(b"self.ready = True", b"self.up = 1")},
        "conflict",
        edit=MODULE.replace(CONNECT, b"        self.ready = False\n" + CONNECT),
    ),
    "a short line proves nothing": Case(
        {M: MODULE.replace(CONNECT, b"        pass\n" + CONNECT).replace(b"= True", b"= 1")},
        "conflict",
        edit=MODULE.replace(CONNECT, b"        pass\n" + CONNECT),
    ),
    "upstream removed the same line": Case(
        {M: moved(MODULE.replace(CONNECT, b""))},
        "upstreamed",
        edit=MODULE.replace(CONNECT, b""),
    ),
    "the file is gone": Case({M: None}, "obsolete", hunk={"likely": []}),
    "the file has moved": Case(
        {M: None, "python/sglang/srt/m.py": moved(MODULE)},
        "obsolete",
        hunk={"symbol": "Engine.start", "likely": ["python/sglang/srt/m.py:16"]},
    ),
    "the class has moved": Case(
        {M: MODULE[: MODULE.index(b"class")], OTHER: MODULE[MODULE.index(b"class") :]},
        "obsolete",
        hunk={"likely": [f"{OTHER}:4"]},
    ),
    "the class has another name elsewhere": Case(
        {
            M: MODULE[: MODULE.index(b"class")],
            OTHER: MODULE[MODULE.index(b"class") :].replace(b"Engine", b"Motor"),
        },
        "obsolete",
        hunk={"likely": [f"{OTHER}:4"]},
    ),
    "the function has another name": Case(
        {M: MODULE.replace(b"def start", b"def launch")},
        "conflict",
        hunk={"merges": True},
    ),
    "the function is rewritten under another name": Case(
        {M: MODULE.replace(b"def start(self, port)", b"def go(self)").replace(b"host", b"h")},
        "obsolete",
        hunk={"likely": []},
    ),
    "not Python any more": Case({M: b"def (:\n"}, "obsolete"),
}


def verdict(
    shop: Workshop, newer: Files, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any]]:
    place = lay_out(shop.root / "newer", {p: c for p, c in shop.files.items() if p not in newer})
    lay_out(place, {path: content for path, content in newer.items() if content is not None})
    capsys.readouterr()
    code = shop.on(place, "drift", "--json")
    return code, json.loads(capsys.readouterr().out)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path / "cache"))
    return Workshop(tmp_path, {M: MODULE, A: b"a\n"})


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_verdict_on_a_patch(
    empty: Workshop, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    empty.patch("one", {M: case.edit, "test/registered/test_m.py": b"pass\n"})
    empty.seal()
    code, result = verdict(empty, case.newer, capsys)
    (patch,) = result["patches"]
    assert patch["verdict"] == case.word
    assert code == (case.word not in ("clean", "offset"))
    assert result["needs_action"] == (["one"] if code else [])
    (hunk,) = [hunk for hunk in patch["hunks"] if hunk["path"] == M]
    assert {name: hunk[name] for name in case.hunk} == case.hunk
    if case.word == "conflict" and not hunk["merges"]:
        assert hunk["newer"] in (case.newer[M] or b"").decode()
        assert hunk["newer"].strip()


@pytest.mark.parametrize(
    ("edits", "newer", "word"),
    [
        ({ADDED: b"x = 1\n"}, {}, "clean"),
        ({ADDED: b"x = 1\n"}, {ADDED: b"x = 1\n"}, "upstreamed"),
        ({ADDED: b"x = 1\n"}, {ADDED: b"x = 2\n"}, "conflict"),
        ({A: b""}, {}, "clean"),
        ({A: b""}, {A: b""}, "upstreamed"),
        ({A: b""}, {A: b"a\nb\n"}, "conflict"),
        ({INIT: b"a\n"}, {}, "clean"),
        ({INIT: b"a\n"}, {INIT: b"b\n"}, "conflict"),
        ({A: b"first\na\n"}, {A: b"zero\na\n"}, "conflict"),
        ({A: b"a\nlast\n"}, {A: b"a\nmore\n"}, "conflict"),
        ({A: None}, {}, "clean"),
        ({A: None}, {A: None}, "upstreamed"),
        ({A: None}, {A: b"b\n"}, "conflict"),
        ({A: b"a\nb\n", M: LOOP}, {M: LOOP}, "conflict"),  # half of it is there
        ({M: LOOP, TEST: b"1\n"}, {TEST: b"2\n"}, "conflict"),  # its test has another's name
        ({M: LOOP, TEST: b"1\n"}, {M: LOOP, TEST: b"2\n"}, "upstreamed"),
        ({M: LOOP, TEST: b"1\n"}, {TEST: b"1\n"}, "conflict"),
    ],
)
def test_the_verdict_on_whole_files_and_on_half_a_patch(
    empty: Workshop, edits: Files, newer: Files, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    empty.patch("one", edits)
    empty.seal()
    code, result = verdict(empty, newer, capsys)
    assert result["patches"][0]["verdict"] == word
    assert code == (word != "clean")


def test_a_patch_of_nothing_but_what_the_release_lacks_is_not_looked_at(
    empty: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    empty.patch("one", {TEST: b"1\n"})
    empty.seal()
    capsys.readouterr()
    assert empty.on(empty.tree("site-packages"), "drift", "--json") == 1
    (patch,) = json.loads(capsys.readouterr().out)["patches"]
    assert (patch["verdict"], patch["hunks"]) == ("not looked at", [])


@pytest.mark.parametrize(
    ("newer", "words"),
    [
        (MODULE, ["clean", "clean"]),
        (moved(MODULE), ["offset", "offset"]),
        (LOOP, ["upstreamed", "clean"]),
        (moved(LOOP), ["upstreamed", "offset"]),
        (MODULE.replace(b"return self.ready", b"return 1"), ["conflict", "conflict"]),
        (MODULE.replace(CONNECT, b""), ["conflict", "conflict"]),
    ],
)
def test_a_patch_on_another_is_judged_on_what_fits_of_that_one(
    empty: Workshop, newer: bytes, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    empty.patch("one", {M: LOOP})
    empty.patch("two", {M: LOOP.replace(RETRY, RETRY + b"        self.again = 2\n")}, "one")
    empty.seal()
    _, result = verdict(empty, {M: newer}, capsys)
    assert [patch["verdict"] for patch in result["patches"]] == words


def test_each_hunk_is_judged_where_it_stands_after_those_before_it(
    empty: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    shop = Workshop(empty.root / "long", {A: numbered(60)})
    grown = "".join(f"more {n}\n" for n in range(12)) + "line 5"
    shop.patch("one", {A: numbered(60, l5=grown, l40="forty")})
    shop.seal()
    _, result = verdict(shop, {A: numbered(60, l5=grown, l40="four and thirty-six")}, capsys)
    assert [h["word"] for h in result["patches"][0]["hunks"]] == ["upstreamed", "conflict"]


def test_the_summary_shows_every_hunk_that_needs_work_three_ways(
    empty: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    empty.patch("one", {M: LOOP, A: b"b ```\n"})
    empty.patch("far", {ADDED: b"x\n"})
    empty.seal()
    newer = empty.files | {M: MODULE.replace(b"(host, port)", b"(port)"), A: b"c\n"}
    place = lay_out(empty.root / "newer", newer)
    assert empty.on(place, "drift", "--markdown") == 1
    text = capsys.readouterr().out
    assert "| `one` | conflict |" in text
    assert "| `far` | clean |" in text
    assert "`python/sglang/m.py` line 13, in `Engine.start`" in text
    for line in (CONNECT, RETRY, b"        self.connect(port)\n"):
        assert line.decode() in text
    assert "````python\nb ```\n````" in text
    assert "### far" not in text
    assert empty.on(place, "drift") == 1
    assert "1 of 2 patches need work" in capsys.readouterr().out


def test_drift_is_against_one_release(empty: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    empty.patch("one", {M: LOOP})
    empty.seal()
    assert empty.run("drift") == 2
    assert empty.on(empty.tree("folder"), "drift", "--version", "1.0.0") == 2
    assert "give either --sglang-dir or --version" in capsys.readouterr().err
    assert empty.run("drift", "--version", "../1.0.0") == 2
    assert empty.run("drift", "--version", "1.0.0") == 0  # the pin's own wheel, from the cache
    assert empty.on(empty.tree("site-packages"), "drift") == 0
