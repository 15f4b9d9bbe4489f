"""What a sweep has done, in the same SQLite file as its results, so that a killed one goes on."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..patchset.errors import EnvironmentFailure

_SCHEMA = """
CREATE TABLE IF NOT EXISTS attempt (
    number INTEGER PRIMARY KEY,
    sweep TEXT NOT NULL,
    experiment TEXT NOT NULL,
    digest TEXT NOT NULL,       -- of everything that bears on its result
    ended INTEGER NOT NULL,     -- 0: under way, or killed
    note TEXT NOT NULL,         -- whether the settings arrived; see arrival.Arrival
    session INTEGER             -- of the results
);
"""


@dataclass(frozen=True)
class Attempt:
    """One start of one experiment's server that is over."""

    number: int
    experiment: str
    digest: str
    note: str
    session: int | None


class Journal:
    """The attempts in the file ``path``. Raises ``EnvironmentFailure`` where it cannot write."""

    def __init__(self, path: Path, sweep: str) -> None:
        self.path, self.sweep = path, sweep
        with self._guard():
            self._base = sqlite3.connect(path, timeout=30)
            self._base.executescript(_SCHEMA)

    def begin(self, experiment: str, digest: str) -> int:
        """Note that a server is about to be started; returns the attempt's number."""
        with self._guard(), self._base:
            added = self._base.execute(
                "INSERT INTO attempt (sweep, experiment, digest, ended, note) "
                "VALUES (?, ?, ?, 0, '')",
                (self.sweep, experiment, digest),
            )
        return added.lastrowid or 0

    def end(self, number: int, note: str, session: int) -> None:
        """Note that the attempt is over, and which session has its result."""
        with self._guard(), self._base:
            self._base.execute(
                "UPDATE attempt SET ended = 1, note = ?, session = ? WHERE number = ?",
                (note, session, number),
            )

    def latest(self) -> dict[str, Attempt]:
        """The last attempt at each digest that is over."""
        with self._guard():
            rows = self._base.execute(
                "SELECT number, experiment, digest, note, session FROM attempt "
                "WHERE sweep = ? AND ended ORDER BY number",
                (self.sweep,),
            ).fetchall()
        return {row[2]: Attempt(*row) for row in rows}

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise EnvironmentFailure(
                f"{self.path}: {error}", "what is stored is kept; the same command goes on"
            ) from error
