"""A git checkout: the only module that runs git, through GitPython.

Files in the work tree are written by ``Tree.write``; git is asked what is
committed and makes commits. The user's and the machine's git configuration take
no part, nor do hooks, filters or a file system monitor of the repository's own.
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
from .tree import Entry, FileChange, Tree

if TYPE_CHECKING:
    import git

_UNDER_WAY = {
    "rebase-merge": "rebase",
    "rebase-apply": "rebase or am",
    "MERGE_HEAD": "merge",
    "CHERRY_PICK_HEAD": "cherry-pick",
    "REVERT_HEAD": "revert",
    "sequencer": "cherry-pick or revert",
}
_SETTINGS = {
    "core.hooksPath": os.devnull,
    "core.fsmonitor": "false",
    "core.autocrlf": "false",
    "core.attributesFile": os.devnull,
    "i18n.commitEncoding": "UTF-8",
    "safe.directory": "*",
}


#: A commit to make: whose it is, its message, and the changes against the one before.
Step = tuple[Header, str, Sequence[FileChange]]


class GitFailed(EnvironmentFailure):
    """A git command that should have worked did not."""


class Checkout(Tree):
    """The git checkout at ``top``."""

    layout = "checkout"

    @cached_property
    def _git(self) -> "git.cmd.Git":
        try:
            import git  # only here: it takes longer to import than most commands to run
        except ImportError as error:  # so does GitPython say that there is no git
            reason = str(error).strip().splitlines()[0]
            raise EnvironmentFailure(f"git cannot be used: {reason}", "install git") from error
        runner = git.cmd.Git(self.top)
        runner.update_environment(
            GIT_CONFIG_GLOBAL=os.devnull,
            GIT_CONFIG_NOSYSTEM="1",
            GIT_TERMINAL_PROMPT="0",
            LC_ALL="C",
        )
        return runner

    @cached_property
    def _git_folder(self) -> Path:
        folder = self.top / ".git"
        if folder.is_file():  # a linked work tree or a submodule
            return self.top / folder.read_text().removeprefix("gitdir:").strip()
        return folder

    def committed(self, path: str) -> str | None:
        return self._entries("HEAD", [path])[path][1] if self._head() else ABSENT

    def repository(self) -> "Checkout":
        return self

    def committable(self, known: Mapping[str, Mapping[str, object]]) -> dict[str, Entry]:
        """What HEAD has for the paths of ``known``, once commits can be made here.

        Raises ``UnsafeTree`` when HEAD is unborn, an operation is under way, or something
        else than a blob of ``known`` is staged for one of the paths, and
        ``EnvironmentFailure`` when the index is locked.
        """
        self.idle()
        if not self._head():
            raise UnsafeTree(f"{self.top}: no commit to build on", "leave --commit out")
        if (self._git_folder / "index.lock").exists():
            raise EnvironmentFailure(
                f"{self._git_folder}/index.lock: another git is at work, or one was killed"
            )
        for path, blob in self._staged([*known]).items():
            if blob not in known[path]:
                raise UnsafeTree(
                    f"{path}: changes of your own are staged",
                    f"git -C {self.top} restore --staged {path}",
                )
        return self._entries("HEAD", [*known])

    def unstage(self, known: Mapping[str, Mapping[str, object]]) -> None:
        if not self._head():
            return
        head, staged = self._entries("HEAD", [*known]), self._staged([*known])
        ours = [p for p, blob in staged.items() if blob in known[p] and blob != head[p][1]]
        self._set_index({path: head[path] for path in ours})

    def idle(self) -> None:
        for name, operation in _UNDER_WAY.items():
            if (self._git_folder / name).exists():
                raise UnsafeTree(
                    f"{self.top}: a {operation} is under way", "finish or abort it first"
                )

    def head_tree(self) -> str:
        """The id of HEAD's tree."""
        return self._run("rev-parse", "HEAD^{tree}").strip()

    def tree_of(self, name: str) -> str:
        """The id of the tree of the commit ``name``; empty when there is none."""
        try:
            return self._run("rev-parse", "--verify", "--quiet", f"{name}^{{tree}}").strip()
        except GitFailed:
            return ""

    def build(self, steps: Sequence[Step], onto: str = "") -> str:
        """The id of the last of the commits that ``steps`` ask for, made on the commit ``onto``
        (HEAD by default); that one's where there are none.

        Nothing moves: neither branch nor index nor work tree. A commit carries its
        patch's author and date, so the same steps on the same commit give the same ids.
        """
        commit = onto or self._head()
        with tempfile.TemporaryDirectory() as folder:
            self._store([change for _, _, changes in steps for change in changes], Path(folder))
            index = {"GIT_INDEX_FILE": str(Path(folder, "index"))}
            self._run("read-tree", commit, env=index)
            for header, message, changes in steps:
                entries = {c.path: (c.mode, blob_id(c.new)) for c in changes}
                self._set_index(entries, env=index)
                tree = self._run("write-tree", env=index).strip()
                commit = self._run(
                    "commit-tree", tree, "-p", commit, text=message, env=_author(header)
                ).strip()
        return commit

    def publish(self, commit: str, paths: Sequence[str]) -> None:
        """Move the index's entries of ``paths``, then the branch, to ``commit``."""
        try:
            self._set_index(self._entries(commit, paths))
            if commit != self._head():
                self._run("update-ref", "-m", "sglang-overlay", "HEAD", commit, self._head())
        except GitFailed as error:
            raise GitFailed(
                f"the files are written, but not committed: {error.message}",
                "mend that and run the same command again",
            ) from error

    def _entries(self, commit: str, paths: Sequence[str]) -> dict[str, Entry]:
        entries = dict.fromkeys(paths, ("100644", ABSENT))
        for line in self._run("ls-tree", "-r", commit, "--", *paths).splitlines():
            entry, path = line.split("\t")
            mode, _, blob = entry.split()
            entries[path] = (mode, blob)
        return entries

    def _staged(self, paths: Sequence[str]) -> dict[str, str]:
        blobs = dict.fromkeys(paths, ABSENT)
        for line in self._run("ls-files", "--stage", "--", *paths).splitlines():
            entry, path = line.split("\t")
            blobs[path] = entry.split()[1]
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

    def _set_index(self, entries: Mapping[str, Entry], env: Mapping[str, str] = {}) -> None:
        lines = [
            f"{0 if blob == ABSENT else mode} {blob}\t{path}\n"
            for path, (mode, blob) in entries.items()
        ]
        if lines:
            self._run("update-index", "--index-info", text="".join(lines), env=env)

    def _run(self, *args: str, text: str | bytes = b"", env: Mapping[str, str] = {}) -> str:
        return self._raw(*args, text=text, env=env).decode("utf-8", "surrogateescape")

    def _raw(self, *args: str, text: str | bytes = b"", env: Mapping[str, str] = {}) -> bytes:
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
                stdout_as_string=False,
                with_extended_output=True,
                with_exceptions=False,
            )
        if status != 0:
            raise GitFailed(f"{self.top}: git {args[0]} failed: {error.strip()}")
        assert isinstance(output, bytes)
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
    name, mail = header.who
    return {
        f"GIT_{role}_{key}": value
        for role in ("AUTHOR", "COMMITTER")
        for key, value in (("NAME", name), ("EMAIL", mail), ("DATE", header.date))
    }
