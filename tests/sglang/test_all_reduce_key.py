"""What ``allreduce-fusion-measured`` keeps a table under, read through the real nvidia-ml-py from a
library that stands for the driver."""

import json
from pathlib import Path

import pytest

from ..doctor.test_nvml import build
from ..pins import each_pin_with
from .conftest import Python

FACTS = """
import json, torch
from types import SimpleNamespace
from sglang.srt.layers import allreduce_measured
torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid="00000000")
print(json.dumps(allreduce_measured._nvml_facts(0)))
"""


@each_pin_with("allreduce-fusion-measured")
@pytest.mark.parametrize(
    ("machine", "links", "width"),
    [
        ("two", "X PIX", 8),
        ("nvlink", "X NVLINK", 8),
        ("mig", "X PIX-no-P2P", 8),
        ("eight", "X NODE NODE NODE SYS SYS SYS SYS", 16),
    ],
)
def test_driver_and_links(
    python: Python, patched: Path, tmp_path: Path, machine: str, links: str, width: int
) -> None:
    driver = {"LD_LIBRARY_PATH": str(build(tmp_path)), "MACHINE": machine}
    done = python(patched, "-c", FACTS, **driver)
    assert done.returncode == 0, done.stderr[-3000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts == {"driver": "580.95.05", "links": links, "pcie": [5, width]}


@each_pin_with("allreduce-fusion-measured")
def test_a_driver_that_does_not_tell(python: Python, patched: Path, tmp_path: Path) -> None:
    done = python(patched, "-c", FACTS, LD_LIBRARY_PATH=str(build(tmp_path)), MACHINE="old")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {"nvml": "Not Supported"}
