"""The cards themselves: model, driver, modes, memory that others hold, NVSwitch."""

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

_GIB = 2**30


def models(facts: Facts) -> list[Finding]:
    """One kind of card, as many as the server wants."""
    if isinstance(facts.gpus, Unknown):
        return [unknown("gpus", facts.gpus.why)]
    if not isinstance(facts.driver, Unknown) and facts.driver.lost:
        return [
            error(
                "gpus",
                f"{len(facts.driver.lost)} of the driver's cards do not answer",
                "; ".join(facts.driver.lost),
                "no server can use such a card, and programs on the others may fail with it",
                "sudo dmesg | grep -i xid; then restart the machine, or look at the card's seat",
            )
        ]
    kinds = sorted({(g.name, g.capability, g.memory // _GIB) for g in facts.cards})
    text = "; ".join(
        f"{sum(g.name == name and g.memory // _GIB == size for g in facts.cards)} x {name}, "
        f"SM{major}{minor}, {size} GiB"
        for name, (major, minor), size in kinds
    )
    if len(facts.cards) < facts.world:
        return [
            error(
                "gpus",
                f"{len(facts.cards)} cards, and the server wants {facts.world}",
                text or "no card is visible",
                "a rank without a card of its own cannot start",
                f"--tp {len(facts.cards) * facts.server.group_nodes}" if facts.cards else "",
            )
        ]
    if len(kinds) > 1:
        return [
            warning(
                "gpus",
                "cards of different kinds",
                text,
                "every all-reduce of a verify pass waits for the slowest card, and SGLang takes "
                "the smallest memory for all",
                "CUDA_VISIBLE_DEVICES=... with cards of one kind",
            )
        ]
    if not facts.cards:
        return [unknown("gpus", "the driver sees no card, or CUDA_VISIBLE_DEVICES hides them")]
    return [ok("gpus", text)]


def driver(facts: Facts) -> list[Finding]:
    """The driver runs the CUDA that torch was built for."""
    if isinstance(facts.driver, Unknown):
        return [unknown("driver", facts.driver.why)]
    have = facts.driver
    text = f"driver {have.version}, up to CUDA {have.cuda[0]}.{have.cuda[1]}"
    python = facts.python
    if isinstance(python, Unknown) or isinstance(python.torch, Unknown) or not python.torch.cuda:
        return [ok("driver", text, "torch's CUDA is not known")]
    wanted = tuple(int(part) for part in python.torch.cuda.split(".")[:2])
    if wanted[0] > have.cuda[0]:
        return [
            error(
                "driver",
                "the driver is too old for this torch",
                f"{text}; torch {python.torch.version} is built for CUDA {python.torch.cuda}",
                "CUDA does not start, and SGLang falls back to the CPU or stops",
                f"install a driver for CUDA {wanted[0]} or newer "
                "(Debian, Ubuntu: sudo apt-get install nvidia-open)",
            )
        ]
    return [ok("driver", text, f"torch is built for CUDA {python.torch.cuda}")]


def modes(facts: Facts) -> list[Finding]:
    """No card is split (MIG), and more than one process may use it."""
    if not facts.cards:
        return []
    found = []
    if split := [str(g.index) for g in facts.cards if g.mig]:
        found.append(
            error(
                "mig",
                "MIG is on",
                f"cards {', '.join(split)}",
                "slices of one card have no peer access, and NCCL refuses two ranks on one card",
                f"sudo nvidia-smi -i {','.join(split)} -mig 0",
            )
        )
    if closed := [g for g in facts.cards if g.compute_mode != "default"]:
        names = ",".join(str(g.index) for g in closed)
        found.append(
            error(
                "compute-mode",
                f"compute mode is {closed[0].compute_mode}",
                f"cards {names}",
                "a second process on a card (a tuner, a peer check, another rank's context) is "
                "told that all devices are busy or unavailable",
                f"sudo nvidia-smi -i {names} -c DEFAULT",
            )
        )
    return found or [ok("compute-mode", "no MIG, compute mode default")]


def occupied(facts: Facts) -> list[Finding]:
    """Nobody else holds the cards' memory."""
    if not facts.cards:
        return []
    held = [g for g in facts.cards if g.used > max(_GIB, g.memory // 20)]
    if not held:
        return [ok("gpu-memory", "the cards' memory is free")]
    return [
        warning(
            "gpu-memory",
            "other processes hold memory of the cards",
            "; ".join(f"{g.index}: {g.used / _GIB:.1f} of {g.memory / _GIB:.0f} GiB" for g in held),
            "SGLang sizes every rank by the fullest card, and may stop with 'memory capacity is "
            "unbalanced'; another program's kernels also delay each verify pass",
            "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv",
        )
    ]


def fabric(facts: Facts) -> list[Finding]:
    """On NVSwitch machines, the fabric manager has done its work."""
    waiting = [g for g in facts.cards if g.fabric in ("not started", "in progress")]
    if not waiting:
        return []
    return [
        error(
            "fabric",
            "the NVSwitch fabric is not up",
            f"cards {', '.join(str(g.index) for g in waiting)}: {waiting[0].fabric}",
            "CUDA answers 802, system not yet initialized, until the fabric manager has run",
            "sudo systemctl enable --now nvidia-fabricmanager",
        )
    ]
