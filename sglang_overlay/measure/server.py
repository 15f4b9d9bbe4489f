"""A server that a sweep starts, waits for, and stops: it and all that it started, no other."""

import errno
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from ..patchset.errors import EnvironmentFailure
from . import reason

# The process writes down who it is before it becomes the server (`exec` keeps pid and start
# time), so no kill of the sweep, whenever it comes, leaves a server that nobody knows.
_LAUNCH = 'cat /proc/$$/stat /proc/sys/kernel/random/boot_id > "$0" && exec "$@"'
_POLL = 0.5
_ORPHANED = 5.0  # seconds for workers whose parent has ended
_KILLED = 15.0  # seconds in which a killed process has to go
Say = Callable[[str], None]


class Server:
    """One started server. It leads a session of its own, in which all its processes stay."""

    def __init__(
        self, argv: Sequence[str], environ: Mapping[str, str], log: Path, identity: Path
    ) -> None:
        """Start ``argv``; its output goes to ``log``, who it is to ``identity``.

        ``environ`` comes on top of this process's. Raises ``EnvironmentFailure``.
        """
        self.log, self.identity = log, identity
        try:
            with log.open("wb") as stream:
                self._process = subprocess.Popen(
                    ["sh", "-c", _LAUNCH, str(identity), *argv],
                    env={**os.environ, **environ},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentFailure(f"{log}: {error.strerror}") from error

    def wait(self, url: str, seconds: float, say: Say) -> str:
        """Wait until ``GET url/health`` is 200. Returns "" then, else why it never will be.

        The 200 counts only where this server's own processes listen at the port of ``url``.
        """
        import httpx

        begun = time.monotonic()
        with httpx.Client(timeout=5.0) as client:
            while (passed := time.monotonic() - begun) < seconds:
                if self._process.poll() is not None:
                    return reason.explain(self.log, self._process.returncode)
                with suppress(httpx.HTTPError):
                    if client.get(f"{url}/health").status_code == 200:
                        return self.fell() or self._stranger(urlsplit(url).port or 80)
                say(f"{passed:.0f} of {seconds:.0f} s: {reason.last_line(self.log)[:100]}")
                time.sleep(_POLL)
        why = reason.explain(self.log)
        return f"timeout: not ready after {seconds:.0f} s; {why}"

    def fell(self) -> str:
        """Why the server ended by itself; "" while it runs."""
        code = self._process.poll()
        return "" if code is None else reason.explain(self.log, code)

    def _stranger(self, port: int) -> str:
        """Why an answer at ``port`` is none of this server's; "" where only its own listen."""
        ours = {one.pid for one in _members(self._process.pid)}
        others = [pid for pid in _listeners(port) if pid not in ours]
        return _in_use(port, others[0]) if others else ""

    def stop(self, patience: float) -> None:
        """Stop the server and every process of its session and below it; see ``end``."""
        end(self._process.pid, patience)
        # Its pid is the session's name, so it stays unreaped until the session is empty.
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILLED)
        self.identity.unlink(missing_ok=True)


def end_orphan(identity: Path, patience: float) -> int | None:
    """Stop what still runs of the server that wrote ``identity``. Returns its pid, else ``None``.

    It is the one only if boot, pid and start time are those that it wrote; where it is gone
    itself, its session is what bears its pid and began later. Without proof nothing is stopped.
    """
    try:
        stat, boot = identity.read_text().splitlines()
        pid, started = int(stat.split()[0]), _start_time(stat)
        same_boot = boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except (OSError, ValueError, IndexError):
        identity.unlink(missing_ok=True)
        return None
    ours = same_boot and _is_ours(pid, started)
    if ours:
        end(pid, patience)
    identity.unlink(missing_ok=True)
    return pid if ours else None


def _is_ours(leader: int, started: int) -> bool:
    """Whether ``leader``, or a session that it left, is the one that began at ``started``.

    Linux gives a pid to no other process while it names a session.
    """
    with suppress(OSError):
        return _start_time(Path(f"/proc/{leader}/stat").read_text()) == started
    found = []
    for one in psutil.pids():
        with suppress(OSError):
            if os.getsid(one) == leader:
                found.append(_start_time(Path(f"/proc/{one}/stat").read_text()))
    return bool(found) and min(found) >= started


def end(leader: int, patience: float) -> None:
    """End the session of ``leader``, and what is below it: asked first, killed after ``patience``.

    Raises ``EnvironmentFailure`` where a process does not go even then.
    """
    known = _members(leader)
    with suppress(psutil.Error):
        psutil.Process(leader).terminate()
    orphaned, deadline = False, time.monotonic() + patience
    while (left := _alive(known)) and time.monotonic() < deadline:
        time.sleep(0.1)
        known |= _members(leader)
        if leader not in {one.pid for one in left} and not orphaned:
            orphaned = True  # a parent that is gone stops its workers no more
            deadline = min(deadline, time.monotonic() + _ORPHANED)
            for one in left:
                with suppress(psutil.Error):
                    one.terminate()
    for one in _alive(known | _members(leader)):
        with suppress(psutil.Error):
            one.kill()
    deadline = time.monotonic() + _KILLED
    while left := _alive(known):
        if time.monotonic() > deadline:
            pids = ", ".join(str(one.pid) for one in left)
            raise EnvironmentFailure(f"processes {pids} do not end", "look at them with ps")
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def taken(port: int) -> str:
    """Who keeps a server from 127.0.0.1:``port``, as the reason of a failure; "" if nobody."""
    with socket.socket() as probe:
        # Listens somebody, this fails all the same; connections that are over do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return _in_use(port, next(iter(_listeners(port)), None))
    return ""


def _in_use(port: int, pid: int | None) -> str:
    name = "another user's process"
    if pid is not None:
        with suppress(psutil.Error):
            name = f"{psutil.Process(pid).name()} ({pid})"
    return f"port in use: {name} listens at {port}, and is none that this sweep started"


def _listeners(port: int) -> list[int | None]:
    """The processes that answer at 127.0.0.1:``port``; ``None`` for one that is not ours to see."""
    here = [(host, port) for host in ("127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1")]
    return [
        one.pid
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and tuple(one.laddr) in here
    ]


def _members(leader: int) -> set[psutil.Process]:
    """The processes of the session ``leader``, and those below them that left it."""
    everyone = list(psutil.process_iter(["ppid"]))
    found = set()
    for one in everyone:
        with suppress(OSError):
            if os.getsid(one.pid) == leader:
                found.add(one)
    pids = {one.pid for one in found}
    while below := {one for one in everyone if one.info["ppid"] in pids and one.pid not in pids}:
        found |= below
        pids |= {one.pid for one in below}
    return found


def _alive(processes: set[psutil.Process]) -> list[psutil.Process]:
    found = []
    for one in processes:
        with suppress(psutil.Error):
            if one.is_running() and one.status() != psutil.STATUS_ZOMBIE:
                found.append(one)
    return found


def _start_time(stat: str) -> int:
    """Clock ticks from the boot to the start of the process."""
    return int(stat.rpartition(")")[2].split()[19])
