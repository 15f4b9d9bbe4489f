"""The page, in a real browser."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure import report
from sglang_overlay.measure.runs import Breakdown, Protocol
from sglang_overlay.measure.store import open_store, read_store

from .test_store import make

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_SPEC = {"arguments": {"speculative_num_steps": 2, "speculative_eagle_topk": 1}}
_QUIET = (99.0, 100.0, 101.0, 100.5, 99.5)


def _times(values: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(value * factor for value in values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files: a baseline and three configurations; one more, and a failed start."""
    place = tmp_path_factory.mktemp("results")
    accept = (2.1, 2.0, 2.2, 2.1, 2.1)
    step = Breakdown(9, {"decode": 11.0, "host": 0.5})
    graphs = {"draft": "graph", "verify": "graph", "extend": "eager"}
    phases = {"draft": 1.0, "verify": 27.0}
    split = Breakdown(9, phases, {"all-reduce": 25.0}, 122, graphs)
    with open_store(place / "a.sqlite") as store:
        store.append(make("plain", _times(_QUIET, 0.82), breakdown=step))
        slow = make("eagle", _times(_QUIET, 0.6), accept=accept, context=_SPEC, breakdown=split)
        store.append(slow)
        store.append(make("patched", _times(_QUIET, 1.2), accept=accept, context=_SPEC))
    with open_store(place / "b.sqlite") as store:
        fell = _times(accept, 0.7)
        label = {"NCCL_ALGO": "<script>document.title = 'broken'</script>"}
        store.append(make("fused", _times(_QUIET, 1.5), accept=fell, context=_SPEC, labels=label))
        store.append(make("tree", (), failure="graph capture failed & no more"))
    return place


@pytest.fixture(scope="module")
def page_file(folder: Path) -> Path:
    file = folder / "report.html"
    assert main(["report", str(folder), "--out", str(file)]) == 0
    return file


@pytest.fixture
def page(browser: "Browser", page_file: Path) -> "Iterator[Page]":
    """The page on a phone, with everything from elsewhere refused and every error noted."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, offline=True)
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(page_file.as_uri())
    yield page
    assert errors == []
    context.close()


def _cells(page: "Page", column: int) -> list[str]:
    rows = page.locator(f"table >> nth=0 >> tbody tr td:nth-child({column})")
    return [text.split("\n")[0] for text in rows.all_inner_texts()]


def test_every_configuration_has_its_verdict(page: "Page") -> None:
    assert page.title().startswith("Does speculation pay?")
    verdicts = dict(zip(_cells(page, 1), _cells(page, 5), strict=True))
    assert verdicts == {
        "plain": "baseline",
        "eagle": "slower (one start each)",
        "patched": "faster (one start each)",
        "fused": "accept length fell",
    }
    # What is fast with a fallen accept length is no winner.
    assert page.locator(".headline").inner_text().startswith("patched is 1.46 times as fast")
    assert "suspect wrong numbers" in page.locator("section >> nth=0").inner_text()
    assert "graph capture failed & no more" in page.locator("section >> nth=1").inner_text()


def test_break_even_predicts_what_was_measured(page: "Page") -> None:
    for measured, predicted in zip(_cells(page, 3)[1:], _cells(page, 6)[1:], strict=True):
        assert float(predicted) == pytest.approx(float(measured), rel=0.03)


def test_where_a_cycle_goes_stands_in_figures(page: "Page") -> None:
    table = page.locator("table >> nth=1")
    heads, *rows = [row.split("\t") for row in table.inner_text().splitlines() if row.strip()]
    figures = ["decode", "draft", "verify", "host", "all-reduces", "all-reduce ms"]
    assert heads == ["configuration", *figures, "passes"]
    none, passes = "\N{EN DASH}", "draft graph, verify graph, extend eager"
    assert rows == [
        ["plain", "11.000", none, none, "1.177", "0", none, ""],
        ["eagle", none, "1.000", "27.000", "7.133", "122", "25.000", passes],
    ]


def test_each_model_has_its_own_baseline_and_a_sweeps_word_counts_first(tmp_path: Path) -> None:
    """Of two models, and of two backends whose sweep names a baseline for each."""

    def context(model: str, baseline: str = "") -> dict[str, object]:
        return {"arguments": {"model_path": f"/m/{model}"}, "baseline": baseline}

    accept = (2.1, 2.0, 2.2, 2.1, 2.1)
    with open_store(tmp_path / "s.sqlite") as store:
        for model, plain, fast in (("llama", 1.0, 1.3), ("deep", 2.0, 1.0)):
            store.append(make(f"{model} plain", _times(_QUIET, plain), context=context(model)))
            spec = make(model, _times(_QUIET, fast), accept=accept, context=context(model))
            store.append(spec)
        for backend, plain in (("a", 1.0), ("b", 3.0)):
            name = f"{backend} plain"
            store.append(make(name, _times(_QUIET, plain), context=context("k")))
        for backend, fast in (("a", 1.5), ("b", 1.8)):
            known = context("k", f"{backend} plain")
            store.append(make(backend, _times(_QUIET, fast), accept=accept, context=known))
    with read_store(tmp_path / "s.sqlite") as store:
        groups = report._groups(store.load(), None)
        assert len(report._groups(store.load(), "a plain")) == 1
    assert [
        (row.session.name, group.baseline.name, row.comparison and row.comparison.speed.value)
        for group in groups
        for row in group.rows
    ] == [
        ("llama plain", "llama plain", None),
        ("llama", "llama plain", pytest.approx(1.3)),
        ("deep plain", "deep plain", None),
        ("deep", "deep plain", pytest.approx(0.5)),
        ("a plain", "a plain", None),
        ("a", "a plain", pytest.approx(1.5)),
        ("b plain", "b plain", None),
        ("b", "b plain", pytest.approx(0.6)),
    ]
    assert [group.title.partition(":")[0] for group in groups] == ["llama", "deep", "k", "k"]


def test_an_attempt_that_failed_is_left_out_once_it_was_measured(tmp_path: Path) -> None:
    with open_store(tmp_path / "s.sqlite") as store:
        store.append(make("killed", _QUIET[:2], failure="the sweep was killed on the way"))
        store.append(make("tree", (), failure="out of memory"))
        store.append(make("killed", _QUIET))
        store.append(make("then", _QUIET))
        store.append(make("no start", (), failure="port in use"))
        asked = Protocol(prompts="random ids")
        store.append(replace(make("no start", _QUIET), protocol=asked))
        store.append(make("then", _QUIET[:1], failure="cut off"))
        sessions = store.load()
    text = report.page(sessions, "s", None)
    assert "7 sessions" in text and "2 that failed, and were measured again since" in text
    assert "killed on the way" not in text and "port in use" not in text
    assert "out of memory" in text and "cut off" in text


def test_a_click_on_a_heading_sorts_by_number_and_back(page: "Page") -> None:
    heading = page.get_by_role("button", name="tok/s", exact=True)
    heading.click()
    assert _cells(page, 1) == ["fused", "patched", "plain", "eagle"]
    heading.press("Enter")
    assert _cells(page, 1) == ["eagle", "plain", "patched", "fused"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="predicted").click()
    assert _cells(page, 1)[-1] == "plain"  # it has none


def test_light_and_dark_both_have_readable_text_in_page_and_plots(page: "Page") -> None:
    seen = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        back, ink, plot = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                getComputedStyle(document.body).color,
                getComputedStyle(document.querySelector('svg text')).fill]"""
        )
        assert plot == ink
        assert abs(_light(back) - _light(ink)) > 180
        seen.add(back)
    assert len(seen) == 2


def _light(colour: str) -> float:
    return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3


def test_a_phone_scrolls_tables_and_plots_but_not_the_page(page: "Page") -> None:
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1] == 360
    assert page.locator("svg").count() == 4  # rates, break-even, cycle, verify
    assert page.locator("svg >> nth=0").bounding_box()["width"] > 360  # type: ignore[index]


def test_the_page_needs_nothing_from_elsewhere(page_file: Path) -> None:
    text = page_file.read_text()
    addresses = set(re.findall(r"""(?:src|href)=["']?([^"'\s>]+)""", text))
    assert all(address.startswith("#") for address in addresses)
    assert "@import" not in text and "url(http" not in text


def test_another_baseline_may_be_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "r.html")
    assert main(["report", str(folder), "--out", out, "--baseline", "eagle", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sessions"] == 5
    assert "patched is 2.00 times as fast as eagle" in Path(out).read_text()
    assert main(["report", str(folder), "--out", out, "--baseline", "none"]) == 2
    assert "no measured session 'none'" in capsys.readouterr().err


def test_bad_sources_and_places_are_one_message(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_store(tmp_path / "empty.sqlite"):
        pass
    (tmp_path / "text").write_text("no database, though long enough to have a header " * 9)
    for source, code, message in (
        (tmp_path / "none", 2, "no results there"),
        (tmp_path / "text", 2, "not a file of bench results"),
        (tmp_path / "empty.sqlite", 2, "no session in it"),
    ):
        assert main(["report", str(source), "--out", str(tmp_path / "r.html")]) == code
        assert message in capsys.readouterr().err
    assert main(["report", str(folder), "--out", str(tmp_path / "no/r.html")]) == 4


def test_a_name_with_dollars_stands_in_the_page_as_it_is(tmp_path: Path) -> None:
    split = Breakdown(9, {"draft": 1.0}, {"all-reduce": 25.0}, 122)
    with open_store(tmp_path / "a.sqlite") as store:
        store.append(make("a $x^$ b", breakdown=split))
        store.append(make("an odd $\\frac$", breakdown=split))
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "a.sqlite"), "--out", str(out)]) == 0
    plots = out.read_text().partition("<svg")[2]
    assert plots.count(">a $x^$ b</text>") == plots.count(">an odd $\\frac$</text>") == 3


def test_a_page_is_written_over_a_page_and_over_nothing_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, out = folder / "a.sqlite", tmp_path / "r.html"
    for target in (store, tmp_path / "text"):
        (tmp_path / "text").write_text("my notes")
        before = target.read_bytes()
        assert main(["report", str(store), "--out", str(target)]) == 2
        assert "there already, and no page" in capsys.readouterr().err
        assert target.read_bytes() == before
    out.touch()
    for _ in "ab":
        assert main(["report", str(store), "--out", str(out)]) == 0
    assert out.read_text().lower().startswith("<!doctype html>")
