"""What the overlay's hook costs. usage: python -m ci.bench_overlay DIST.whl

Medians of alternating runs in one virtual environment, with the hook and with its .pth file
taken away: the start of a Python that never imports sglang (30 runs), and the import of
SGLang's scheduler (5 runs), which loads most of what is patched.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.overlay.conftest import Environment, make_environment


def seconds(environment: Environment, code: str) -> float:
    start = time.perf_counter()
    subprocess.run([environment.python, "-W", "ignore", "-c", code], check=True, stderr=-3)
    return time.perf_counter() - start


def compare(environment: Environment, what: str, code: str, runs: int) -> None:
    hook = environment.packages / "sglang_overlay.pth"
    away = hook.with_suffix(".away")
    with_hook, without = [], []
    seconds(environment, code)
    for _ in range(runs):
        with_hook.append(seconds(environment, code))
        hook.rename(away)
        without.append(seconds(environment, code))
        away.rename(hook)
    a, b = statistics.median(with_hook) * 1e3, statistics.median(without) * 1e3
    print(f"{what}: {a:.1f} ms with the hook, {b:.1f} ms without, {a - b:+.1f} ms, {a / b:.4f}")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        environment = make_environment(Path(folder, "env"), Path(sys.argv[1]))
        subprocess.run(
            [environment.python, "-m", "compileall", "-q", environment.packages], check=False
        )
        compare(environment, "python that never imports sglang", "pass", 30)
        compare(environment, "import of the scheduler", "import sglang.srt.managers.scheduler", 5)


if __name__ == "__main__":
    main()
