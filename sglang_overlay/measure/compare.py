"""Is one session faster than another, or is that noise?"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

from ..patchset.errors import Usage
from .runs import Protocol, Session

_RESAMPLES = 10_000
_ENOUGH = 5  # counted runs: with 3 of them, the interval misses 1 in 10 to 30 % of equal sessions
_LARGE = 0.2  # a fall of the accept length that few runs show as well
_LIKE = ("tokens", "concurrency", "temperature", "stream", "ignore_eos", "api", "prompts")


@dataclass(frozen=True)
class Ratio:
    """How many times the mean of ``a`` that of ``b`` is, with a 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def clear(self) -> bool:
        """Whether 1 is outside the interval."""
        return not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Comparison:
    """What may be said of ``b`` against ``a``."""

    a: Session
    b: Session
    speed: Ratio | None  # of tokens a second; None where there are too few runs
    accept: Ratio | None  # of accept lengths; None where one has none
    differences: dict[str, tuple[Any, Any]]  # what else was different

    @property
    def verdict(self) -> str:
        """faster, slower, inside the noise, or too few runs.

        A session is one start of its server, and what changes between starts is in no interval.
        """
        if self.speed is None:
            return "too few runs"
        if not self.speed.clear:
            return "inside the noise"
        return f"{'faster' if self.speed.value > 1 else 'slower'} (one start each)"

    @property
    def same_drafter(self) -> bool:
        """Whether both drafted alike, so that their accept lengths should be equal."""
        return drafter(self.a) == drafter(self.b)

    @property
    def accept_ratio(self) -> float | None:
        """The mean accept length of ``b`` to that of ``a``; ``None`` where one has none."""
        a, b = (one.values("accept_length") for one in (self.a, self.b))
        return statistics.fmean(b) / statistics.fmean(a) if a and b else None

    @property
    def accept_fell(self) -> bool:
        """The accept length of ``b`` is below that of ``a``, beyond noise and by a cycle or more.

        The same drafter on the same prompts should be right as often. If it is not, numbers are
        wrong somewhere: a broken kernel shows here before it shows in the text. Where there are
        too few runs for an interval, a fall by a fifth counts if no run of ``b`` comes near ``a``.
        A simulated accept length (``SGLANG_SIMULATE_ACC_LEN``) shows nothing.
        """
        if not self.same_drafter or self.accept_ratio is None:
            return False
        if self.a.simulated or self.b.simulated:
            return False
        if self.accept is None:
            a, b = (one.values("accept_length") for one in (self.a, self.b))
            return self.accept_ratio < 1 - _LARGE and max(b) < min(a)
        if self.accept.high >= 1:
            return False
        cycles = min(run.verify_cycles or run.tokens for run in self.b.counted)
        return 1 - self.accept.value > 1 / cycles


def alike(protocol: Protocol) -> tuple[Any, ...]:
    """What has to be the same in two sessions that are compared."""
    return tuple(getattr(protocol, name) for name in _LIKE)


def drafter(session: Session) -> tuple[Any, ...]:
    """What decides how often drafts are right: model, drafter, steps, width, token map."""
    arguments = session.context.get("arguments", {})
    names = ("draft_model_path", "num_steps", "eagle_topk", "num_draft_tokens", "token_map")
    found = tuple(arguments.get(f"speculative_{name}") for name in names)
    drafts = session.median("accept_length") is not None
    return (drafts, arguments.get("model_path"), *found)


def compare(a: Session, b: Session) -> Comparison:
    """Hold ``b`` against ``a``. Raises ``Usage`` where they did not do the same."""
    for one in (a, b):
        if not one.counted:
            raise Usage(f"{one.name} ({one.key}) has no counted run: {one.failure or 'killed'}")
    pairs = zip(_LIKE, alike(a.protocol), alike(b.protocol), strict=True)
    for name, left, right in pairs:
        if left != right:
            raise Usage(
                f"{a.name} and {b.name} were measured differently: {name} {left} and {right}",
                "measure one of them again",
            )
    return Comparison(
        a=a,
        b=b,
        speed=_ratio(a.values("tok_s"), b.values("tok_s"), paired=False),
        # Acceptance goes by the prompt, and run n of both had the same.
        accept=_ratio(a.values("accept_length"), b.values("accept_length"), paired=True),
        differences=_differences(a, b),
    )


def _ratio(a: Sequence[float], b: Sequence[float], paired: bool) -> Ratio | None:
    """mean(b) / mean(a) with a bootstrap interval, the same each time.

    The percentile interval of a few runs is too narrow: it is taken at the percentiles that
    make up for it (T. Hesterberg, "What Teachers Should Know About the Bootstrap", The American
    Statistician 69(4), 2015, section 5.3: sqrt(n / (n - 1)) and Student's t).
    """
    if min(len(a), len(b)) < _ENOUGH:
        return None
    np = _numpy()
    first, second = np.asarray(a), np.asarray(b)
    random = np.random.default_rng(0)
    paired = paired and len(a) == len(b)
    choice = random.integers(0, len(a), (_RESAMPLES, len(a)))
    other = choice if paired else random.integers(0, len(b), (_RESAMPLES, len(b)))
    ratios = second[other].mean(axis=1) / first[choice].mean(axis=1)
    smaller = min(len(a), len(b))
    freedom = smaller - 1 if paired else len(a) + len(b) - 2
    reach = math.sqrt(smaller / (smaller - 1)) * _student(0.975, freedom)
    tail = NormalDist().cdf(-reach)
    low, high = np.quantile(ratios, (tail, 1 - tail))
    return Ratio(float(second.mean() / first.mean()), float(low), float(high))


def _student(p: float, freedom: int) -> float:
    """Quantile of Student's t, within 0.3 % from 4 degrees of freedom up.

    M. Abramowitz, I. Stegun, "Handbook of Mathematical Functions", 26.7.5.
    """
    z = NormalDist().inv_cdf(p)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return float(sum(term / freedom**n for n, term in enumerate(terms)))


def _differences(a: Session, b: Session) -> dict[str, tuple[Any, Any]]:
    left, right = _facts(a), _facts(b)
    return {
        name: (left.get(name), right.get(name))
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    }


def _facts(session: Session) -> dict[str, Any]:
    known = session.context
    facts = {**known.get("versions", {}), **known.get("arguments", {}), **session.labels}
    gpus = [gpu["name"] for gpu in known.get("gpus") or ()]
    for worker in known.get("workers") or ():
        facts |= {f"{worker['worker']} {k}": v for k, v in worker["variables"].items()}
    return facts | {"patches": known.get("patches"), "gpus": gpus}


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise Usage("numpy is not installed", "pip install 'sglang-overlay[report]'") from error
    return numpy
