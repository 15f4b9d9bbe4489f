"""The host and the container around the server, from ``/proc``, ``/sys`` and the limits."""

import os
import re
import resource
from pathlib import Path

from .facts import Host, Maybe, Unknown

#: The inode of the host's own IPC namespace (``PROC_IPC_INIT_INO`` of the kernel).
_HOST_IPC = "ipc:[4026531839]"
_BOOT = re.compile(r"(intel_iommu|amd_iommu|iommu|iommu\.\w+|pci|pcie_\w+|numa_balancing)(=|$)")
_CONTAINERS = re.compile(r"docker|kubepods|containerd|libpod|lxc")


def read_host(root: Path = Path("/")) -> Host:
    """What is below ``root``, and the limits of this process."""
    shm = _disk(root / "dev/shm")
    return Host(
        boot=_boot(root),
        cpu_vendor=_cpu(root, r"^vendor_id\s*:\s*(\S+)"),
        virtual=_virtual(root),
        numa_nodes=_nodes(root),
        numa_balancing=_flag(root / "proc/sys/kernel/numa_balancing"),
        governors=_governors(root),
        huge_pages=_huge_pages(root),
        container=_container(root),
        own_ipc=_own_ipc(root),
        shm=shm if isinstance(shm, Unknown) else shm[0],
        shm_free=shm if isinstance(shm, Unknown) else shm[1],
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        interfaces=_interfaces(),
    )


def _text(file: Path) -> Maybe[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        return Unknown(f"{file}: {error.strerror}")


def _boot(root: Path) -> Maybe[tuple[str, ...]]:
    text = _text(root / "proc/cmdline")
    if isinstance(text, Unknown):
        return text
    return tuple(word for word in text.split() if _BOOT.match(word))


def _cpu(root: Path, pattern: str) -> Maybe[str]:
    text = _text(root / "proc/cpuinfo")
    if isinstance(text, Unknown):
        return text
    found = re.search(pattern, text, re.MULTILINE)
    return found[1] if found else Unknown("/proc/cpuinfo does not say")


def _virtual(root: Path) -> Maybe[bool]:
    flags = _cpu(root, r"^flags\s*:\s*(.*)")
    return flags if isinstance(flags, Unknown) else "hypervisor" in flags.split()


def _nodes(root: Path) -> Maybe[int]:
    folder = root / "sys/devices/system/node"
    if not folder.is_dir():
        return Unknown(f"{folder} is not there")
    return sum(re.fullmatch(r"node\d+", entry.name) is not None for entry in folder.iterdir())


def _flag(file: Path) -> Maybe[bool]:
    text = _text(file)
    return text if isinstance(text, Unknown) else text != "0"


def _governors(root: Path) -> Maybe[tuple[str, ...]]:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    texts = {text for text in map(_text, files) if isinstance(text, str)}
    return tuple(sorted(texts)) if texts else Unknown("no cpufreq here (a virtual machine?)")


def _huge_pages(root: Path) -> Maybe[str]:
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if isinstance(text, Unknown):
        return text
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else Unknown("transparent_hugepage/enabled: not as documented")


def _container(root: Path) -> Maybe[bool]:
    if (root / ".dockerenv").exists() or (root / "run/.containerenv").exists():
        return True
    mounts = _text(root / "proc/self/mountinfo")  # containerd leaves no other trace with cgroup 2
    if isinstance(mounts, str) and re.search(r"^\S+ \S+ \S+ \S+ / .* - overlay ", mounts, re.M):
        return True
    text = _text(root / "proc/1/cgroup")
    return text if isinstance(text, Unknown) else _CONTAINERS.search(text) is not None


def _own_ipc(root: Path) -> Maybe[bool]:
    try:
        return str((root / "proc/self/ns/ipc").readlink()) != _HOST_IPC
    except OSError as error:
        return Unknown(f"/proc/self/ns/ipc: {error.strerror}")


def _disk(folder: Path) -> Maybe[tuple[int, int]]:
    try:
        state = os.statvfs(folder)
    except OSError as error:
        return Unknown(f"{folder}: {error.strerror}")
    return state.f_blocks * state.f_frsize, state.f_bavail * state.f_frsize


def _interfaces() -> Maybe[tuple[str, ...]]:
    import psutil

    try:
        return tuple(sorted(psutil.net_if_addrs()))
    except OSError as error:
        return Unknown(f"network interfaces: {error}")
