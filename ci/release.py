"""Builds a release into dist/: an overlay wheel for each pin, the sdist, and a lock of all hashes.

usage: python -m ci.release [--dry-run] [--out dist]

Everything is built twice and must come out the same. ``SHA256SUMS`` names every file of the
release, for ``sha256sum -c`` and for the provenance attestation; ``lock.json`` says what they were
made from: commit, pins, upstream wheels, source trees, patches. A dry run asks neither for a clean
work tree nor for a CHANGELOG entry.
"""

import argparse
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from ci.build_wheel import ROOT, version_of
from ci.build_wheel import main as build_wheel
from sglang_overlay import __version__
from sglang_overlay.patchset.pin import Pin, load_pins, patches_folder
from sglang_overlay.patchset.series import load_series


def git(*args: str) -> str:
    """What git says in this repository."""
    done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def check_release(pins: list[Pin]) -> None:
    """Raise ``SystemExit`` unless this commit is one that may be released."""
    if changed := git("status", "--porcelain"):
        raise SystemExit(f"error: not everything is committed:\n{changed}")
    if git("tag", "--points-at", "HEAD") != f"v{__version__}":
        raise SystemExit(f"error: HEAD is not tagged v{__version__}\n  next: docs/releasing.md")
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    entry = re.search(
        rf"^## \[{re.escape(__version__)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## |\Z)",
        text,
        re.M | re.S,
    )
    wanted = f"Pins: {', '.join(pin.name for pin in pins)}."
    if entry is None or wanted not in entry[1]:
        raise SystemExit(
            f"error: CHANGELOG.md has no entry '## [{__version__}] - DATE' with the line '{wanted}'"
        )


def check_out(out: Path) -> None:
    """Raise ``SystemExit`` unless ``out`` may be replaced: new, empty, or a release and no more."""
    if not out.exists():
        return
    sums = out / "SHA256SUMS"
    lines = sums.read_text(encoding="utf-8").splitlines() if sums.is_file() else []
    known = {sums.name, *(line.partition("  ")[2] for line in lines)}
    foreign = [f.name for f in sorted(out.iterdir()) if f.is_dir() or f.name not in known]
    if foreign:
        raise SystemExit(
            f"error: {out} holds {foreign[0]}, which is of no release\n"
            "  next: name another folder with --out, or empty this one"
        )


def build(pins: list[Pin], out: Path) -> None:
    """Build every file of the release into ``out``, which must not exist."""
    out.mkdir()
    for pin in pins:
        build_wheel(["--out", str(out), "--pin", pin.name])


def lock(pins: list[Pin], out: Path) -> None:
    """Write ``lock.json`` and ``SHA256SUMS`` about the files in ``out``."""
    table = {
        "version": __version__,
        "commit": git("rev-parse", "HEAD"),
        "pins": {
            pin.name: {
                "upstream_wheel": pin.wheel,
                "upstream_sha256": pin.sha256,
                "source_tree": pin.tree,
                "overlay": version_of(pin),
                "patches": {patch.name: patch.sha256 for patch in load_series(pin).patches},
            }
            for pin in pins
        },
    }
    (out / "lock.json").write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    sums = "".join(f"{digest(file)}  {file.name}\n" for file in sorted(out.iterdir()))
    (out / "SHA256SUMS").write_text(sums, encoding="utf-8")


def digest(file: Path) -> str:
    """The sha256 of ``file``."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Build a release.")
    parser.add_argument("--dry-run", action="store_true", help="build whatever is checked out")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    given = parser.parse_args(argv)
    if given.out.exists() and not given.out.is_dir():
        parser.error(f"{given.out} is not a folder")
    out = given.out.resolve()
    check_out(out)
    pins = load_pins(patches_folder())
    if not given.dry_run:
        check_release(pins)
    with tempfile.TemporaryDirectory() as folder:
        one, two = Path(folder, "one"), Path(folder, "two")
        for place in (one, two):
            build(pins, place)
        for file in sorted(one.iterdir()):
            if digest(file) != digest(two / file.name):
                raise SystemExit(f"error: {file.name} came out different the second time")
        lock(pins, one)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(one, out)
    print((out / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()
