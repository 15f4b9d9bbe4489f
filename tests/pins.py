"""The pins, and the marks of tests that run for each."""

import pytest

from sglang_overlay.patchset.pin import Pin, load_pins, patches_folder

PINS = load_pins(patches_folder())
NEWEST = PINS[-1]


def for_pins(*pins: Pin) -> pytest.MarkDecorator:
    """Runs a test, through its fixture ``pin``, once for each of ``pins``."""
    return pytest.mark.parametrize(
        "pin", pins, ids=lambda pin: pin.name, indirect=True, scope="session"
    )


each_pin = for_pins(*PINS)
each_older_pin = for_pins(*PINS[:-1])


def pins_with(patch: str) -> list[Pin]:
    """The pins that have ``patch``."""
    return [pin for pin in PINS if (pin.folder / f"{patch}.patch").is_file()]


def each_pin_with(patch: str) -> pytest.MarkDecorator:
    """For the pins that have ``patch``."""
    return for_pins(*pins_with(patch))
