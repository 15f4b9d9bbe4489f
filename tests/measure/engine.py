"""A tiny model, and SGLang's own server on it, on the CPU."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from ci.sglang_env import sglang_python
from sglang_overlay.patchset.pin import Pin

from ..conftest import GPT2

_START = 300  # seconds that a start may take


def make_model(folder: Path) -> Path:
    """A GPT-2 of two layers that has a token for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {**level, "use_regex": False},
        "decoder": {**level, "use_regex": True},
        "model": {"type": "BPE", "vocab": {letters[b]: b for b in range(256)}, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": letters[0],
        "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(GPT2))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@contextmanager
def serve(model: Path, pin: Pin, *arguments: str) -> Iterator[str]:
    """The address of the pin's ``sglang.launch_server`` on ``model`` while it runs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = model.parent / f"server-{port}.log"
    command = [sglang_python(pin.version), "-m", "sglang.launch_server", "--model-path", model]
    command += f"--device cpu --load-format dummy --port {port}".split()
    command += "--attention-backend torch_native --disable-radix-cache".split()
    command += ["--max-total-tokens", "4096", *arguments]
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [*map(str, command)],
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=model.parent,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + _START
        while not _answers(url):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False
