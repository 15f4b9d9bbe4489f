"""Where a running server's cycle goes: a short window through SGLang's profiler, as a table."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .. import show
from ..options import options
from ..patchset.errors import EnvironmentFailure, PatchsetError, Usage
from . import stream
from .kernels import ALL_REDUCE
from .runs import Protocol
from .split import Split, split
from .store import open_store
from .trace import Progress, cycles, is_whole, read

if TYPE_CHECKING:
    import httpx

STEPS = 16
_PACE = 64  # cycles that are timed without the profiler, if no draft is accepted
_WARM = 8  # tokens before the window
_SPARE = 100  # cycles more, since the server decodes on while it is told to start
_MORE = 2  # requests more, where the window opened when the first was over
_PROMPT = [7 * n % 90 + 5 for n in range(30)]
_PATIENCE = 120.0  # seconds for ranks that still write after the request's end


@dataclass(frozen=True)
class Capture:
    """What one window left: a trace of each rank, rank 0 first, and the speed just before."""

    traces: tuple[Path, ...]
    cycle_ms: float  # a cycle, or a decode step, without the profiler; 0 where unknown


def capture(
    url: str, key: str | None, out: Path, steps: int = STEPS, progress: Progress | None = None
) -> Capture:
    """Have the server at ``url`` trace ``steps`` cycles of a request that this makes.

    The server writes ``out/ID-TP-n.trace.json.gz`` for each rank: it runs on this machine, or
    shares ``out`` with it. Python stacks and shapes are left out, since they slow the host.
    Raises ``Usage`` (no SGLang, key wanted) or ``EnvironmentFailure`` (no answer, no trace).
    """
    import httpx

    tell = progress or (lambda what, done, total: None)
    with stream.connect(url, key) as client:
        info = stream.get(client, "/server_info")
        if "model_path" not in info:
            raise Usage(f"{client.base_url}/server_info: not an SGLang server's answer")
        width = info.get("speculative_num_draft_tokens") or 1
        cycle_ms = _pace(client, _PACE * width, tell)
        total = (_WARM + steps + _SPARE) * width
        name = f"overlay-{time.time_ns()}"
        ranks = _ranks(info)
        found: list[Path] = []
        started = opened = False
        try:
            for done in _generate(client, total):
                tell("decoding", done, total)
                if not started and done >= _WARM:
                    started = opened = True
                    _control(client, "/start_profile", _window(out, name, steps))
            if not started:
                raise EnvironmentFailure(
                    f"{client.base_url}: the request ended before {_WARM} tokens"
                )
            for _ in range(_MORE):
                if any(out.glob(f"{name}-*")):
                    break
                for done in _generate(client, total):
                    tell("decoding", done, total)
            else:
                _close(client)
            opened = False
            found = _await(out, name, ranks, tell)
        except httpx.HTTPError as error:
            raise stream.unreachable(client, error) from error
        finally:
            if opened:
                _close(client)
    return Capture(tuple(found), cycle_ms)


def _pace(client: "httpx.Client", tokens: int, tell: Progress) -> float:
    """Milliseconds of a cycle, as ``bench`` counts them: SGLang tells the number of verify
    cycles with a request's last event alone. The first of two requests warms up."""
    times = [
        stream.ask(
            client,
            Protocol(tokens=count),
            _PROMPT,
            "",
            0,
            warmup,
            lambda done, count=count: tell("without the profiler", done, count),  # type: ignore[misc]
        ).cycle_ms
        for count, warmup in ((_WARM, True), (tokens, False))
    ]
    return round(times[-1] or 0.0, 3)


def _window(out: Path, name: str, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(out.absolute()),
        "profile_id": name,
        "num_steps": steps,
        "activities": ["CPU", "GPU"],
        "with_stack": False,
        "record_shapes": False,
    }


def _ranks(info: dict[str, Any]) -> int:
    """How many schedulers write a trace; with DP attention the DP ranks are among the TP ranks."""
    replicas = 1 if info.get("enable_dp_attention") else info.get("dp_size") or 1
    return int((info.get("tp_size") or 1) * (info.get("pp_size") or 1) * replicas)


def _generate(client: "httpx.Client", tokens: int) -> Iterator[int]:
    """Make one streamed request; yields the tokens so far."""
    body = {
        "input_ids": _PROMPT,
        "sampling_params": {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        "stream": True,
    }
    with client.stream("POST", "/generate", json=body) as answer:
        if answer.status_code != 200:
            text = answer.read().decode(errors="replace")
            raise stream.refusal(client, "/generate", answer.status_code, text)
        for _, line in stream.lines_of(answer):
            if line.startswith(b"data: {"):
                event = stream.event_of(client, "/generate", line.removeprefix(b"data: "))
                yield event["meta_info"]["completion_tokens"]


def _control(client: "httpx.Client", path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, json=body)
    if answer.status_code != 200:
        raise stream.refusal(client, path, answer.status_code, answer.text)


def _close(client: "httpx.Client") -> None:
    """End the window; that there is none, or no server any more, is no failure."""
    import httpx

    with suppress(PatchsetError, httpx.HTTPError):
        _control(client, "/stop_profile", {})


def _complete(out: Path, name: str) -> list[Path]:
    """The traces of ``name`` that are there to the last byte, in the order of their ranks."""
    found = sorted(out.glob(f"{name}-TP-*.trace.json.gz"), key=lambda file: (len(file.name), file))
    return [file for file in found if is_whole(file)]


def _await(out: Path, name: str, ranks: int, tell: Progress) -> list[Path]:
    """The traces, once every rank has written its own; after a while those that are there."""
    end, found, seen = time.monotonic() + _PATIENCE, [], -1
    while time.monotonic() < end:
        size = sum(file.stat().st_size for file in out.glob(f"{name}-*"))
        if size == seen and len(found := _complete(out, name)) >= ranks:
            return found
        tell("waiting for the traces", len(found), ranks)
        seen = size
        time.sleep(0.2)
    if found:
        return found
    raise EnvironmentFailure(
        f"no trace came to {out}, on the server's own machine it may be",
        "profile there; or fetch the file, and --trace FILE",
    )


@click.command("profile")
@click.option("--url", help="A running server, http://HOST:PORT.")
@click.option("--key", envvar="SGLANG_ADMIN_KEY", help="The server's admin key.")
@click.option("--trace", type=click.Path(path_type=Path), help="A trace file, in place of --url.")
@click.option("--steps", type=click.IntRange(4), default=STEPS, help="Cycles in the window.")
@click.option("--out", type=click.Path(path_type=Path), help="Where the server writes its traces.")
@click.option("--top", type=click.IntRange(0), default=0, help="Name as many kernels as well.")
@click.option("--store", type=click.Path(path_type=Path), help="A file of bench results.")
@click.option("--session", help="The session there to which the split belongs.")
@options("json")
def profile(
    url: str | None,
    key: str | None,
    trace: Path | None,
    steps: int,
    out: Path | None,
    top: int,
    store: Path | None,
    session: str | None,
    as_json: bool,
) -> int:
    """Print where the time of an EAGLE cycle goes: draft, verify, extend, host gaps.

    The server makes a request meanwhile. SGLANG_PROFILE_V2 must not be set there.
    """
    if (url is None) == (trace is None):
        raise Usage("give either --url or --trace")
    if (store is None) != (session is None):
        raise Usage("--store and --session go together")
    with show.progress() as progress:
        if url:
            folder = out or Path(tempfile.gettempdir()) / f"sglang-overlay-profile-{os.getpid()}"
            taken = capture(url, key, folder, steps, progress)
        else:
            assert trace
            taken = Capture((trace,), 0.0)
        seen, result = look(taken, progress)
    if store and session:
        if not seen.gpu:
            raise Usage("no GPU in the trace, so no split to keep")
        with open_store(store) as opened:
            opened.explain(opened.find(session).key, seen.breakdown(taken.cycle_ms or None))
    show.emit(result | {"top": top}, as_json, table)
    return 0


def look(taken: Capture, progress: Progress | None = None) -> tuple[Split, dict[str, Any]]:
    """The split of one rank; and that with every rank's all-reduces, printable.

    Of the ranks that decoded it is the one with the least time in all-reduces: the others' hold
    their waiting for it. Raises ``Usage`` where no rank decoded.
    """
    tell = progress or (lambda what, done, total: None)
    splits: dict[Path, Split] = {}
    failure: Usage | None = None
    for file in taken.traces:
        try:
            splits[file] = split(cycles(read(file, tell)))
        except Usage as error:
            failure = error
    if not splits:
        raise failure or Usage("no trace")
    first, chosen = min(splits.items(), key=lambda one: _all_reduce_ms(one[1]))
    return chosen, {
        "trace": str(first),
        "unprofiled_cycle_ms": taken.cycle_ms or None,
        "ranks": [
            {"trace": file.name, "all_reduce_ms": _all_reduce_ms(one)}
            for file, one in splits.items()
        ],
        **asdict(chosen),
        "all_reduces": [asdict(one) for one in chosen.all_reduces],
    }


def _all_reduce_ms(one: Split) -> float:
    return one.main.kinds.get(ALL_REDUCE, 0.0)


def table(result: dict[str, Any]) -> None:
    """Print what ``profile`` gives."""
    on_gpu = result["gpu"]
    rows = [
        (
            one["name"],
            *(f"{one[what]:.3f}" for what in ("gpu_ms", "gap_ms", "host_ms")),
            *(f"{one[what]:g}" for what in ("kernels", "all_reduces")),
            one["mode"],
        )
        for one in result["passes"]
    ]
    titles = ("pass", "GPU ms", "gaps ms", "host ms", "kernels", "all-reduces", "mode")
    drop = () if on_gpu else (1, 2, 4, 5, 6)
    keep = [n for n in range(len(titles)) if n not in drop]
    show.table([titles[n] for n in keep], [[row[n] for n in keep] for row in rows])
    main = next(one for one in result["passes"] if one["name"] in ("verify", "decode"))
    total = main["gpu_ms"] or 1.0
    kinds = [(kind, f"{ms:.3f}", f"{ms / total:.0%}") for kind, ms in main["kinds"].items()]
    if kinds:
        print()
        show.table((f"in {main['name']}", "GPU ms", "share"), kinds)
    if result["top"]:
        print()
        named = [
            (one["name"], one["kind"], f"{one['count']:g}", f"{one['ms']:.3f}")
            for one in result["main_kernels"][: result["top"]]
        ]
        show.table(("kernel", "kind", "a cycle", "ms"), named)
    print()
    for line in _lines(result, main):
        print(line)


def _lines(result: dict[str, Any], main: dict[str, Any]) -> Iterator[str]:
    """What the tables do not say."""
    speed = f"{result['cycle_ms']:.2f} ms under the profiler"
    if plain := result["unprofiled_cycle_ms"]:
        speed += f", {plain:.2f} ms without it"
    yield f"a cycle (batch {result['batch_size']}, mean of {result['cycles']}): {speed}"
    if not result["gpu"]:
        yield "no GPU in the trace: host times only"
    for one in result["all_reduces"]:
        yield f"all-reduce: {one['count']:g} a cycle, {one['each_us']:g} us each: {one['name']}"
    waits = {one["trace"]: one["all_reduce_ms"] for one in result["ranks"]}
    if len(waits) > 1 and max(waits.values()) > 0:
        least = min(waits, key=lambda name: waits[name])
        yield (
            f"all-reduces of all ranks: {waits[least]:.3f} to {max(waits.values()):.3f} ms a "
            f"{main['name']}; the least ({least}) is what they cost, the rest is waiting for it"
        )
    yield f"trace: {result['trace']}"
