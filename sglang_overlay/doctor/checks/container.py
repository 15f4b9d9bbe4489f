"""What a container, or the shell, does not let the server have."""

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

_MIB = 2**20
#: NCCL's shared-memory segments take about 10 MB for each connection of two ranks
#: (9,637,888 bytes in its own messages), and every rank connects to several.
_SHM_EACH = 64 * _MIB


def shm(facts: Facts) -> list[Finding]:
    """``/dev/shm`` is large enough for NCCL and the ranks' message queues."""
    free, size = facts.host.shm_free, facts.host.shm
    if isinstance(free, Unknown) or isinstance(size, Unknown):
        return [unknown("shm", free.why if isinstance(free, Unknown) else "its size is not known")]
    wanted = max(facts.world, 2) * _SHM_EACH
    text = f"/dev/shm: {free // _MIB} of {size // _MIB} MiB free"
    if free < wanted:
        return [
            error(
                "shm",
                "/dev/shm is too small",
                f"{text}; {wanted // _MIB} MiB are wanted for {max(facts.world, 2)} ranks",
                "NCCL cannot make its segments ('No space left on device'), or a rank dies of a "
                "bus error when the space runs out later",
                "docker run --ipc=host (or --shm-size=16g); Kubernetes: an emptyDir with medium "
                "Memory on /dev/shm",
            )
        ]
    return [ok("shm", text)]


def ipc(facts: Facts) -> list[Finding]:
    """The ranks share the host's IPC namespace, or at least one with each other."""
    own, container = facts.host.own_ipc, facts.host.container
    if isinstance(own, Unknown):
        return [unknown("ipc-namespace", own.why)]
    if not own:
        return [ok("ipc-namespace", "the host's own")]
    if isinstance(container, Unknown) or not container:
        return [ok("ipc-namespace", "one of its own, outside a container")]
    return [
        warning(
            "ipc-namespace",
            "the container has an IPC namespace of its own",
            "/proc/self/ns/ipc is not the host's",
            "CUDA IPC and NCCL's shared memory work within this container alone: ranks in a second "
            "container fall back to slower ways, and /dev/shm has the container's small size",
            "docker run --ipc=host",
        )
    ]


def memlock(facts: Facts) -> list[Finding]:
    """Memory may be pinned without a limit."""
    limit, container = facts.host.memlock, facts.host.container
    if isinstance(limit, Unknown):
        return [unknown("memlock", limit.why)]
    if limit < 0 or limit >= 64 * 2**30:
        return [ok("memlock", "unlimited" if limit < 0 else f"{limit // 2**30} GiB")]
    where = "docker run --ulimit memlock=-1" if container is True else "ulimit -l unlimited"
    return [
        warning(
            "memlock",
            f"only {limit // 1024} KiB may be locked",
            "ulimit -l",
            "CUDA pins through its driver and is not bound by it, but RDMA and host KV caches are; "
            "they then copy through pageable memory or fail",
            where,
        )
    ]


def open_files(facts: Facts) -> list[Finding]:
    """SGLang raises the number of open files to 65,535, as far as the hard limit lets it."""
    limit = facts.host.open_files
    if isinstance(limit, Unknown):
        return [unknown("open-files", limit.why)]
    if limit < 0 or limit >= 65535:
        return [ok("open-files", "65,535 or more")]
    return [
        warning(
            "open-files",
            f"the hard limit of open files is {limit}",
            "ulimit -Hn; SGLang asks for 65,535",
            "many clients and many ranks run out of descriptors under load",
            "docker run --ulimit nofile=65535:65535"
            if facts.host.container is True
            else "ulimit -n 65535, as root",
        )
    ]
