"""Real copies between every two cards, in child processes: a broken pair hangs.

One child works through the pairs and says where it is. When it falls silent it is killed, that
pair is said to hang, and a new child does the rest.
"""

import json
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import permutations
from queue import Empty, SimpleQueue
from typing import Any

from . import children
from .facts import Copy, Facts, Maybe, Unknown

Order = tuple[int, int]
_LARGE = 64 * 2**20


def copy_all(facts: Facts, executable: str, say: Callable[[str], None]) -> Maybe[tuple[Copy, ...]]:
    """A copy for every ordered pair of cards that CUDA shows to ``executable``."""
    python = facts.python
    if isinstance(python, Unknown):
        return python
    if isinstance(python.torch, Unknown):
        return python.torch
    if python.torch.devices < 2:
        return Unknown(python.torch.problem or f"torch sees {python.torch.devices} card")
    pairs = list(permutations(range(python.torch.devices), 2))
    say(f"copies between {len(pairs)} pairs of cards")
    command = [executable, "-c", children.COPIES, "cuda", str(_LARGE)]
    return tuple(supervise(command, pairs, say=say))


def supervise(
    command: Sequence[str],
    pairs: Sequence[Order],
    start: float = 120,
    each: float = 30,
    total: float = 600,
    say: Callable[[str], None] = lambda text: None,
) -> list[Copy]:
    """One ``Copy`` for each of ``pairs``, in their order, after at most ``total`` seconds and a
    little. A child has ``start`` seconds to begin (importing torch), and ``each`` for a pair."""
    found: dict[Order, Copy] = {}
    end = time.monotonic() + total
    while left := [pair for pair in pairs if pair not in found]:
        before = len(found)
        reason = _one_child(command, left, found, start, each, end, say)
        if time.monotonic() >= end:
            reason = f"the {total:.0f} s for all pairs were over"
        elif len(found) > before:
            continue  # it got on: the rest is for another child
        for a, b in left:
            found.setdefault((a, b), Copy(a, b, "not tried", detail=reason))
    return [found[pair] for pair in pairs]


def _one_child(
    command: Sequence[str],
    left: Sequence[Order],
    found: dict[Order, Copy],
    start: float,
    each: float,
    end: float,
    say: Callable[[str], None],
) -> str:
    """Fill ``found`` by one child; returns why it stopped before the end of ``left``."""
    current: Order | None = None
    limit = start
    with _child(command, left) as (lines, last_words):
        while True:
            try:
                line = lines.get(timeout=max(min(limit, end - time.monotonic()), 0))
            except Empty:
                if current is not None and time.monotonic() < end:
                    found[current] = Copy(*current, "hangs", detail=f"no answer in {each:.0f} s")
                return f"no child began in {start:.0f} s"
            if line is None:
                words = last_words()
                if current is not None:
                    found[current] = Copy(*current, "failed", detail=f"its process died: {words}")
                return f"the child stopped: {words}"
            limit = each
            pair = (line.pop("source", -1), line.pop("target", -1))
            match line.pop("event"):
                case "start":
                    current = pair
                    say(f"  {pair[0]} to {pair[1]}")
                case "done":
                    found[pair], current = Copy(*pair, **line), None


Lines = SimpleQueue[dict[str, Any] | None]


@contextmanager
def _child(
    command: Sequence[str], pairs: Sequence[Order]
) -> Iterator[tuple[Lines, Callable[[], str]]]:
    """The lines that a child prints, ``None`` after the last, and what it said in the end."""
    lines: Lines = SimpleQueue()
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            cwd="/",
        )

        def listen() -> None:
            for text in child.stdout or ():
                with suppress(ValueError):  # not ours: a sitecustomize that prints
                    lines.put(json.loads(text))
            lines.put(None)

        def last_words() -> str:
            errors.seek(0)
            return (errors.read().strip().splitlines() or ["it said nothing"])[-1]

        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        try:
            with suppress(BrokenPipeError):
                _tell(child, pairs)
            yield lines, last_words
        finally:
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # one stuck in the driver cannot be reaped
                child.wait(timeout=10)
                listener.join(timeout=10)
                if child.stdout:
                    child.stdout.close()


def _tell(child: subprocess.Popen[str], pairs: Sequence[Order]) -> None:
    if child.stdin:
        child.stdin.write(json.dumps(pairs) + "\n")
        child.stdin.close()
