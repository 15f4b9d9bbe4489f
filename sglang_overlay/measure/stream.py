"""One request to a running server, and the times at which its tokens came."""

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from ..patchset.errors import EnvironmentFailure, PatchsetError, Usage
from . import secret
from .prompts import Prompt
from .runs import Protocol, Run

if TYPE_CHECKING:
    import httpx

ENDPOINTS = {"native": "/generate", "openai": "/v1/completions", "chat": "/v1/chat/completions"}
_EVERY = 0.25  # seconds between two reports of progress
# A first request may compile kernels for minutes.
_CONNECT, _READ = 10.0, 600.0


@dataclass(frozen=True)
class Chunk:
    """One event of the stream: when it came, and how many tokens there were by then."""

    ms: float  # since the request was sent
    tokens: int


def connect(url: str, key: str | None = None) -> "httpx.Client":
    """A client for the server at ``url``. Raises ``Usage`` for what is no address.

    User and password in it are sent, and stand in no ``base_url`` or message.
    """
    import httpx

    headers = {"Authorization": f"Bearer {key}"} if key else {}
    place = secret.bare(url)
    if not url.startswith(("http://", "https://")) or "@" in place:
        raise Usage(f"{place.rpartition('@')[2]}: not an address", "--url http://HOST:PORT")
    try:
        timeout = httpx.Timeout(_READ, connect=_CONNECT)
        asking = httpx.URL(url)
        auth = (asking.username, asking.password) if asking.userinfo else None
        return httpx.Client(base_url=place.rstrip("/"), headers=headers, timeout=timeout, auth=auth)
    except httpx.InvalidURL as error:
        raise Usage(f"{place}: {error}", "--url http://HOST:PORT") from error


def get(client: "httpx.Client", path: str) -> dict[str, Any]:
    """The JSON object at ``path``. Raises ``Usage`` or ``EnvironmentFailure``."""
    import httpx

    try:
        answer = client.get(path, timeout=30)
        if answer.status_code != 200:
            raise refusal(client, path, answer.status_code, answer.text)
        value = answer.json()
    except httpx.HTTPError as error:
        raise unreachable(client, error) from error
    except ValueError as error:
        raise Usage(f"{client.base_url}{path}: no JSON: not an SGLang server") from error
    return value if isinstance(value, dict) else {}


def ask(
    client: "httpx.Client",
    protocol: Protocol,
    prompt: Prompt,
    model: str,
    number: int,
    warmup: bool,
    progress: Callable[[int], None],
) -> Run:
    """Send one request and read its answer to the end; ``progress`` gets the tokens so far.

    Nothing but the clock is read while tokens come: events are parsed when all are there.
    Raises ``Usage`` where the server refuses the request, ``EnvironmentFailure`` where it
    fails or the stream ends before its end.
    """
    import httpx

    path, body = ENDPOINTS[protocol.api], _body(protocol, prompt, model)
    lines: list[tuple[float, bytes]] = []
    sent = shown = perf_counter()
    try:
        with client.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                text = answer.read().decode(errors="replace")
                raise refusal(client, path, answer.status_code, text)
            for at, line in lines_of(answer):
                lines.append((at, line))
                if protocol.stream and at - shown > _EVERY and line.startswith(b"data: {"):
                    shown = at
                    with suppress(ValueError):  # what is wrong with it is said at the end
                        progress(_tokens(json.loads(line[6:])) or 0)
        end = perf_counter()
    except httpx.HTTPError as error:
        if lines:
            raise _cut(client, path, len(lines), str(error)) from error
        raise unreachable(client, error) from error
    if not protocol.stream:
        events = [event_of(client, path, b"".join(line for _, line in lines))]
        return _run(events, (), (end - sent), number, warmup)
    data = [(at, line[6:]) for at, line in lines if line.startswith(b"data: ")]
    if not data or data[-1][1].strip() != b"[DONE]":
        raise _cut(client, path, len(data), "no end mark")
    events = [event_of(client, path, line) for _, line in data[:-1]]
    chunks = _chunks(zip((at for at, _ in data), events, strict=False), sent)
    seconds = (chunks[-1].ms / 1e3) if chunks else end - sent
    if len(chunks) == 1 and chunks[0].tokens > 1:  # counted at its end alone: no times to be had
        chunks = []
    return _run(events, chunks, seconds, number, warmup)


def intervals(chunks: Sequence[Chunk]) -> list[float]:
    """Milliseconds between tokens: one value for each token after the first chunk.

    Speculation delivers several tokens at once. A chunk that brings k tokens, d ms after the
    chunk before it, gives k values of d / k each, so the mean is the time a token takes
    and a percentile is over tokens, not over chunks. SGLang's own serving benchmark counts so.
    """
    found: list[float] = []
    for before, chunk in pairwise(chunks):
        count = chunk.tokens - before.tokens
        found += [(chunk.ms - before.ms) / count] * count
    return found


def refusal(client: "httpx.Client", path: str, status: int, text: str) -> PatchsetError:
    """What to raise for an answer that is not 200."""
    where = f"{client.base_url.copy_with(path=path)}"
    reason = " ".join(text.split())[:300]
    if status in (401, 403):
        return Usage(f"{where}: {status}, the server wants its API key", "--key KEY")
    if status in (404, 405):
        return Usage(f"{where}: {status}, no such endpoint: is this an SGLang server?", "--url")
    if status < 500:
        return Usage(f"{where}: {status}, the server refuses the request: {reason}")
    return EnvironmentFailure(f"{where}: {status}, the server failed: {reason}", "read its log")


def unreachable(client: "httpx.Client", error: Exception) -> EnvironmentFailure:
    """What to raise where no answer came."""
    reason = str(error) or type(error).__name__
    return EnvironmentFailure(f"{client.base_url}: {reason}", "see that the server is up")


def _cut(client: "httpx.Client", path: str, count: int, reason: str) -> EnvironmentFailure:
    where = client.base_url.copy_with(path=path)
    return EnvironmentFailure(
        f"{where}: the stream was cut off after {count} events ({reason})",
        "read the server's log; a proxy in between may be the cause",
    )


def _body(protocol: Protocol, prompt: Prompt, model: str) -> dict[str, Any]:
    if protocol.api == "native":
        return {
            "text" if isinstance(prompt, str) else "input_ids": prompt,
            "sampling_params": {
                "max_new_tokens": protocol.tokens,
                "temperature": protocol.temperature,
                "ignore_eos": protocol.ignore_eos,
            },
            "stream": protocol.stream,
        }
    body = {
        "model": model,
        "max_tokens": protocol.tokens,
        "temperature": protocol.temperature,
        "ignore_eos": protocol.ignore_eos,
        "stream": protocol.stream,
        "return_spec_tokens_details": True,
    }
    if protocol.stream:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    if protocol.api == "openai":
        return body | {"prompt": prompt}
    if not isinstance(prompt, str):
        raise Usage("a chat takes texts, not token ids", "--api native")
    return body | {"messages": [{"role": "user", "content": prompt}]}


def lines_of(answer: "httpx.Response") -> Iterator[tuple[float, bytes]]:
    """Each line of a streamed ``answer`` that is not empty, and when it came."""
    # httpx's own iter_lines also breaks at U+2028 and the like, which JSON holds as they are.
    rest = b""
    for block in answer.iter_bytes():
        at = perf_counter()
        *lines, rest = (rest + block).split(b"\n")
        yield from ((at, line) for line in lines if line)
    if rest:
        yield perf_counter(), rest


def event_of(client: "httpx.Client", path: str, line: bytes) -> dict[str, Any]:
    """The JSON object in ``line``. Raises where it is none, or says that the server failed."""
    try:
        event = json.loads(line)
    except ValueError as error:
        raise _cut(client, path, 0, f"no JSON: {line[:60]!r}") from error
    if isinstance(event, dict) and (failure := event.get("error")):
        told = failure if isinstance(failure, dict) else {"message": failure}
        code = told.get("code")
        status = code if isinstance(code, int) else 500
        raise refusal(client, path, status, str(told.get("message")))
    return event if isinstance(event, dict) else {}


def _chunks(events: "Iterator[tuple[float, dict[str, Any]]]", sent: float) -> list[Chunk]:
    chunks: list[Chunk] = []
    for at, event in events:
        tokens = _tokens(event) or 0
        if tokens > (chunks[-1].tokens if chunks else 0):
            chunks.append(Chunk((at - sent) * 1e3, tokens))
    return chunks


def _tokens(event: Mapping[str, Any]) -> int | None:
    counts = event.get("meta_info") or event.get("usage") or {}
    return counts.get("completion_tokens")


def _run(
    events: Sequence[Mapping[str, Any]],
    chunks: Sequence[Chunk],
    seconds: float,
    number: int,
    warmup: bool,
) -> Run:
    """What the last events say of tokens, acceptance and the end, with the times of ``chunks``."""
    meta: dict[str, Any] = {}
    finish = ""
    for event in events:
        extension = event.get("sglext") or {}
        meta |= event.get("meta_info") or {}
        meta |= event.get("usage") or {}
        meta |= extension.get("spec_tokens_details") or {}
        reasons = [choice.get("finish_reason") for choice in event.get("choices") or ()]
        reasons.append((event.get("meta_info") or {}).get("finish_reason"))
        for reason in filter(None, reasons):
            finish = reason["type"] if isinstance(reason, dict) else reason
    gaps = intervals(chunks)
    centiles = statistics.quantiles(gaps, n=100, method="inclusive") if len(gaps) > 1 else []
    cycles = meta.get("spec_verify_ct")
    return Run(
        number=number,
        warmup=warmup,
        requests=1,
        prompt_tokens=meta.get("prompt_tokens", 0),
        tokens=meta.get("completion_tokens", 0),
        seconds=seconds,
        ttft_ms=chunks[0].ms if chunks else None,
        itl_p50_ms=centiles[49] if centiles else None,
        itl_p99_ms=centiles[98] if centiles else None,
        verify_cycles=cycles or None,
        accept_length=meta.get("spec_accept_length") if cycles else None,
        histogram=tuple(meta.get("spec_correct_drafts_histogram") or ()),
        finish=finish,
    )
