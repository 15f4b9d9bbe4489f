"""Measures a running server: the same requests, one after the other, and what came back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ..patchset.errors import PatchsetError, Usage
from . import context, load, secret, stream
from . import prompts as texts
from .prompts import Prompt
from .runs import Protocol, Run, Session
from .store import Store

if TYPE_CHECKING:
    import httpx

#: Called with (what is being done, steps done, steps in all; 0: not one is over, nor can be told).
Progress = Callable[[str, int, int], None]
#: 2 warm-up runs, then 5 counted of 2048 new tokens, one at a time.
CAMPAIGN = Protocol()
_DIFFER = 0.10  # of the median, between the fastest and the slowest run


def run(
    url: str,
    protocol: Protocol = CAMPAIGN,
    *,
    name: str = "",
    prompts: Sequence[Prompt] = (),
    store: Store | None = None,
    labels: Mapping[str, str] | None = None,
    baseline: str = "",
    simulated: str = "",
    key: str | None = None,
    python: Path | None = None,
    log: Path | None = None,
    tree: Path | None = None,
    progress: Progress = lambda what, done, total: None,
) -> Session:
    """Measure the server at ``url`` by ``protocol``.

    ``prompts`` are used in turn, each run the next; without any the built-in texts, or
    random token ids where ``protocol.prompts`` says so or the server has no tokenizer.
    ``name`` is the server's model name if not given, ``baseline`` the name of the session that
    this one is to be held against, ``simulated`` the accept length that its server was told to
    pretend. ``python`` is the one that has SGLang, for more than one request at once. ``log``
    and ``tree`` are the server's log and source, to learn its patches. Every run goes into
    ``store`` as soon as it is over.

    A server that fails on the way does not raise: the session holds the runs so far and
    says why it ended. Raises ``Usage`` (no such server, key wanted, request refused) and
    ``EnvironmentFailure`` (nobody there, disk full).
    """
    name_of_fault, why = protocol.fault()
    if why:
        raise Usage(f"{name_of_fault}: {why}")
    with stream.connect(url, key) as client:
        known = context.look(client, log, tree)
        prompts, source = _choose(prompts, protocol.prompts, known["tokenizer"])
        protocol = replace(protocol, prompts=source)
        if protocol.concurrency > 1:
            progress("looking for SGLang's benchmark", 0, 1)
            load.check(python, protocol, prompts)
            progress("looking for SGLang's benchmark", 1, 1)
        session = Session(
            name=name or known["model"],
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            url=secret.bare(url),
            protocol=protocol,
            labels=labels or {},
            context=known | {"baseline": baseline, "simulated": simulated},
        )
        session = store.begin(session) if store else session
        server = _Server(client, url, protocol, prompts, known["model"], key, python, progress)
        for number, warmup in _plan(protocol):
            try:
                one = server.measure(number, warmup)
            except PatchsetError as error:
                if store:
                    store.fail(session.key, error.message)
                if not session.runs:
                    raise
                return replace(session, failure=error.message)
            session = replace(session, runs=(*session.runs, one))
            if store:
                store.record(session.key, one)
    return session


@dataclass(frozen=True)
class _Server:
    """The server, and what every request to it shares."""

    client: "httpx.Client"
    url: str  # with user and password, where it has them
    protocol: Protocol
    prompts: Sequence[Prompt]
    model: str
    key: str | None
    python: Path | None
    progress: Progress

    def measure(self, number: int, warmup: bool) -> Run:
        many = self.protocol.concurrency > 1
        total = self.protocol.concurrency if many else self.protocol.tokens
        kind, unit = "warm-up" if warmup else "run", "requests" if many else "tokens"

        def tell(done: int) -> None:
            # Requests of one length end together: until then there is nothing to count.
            seen = done or (self.protocol.stream and not many)
            self.progress(f"{kind} {number}, {unit}", done, total if seen else 0)

        tell(0)
        if many:
            shared = (self.protocol, self.prompts, self.key, self.python)
            run = load.measure(self.url, *shared, number, warmup, tell)
        else:
            prompt = self.prompts[(number - 1) % len(self.prompts)]
            request = (self.client, self.protocol, prompt, self.model)
            run = stream.ask(*request, number, warmup, tell)
        tell(total)
        return run


def _choose(
    prompts: Sequence[Prompt], source: str, tokenizer: bool
) -> tuple[Sequence[Prompt], str]:
    """The prompts, and what to call them: the same name means the same prompts."""
    if prompts:
        name = "given" if source == texts.BUILT_IN else source
        return prompts, f"{name} {texts.digest(prompts)}"
    if source == texts.RANDOM_IDS or not tokenizer:
        return texts.random_ids(), texts.RANDOM_IDS
    return texts.built_in(), texts.BUILT_IN


def _plan(protocol: Protocol) -> list[tuple[int, bool]]:
    warm = [(number, True) for number in range(1, protocol.warmup + 1)]
    return warm + [(number, False) for number in range(1, protocol.runs + 1)]


def warnings(session: Session) -> list[str]:
    """What makes the figures of ``session`` doubtful, in plain words."""
    found = []
    missing = session.protocol.runs - len(session.counted)
    if missing > 0:
        reason = session.failure or "it was stopped"
        found.append(f"{missing} of {session.protocol.runs} runs are missing: {reason}")
    if session.spread > _DIFFER:
        found.append(f"runs differ by {session.spread:.0%} of their median: not a quiet machine")
    wanted = session.protocol.tokens * session.protocol.concurrency
    for run in session.counted:
        if run.tokens < wanted or run.finish != "length":
            found.append(
                f"run {run.number} ended early: {run.tokens} of {wanted} tokens ({run.finish})"
            )
    return found
