"""The driver's answers, through the real nvidia-ml-py and a library that stands for the driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

READ = """
import json
from dataclasses import asdict
from sglang_overlay.doctor.nvml import read_nvml
print(json.dumps([[asdict(x) for x in part] if isinstance(part, tuple) else asdict(part)
                  for part in read_nvml()]))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a libnvidia-ml.so.1 of today, and one that lacks a newer function."""
    flags = {"new": (), "old": ("-DOLD",)}
    return {name: build(tmp_path_factory.mktemp(name), *flags[name]) for name in flags}


def build(folder: Path, *flags: str) -> Path:
    """``folder``, with a driver library of the machine that the variable MACHINE names."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to build the library that stands for the driver")
    source, library = Path(__file__).with_name("nvml.c"), folder / "libnvidia-ml.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", *flags, "-o", library, source], check=True)
    return folder


def read(folder: Path, machine: str) -> list[object]:
    import json

    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder), "MACHINE": machine},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answer: list[object] = json.loads(done.stdout)
    return answer


def test_two_cards_behind_a_switch(libraries: dict[str, Path]) -> None:
    driver, gpus, pairs = read(libraries["new"], "two")
    assert driver == {"version": "580.95.05", "cuda": [13, 1], "lost": []}
    assert pairs == [{"a": 0, "b": 1, "level": "PIX", "nvlink": False, "peer": "ok"}]
    assert isinstance(gpus, list)
    assert gpus[1] == {
        "index": 1,
        "name": "NVIDIA RTX PRO 6000",
        "bus": "0000:c2:00.0",
        "capability": [12, 0],
        "memory": 96 << 30,
        "used": 2 << 30,
        "uuid": "GPU-00000001",
        "bar1": 128 << 30,
        "width": 8,
        "width_max": 16,
        "speed": 1,
        "speed_max": 5,
        "busy": 41,
        "compute_mode": "default",
        "mig": False,
        "fabric": "not supported",
    }


def test_a_card_that_is_lost_hides_no_other(libraries: dict[str, Path]) -> None:
    driver, gpus, pairs = read(libraries["new"], "lost")
    assert isinstance(driver, dict) and isinstance(gpus, list)
    assert [lost.partition(":")[0] for lost in driver["lost"]] == ["card 0"]
    assert [gpu["index"] for gpu in gpus] == [1] and pairs == []


def test_eight_cards_on_two_numa_nodes(libraries: dict[str, Path]) -> None:
    _, gpus, pairs = read(libraries["new"], "eight")
    assert isinstance(gpus, list) and isinstance(pairs, list)
    assert [gpu["width"] for gpu in gpus] == [16] * 7 + [4]
    levels = {(pair["a"], pair["b"]): pair["level"] for pair in pairs}
    assert len(levels) == 28
    assert all(level == ("NODE" if a // 4 == b // 4 else "SYS") for (a, b), level in levels.items())
    assert not any(pair["nvlink"] for pair in pairs)


def test_cards_that_are_linked_in_pairs(libraries: dict[str, Path]) -> None:
    _, _, pairs = read(libraries["new"], "pairs")
    assert isinstance(pairs, list)
    assert [(pair["a"], pair["b"]) for pair in pairs if pair["nvlink"]] == [(0, 1), (2, 3)]
    assert [pair["level"] for pair in pairs] == ["NODE", *["SYS"] * 4, "NODE"]


def test_cards_with_an_nvlink(libraries: dict[str, Path]) -> None:
    _, gpus, pairs = read(libraries["new"], "nvlink")
    assert pairs == [{"a": 0, "b": 1, "level": "SYS", "nvlink": True, "peer": "ok"}]
    assert isinstance(gpus, list)
    assert [gpu["fabric"] for gpu in gpus] == ["completed"] * 2


def test_cards_that_are_split_and_closed(libraries: dict[str, Path]) -> None:
    _, gpus, pairs = read(libraries["new"], "mig")
    assert isinstance(gpus, list) and isinstance(pairs, list)
    assert (gpus[0]["mig"], gpus[0]["compute_mode"]) == (True, "exclusive process")
    assert pairs[0]["peer"] == "disabled by the driver's registry key"


def test_what_a_driver_does_not_support_is_unknown_and_the_rest_is_read(
    libraries: dict[str, Path],
) -> None:
    _, gpus, pairs = read(libraries["old"], "old")
    assert isinstance(gpus, list)
    assert gpus[0]["bar1"] == gpus[0]["busy"] == {"why": "NVML: Not Supported"}
    assert (gpus[0]["width"], gpus[0]["mig"], gpus[0]["fabric"]) == (8, False, "not supported")
    unsupported = {"why": "NVML: Not Supported"}
    assert pairs == [
        {"a": 0, "b": 1, "level": unsupported, "nvlink": unsupported, "peer": unsupported}
    ]


def test_a_driver_that_cannot_start_says_why(libraries: dict[str, Path], tmp_path: Path) -> None:
    for folder in (libraries["new"], tmp_path):
        for part in read(folder, "broken"):
            assert isinstance(part, dict)
            assert "no NVIDIA driver here" in part["why"]
