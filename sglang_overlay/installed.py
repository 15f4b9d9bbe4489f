"""Is the overlay of this environment sound, and do running servers use it?"""

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from .patchset.errors import Usage
from .runtime import attest
from .runtime.finder import Finder

# A process title (sglang::scheduler), a module (sglang.launch_server), or the command.
_SGLANG = re.compile(r"sglang($|::|\.)")


def verify() -> dict[str, Any]:
    """The hook, the base and every module of this interpreter's overlay.

    Raises ``Usage`` where no overlay is installed.
    """
    if not (attest.FILES / "modules").is_dir():
        raise Usage("no overlay wheel is installed here", "verify --sglang-dir DIR, or install it")
    problems, modules, patches = [], {}, {}
    finder = next((f for f in sys.meta_path if isinstance(f, Finder)), None)
    if finder is None:
        problems.append("the hook did not start in this interpreter (python -S, or no .pth file)")
    spec = find_spec("sglang")
    try:
        manifest = attest.load()
        modules, patches = manifest.modules, manifest.patches
        if spec is None:
            problems.append("sglang is not installed here")
        else:
            attest.check(manifest, spec, imported_early=bool(finder and finder.imported_early))
    except attest.Refusal as refusal:
        problems.append(str(refusal))
    return {
        "command": "verify",
        "overlay": str(attest.FILES),
        "sglang": spec and spec.origin,
        "patches": patches,
        "modules": [
            {"name": name, "origin": str(module.file), "blob": attest.blob_of(module.file)}
            for name, module in modules.items()
        ],
        "problems": problems,
        "processes": [],
    }


def verify_processes(pids: list[int]) -> list[dict[str, Any]]:
    """The SGLang processes among ``pids`` and what they started, patched or not.

    A process that runs under the overlay keeps its manifest mapped, which
    ``/proc/PID/maps`` shows; a name or a log line would prove nothing.
    Raises ``Usage`` for a process that is not there or not ours to see.
    """
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            family = [process, *process.children(recursive=True)]
            found += [_state(member) for member in family]
        except (psutil.Error, PermissionError) as error:
            raise Usage(f"process {pid}: {error}") from error
    return [state for state in found if state["state"] != "not SGLang"]


def _state(process: psutil.Process) -> dict[str, Any]:
    command = process.cmdline()
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    inodes = [line.split()[4] for line in maps if "/_files/manifest.json" in line]
    if str((attest.FILES / "manifest.json").stat().st_ino) in inodes:
        state = "patched"
    elif inodes:
        state = "another overlay, or one from before an upgrade"
    elif any(_SGLANG.match(Path(part).name) for part in command):
        state = "not patched"
    else:
        state = "not SGLang"
    return {"pid": process.pid, "command": " ".join(command)[:60], "state": state}
