"""Where kernels are built and kept."""

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

_GIB = 2**30
#: FlashInfer's modules of one architecture, Triton's and inductor's caches of a large model.
_WANTED = 10 * _GIB
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "fuse.sshfs", "9p", "ceph"}


def disk(facts: Facts) -> list[Finding]:
    """The folder can be written, and there is room."""
    cache = facts.cache
    if isinstance(cache, Unknown):
        return [unknown("cache-disk", cache.why)]
    if cache.writable is False:
        return [
            error(
                "cache-disk",
                "the kernel cache cannot be written",
                cache.folder,
                "kernels are built at every start, or the start fails",
                "export SGLANG_CACHE_DIR=/a/folder/of/yours",
            )
        ]
    if isinstance(cache.writable, Unknown):
        return [unknown("cache-disk", cache.writable.why, "as the user that runs the server")]
    if isinstance(cache.free, Unknown):
        return [unknown("cache-disk", cache.free.why)]
    text = f"{cache.folder}: {cache.free / _GIB:.1f} GiB free"
    if cache.free < _WANTED:
        severe = cache.free < _GIB
        return [
            (error if severe else warning)(
                "cache-disk",
                "the disk of the kernel cache is nearly full",
                text,
                "a build that runs out of space fails in the middle of a start",
                "export SGLANG_CACHE_DIR=/a/larger/disk",
            )
        ]
    return [ok("cache-disk", text)]


def filesystem(facts: Facts) -> list[Finding]:
    """The cache is on a local disk."""
    if isinstance(facts.cache, Unknown):
        return []
    kind = facts.cache.filesystem
    if isinstance(kind, Unknown):
        return [unknown("cache-filesystem", kind.why)]
    if kind not in _NETWORK:
        return [ok("cache-filesystem", kind)]
    return [
        warning(
            "cache-filesystem",
            f"the kernel cache is on a network file system ({kind})",
            facts.cache.folder,
            "ranks that build at once trip over each other there: 'stale file handle', 'device or "
            "resource busy', locks that nobody frees",
            "export SGLANG_CACHE_DIR=/a/local/disk",
        )
    ]


def compiler(facts: Facts) -> list[Finding]:
    """FlashInfer finds the nvcc that it builds with."""
    if isinstance(facts.python, Unknown):
        return []
    nvcc = facts.python.nvcc
    if isinstance(nvcc, str):
        return [ok("nvcc", nvcc)]
    why = nvcc.why if isinstance(nvcc, Unknown) else "no nvcc"
    if not facts.cards:
        return [unknown("nvcc", why)]
    wheel = "nvidia-cuda-nvcc" in facts.python.versions
    return [
        warning(
            "nvcc",
            "FlashInfer finds no nvcc",
            f"{why}; it looks at CUDA_HOME, then the path, then /usr/local/cuda",
            "kernels that are not built yet cannot be built, and the start fails in a rank with "
            "'Could not find nvcc' or a ninja error",
            "export CUDA_HOME=$(python -c 'import nvidia.cu13 as m; print(list(m.__path__)[0])')"
            if wheel
            else "install the CUDA toolkit, and export CUDA_HOME",
        )
    ]


def kernels(facts: Facts) -> list[Finding]:
    """Whether the first start has to build, which takes minutes."""
    if isinstance(facts.cache, Unknown):
        return []
    built = facts.cache.built
    if isinstance(built, Unknown):
        return [unknown("kernels", built.why)]
    if built:
        return [ok("kernels", f"{built} FlashInfer modules are built", facts.cache.folder)]
    return [
        warning(
            "kernels",
            "no FlashInfer kernel is built yet",
            facts.cache.folder,
            "the first start builds them, for minutes; keep the folder between containers",
            f"mount {facts.cache.folder} as a volume",
        )
    ]


def peer_file(facts: Facts) -> list[Finding]:
    """SGLang's remembered answer on peer access is still true."""
    if isinstance(facts.cache, Unknown) or facts.cache.peers is None:
        return []
    cache = facts.cache
    if isinstance(cache.peers, Unknown) and not cache.peers_file:
        return [unknown("peer-file", cache.peers.why)]
    fix = f"rm {cache.peers_file}"
    if isinstance(cache.peers, Unknown):
        return [
            error(
                "peer-file",
                "SGLang's file of peer access is damaged",
                cache.peers.why,
                "the custom all-reduce cannot start",
                fix,
            )
        ]
    if isinstance(facts.pairs, Unknown) or cache.peers is None:
        return []
    # The file counts the cards as CUDA does.
    place = {gpu.index: number for number, gpu in enumerate(facts.cards)}
    granted = {(place[pair.a], place[pair.b]): pair.peer == "ok" for pair in facts.pairs}
    stale = [
        f"{a}->{b}"
        for (a, b), is_granted in granted.items()
        if is_granted and cache.peers.get(f"{a}->{b}") is False
    ]
    missing = [f"{a}->{b}" for a, b in granted if f"{a}->{b}" not in cache.peers]
    if not stale and not missing:
        return [ok("peer-file", cache.peers_file)]
    return [
        warning(
            "peer-file",
            "SGLang remembers an old answer on peer access",
            f"{cache.peers_file}: {', '.join((stale or missing)[:8])} "
            + ("is false there, and granted by the driver" if stale else "is not in it"),
            "it was measured once, perhaps before a driver or BIOS was changed, and is never "
            "measured again: the custom all-reduce stays off, or fails",
            fix,
        )
    ]
