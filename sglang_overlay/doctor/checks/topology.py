"""How the cards hang together: distances, links, BAR1, and peer access as NVML grants it."""

from itertools import combinations

from .. import sysfs
from ..facts import Facts, Gpu, Maybe, Pair, Unknown
from ..finding import Finding, ok, unknown, warning

_GIB = 2**30
#: GB/s in one direction of one lane, by PCIe generation, after encoding.
_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_ORDER = ("PIX", "PXB", "PHB", "NODE", "SYS")
_IDLE = 10  # percent


def distances(facts: Facts) -> list[Finding]:
    """What lies between the cards; SYS is a crossing between two NUMA nodes."""
    pairs = _pairs(facts)
    if isinstance(pairs, Unknown):
        return [unknown("topology", pairs.why)]
    if not pairs:
        return [ok("topology", "one card: nothing to cross")] if facts.cards else []
    if facts.nvlinked:
        return [ok("topology", "every two cards have an NVLink")]
    levels = [pair.level for pair in pairs if isinstance(pair.level, str)]
    counts = {name: levels.count(name) for name in _ORDER if name in levels}
    linked = sum(pair.nvlink is True for pair in pairs)
    text = ", ".join(f"{count} pairs {name}" for name, count in counts.items())
    if linked:
        text += f"; {linked} of {len(pairs)} pairs by NVLink"
    if "SYS" in counts:
        return [
            warning(
                "topology",
                "peer traffic crosses NUMA nodes",
                f"{text}; nodes: {_nodes(facts)}",
                "the link between the sockets is the narrowest place of an all-reduce across both; "
                "NCCL's rings may cross it more often than once",
                "keep --tp inside one node where the model fits, else use the PCIe-IPC all-reduce "
                "(SGLANG_ENABLE_PCIE_IPC_ALLREDUCE=1), which crosses it least",
            )
        ]
    return [ok("topology", text or "not known", f"nodes: {_nodes(facts)}")]


def width(facts: Facts) -> list[Finding]:
    """Every card has all the lanes that it could have."""
    links = _links(facts)
    if not links:
        return [unknown("link-width", "no card's link could be read")]
    narrow = [(n, w, most, s) for n, w, most, s, _, _ in links if w < most]
    if not narrow:
        lanes = ", ".join(sorted({f"x{w}" for _, w, *_ in links}))
        return [ok("link-width", f"all links are as wide as they can be ({lanes})")]
    text = "; ".join(
        f"{name}: x{w} of x{most}, {w * _LANE.get(s, 0):.0f} of {most * _LANE.get(s, 0):.0f} GB/s "
        "each way at full speed"
        for name, w, most, s in narrow
    )
    return [
        warning(
            "link-width",
            f"{len(narrow)} cards have fewer lanes than they could",
            text,
            "an all-reduce runs at the pace of the slowest link, and a verify pass has two for "
            "each layer",
            "another slot, riser or bifurcation setting; then: nvidia-smi --query-gpu="
            "index,pcie.link.width.current,pcie.link.width.max --format=csv",
        )
    ]


def speed(facts: Facts) -> list[Finding]:
    """A busy card runs its link at full speed. An idle one lowers it, which is as it should be."""
    links = [link for link in _links(facts) if link[5] is not None]
    if not links:
        return [unknown("link-speed", "no card's link speed could be read")]
    slow = [link for link in links if link[5] is not None and link[5] < link[3]]
    busy = [link for link in slow if link[4] is not None and link[4] >= _IDLE]
    if busy:
        return [
            warning(
                "link-speed",
                f"{len(busy)} cards are busy on a slow link",
                "; ".join(f"{n}: gen {now} of {s}, {b} % busy" for n, _, _, s, b, now in busy),
                "under load the link must be at full speed; a riser, a retimer or a power setting "
                "holds it down, and every all-reduce with it",
                "nvidia-smi -q -d PERFORMANCE; in the BIOS: the slot's speed, ASPM off",
            )
        ]
    if slow:
        return [
            ok(
                "link-speed",
                "links are slow now, as those of idle cards are",
                "; ".join(f"{n}: gen {now} of {s}" for n, _, _, s, _, now in slow)
                + "; to know, look under load, or at the bandwidths of --deep",
            )
        ]
    return [ok("link-speed", f"all links at full speed (gen {max(link[3] for link in links)})")]


def bar1(facts: Facts) -> list[Finding]:
    """All of a card's memory is reachable over PCIe."""
    if not facts.cards or facts.nvlinked or len(facts.cards) < 2:
        return []
    known = [(g, g.bar1) for g in facts.cards if isinstance(g.bar1, int)]
    if not known:
        return [unknown("bar1", "the driver does not say how large BAR1 is")]
    small = [(g, size) for g, size in known if size < g.memory]
    if not small:
        return [ok("bar1", f"BAR1 covers all memory ({min(s for _, s in known) // _GIB} GiB)")]
    return [
        warning(
            "bar1",
            "BAR1 is smaller than the card's memory",
            "; ".join(f"{g.index}: {s / _GIB:.2f} of {g.memory / _GIB:.0f} GiB" for g, s in small),
            "peers reach a card without NVLink through BAR1: what does not fit is refused or fails "
            "to map, so all-reduces go through host memory",
            "in the BIOS: Above 4G Decoding and Resizable BAR on, CSM off; then: nvidia-smi -q -d "
            "MEMORY",
        )
    ]


def peer_access(facts: Facts) -> list[Finding]:
    """The driver grants peer access between every two cards. A grant is no proof: see --deep."""
    if isinstance(facts.pairs, Unknown):
        return [unknown("peer-access", facts.pairs.why)]
    known = [pair for pair in facts.pairs if isinstance(pair.peer, str)]
    refused = [pair for pair in known if pair.peer != "ok"]
    if refused:
        text = "; ".join(f"{pair.a}-{pair.b}: {pair.peer}" for pair in refused[:8])
        more = f"; and {len(refused) - 8} pairs more" if len(refused) > 8 else ""
        return [
            warning(
                "peer-access",
                f"{len(refused)} of {len(known)} pairs have no peer access",
                text + more,
                "NCCL takes the way through host memory, and the custom and PCIe-IPC all-reduces "
                "cannot be used",
                "--disable-custom-all-reduce, and look at bar1, iommu and acs below; GeForce "
                "cards have no peer access with the stock driver",
            )
        ]
    if not known:
        return []
    return [ok("peer-access", f"granted for all {len(known)} pairs")]


_Link = tuple[str, int, int, int, int | None, int | None]


def _links(facts: Facts) -> list[_Link]:
    """(card, lanes, most lanes, best generation, percent busy, generation now)."""
    found: list[_Link] = []
    for gpu in facts.cards:
        if isinstance(gpu.width, int) and isinstance(gpu.width_max, int):
            found.append(_link(f"card {gpu.index}", gpu.width, gpu.width_max, gpu))
    if found or isinstance(facts.slots, Unknown):
        return found
    return [
        (slot.bus, slot.width, slot.width_max, _number(slot.speed_max) or 0, None, None)
        for slot in facts.slots
        if isinstance(slot.width, int) and isinstance(slot.width_max, int)
    ]


def _link(name: str, lanes: int, most: int, gpu: Gpu) -> _Link:
    return name, lanes, most, _number(gpu.speed_max) or 0, _number(gpu.busy), _number(gpu.speed)


def _number(value: Maybe[int]) -> int | None:
    return None if isinstance(value, Unknown) else value


def _pairs(facts: Facts) -> Maybe[tuple[Pair, ...]]:
    """NVML's pairs; without a driver, those that the PCI tree shows."""
    if not isinstance(facts.pairs, Unknown):
        return facts.pairs
    if isinstance(facts.slots, Unknown) or not facts.slots:
        return facts.pairs
    numbered = combinations(enumerate(facts.slots), 2)
    return tuple(Pair(i, j, level=sysfs.level(a, b)) for (i, a), (j, b) in numbered)


def _nodes(facts: Facts) -> str:
    if isinstance(facts.slots, Unknown):
        return "not known"
    names = [str(s.numa) if isinstance(s.numa, int) else "?" for s in facts.slots]
    return " ".join(names)
