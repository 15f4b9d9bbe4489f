"""Does speculation pay: the arithmetic.

Without speculation a token takes ``decode_ms``. With it a cycle of ``cycle_ms`` (draft, verify,
extend, and what the host adds) gives L tokens on average, the accept length. So

    speedup = L * decode_ms / cycle_ms

and speculation wins when ``cycle_ms < L * decode_ms``: the break-even cycle. With one chain of
s drafts, where draft i is right with probability a_i if those before it were,

    L(s) = 1 + a_1 + a_1 a_2 + ... + a_1 a_2 ... a_s

since a cycle gives the right drafts and one token of the target itself. With equal a_i = a this is
(1 - a^(s+1)) / (1 - a): equation (1) of Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from
Transformers via Speculative Decoding", ICML 2023 (arXiv 2211.17192), whose theorem 3.8 is the
speedup above with ``cycle_ms = (s c + 1) decode_ms``. That the tokens are the target's own is
shown there and in C. Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling", 2023 (arXiv 2302.01318). Their verify costs one decode step; here it is what was
measured, since on GPUs without NVLink its all-reduces may cost more than all the rest.

In SGLang's EAGLE workers the first draft comes from the extend pass after verify, so s steps run
s - 1 draft passes, and verify looks at s + 1 tokens (``speculative_num_draft_tokens``, top-k 1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

from ..patchset.errors import Usage

PHASES = ("draft", "verify", "extend", "host")
_FURTHEST = 8  # steps that are looked at


@dataclass(frozen=True)
class Acceptance:
    """How often drafts are right. ``rates[i]`` is that of draft i + 1, if those before it were."""

    length: float  # tokens a cycle, measured
    rates: tuple[float, ...] = ()

    def tokens(self, steps: int) -> float:
        """Tokens a cycle with ``steps`` drafts; past the measured ones the last rate holds on."""
        rates = [self.rates[min(n, len(self.rates) - 1)] for n in range(steps)]
        return 1.0 + sum(accumulate(rates, mul), 0.0)


@dataclass(frozen=True)
class Case:
    """One server, with and without speculation. Times in milliseconds."""

    decode_ms: float  # of a token without speculation
    cycle_ms: float
    acceptance: Acceptance
    phases: Mapping[str, float] = field(default_factory=dict)  # of PHASES, those known
    allreduce_ms: float | None = None  # of the verify phase
    allreduces: int = 122  # of a verify pass: 2 for each of Kimi-K2.5's 61 layers
    steps: int = 2
    token_ms: float = 0.0  # what one more token costs the verify pass

    @property
    def speedup(self) -> float:
        """Speed with speculation over speed without."""
        return self.acceptance.length * self.decode_ms / self.cycle_ms

    @property
    def breakeven_ms(self) -> float:
        """The cycle at which speculation neither wins nor loses."""
        return self.acceptance.length * self.decode_ms

    @property
    def excess_ms(self) -> float:
        """What a cycle has to lose; negative where it may grow."""
        return self.cycle_ms - self.breakeven_ms

    def with_allreduce(self, us: float) -> "Case":
        """The same, if an all-reduce of verify took ``us``; decode is as it was.

        Raises ``Usage`` where it is not known what all-reduces take now.
        """
        if self.allreduce_ms is None:
            raise Usage("what do the all-reduces of a cycle take now?", "--allreduce-ms MS")
        now = us * self.allreduces / 1e3
        return replace(
            self, cycle_ms=self.cycle_ms - self.allreduce_ms + now, allreduce_ms=now, phases={}
        )

    def with_steps(self, steps: int) -> "Case":
        """The same with another number of draft steps. Raises ``Usage`` where it cannot be told."""
        if not self.acceptance.rates or "draft" not in self.phases or self.steps < 2:
            raise Usage("the best number of steps needs --draft-ms of 2 or more --steps")
        passes = self.phases["draft"] / (self.steps - 1)
        change = (steps - self.steps) * (passes + self.token_ms)
        tokens = Acceptance(self.acceptance.tokens(steps), self.acceptance.rates)
        return replace(
            self, cycle_ms=self.cycle_ms + change, acceptance=tokens, steps=steps, phases={}
        )


@dataclass(frozen=True)
class Target:
    """What one part has to become for break-even, the others as they are."""

    part: str
    now: float | None  # None where the case does not say
    target: float | None  # None where the part is not known, or cannot do it alone
    fall: float  # by how much; negative: room to grow


def targets(case: Case) -> list[Target]:
    """For the accept length, the cycle, each phase (ms), and an all-reduce (us)."""
    need = case.excess_ms
    length, wanted = case.acceptance.length, case.cycle_ms / case.decode_ms
    found = [
        Target("accept_length", length, wanted, length - wanted),
        Target("cycle_ms", case.cycle_ms, case.breakeven_ms, need),
    ]
    for phase in PHASES:
        found.append(_target(f"{phase}_ms", case.phases.get(phase), need))
    found.append(_target("allreduce_ms", case.allreduce_ms, need))
    us = 1e3 / case.allreduces
    now = None if case.allreduce_ms is None else case.allreduce_ms * us
    return [*found, _target("allreduce_us", now, need * us)]


def _target(part: str, now: float | None, fall: float) -> Target:
    target = None if now is None or now < fall else now - fall
    return Target(part, now, target, fall)


def by_steps(case: Case) -> list[Case]:
    """The case with 1, 2, ... steps. Raises ``Usage`` where that cannot be told."""
    return [case.with_steps(steps) for steps in range(1, _FURTHEST + 1)]


def from_length(length: float, steps: int) -> Acceptance:
    """The equal rates that give ``length`` tokens with ``steps`` drafts. Raises ``Usage``."""
    if not 1 <= length <= steps + 1:
        raise Usage(f"an accept length of {length} cannot be, with {steps} steps", "--steps N")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = Acceptance(length, (middle,)).tokens(steps) < length
        low, high = (middle, high) if below else (low, middle)
    return Acceptance(length, (low,) * steps)


def from_positions(accepted: Sequence[float]) -> Acceptance:
    """``accepted[i]``: the part of all cycles in which draft i + 1 was right. Raises ``Usage``."""
    bounds = [1.0, *accepted]
    if any(not 0 <= b <= a for a, b in zip(bounds, accepted, strict=False)) or not accepted:
        raise Usage(
            f"{list(accepted)}: each position's part of the cycles is between 0 and the one before"
        )
    rates = tuple(b / a if a else 0.0 for a, b in zip(bounds, accepted, strict=False))
    return Acceptance(1 + sum(accepted), rates)


def from_histogram(counts: Sequence[int]) -> Acceptance:
    """``counts[n]``: cycles in which n drafts were right, as the server's metadata has them."""
    cycles = sum(counts)
    positions = [sum(counts[n:]) / cycles for n in range(1, len(counts))]
    return from_positions(positions)
