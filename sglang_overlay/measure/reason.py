"""Why a server did not start, read from its log."""

import re
from pathlib import Path

_TAIL = 256 * 1024  # bytes of a log that are looked at
_LINES = 3  # of an unknown reason
#: The first that fits counts. SGLang's advice after a failed capture speaks of memory too, and a
#: failed capture names what NCCL said: so the cause stands before what it led to.
_REASONS = tuple(
    (reason, re.compile(pattern))
    for reason, pattern in (
        (
            "out of memory",
            r"OutOfMemoryError|CUDA (?:error: )?out of memory|\[CUDA\]: out of memory|"
            r"Not enough memory|Cannot allocate memory|^MemoryError|CUBLAS_STATUS_ALLOC_FAILED",
        ),
        (
            "port in use",
            r"[Aa]ddress already in use|EADDRINUSE|port \d+ is (?:already in use|not available)|"
            r"bootstrap_port \d+ is already in use",
        ),
        (
            "graph capture failed",
            r"Capture \w+ graph failed|Fail when using backend: \S+ for prefill runner|"
            r"cudaErrorStreamCapture|operation not permitted when stream is capturing",
        ),
        (
            "NCCL error",
            r"NCCL error|nccl(?:Unhandled|Internal|System|Invalid|Remote)\w+|NCCL WARN|"
            r"DistBackendError",
        ),
        ("argument refused", r"^(?:\S+\.py|sglang serve)?:? ?error: |unrecognized arguments"),
        ("no space on the disk", r"No space left on device"),
        ("killed", r"^Killed$|SIGKILL|oom-kill"),
    )
)
_NOISE = re.compile(r"^\s*(?:$|\^+$|File \"|Traceback|warnings\.warn|During handling|Possible sol)")


def explain(log: Path, code: int | None = None) -> str:
    """One line: the reason, then the log's own words. ``code`` is the exit code, if it ended.

    An unknown reason comes with the last lines.
    """
    lines = tail(log)
    for reason, pattern in _REASONS:
        found = [line for line in lines if pattern.search(line)]
        if found:
            return f"{reason}: {_plain(found[-1])}"
    if code is not None and code < 0:
        return f"killed: signal {-code}: {last_line(log)}"
    last = [_plain(line) for line in lines if not _NOISE.match(line)][-_LINES:]
    ended = "" if code is None else f"exit code {code}, "
    return f"unknown: {ended}last lines: {' | '.join(last) or 'none'}"


def tail(log: Path) -> list[str]:
    """The last lines of ``log``, as many as fit into 256 KiB; none where there is no log."""
    try:
        with log.open("rb") as stream:
            stream.seek(max(log.stat().st_size - _TAIL, 0))
            return stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []


def last_line(log: Path) -> str:
    """What the server said last, without its time stamp."""
    lines = [line for line in tail(log) if not _NOISE.match(line)]
    return _plain(lines[-1]) if lines else ""


def _plain(line: str) -> str:
    words = re.sub(r"^\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\]\s*", "", line.strip())
    return re.sub(r"\x1b\[[\d;]*m", "", words)[:300]
