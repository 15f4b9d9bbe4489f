"""The page, in a real browser: light and dark, on a desk and on a phone."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sglang_overlay.doctor import page as pages
from sglang_overlay.doctor.checks import examine
from sglang_overlay.doctor.facts import Copy, Facts
from sglang_overlay.doctor.finding import Finding, State

from .machine import healthy, pairs, slots

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def copied() -> Facts:
    """Eight cards, copies measured; one hangs, and those across the nodes are slower."""
    copies = [
        Copy(a, b, "right", True, 0, 5.0, 52.0 if (a < 4) == (b < 4) else 24.0)
        for a, b in permutations(range(8), 2)
    ]
    at = next(n for n, copy in enumerate(copies) if (copy.source, copy.target) == (2, 5))
    copies[at] = Copy(2, 5, "hangs", detail="no answer in 30 s")
    return slots(replace(healthy(8), copies=tuple(copies)), iommu="DMA")


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file, facts = tmp_path_factory.mktemp("page") / "doctor.html", copied()
    odd = Finding("odd", State.UNKNOWN, "<script>alert(1)</script> & more", "x" * 500)
    pages.write(file, facts, [*examine(facts), odd])
    return file


@pytest.fixture
def page(browser: "Browser", page_file: Path) -> "Iterator[Page]":
    """The page on a phone, with everything from elsewhere refused and every error noted."""
    context = browser.new_context(viewport={"width": 360, "height": 740}, offline=True)
    page, errors = context.new_page(), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.on(
        "request", lambda request: errors.append(request.url) if "data:" in request.url else None
    )
    page.goto(page_file.as_uri())
    yield page
    assert errors == []
    context.close()


def colour(page: "Page", row: int, column: int) -> list[float]:
    """Lightness and the two colour axes of a square of the heat map."""
    text = page.locator(f"tr >> nth={row + 1} >> td >> nth={column}").evaluate(
        "cell => getComputedStyle(cell).backgroundColor"
    )
    return [float(part) for part in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)[:3]]


def test_the_worst_stands_first_and_every_finding_is_there(page: "Page") -> None:
    states = page.locator("article .state").all_inner_texts()
    assert states == sorted(states, key=["error", "warning", "unknown", "ok"].index)
    assert len(states) == len(examine(copied())) + 1
    assert "2->5 hangs" in page.locator("article").first.inner_text()
    assert "sudo reboot" in page.locator("#iommu pre").inner_text()
    counts = page.locator(".counts li").all_inner_texts()
    assert counts[0] == "1 error"
    assert (
        page.locator("#odd h3").inner_text().startswith("unknown <script>alert(1)</script> & more")
    )


def test_the_pairs_are_a_heat_map(page: "Page") -> None:
    assert page.locator("td.heat").count() == 56
    near, far, broken = colour(page, 0, 1), colour(page, 0, 5), colour(page, 2, 5)
    assert near != far != broken
    # In oklab the second number runs from green to red.
    assert near[1] < far[1] < broken[1]
    assert (
        page.locator("td", has_text="hangs").get_attribute("title") == "2 to 5: no answer in 30 s"
    )


def test_light_and_dark_are_both_readable(page: "Page") -> None:
    seen = set()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        for place in ("body", "#iommu .state", "#iommu pre", "#iommu .evidence", "td.heat"):
            ink, back = page.locator(place).first.evaluate(
                """element => {
                    const paint = colour => {
                        const canvas = new OffscreenCanvas(1, 1).getContext('2d');
                        canvas.fillStyle = colour;
                        canvas.fillRect(0, 0, 1, 1);
                        return [...canvas.getImageData(0, 0, 1, 1).data];
                    };
                    const ink = paint(getComputedStyle(element).color);
                    let back = [0, 0, 0, 0];
                    for (let at = element; at && !back[3]; at = at.parentElement)
                        back = paint(getComputedStyle(at).backgroundColor);
                    return [ink, back];
                }"""
            )
            assert contrast(ink, back) >= 4.5, (scheme, place, ink, back)
            seen.add((scheme, place, tuple(back)))
    assert len({back for scheme, place, back in seen if place == "body"}) == 2


def contrast(one: list[int], other: list[int]) -> float:
    """The contrast ratio of the Web Content Accessibility Guidelines."""

    def luminance(colour: list[int]) -> float:
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in (part / 255 for part in colour[:3])
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_a_phone_scrolls_the_matrix_but_not_the_page(page: "Page") -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1] == 320
    inner = page.locator(".scroll").evaluate("at => [at.scrollWidth, at.clientWidth]")
    assert inner[0] > inner[1]  # eight columns do not fit


def test_a_picture_shows_more_than_one_colour(page: "Page", tmp_path: Path) -> None:
    pictures = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        pictures.append(page.screenshot(path=tmp_path / f"{scheme}.png"))
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 10_000 for picture in pictures)
    assert pictures[0] != pictures[1]


def test_the_page_needs_nothing_from_elsewhere(page_file: Path) -> None:
    text = page_file.read_text()
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(""", text)


@pytest.mark.parametrize(
    ("facts", "cells"),
    [
        (pairs(healthy(2), level="PXB"), [["", "PXB"], ["PXB", ""]]),
        (pairs(healthy(2), nvlink=True), [["", "NVLink"], ["NVLink", ""]]),
        (healthy(1), None),
        (Facts(), None),
    ],
)
def test_without_measured_copies_the_matrix_shows_distances(facts: Facts, cells: Any) -> None:
    matrix = pages.matrix(facts)
    assert (matrix and [[cell.text for cell in row] for row in matrix.rows]) == cells


def test_a_pair_without_peer_access_is_cold_however_near() -> None:
    near, refused = pairs(healthy(2), level="PIX"), pairs(healthy(2), level="PIX", peer="no")
    heats = [pages.matrix(facts).rows[0][1].heat for facts in (near, refused)]  # type: ignore[union-attr]
    assert heats == [0.8, 0.0]
