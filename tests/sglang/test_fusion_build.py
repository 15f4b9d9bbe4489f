"""FlashInfer's fused all-reduce is there for SM120: compiled by nvcc with FlashInfer's own flags.

Of the translation unit, the kernels that the patch flashinfer-fusion-sm120 launches. Where
there is no nvcc the test is skipped and says so; no GPU is needed.
"""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.patchset.pin import Pin

from ..pins import each_pin_with
from .conftest import Python

COMMAND = """
import json
from flashinfer.jit.comm import gen_trtllm_comm_module
commands = gen_trtllm_comm_module().get_compile_commands()
print(json.dumps(next(c for c in commands if c["file"].endswith("trtllm_allreduce_fusion.cu"))))
"""
#: One-shot, float32 accumulation, completion at the end: what SM120 launches.
SOURCE = """
#include "flashinfer/comm/trtllm_allreduce_fusion.cuh"
namespace flashinfer::trtllm_allreduce_fusion {
#define KERNEL(P, T, N) \\
  template __global__ void allreduce_fusion_kernel_oneshot_lamport< \\
      AllReduceFusionPattern::P, T, N, true, true>(AllReduceFusionParams<T>);
#define WORLDS(P, T) KERNEL(P, T, 2) KERNEL(P, T, 4) KERNEL(P, T, 8)
WORLDS(kARResidualRMSNorm, __nv_bfloat16) WORLDS(kARResidualRMSNorm, half)
WORLDS(kAllReduce, __nv_bfloat16) WORLDS(kAllReduce, half)
}
"""


@each_pin_with("flashinfer-fusion-sm120")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here: not compiled for SM120")
def test_nvcc_builds_the_kernels_for_sm120(
    pin: Pin, python: Python, stock: Path, tmp_path: Path
) -> None:
    asked = python(stock, "-c", COMMAND, FLASHINFER_CUDA_ARCH_LIST="12.0f", HOME=str(tmp_path))
    assert asked.returncode == 0, asked.stderr[-2000:]
    found = json.loads(asked.stdout.splitlines()[-1])
    assert "arch=compute_120f,code=sm_120f" in found["command"]
    source, target = tmp_path / "kernels.cu", tmp_path / "kernels.o"
    source.write_text(SOURCE)
    command = [str(source) if a == found["file"] else a for a in shlex.split(found["command"])]
    command[command.index("-o") + 1] = str(target)
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-3000:]
    packages = sglang_python(pin.version).parents[1] / "lib/python3.11/site-packages"
    look = [packages / "triton/backends/nvidia/bin/cuobjdump", "-res-usage", target]
    printed = subprocess.run(look, capture_output=True, text=True, check=True).stdout
    assert "arch = sm_120" in printed
    kernels = re.findall(r"Function (\S*oneshot_lamport\S*):", printed)
    assert len(kernels) == len(set(kernels)) == 12
    # Pattern 1 is kARResidualRMSNorm, 0 kAllReduce; then the type, the ranks, two times true.
    for pattern in (0, 1):
        for ranks in (2, 4, 8):
            name = re.compile(rf"PatternE{pattern}E.*Li{ranks}ELb1ELb1E")
            assert sum(bool(name.search(kernel)) for kernel in kernels) == 2, kernels
