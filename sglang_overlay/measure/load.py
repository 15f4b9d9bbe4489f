"""Many requests at once, sent by SGLang's own serving benchmark."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from ..patchset.errors import EnvironmentFailure, Usage
from . import secret
from .prompts import Prompt
from .runs import Protocol, Run

_MODULE = "sglang.benchmark.serving"  # `sglang.bench_serving` before 0.5.12
_BACKENDS = {"native": "sglang", "openai": "sglang-oai", "chat": "sglang-oai-chat"}
_SHORTEST = 4  # new tokens; the benchmark's own bound
_START, _STEP = 600.0, 1.0  # seconds that the benchmark has, and more for each new token
_POLL = 0.5
_BAR = re.compile(rb"(\d+)/(\d+) \[")  # tqdm's
_FAILED = "All requests failed"  # its warning, before its arithmetic fails too
_SIGNS = ("OPENAI_API_KEY", "API_KEY")  # what the benchmark signs with, the first before the second


def check(python: Path | None, protocol: Protocol, prompts: Sequence[Prompt]) -> None:
    """Raise ``Usage`` where the serving benchmark cannot do what ``protocol`` asks."""
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise Usage(
            f"{_MODULE} sends texts, and this server has no tokenizer for them",
            "start the server without --skip-tokenizer-init",
        )
    if protocol.tokens < _SHORTEST:
        raise Usage(f"{_MODULE} asks for at least {_SHORTEST} new tokens", "--tokens N")
    command = [python or sys.executable, "-W", "ignore", "-c", _FIND]
    try:
        found = subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise Usage(f"{python}: {error.strerror}", "--python PYTHON") from error
    if not found:
        raise Usage(
            f"{protocol.concurrency} requests at once need {_MODULE}, and "
            f"{python or sys.executable} has none",
            "--python PYTHON, of the environment that has SGLang",
        )


_FIND = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({_MODULE!r}))"


def measure(
    url: str,
    protocol: Protocol,
    prompts: Sequence[Prompt],
    key: str | None,
    python: Path | None,
    number: int,
    warmup: bool,
    tell: Callable[[int], None],
) -> Run:
    """``protocol.concurrency`` requests, all sent at once, to the end of the last.

    The server's caches are flushed first, which also sets its counters of accepted tokens to
    zero, so the accept length is this run's own. Times to the first token and between tokens
    are over all requests. ``tell`` gets the number of those that are over, by the benchmark's own
    count: questions to the server would cost it time.
    Raises ``EnvironmentFailure`` when a request failed, or when the benchmark has no end.
    """
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = _result(Path(folder), url, protocol, prompts, key, python, tell)
    except OSError as error:
        place = error.filename or tempfile.gettempdir()
        raise EnvironmentFailure(f"{place}: {error.strerror}", "free space, or TMPDIR") from error
    return _run(result, protocol, number, warmup)


def _result(
    folder: Path,
    url: str,
    protocol: Protocol,
    prompts: Sequence[Prompt],
    key: str | None,
    python: Path | None,
    tell: Callable[[int], None],
) -> dict[str, Any]:
    """What the benchmark writes of one pass."""
    dataset, out = folder / "prompts.jsonl", folder / "result.jsonl"
    chosen = islice(cycle(prompts), protocol.concurrency)
    rows = ({"conversations": [{"value": p}, {"value": "An answer."}]} for p in chosen)
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    quiet = ["-W", "ignore", "-W", f"default:{_FAILED}"]
    command = [python or sys.executable, *quiet, "-m", _MODULE]
    command += _arguments(url, protocol, dataset, out)
    limit = _START + _STEP * protocol.tokens

    def heard(log: bytes) -> None:
        steps = [int(n) for n, of in _BAR.findall(log) if int(of) == protocol.concurrency]
        tell(steps[-1] if steps else 0)

    code, said = _perform(command, _signed(url, key), folder, limit, heard)
    if code or not out.is_file():
        raise EnvironmentFailure(f"{_MODULE}: {said}", "read the server's log")
    result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return result


def _perform(
    command: Sequence[object],
    environ: dict[str, str],
    folder: Path,
    limit: float,
    heard: Callable[[bytes], None],
) -> tuple[int, str]:
    """Run ``command`` to its end, or ours; returns its exit code and what it said last.

    Meanwhile ``heard`` gets what it has written to standard error.
    Raises ``EnvironmentFailure`` when it has no end within ``limit`` seconds.
    """
    log, said = folder / "stderr", folder / "stdout"
    end = time.monotonic() + limit
    with log.open("wb") as stderr, said.open("wb") as stdout:
        process = subprocess.Popen([*map(str, command)], env=environ, stdout=stdout, stderr=stderr)
    try:
        while process.poll() is None:
            if time.monotonic() > end:
                raise EnvironmentFailure(
                    f"{_MODULE}: no end after {limit:.0f} s", "read the server's log"
                )
            heard(log.read_bytes())
            with suppress(subprocess.TimeoutExpired):
                process.wait(_POLL)
    finally:
        process.kill()
        process.wait()
    lines = [
        line.decode(errors="replace").strip()
        for file in (said, log)
        for line in file.read_bytes().splitlines()
        if line.strip() and not _BAR.search(line)
    ]
    if any(_FAILED in line for line in lines):
        return process.returncode, _FAILED
    return process.returncode, (lines or [f"exit {process.returncode}"])[-1][:300]


def _signed(url: str, key: str | None) -> dict[str, str]:
    """This process's environment with what signs requests to ``url``, and nothing of another's
    server: a command line is public, and holds neither."""
    import httpx

    environ = {name: value for name, value in os.environ.items() if name not in _SIGNS}
    server = httpx.URL(url)
    if server.userinfo:  # as everywhere, before the key
        user = b64encode(f"{server.username}:{server.password}".encode()).decode()
        return environ | {"API_KEY": f"Basic {user}"}
    return environ | ({"OPENAI_API_KEY": key} if key else {})


def _arguments(url: str, protocol: Protocol, dataset: Path, out: Path) -> list[str]:
    values = {
        "--backend": _BACKENDS[protocol.api],
        "--base-url": secret.bare(url).rstrip("/"),
        "--dataset-name": "custom",
        "--dataset-path": dataset,
        "--num-prompts": protocol.concurrency,
        "--max-concurrency": protocol.concurrency,
        "--sharegpt-output-len": protocol.tokens,
        "--temperature": protocol.temperature,
        "--warmup-requests": 0,  # runs of ours warm the server up
        "--output-file": out,
    }
    if protocol.api != "native":
        values["--extra-request-body"] = json.dumps({"temperature": protocol.temperature})
    flags = ["--flush-cache", "--output-details"]
    flags += ["--disable-stream"] if not protocol.stream else []
    flags += ["--disable-ignore-eos"] if not protocol.ignore_eos else []
    return [str(part) for pair in values.items() for part in pair] + flags


def _run(result: dict[str, Any], protocol: Protocol, number: int, warmup: bool) -> Run:
    failures = [error for error in result["errors"] if error]
    if failures or result["completed"] != protocol.concurrency:
        reason = failures[0].strip().splitlines()[-1] if failures else "requests are missing"
        raise EnvironmentFailure(
            f"{_MODULE}: {result['completed']} of {protocol.concurrency} requests came back: "
            f"{reason[:300]}",
            "read the server's log",
        )
    early = sum(count < protocol.tokens for count in result["output_lens"])
    return Run(
        number=number,
        warmup=warmup,
        requests=result["completed"],
        prompt_tokens=result["total_input_tokens"],
        tokens=result["total_output_tokens"],
        seconds=result["duration"],
        ttft_ms=_time(result, "median_ttft_ms", protocol),
        itl_p50_ms=_time(result, "median_itl_ms", protocol),
        itl_p99_ms=_time(result, "p99_itl_ms", protocol),
        accept_length=result["accept_length"],
        finish=f"{early} early" if early else "length",
    )


def _time(result: dict[str, Any], name: str, protocol: Protocol) -> float | None:
    # 0 where a stream brought no text (special tokens alone): it counts tokens by their text.
    return (result[name] or None) if protocol.stream else None
