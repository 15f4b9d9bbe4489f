"""What the hook costs: each start of Python, and an import of SGLang."""

import resource
import statistics
import subprocess

from .conftest import Environment

# Upper bound: what the overlay does itself, its blobs at import counted twice.
SHARE = """
import time
begin = time.process_time()
from sglang_overlay.runtime import attest, gate
spent = time.process_time() - begin
def timed(function):
    def call(*args, **kwargs):
        global spent
        start = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent += time.process_time() - start
    return call
gate.settle, gate.patched_spec = timed(gate.settle), timed(gate.patched_spec)
attest.blob_of = timed(attest.blob_of)
import sglang.srt.managers.scheduler
print(spent / (time.process_time() - begin))
"""


def spent() -> float:
    """Seconds of processor time of all children: what a busy machine does not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_process_that_never_imports_sglang_starts_within_5_ms(environment: Environment) -> None:
    environment.run("-m", "compileall", "-q", environment.files.parent)  # as pip leaves it
    hook = environment.packages / "sglang_overlay.pth"
    away = hook.with_suffix(".away")
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(62):  # two to warm up, then 30 side by side
        if run % 2:
            hook.rename(away)
        try:
            start = spent()
            subprocess.run([environment.python, "-c", "pass"], check=True)
            times[run % 2].append(spent() - start)
        finally:
            if run % 2:
                away.rename(hook)
    with_hook, without = (statistics.median(values[1:]) for values in times)
    assert with_hook - without < 5e-3


def test_importing_sglang_spends_less_than_one_percent_in_the_hook(
    environment: Environment,
) -> None:
    assert float(environment.code(SHARE, "-W", "ignore").splitlines()[-1]) < 0.01
