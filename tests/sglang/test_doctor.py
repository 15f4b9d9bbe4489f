"""What the doctor runs in the server's own environment: torch, copies, and what is installed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.doctor import children
from sglang_overlay.doctor.facts import Python, Torch
from sglang_overlay.doctor.peers import supervise
from sglang_overlay.doctor.python import read_python
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series

from ..pins import each_pin

PAIRS = [(0, 1), (1, 0)]


def command(code: str) -> list[str]:
    """The child on the CPU, where a "card" is the CPU itself; copies of 1 MiB."""
    return [str(sglang_python()), "-W", "error", "-c", code, "cpu", str(2**20)]


def test_copies_are_made_timed_and_compared() -> None:
    found = supervise(command(children.COPIES), PAIRS)
    assert [(copy.source, copy.target, copy.result) for copy in found] == [
        (0, 1, "right"),
        (1, 0, "right"),
    ], found
    for copy in found:
        assert copy.wrong_bytes == 0
        assert copy.latency_us and 0 < copy.latency_us < 10_000
        assert copy.bandwidth and copy.bandwidth > 0.1


@pytest.mark.parametrize(
    ("copying", "result", "wrong"),
    [
        ("pass", "wrong", 2**20),  # the write is dropped: no byte was right before
        ("target[:-3].copy_(source[:-3])", "wrong", 3),
        ("raise RuntimeError('CUDA error: peer access is not supported')", "failed", 0),
    ],
)
def test_a_copy_that_does_not_arrive_is_not_taken_for_right(
    copying: str, result: str, wrong: int
) -> None:
    line = "    target.copy_(source)\n"
    assert children.COPIES.count(line) == 1
    broken = children.COPIES.replace(line, f"    {copying}\n")
    for copy in supervise(command(broken), PAIRS):
        assert (copy.result, copy.wrong_bytes) == (result, wrong), copy


@each_pin
def test_the_environment_with_the_real_sglang(pin: Pin, series: Series, patched: Path) -> None:
    stock = read_python(str(sglang_python(pin.version)), None)
    assert isinstance(stock, Python)
    assert stock.versions["sglang"] == pin.version
    assert stock.wanted["torch"] == stock.versions["torch"]
    assert stock.wanted["nvidia-nccl-cu13"] == stock.versions["nvidia-nccl-cu13"]
    assert isinstance(stock.torch, Torch)
    assert stock.torch.nccl == stock.versions["nvidia-nccl-cu13"]
    assert stock.torch.cuda.startswith("13.")
    assert stock.torch.problem or stock.torch.devices
    assert isinstance(stock.nccl_names, frozenset)
    assert {"NCCL_ALGO", "NCCL_P2P_LEVEL", "NCCL_SOCKET_IFNAME"} <= stock.nccl_names
    assert stock.patches == ()
    tree = read_python(str(sglang_python(pin.version)), patched)
    assert isinstance(tree, Python)
    assert tree.patches == series.names


@each_pin
def test_the_command_looks_at_the_environment_that_it_is_told(pin: Pin) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sglang_overlay", "doctor", "--json", "--deep"),
            *("--python", sglang_python(pin.version), "--", "--attention-backend", "trtllm_mla"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    found = {f["id"]: f for f in json.loads(done.stdout)["findings"]}
    assert found["versions"]["state"] == "ok"
    assert found["nccl-library"]["state"] == "ok"
    assert found["patches"]["title"] == "no patch is active"
    assert found["eagle-graphs"]["title"] == "trtllm_mla: every pass in a graph"
