"""How a command that started others ends."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import click


@contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM, or a terminal that is closed, ends the command as Ctrl-C does, with what it started.

    Under ``nohup`` SIGHUP stays ignored.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise click.Abort

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, now in before.items():
        if now is not signal.SIG_IGN:
            signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise click.Abort from None
    finally:
        for number, now in before.items():
            signal.signal(number, now)
