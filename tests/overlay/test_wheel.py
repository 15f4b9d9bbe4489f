"""What is in the wheel, and that it is the same each time."""

import hashlib
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

from ci.build_wheel import main as build_wheel
from sglang_overlay import __version__
from sglang_overlay.cli import main
from sglang_overlay.patchset.series import load_series

from .conftest import PIN, Environment

ROOT = Path(__file__).parents[2]
INFO = f"sglang_overlay-{__version__}+sglang.{PIN.version}.dist-info"


def test_the_wheel_holds_exactly_the_package_the_patches_and_the_patched_modules(
    wheel: Path,
) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "sglang_overlay"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    series = load_series(PIN)
    modules = [path.removeprefix("python/") for path in series.weaves if path.startswith("python/")]
    pin = [path.name for path in PIN.folder.iterdir()]
    files = "sglang_overlay/_files"
    expected = {
        *tracked.stdout.split(),
        *(f"{files}/modules/{path}" for path in modules),
        *(f"{files}/patches/{PIN.name}/{name}" for name in pin),
        f"{files}/manifest.json",
        "sglang_overlay.pth",
        "sglang_overlay_hook.start",
        *(f"{INFO}/{n}" for n in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
        f"{INFO}/licenses/LICENSE",
    }
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected
        metadata = Parser().parsestr(archive.read(f"{INFO}/METADATA").decode())
    assert metadata["Version"] == f"{__version__}+sglang.{PIN.version}"
    assert {f"sglang=={PIN.version}", "nvidia-ml-py>=12"} <= {
        *metadata.get_all("Requires-Dist", [])
    }
    assert metadata.get_all("Provides-Extra") == ["report"]


def test_two_builds_are_byte_identical(wheel: Path, tmp_path: Path) -> None:
    build_wheel(["--out", str(tmp_path)])
    again = tmp_path / wheel.name
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (wheel, again)]
    assert digests[0] == digests[1]
    assert (tmp_path / f"sglang_overlay-{__version__}.tar.gz").exists()


def test_the_patches_travel_inside_and_apply_from_there(
    environment: Environment, tmp_path: Path
) -> None:
    command = environment.root / "bin/sglang-overlay"
    for args in (["fetch"], ["apply", "--sglang-dir"], ["verify", "--sglang-dir"]):
        subprocess.run([command, *args, tmp_path / "tree"], check=True, capture_output=True)
    assert main(["verify", "--sglang-dir", str(tmp_path / "tree")]) == 0
