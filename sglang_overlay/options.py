"""The options that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Command = Callable[..., Any]
#: What every command that looks at a tree takes.
TREE = ("sglang-dir", "pin", "patches")


def options(*names: str) -> Callable[[Command], Command]:
    """The options ``names``, which several commands share."""
    table = {
        "sglang-dir": click.option(
            "--sglang-dir",
            "sglang_dir",
            required=True,
            type=click.Path(path_type=Path),
            help="A checkout, an unpacked tree, or a site-packages folder.",
        ),
        "tree": click.option(
            "--sglang-dir",
            "sglang_dir",
            type=click.Path(path_type=Path),
            help="A checkout, an unpacked tree, or a site-packages folder.",
        ),
        "pin": click.option("--pin", help="The pin, where it shall not be found from the tree."),
        "patches": click.option(
            "--patches", type=click.Path(path_type=Path), help="Another folder of patch sets."
        ),
        "only": click.option("--only", multiple=True, metavar="NAME", help="Only this patch."),
        "skip": click.option("--skip", multiple=True, metavar="NAME", help="Not this patch."),
        "commit": click.option("--commit", is_flag=True, help="One commit for each patch."),
        "json": click.option("--json", "as_json", is_flag=True, help="Print JSON."),
    }

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = table[name](command)
        return command

    return decorate
