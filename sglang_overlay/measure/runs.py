"""What was measured.

A session is one server measured once: a protocol, what is known of the server and its machine,
and the runs. ``store.py`` keeps it.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    #: Of ``context.look``; ``baseline`` and ``simulated`` besides.
    context: Mapping[str, Any] = field(default_factory=dict)
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
