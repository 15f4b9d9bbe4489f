"""The real engine on the CPU, measured."""

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.cli import main
from sglang_overlay.measure import bench, load, prompts
from sglang_overlay.measure.runs import Protocol
from sglang_overlay.measure.store import open_store
from sglang_overlay.patchset.pin import Pin

from ..pins import each_pin
from .failing import event, serving

pytestmark = each_pin


@pytest.mark.parametrize("api", ["native", "openai", "chat"])
def test_every_run_has_its_tokens_and_the_times_within_it(server: str, api: str) -> None:
    # With a temperature: at 0 these weights say one token for ever, and a chat may hide it.
    protocol = Protocol(warmup=1, runs=2, tokens=24, temperature=1.0, api=api)
    session = bench.run(server, protocol)
    assert not session.failure
    assert [(run.number, run.warmup) for run in session.runs] == [(1, True), (1, False), (2, False)]
    for run in session.runs:
        assert (run.tokens, run.finish, run.requests) == (24, "length", 1)
        assert run.prompt_tokens == len(str(prompts.built_in()[run.number - 1]))  # a byte each
        assert run.ttft_ms and run.itl_p50_ms and run.itl_p99_ms and run.cycle_ms
        assert run.itl_p50_ms <= run.itl_p99_ms
        assert 0 < run.ttft_ms < run.seconds * 1e3
        # The mean interval is of the size of the others, on a busy machine too.
        assert run.itl_p50_ms / 5 < run.cycle_ms < run.itl_p99_ms * 2
        assert run.verify_cycles is None and run.accept_length is None


def test_token_ids_serve_where_texts_cannot(server: str, tmp_path: Path) -> None:
    file = tmp_path / "ids.jsonl"
    file.write_text("[1, 2, 3]\n[4, 5, 6, 7]\n")
    protocol = Protocol(warmup=0, runs=3, tokens=8)
    session = bench.run(server, protocol, prompts=prompts.read(file))
    assert [run.prompt_tokens for run in session.runs] == [3, 4, 3]
    assert session.protocol.prompts.startswith("given ")


def test_without_streaming_there_are_tokens_and_no_times_within(server: str) -> None:
    session = bench.run(server, Protocol(warmup=0, runs=1, tokens=8, stream=False))
    run = session.runs[0]
    assert (run.tokens, run.finish) == (8, "length")
    assert run.ttft_ms is run.itl_p50_ms is run.cycle_ms is None


def test_many_at_once_go_through_sglangs_own_benchmark(
    pin: Pin, server: str, tmp_path: Path
) -> None:
    protocol = Protocol(warmup=0, runs=1, tokens=16, concurrency=4, temperature=1.0)
    secretly = server.replace("//", "//bob:s3cret@")
    seen: list[str] = []

    def watch(what: str, done: int, total: int) -> None:
        for one in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):  # it may end while we look
                seen.extend(one.cmdline())

    with open_store(tmp_path / "b.sqlite") as store:
        python = sglang_python(pin.version)
        session = bench.run(secretly, protocol, store=store, python=python, progress=watch)
        assert store.load() == [session]
    assert load._MODULE in seen and server in seen
    assert not any("s3cret" in word for word in seen)
    run = session.runs[0]
    assert (run.requests, run.tokens, run.finish) == (4, 64, "length")
    assert run.prompt_tokens == sum(len(str(one)) for one in prompts.built_in()[:4])
    assert run.ttft_ms and run.itl_p50_ms and run.itl_p99_ms
    assert run.ttft_ms < run.seconds * 1e3
    assert run.cycle_ms is None


_METADATA = """
import json, os, sys, types
from sglang.benchmark.serving import get_auth_headers
from sglang.srt.entrypoints.openai.utils import spec_tokens_details_from_meta_info
from sglang.srt.managers import tokenizer_manager as manager
manager.get_spec = lambda: types.SimpleNamespace(speculative_num_draft_tokens=3)
sent = types.SimpleNamespace(
    spec_verify_ct=[4], spec_num_correct_drafts=[4], completion_tokens=[9],
    spec_correct_drafts_histogram=[[1, 2, 1]],
)
meta = {}
manager.TokenizerManager._calculate_spec_decoding_metrics(None, meta, sent, 0)
heads = []
for signs in json.loads(sys.argv[1]):
    os.environ.update(signs)
    heads.append(get_auth_headers())
print(json.dumps([meta, spec_tokens_details_from_meta_info(meta).model_dump(), heads]))
"""


@pytest.fixture(scope="module")
def metadata(pin: Pin) -> list[dict[str, Any]]:
    """What SGLang says of a request of 9 tokens in 4 cycles: natively, and OpenAI-compatible.
    And what its benchmark sends as credentials.

    Its own code says it; EAGLE itself needs kernels that do not run without a GPU.
    """
    signs = [
        {name: value for name, value in load._signed(url, key).items() if name in load._SIGNS}
        for url, key in (("http://bob:s3cret@h", None), ("http://h", "a-key"))
    ]
    done = subprocess.run(
        [sglang_python(pin.version), "-W", "ignore", "-c", _METADATA, json.dumps(signs)],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("api", ["native", "openai"])
def test_acceptance_is_read_from_sglangs_own_metadata(
    api: str, metadata: list[dict[str, Any]]
) -> None:
    def native(tokens: int) -> list[dict[str, Any]]:
        return [event(1, tokens), event(tokens, tokens, **metadata[0])]

    def openai(tokens: int) -> list[dict[str, Any]]:
        def chunk(done: int, finish: str | None) -> dict[str, Any]:
            choice = {"text": "a", "finish_reason": finish}
            usage = {"prompt_tokens": 30, "completion_tokens": done}
            return {"choices": [choice], "usage": usage}

        details = {"choices": [], "sglext": {"spec_tokens_details": metadata[1]}}
        return [chunk(1, None), chunk(tokens, "length"), details]

    with serving(events=native if api == "native" else openai) as (url, _):
        session = bench.run(url, Protocol(warmup=0, runs=1, tokens=9, api=api))
    run = session.runs[0]
    assert (run.verify_cycles, run.accept_length, run.histogram) == (4, 2.25, (1, 2, 1))
    assert (run.tokens, run.prompt_tokens, run.finish) == (9, 30, "length")


def test_the_benchmark_takes_its_credentials_from_the_environment(
    metadata: list[dict[str, Any]],
) -> None:
    assert metadata[2] == [
        {"Authorization": "Basic Ym9iOnMzY3JldA=="},
        {"Authorization": "Bearer a-key"},
    ]


def test_many_at_once_need_a_python_with_sglang(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "b.sqlite")
    assert main(["bench", "--url", server, "--concurrency", "8", "--store", store]) == 2
    said = capsys.readouterr().err
    assert "8 requests at once need sglang.benchmark.serving" in said
    assert "--python PYTHON" in said


def test_the_record_says_what_was_measured(
    pin: Pin, server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "b.sqlite")
    log = tmp_path / "server.log"
    said = (
        f"sglang-overlay[7]: 0.1.0+sglang.{pin.version} on SGLang {pin.version}: worker-env, other"
    )
    log.write_text(f"x {said}\n")
    given = ["--url", server, "--runs", "2", "--warmup", "0", "--tokens", "8"]
    given += ["--name", "first", "--log", str(log), "--store", store]
    assert main(["bench", *given, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    known = printed["context"]
    assert known["versions"]["sglang"] == pin.version
    assert known["patches"] == ["worker-env", "other"]
    assert known["arguments"]["attention_backend"] == "torch_native"
    assert known["workers"] is None  # the stock server has no worker-env-report
    assert len(known["environment"]) == 16
    assert known["gpus"] == []  # the server is on this machine, which has none
    assert printed["median"]["tok_s"] > 0
    assert main(["bench", "list", "--store", store]) == 0
    assert "first" in capsys.readouterr().out
    assert main(["bench", "compare", "1", "first", "--store", store]) == 0
    assert "too few runs" in capsys.readouterr().out


def test_a_request_that_the_server_refuses_is_a_usage_error(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "b.sqlite")  # the model's context is 512 tokens
    given = ["--url", server, "--tokens", "4000", "--store", store]
    assert main(["bench", *given]) == 2
    said = capsys.readouterr().err
    assert "400, the server refuses the request" in said and "context length" in said


def test_a_wrong_path_is_named(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = str(tmp_path / "b.sqlite")
    assert main(["bench", "--url", f"{server}/v2", "--store", store]) == 2
    assert "404, no such endpoint" in capsys.readouterr().err
