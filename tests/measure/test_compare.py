import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure.compare import _student, compare
from sglang_overlay.measure.runs import Protocol
from sglang_overlay.measure.store import open_store
from sglang_overlay.patchset.errors import Usage

from .test_store import make

_QUIET = (99.0, 100.0, 101.0, 100.5, 99.5)
_NOISY = (80.0, 100.0, 120.0, 110.0, 90.0)
_SPEC = (2.0, 2.1, 2.2, 2.15, 2.05)


def _times(rates: tuple[float, ...], factor: float) -> tuple[float, ...]:
    return tuple(rate * factor for rate in rates)


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        (_QUIET, _times(_QUIET, 1.05), "faster (one start each)"),
        (_QUIET, _times(_QUIET, 0.95), "slower (one start each)"),
        (_QUIET, _times(_QUIET, 1.002), "inside the noise"),
        (_NOISY, _times(_NOISY, 1.10), "inside the noise"),
        (_NOISY, _times(_NOISY, 2.00), "faster (one start each)"),
        (_QUIET, _times(_QUIET, 2.0)[:4], "too few runs"),
    ],
)
def test_a_difference_is_a_win_only_beyond_the_noise(
    a: tuple[float, ...], b: tuple[float, ...], verdict: str
) -> None:
    found = compare(make("a", a), make("b", b))
    assert found.verdict == verdict
    if found.speed:
        assert found.speed.low <= found.speed.value <= found.speed.high
        assert found.speed.value == pytest.approx(np.mean(b) / np.mean(a))


@pytest.mark.parametrize(("freedom", "table"), [(4, 2.776), (8, 2.306), (18, 2.101), (98, 1.984)])
def test_students_t_is_that_of_the_tables(freedom: int, table: float) -> None:
    assert _student(0.975, freedom) == pytest.approx(table, rel=0.003)


def test_equal_sessions_are_called_different_about_once_in_twenty() -> None:
    random = np.random.default_rng(7)
    trials = 200
    wrong = 0
    for _ in range(trials):
        a, b = (tuple(100 + 5 * random.standard_normal(5)) for _ in "ab")
        wrong += compare(make("a", a), make("b", b)).verdict != "inside the noise"
    assert 0.01 * trials <= wrong <= 0.10 * trials


@pytest.mark.parametrize(
    ("accept", "fell"),
    [
        (_times(_SPEC, 0.9), True),
        (_times(_SPEC, 0.9999), False),  # less than one cycle of a run
        (_times(_SPEC, 1.1), False),
        ((2.1, 2.0, 2.2, 2.2, 1.9), False),
        # Prompt by prompt a small fall is clear, which the spread between prompts would hide.
        (_times(_SPEC, 0.99), True),
    ],
)
def test_an_accept_length_that_fell_beyond_noise_is_found(
    accept: tuple[float, ...], fell: bool
) -> None:
    a, b = make("a", _QUIET, accept=_SPEC), make("b", _times(_QUIET, 2), accept=accept)
    found = compare(a, b)
    assert found.verdict == "faster (one start each)"
    assert found.accept_fell is fell


@pytest.mark.parametrize(
    "told",
    [
        {"simulated": "2.1"},
        {"workers": [{"worker": "tp0", "variables": {"SGLANG_SIMULATE_ACC_LEN": "2.1"}}]},
    ],
)
def test_a_simulated_accept_length_never_fell(told: dict[str, object]) -> None:
    fallen = {"accept": _times(_SPEC, 0.9)}
    a, b = make("a", _QUIET, accept=_SPEC), make("b", _QUIET, **fallen, context=told)
    assert not compare(a, b).accept_fell
    plain = compare(a, make("b", _QUIET, **fallen, context={"simulated": "", "workers": None}))
    assert plain.accept_fell


@pytest.mark.parametrize(
    ("accept", "fell"),
    [
        ((1.5, 1.6, 1.55), True),
        ((1.7, 1.75, 1.72), False),  # less than a fifth
        ((1.0, 1.0, 2.1), False),  # one run is as good as theirs
        ((2.4, 2.5, 2.4), False),
    ],
)
def test_of_few_runs_a_large_fall_is_found_all_the_same(
    accept: tuple[float, ...], fell: bool
) -> None:
    found = compare(make("a", _QUIET[:3], accept=_SPEC[:3]), make("b", _QUIET[:3], accept=accept))
    assert found.verdict == "too few runs" and found.accept is None
    assert found.accept_fell is fell


@pytest.mark.parametrize(
    "other",
    [
        {"model_path": "b"},
        {"speculative_draft_model_path": "other"},
        {"speculative_num_steps": 1},
        {"speculative_token_map": "map"},
    ],
)
def test_another_drafter_is_said_and_no_error(
    other: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.sqlite"
    arguments = {"model_path": "a", "speculative_num_steps": 2}
    with open_store(file) as store:
        for name, changed, factor in (("one", {}, 1.0), ("same", {}, 0.7), ("other", other, 0.7)):
            context = {"arguments": arguments | changed}
            accept = _times(_SPEC, factor)
            store.append(make(name, _QUIET, accept=accept, context=context))
    given = ["--store", str(file)]
    assert main(["bench", "compare", "one", "other", *given]) == 0
    said = capsys.readouterr()
    assert "another drafter" in said.out and "wrong numbers" not in said.err
    assert main(["bench", "compare", "one", "same", *given]) == 1
    said = capsys.readouterr()
    assert "another drafter" not in said.out and "suspect wrong numbers" in said.err


def test_compare_exits_with_1_on_a_fallen_accept_length_and_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.sqlite"
    worker = {"worker": "scheduler tp0", "variables": {"NCCL_ALGO": "Ring"}}
    known = {"versions": {"sglang": "0.5.23"}, "patches": [], "workers": [worker]}
    other = {
        **known,
        "patches": ["worker-env"],
        "workers": [{**worker, "variables": {"NCCL_ALGO": "Tree"}}],
    }
    with open_store(file) as store:
        store.append(make("stock", _QUIET, accept=_SPEC, context=known))
        store.append(make("fused", _times(_QUIET, 2), accept=_times(_SPEC, 0.8), context=other))
    given = ["bench", "compare", "stock", "fused", "--store", str(file)]
    assert main(given) == 1
    said = capsys.readouterr()
    assert "error: the accept length of fused is 0.800 of that of stock" in said.err
    assert "patches: [] -> ['worker-env']" in said.out
    assert "scheduler tp0 NCCL_ALGO: Ring -> Tree" in said.out
    assert "sglang:" not in said.out
    assert main([*given, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["verdict"] == "faster (one start each)" and len(result["problems"]) == 1
    assert main(["bench", "compare", "fused", "stock", "--store", str(file)]) == 0


@pytest.mark.parametrize(
    "change", [{"tokens": 512}, {"concurrency": 8}, {"temperature": 1.0}, {"prompts": "mine"}]
)
def test_sessions_that_did_different_things_are_not_compared(change: dict[str, object]) -> None:
    other = replace(make("b"), protocol=Protocol(**change))  # type: ignore[arg-type]
    with pytest.raises(Usage, match=f"measured differently: {next(iter(change))}"):
        compare(make("a"), other)


def test_a_session_without_a_counted_run_is_not_compared() -> None:
    with pytest.raises(Usage, match=r"b \(0\) has no counted run: port in use"):
        compare(make("a"), make("b", (), failure="port in use"))
