"""Sweeps: with commands that are no server, and with SGLang's own on the CPU."""

import fcntl
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.cli import main
from sglang_overlay.measure.journal import Attempt, Journal
from sglang_overlay.measure.store import open_store
from sglang_overlay.patchset.pin import Pin

from ..pins import each_older_pin
from .failing import serving
from .test_servers import gone

ERRORS = """\
name = "errors"
[server]
command = ["sh", "-c"]
ready_s = 20
stop_s = 1
"""


def experiments(*commands: str, more: str = "") -> str:
    """A sweep of shell commands that never are a server."""
    tables = [
        f'[[experiment]]\nname = "{n}"\nargs = {{ "{command}" = true }}\n'
        for n, command in enumerate(commands)
    ]
    return ERRORS + more + "".join(tables)


def write(folder: Path, text: str) -> list[str]:
    (folder / "sweep.toml").write_text(text)
    return ["sweep", str(folder / "sweep.toml"), "--out", str(folder / "out"), "--json"]


def until(true: Callable[[], object], seconds: float = 400) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.1)


def shown(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_a_start_that_fails_is_a_result_and_the_sweep_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, experiments("echo CUDA out of memory", "echo hm; exit 3"))
    assert main(command) == 0
    result, said = shown(capsys)
    failures = {row["experiment"]: row["failure"] for row in result["results"]}
    assert failures == {
        "0": "out of memory: CUDA out of memory",
        "1": "unknown: exit code 3, last lines: hm",
    }
    assert "[2/2] 1: failed: unknown: exit code 3, last lines: hm" in said
    assert not list((tmp_path / "out").glob("*.identity"))
    # The same command has nothing left to do; --again starts what failed once more.
    assert main(command) == 0
    again, said = shown(capsys)
    assert again == result and said.count("done before") == 2
    assert main([*command, "--again", "--only", "1"]) == 0
    assert "done before" not in shown(capsys)[1]
    with open_store(tmp_path / "out/results.sqlite") as store:
        assert [one.name for one in store.load()] == ["errors/0", "errors/1", "errors/1"]


@pytest.mark.parametrize(
    ("stop", "measured", "ended"),
    [
        ("[stop]\nfailures = 2\n", ["0", "1"], "2 failures in a row"),
        ("[stop]\nseconds = 0\n", [], "0 s are over"),
    ],
)
def test_a_stop_condition_ends_the_sweep(
    stop: str,
    measured: list[str],
    ended: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(write(tmp_path, experiments("exit 1", "exit 2", "exit 3", more=stop))) == 1
    result, _ = shown(capsys)
    assert [row["experiment"] for row in result["results"]] == measured
    assert result["ended"] == ended
    assert result["left"] == [name for name in ("0", "1", "2") if name not in measured]


def test_a_server_that_never_is_ready_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = experiments("echo loading weights; sleep 1000").replace("20", "1")
    assert main(write(tmp_path, text)) == 0
    (row,) = shown(capsys)[0]["results"]
    assert row["failure"].startswith("timeout: not ready after 1 s; unknown: last lines: loading")


# Ready at once, and gone or at fault with the first request.
FALLS = """
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"model_path": "m"}')

    def do_POST(self):
        if sys.argv[1] == "falls":
            print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
            os._exit(1)
        self.send_response(500)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


def test_a_server_that_falls_while_it_is_measured_is_a_result_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.py").write_text(FALLS)
    text = experiments().replace('"sh", "-c"', f'"{sys.executable}", "{tmp_path}/server.py"')
    for what in ("falls", "fails"):
        text += f'[[experiment]]\nname = "{what}"\nargs = {{ {what} = "$port" }}\n'
    assert main(write(tmp_path, text)) == 0
    failures = {row["experiment"]: row["failure"] for row in shown(capsys)[0]["results"]}
    assert failures["falls"].startswith("out of memory: torch.OutOfMemoryError: CUDA out of memory")
    assert "500, the server failed" in failures["fails"]
    with open_store(tmp_path / "out/results.sqlite") as store:
        kept = {one.name: one.failure for one in store.load()}
    assert kept == {f"errors/{name}": failure for name, failure in failures.items()}


def test_a_port_that_a_stranger_has_is_a_result_and_its_server_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (url, server):
        server.pages["/health"] = {}
        port = f"port = {server.server_address[1]}\n"
        assert main(write(tmp_path, experiments("sleep 1000", more=port))) == 0
        (row,) = shown(capsys)[0]["results"]
        assert row["failure"].startswith("port in use: ") and f"({os.getpid()})" in row["failure"]
        assert not list((tmp_path / "out").glob("*.log"))
        assert httpx.get(f"{url}/health").status_code == 200 and not server.bodies


SPECULATES = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

cycles = int(sys.argv[1])

class Handler(BaseHTTPRequestHandler):
    def send(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        steps = {"speculative_num_steps": int(sys.argv[3])}
        self.send(json.dumps({"model_path": "m", **steps}).encode())

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        lines = b""
        for done in (1, 12):
            meta = {"prompt_tokens": 3, "completion_tokens": done, "spec_verify_ct": cycles,
                    "spec_accept_length": 12 / cycles,
                    "finish_reason": {"type": "length"} if done == 12 else None}
            lines += f"data: {json.dumps({'text': 'a', 'meta_info': meta})}\\n\\n".encode()
        self.send(lines + b"data: [DONE]\\n\\n")

HTTPServer(("127.0.0.1", int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.mark.parametrize("runs", [3, 5])
def test_a_row_whose_accept_length_fell_with_the_same_drafter_is_marked(
    runs: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.py").write_text(SPECULATES)
    bench = f"[bench]\nwarmup = 0\nruns = {runs}\ntokens = 12\n"
    text = experiments(more=bench)
    text = text.replace('"sh", "-c"', f'"{sys.executable}", "{tmp_path}/server.py"')
    for name, cycles, steps in (("sound", 4, 2), ("broken", 8, 2), ("shorter", 8, 1)):
        words = f'"{cycles}" = true, "$port" = true, "{steps}" = true'
        text += f'[[experiment]]\nname = "{name}"\nargs = {{ {words} }}\n'
    command = write(tmp_path, text)
    assert main(command) == 0
    rows = {row["experiment"]: row for row in shown(capsys)[0]["results"]}
    assert {name: row["failure"] for name, row in rows.items()} == dict.fromkeys(rows, "")
    marks = {name: row["accept_below"] for name, row in rows.items()}
    assert marks == {"sound": "", "broken": "sound", "shorter": ""}
    assert main(command[:-1]) == 0
    told = capsys.readouterr().out
    assert "1.50 fell" in told and told.count("fell") == 1
    assert "broken: accept length below that of sound" in told


def test_a_row_whose_runs_ended_early_or_differ_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "server.py").write_text(SPECULATES)
    text = experiments("exit 1", more="[bench]\nwarmup = 0\nruns = 1\ntokens = 13\n")
    text = text.replace('"sh", "-c"', f'"{sys.executable}", "{tmp_path}/server.py"')
    words = '"4" = true, "$port" = true, "2" = true'
    text += f'[[experiment]]\nname = "short"\nargs = {{ {words} }}\n'
    command = write(tmp_path, text)
    assert main(command) == 0
    warnings = {row["experiment"]: row["warnings"] for row in shown(capsys)[0]["results"]}
    early = "run 1 ended early: 12 of 13 tokens (length)"
    assert warnings == {"short": [early], "0": []}  # why 0 has no runs, its failure says
    assert main(command[:-1]) == 0
    assert f"short: {early}" in capsys.readouterr().out


def test_two_sweeps_in_one_folder_are_kept_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, experiments("exit 1"))
    (tmp_path / "out").mkdir()
    with (tmp_path / "out/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert main(command) == 4
    assert "another sweep is at work there" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_sweep_that_is_asked_to_end_takes_its_server_along(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, experiments("exit 1", "exec sleep 1000"))
    # As at a prompt, also where the tests run in the background or under nohup.
    prompt = ["env", "--default-signal", sys.executable, "-m", "sglang_overlay"]
    sweep = subprocess.Popen([*prompt, *command], stderr=subprocess.DEVNULL)
    identity = tmp_path / "out/002-1.identity"
    until(lambda: identity.exists() and identity.stat().st_size)
    server = psutil.Process(int(identity.read_text().split()[0]))
    sweep.send_signal(number)
    assert sweep.wait(60) == 130
    assert gone([server])
    assert not identity.exists()
    # What was over is kept; what was under way is left to do.
    assert main([*command, "--only", "0"]) == 0
    result, said = shown(capsys)
    assert "[1/1] 0: done before" in said and result["left"] == ["1"]


def test_under_nohup_a_closed_terminal_ends_no_sweep(tmp_path: Path) -> None:
    command = write(tmp_path, experiments("kill -HUP $$PPID", "exit 1"))
    words = ["nohup", sys.executable, "-m", "sglang_overlay", *command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["results"]) == 2


def test_an_attempt_that_was_killed_leaves_the_result_before_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.sqlite", "few")
    first = journal.begin("x", "digest")
    journal.end(first, "yes", 7)
    journal.begin("x", "digest")
    assert journal.latest() == {"digest": Attempt(first, "x", "digest", "yes", 7)}
    journal.close()


def test_a_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").write_text("a file")
    assert main(write(tmp_path, experiments("exit 1"))) == 4
    assert f"{tmp_path / 'out'}: File exists" in capsys.readouterr().err


def test_a_full_disk_ends_the_sweep_and_keeps_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, experiments(*(f"exit {n}" for n in range(1, 100))))

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    done = subprocess.run(
        [sys.executable, "-m", "sglang_overlay", *command],
        preexec_fn=full,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 4, done.stderr
    assert "what is stored is kept" in done.stderr or "was stored before is kept" in done.stderr
    with open_store(tmp_path / "out/results.sqlite") as store:
        kept = len(store.load())
    assert 5 < kept < 99
    assert main(command) == 0
    result, said = shown(capsys)
    assert len(result["results"]) == 99
    assert said.count("done before") in (kept - 1, kept)  # the last may have been half noted


SERVER = """\
name = "cpu"
[values]
python = "python3"
model = "model"
source = "stock"
[server]
command = ["$python", "-m", "sglang.launch_server", "--port", "$port", "--model-path", "$model",
    "--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init", "--attention-backend",
    "torch_native", "--disable-radix-cache", "--max-total-tokens", "4096"]
ready_s = 300
stop_s = 30
[bench]
warmup = 1
runs = 2
tokens = 24
[profile]
steps = 6
[[experiment]]
name = "one"
args = { "--max-running-requests" = 4 }
env = { NCCL_ALGO = "Ring" }
[[experiment]]
name = "two"
baseline = "one"
args = { "--max-running-requests" = 8 }
env = { NCCL_ALGO = "Ring", SOME_NAME = "of my own" }
environ = { PYTHONPATH = "$source" }
"""
NONE = """\
[[experiment]]
name = "none"
args = { "--no-such-flag" = 1 }
"""


@pytest.fixture(scope="session")
def patched(pin: Pin, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned source with the whole series; its top is one for PYTHONPATH."""
    place = tmp_path_factory.mktemp("sweep") / "patched"
    assert main(["fetch", str(place), "--pin", pin.name]) == 0
    assert main(["apply", "--sglang-dir", str(place)]) == 0
    return place / "python"


def real(text: str, pin: Pin, model: Path, patched: Path, folder: Path) -> list[str]:
    """The command for a sweep of the pin's servers; ``two`` is the patched one."""
    values = {"python": sglang_python(pin.version), "model": model, "source": patched}
    given = [word for name, value in values.items() for word in ("-D", f"{name}={value}")]
    return [sys.executable, "-m", "sglang_overlay", *write(folder, text), *given]


def check_measured(rows: dict[str, dict[str, Any]], out: Path) -> None:
    """``one`` and ``two`` were measured and profiled, with the settings that they were given."""
    for name in ("one", "two"):
        assert rows[name]["tok_s"] > 0 and not rows[name]["failure"]
    # What arrived, by the servers' own word. A CPU leaves nothing to profile.
    unpatched = "variables, for want of the patch worker-env-report"
    nothing = "no profile: no GPU in the trace"
    assert rows["one"]["note"] == f"not checked: {unpatched}; {nothing}"
    assert rows["two"]["note"] == f"yes; {nothing}"
    log = sorted(out.glob("*-two.log"))[-1].read_text()
    (started,) = re.findall(r"server_args=.*", log)
    assert "'worker_env': ['NCCL_ALGO=Ring', 'SOME_NAME=of my own']" in started
    assert rows["two"]["speedup"] == pytest.approx(rows["two"]["tok_s"] / rows["one"]["tok_s"])
    assert rows["two"]["predicted"] == pytest.approx(
        rows["one"]["cycle_ms"] / rows["two"]["cycle_ms"]
    )
    # The trace of the window is there all the same: the host's side of each decode step.
    (trace,) = out.glob("*one.traces/*-TP-0.trace.json.gz")
    seen = subprocess.run(
        [sys.executable, "-m", "sglang_overlay", "profile", "--trace", trace],
        capture_output=True,
        text=True,
        check=False,
    )
    assert seen.returncode == 0, seen.stderr
    assert re.search(r"^decode +\d+\.\d+$", seen.stdout, re.M)
    assert "no GPU in the trace: host times only" in seen.stdout
    with open_store(out / "results.sqlite") as store:
        sessions = store.load()
    assert {one.labels["--max-running-requests"] for one in sessions if one.runs} == {"4", "8"}
    assert not list(out.glob("*.identity"))


@each_older_pin
def test_a_sweep_measures_and_profiles_the_servers_of_an_older_pin(
    pin: Pin, model: Path, patched: Path, tmp_path: Path
) -> None:
    command = real(SERVER, pin, model, patched, tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = {row["experiment"]: row for row in json.loads(done.stdout)["results"]}
    check_measured(rows, tmp_path / "out")
    with open_store(tmp_path / "out/results.sqlite") as store:
        assert {one.context["versions"]["sglang"] for one in store.load()} == {pin.version}


def test_a_sweep_of_real_servers_goes_on_after_kill_9(
    pin: Pin, model: Path, patched: Path, tmp_path: Path
) -> None:
    """``one`` and ``none`` run stock SGLang, ``two`` the patched one."""
    out = tmp_path / "out"
    command = real(SERVER + NONE, pin, model, patched, tmp_path)
    log = tmp_path / "said"

    def said() -> str:
        return log.read_text() if log.exists() else ""

    with log.open("w") as stream:
        sweep = subprocess.Popen(command, stdout=stream, stderr=stream)
    try:
        # Killed when the second server has its scheduler: the sweep alone, its server lives on.
        until(lambda: "[2/3] two: starting" in said() or sweep.poll() is not None)
        until(lambda: len(list(out.glob("*.identity"))) == 1)
        (identity,) = out.glob("*.identity")
        until(lambda: identity.stat().st_size)
        leader = psutil.Process(int(identity.read_text().split()[0]))
        until(lambda: len(leader.children(recursive=True)) >= 2)
    finally:
        sweep.kill()
        sweep.wait(60)
    assert "[1/3] one: ready after" in said(), said()
    assert leader.is_running() and "sglang" in " ".join(leader.cmdline())
    family = [leader, *leader.children(recursive=True)]

    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"stopped the server {leader.pid} of a sweep that was killed" in done.stderr
    assert gone(family)
    assert "[1/3] one: done before" in done.stderr
    result = json.loads(done.stdout)
    rows = {row["experiment"]: row for row in result["results"]}
    assert result["results"][-1]["experiment"] == "none"  # failures last
    assert rows["none"]["failure"].startswith("argument refused: ")
    assert "--no-such-flag" in rows["none"]["failure"]
    assert sorted(rows) == ["none", "one", "two"] and result["left"] == []
    check_measured(rows, out)
