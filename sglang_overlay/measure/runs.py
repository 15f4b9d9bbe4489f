"""What was measured, and the SQLite file that keeps it.

A session is one server measured once: a protocol, what is known of the server and its machine,
and the runs. It is written run by run, so that a session that was killed keeps what it had.
"""

import json
import math
import sqlite3
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..patchset.errors import EnvironmentFailure, Usage

#: The variable that has SGLang accept drafts by chance, so long on average.
SIMULATE = "SGLANG_SIMULATE_ACC_LEN"
APIS = ("native", "openai", "chat")
_LEAST = {"warmup": 0, "runs": 1, "tokens": 1, "concurrency": 1}


@dataclass(frozen=True)
class Protocol:
    """How a session is measured. The defaults are those of the original campaign."""

    warmup: int = 2
    runs: int = 5
    tokens: int = 2048  # new tokens of a request
    concurrency: int = 1  # requests at once
    temperature: float = 0.0
    stream: bool = True
    ignore_eos: bool = True  # every request gives `tokens` tokens
    api: str = "native"  # native: /generate; openai: /v1/completions; chat: /v1/chat/completions
    prompts: str = "built in"  # which ones; "random ids" where there is no tokenizer

    def fault(self) -> tuple[str, str]:
        """The first field that cannot be measured so, and what it wants; ("", "") if none."""
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                return name, f"{getattr(self, name)} is too few: {least} or more"
        if not 0 <= self.temperature < math.inf:
            return "temperature", f"{self.temperature:g} is none: 0 or more"
        if self.api not in APIS:
            return "api", f"{self.api!r} is none of {', '.join(APIS)}"
        return "", ""


@dataclass(frozen=True)
class Run:
    """One request, or beyond one stream one pass of SGLang's serving benchmark."""

    number: int  # from 1, warm-ups apart
    warmup: bool
    requests: int
    prompt_tokens: int  # of all requests
    tokens: int  # new tokens of all requests
    seconds: float  # from the first request sent to the last token received
    ttft_ms: float | None = None  # to the first token; None where nothing was streamed
    itl_p50_ms: float | None = None  # between tokens, see `stream.intervals`
    itl_p99_ms: float | None = None
    verify_cycles: int | None = None  # the server's `spec_verify_ct`; None without speculation
    accept_length: float | None = None  # tokens a cycle, as the server has it
    histogram: tuple[int, ...] = ()  # [n]: cycles in which n drafts were right
    finish: str = "length"  # what ended it: anything else came early

    @property
    def tok_s(self) -> float:
        """New tokens a second, the time to the first one included."""
        return self.tokens / self.seconds

    @property
    def cycle_ms(self) -> float | None:
        """Milliseconds a verify cycle, or a decode step without speculation; one stream only.

        The first token comes from the prefill, so its time does not count.
        """
        steps = self.verify_cycles or self.tokens - 1
        if self.requests != 1 or self.ttft_ms is None or steps < 1:
            return None
        return (self.seconds * 1e3 - self.ttft_ms) / steps


@dataclass(frozen=True)
class Breakdown:
    """Where the time of one cycle goes, in milliseconds a cycle."""

    cycles: int  # that were looked at
    phases: Mapping[str, float] = field(default_factory=dict)  # draft, verify, extend, host
    verify: Mapping[str, float] = field(default_factory=dict)  # all-reduce, attention, gemm, rest
    allreduces: float = 0.0  # of one verify pass
    graphs: Mapping[str, str] = field(default_factory=dict)  # phase: graph or eager


@dataclass(frozen=True)
class Session:
    """One server, measured once. A server that did not start is one without runs."""

    name: str  # of the configuration, chosen by the user
    started: str  # ISO 8601, UTC
    url: str
    protocol: Protocol
    labels: Mapping[str, str] = field(default_factory=dict)  # a sweep's settings
    context: Mapping[str, Any] = field(
        default_factory=dict
    )  # see `context.look`; baseline, simulated
    runs: tuple[Run, ...] = ()
    failure: str = ""  # why it ended early, or never began
    breakdown: Breakdown | None = None
    key: int = 0  # in the store; 0 until it is there

    @property
    def simulated(self) -> bool:
        """Whether its server was told an accept length, so that the drafts' say nothing."""
        workers = self.context.get("workers") or []
        told = [worker["variables"].get(SIMULATE) for worker in workers]
        return any(float(one or 0) > 0 for one in (*told, self.context.get("simulated")))

    @property
    def phases(self) -> dict[str, float]:
        """Milliseconds of each phase in a cycle as long as it was measured; {} without a breakdown.

        A profiler slows the host, not the kernels: what they take holds, and ``host`` is the rest.
        """
        if self.breakdown is None:
            return {}
        busy = {name: ms for name, ms in self.breakdown.phases.items() if name != "host"}
        cycle, whole = self.median("cycle_ms"), sum(busy.values())
        if cycle is None:
            return dict(self.breakdown.phases)
        if whole > cycle:
            return {name: ms * cycle / whole for name, ms in busy.items()}
        return {**busy, "host": cycle - whole}

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs without the warm-ups."""
        return tuple(run for run in self.runs if not run.warmup)

    @property
    def model(self) -> str | None:
        """The model's path, as the server has it."""
        found: str | None = self.context.get("arguments", {}).get("model_path")
        return found

    @property
    def baseline(self) -> str:
        """The name of the session that its sweep holds it against; "" where none is named."""
        found: str = self.context.get("baseline", "")
        return found

    def values(self, what: str) -> list[float]:
        """The attribute ``what`` of every counted run that has it."""
        found = (getattr(run, what) for run in self.counted)
        return [float(value) for value in found if value is not None]

    def median(self, what: str) -> float | None:
        """The median of ``values``; ``None`` where no run has it."""
        values = self.values(what)
        return statistics.median(values) if values else None

    @property
    def spread(self) -> float:
        """(fastest - slowest) / median of the counted runs' tokens a second; 0 for one run."""
        rates = self.values("tok_s")
        return (max(rates) - min(rates)) / statistics.median(rates) if rates else 0.0


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
