"""Is the overlay of this environment sound, and do running servers use it?"""

import json
import re
import subprocess
import sys
from contextlib import suppress
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

    Where each module comes from is asked of a child that imports ``sglang``, as a server
    does. Raises ``Usage`` where no overlay is installed.
    """
    if not (attest.FILES / "modules").is_dir():
        raise Usage("no overlay wheel is installed here", "verify --sglang-dir DIR, or install it")
    problems: list[str] = []
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        problems.append("the hook did not start in this interpreter (python -S, or no .pth file)")
    modules: dict[str, attest.Module] = {}
    patches: dict[str, str] = {}
    origins: dict[str, str] = {}
    try:
        manifest = attest.load()
        modules, patches = manifest.modules, manifest.patches
        if attest.switched_off():
            problems.append("SGLANG_OVERLAY=0: the overlay is switched off here")
        origins = _origins([*modules])
    except attest.Refusal as refusal:
        problems.append(str(refusal))
    found = []
    for name, module in modules.items():
        origin = origins.get(name, "")
        blob = attest.blob_of(Path(origin)) if origin else ""
        found.append({"name": name, "origin": origin, "blob": blob})
        if origins and blob != module.blob:
            where = origin or "nowhere"
            problems.append(f"{name} is loaded from {where}, which is not the patched file")
    return {
        "command": "verify",
        "overlay": str(attest.FILES),
        "patches": patches,
        "modules": found,
        "problems": problems,
        "processes": [],
    }


def _origins(names: list[str]) -> dict[str, str]:
    # A package that cannot be imported here (sglang.srt.ray without Ray) leaves the hook to ask.
    code = (
        "import importlib.util, json, sys, sglang\n"
        "from sglang_overlay.runtime.finder import Finder\n"
        "def find(name):\n"
        "    try:\n"
        "        return importlib.util.find_spec(name)\n"
        "    except Exception:\n"
        "        hooks = [f for f in sys.meta_path if isinstance(f, Finder)]\n"
        "        return hooks[0].find_spec(name) if hooks else None\n"
        "specs = {name: find(name) for name in sys.argv[1:]}\n"
        "print(json.dumps({n: s and s.origin or '' for n, s in specs.items()}))"
    )
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *names],
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode != 0:
        reason = (child.stderr.strip() or f"exit {child.returncode}").splitlines()[-1]
        raise attest.Refusal(f"import sglang fails: {reason}")
    origins: dict[str, str] = json.loads(child.stdout.strip().splitlines()[-1])
    return origins


def verify_processes(pids: list[int]) -> list[dict[str, Any]]:
    """The processes ``pids`` and the SGLang processes that they started, patched or not.

    A process that runs under the overlay keeps its manifest mapped, which
    ``/proc/PID/maps`` shows; a name or a log line would prove nothing.
    Raises ``Usage`` for a process that is not there or not ours to see.
    """
    found = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            found.append(_state(process))
            for child in process.children(recursive=True):
                with suppress(psutil.NoSuchProcess, ProcessLookupError, FileNotFoundError):
                    state = _state(child)
                    if state["state"] == "patched" or any(
                        _SGLANG.match(Path(part).name) for part in child.cmdline()
                    ):
                        found.append(state)
        except (psutil.Error, OSError) as error:
            raise Usage(f"process {pid}: {error}") from error
    return found


def _state(process: psutil.Process) -> dict[str, Any]:
    manifest = str(attest.FILES / "manifest.json")
    maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace").splitlines()
    paths = [line.split(maxsplit=5)[5] for line in maps if "/_files/manifest.json" in line]
    state = "not patched"
    if paths:
        state = "patched" if manifest in paths else "another overlay, or one before an upgrade"
    return {"pid": process.pid, "command": " ".join(process.cmdline())[:60], "state": state}
