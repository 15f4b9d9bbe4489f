"""Installs a pinned SGLang with all it needs, once, and prints that environment's python.

usage: python ci/sglang_env.py [VERSION]        (the newest pin by default)

The environment lies in the cache under a hash of its lock file, so a changed lock makes
a new one and an unchanged one is never installed twice. The first takes 11 GB and about eight
minutes on two cores; one for another lock takes what differs, since the files of the packages
that the two have in common are hard links.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.source import cache_folder

_GB = 2**30
_NEEDS, _NEEDS_BESIDE_ANOTHER = 15 * _GB, 6 * _GB


def sglang_python(version: str = "") -> Path:
    """The python of the environment that the lock of SGLang ``version`` describes, of the
    newest pin by default.

    Raises ``SystemExit`` with a message when it cannot be made.
    """
    lock = lock_file(version or load_pins(patches_folder())[-1].version)
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"error: {lock.name} is for Python 3.11; this is {sys.version.split()[0]}")
    folder = _folder(lock)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One for all, since each is made of the one before it.
    with folder.with_name("envs.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _install(lock, folder)
            (folder / "complete").touch()
    return folder / "bin/python"


def lock_file(version: str) -> Path:
    """The lock of SGLang ``version``. Raises ``SystemExit`` where there is none."""
    lock = Path(__file__).with_name(f"sglang-{version}.lock")
    if not lock.is_file():
        there = ", ".join(sorted(file.name for file in lock.parent.glob("sglang-*.lock")))
        raise SystemExit(f"error: no {lock.name}; there is {there}")
    return lock


def packages(lock: Path) -> set[str]:
    """What ``lock`` pins, each as ``name==version``."""
    lines = lock.read_text(encoding="utf-8").splitlines()
    return {line for line in lines if not line.startswith("#")}


def _folder(lock: Path) -> Path:
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    return cache_folder() / "envs" / f"{lock.stem}-{digest}"


def _install(lock: Path, folder: Path) -> None:
    others = [o for o in lock.parent.glob("sglang-*.lock") if (_folder(o) / "complete").exists()]
    needs, free = _NEEDS_BESIDE_ANOTHER if others else _NEEDS, shutil.disk_usage(folder.parent).free
    if free < needs:
        raise SystemExit(
            f"error: {folder.parent} has {free / _GB:.1f} GB free, "
            f"SGLang needs {needs // _GB}\n"
            "  next: set SGLANG_OVERLAY_CACHE to a folder on a larger disk"
        )
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=not others)
    if others:
        _link(_folder(others[0]), folder)
        surplus = packages(others[0]) - packages(lock)
        _pip(folder, "uninstall", "--yes", *sorted(line.partition("==")[0] for line in surplus))
    _pip(folder, "install", "--no-deps", "--requirement", str(lock))


def _link(other: Path, folder: Path) -> None:
    """Fill the new environment at ``folder`` with links to ``other``'s files; pip never writes
    into a file, it replaces it."""
    for source in sorted(other.rglob("*")):
        target = folder / source.relative_to(other)
        if source.is_dir() or target.exists() or source == other / "complete":
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shebang = f"#!{other}/bin/python".encode()
        with source.open("rb") as file:
            own = file.read(len(shebang)) == shebang
        if own:  # a command, whose first line names its environment
            target.write_bytes(source.read_bytes().replace(bytes(other), bytes(folder)))
            target.chmod(0o755)
        else:
            os.link(source, target, follow_symlinks=False)


def _pip(folder: Path, *args: str) -> None:
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run([*pip, *args, "--quiet"], env=environment, check=False)
    if done.returncode != 0:
        raise SystemExit(f"error: pip {args[0]} for {folder.name} failed (exit {done.returncode})")


if __name__ == "__main__":
    print(sglang_python(*sys.argv[1:]))
