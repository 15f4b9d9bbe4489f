"""Carries a sweep out: each experiment's server is started, measured and stopped."""

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from ..patchset.errors import EnvironmentFailure, PatchsetError
from . import arrival, bench, profile
from .experiment import Experiment, Sweep
from .journal import Journal
from .runs import SIMULATE, Session
from .server import Server, end_orphan, free_port, taken
from .store import Store, open_store

STORE = "results.sqlite"
_KILLED = "the sweep was killed on the way"


@dataclass(frozen=True)
class Voice:
    """Where a sweep says what it does."""

    tell: Callable[[str], None]  # a line that stays
    show: Callable[[str], None]  # what is going on at the moment


class Campaign:
    """A sweep in its folder, which holds results, logs and traces. Made by ``campaign``."""

    def __init__(self, sweep: Sweep, folder: Path, store: Store, journal: Journal, voice: Voice):
        self.sweep, self.folder, self.store, self.journal = sweep, folder, store, journal
        self.voice = voice
        self.key: str | None = None  # the servers' admin key
        self._patched: dict[tuple[object, ...], bool] = {}

    def clean_up(self) -> None:
        """Stop the servers of a killed run of this sweep, and say so in its results."""
        for identity in sorted(self.folder.glob("*.identity")):
            pid = end_orphan(identity, self.sweep.stop_s)
            if pid:
                self.voice.tell(f"stopped the server {pid} of a sweep that was killed")
        names = {self.session_name(one.name) for one in self.sweep.experiments}
        for session in self.store.load():
            whole = len(session.counted) >= session.protocol.runs
            if session.name in names and not session.failure and not whole:
                self.store.fail(session.key, _KILLED)

    def run(self, chosen: Sequence[Experiment], again: bool = False) -> str:
        """Measure those of ``chosen`` that are not yet; with ``again`` failed ones too.

        Returns why the sweep ended before the last, else "". Raises ``EnvironmentFailure`` where
        results cannot be stored.
        """
        begun, failed = time.monotonic(), 0
        limit = self.sweep.stop
        results = self.results()
        for number, one in enumerate(chosen, 1):
            head = f"[{number}/{len(chosen)}] {one.name}"
            known = results.get(one.name)
            if known and not (again and known.failure):
                self.voice.tell(f"{head}: done before")
                continue
            if limit.seconds is not None and time.monotonic() - begun > limit.seconds:
                return f"{limit.seconds:g} s are over"
            session = self._measure(one, head)
            if session.failure:
                self.voice.tell(f"{head}: failed: {session.failure}")
                failed += 1
            else:
                rate = session.median("tok_s") or 0.0
                self.voice.tell(f"{head}: {rate:.1f} tok/s")
                failed = 0
                if limit.tok_s is not None and rate >= limit.tok_s:
                    return f"{one.name} reached {limit.tok_s:g} tok/s"
            if limit.failures is not None and failed >= limit.failures:
                return f"{failed} failures in a row"
        return ""

    def results(self) -> dict[str, Session]:
        """The result of each experiment that has one, as the file defines it now."""
        sessions = {session.key: session for session in self.store.load()}
        latest = self.journal.latest()
        found = {}
        for one in self.sweep.experiments:
            attempt = latest.get(self.sweep.digest(one))
            if attempt and attempt.session in sessions:
                found[one.name] = sessions[attempt.session]
        return found

    def notes(self) -> dict[str, str]:
        """What was found of each experiment's settings."""
        latest = self.journal.latest()
        digests = {one.name: self.sweep.digest(one) for one in self.sweep.experiments}
        return {name: latest[digest].note for name, digest in digests.items() if digest in latest}

    def session_name(self, experiment: str) -> str:
        """What its session is called in the store."""
        return f"{self.sweep.name}/{experiment}"

    def _measure(self, experiment: Experiment, head: str) -> Session:
        attempt = self.journal.begin(experiment.name, self.sweep.digest(experiment))
        slug = re.sub(r"[^\w.=-]+", "-", experiment.name)[:80]
        base = self.folder / f"{attempt:03}-{slug}"
        port = self.sweep.port or free_port()
        url = f"http://127.0.0.1:{port}"
        words, environ = arrival.deliver(experiment, self._takes_worker_env(experiment))
        argv = [*experiment.argv(port), *words]
        self.voice.tell(f"{head}: starting, log {base}.log")
        note = "not checked: it did not start"
        if failure := taken(port):
            session = self._failed(experiment, url, failure)
            self.journal.end(attempt, note, session.key)
            return session
        server = Server(argv, environ, base.with_suffix(".log"), base.with_suffix(".identity"))
        try:
            begun = time.monotonic()
            bound = self.sweep.ready_s
            failure = server.wait(
                url, bound, lambda text: self.voice.show(experiment.hide(f"{head}: {text}"))
            )
            if failure:
                session = self._failed(experiment, url, failure)
            else:
                came = arrival.check(url, experiment, self.key)
                note = experiment.hide(str(came))
                seconds = time.monotonic() - begun
                self.voice.tell(f"{head}: ready after {seconds:.0f} s; settings arrived: {note}")
                if came.wrong:
                    session = self._failed(experiment, url, f"settings did not arrive: {note}")
                else:
                    session = self._bench(experiment, url, server, head)
                    note += self._profile(session, url, base, head)
        finally:
            self.voice.show(f"{head}: stopping")
            server.stop(self.sweep.stop_s)
        self.journal.end(attempt, note, session.key)
        return session

    def _bench(self, experiment: Experiment, url: str, server: Server, head: str) -> Session:
        before = max((one.key for one in self.store.load()), default=0)
        python = Path(experiment.command[0])
        try:
            session = bench.run(
                url,
                self.sweep.protocol,
                name=self.session_name(experiment.name),
                prompts=self.sweep.prompts,
                store=self.store,
                labels=experiment.settings,
                baseline=self.session_name(experiment.baseline) if experiment.baseline else "",
                simulated={**experiment.environ, **experiment.env}.get(SIMULATE, ""),
                key=self.key,
                python=python if python.name.startswith("python") else None,
                log=server.log,
                progress=lambda what, done, total: self.voice.show(
                    f"{head}: {what}{f': {done} of {total}' if total else ''}"
                ),
            )
        except PatchsetError as error:
            failure = experiment.hide(self._why(error.message, server))
            begun = [one for one in self.store.load() if one.key > before]
            if not begun:
                return self._failed(experiment, url, failure)
            self.store.fail(begun[-1].key, failure)
            return replace(begun[-1], failure=failure)
        if session.failure:
            failure = experiment.hide(self._why(session.failure, server))
            self.store.fail(session.key, failure)
            return replace(session, failure=failure)
        return session

    @staticmethod
    def _why(message: str, server: Server) -> str:
        fell = server.fell()
        return f"{fell} ({message})" if fell else message

    def _profile(self, session: Session, url: str, base: Path, head: str) -> str:
        """Take a profile, where the sweep wants one; says what hindered it."""
        steps = self.sweep.profile_steps
        if session.failure or not steps:
            return ""
        try:
            taken = profile.capture(
                url,
                self.key,
                base.with_suffix(".traces"),
                steps,
                lambda what, done, total: self.voice.show(f"{head}: profile, {what}"),
            )
            split, _ = profile.look(taken)
        except PatchsetError as error:
            return f"; no profile: {error.message}"
        if not split.gpu:
            return "; no profile: no GPU in the trace"
        self.store.explain(session.key, split.breakdown(taken.cycle_ms or None))
        return ""

    def _failed(self, experiment: Experiment, url: str, failure: str) -> Session:
        """A server without runs is a result too."""
        return self.store.append(
            Session(
                name=self.session_name(experiment.name),
                started=datetime.now(UTC).isoformat(timespec="seconds"),
                url=url,
                protocol=self.sweep.protocol,
                labels=experiment.settings,
                failure=experiment.hide(failure),
            )
        )

    def _takes_worker_env(self, experiment: Experiment) -> bool:
        if not experiment.env:
            return False
        command = experiment.command[0]
        key = command, *sorted(experiment.environ.items())
        if key not in self._patched:
            self.voice.show(f"asking {command} whether its SGLang takes --worker-env")
            environ = {**os.environ, **experiment.environ}
            self._patched[key] = arrival.takes_worker_env(experiment.command, environ)
        return self._patched[key]


@contextmanager
def campaign(sweep: Sweep, folder: Path, voice: Voice) -> Iterator[Campaign]:
    """The campaign of ``sweep`` in ``folder``, which no other process uses meanwhile.

    Raises ``EnvironmentFailure`` where one does, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    except OSError as error:
        raise EnvironmentFailure(f"{folder}: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise EnvironmentFailure(
                f"{folder}: another sweep is at work there", "wait for it, or --out DIR"
            ) from error
        # The store first: it sees that the file is ours.
        with (
            open_store(folder / STORE) as store,
            closing(Journal(folder / STORE, sweep.name)) as journal,
        ):
            one = Campaign(sweep, folder, store, journal, voice)
            one.clean_up()
            yield one
