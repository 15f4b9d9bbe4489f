"""sglang_overlay.measure.collectives: its arithmetic, and its votes between real processes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.measure import collectives
from sglang_overlay.measure.ensemble import Cell, Plan, Table

MODULE = "sglang_overlay.measure.collectives"
REPOSITORY = Path(__file__).parents[2]

#: In place of the measuring: where a candidate's process has FlashInfer build.
BUILT = f"""
import subprocess, sys
from types import SimpleNamespace
from {MODULE.rpartition(".")[0]} import collectives

def measure(*args):
    look = "import flashinfer.jit.env as jit; print(jit.FLASHINFER_JIT_DIR)"
    sys.exit(subprocess.call([sys.executable, "-c", look]))

collectives.measure = measure
collectives._run(None, SimpleNamespace(rank=0), None)
"""
#: Without a GPU no communicator opens; SGLang's own look at peer access runs.
CUSTOM = """
from types import SimpleNamespace
from unittest import mock
import torch.distributed
from sglang.srt.distributed.device_communicators import custom_all_reduce, custom_all_reduce_utils
from sglang_overlay.measure.candidates import CustomAllReduce, Seat

def dispatch(group, device):
    print("opened, peers:", custom_all_reduce_utils.can_p2p(0, 8))
    return lambda group, device: SimpleNamespace(disabled=False)

with mock.patch.object(custom_all_reduce, "dispatch_custom_allreduce", dispatch):
    CustomAllReduce(Seat(0, 8, "cuda:0", 64, "bfloat16", 1)).open()
"""


def run(*args: object, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """SGLang's python, with this repository to import from."""
    return subprocess.run(
        [sglang_python(), *map(str, args)],
        cwd=REPOSITORY,
        env={**(environ or os.environ), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def measured(folder: Path, ranks: int, *args: str) -> list[dict[str, Any]]:
    """The results, of which every rank has the same."""
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", ranks, "-m")
    done = run(*torchrun, "tests.sglang.collectives_rank", folder, *args)
    assert done.returncode == 0, done.stderr[-4000:]
    said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert said == [said[0]] * ranks
    assert said[0]["still running"] == 0
    results: list[dict[str, Any]] = said[0]["results"]
    for one in results:
        assert one["candidate"] in said[0]["told"][0]
        if "left_out" in one:
            assert f"{one['candidate']}: left out: {one['left_out']}" in said[0]["told"]
    return results


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return measured(tmp_path_factory.mktemp("two"), 2, "norm")


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        ("MissingOnOneRank", "rank 1: not installed"),
        ("FailsOnOneRank", "rank 1: RuntimeError: no peer access"),
        ("DiesOnOneRank", "rank 1: its process died (exit code 7)"),
        ("HangsOnOneRank", "no answer to rehearse in 10 s"),
        ("WrongOnOneRank", "wrong at 1 rows, eager: 0.6"),
        ("LeavesAHole", "wrong at 1 rows, eager: inf"),
    ],
)
def test_a_candidate_that_fails_on_one_rank_is_left_out_everywhere_with_the_reason(
    two_ranks: list[dict[str, Any]], candidate: str, reason: str
) -> None:
    [found] = [value for value in two_ranks if value["candidate"] == candidate]
    assert found["left_out"].startswith(reason)


def test_the_others_go_on_and_a_refused_row_count_is_a_hole_in_the_table(
    two_ranks: list[dict[str, Any]],
) -> None:
    rows = {(value["candidate"], value.get("rows")): value for value in two_ranks}
    for candidate, count in [("Sound", 1), ("Sound", 2), ("Sound", 3), ("Picky", 1), ("Picky", 2)]:
        assert rows[candidate, count]["eager_us"] > 0
        assert 0 < rows[candidate, count]["worst_error"] < 0.01  # a bfloat16 has 8 bits
    assert rows["Picky", 3]["reason"] == "two rows at most"
    assert "eager_us" not in rows["Picky", 3]


def test_the_plain_boundary_between_four_ranks_is_exact_to_the_dtype(tmp_path: Path) -> None:
    results = measured(tmp_path, 4, "plain", "Sound")
    assert [value["rows"] for value in results] == [1, 2, 3]
    assert all(0 < value["worst_error"] < 0.03 for value in results)


TABLE = Table(
    Plan((4, 8), 7168, "bfloat16", modes=("graph", "eager"), boundaries=122),
    8,
    (
        Cell("fused", 4, {"graph": 10.0, "eager": 50.0}, 0.002, launches=1.0),
        Cell("nccl", 4, {"graph": 25.0, "eager": 40.0}, 0.003, launches=2.0),
        Cell("fused", 8, {}, reason="too many rows"),
        Cell("nccl", 8, {"graph": 30.0, "eager": 45.0}, 0.003, launches=2.05),
    ),
    {"custom": "not here"},
)


def test_bus_bandwidth_and_the_verify_pass_are_those_of_the_definition() -> None:
    assert TABLE.bus_gb_s(4, 10.0) == pytest.approx(2 * 7 / 8 * 4 * 7168 * 2 / 10e-6 / 1e9)
    assert TABLE.verify_ms(205.0) == pytest.approx(25.01)  # the machine of README: about 25 ms


def test_text_and_results_name_the_fastest_the_holes_and_what_is_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    collectives._print_text({"gpus": ["X"]}, TABLE)
    out = capsys.readouterr().out
    grids = [block.splitlines() for block in out.split("\n\n")[:4]]
    assert [grid[0].partition(",")[0] for grid in grids[:2]] == ["microseconds a boundary"] * 2
    assert [line.split() for line in grids[0][1:]] == [
        ["rows", "fused", "nccl", "fastest"],
        ["4", "10.00", "25.00", "fused"],
        ["8", "-", "30.00", "nccl"],
    ]
    assert grids[1][2].split() == ["4", "50.00", "40.00", "nccl"]
    assert grids[2][2].split() == ["4", "10.04", "4.01", "fused"]
    assert grids[3][2].split() == ["4", "1.22", "3.05", "fused"]
    assert "launches a boundary: fused: 1\nlaunches a boundary: nccl: 2, 2.05\n" in out
    assert "left out: custom: not here" in out
    lines = [json.loads(line[7:]) for line in out.splitlines() if line.startswith("RESULT ")]
    assert lines[0] == {"name": "machine", "gpus": ["X"]}
    assert (lines[1]["graph_us"], lines[1]["launches"]) == (10.0, 1.0)
    assert lines[1]["graph_verify_ms"] == 1.22
    assert lines[3]["reason"] == "too many rows"
    assert lines[5]["left_out"] == "not here"


def test_what_a_server_has_built_is_not_built_again(tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if "FLASHINFER" not in name}
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = run("-c", BUILT, environ=inherited | alone | {"SGLANG_CACHE_DIR": str(tmp_path)})
    assert done.stdout.startswith(f"{tmp_path}/.cache/flashinfer/"), done.stderr[-2000:]


def test_custom_takes_peer_access_for_granted_as_a_server_does() -> None:
    done = run("-c", CUSTOM)
    assert done.stdout == "opened, peers: True\n", done.stderr[-2000:]


def test_without_cuda_there_is_one_message_and_exit_4() -> None:
    done = run("-m", MODULE)
    assert done.returncode == 4
    assert done.stdout == ""
    assert done.stderr.count("no CUDA device") == 1
    assert "torchrun --nproc-per-node N -m " + MODULE in done.stderr
    started = run("-m", "torch.distributed.run", "--nproc-per-node", 2, "-m", MODULE)
    assert started.stderr.count("no CUDA device") == 1
    assert "exitcode  : 4" in started.stderr


@pytest.mark.parametrize(
    ("environment", "args", "message"),
    [
        ({}, [], "one process is needed for each GPU"),
        ({"WORLD_SIZE": "4"}, [], "4 ranks on 2 GPUs"),
        ({"WORLD_SIZE": "1"}, [], "1 ranks on 2 GPUs"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, [], "torchrun started several"),
        ({"WORLD_SIZE": "2"}, ["--rows", "1,x"], "--rows 1,x: not numbers"),
        ({"WORLD_SIZE": "2"}, ["--rows", "0"], "have to be positive"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    environment: dict[str, str], args: list[str], message: str
) -> None:
    if "WORLD_SIZE" in environment:
        environment = {
            "RANK": "0",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": environment["WORLD_SIZE"],
            **environment,
        }
    # A torch that sees two GPUs: nothing is asked of them before the refusal.
    program = (
        "import os, sys, types; cuda = types.SimpleNamespace(is_available=lambda: True, "
        "device_count=lambda: 2); sys.modules['torch'] = types.SimpleNamespace(cuda=cuda); "
        f"os.environ.update({environment}); from {MODULE} import main; sys.exit(main({args}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
