"""The pinned source: the release wheel, by its sha256, laid out as a checkout."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import EnvironmentFailure, Usage
from .pin import Pin, load_pins

#: Called with (what is being done, steps done, steps in all).
Progress = Callable[[str, int, int], None]
_DATE = "2000-01-01T00:00:00+0000"  # of the fetched commit, so that its id is always the same


def cache_folder() -> Path:
    """``$SGLANG_OVERLAY_CACHE``, or ``sglang-overlay`` in the user's cache folder."""
    if given := os.environ.get("SGLANG_OVERLAY_CACHE"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-overlay"


def pinned_wheel(pin: Pin) -> Path:
    """The pin's wheel in the cache; pip downloads it the first time.

    pip's own settings (index, proxy, certificates) hold. Raises ``EnvironmentFailure``
    when it cannot be had or its sha256 is wrong; a wrong file is removed.
    """
    file = cache_folder() / "wheels" / pin.sha256 / pin.wheel
    if not file.is_file():
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=file.parent) as folder:
                _download(pin, pin.version, Path(folder)).replace(file)
        except OSError as error:
            raise EnvironmentFailure(f"{file}: {error.strerror}") from error
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != pin.sha256:
        file.unlink()
        raise EnvironmentFailure(
            f"{pin.wheel}: sha256 is {found}, the pin says {pin.sha256}; the file was removed"
        )
    return file


def released_wheel(version: str, pin: Pin) -> Path:
    """The wheel of another release, for the machine that the pin's is for, in the cache.

    One that is a pin itself, beside ``pin``, is the pinned wheel. For another no hash of ours
    vouches: pip checks the index's. Raises ``EnvironmentFailure`` when it cannot be had.
    """
    for known in load_pins(pin.folder.parent):
        if known.version == version:
            return pinned_wheel(known)
    folder = cache_folder() / "wheels" / f"release-{version}"
    if not (found := sorted(folder.glob("*.whl"))):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as place:
                file = _download(pin, version, Path(place))
                found = [file.replace(folder / file.name)]
        except OSError as error:
            raise EnvironmentFailure(f"{folder}: {error.strerror}") from error
    return found[0]


def pinned_reader(pin: Pin) -> Callable[[str], bytes | None]:
    """Reads pristine files by their checkout path, straight from the pin's wheel."""
    wheel = zipfile.ZipFile(pinned_wheel(pin))
    names = set(wheel.namelist())

    def read(path: str) -> bytes | None:
        name = path.removeprefix("python/")
        return wheel.read(name) if name != path and name in names else None

    return read


def fetch(pin: Pin, target: Path, progress: Progress) -> bool:
    """Lay the pinned source out as a git checkout at ``target``.

    Returns ``False`` when it is there already. It is built beside ``target`` and
    moved there once its tree id is the pin's; what a killed run left is built anew.
    """
    from .checkout import Checkout, create_checkout

    target = target.resolve()
    if (target / ".git").exists() and (target / "python/sglang").is_dir():
        if Checkout(target).tree_of(pin.name) == pin.tree:
            return False
        raise Usage(f"{target} is a checkout of something else than {pin.name}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Usage(f"{target} exists and is not empty", "name a new folder")
    wheel = pinned_wheel(pin)
    try:
        with _workshop(target) as building:
            _unpack(wheel, building / "python", progress)
            progress("git", 0, 1)
            checkout = create_checkout(building, f"SGLang {pin.version}\n", _DATE, pin.name)
            progress("git", 1, 1)
            if checkout.head_tree() != pin.tree:
                raise EnvironmentFailure(
                    f"the source unpacked to tree {checkout.head_tree()}, not {pin.tree}"
                )
            building.rename(target)
    except OSError as error:
        raise EnvironmentFailure(f"{target}: {error.strerror or error}") from error
    return True


@contextmanager
def _workshop(target: Path) -> Iterator[Path]:
    """A fresh folder beside ``target``, removed at the end unless it was moved away."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.parent / f".{target.name}.partial"
    folder.mkdir(exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        raise EnvironmentFailure(f"{folder}: another fetch is at work here") from error
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _unpack(wheel: Path, folder: Path, progress: Progress) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.startswith("sglang/")]
        for done, name in enumerate(members):
            archive.extract(name, folder)
            progress("unpack", done + 1, len(members))


def _download(pin: Pin, version: str, folder: Path) -> Path:
    name, _, python, abi, platform = pin.wheel.removesuffix(".whl").split("-")
    tags = ["--python-version", python.removeprefix("cp"), "--abi", abi, "--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    result = subprocess.run(
        [*command, *tags, "--dest", str(folder), f"{name}=={version}"],
        stdout=2,  # also where sys.stderr is no file
        check=False,
    )
    wheel = pin.wheel if version == pin.version else f"{name}-{version}-*.whl"
    found = sorted(folder.glob(wheel))
    if result.returncode != 0 or not found:
        raise EnvironmentFailure(
            f"pip could not download {wheel} (exit {result.returncode})",
            f"put the file into {folder.parent} yourself, or set PIP_INDEX_URL",
        )
    return found[0]
