"""Copies between cards, watched: what becomes of pairs that hang, kill their process, or lie."""

import sys
import time
from itertools import permutations

import pytest

from sglang_overlay.doctor.facts import Facts, Unknown
from sglang_overlay.doctor.peers import copy_all, supervise

from .machine import healthy, python, torch

PAIRS = list(permutations(range(3), 2))
#: Works through pairs as the real child does, but for what ``{}`` does with one of them.
CHILD = """
import json, sys, threading
pairs = json.loads(sys.stdin.readline())
say = lambda **line: print(json.dumps(line), flush=True)
def odd(pair):
    {}
say(event="ready")
for pair in pairs:
    say(event="start", source=pair[0], target=pair[1])
    odd(pair)
    say(event="done", source=pair[0], target=pair[1], result="right", peer=True, bandwidth=50.0)
"""
HANG = "pair == [0, 2] and threading.Event().wait()"


def run(odd: str, **limits: float) -> dict[tuple[int, int], tuple[str, str]]:
    command = [sys.executable, "-c", CHILD.format(odd)]
    copies = supervise(command, PAIRS, **limits)
    assert [(copy.source, copy.target) for copy in copies] == PAIRS
    return {(c.source, c.target): (c.result, c.detail) for c in copies}


def test_every_pair_is_copied_once_and_in_order() -> None:
    assert set(run("pass").values()) == {("right", "")}


def test_each_pair_is_named_when_its_turn_comes() -> None:
    said: list[str] = []
    supervise([sys.executable, "-c", CHILD.format("pass")], PAIRS, say=said.append)
    assert said == [f"  {a} to {b}" for a, b in PAIRS]


def test_a_pair_that_hangs_is_named_and_the_others_are_still_tried() -> None:
    found = run(HANG, each=1)
    assert found.pop((0, 2)) == ("hangs", "no answer in 1 s")
    assert set(found.values()) == {("right", "")}


def test_a_pair_that_kills_its_process_is_named_and_the_others_are_still_tried() -> None:
    found = run("if pair == [1, 0]: sys.exit('CUDA error: unspecified launch failure')")
    assert found.pop((1, 0)) == (
        "failed",
        "its process died: CUDA error: unspecified launch failure",
    )
    assert set(found.values()) == {("right", "")}


def test_many_that_hang_are_bounded_in_all() -> None:
    start = time.monotonic()
    found = run("threading.Event().wait()", each=1, total=2.5)
    assert time.monotonic() - start < 20
    words = [result for result, _ in found.values()]
    assert words[:2] == ["hangs", "hangs"]
    assert set(words[3:]) == {"not tried"}
    assert found[2, 1] == ("not tried", "the 2 s for all pairs were over")


def test_a_pair_that_is_interrupted_by_the_end_of_all_is_not_said_to_hang() -> None:
    found = run("threading.Event().wait()", each=60, total=2)
    assert set(found.values()) == {("not tried", "the 2 s for all pairs were over")}


def test_a_child_that_never_begins_is_tried_once() -> None:
    wait = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    copies = supervise(wait, PAIRS, start=1)
    assert {(c.result, c.detail) for c in copies} == {("not tried", "no child began in 1 s")}


def test_a_child_that_cannot_begin_says_why() -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('no module named torch')"]
    copies = supervise(broken, PAIRS)
    assert {c.detail for c in copies} == {"the child stopped: no module named torch"}


def test_lines_that_are_not_the_childs_own_are_passed_over() -> None:
    found = run("print('a sitecustomize says hello')")
    assert set(found.values()) == {("right", "")}


def test_a_child_that_says_much_on_standard_error_goes_on() -> None:
    found = run("print('w' * 300_000, file=sys.stderr)")
    assert set(found.values()) == {("right", "")}


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        (Facts(), "not read"),
        (python(healthy(2), torch=Unknown("torch is not installed")), "torch is not installed"),
        (torch(healthy(2), devices=1), "torch sees 1 card"),
        (torch(healthy(2), devices=0, problem="no driver"), "no driver"),
    ],
)
def test_without_two_cards_nothing_is_started(facts: Facts, why: str) -> None:
    assert copy_all(facts, "/nowhere/python", lambda text: None) == Unknown(why)
