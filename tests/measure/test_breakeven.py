import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_overlay.cli import main
from sglang_overlay.measure.breakeven import (
    Acceptance,
    Case,
    by_steps,
    from_histogram,
    from_length,
    from_positions,
    targets,
)
from sglang_overlay.measure.breakeven_command import case_of
from sglang_overlay.measure.runs import Breakdown
from sglang_overlay.measure.store import open_store

from .test_store import make

_SHORT = "--decode-ms 12 --cycle-ms 30 --accept-length 2.1".split()
_SPLIT = "--decode-ms 12 --draft-ms 1 --verify-ms 28 --extend-ms 1 --allreduce-ms 25".split()


def ask(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, object]:
    assert main(["breakeven", *args, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert isinstance(result, dict)
    return result


def test_the_campaign_loses_and_is_told_what_has_to_fall(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = ask(capsys, *_SHORT)
    assert result["speedup"] == 0.84
    assert result["wins"] is False
    assert result["breakeven_cycle_ms"] == 25.2
    parts = result["targets"]
    assert isinstance(parts, dict)
    assert parts["cycle_ms"] == {"now": 30.0, "target": 25.2, "fall": 4.8}
    assert parts["accept_length"] == {"now": 2.1, "target": 2.5, "fall": -0.4}
    for part in ("draft_ms", "verify_ms", "extend_ms", "allreduce_ms"):
        assert parts[part] == {"now": None, "target": None, "fall": 4.8}
    assert parts["allreduce_us"]["fall"] == pytest.approx(4800 / 122, abs=1e-3)


def test_a_split_says_which_part_can_do_it_alone(capsys: pytest.CaptureFixture[str]) -> None:
    result = ask(capsys, *_SPLIT, "--accept-length", "2.1")
    assert result["speedup"] == 0.84  # the same 30 ms
    parts = result["targets"]
    assert isinstance(parts, dict)
    assert parts["verify_ms"]["target"] == 23.2
    assert parts["draft_ms"]["target"] is None and parts["extend_ms"]["target"] is None
    assert parts["allreduce_ms"]["target"] == 20.2
    assert parts["allreduce_us"]["target"] == pytest.approx(20200 / 122, abs=1e-3)
    assert main(["breakeven", *_SPLIT, "--accept-length", "2.1"]) == 0
    said = capsys.readouterr().out
    assert "speculation loses: 0.84 times" in said and "not alone" in said


def test_a_faster_all_reduce_is_answered_with_the_speed_it_gives(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = ask(capsys, *_SPLIT, "--accept-length", "2.1", "--allreduce-us", "20")
    cycle = 30 - 25 + 122 * 0.020
    assert result["allreduce"] == [
        {"us": 20.0, "cycle_ms": round(cycle, 4), "speedup": round(2.1 * 12 / cycle, 4)}
    ]
    assert len(ask(capsys, *_SPLIT, "--accept-length", "2.1")["allreduce"]) > 3  # type: ignore


def test_the_best_number_of_steps_is_the_one_that_brute_force_finds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    more = ["--steps", "3", "--accepted-at", "0.8,0.5,0.2"]
    result = ask(capsys, *"--decode-ms 5 --draft-ms 2 --verify-ms 4 --extend-ms 1".split(), *more)
    lengths = [1.8, 2.3, 2.5, 2.5 + 0.2 * 0.4, 2.5 + 0.2 * 0.4 + 0.2 * 0.16]
    cycles = [5 + 1.0 * (steps - 1) for steps in range(1, 6)]  # two draft passes took 2 ms
    speeds = [length * 5 / cycle for length, cycle in zip(lengths, cycles, strict=True)]
    rows = result["steps"]
    assert isinstance(rows, list)
    assert [row["speedup"] for row in rows[:5]] == [round(speed, 4) for speed in speeds]
    assert [row["measured"] for row in rows[:5]] == [True, True, True, False, False]
    best = speeds.index(max(speeds)) + 1
    assert result["best"] == {"steps": best, "draft_tokens": best + 1}


@given(
    rate=st.floats(0, 1),
    steps=st.integers(1, 6),
    decode=st.floats(0.1, 50),
    cycle=st.floats(0.1, 100),
)
def test_equal_rates_give_the_published_formula(
    rate: float, steps: int, decode: float, cycle: float
) -> None:
    length = Acceptance(0, (rate,)).tokens(steps)
    published = (1 - rate ** (steps + 1)) / (1 - rate) if rate < 1 else steps + 1
    assert length == pytest.approx(published)
    assert from_length(length, steps).tokens(steps) == pytest.approx(length)
    case = Case(decode, cycle, Acceptance(length))
    # At its target every figure gives a speedup of exactly 1.
    by_part = {one.part: one.target for one in targets(case)}
    assert by_part["cycle_ms"] and by_part["accept_length"]
    assert Case(decode, by_part["cycle_ms"], Acceptance(length)).speedup == pytest.approx(1)
    assert Case(decode, cycle, Acceptance(by_part["accept_length"])).speedup == pytest.approx(1)


def test_a_histogram_and_positions_say_the_same() -> None:
    found = from_histogram([300, 400, 300])  # cycles with 0, 1 and 2 right drafts
    assert found == from_positions([0.7, 0.3])
    assert found.length == pytest.approx(2.0)
    assert found.rates == pytest.approx((0.7, 3 / 7))
    assert from_histogram([5, 0, 0]).rates == (0.0, 0.0)


def test_the_cycle_with_the_measured_steps_is_the_measured_cycle() -> None:
    case = Case(12, 30, from_positions([0.7, 0.4]), {"draft": 1.0}, token_ms=0.5)
    assert math.isclose(by_steps(case)[1].cycle_ms, 30)
    assert by_steps(case)[2].cycle_ms == pytest.approx(30 + 1.0 + 0.5)


def test_stored_sessions_give_every_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.sqlite"
    split = Breakdown(9, {"draft": 1, "verify": 8, "extend": 1}, {"all-reduce": 6}, 16)
    with open_store(file) as store:
        store.append(make("plain", (80.0,) * 5))
        store.append(make("eagle", (60.0,) * 5, accept=(2.1,) * 5, breakdown=split))
    store_option = ["--store", str(file)]
    result = ask(capsys, "--bench", "eagle", "--baseline", "plain", *store_option)
    decode = (2048 / 80 * 1e3 - 50) / 2047
    cycle = (2048 / 60 * 1e3 - 50) / round(2047 / 2.1)
    assert result["decode_ms"] == pytest.approx(decode)
    assert result["cycle_ms"] == pytest.approx(cycle, abs=1e-4)
    parts = result["targets"]
    assert isinstance(parts, dict)
    # Kernels take in the profile what they take; the host, which it slows, has the rest.
    assert parts["verify_ms"]["now"] == 8
    assert parts["host_ms"]["now"] == pytest.approx(cycle - 10, abs=1e-4)
    assert parts["allreduce_ms"]["now"] == 6
    assert parts["allreduce_us"]["now"] == 375  # by the model's own 16, not a default
    assert main(["breakeven", "--bench", "plain", *_SHORT[:2], *store_option]) == 2
    assert "no streamed session with speculation" in capsys.readouterr().err
    assert main(["breakeven", "--baseline", "eagle", *_SHORT[2:], *store_option]) == 2
    assert "no streamed session without speculation" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--cycle-ms 30 --accept-length 2.1", "--decode-ms or --baseline is missing"),
        ("--decode-ms 12 --accept-length 2.1", "--cycle-ms, all its parts"),
        ("--decode-ms 12 --cycle-ms 30", "--accept-length or --accepted-at is missing"),
        ("--decode-ms 12 --cycle-ms 30 --accepted-at 0.3,0.7", "between 0 and the one before"),
        ("--decode-ms 12 --cycle-ms 30 --accepted-at a", "could not convert"),
        ("--decode-ms 12 --cycle-ms 9 --accept-length 2 --verify-ms 10", "the cycle only 9"),
        (
            "--decode-ms 12 --cycle-ms 9 --accept-length 2 --verify-ms 5 --allreduce-ms 6",
            "more than the 5 ms",
        ),
        (
            "--decode-ms 12 --cycle-ms 9 --accept-length 2 --allreduce-us 6",
            "what do the all-reduces",
        ),
        ("--decode-ms 12 --cycle-ms 9 --accept-length 2 --bench x --store none", "no such file"),
        ("--decode-ms 0 --cycle-ms 9 --accept-length 2", "--decode-ms"),
        ("--decode-ms nan --cycle-ms 9 --accept-length 2", "'--decode-ms': nan is no number"),
        ("--decode-ms 12 --cycle-ms inf --accept-length 2", "'--cycle-ms': inf is no number"),
        ("--decode-ms 12 --cycle-ms 9 --accept-length nan", "'--accept-length': nan is no"),
        ("--decode-ms 12 --cycle-ms 9 --accepted-at nan", "between 0 and the one before"),
        ("--decode-ms 12 --cycle-ms 9 --accept-length 2 --token-ms inf", "'--token-ms': inf"),
    ],
)
def test_what_cannot_be_answered_is_one_message(
    args: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["breakeven", *args.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_plot_is_an_svg_that_holds_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plot.svg"
    ask(capsys, *_SPLIT, "--accept-length", "2.1", "--plot", str(file))
    root = ET.fromstring(file.read_text())
    texts = "".join(root.itertext())
    assert "0.84x" in texts and "speculation loses" in texts and "draft steps" in texts
    assert main(["breakeven", *_SHORT, "--plot", str(tmp_path / "plot.nothing")]) == 2
    assert "not supported" in capsys.readouterr().err
    assert main(["breakeven", *_SHORT, "--plot", str(tmp_path / "no/plot.svg")]) == 4


@pytest.mark.parametrize(
    ("histogram", "rates"),
    [
        ((2048,), (0.0, 0.0, 0.0)),  # no draft was ever right
        ((1000, 1000), (0.5, 0.0, 0.0)),
        ((300, 400, 200, 100), (0.7, 3 / 7, 1 / 3)),
    ],
)
def test_drafts_that_were_never_right_stand_in_no_histogram(
    histogram: tuple[int, ...], rates: tuple[float, ...]
) -> None:
    length = sum((n + 1) * count for n, count in enumerate(histogram)) / sum(histogram)
    arguments = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
    parts = Breakdown(9, {"draft": 2.0, "verify": 10.0, "extend": 1.0, "host": 1.0})
    context = {"arguments": arguments}
    session = make("eagle", accept=(length,) * 5, context=context, breakdown=parts)
    session = replace(
        session, runs=tuple(replace(run, histogram=histogram) for run in session.runs)
    )
    found = case_of(session, 12.0)
    assert found.acceptance.rates == pytest.approx(rates)
    assert found.with_steps(3).acceptance.length == pytest.approx(found.acceptance.length)
