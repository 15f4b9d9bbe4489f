"""The SQLite file that keeps sessions, run by run: one that was killed keeps what it had."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from ..patchset.errors import EnvironmentFailure, Usage
from .runs import Breakdown, Protocol, Run, Session

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (
    key INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    started TEXT NOT NULL,
    url TEXT NOT NULL,
    protocol TEXT NOT NULL,     -- JSON, as are labels, context and breakdown
    labels TEXT NOT NULL,
    context TEXT NOT NULL,
    failure TEXT NOT NULL,
    breakdown TEXT
);
CREATE TABLE IF NOT EXISTS run (
    session INTEGER NOT NULL REFERENCES session (key),
    number INTEGER NOT NULL,
    warmup INTEGER NOT NULL,
    requests INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    ttft_ms REAL,
    itl_p50_ms REAL,
    itl_p99_ms REAL,
    verify_cycles INTEGER,
    accept_length REAL,
    histogram TEXT NOT NULL,    -- JSON
    finish TEXT NOT NULL,
    PRIMARY KEY (session, warmup, number)
);
"""
_VERSION = 1
_APPLICATION = 0x5347_4F56  # "SGOV"; stores made before it was set have 0
_RUN = [entry.name for entry in fields(Run)]


class Store:
    """An open SQLite file of sessions. Every method commits, and raises ``EnvironmentFailure``
    where the machine refuses (disk full, read-only, locked for more than 30 s). With ``reading``
    the file stays as it is; without, tables are made in a file that is new or empty."""

    def __init__(self, path: Path, reading: bool = False) -> None:
        self.path = path
        with self._guard():
            self._base = sqlite3.connect(_address(path, reading), timeout=30, uri=True)
        try:
            with self._guard():
                self._check(reading)
        except BaseException:
            self._base.close()
            raise

    def _check(self, reading: bool) -> None:
        """See that the file is ours, or make it so. Raises ``Usage``."""
        application, version = (
            self._base.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version")
        )
        holds = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not (application or version or holds or reading):
            self._base.executescript(
                f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA application_id = {_APPLICATION}; "
                f"PRAGMA user_version = {_VERSION}; COMMIT;"
            )
        elif application != _APPLICATION and (application or not self._has_our_tables()):
            raise Usage(f"{self.path}: not a file of bench results")
        elif version != _VERSION:
            raise Usage(f"{self.path}: written by another version of sglang-overlay ({version})")

    def _has_our_tables(self) -> bool:
        wanted = {"session": {"protocol", "labels", "context", "breakdown"}, "run": {*_RUN}}
        return all(
            columns <= {row[1] for row in self._base.execute(f"PRAGMA table_info({name})")}
            for name, columns in wanted.items()
        )

    def begin(self, session: Session) -> Session:
        """Append ``session`` with the runs that it has; it comes back with its key."""
        with self._guard(), self._base:
            row = (
                session.name,
                session.started,
                session.url,
                json.dumps(asdict(session.protocol)),
                json.dumps(dict(session.labels)),
                json.dumps(dict(session.context)),
                session.failure,
                session.breakdown and json.dumps(asdict(session.breakdown)),
            )
            marks = ", ".join("?" * len(row))
            added = self._base.execute(
                "INSERT INTO session (name, started, url, protocol, labels, context, failure, "
                f"breakdown) VALUES ({marks})",
                row,
            )
            for run in session.runs:
                self._insert(added.lastrowid or 0, run)
        return replace(session, key=added.lastrowid or 0)

    #: A session that is already over is appended in the same way.
    append = begin

    def record(self, key: int, run: Run) -> None:
        """Add one run to the session ``key``."""
        with self._guard(), self._base:
            self._insert(key, run)

    def fail(self, key: int, reason: str) -> None:
        """Say why the session ``key`` ended early."""
        with self._guard(), self._base:
            self._base.execute("UPDATE session SET failure = ? WHERE key = ?", (reason, key))

    def explain(self, key: int, breakdown: Breakdown) -> None:
        """Say where a cycle of the session ``key`` goes."""
        row = (json.dumps(asdict(breakdown)), key)
        with self._guard(), self._base:
            self._base.execute("UPDATE session SET breakdown = ? WHERE key = ?", row)

    def load(self) -> list[Session]:
        """Every session, the oldest first."""
        with self._guard():
            rows = self._base.execute(
                "SELECT key, name, started, url, protocol, labels, context, failure, breakdown "
                "FROM session ORDER BY key"
            ).fetchall()
            return [self._session(*row) for row in rows]

    def find(self, word: str) -> Session:
        """The session with the key ``word``, else the latest named so. Raises ``Usage``."""
        found = [one for one in self.load() if word in (str(one.key), one.name)]
        exact = [one for one in found if str(one.key) == word]
        if not found:
            raise Usage(f"{self.path}: no session {word!r}", "bench list names them")
        return (exact or found)[-1]

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _insert(self, key: int, run: Run) -> None:
        values = [getattr(run, name) for name in _RUN]
        values[_RUN.index("histogram")] = json.dumps(run.histogram)
        marks = ", ".join("?" * (len(values) + 1))
        self._base.execute(
            f"INSERT INTO run (session, {', '.join(_RUN)}) VALUES ({marks})", (key, *values)
        )

    def _session(self, key: int, *row: Any) -> Session:
        name, started, url, protocol, labels, context, failure, breakdown = row
        runs = self._base.execute(
            f"SELECT {', '.join(_RUN)} FROM run WHERE session = ? ORDER BY rowid", (key,)
        ).fetchall()
        return Session(
            name=name,
            started=started,
            url=url,
            protocol=Protocol(**json.loads(protocol)),
            labels=json.loads(labels),
            context=json.loads(context),
            runs=tuple(_run(dict(zip(_RUN, run, strict=True))) for run in runs),
            failure=failure,
            breakdown=Breakdown(**json.loads(breakdown)) if breakdown else None,
            key=key,
        )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode == sqlite3.SQLITE_NOTADB:
                raise Usage(f"{self.path}: not a file of bench results") from error
            raise EnvironmentFailure(
                f"{self.path}: {error}", "what was stored before is kept; free space or --store"
            ) from error


def _run(row: dict[str, Any]) -> Run:
    row["histogram"] = tuple(json.loads(row["histogram"]))
    return Run(**row | {"warmup": bool(row["warmup"])})


def _address(path: Path, reading: bool) -> str:
    """The file as SQLite wants it; one that a killed process left to be rolled back is writable."""
    journal = path.with_name(f"{path.name}-journal")
    mode = "rwc" if not reading else "rw" if journal.exists() else "ro"
    return f"{path.absolute().as_uri()}?mode={mode}"


def open_store(path: Path) -> Store:
    """The store at ``path``, to be written, made where there is none.

    Raises ``Usage`` for a file that is no store, ``EnvironmentFailure`` where it cannot be opened.
    """
    return Store(path)


def read_store(path: Path) -> Store:
    """The store at ``path``, which stays as it is. Raises as ``open_store`` does."""
    return Store(path, reading=True)
