"""Every command of ``apply.py`` and of ``sglang-overlay``."""

import ast
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from . import __version__, show
from .options import TREE, options
from .patchset import header, manifest
from .patchset.errors import DamagedPatchSet, PatchsetError, Usage
from .patchset.pin import Pin, choose_pin, load_pins, patches_folder
from .patchset.plan import TreeState, observe, plan, plan_commits, prove, recognise
from .patchset.series import load_series
from .patchset.tree import Tree, open_tree

#: Commands that stand beside what they use; each is imported when it is asked for.
_ELSEWHERE = {
    "bench": "measure.command:command",
    "breakeven": "measure.breakeven_command:command",
    "doctor": "doctor.command:doctor",
    "drift": "drift:drift",
    "env": "worker_env:environment",
    "export": "upstream:export",
    "new-patch": "maintain:new_patch",
    "profile": "measure.profile:profile",
    "refresh": "maintain:refresh",
    "report": "measure.report:command",
    "sweep": "measure.sweep:sweep",
}


class _Commands(click.Group):
    """``--sglang-dir`` may stand before the command, and alone it means ``apply``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self.commands, *_ELSEWHERE})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if place := _ELSEWHERE.get(cmd_name):
            module, _, name = place.partition(":")
            command: click.Command = getattr(import_module(f".{module}", __package__), name)
            return command
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        values = {"--sglang-dir", "--pin", "--patches", "--only", "--skip", "--pid"}
        values |= {"--name", "--drop", "--branch", "--version"}
        names = {*self.commands, *_ELSEWHERE}
        for place, arg in enumerate(args):
            if arg in names and (place == 0 or args[place - 1] not in values):
                args = [arg, *args[:place], *args[place + 1 :]]
                break
        else:
            if args and args[0].startswith("-") and not {"--help", "--version"} & set(args):
                args = ["apply", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_Commands, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="sglang-overlay")
def cli() -> None:
    """Exact patches over a pinned SGLang, for EAGLE-3 on GPUs that talk over PCIe only.

    apply.py --sglang-dir DIR alone means: apply.
    """


@cli.command()
@options(*TREE, "only", "skip", "commit", "json")
def apply(**given: Any) -> int:
    """Apply the series, or part of it; what is applied already stays."""
    return _change("apply", **given)


@cli.command()
@options(*TREE, "only", "skip", "commit", "json")
def reverse(**given: Any) -> int:
    """Undo the series, or part of it, to the byte."""
    return _change("reverse", **given)


@cli.command()
@options(*TREE, "only", "skip", "json")
def check(only: Sequence[str], skip: Sequence[str], as_json: bool, **given: Any) -> int:
    """Say what apply would do; write nothing."""
    tree, state = _open(**given)
    chosen = _choose(state, "apply", only, skip)
    changes = plan(tree, state, state.applied | chosen)
    if changes:
        tree.guard(changes)
    result = show.changed("check", tree, state, chosen, [change.path for change in changes])
    show.emit(result, as_json, show.change_table)
    return 0


@cli.command()
@options(*TREE, "json")
def status(as_json: bool, **given: Any) -> int:
    """Say what is applied, for each patch and file. Exit 1 when drifted or mixed."""
    tree, state = _open(**given)
    show.emit(show.status(tree, state), as_json, show.status_table)
    return 1 if state.word in ("drifted", "mixed") else 0


@cli.command()
@options("tree", "pin", "patches", "only", "skip", "json")
@click.option("--pid", "pids", multiple=True, type=int, help="A server that runs the overlay.")
def verify(
    sglang_dir: Path | None,
    pin: str | None,
    patches: Path | None,
    only: Sequence[str],
    skip: Sequence[str],
    pids: Sequence[int],
    as_json: bool,
) -> int:
    """Prove that the series, or part of it, is in: every blob, made anew. Exit 1 if not.

    Without --sglang-dir: that the overlay wheel of this environment is sound, and with
    --pid that a running server and all that it started use it.
    """
    if sglang_dir is None:
        return _verify_overlay(pids, as_json)
    tree, state = _open(sglang_dir, pin, patches)
    proofs = prove(state, _choose(state, "apply", only, skip))
    show.emit(show.verified(tree, state, proofs), as_json, show.verify_table)
    return 0 if all(proof.holds for proof in proofs) else 1


def _verify_overlay(pids: Sequence[int], as_json: bool) -> int:
    from . import installed

    result = installed.verify()
    result["processes"] = installed.verify_processes(list(pids))
    show.emit(result, as_json, show.overlay_table)
    sound = all(process["state"] == "patched" for process in result["processes"])
    return 0 if sound and not result["problems"] else 1


@cli.command()
@click.argument("directory", type=click.Path(path_type=Path))
@options("pin", "patches", "json")
def fetch(directory: Path, pin: str | None, patches: Path | None, as_json: bool) -> int:
    """Lay the pinned SGLang source out as a git checkout in DIRECTORY."""
    from .patchset import source

    pins = load_pins(patches or patches_folder())
    chosen = choose_pin(pins, pin) if pin else pins[-1]
    with show.progress() as progress:
        fresh = source.fetch(chosen, directory, progress)
    result = {"pin": chosen.name, "directory": str(directory), "fetched": fresh}
    show.emit(result, as_json, show.fetch_line)
    return 0


@cli.command()
@click.option("--write", is_flag=True, help="Write manifest.json anew.")
@options("patches", "json")
def lint(write: bool, patches: Path | None, as_json: bool) -> int:
    """Check every header, and every blob against the pinned source. Exit 5 when damaged."""
    from .patchset import source

    findings, pins = [], load_pins(patches or patches_folder())
    for pin in pins:
        series = load_series(pin)
        subjects: dict[str, str] = {}
        for patch in series.patches:
            findings += [f"{pin.name}/{patch.name}: {text}" for text in header.lint(patch.header)]
            other = subjects.setdefault(patch.header.subject, patch.name)
            if other != patch.name:
                findings.append(f"{pin.name}/{patch.name}: has the subject of {other}")
        read = source.pinned_reader(pin)
        computed = manifest.compute(series, read)
        for path, weave in series.weaves.items():
            members = weave.restrict(series.module_patches)
            text = weave.forward(read(path), members) or b""
            if members and path.endswith(".py") and _uses_own_path(text):
                findings.append(
                    f"{pin.name}/{path}: uses __file__, which an overlay changes: "
                    f"{', '.join(members)} must be Overlay: checkout-only"
                )
        if write:
            manifest.write(computed, pin.folder)
        elif manifest.load(series) != computed:
            findings.append(f"{pin.name}/manifest.json is not what lint --write makes")
    result = {"pins": [pin.name for pin in pins], "findings": findings}
    show.emit(result, as_json, show.lint_lines)
    return DamagedPatchSet.exit_code if findings else 0


def _uses_own_path(source: bytes) -> bool:
    nodes = ast.walk(ast.parse(source)) if b"__file__" in source else ()
    return any(isinstance(node, ast.Name) and node.id == "__file__" for node in nodes)


def _change(
    command: str,
    commit: bool,
    sglang_dir: Path,
    pin: str | None,
    patches: Path | None,
    only: Sequence[str],
    skip: Sequence[str],
    as_json: bool,
) -> int:
    tree = open_tree(sglang_dir)
    with tree.lock():
        state = _recognise(tree, pin, patches)
        chosen = _choose(state, command, only, skip)
        target = state.applied | chosen if command == "apply" else state.applied - chosen
        changes = plan(tree, state, target)
        if changes:
            tree.guard(changes)
        versions = state.manifest.versions
        repository, head, steps = tree.repository() if commit else None, "", []
        if repository:
            entries = repository.committable(versions)
            steps = plan_commits(tree, state, entries, chosen, add=command == "apply")
            head = repository.build([(s.patch.header, s.message, s.changes) for s in steps])
        killed = tree.interrupted()
        tree.write(changes, command)
        if repository:
            repository.publish(head, [*state.files])
        elif command == "reverse":
            tree.unstage(versions)
        after = observe(tree, state.series, state.manifest)
    result = show.changed(command, tree, after, chosen, [change.path for change in changes])
    result["commits"] = [step.message.partition("\n")[0] for step in steps]
    result["repaired"] = killed and killed["command"]
    show.emit(result, as_json, show.change_table)
    return 0


def _open(sglang_dir: Path, pin: str | None, patches: Path | None) -> tuple[Tree, TreeState]:
    tree = open_tree(sglang_dir)
    return tree, _recognise(tree, pin, patches)


def _recognise(tree: Tree, pin: str | None, patches: Path | None) -> TreeState:
    def load(one: Pin) -> TreeState:
        series = load_series(one)
        return observe(tree, series, manifest.load(series))

    pins = load_pins(patches or patches_folder())
    return load(choose_pin(pins, pin)) if pin else recognise(tree, pins, load)


def _choose(
    state: TreeState, command: str, only: Sequence[str], skip: Sequence[str]
) -> frozenset[str]:
    """The patches that the command is about, with what they need. Raises ``Usage``."""
    series = state.series
    skipped = series.select(skip)
    chosen = series.select(only or series.names) - skipped
    if command == "apply":
        needed = series.needed_by(chosen)
        for name in sorted(needed & skipped):
            raise Usage(f"{name} is skipped, but another patch needs it", "skip that one too")
        return needed
    for name in sorted(series.needing(chosen) & state.applied - chosen):
        raise Usage(f"{name} is applied and needs what shall go", f"reverse {name} as well")
    return chosen


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; print its error, if any, in one place. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    # A git hook that calls us must not redirect the git that we call.
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        del os.environ[name]
    try:
        return int(cli.main(args, prog_name="sglang-overlay", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return 130
    except PatchsetError as error:
        show.error(error, "--json" in args)
        return error.exit_code
