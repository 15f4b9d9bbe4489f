"""The checks: each a pure function from facts to findings."""

from collections.abc import Callable
from dataclasses import replace

from ..facts import Facts
from ..finding import Finding
from . import (
    algorithm,
    all_reduce,
    cache,
    cards,
    container,
    copies,
    fusion,
    graphs,
    host,
    isolation,
    nccl,
    software,
    startup,
    topology,
)

Check = Callable[[Facts], list[Finding]]
CHECKS: tuple[Check, ...] = (
    *(cards.models, cards.driver, cards.modes, cards.occupied, cards.fabric),
    *(software.versions, software.nccl_library, software.torch_works, software.patches),
    *(topology.distances, topology.width, topology.speed, topology.bar1, topology.peer_access),
    *(isolation.acs, isolation.iommu, isolation.virtual),
    *(copies.matrix, copies.speed),
    *(container.shm, container.ipc, container.memlock, container.open_files),
    *(
        algorithm.algorithm,
        nccl.peer_to_peer,
        nccl.graph_file,
        nccl.interface,
        nccl.names,
        nccl.conf,
    ),
    *(all_reduce.choice, fusion.backend, all_reduce.segments, all_reduce.visible_devices),
    graphs.eagle,
    graphs.draft_kv,
    *(host.numa_balancing, host.governor, host.huge_pages),
    *(cache.disk, cache.filesystem, cache.compiler, cache.kernels, cache.peer_file),
    startup.sitecustomize,
)


def examine(facts: Facts) -> list[Finding]:
    """Every finding, in the order of ``CHECKS``; of the cards, those that the server takes."""
    seen = _taken(facts)
    return [finding for check in CHECKS for finding in check(seen)]


def _taken(facts: Facts) -> Facts:
    count = facts.server.cards
    if count is None or len(facts.cards) <= count:
        return facts
    taken = facts.with_cards(facts.cards[:count])
    if not isinstance(facts.copies, tuple):
        return taken
    inside = tuple(copy for copy in facts.copies if max(copy.source, copy.target) < count)
    return replace(taken, copies=inside)
