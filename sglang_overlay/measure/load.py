"""Many requests at once, sent by SGLang's own serving benchmark."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


def check(python: Path | None, protocol: Protocol, prompts: Sequence[Prompt]) -> None:
    """Raise ``Usage`` where the serving benchmark cannot do what ``protocol`` asks."""
    found = subprocess.run(
        [python or sys.executable, "-W", "ignore", "-c", _FIND],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode != 0:
        raise Usage(
            f"{protocol.concurrency} requests at once need {_MODULE}, and "
            f"{python or sys.executable} has none",
            "--python PYTHON, of the environment that has SGLang",
        )
    if not all(isinstance(prompt, str) for prompt in prompts):
        raise Usage(
            f"{_MODULE} sends texts, and this server has no tokenizer for them",
            "start the server without --skip-tokenizer-init",
        )
    if protocol.tokens < _SHORTEST:
        raise Usage(f"{_MODULE} asks for at least {_SHORTEST} new tokens", "--tokens N")


_FIND = f"import importlib.util, sys; sys.exit(not importlib.util.find_spec({_MODULE!r}))"


def measure(
    url: str,
    protocol: Protocol,
    prompts: Sequence[Prompt],
    key: str | None,
    python: Path | None,
    number: int,
    warmup: bool,
) -> Run:
    """``protocol.concurrency`` requests, all sent at once, to the end of the last.

    The server's caches are flushed first, which also sets its counters of accepted tokens to
    zero, so the accept length is this run's own. Times to the first token and between tokens
    are over all requests. Raises ``EnvironmentFailure`` when a request failed, or when the
    benchmark has no end.
    """
    limit = _START + _STEP * protocol.tokens
    with tempfile.TemporaryDirectory() as folder:
        dataset, out = Path(folder, "prompts.jsonl"), Path(folder, "result.jsonl")
        chosen = islice(cycle(prompts), protocol.concurrency)
        rows = ({"conversations": [{"value": p}, {"value": "An answer."}]} for p in chosen)
        dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            done = subprocess.run(
                [python or sys.executable, "-m", _MODULE, *_arguments(url, protocol, dataset, out)],
                env=os.environ | ({"OPENAI_API_KEY": key} if key else {}),
                capture_output=True,
                text=True,
                check=False,
                timeout=limit,
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentFailure(
                f"{_MODULE}: no end after {limit:.0f} s", "read the server's log"
            ) from error
        if done.returncode != 0 or not out.is_file():
            lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines()
            reason = lines[-1] if lines else f"exit {done.returncode}"
            reason = reason.replace(url.rstrip("/"), secret.bare(url))
            raise EnvironmentFailure(f"{_MODULE}: {reason[:300]}", "read the server's log")
        result = json.loads(out.read_text().splitlines()[-1])
    return _run(result, protocol, number, warmup)


def _arguments(url: str, protocol: Protocol, dataset: Path, out: Path) -> list[str]:
    values = {
        "--backend": _BACKENDS[protocol.api],
        "--base-url": url.rstrip("/"),
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
    flags = ["--flush-cache", "--output-details", "--disable-tqdm"]
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
