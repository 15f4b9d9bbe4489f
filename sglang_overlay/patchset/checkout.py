"""A git checkout: the only module that runs git, through GitPython.

Files in the work tree are written by ``Tree.write``; git is asked what is
committed and whether an operation is under way, and makes commits. Nothing of
the user's git configuration, hooks or filters takes part.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .blobs import ABSENT, blob_id
from .errors import EnvironmentFailure, UnsafeTree
from .header import Header
from .tree import FileChange, Tree

if TYPE_CHECKING:
    import git

_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or am",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
}
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "i18n.commitEncoding": "UTF-8",
    "safe.directory": "*",
}


class GitFailed(EnvironmentFailure):
    """A git command that should have worked did not."""


class Checkout(Tree):
    """The git checkout at ``top``."""

    layout = "checkout"

    @cached_property
    def _git(self) -> "git.cmd.Git":
        import git  # only here: it takes longer to import than most commands to run

        runner = git.cmd.Git(self.top)
        runner.update_environment(
            GIT_CONFIG_GLOBAL=os.devnull,
            GIT_CONFIG_NOSYSTEM="1",
            GIT_TERMINAL_PROMPT="0",
            LC_ALL="C",
        )
        return runner

    def committed(self, path: str) -> str | None:
        return self._committed([path])[path]

    def committable(self, known: Mapping[str, Mapping[str, object]]) -> dict[str, str]:
        if not self._head():
            raise UnsafeTree(f"{self.top}: no commit to build on", "leave --commit out")
        for line in self._run("ls-files", "--stage", "--", *known).splitlines():
            entry, path = line.split("\t")
            if entry.split()[1] not in known[path]:
                raise UnsafeTree(
                    f"{path}: changes of your own are staged", f"git restore --staged {path}"
                )
        return self._committed([*known])

    def guard(self, changes: Sequence[FileChange]) -> None:
        super().guard(changes)
        folder = self.top / ".git"
        if folder.is_file():  # a linked work tree or a submodule
            folder = self.top / folder.read_text().removeprefix("gitdir:").strip()
        for name, operation in _UNDER_WAY.items():
            if (folder / name).exists():
                raise UnsafeTree(
                    f"{self.top}: a {operation} is under way", "finish or abort it first"
                )

    def head_tree(self) -> str:
        """The id of HEAD's tree."""
        return self._run("rev-parse", "HEAD^{tree}").strip()

    def has_commit(self, name: str) -> bool:
        """Whether ``name`` is a commit here."""
        try:
            self._run("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        except GitFailed:
            return False
        return True

    def commit(self, steps: Sequence[tuple[Header, str, Sequence[FileChange]]]) -> list[str]:
        """Make one commit for each step: header, message, changes against the one before.

        Index and branch move once, after every commit exists; the work tree is not
        looked at. A commit carries its patch's author and date, so the same steps on
        the same HEAD give the same ids, which are returned.
        """
        head = parent = self._head()
        made = []
        with tempfile.TemporaryDirectory() as folder:
            self._store([change for _, _, changes in steps for change in changes], Path(folder))
            index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self._run("read-tree", head, env=index)
            for header, message, changes in steps:
                self._set_index(changes, env=index)
                tree = self._run("write-tree", env=index).strip()
                parent = self._run(
                    "commit-tree", tree, "-p", parent, text=message, env=_author(header)
                ).strip()
                made.append(parent)
        if made:
            self._set_index([change for _, _, changes in steps for change in changes])
            self._run("update-ref", "-m", "sglang-overlay", "HEAD", parent, head)
        return made

    def _committed(self, paths: Sequence[str]) -> dict[str, str]:
        blobs = dict.fromkeys(paths, ABSENT)
        if self._head():
            for line in self._run("ls-tree", "-r", "HEAD", "--", *paths).splitlines():
                entry, path = line.split("\t")
                blobs[path] = entry.split()[2]
        return blobs

    def _head(self) -> str:
        try:
            return self._run("rev-parse", "--verify", "--quiet", "HEAD").strip()
        except GitFailed:
            return ""

    def _store(self, changes: Sequence[FileChange], folder: Path) -> None:
        """Write every new content into the object store, by one git."""
        files = []
        for number, change in enumerate(changes):
            if change.new is not None:
                files.append(folder / str(number))
                files[-1].write_bytes(change.new)
        names = "".join(f"{file}\n" for file in files)
        self._run("hash-object", "-w", "--no-filters", "--stdin-paths", text=names)

    def _set_index(self, changes: Sequence[FileChange], env: Mapping[str, str] = {}) -> None:
        lines = [f"{0 if c.new is None else c.mode} {blob_id(c.new)}\t{c.path}\n" for c in changes]
        self._run("update-index", "--index-info", text="".join(lines), env=env)

    def _run(self, *args: str, text: str | bytes = b"", env: Mapping[str, str] = {}) -> str:
        settings = [part for name, value in _SETTINGS.items() for part in ("-c", f"{name}={value}")]
        content = text.encode() if isinstance(text, str) else text
        with tempfile.TemporaryFile() as stdin:
            stdin.write(content)
            stdin.seek(0)
            status, output, error = self._git.execute(
                ["git", *settings, *args],
                istream=stdin,
                env=dict(env),
                strip_newline_in_stdout=False,
                with_extended_output=True,
                with_exceptions=False,
            )
        if status != 0:
            raise GitFailed(f"{self.top}: git {args[0]} failed: {error.strip()}")
        assert isinstance(output, str)
        return output


def create_checkout(top: Path, message: str, date: str, tag: str) -> Checkout:
    """Make a git repository of the files in ``top``, with one commit and ``tag`` on it."""
    checkout = Checkout(top)
    checkout._run("init", "--quiet", "--template=", "--initial-branch=main")
    checkout._run("add", "--all", "--force", ".")
    tree = checkout._run("write-tree").strip()
    author = Header("", "sglang-overlay <pin@sglang-overlay.example>", date, "", "", ())
    commit = checkout._run("commit-tree", tree, text=message, env=_author(author)).strip()
    checkout._run("update-ref", "HEAD", commit)
    checkout._run("tag", tag, commit)
    return checkout


def _author(header: Header) -> dict[str, str]:
    name, _, mail = header.author.removesuffix(">").rpartition(" <")
    return {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", name), ("EMAIL", mail), ("DATE", header.date))
    }
