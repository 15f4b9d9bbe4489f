"""Which variables torch reads when it makes an NCCL process group: those that can come too late.

The torch is the real one of each pin. It refuses to make the group without a GPU, so a library
loaded before says that there is one, and writes down which variables are asked for.
"""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ..pins import each_pin_with
from .conftest import Python

WATCH = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }

char *getenv(const char *name)
{
    static char *(*real)(const char *);
    if (!real)
        real = (char *(*)(const char *))dlsym(RTLD_NEXT, "getenv");
    dprintf(2, "READ %s\n", name);
    return real(name);
}
"""

GROUPS = """
import os
from torch.distributed import HashStore, PrefixStore, ProcessGroupNCCL
for number in range(2):
    os.write(2, b"GROUP\\n")
    store = PrefixStore(str(number), HashStore())
    group = ProcessGroupNCCL(store, 0, 1, ProcessGroupNCCL.Options())
    os.write(2, b"MADE\\n")
os._exit(0)  # a group is not meant to be torn down without a GPU
"""


@each_pin_with("worker-env")
def test_torch_reads_for_each_group_what_is_judged_too_late(
    python: Python, patched: Path, tmp_path: Path
) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc here to build the library that stands for the GPU")
    (tmp_path / "watch.c").write_text(WATCH)
    library = tmp_path / "watch.so"
    command = ["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "watch.c", "-ldl"]
    subprocess.run(command, check=True)
    done = python(patched, "-c", GROUPS, LD_PRELOAD=str(library))
    assert done.returncode == 0, done.stderr[-3000:]
    groups = re.findall(r"^GROUP\n(.*?)^MADE\n", done.stderr, re.MULTILINE | re.DOTALL)
    first, second = [set(re.findall(r"^READ (TORCH_NCCL_\w+)$", g, re.MULTILINE)) for g in groups]
    judged = names_judged(patched / "python/sglang/srt/utils/worker_env.py")
    assert first == judged
    assert judged - second == {"TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"}  # the first alone


def names_judged(file: Path) -> set[str]:
    """The names that ``too_late`` of the patch worker-env has for NCCL process groups."""
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name("_READ_BY_NCCL_GROUPS")], value=value):
                return set(ast.literal_eval(value))
    raise AssertionError("no _READ_BY_NCCL_GROUPS")
