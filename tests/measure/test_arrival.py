"""Whether a setting came to every worker, from what the server answers."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from sglang_overlay.measure.arrival import check, deliver
from sglang_overlay.measure.experiment import Experiment, Value


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers with what its ``answers`` hold, by path; 404 for the rest."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = self.server.answers.get(self.path)  # type: ignore[attr-defined]
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield http
        http.shutdown()
        thread.join()


def worker(tp: int, late: str | None = None, **values: str) -> dict[str, Any]:
    env = {name: {"value": value, "origin": "user", "late": late} for name, value in values.items()}
    return {"process": "scheduler", "ranks": {"tp": tp, "dp": 0}, "env": env}


def experiment(env: dict[str, str], **args: Value) -> Experiment:
    flags = {f"--{name.replace('_', '-')}": value for name, value in args.items()}
    varied = {key: str(value) for key, value in {**flags, **env}.items()}
    return Experiment("x", ("python3",), flags, env, {}, varied)


RING = {"NCCL_ALGO": "Ring"}
MIXED = {"NCCL_ALGO": "Ring", "NCCL_ALGO@tp1": "Tree"}


@pytest.mark.parametrize(
    ("env", "workers", "found"),
    [
        (RING, [worker(0, NCCL_ALGO="Ring"), worker(1, NCCL_ALGO="Ring")], "yes"),
        (
            RING,
            [worker(0, NCCL_ALGO="Ring"), worker(1, NCCL_ALGO="Tree")],
            "no: NCCL_ALGO is Tree in scheduler tp1 dp0",
        ),
        (RING, [worker(0)], "no: NCCL_ALGO is not set in scheduler tp0 dp0"),
        (
            RING,
            [worker(0, "NCCL had started", NCCL_ALGO="Ring")],
            "no: NCCL_ALGO came too late in scheduler tp0 dp0: NCCL had started",
        ),
        (MIXED, [worker(0, NCCL_ALGO="Ring"), worker(1, NCCL_ALGO="Tree")], "yes"),
        (
            MIXED,
            [worker(0, NCCL_ALGO="Tree"), worker(1, NCCL_ALGO="Ring")],
            "no: NCCL_ALGO is Tree in scheduler tp0 dp0, NCCL_ALGO is Ring in scheduler tp1 dp0",
        ),
        ({"MY_TOKEN": "s3cret"}, [worker(0, MY_TOKEN="<redacted>")], "yes"),
        (RING, None, "not checked: variables, for want of the patch worker-env-report"),
    ],
)
def test_every_worker_must_have_every_variable(
    server: HTTPServer, env: dict[str, str], workers: list[Any] | None, found: str
) -> None:
    server.answers = {"/worker_env": workers and {"workers": workers}}  # type: ignore
    url = f"http://127.0.0.1:{server.server_port}"
    assert str(check(url, experiment(env))) == found


@pytest.mark.parametrize(
    ("value", "answer", "found"),
    [
        (2, {"speculative_num_steps": 2}, "yes"),
        ("2", {"speculative_num_steps": 2}, "yes"),
        (2, {"speculative_num_steps": 1}, "overridden: --speculative-num-steps is 1"),
        (2, {"speculative_num_steps": None}, "overridden: --speculative-num-steps is None"),
        (False, {"speculative_num_steps": None}, "yes"),
        (2, {}, "not checked: --speculative-num-steps"),
    ],
)
def test_an_argument_must_be_what_the_server_says_it_has(
    server: HTTPServer, value: Value, answer: dict[str, Any], found: str
) -> None:
    server.answers = {"/server_info": {"model_path": "m", **answer}}  # type: ignore
    url = f"http://127.0.0.1:{server.server_port}"
    assert str(check(url, experiment({}, speculative_num_steps=value))) == found


def test_a_patched_server_gets_its_variables_on_the_command_line_alone() -> None:
    one = experiment(MIXED)
    words, environ = deliver(one, patched=True)
    assert words == ["--worker-env", "NCCL_ALGO=Ring", "--worker-env", "NCCL_ALGO@tp1=Tree"]
    assert environ == {"SGLANG_WORKER_ENV_REPORT_NAMES": "NCCL_ALGO"}
    assert deliver(one, patched=False) == ([], dict(one.env))


def test_a_secret_for_the_workers_is_in_no_command_line() -> None:
    one = experiment({**RING, "HF_TOKEN": "s3cret"})
    words, environ = deliver(one, patched=True)
    assert words == ["--worker-env", "NCCL_ALGO=Ring"]
    assert environ == {"SGLANG_WORKER_ENV_REPORT_NAMES": "HF_TOKEN,NCCL_ALGO", "HF_TOKEN": "s3cret"}
