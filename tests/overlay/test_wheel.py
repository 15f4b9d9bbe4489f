"""What is in the wheel, and that it is the same each time."""

import hashlib
import subprocess
import zipfile
from email.parser import Parser
from pathlib import Path

from ci.build_wheel import main as build_wheel
from sglang_overlay import __version__
from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import load_series

from ..pins import each_pin
from .conftest import Environment

ROOT = Path(__file__).parents[2]


@each_pin
def test_the_wheel_holds_exactly_the_package_the_patches_and_the_patched_modules(
    pin: Pin, wheel: Path
) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "sglang_overlay"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    series = load_series(pin)
    modules = [path.removeprefix("python/") for path in series.weaves if path.startswith("python/")]
    info = f"sglang_overlay-{__version__}+sglang.{pin.version}.dist-info"
    files = "sglang_overlay/_files"
    expected = {
        *tracked.stdout.split(),
        *(f"{files}/modules/{path}" for path in modules),
        *(f"{files}/patches/{pin.name}/{file.name}" for file in pin.folder.iterdir()),
        f"{files}/manifest.json",
        "sglang_overlay.pth",
        "sglang_overlay_hook.start",
        *(f"{info}/{n}" for n in ("METADATA", "WHEEL", "RECORD", "entry_points.txt")),
        f"{info}/licenses/LICENSE",
    }
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) == expected
        metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    assert metadata["Version"] == f"{__version__}+sglang.{pin.version}"
    assert {f"sglang=={pin.version}", "nvidia-ml-py>=12"} <= {
        *metadata.get_all("Requires-Dist", [])
    }
    assert metadata.get_all("Provides-Extra") == ["report"]


@each_pin
def test_two_builds_are_byte_identical(pin: Pin, wheel: Path, tmp_path: Path) -> None:
    build_wheel(["--out", str(tmp_path), "--pin", pin.version])
    again = tmp_path / wheel.name
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (wheel, again)]
    assert digests[0] == digests[1]
    assert (tmp_path / f"sglang_overlay-{__version__}.tar.gz").exists()


@each_pin
def test_the_patches_travel_inside_and_apply_from_there(
    environment: Environment, tmp_path: Path
) -> None:
    command = environment.root / "bin/sglang-overlay"
    for args in (["fetch"], ["apply", "--sglang-dir"], ["verify", "--sglang-dir"]):
        subprocess.run([command, *args, tmp_path / "tree"], check=True, capture_output=True)
    assert main(["verify", "--sglang-dir", str(tmp_path / "tree")]) == 0
