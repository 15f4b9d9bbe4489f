"""Starting and stopping: real processes, their children, and their logs."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sglang_overlay.measure.reason import explain
from sglang_overlay.measure.server import Server, end_orphan, free_port, taken

# A parent with a child, and a grandchild that left the session; each ignores what asks it to go.
FAMILY = """
import os, signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1000)"
away = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}])"
family = [subprocess.Popen([sys.executable, "-c", child]),
          subprocess.Popen([sys.executable, "-c", away], start_new_session=True)]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(1000)
"""


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def start(folder: Path, *argv: str) -> Server:
    return Server(argv, {}, folder / "log", folder / "identity")


def family(pid: int) -> list[psutil.Process]:
    return [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    running = []
    for one in processes:
        with suppress(psutil.NoSuchProcess):  # it may end while we look
            if one.is_running() and one.status() != "zombie":
                running.append(one)
    return not running


def written_pid(folder: Path) -> int:
    until(lambda: (folder / "identity").exists() and (folder / "identity").stat().st_size)
    return int((folder / "identity").read_text().split()[0])


def test_all_that_a_server_started_is_stopped_and_nothing_else(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "1000"])
    server = start(tmp_path, sys.executable, "-c", FAMILY)
    pid = written_pid(tmp_path)
    until(lambda: len(family(pid)) == 4 and "up" in (tmp_path / "log").read_text())
    processes = family(pid)
    try:
        server.stop(0.2)
        assert gone(processes)
        assert bystander.poll() is None
    finally:
        for one in processes:
            with suppress(psutil.Error):
                one.kill()
        bystander.kill()
        bystander.wait()
    assert not (tmp_path / "identity").exists()


def test_a_server_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *a: sys.exit('bye'))\n"
    server = start(tmp_path, sys.executable, "-c", f"{code}print('up', flush=True)\ntime.sleep(99)")
    until(lambda: "up" in (tmp_path / "log").read_text())
    server.stop(20)
    assert "bye" in (tmp_path / "log").read_text()


def test_an_orphan_is_stopped_only_when_it_is_proved_to_be_ours(tmp_path: Path) -> None:
    server = start(tmp_path, "sleep", "1000")
    pid = written_pid(tmp_path)
    identity = tmp_path / "identity"
    stat, boot = identity.read_text().splitlines()
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    fields[19] = str(int(fields[19]) + 1)
    for forged in (
        f"{head}) {' '.join(fields)}\n{boot}\n",  # the pid was given to another process
        f"{stat}\n{'0' * 8}{boot[8:]}\n",  # the machine was started again
        stat,  # cut off
        "",
    ):
        identity.write_text(forged)
        assert end_orphan(identity, 1) is None
        assert not identity.exists()
        assert psutil.Process(pid).status() != "zombie"
    identity.write_text(f"{stat}\n{boot}\n")
    assert end_orphan(identity, 1) == pid
    assert server.fell().startswith("killed: signal 15")
    identity.write_text(f"{stat}\n{boot}\n")
    assert end_orphan(identity, 1) is None  # it is gone


def test_what_a_server_left_that_is_gone_is_stopped_when_it_is_proved_to_be_its_own(
    tmp_path: Path,
) -> None:
    server = start(tmp_path, "sh", "-c", "sleep 1000 & echo $!")
    until(server.fell)
    (child,) = [psutil.Process(int(text)) for text in (tmp_path / "log").read_text().split()]
    identity = tmp_path / "identity"
    stat, boot = identity.read_text().splitlines()
    pid = int(stat.split()[0])
    assert not psutil.pid_exists(pid)
    fields = stat.split()
    fields[21] = str(int(child.create_time() * 100))  # long after the child began
    for forged in (f"{' '.join(fields)}\n{boot}\n", f"{stat}\n{'0' * 8}{boot[8:]}\n"):
        identity.write_text(forged)
        assert end_orphan(identity, 1) is None
        assert not gone([child])
    identity.write_text(f"{stat}\n{boot}\n")
    assert end_orphan(identity, 1) == pid
    assert gone([child]) and not identity.exists()


def test_a_server_whose_starter_was_killed_is_found_again(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from sglang_overlay.measure.server import Server\n"
        "folder = Path(sys.argv[1])\n"
        "Server(['sleep', '1000'], {}, folder / 'log', folder / 'identity')\n"
        "os.kill(os.getpid(), signal.SIGKILL)"  # at once: nothing is written by us after that
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    pid = written_pid(tmp_path)
    server = psutil.Process(pid)
    until(lambda: server.name() == "sleep")
    assert end_orphan(tmp_path / "identity", 5) == pid
    until(lambda: gone([server]))


@pytest.mark.parametrize(
    ("argv", "seconds", "reason"),
    [
        (["sleep", "1000"], 0.2, "timeout: not ready after 0 s; unknown: last lines: none"),
        (["sh", "-c", "echo loading; echo; sleep 1000"], 0.6, "last lines: loading"),
        (["sh", "-c", "echo Address already in use; exit 1"], 60, "port in use: Address"),
        (["sh", "-c", "kill -9 $$"], 60, "killed: signal 9"),
        (["sh", "-c", "echo a; echo b; exit 3"], 60, "unknown: exit code 3, last lines: a | b"),
        (["no-such-command"], 60, "no-such-command: not found"),
    ],
)
def test_a_server_that_does_not_come_up(
    argv: list[str], seconds: float, reason: str, tmp_path: Path
) -> None:
    said: list[str] = []
    server = start(tmp_path, *argv)
    try:
        assert reason in server.wait("http://127.0.0.1:9", seconds, said.append)
    finally:
        server.stop(1)
    assert len(said) <= seconds / 0.5 + 2


STRANGER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def stranger() -> Iterator[tuple[int, int]]:
    """The pid and port of a server that answers 200, and that nobody here knows."""
    process = subprocess.Popen(
        [sys.executable, "-c", STRANGER, "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout
    with process.stdout as out:
        yield process.pid, int(out.readline())
        process.kill()
        process.wait()


def test_the_answer_of_a_stranger_is_not_taken_for_the_servers(
    stranger: tuple[int, int], tmp_path: Path
) -> None:
    pid, port = stranger
    server = start(tmp_path, "sleep", "1000")
    try:
        assert f"({pid}) listens at {port}" in taken(port)
        why = server.wait(f"http://127.0.0.1:{port}", 60, str)
        assert why.startswith("port in use: ") and f"({pid})" in why
    finally:
        server.stop(1)
    assert psutil.pid_exists(pid)


@pytest.mark.parametrize("launch", [["exec"], ["setsid"]])
def test_a_server_is_ready_when_it_or_a_process_below_it_answers(
    launch: list[str], tmp_path: Path
) -> None:
    """With ``setsid`` what listens is a child that left the session."""
    port = free_port()
    assert taken(port) == ""
    (tmp_path / "server.py").write_text(STRANGER)
    words = [*launch, sys.executable, str(tmp_path / "server.py"), str(port)]
    server = start(tmp_path, "sh", "-c", " ".join(words) + "; exit 1")
    try:
        assert server.wait(f"http://127.0.0.1:{port}", 60, str) == ""
    finally:
        server.stop(1)
    assert taken(port) == ""


# As SGLang 0.5.23, NCCL 2.28 and torch print them.
CAPTURE = """\
[2026-11-29 10:00:00 TP3] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/decode_cuda_graph_runner.py", line 601, in __init__
    self.capture()
Exception: Capture cuda graph failed: CUDA error: operation failed due to a previous error
Possible solutions:
1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)
2. set --cuda-graph-max-bs-decode to a smaller value (e.g., 16)
3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. (Not recommended. Huge loss)
[2026-11-29 10:00:01] Rank 0 scheduler is dead. Please check if there are relevant logs.
"""
NCCL = """\
node1:77:77 [3] NCCL INFO comm 0x5 rank 3 nRanks 8
[rank3]: torch.distributed.DistBackendError: NCCL error in: /pytorch/NCCLUtils.cpp:77, \
unhandled system error, NCCL version 2.28.9
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
"""
MEMORY = """\
[2026-11-29 10:00:00 TP0] Load weight begin. avail mem=30.10 GB
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity
[2026-11-29 10:00:01] Rank 0 scheduler is dead.
"""


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (CAPTURE, "graph capture failed: Exception: Capture cuda graph failed: CUDA error: op"),
        (NCCL, "NCCL error: ncclSystemError: System call"),
        (MEMORY, "out of memory: torch.OutOfMemoryError: CUDA out of memory. Tried"),
        ("RuntimeError: Not enough memory. Please try to increase --mem", "out of memory: Runt"),
        (f"{CAPTURE}\n{MEMORY}", "out of memory: "),
        (CAPTURE.replace("operation failed", "NCCL error"), "graph capture failed: "),
        (
            "[Errno 98] error while attempting to bind on address ('0.0.0.0', 30000): "
            "[errno 98] address already in use",
            "port in use: [Errno 98]",
        ),
        ("launch_server.py: error: unrecognized arguments: --nccl", "argument refused: launch"),
        ("something odd\n" * 9, "unknown: exit code 1, last lines: something odd | "),
        ("", "unknown: exit code 1, last lines: none"),
    ],
)
def test_the_reason_is_read_from_the_log(log: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text(log)
    assert explain(file, 1).startswith(reason)


def test_a_log_that_is_not_there_or_no_text_gives_a_reason_too(tmp_path: Path) -> None:
    assert explain(tmp_path / "nowhere", 1) == "unknown: exit code 1, last lines: none"
    file = tmp_path / "log"
    file.write_bytes(os.urandom(300_000) + b"\nCUDA out of memory\n")
    assert explain(file) == "out of memory: CUDA out of memory"
