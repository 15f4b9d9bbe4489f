"""The candidates at work on all ranks, in step: prepared, checked, timed in turns, voted on."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from .candidates import Seat
from .player import Answer, Player
from .stage import Meeting


@dataclass(frozen=True)
class Plan:
    """What is measured. Each of ``rounds`` visits every candidate in turn."""

    rows: tuple[int, ...]
    hidden: int
    dtype: str
    boundary: str = "norm"
    modes: tuple[str, ...] = ("graph", "eager")
    rounds: int = 3
    replays: int = 11
    calls: int = 20
    boundaries: int = 122
    timeout: float = 180
    build_timeout: float = 1800


@dataclass(frozen=True)
class Cell:
    """One candidate at one number of rows: microseconds a boundary by mode, or why not.

    ``launches`` is what the GPU runs for one boundary in a graph: kernels, copies and fills.
    """

    candidate: str
    rows: int
    us: dict[str, float]
    error: float | None = None
    reason: str | None = None
    launches: float | None = None


@dataclass(frozen=True)
class Table:
    """All cells, and why a whole candidate is missing."""

    plan: Plan
    world: int
    cells: tuple[Cell, ...]
    left_out: dict[str, str]

    def bus_gb_s(self, rows: int, us: float) -> float:
        """Bus bandwidth in 1e9 bytes a second, as NCCL-tests define it for an all-reduce.

        That is 2 (n - 1) / n times the tensor's bytes, over the time; here the time of the
        whole boundary, so it is no more than the all-reduce's own.
        """
        bytes_ = rows * self.plan.hidden * 2
        return 2 * (self.world - 1) / self.world * bytes_ / us / 1e3

    def verify_ms(self, us: float) -> float:
        """Milliseconds of a pass's ``plan.boundaries`` boundaries, and of nothing else."""
        return us * self.plan.boundaries / 1e3

    def fastest(self, rows: int, mode: str) -> Cell | None:
        """The fastest candidate at ``rows``."""
        timed = [cell for cell in self.cells if cell.rows == rows and mode in cell.us]
        return min(timed, key=lambda cell: cell.us[mode], default=None)


class Ensemble:
    """This rank's players, and the votes that it shares with the other ranks."""

    def __init__(
        self, candidates: Mapping[str, str], seat: Seat, plan: Plan, tell: Callable[[str], None]
    ) -> None:
        import torch.distributed as dist

        self._tell = tell
        self._dist, self._world = dist, seat.world
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True) if seat.rank == 0 else None
        port = self._gather(self._store and self._store.port)[0]
        meeting = Meeting("127.0.0.1", port, max(plan.timeout, plan.build_timeout))
        self._players = {name: Player(place, seat, meeting) for name, place in candidates.items()}
        self.left_out: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        """The candidates that are still in."""
        return [*self._players]

    def ask(self, name: str, seconds: float, order: str, *args: Any) -> list[Any] | None:
        """Every rank's answer to one order, or None: then the candidate is out, on every rank."""
        self._players[name].order(order, *args)
        return self._heard(name, seconds, order, time.monotonic() + seconds)

    def ask_all(self, seconds: float, order: str) -> dict[str, list[Any]]:
        """The same of all candidates, which work beside each other; of those that are left."""
        for player in self._players.values():
            player.order(order)
        until = time.monotonic() + seconds
        answers = {name: self._heard(name, seconds, order, until) for name in self.names}
        return {name: values for name, values in answers.items() if values is not None}

    def _heard(self, name: str, seconds: float, order: str, until: float) -> list[Any] | None:
        late = f"no answer to {order} in {seconds:.0f} s"
        answers = self._answers(self._players[name], late, until)
        failures = [answer.failure if answer else None for answer in answers]
        if any(failures):
            self.leave_out(name, _by_rank(failures))
            return None
        return [answer and answer.value for answer in answers]

    def leave_out(self, name: str, reason: str) -> None:
        """End the candidate. Every rank calls it, with the same reason."""
        self.left_out[name] = reason
        self._tell(f"{name}: left out: {reason}")
        self._players.pop(name).end()

    def end(self) -> None:
        """End them all."""
        for player in self._players.values():
            player.end()

    def _answers(self, player: Player, late: str, deadline: float) -> list[Answer | None]:
        """Until every rank has its answer, or one has failed: the other ranks' never come then."""
        mine = None
        while True:
            mine = mine or player.answer(0.1)
            if mine is None and time.monotonic() > deadline:
                mine = Answer(failure=late)
            answers: list[Answer | None] = self._gather(mine)
            if all(answers) or any(answer and answer.failure for answer in answers):
                return answers

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self._world
        self._dist.all_gather_object(values, value)
        return values


def measure(
    plan: Plan,
    seat: Seat,
    candidates: Mapping[str, str],
    tell: Callable[[str], None] = lambda text: None,
) -> Table:
    """The table; every rank of the default group, which is a CPU group, calls it alike.

    ``tell`` hears of each step as it begins, and of each candidate that is left out.
    """
    ensemble = Ensemble(candidates, seat, plan, tell)
    try:
        _prepare(ensemble, plan, tell)
        cells = []
        for rows in plan.rows:
            tell(f"{rows} rows")
            cells += _row(ensemble, rows, plan)
        left_out = dict(ensemble.left_out)
        cells = [cell for cell in cells if cell.candidate not in left_out]
        if "graph" in plan.modes:  # after all clocks; one that fails here keeps its times
            tell("counting launches")
            cells = [_counted(ensemble, cell, plan) for cell in cells]
    finally:
        ensemble.end()
    return Table(plan, seat.world, tuple(cells), left_out)


def _prepare(ensemble: Ensemble, plan: Plan, tell: Callable[[str], None]) -> None:
    """Builds run beside each other. What opens may tune, and has the GPUs for itself."""
    tell(f"looking for {', '.join(ensemble.names)}")
    for name, missing in ensemble.ask_all(plan.build_timeout, "missing").items():
        if any(missing):
            ensemble.leave_out(name, _by_rank(missing))
    tell(f"building {', '.join(ensemble.names)}")
    for name in ensemble.ask_all(plan.build_timeout, "build"):
        tell(f"opening {name}")
        ensemble.ask(name, plan.timeout, "open")


def _row(ensemble: Ensemble, rows: int, plan: Plan) -> list[Cell]:
    errors, refused = {}, []
    for name in ensemble.names:
        refusals = ensemble.ask(name, plan.timeout, "refuses", rows)
        if refusals is None:
            continue
        if any(refusals):
            refused.append(Cell(name, rows, {}, reason=_by_rank(refusals)))
        else:
            errors[name] = _rehearse(ensemble, name, rows, plan)
    times: dict[str, dict[str, list[float]]] = {}
    for mode in plan.modes * plan.rounds:
        for name in [name for name in errors if name in ensemble.names]:
            order = (plan.boundary, rows, mode == "graph", plan.calls, plan.replays)
            if us := ensemble.ask(name, plan.timeout, "perform", *order):
                times.setdefault(name, {}).setdefault(mode, []).append(max(us))
    return refused + [
        Cell(name, rows, {mode: median(us) for mode, us in by.items()}, errors[name])
        for name, by in times.items()
    ]


def _counted(ensemble: Ensemble, cell: Cell, plan: Plan) -> Cell:
    if not cell.us or cell.candidate not in ensemble.names:
        return cell
    order = (plan.boundary, cell.rows, plan.calls)
    counts = ensemble.ask(cell.candidate, plan.timeout, "launches", *order)
    return replace(cell, launches=max(counts) or None) if counts else cell


def _rehearse(ensemble: Ensemble, name: str, rows: int, plan: Plan) -> float | None:
    """The worst error of any rank and mode; past the bound the candidate is out."""
    worst = 0.0
    for mode in plan.modes:
        order = (plan.boundary, rows, mode == "graph")
        answers = ensemble.ask(name, plan.timeout, "rehearse", *order)
        if answers is None:
            return None
        error, bound = max(a["error"] for a in answers), answers[0]["bound"]
        if error > bound:
            ensemble.leave_out(name, f"wrong at {rows} rows, {mode}: {error:.3g} > {bound:.3g}")
            return None
        worst = max(worst, error)
    return worst


def _by_rank(reasons: Sequence[str | None]) -> str:
    """``rank 1: why``; without the ranks where they all say the same."""
    if len(set(reasons)) == 1:
        return str(reasons[0])
    return "; ".join(f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why)
