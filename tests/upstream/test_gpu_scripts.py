"""What the scripts of ``ci/gpu`` decide without a GPU: the steps and worlds of ``multi.sh`` (its
commands are stand-ins that write down how they were called), and when a comparison fails."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

GPU = Path(__file__).resolve().parents[2] / "ci/gpu"
COMMAND = """\
#!/bin/sh
[ "$1" = -c ] && exec echo $GPUS
echo "${0##*/} $*" >>"$CALLS"
case "$*" in $FAIL) echo "$SAYS" && exit $CODE ;; esac
"""


def multi(tmp_path: Path, *steps: str, **given: str) -> tuple[int, list[str], list[str]]:
    """Exit code, calls, and the steps that it says it left out."""
    commands, calls = tmp_path / "bin", tmp_path / "calls"
    commands.mkdir()
    for name in ("python3", "torchrun", "sglang-overlay"):
        (commands / name).write_text(COMMAND)
        (commands / name).chmod(0o755)
    calls.touch()
    settings = {"CALLS": str(calls), "FAIL": "", "CODE": "0", "SAYS": ""} | given
    done = subprocess.run(
        [GPU / "multi.sh", tmp_path / "out", *steps],
        env=os.environ | settings | {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    left = [line.split()[1].rstrip(":") for line in done.stdout.splitlines() if "left out" in line]
    return done.returncode, calls.read_text().splitlines(), left


@pytest.mark.parametrize(
    ("gpus", "worlds", "left"),
    [
        ("0", [], ["numbers-2", "one-gpu-2", "engine-fail-2"]),
        ("1", ["one-gpu 2"], ["numbers-2", "engine-fail-2"]),
        ("2", ["2", "one-gpu 2", "engine 2"], []),
        (
            "6",
            ["2", "one-gpu 2", "engine 2"],
            ["numbers-6", "one-gpu-6", "engine-fail-6", "doctor-2"],
        ),
        ("8", ["8", "one-gpu 8", "engine 8", "2", "one-gpu 2", "engine 2"], ["doctor-2"]),
    ],
)
def test_the_worlds_of_multi(tmp_path: Path, gpus: str, worlds: list[str], left: list[str]) -> None:
    steps = ("doctor", "numbers", "one-gpu", "engine-fail")
    code, calls, left_out = multi(tmp_path, *steps, GPUS=gpus)
    assert (code, left_out) == (0, left)
    assert calls[0] == "sglang-overlay doctor --deep"
    expected = []
    for world in worlds:
        what, _, ranks = world.rpartition(" ")
        torchrun = f"torchrun --nproc-per-node {ranks}"
        one_gpu = f"{torchrun} fused_allreduce.py --one-gpu"
        expected += {
            "": [f"{torchrun} fused_allreduce.py --check"],
            "one-gpu": [
                f"{one_gpu} --hidden 2048 7168",
                f"{one_gpu} --check",
                f"{one_gpu} --fail self-test",
                f"{torchrun} measured_choice.py --one-gpu",
            ],
            "engine": [
                f"python3 eagle_graphs.py --out {tmp_path}/out/engines-{ranks} --tp {ranks} "
                f"--tokens 256 --timeout 540 tp-fail-{stage} --equal tp tp-fail-{stage}"
                for stage in ("self-test", "build", "preflight")
            ],
        }[what]
    assert calls[1:] == expected


@pytest.mark.parametrize(
    ("fail", "code", "exit_code"),
    [
        ("doctor*", "1", 0),  # it found something
        ("doctor*", "1 Traceback (most recent call last):", 1),
        ("doctor*", "4", 1),
        ("*fused_allreduce.py*", "1", 1),
        ("*sglang_overlay.measure.collectives*", "4", 1),
        ("eagle_graphs.py*", "1", 1),
        ("pinned_table.py*", "1", 1),
        ("env *", "1", 0),  # ranks differ
        ("env *", "1 Traceback (most recent call last):", 1),
        ("env *", "2", 1),
        ("sweep *", "4", 1),
    ],
)
def test_multi_fails_with_any_of_its_steps(
    tmp_path: Path, fail: str, code: str, exit_code: int
) -> None:
    logs = [
        tmp_path / f"out/engines-2/{name}/log"
        for name in ("tp-measured", "tp-eagle3-measured", "tp-eagle3-pcie-ipc")
    ]
    for log in logs:
        log.parent.mkdir(parents=True)
        log.write_text("AllReduce by measurement\n")
    code, _, says = code.partition(" ")
    found, calls, left_out = multi(tmp_path, GPUS="2", FAIL=fail, CODE=code, SAYS=says)
    assert (found, left_out) == (exit_code, [])
    assert len(set(calls)) == len(calls) > 20


@pytest.mark.parametrize("spoil", [None, "ids", "verify"])
def test_a_comparison_that_wants_the_same_fails_where_a_token_or_a_pass_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spoil: str
) -> None:
    monkeypatch.setattr(sys, "path", [str(GPU), *sys.path])
    import comparisons

    failed: list[str] = []
    monkeypatch.setattr(comparisons, "FAILED", failed)
    run = {"bs": 2, "ids": [[1, 2, 3], [4, 5, 6]], "verify": [2, 3]}
    other = json.loads(json.dumps(run))
    if spoil == "ids":
        other["ids"][1][2] = 7
    elif spoil:
        other["verify"][0] = 3
    for name, one in (("a", run), ("b", other)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "runs.json").write_text(json.dumps([one]))
    for wanted in (False, True):
        comparisons.equal("a", "b", SimpleNamespace(out=tmp_path), wanted=wanted)
        assert failed == (["a and b"] if wanted and spoil else [])
    reported = capsys.readouterr().out.splitlines()[0]
    assert json.loads(reported.removeprefix("RESULT "))["equal"] == (
        "1 of 2" if spoil == "ids" else "2 of 2"
    )
