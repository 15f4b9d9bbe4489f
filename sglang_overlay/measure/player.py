"""A process that holds one candidate on one rank, and may hang or die without harm."""

import ctypes
import importlib
import multiprocessing
import os
import signal
from dataclasses import dataclass
from typing import Any

from .candidates import Seat
from .stage import Meeting, Stage

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Answer:
    """What one order came to: a value, or the ``failure`` that it ended in."""

    value: Any = None
    failure: str | None = None


class Player:
    """It is given an order, and answers or does not."""

    def __init__(self, candidate: str, seat: Seat, meeting: Meeting) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, candidate, seat, meeting), daemon=True
        )
        self._process.start()
        theirs.close()

    def order(self, name: str, *args: Any) -> None:
        """Have ``Stage.name(*args)`` run there."""
        try:
            self._connection.send((name, args))
        except OSError:
            return  # it is dead, as ``answer`` will say

    def answer(self, seconds: float) -> Answer | None:
        """Its answer to the order, or None where there is none within ``seconds``."""
        try:
            if not self._connection.poll(seconds):
                return None
            answer: Answer = self._connection.recv()
            return answer
        except (EOFError, OSError):
            self._process.join(seconds)
            return Answer(failure=f"its process died (exit code {self._process.exitcode})")

    def end(self) -> None:
        """Kill it: with a kernel that spins there is no other way."""
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Any, candidate: str, seat: Seat, meeting: Meeting) -> None:
    os.dup2(2, 1)  # standard output is for the result alone
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # none stays spinning on a GPU
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        return  # it died before
    module, _, name = candidate.partition(":")
    stage = None
    while True:
        try:
            order, args = connection.recv()
        except EOFError:
            return
        try:
            stage = stage or Stage(getattr(importlib.import_module(module), name)(seat), meeting)
            answer = Answer(getattr(stage, order)(*args))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is this candidate's reason
            answer = Answer(failure=" ".join(f"{type(error).__name__}: {error}".split())[:300])
        connection.send(answer)
