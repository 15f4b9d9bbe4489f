"""Commits of a checkout as values, and changes as mails: what the maintainer's loop asks of git."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

from .blobs import ABSENT
from .checkout import Checkout, GitFailed
from .errors import UnsafeTree, Usage
from .header import Header
from .tree import FileChange

#: How a commit becomes a mail; with these the same commit gives the same bytes each time.
_FORMAT = (
    "format-patch -1 -k --no-renames --no-stat --no-signature --zero-commit --full-index "
    "--no-thread --no-base --no-encode-email-headers --no-ext-diff --no-color -U3 --stdout"
)
_COMPARE = "--histogram -U0 --text --no-color --no-ext-diff"
_SPAN = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@", re.MULTILINE)
_PLAIN = ("000000", "100644", "100755")
_NOBODY = Header("", "base <base@sglang-overlay.example>", "2000-01-01T00:00:00+0000", "", "", ())


@dataclass(frozen=True)
class Commit:
    """A commit that has one parent: ``author`` as ``Name <mail>``, ``date`` as mails have it."""

    id: str
    author: str
    date: str
    message: str
    changes: tuple[FileChange, ...]

    @property
    def subject(self) -> str:
        """The message's first line."""
        return self.message.partition("\n")[0]

    def __str__(self) -> str:
        return f"commit {self.id[:10]} ({self.subject})"


class History(Checkout):
    """The checkout at ``top``, its commits and its branches."""

    def resolve(self, revision: str) -> str:
        """The commit that ``revision`` names. Raises ``Usage`` when there is none."""
        try:
            return self._run("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").strip()
        except GitFailed:
            raise Usage(f"{self.top}: no commit {revision}") from None

    def has(self, ref: str) -> bool:
        """Whether there is this ``ref``, by its full name."""
        return bool(self._run("for-each-ref", "--count=1", ref))

    def stands_on(self, tag: str) -> bool:
        """Whether there is a ``tag`` and HEAD is it or comes after it."""
        try:
            self._run("merge-base", "--is-ancestor", f"refs/tags/{tag}", "HEAD")
        except GitFailed:
            return False
        return True

    def settled(self) -> None:
        """Raise ``UnsafeTree`` when something is under way, or tracked files are not committed."""
        self.idle()
        changed = self._run("status", "--porcelain", "--untracked-files=no", "-z").split("\0")[0]
        if changed:
            raise UnsafeTree(
                f"{self.top}: not everything is committed: {changed.strip()}",
                "commit it, or git stash it",
            )

    def files(self, commit: str, paths: Sequence[str]) -> dict[str, bytes | None]:
        """The bytes of ``paths`` in ``commit``; ``None`` where there is no file."""
        entries = self._entries(commit, paths)
        held = self._contents([blob for _, blob in entries.values()])
        return {path: held[blob] for path, (_, blob) in entries.items()}

    def commits(self, base: str) -> list[Commit]:
        """The commits after ``base`` up to HEAD, first to last. Raises as ``commit`` does."""
        return [self.commit(i) for i in self._run("rev-list", "--reverse", f"{base}..HEAD").split()]

    def commit(self, revision: str) -> Commit:
        """One commit. Raises ``Usage`` for merges, and for what patches never do: links,
        submodules, mode changes."""
        form = "--format=%H%x00%P%x00%an <%ae>%x00%aD%x00%B"
        text = self._run("show", "--no-patch", "--encoding=UTF-8", form, revision, "--")
        name, parents, author, date, message = text.split("\0")
        commit = Commit(name, author, date, message.strip("\n") + "\n", ())
        if len(parents.split()) != 1:
            raise Usage(f"{commit} has {len(parents.split())} parents; a patch is made of one line")
        raw = self._run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-commit-id", name)
        fields = raw.removesuffix("\0").split("\0") if raw else []
        entries = [
            (path, *entry[1:].split()[:4])
            for entry, path in zip(fields[::2], fields[1::2], strict=True)
        ]
        for path, before, after, *_ in entries:
            if before not in _PLAIN or after not in _PLAIN:
                raise Usage(f"{commit}: {path} is not a plain file")
            if before != after and "000000" not in (before, after):
                raise Usage(f"{commit}: {path} changes its mode from {before} to {after}")
        held = self._contents([blob for *_, old, new in entries for blob in (old, new)])
        changes = tuple(
            FileChange(path, held[old], held[new], max(before, after))
            for path, before, after, old, new in entries
        )
        if not changes:
            raise Usage(f"{commit} changes nothing", "drop it: git rebase -i")
        return Commit(name, author, date, commit.message, changes)

    def branch(self, name: str, commit: str) -> bool:
        """Make the branch ``name`` at ``commit``; ``False`` when it is there already.

        Raises ``Usage`` for a name that git does not take, alone or beside the branches that
        there are, ``UnsafeTree`` when the branch is at another commit.
        """
        ref = f"refs/heads/{name}"
        try:
            self._run("check-ref-format", ref)
            self._run("check-ref-format", "--branch", name)
        except GitFailed:
            raise Usage(f"{name!r} is no name for a branch") from None
        for other in self._run("for-each-ref", "--format=%(refname)", "refs/heads/").splitlines():
            if ref.startswith(f"{other}/") or other.startswith(f"{ref}/"):
                beside = other.removeprefix("refs/heads/")
                raise Usage(f"{self.top}: no branch {name} can be beside {beside}", "name another")
        try:
            there = self._run("rev-parse", "--verify", "--quiet", ref).strip()
        except GitFailed:
            self._run("update-ref", "-m", "sglang-overlay export", ref, commit, "0" * 40)
            return True
        if there != commit:
            raise UnsafeTree(
                f"{self.top}: branch {name} is at {there[:10]}, not at {commit[:10]}",
                "name another branch, or rename that one",
            )
        return False

    def _contents(self, blobs: Sequence[str]) -> dict[str, bytes | None]:
        wanted = sorted({*blobs} - {ABSENT})
        output = self._raw("cat-file", "--batch", text="".join(f"{blob}\n" for blob in wanted))
        held: dict[str, bytes | None] = {ABSENT: None}
        place = 0
        for blob in wanted:
            end = output.index(b"\n", place)
            size = int(output[place:end].split()[2])
            held[blob] = output[end + 1 : end + 1 + size]
            place = end + size + 2
        return held


class Press(History):
    """A scratch repository that makes mails: nothing of the user's takes part in them."""

    @cached_property
    def _empty(self) -> str:
        tree = self._run("hash-object", "-t", "tree", "-w", "--stdin").strip()
        who = {f"GIT_{r}_{k}": "x" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}
        return self._run("commit-tree", tree, text="empty\n", env=who).strip()

    def mail(self, author: str, date: str, message: str, changes: Sequence[FileChange]) -> bytes:
        """The patch file of one commit that makes ``changes``."""
        before = [FileChange(c.path, None, c.old, c.mode) for c in changes if c.old is not None]
        header = Header("", author, date, message, "", ())
        steps = [(_NOBODY, "base\n", before), (header, message, changes)]
        return self._raw(*_FORMAT.split(), self.build(steps, onto=self._empty))

    def taken(self, mail: bytes) -> "Taken | None":
        """What a plain ``git am`` makes of ``mail``; ``None`` when it takes it for several."""
        with TemporaryDirectory(dir=self.top) as folder:
            place = Path(folder)
            if self._run("mailsplit", f"-o{place}", text=mail).strip() != "1":
                return None
            text, diff = place / "message", place / "diff"
            said = self._run("mailinfo", str(text), str(diff), text=(place / "0001").read_bytes())
            fields = dict(line.partition(": ")[::2] for line in said.splitlines())
            subject = fields.get("Subject", "")
            message = self._run("stripspace", text=f"{subject}\n\n".encode() + text.read_bytes())
            author = f"{fields.get('Author', '')} <{fields.get('Email', '')}>"
            _, start, content = diff.read_bytes().partition(b"diff --git ")
            return Taken(author, fields.get("Date", ""), message, start + content)

    def compare(self, old: bytes, new: bytes) -> list[tuple[int, int, int, int]]:
        """Where two texts differ: first old line, old lines, first new line, new lines; from 0."""
        if old == new:
            return []
        names = []
        for name, content in (("old", old), ("new", new)):
            (self.top / name).write_bytes(content)
            names.append(f"{self.top / name}\n")
        blobs = self._run("hash-object", "-w", "--no-filters", "--stdin-paths", text="".join(names))
        text = self._run("diff", *_COMPARE.split(), *blobs.split())
        spans = []
        for found in _SPAN.finditer(text):
            start, count, other, more = (1 if n is None else int(n) for n in found.groups())
            spans.append((start - (count > 0), count, other - (more > 0), more))
        return spans

    def merge(self, ours: bytes, base: bytes, theirs: bytes) -> bytes | None:
        """The three-way merge of three texts; ``None`` when it conflicts."""
        files = []
        for name, content in (("ours", ours), ("base", base), ("theirs", theirs)):
            files.append(str(self.top / name))
            (self.top / name).write_bytes(content)
        try:
            return self._raw("merge-file", "-p", "-q", *files)
        except GitFailed:
            return None


@dataclass(frozen=True)
class Taken:
    """What a plain ``git am`` makes of one mail: a commit of these, with the ``diff``."""

    author: str
    date: str
    message: str
    diff: bytes


@contextmanager
def press() -> Iterator[Press]:
    """A ``Press`` in a folder of its own."""
    with TemporaryDirectory() as folder:
        made = Press(Path(folder).resolve())
        made._run("init", "--quiet", "--template=", "--initial-branch=main")
        yield made
