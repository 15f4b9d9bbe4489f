"""The lint of a scheduler (patch worker-env-lint) and the doctor say the same of one setting."""

import json
from pathlib import Path

import pytest

from sglang_overlay.doctor.checks import examine
from sglang_overlay.doctor.checks.algorithm import ALGORITHMS
from sglang_overlay.doctor.facts import Facts
from sglang_overlay.doctor.finding import State

from .. import nccl_algo
from ..doctor.machine import environ, healthy, pairs, server
from ..pins import each_pin_with
from .conftest import Python

pytestmark = each_pin_with("worker-env-lint")

LINT = """
import json, sys
from sglang.srt.utils import worker_env_lint as lint
values, machines = json.loads(sys.argv[1])
findings = [
    lint.lint_env(
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        cuda_graphs=graphs,
        ranks_per_node=ranks,
        custom_all_reduce_ranks=ranks,
        custom_all_reduce_v2=v2,
        nvlink_pairs=lambda: [linked] * (ranks * (ranks - 1) // 2),
    )
    for ranks, linked, v2, graphs in machines
]
print("RESULT=" + json.dumps({
    "algorithms": {name: sorted(found) for name, found in lint._ALGORITHMS.items()},
    "problems": [lint.algorithm_problem(value) for value in values],
    "segments": [bool(found) for found in findings],
}))
"""
VALUES = [*nccl_algo.FINE, *(value for value, _ in nccl_algo.WITHOUT + nccl_algo.REFUSED)]
#: Ranks, all cards linked by NVLink, SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2, CUDA graphs.
MACHINES = [
    (ranks, linked, v2, graphs)
    for ranks in (1, 2, 4, 6, 8)
    for linked in (False, True)
    for v2 in (False, True)
    for graphs in (False, True)
]


@pytest.fixture(scope="module")
def lint(python: Python, patched: Path) -> dict[str, list[object]]:
    run = python(patched, "-W", "ignore", "-c", LINT, json.dumps([VALUES, MACHINES]))
    line = next((x for x in run.stdout.splitlines() if x.startswith("RESULT=")), None)
    assert line, run.stderr[-3000:]
    return dict(json.loads(line.removeprefix("RESULT=")))


def state(facts: Facts, id: str) -> State:
    (finding,) = [finding for finding in examine(facts) if finding.id == id]
    return finding.state


def test_of_nccls_algorithms(lint: dict[str, list[object]]) -> None:
    assert lint["algorithms"] == {name: sorted(found) for name, found in ALGORITHMS.items()}
    expected = (
        [None] * len(nccl_algo.FINE)
        + [f"leaves {without} without an algorithm" for _, without in nccl_algo.WITHOUT]
        + [what for _, what in nccl_algo.REFUSED]
    )
    for value, problem, said in zip(VALUES, lint["problems"], expected, strict=True):
        found = state(environ(healthy(8), NCCL_ALGO=value), "nccl-algo")
        assert (problem is not None, found == State.ERROR) == (said is not None,) * 2, value
        assert said is None or said in str(problem)


def test_of_expandable_segments(lint: dict[str, list[object]]) -> None:
    assert {True, False} == set(lint["segments"])
    for (ranks, linked, v2, graphs), warned in zip(MACHINES, lint["segments"], strict=True):
        facts = server(pairs(healthy(ranks), nvlink=linked), cuda_graph=graphs)
        variables = {
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
            "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": str(int(v2)),
        }
        found = state(environ(facts, **variables), "expandable-segments")
        assert (found == State.ERROR) == warned, (ranks, linked, v2, graphs)
