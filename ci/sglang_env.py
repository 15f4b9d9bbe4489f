"""Installs the pinned SGLang with all it needs, once, and prints that environment's python.

usage: python ci/sglang_env.py [VERSION]        (11 GB, about eight minutes on two cores)

The environment lies in the cache under a hash of its lock file, so a changed lock makes
a new one and an unchanged one is never installed twice.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from sglang_overlay.patchset.source import cache_folder

_NEEDS = 15 * 2**30


def sglang_python(version: str = "0.5.23") -> Path:
    """The python of the environment that the lock of SGLang ``version`` describes.

    Raises ``SystemExit`` with a message when it cannot be made.
    """
    lock = Path(__file__).with_name(f"sglang-{version}.lock")
    if sys.version_info[:2] != (3, 11):
        raise SystemExit(f"error: {lock.name} is for Python 3.11; this is {sys.version.split()[0]}")
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    folder = cache_folder() / "envs" / f"sglang-{version}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            _install(lock, folder)
            (folder / "complete").touch()
    return folder / "bin/python"


def _install(lock: Path, folder: Path) -> None:
    free = shutil.disk_usage(folder.parent).free
    if free < _NEEDS:
        raise SystemExit(
            f"error: {folder.parent} has {free / 2**30:.1f} GB free, SGLang needs 15\n"
            "  next: set SGLANG_OVERLAY_CACHE to a folder on a larger disk"
        )
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(
        [*pip, "--quiet", "--no-deps", "--requirement", lock], env=environment, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"error: pip could not install {lock.name} (exit {done.returncode})")


if __name__ == "__main__":
    print(sglang_python(*sys.argv[1:]))
