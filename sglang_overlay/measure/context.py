"""What is known of a server and its machine when it is measured."""

import hashlib
import json
import re
import socket
import sys
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from .. import __version__
from ..patchset.errors import PatchsetError, Usage
from . import stream

if TYPE_CHECKING:
    import httpx

_PACKAGES = ("sglang", "sglang-kernel", "torch", "triton", "flashinfer-python", "transformers")
#: The server arguments that bear on speed; the whole list would also hold keys and tokens.
_ARGUMENTS = (
    "model_path",
    "tp_size",
    "dp_size",
    "ep_size",
    "pp_size",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "attention_backend",
    "decode_attention_backend",
    "prefill_attention_backend",
    "moe_runner_backend",
    "disable_cuda_graph",
    "cuda_graph_max_bs_decode",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "disable_custom_all_reduce",
    "enable_mscclpp",
    "enable_nccl_nvls",
    "enable_torch_symm_mem",
    "enable_flashinfer_allreduce_fusion",
    "flashinfer_allreduce_fusion_backend",
    "stream_interval",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_attention_mode",
    "speculative_draft_attention_backend",
    "speculative_token_map",
    "speculative_adaptive",
)
_OVERLAY = re.compile(r"sglang-overlay\[\d+\]: \S+(?: on SGLang \S+|: .* the patches itself): (.+)")
_MANIFEST = "/_files/manifest.json"


def look(
    client: "httpx.Client", log: Path | None = None, tree: Path | None = None
) -> dict[str, Any]:
    """The server that ``client`` speaks to, in plain values:

    ``model``, ``tokenizer`` (has it one); ``versions`` of SGLang (its own word), of this command
    and, where SGLang is installed here too, of what it runs on; ``arguments`` that bear on
    speed; ``patches`` active, ``None`` where nothing tells; ``workers``, each worker's environment
    (patch worker-env-report), and ``environment``, a digest of it and the versions; ``gpus`` of
    this machine, where the server runs on it.

    ``log`` is the server's log, ``tree`` the SGLang that it runs from. Raises ``Usage`` for what is
    no SGLang server, ``EnvironmentFailure`` for one that is not there.
    """
    info = stream.get(client, "/server_info")
    if "model_path" not in info:
        raise Usage(f"{client.base_url}/server_info: not an SGLang server's answer")
    workers = _workers(client)
    versions = {"sglang-overlay": __version__, **_installed(), "sglang": str(info.get("version"))}
    pid = _listener(str(client.base_url))
    known = json.dumps([versions, workers], sort_keys=True).encode()
    return {
        "model": info.get("served_model_name") or info["model_path"],
        "tokenizer": not info.get("skip_tokenizer_init"),
        "versions": versions,
        "arguments": {name: info[name] for name in _ARGUMENTS if info.get(name) is not None},
        "patches": _patches(log, tree, pid),
        "workers": workers,
        "environment": hashlib.sha256(known).hexdigest()[:16],
        "gpus": gpus() if pid else None,
    }


def gpus() -> list[dict[str, Any]]:
    """The state of each NVIDIA GPU of this machine; none where there is no driver."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        driver = _ask(nvml.nvmlSystemGetDriverVersion)
        return [{"driver": driver, **_gpu(nvml, handle)} for handle in handles]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, gpu: Any) -> dict[str, Any]:
    memory = _ask(nvml.nvmlDeviceGetMemoryInfo, gpu)
    power = _ask(nvml.nvmlDeviceGetEnforcedPowerLimit, gpu)
    return {
        "name": _ask(nvml.nvmlDeviceGetName, gpu),
        "memory_mib": memory and memory.total >> 20,
        "used_mib": memory and memory.used >> 20,
        "sm_mhz": _ask(nvml.nvmlDeviceGetClockInfo, gpu, nvml.NVML_CLOCK_SM),
        "celsius": _ask(nvml.nvmlDeviceGetTemperature, gpu, nvml.NVML_TEMPERATURE_GPU),
        "power_limit_w": power and power / 1e3,
        "pcie_generation": _ask(nvml.nvmlDeviceGetCurrPcieLinkGeneration, gpu),
        "pcie_width": _ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, gpu),
        "held_back": _ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, gpu),  # NVML's bit mask
    }


def _ask(question: Any, *args: Any) -> Any:
    import pynvml as nvml

    try:
        return question(*args)
    except nvml.NVMLError:  # not every card answers every question
        return None


def _installed() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found | {"python": sys.version.split()[0]} if found else {}


def _workers(client: "httpx.Client") -> list[dict[str, Any]] | None:
    """Each worker's variables, from the patch worker-env-report; ``None`` where it is not there."""
    from ..worker_env import name_of

    try:
        reports = stream.get(client, "/worker_env")["workers"]
        return [
            {
                "worker": name_of(report),
                "variables": {name: entry["value"] for name, entry in report["env"].items()},
            }
            for report in reports
        ]
    except (PatchsetError, KeyError, TypeError):
        return None


def _patches(log: Path | None, tree: Path | None, pid: int | None) -> list[str] | None:
    if tree:
        return _of_tree(tree)
    if log:
        try:
            lines = _OVERLAY.findall(log.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise Usage(f"{log}: {error.strerror}") from error
        return lines[0].strip().split(", ") if lines else None
    # A process that runs under the overlay keeps its manifest mapped.
    with suppress(OSError, ValueError, IndexError):
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
        file = next((line.split(maxsplit=5)[5] for line in maps if line.endswith(_MANIFEST)), "")
        return [*json.loads(Path(file).read_text())["patches"]] if file else None
    return None


def _of_tree(tree: Path) -> list[str]:
    from ..patchset import manifest
    from ..patchset.pin import load_pins, patches_folder
    from ..patchset.plan import observe, recognise
    from ..patchset.series import load_series
    from ..patchset.tree import open_tree

    opened = open_tree(tree)

    def load(pin: Any) -> Any:
        series = load_series(pin)
        return observe(opened, series, manifest.load(series))

    state = recognise(opened, load_pins(patches_folder()), load)
    return sorted(state.applied)


def _listener(url: str) -> int | None:
    """The process of this machine that listens at ``url``; ``None`` where it is not ours to see."""
    import psutil

    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    with suppress(OSError):
        address = socket.gethostbyname(parts.hostname or "")
        ours = {a.address for group in psutil.net_if_addrs().values() for a in group}
        if address not in ours and not address.startswith("127."):
            return None
        with suppress(psutil.Error):
            for one in psutil.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr[1:] == (port,):
                    return int(one.pid) if one.pid else None
    return None
