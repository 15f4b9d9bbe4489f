"""The environment that runs the server: asked of its own Python, in child processes."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from . import children
from .facts import Maybe, Python, Torch, Unknown

_START = 60  # seconds that a Python may take to list what is installed
_TORCH = 180  # importing torch and starting CUDA on eight cards, from a cold disk


def read_python(executable: str, sglang_dir: Path | None) -> Maybe[Python]:
    """What ``executable`` has installed, and which patches are in. ``sglang_dir`` is the SGLang
    tree that it runs, where that is not its own site-packages."""
    answer = _ask(executable, children.INSTALLED, _START)
    if isinstance(answer, Unknown):
        return answer
    torch = Unknown("torch is not installed")
    tree = sglang_dir or Path(answer["purelib"])
    patches, problems = _patches(executable, answer["versions"], tree, sglang_dir is not None)
    return Python(
        executable=executable,
        version=answer["version"],
        versions=answer["versions"],
        wanted=answer["wanted"],
        sitecustomize=tuple(answer["sitecustomize"]),
        nvcc=answer["nvcc"] or Unknown(f"no nvcc below {answer['cuda_home']}"),
        torch=_torch(executable) if "torch" in answer["versions"] else torch,
        patches=patches,
        patch_problems=problems,
        nccl_names=_nccl_names(answer["libnccl"]),
    )


def _torch(executable: str) -> Maybe[Torch]:
    answer = _ask(executable, children.TORCH, _TORCH)
    if isinstance(answer, Unknown):
        return answer
    return Torch(**answer | {"archs": tuple(answer["archs"])})


def _patches(
    executable: str, versions: dict[str, str], tree: Path, given: bool
) -> tuple[Maybe[tuple[str, ...]], tuple[str, ...]]:
    """From the overlay of that environment, else from the blobs of the SGLang tree."""
    if "+sglang." in versions.get("sglang-overlay", "") and not given:
        # -m puts the working folder on the path, which may be a clone of this repository.
        told = _command([executable, "-m", "sglang_overlay", "verify", "--json"], "/")
        if isinstance(told, Unknown):
            return told, ()
        return tuple(told["patches"]), tuple(told["problems"])
    if "sglang" not in versions and not given:
        return Unknown("SGLang is not installed in this Python"), ()
    told = _command(
        [
            *(sys.executable, "-m", "sglang_overlay", "status", "--json"),
            *("--sglang-dir", str(tree.absolute())),
        ],
        str(Path(__file__).parents[2]),  # apply.py runs from a clone that need not be installed
    )
    if isinstance(told, Unknown):
        return told, ()
    found = tuple(p["name"] for p in told["patches"] if p["state"] == "applied")
    bad = told["state"] in ("mixed", "drifted")
    return found, (f"{told['tree']} is {told['state']}",) if bad else ()


def _command(command: list[str], folder: str) -> Maybe[dict[str, Any]]:
    """The JSON that a command of ours prints. An error in JSON is unknown, with its message."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_TORCH, cwd=folder
        )
        told = json.loads(done.stdout[done.stdout.index("{") :])
    except (OSError, subprocess.TimeoutExpired) as error:
        return Unknown(f"{command[0]}: {error}")
    except ValueError:
        return Unknown(f"{' '.join(command[:4])}: {_last(done.stderr)}")
    return Unknown(told["message"]) if "error" in told else told


def _ask(executable: str, code: str, limit: float) -> Maybe[dict[str, Any]]:
    try:
        child = subprocess.run(
            [executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            timeout=limit,
            cwd="/",  # -c puts the working folder on the path
        )
    except subprocess.TimeoutExpired:
        return Unknown(f"{executable} did not answer in {limit:.0f} s")
    except OSError as error:
        return Unknown(f"{executable}: {error.strerror}")
    if child.returncode != 0:
        return Unknown(f"{executable}: {_last(child.stderr)}")
    try:  # whatever a sitecustomize prints comes before
        answer: dict[str, Any] = json.loads(_last(child.stdout))
    except ValueError:
        return Unknown(f"{executable} answered {_last(child.stdout)[:80]!r}")
    return answer


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1]


def _nccl_names(library: str) -> Maybe[frozenset[str]]:
    """The ``NCCL_*`` names in ``libnccl``: its read-only data comes first in the file."""
    if not library:
        return Unknown("no NCCL wheel is installed")
    try:
        with Path(library).open("rb") as file:
            found = re.findall(rb"\0(NCCL_[A-Z0-9_]+)(?=\0)", file.read(8 << 20))
    except OSError as error:
        return Unknown(f"{library}: {error.strerror}")
    names = frozenset(name.decode() for name in found)
    return names if "NCCL_DEBUG" in names else Unknown(f"{library}: no names found")
