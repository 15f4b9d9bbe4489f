"""Times apply and status against git am, side by side. usage: make bench-apply

Prints medians of nine alternating runs on the pinned tree, in seconds of wall time and
MB of peak memory, each with the interpreter's own start apart; then how apply grows
with a synthetic series. Nothing here is a test: a slow machine makes no failure.
"""

import io
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from sglang_overlay.cli import main as command
from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.series import load_series
from sglang_overlay.patchset.source import fetch
from tests.conftest import IMPORT, git
from tests.patchset.workshop import Workshop, numbered

_RUNS = 9


def timed(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def overlay(*args: object) -> None:
    subprocess.run(
        [sys.executable, "-m", "sglang_overlay", *map(str, args)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


def on_the_pinned_tree(folder: Path) -> None:
    pin = load_pins(patches_folder())[-1]
    series = load_series(pin)
    place = folder / pin.name
    fetch(pin, place, lambda what, done, total: None)
    mails = [pin.folder / f"{name}.patch" for name in series.names]
    sides: dict[str, list[float]] = {"git am": [], "apply --commit": [], "apply": [], "status": []}
    start = statistics.median(
        timed(lambda: subprocess.run([sys.executable, "-c", "pass"], check=True))
        for _ in range(_RUNS)
    )
    for _ in range(_RUNS):
        sides["git am"].append(timed(lambda: git(place, *IMPORT, *map(str, mails))))
        git(place, "reset", "-q", "--hard", pin.name)
        sides["apply --commit"].append(
            timed(lambda: overlay("apply", "--commit", "--sglang-dir", place))
        )
        git(place, "reset", "-q", "--hard", pin.name)
        sides["apply"].append(timed(lambda: overlay("apply", "--sglang-dir", place)))
        sides["status"].append(timed(lambda: overlay("status", "--sglang-dir", place)))
        overlay("reverse", "--sglang-dir", place)
    git_am = statistics.median(sides["git am"])
    print(f"pinned tree {pin.name}, {len(mails)} patches, medians of {_RUNS}, seconds")
    print(f"{'':16}{'all':>8}{'less interpreter start':>24}{'ratio to git am':>17}")
    for name, values in sides.items():
        median = statistics.median(values)
        net = median - (0 if name == "git am" else start)
        print(f"{name:16}{median:8.3f}{net:24.3f}{median / git_am:17.2f}")
    print(f"peak memory of one command: {peak_memory('status', '--sglang-dir', place):.0f} MB")


def peak_memory(*args: object) -> float:
    overlay(*args)
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


def synthetic(folder: Path, patches: int) -> None:
    """``patches`` patches over twice as many files; each changes two, one of them shared."""
    names = [f"p{n}" for n in range(patches)]
    files = [f"python/sglang/f{n}.py" for n in range(2 * patches)]
    shop = Workshop(folder / str(patches), {path: numbered(200) for path in files})
    for n, name in enumerate(names):
        own, shared = files[2 * n], files[2 * (n // 2) + 1]
        line = {f"l{50 + 100 * (n % 2)}": f"changed by {name}"}
        shop.patch(name, {own: numbered(200, l20=name), shared: numbered(200, **line)})
    with redirect_stdout(io.StringIO()):
        shop.seal()
    place = shop.tree("checkout")
    given: Sequence[str] = ["--sglang-dir", str(place), "--patches", str(shop.folder.parent)]
    with redirect_stdout(io.StringIO()):
        apply = timed(lambda: command(["apply", *given]))
        status = timed(lambda: command(["status", *given]))
    git(place, "clean", "-q", "-f", "-d")
    git(place, "reset", "-q", "--hard")
    mails = [str(shop.folder / f"{name}.patch") for name in names]
    git_am = timed(lambda: git(place, *IMPORT, *mails))
    print(f"{patches:8}{len(files):8}{apply:10.3f}{status:10.3f}{git_am:10.3f}", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        on_the_pinned_tree(folder)
        print("synthetic series, seconds, in one process")
        print(f"{'patches':>8}{'files':>8}{'apply':>10}{'status':>10}{'git am':>10}", flush=True)
        os.environ["SGLANG_OVERLAY_CACHE"] = str(folder / "cache")
        for count in (25, 50, 100, 200):
            synthetic(folder, count)


if __name__ == "__main__":
    main()
