"""Where SGLang and its libraries keep the kernels that they build at start."""

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping
from glob import escape
from pathlib import Path

from .facts import Cache, Maybe, Unknown


def read_cache(environ: Mapping[str, str], home: Path) -> Cache:
    """The folder as SGLang 0.5.23 chooses it (``third_party_cache_defaults``): FlashInfer's,
    Triton's and its own kernels lie below ``SGLANG_CACHE_DIR``. What this user may not look
    into is unknown."""
    chosen = environ.get("SGLANG_CACHE_DIR", "~/.cache/sglang")
    folder = home / chosen.removeprefix("~/") if chosen.startswith("~/") else Path(chosen)
    there = _existing(folder)
    base = Path(environ.get("FLASHINFER_WORKSPACE_BASE", folder))
    peers_file, peers = _peers(folder, environ.get("CUDA_VISIBLE_DEVICES"))
    return Cache(
        folder=str(folder),
        free=there if isinstance(there, Unknown) else _free(there),
        filesystem=there if isinstance(there, Unknown) else _filesystem(there),
        writable=there if isinstance(there, Unknown) else os.access(there, os.W_OK | os.X_OK),
        built=_built(base / ".cache" / "flashinfer"),
        peers_file=peers_file,
        peers=peers,
    )


def _existing(folder: Path) -> Maybe[Path]:
    """``folder``, or the nearest above it that is there."""
    for path in (folder, *folder.absolute().parents):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            return Unknown(f"{path}: {error.strerror}")
        return path
    return Unknown(f"{folder}: nothing above it is there")


def _names(folder: Path) -> Maybe[list[str]]:
    """What lies in ``folder``, nothing where it is not there. ``Path.glob`` would pass over a
    folder that may not be read, as if it were empty."""
    try:
        return sorted(path.name for path in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        return Unknown(f"{folder}: {error.strerror}")


def _free(folder: Path) -> Maybe[int]:
    try:
        return shutil.disk_usage(folder).free
    except OSError as error:
        return Unknown(f"{folder}: {error.strerror}")


def _filesystem(folder: Path) -> Maybe[str]:
    import psutil

    try:
        mounts = {Path(p.mountpoint): p.fstype for p in psutil.disk_partitions(all=True)}
    except OSError as error:
        return Unknown(f"mounted file systems: {error}")
    real = folder.resolve()
    found = (mounts[path] for path in (real, *real.parents) if path in mounts)
    return next(found, Unknown(f"{folder}: no mount point found"))


def _built(folder: Path) -> Maybe[int]:
    """How many modules FlashInfer has built, over all of its versions and architectures."""
    names = _names(folder)
    if isinstance(names, Unknown):
        return names
    try:
        return sum(1 for _ in folder.glob("*/*/cached_ops/*/*.so"))
    except OSError as error:
        return Unknown(f"{folder}: {error.strerror}")


def _peers(folder: Path, visible: str | None) -> tuple[str, Maybe[Mapping[str, bool] | None]]:
    """SGLang's file of peer access, without a name where it may not be read. Its name ends in
    the visible cards, or all their indices."""
    names = _names(folder)
    if isinstance(names, Unknown):
        return "", names
    wanted = f"gpu_p2p_access_cache_for_{'0*' if visible is None else escape(visible)}.json"
    for name in fnmatch.filter(names, wanted)[-1:]:
        file = folder / name
        try:
            return str(file), dict(json.loads(file.read_text()))
        except OSError as error:
            return "", Unknown(f"{file}: {error.strerror}")
        except (ValueError, TypeError) as error:
            return str(file), Unknown(f"{file}: {error}")
    return "", None
