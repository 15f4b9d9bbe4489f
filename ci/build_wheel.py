"""Builds the overlay wheel and the project's sdist. usage: python ci/build_wheel.py [--out dist]

The overlay is rendered from the patches and the hash-checked wheel of the pinned SGLang:
the patched modules, a manifest of their blobs, and the .pth that starts the hook. The same
commit gives the same bytes each time.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import tomli_w

from sglang_overlay import __version__
from sglang_overlay.patchset import manifest
from sglang_overlay.patchset.pin import Pin, choose_pin, load_pins, patches_folder
from sglang_overlay.patchset.series import Series, load_series
from sglang_overlay.patchset.source import pinned_reader

ROOT = Path(__file__).resolve().parents[1]
#: 2020-02-02, the date that hatchling takes too: zip files know no earlier one than 1980.
_EPOCH = "1580601600"
# Where the hook cannot start, nothing but `import sglang` may fail, and it must.
_PTH = (
    'import sys; exec("try:\\n from sglang_overlay.runtime.boot import start\\n start()\\n'
    "except Exception as error:\\n import os\\n if os.environ.get('SGLANG_OVERLAY') != '0':\\n"
    "  sys.modules['sglang'] = None\\n"
    "  sys.stderr and print('sglang-overlay: its hook cannot start (%r), so import sglang fails. "
    "Next: install the overlay wheel again, or uninstall it' % error, file=sys.stderr)\")\n"
)
# Of another name than the .pth: Python 3.15 to 3.17 skip the import line of a .pth with a .start
# of its name, and a .start that fails stops nothing.
_START = "sglang_overlay.runtime.boot:start\n"


def version_of(pin: Pin) -> str:
    """The overlay's version for ``pin``."""
    return f"{__version__}+sglang.{pin.version}"


def render(series: Series, files: Path) -> None:
    """Write the patched modules of ``series`` and their manifest below ``files``."""
    blobs, read = manifest.load(series), pinned_reader(series.pin)
    modules = {}
    for path, weave in series.weaves.items():
        place = path.removeprefix("python/")
        if place == path or not path.endswith(".py"):
            continue
        members = weave.restrict(series.module_patches)
        content = weave.forward(read(path), members)
        if not members or content is None:
            continue
        target = files / "modules" / place
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        name = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        base, blob = blobs.blob(path, ()), blobs.blob(path, members)
        partial = sorted(set(blobs.versions[path]) - {base, blob})
        modules[name] = {"place": place, "base": base, "blob": blob, "partial": partial}
    table = {
        "version": version_of(series.pin),
        "sglang": series.pin.version,
        "patches": {
            p.name: p.header.switch for p in series.patches if p.name in series.module_patches
        },
        "modules": modules,
    }
    (files / "manifest.json").write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


def stage(series: Series, folder: Path) -> None:
    """Lay the overlay's project out in ``folder``, ready to be built."""
    for source in (ROOT / "sglang_overlay").rglob("*.*"):
        target = folder / source.relative_to(ROOT)
        if not {"_files", "__pycache__"} & {*source.parts}:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    files = folder / "sglang_overlay/_files"
    shutil.copytree(series.pin.folder, files / "patches" / series.pin.name)
    render(series, files)
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    (folder / "sglang_overlay.pth").write_text(_PTH)
    (folder / "sglang_overlay_hook.start").write_text(_START)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project["project"]["version"] = version_of(series.pin)
    project["project"]["dependencies"].append(f"sglang=={series.pin.version}")
    del project["project"]["dynamic"]
    extras = project["project"]["optional-dependencies"]
    project["project"]["optional-dependencies"] = {"report": extras["report"]}
    project["tool"] = {
        "hatch": {
            "build": {
                "targets": {
                    "wheel": {
                        "packages": ["sglang_overlay"],
                        "force-include": {
                            name: name
                            for name in ("sglang_overlay.pth", "sglang_overlay_hook.start")
                        },
                    }
                }
            }
        }
    }
    (folder / "pyproject.toml").write_text(tomli_w.dumps(project), encoding="utf-8")


def build(source: Path, kind: str, out: Path) -> None:
    """Build the ``wheel`` or ``sdist`` of the project in ``source``."""
    environment = os.environ | {"SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", _EPOCH)}
    command = [sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", str(out)]
    subprocess.run([*command, str(source)], check=True, env=environment, stdout=subprocess.DEVNULL)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build the overlay wheel and the sdist.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--pin", help="the pin; the newest by default")
    given = parser.parse_args(argv)
    pins = load_pins(patches_folder())
    series = load_series(choose_pin(pins, given.pin) if given.pin else pins[-1])
    with tempfile.TemporaryDirectory() as folder:
        stage(series, Path(folder))
        build(Path(folder), "wheel", given.out)
    build(ROOT, "sdist", given.out)
    for file in sorted(given.out.iterdir()):
        print(file)


if __name__ == "__main__":
    main()
