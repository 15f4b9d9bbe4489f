"""Servers that fail: one clear message, and what was measured so far is kept."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure import bench, load
from sglang_overlay.measure.runs import Protocol
from sglang_overlay.measure.store import open_store
from sglang_overlay.measure.stream import Chunk, intervals
from sglang_overlay.patchset.errors import EnvironmentFailure, Usage

from .failing import INFO, event, serving

_FEW = ["--runs", "3", "--warmup", "1", "--tokens", "6"]


def _bench(url: str, store: Path, *more: str) -> int:
    return main(["bench", "--url", url, "--store", str(store), *_FEW, *more])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("500", "500, the server failed"),
        ("cut", "the stream was cut off after 2 events"),
        ("endless", "the stream was cut off after 6 events (no end mark)"),
        ("error", "out of memory"),
        ("garbled", "no JSON: "),
    ],
)
def test_a_server_that_fails_in_mid_run_leaves_the_runs_before(
    plan: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sglang_overlay.measure.stream._EVERY", 0.0)  # progress at every event
    store = tmp_path / "b.sqlite"
    with serving("ok", "ok", "ok", plan) as (url, _):
        assert _bench(url, store, "--json") == 4
    said = capsys.readouterr()
    assert said.err.count("error: ") == 1 and message in said.err
    assert f"2 of 3 runs counted, kept as 1 in {store}" in said.err
    with open_store(store) as kept:
        (session,) = kept.load()
    assert [run.number for run in session.counted] == [1, 2]
    assert message in session.failure
    printed = json.loads(said.out)
    assert printed["median"]["tok_s"] > 0 and message in printed["failure"]
    assert any(text.startswith("1 of 3 runs are missing: ") for text in printed["warnings"])


@pytest.mark.parametrize(
    ("plan", "code", "message", "sessions"),
    [
        ("locked", 2, "401, the server wants its API key", 0),
        ("403", 2, "403, the server wants its API key", 1),
        ("404", 2, "404, no such endpoint", 1),
        ("400", 2, "400, the server refuses the request", 1),
        ("503", 4, "503, the server failed", 1),
    ],
)
def test_a_server_that_refuses_at_once_is_named_with_its_answer(
    plan: str,
    code: int,
    message: str,
    sessions: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    store = tmp_path / "b.sqlite"
    with serving(plan) as (url, _):
        assert _bench(url, store) == code
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and message in said
    with open_store(store) as kept:
        found = kept.load()
    assert len(found) == sessions
    assert all(one.failure and not one.runs for one in found)


@pytest.mark.parametrize(
    ("url", "code", "message"),
    [
        ("http://127.0.0.1:1", 4, "refused"),
        ("127.0.0.1:30000", 2, "not an address"),
        ("http://[::bad", 2, "http://[::bad"),
        ("http://no-such-host.invalid", 4, "no-such-host.invalid"),
    ],
)
def test_an_address_where_nobody_answers_is_one_message(
    url: str, code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _bench(url, tmp_path / "b.sqlite") == code
    said = capsys.readouterr().err
    assert said.count("error: ") == 1 and message in said


def test_a_run_that_ends_early_and_runs_that_differ_are_warned_of() -> None:
    with serving("ok", "short", "ok") as (url, _):
        session = bench.run(url, Protocol(warmup=0, runs=3, tokens=6))
    assert not session.failure
    early = [text for text in bench.warnings(session) if "ended early" in text]
    assert early == ["run 2 ended early: 1 of 6 tokens (abort)"]


def test_what_is_asked_for_is_what_is_sent(tmp_path: Path) -> None:
    with serving() as (url, server):
        more = ["--temperature", "0.5", "--stop-at-eos", "--input-ids"]
        assert _bench(url, tmp_path / "b.sqlite", *more) == 0
    assert len(server.bodies) == 4
    for body in server.bodies:
        asked = body["sampling_params"]
        assert asked == {"max_new_tokens": 6, "temperature": 0.5, "ignore_eos": False}
        assert body["stream"] and len(body["input_ids"]) == 30
    assert len({str(body["input_ids"]) for body in server.bodies[1:]}) == 3


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--runs 0", "--runs: 0 is too few: 1 or more"),
        ("--warmup -1", "--warmup: -1 is too few"),
        ("--tokens 0", "--tokens: 0 is too few"),
        ("--concurrency 0", "--concurrency: 0 is too few"),
        ("--temperature -1", "--temperature: -1 is none: 0 or more"),
        ("--temperature nan", "--temperature: nan is none"),
        ("--temperature inf", "--temperature: inf is none"),
        ("--api grpc", "'grpc' is not one of"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_made(
    more: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "b.sqlite"
    with serving() as (url, server):
        assert _bench(url, store, *more.split()) == 2
    said = capsys.readouterr().err
    assert message in said and said.lower().count("error: ") == 1
    assert not store.exists() and not server.bodies


def test_one_token_is_enough_to_be_measured() -> None:
    with serving() as (url, _):
        session = bench.run(url, Protocol(warmup=0, runs=1, tokens=1))
    assert session.runs[0].tokens == 1 and session.runs[0].cycle_ms is None


def test_sessions_say_which_prompts_they_had_so_that_others_are_not_compared() -> None:
    protocol = Protocol(warmup=0, runs=1, tokens=2)
    with serving() as (url, server):
        first, again, other = (
            bench.run(url, protocol, prompts=texts).protocol.prompts
            for texts in (["one", "two"], ["one", "two"], ["one", "three"])
        )
        assert first == again != other
        assert bench.run(url, protocol).protocol.prompts == "built in"
        assert isinstance(server.bodies[-1]["text"], str)
        server.pages["/server_info"] = {**INFO, "skip_tokenizer_init": True}
        assert bench.run(url, protocol).protocol.prompts == "random ids"
        assert len(server.bodies[-1]["input_ids"]) == 30


def test_tokens_that_come_together_share_their_interval() -> None:
    chunks = [Chunk(10, 1), Chunk(40, 4), Chunk(50, 6), Chunk(57, 7)]
    assert intervals(chunks) == [10, 10, 10, 5, 5, 7]
    assert intervals(chunks[:1]) == []


def test_cycles_are_the_servers_and_a_chunk_without_a_new_token_is_none() -> None:
    def bursts(tokens: int) -> list[dict[str, Any]]:
        return [event(n, tokens, spec_verify_ct=4) for n in (1, 4, 6, 6, 9)]

    with serving(events=bursts) as (url, _):
        session = bench.run(url, Protocol(warmup=0, runs=1, tokens=9))
    run = session.runs[0]
    assert (run.tokens, run.verify_cycles, run.prompt_tokens) == (9, 4, 30)
    assert run.ttft_ms is not None
    assert run.cycle_ms == pytest.approx((run.seconds * 1e3 - run.ttft_ms) / 4)


def test_a_stream_that_counts_at_its_end_alone_has_no_times_within() -> None:
    with serving(events=lambda tokens: [event(tokens, tokens)]) as (url, _):
        session = bench.run(url, Protocol(warmup=0, runs=1, tokens=9))
    run = session.runs[0]
    assert run.tokens == 9 and run.ttft_ms is run.itl_p50_ms is run.cycle_ms is None


def test_progress_tells_each_run_from_its_start_to_its_end() -> None:
    told: list[tuple[str, int, int]] = []
    with serving() as (url, _):
        protocol = Protocol(warmup=1, runs=2, tokens=6)
        bench.run(url, protocol, progress=lambda *step: told.append(step))
    for name in ("warm-up 1, tokens", "run 1, tokens", "run 2, tokens"):
        steps = [step for step in told if step[0] == name]
        assert steps[0] == (name, 0, 6) and steps[-1] == (name, 6, 6)


def test_what_answers_but_is_no_sglang_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as (url, server):
        server.pages["/server_info"] = {"name": "another server"}
        assert _bench(url, tmp_path / "b.sqlite") == 2
    assert "not an SGLang server's answer" in capsys.readouterr().err


def test_a_benchmark_without_an_end_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "python"
    endless.write_text("#!/bin/sh\nexec sleep 60\n")
    endless.chmod(0o755)
    monkeypatch.setattr("sglang_overlay.measure.load._START", 0.2)
    protocol = Protocol(tokens=4, concurrency=2)
    monkeypatch.setattr("sglang_overlay.measure.load._STEP", 0.0)
    with pytest.raises(EnvironmentFailure, match="no end after 0 s"):
        load.measure("http://127.0.0.1:9", protocol, ["a"], None, endless, 1, False, lambda _: None)


@pytest.mark.parametrize(
    ("url", "key", "signs"),
    [
        ("http://host", "s3cret-key", {"OPENAI_API_KEY": "s3cret-key"}),
        ("http://bob:s3cret%40@host/", None, {"API_KEY": "Basic Ym9iOnMzY3JldEA="}),
        ("http://bob:s3cret%40@host", "s3cret-key", {"API_KEY": "Basic Ym9iOnMzY3JldEA="}),
        ("http://host", None, {}),  # what the user has for another server is not sent to this one
    ],
)
def test_the_benchmark_has_its_credentials_by_the_environment_and_tells_how_far_it_is(
    url: str,
    key: str | None,
    signs: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    python, gate = tmp_path / "python", tmp_path / "gate"
    python.write_text(
        f"""#!/bin/sh
printf '%s\\n' "$@" > {tmp_path}/argv
env > {tmp_path}/env
printf '\\r 0%%|  | 7/8 [00:01\\r 0%%|  | 0/2 [00:00\\r 50%%|# | 1/2 [00:01' >&2
read line < {gate}
printf '\\r100%%|##| 2/2 [00:02\\nTraceback\\nKeyError: no data\\n' >&2
exit 1
"""
    )
    python.chmod(0o755)
    os.mkfifo(gate)
    monkeypatch.setattr("sglang_overlay.measure.load._START", 30.0)  # an end, should it not tell
    for name in ("OPENAI_API_KEY", "API_KEY"):
        monkeypatch.setenv(name, "s3cret of another server")
    told = []

    def tell(done: int) -> None:
        told.append(done)
        if done == 1:
            gate.write_text("go on\n")

    protocol = Protocol(tokens=4, concurrency=2)
    with pytest.raises(EnvironmentFailure, match=r"serving: KeyError: no data$"):
        load.measure(url, protocol, ["a"], key, python, 1, False, tell)
    assert set(told) <= {0, 1, 2} and 1 in told
    argv = (tmp_path / "argv").read_text()
    assert "--base-url\nhttp://host\n" in argv
    assert not any(word in argv for word in ("s3cret", "bob", "Ym9i"))
    environ = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    assert {name: environ[name] for name in load._SIGNS if name in environ} == signs


def test_a_bench_that_is_asked_to_end_takes_the_benchmark_along(tmp_path: Path) -> None:
    python, gate = tmp_path / "python", tmp_path / "gate"
    python.write_text(f'#!/bin/sh\n[ "$3" = -c ] && exit 0\necho $$ > {gate}\nexec sleep 60\n')
    python.chmod(0o755)
    os.mkfifo(gate)
    store = tmp_path / "b.sqlite"
    with serving() as (url, _):
        given = ["--concurrency", "2", "--python", str(python), "--store", str(store), *_FEW]
        command = [sys.executable, "-m", "sglang_overlay", "bench", "--url", url, *given]
        process = subprocess.Popen(["env", "--default-signal", *command])
        pid = int(gate.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize("broken", ["python", "temporary"])
def test_a_benchmark_that_cannot_be_started_is_one_message(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text("no program")
    protocol = Protocol(tokens=4, concurrency=2)
    if broken == "python":
        with pytest.raises(Usage, match=f"{python}: Permission denied"):
            load.check(python, protocol, ["a"])
        return
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    with pytest.raises(EnvironmentFailure, match=r"none.*: No such file or directory"):
        load.measure("http://h", protocol, ["a"], None, python, 1, False, lambda _: None)
