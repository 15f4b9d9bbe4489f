"""What the tests take from Debian: commands, installed where that can be done, and a small system.

usage: python ci/debian.py        (prints the small system's tar file, made once, 60 MB downloaded)
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_overlay.patchset.source import cache_folder

#: Debian 12: its Python 3.11 is that of the environment in ``sglang_env``.
_SYSTEM = ("--variant=minbase", "--include=python3,python3-pip,ca-certificates", "bookworm")
_LEFT_OUT = ("./dev/*", "./var/cache/apt/*", "./var/lib/apt/lists/*", "./usr/share/locale/*")


def command(package: str, *names: str) -> str:
    """The path of the first of ``names`` that is there; Debian's ``package`` holds it.

    Raises ``SystemExit`` with a message where it is missing and cannot be installed.
    """
    if not _found(names) and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        install = ("install", "--yes", "--quiet", "--no-install-recommends", package)
        with _alone("apt"):
            for args in () if _found(names) else (("update", "--quiet"), install):
                subprocess.run(
                    ["apt-get", *args], env=environment, check=False, stdout=subprocess.DEVNULL
                )
    if not (found := _found(names)):
        raise SystemExit(f"error: no {package}\n  next: apt-get install {package}, as root")
    return found


def system() -> Path:
    """A tar file of a Debian with Python and pip, in the cache under a hash of its recipe.

    Raises ``SystemExit`` with a message where it cannot be made.
    """
    digest = hashlib.sha256(repr((_SYSTEM, _LEFT_OUT)).encode()).hexdigest()[:16]
    file = cache_folder() / "images" / f"debian-{digest}.tar"
    with _alone(file.stem):
        if not file.exists():
            if os.geteuid() != 0:
                raise SystemExit("error: debootstrap makes a Debian as root alone")
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                _make(Path(folder) / "root", Path(folder) / "tar").replace(file)
    return file


@contextmanager
def _alone(name: str) -> Iterator[None]:
    """One process at a time; the others wait."""
    folder = cache_folder() / "images"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{name}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def _make(root: Path, tar: Path) -> Path:
    steps: tuple[tuple[str | Path, ...], ...] = (
        (command("debootstrap", "debootstrap"), *_SYSTEM, root),
        ("tar", "-C", root, *(f"--exclude={place}" for place in _LEFT_OUT), "-cf", tar, "."),
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise SystemExit(f"error: {step[0]} failed: {''.join(last)}")
    return tar


def _found(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name))), None)


if __name__ == "__main__":
    print(system())
