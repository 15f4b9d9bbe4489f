"""Reads the machine once, into ``Facts``."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import cache, host, nvml, peers, python, server, settings, sysfs
from .facts import Facts, Unknown

Say = Callable[[str], None]


def collect(
    executable: str,
    sglang_dir: Path | None,
    arguments: Sequence[str],
    pins: Mapping[str, tuple[str, ...]],
    deep: bool,
    say: Say,
) -> Facts:
    """All facts, with real copies between the cards where ``deep``. ``say`` hears what is done."""
    try:
        home = Path.home()
    except RuntimeError:  # HOME is unset, and the user has no entry in passwd
        home = Path("/nonexistent")
    say("driver and cards")
    driver, gpus, pairs = nvml.read_nvml()
    facts = Facts(
        driver=driver,
        gpus=gpus,
        pairs=pairs,
        slots=sysfs.read_slots(),
        host=host.read_host(),
        settings=settings.read_settings(os.environ, home),
        cache=cache.read_cache(os.environ, home),
        server=server.read_server(arguments),
        pins=pins,
    )
    facts = only_visible(facts)
    say(f"{executable} and its torch")
    facts = replace(facts, python=python.read_python(executable, sglang_dir))
    if deep:
        facts = replace(facts, copies=peers.copy_all(facts, executable, say))
    return facts


def only_visible(facts: Facts) -> Facts:
    """``facts`` without the cards that ``CUDA_VISIBLE_DEVICES`` hides."""
    gpus = nvml.visible(facts)
    return facts if isinstance(gpus, Unknown) else facts.with_cards(gpus)
