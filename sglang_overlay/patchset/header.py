"""The mail header of a patch: who, when, why, and when to remove it."""

import re
from dataclasses import dataclass

from .errors import DamagedPatchSet

_FIRST_LINE = re.compile(rb"From [0-9a-f]{40} Mon Sep 17 00:00:00 2001\n")
_TRAILER = re.compile(r"([A-Z][A-Za-z-]+): (.+)")
_RULES = {
    "Origin": r"vendor|upstream, https://\S+|backport, [0-9a-f]{40}",
    "Upstream-Status": r"Pending|Submitted \[https://\S+\]|Backport \[[0-9a-f]{40}\]"
    r"|Denied \[https://\S+\]|Inappropriate \[.+\]",
    "Remove-When": r"\S.*",
    "Overlay": r"module|checkout-only",
    "Signed-off-by": r"[^<>]+ <[^<>@\s]+@[^<>@\s]+>",
}


@dataclass(frozen=True)
class Header:
    """A patch's mail header.

    ``message`` is the commit message that ``git am`` makes of it, ``body`` the text
    between the subject and the trailers, ``trailers`` the ``Key: value`` lines of
    the last paragraph, in order.
    """

    subject: str
    author: str
    date: str
    message: str
    body: str
    trailers: tuple[tuple[str, str], ...]

    @property
    def who(self) -> tuple[str, str]:
        """The author's name and mail address."""
        return name_and_mail(self.author)

    def values(self, key: str) -> list[str]:
        """Every value given for ``key``."""
        return [value for name, value in self.trailers if name == key]

    @property
    def depends_on(self) -> tuple[str, ...]:
        """Names of the patches that this one is written on top of."""
        return tuple(
            name.strip()
            for value in self.values("Depends-On")
            for name in value.split(",")
            if name.strip()
        )

    @property
    def switch(self) -> str:
        """How the patch is switched off at run time, in words."""
        return (self.values("Switch") or [""])[0]

    @property
    def overlay(self) -> str:
        """``module`` or ``checkout-only``."""
        return (self.values("Overlay") or ["checkout-only"])[0]


def name_and_mail(author: str) -> tuple[str, str]:
    """The two parts of ``Name <mail>``; a name that a mail has in quotes is taken out of them."""
    name, _, mail = author.removesuffix(">").rpartition(" <")
    if name.startswith('"'):
        from email.utils import unquote  # few names need it, and it is slow to import

        name = unquote(name)
    return name, mail


def split_mail(mail: bytes, name: str) -> tuple[Header, bytes]:
    """Cut a patch file into its header and its diff.

    Raises ``DamagedPatchSet`` when either is missing.
    """
    if not _FIRST_LINE.match(mail):
        raise DamagedPatchSet(
            f"patch {name}: does not start with the 'From <id> Mon Sep 17 00:00:00 2001' "
            "line of a git mail"
        )
    text, found, diff = mail.partition(b"\ndiff --git ")
    if not found:
        raise DamagedPatchSet(f"patch {name}: holds no git diff")
    text = text.removesuffix(b"\n---\n")
    fields, _, payload = _text(text[text.index(b"\n") + 1 :], name).partition("\n\n")
    values = dict(line.partition(": ")[::2] for line in fields.replace("\n ", " ").split("\n"))
    body, trailers = _split_trailers(payload)
    subject = values.get("Subject", "")
    header = Header(
        subject=subject,
        author=values.get("From", ""),
        date=values.get("Date", ""),
        message=f"{subject}\n\n{payload.strip()}\n",
        body=body,
        trailers=trailers,
    )
    return header, b"diff --git " + diff


def _text(mail: bytes, name: str) -> str:
    try:
        return mail.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DamagedPatchSet(f"patch {name}: its header is not UTF-8") from error


def _split_trailers(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    body, _, last = text.strip("\n").rpartition("\n\n")
    matches = [_TRAILER.fullmatch(line) for line in last.split("\n")]
    trailers = tuple((m[1], m[2]) for m in matches if m)
    if len(trailers) != len(matches):
        return text.strip("\n"), ()
    return body, trailers


def lint(header: Header) -> list[str]:
    """What is wrong with ``header``, a sentence each; empty when nothing is."""
    found = []
    if not re.fullmatch(r"[a-z0-9][\w./ -]*: \S.*[^.]", header.subject):
        found.append(f"Subject {header.subject!r} is not '<area>: short imperative summary'")
    if len(header.subject) > 78:
        found.append(f"Subject is {len(header.subject)} characters long; 78 at most")
    if not re.fullmatch(_RULES["Signed-off-by"], header.author):
        found.append(f"From {header.author!r} is not 'Name <mail>'")
    if not _is_mail_date(header.date):
        found.append(f"Date {header.date!r} is not a mail date")
    if len(header.body.split()) < 20:
        found.append("the body does not say why the patch exists and how it was tested")
    for line in header.body.split("\n"):
        if line.startswith(("--- ", "diff -", "Index: ")) or line == "---":
            found.append(f"git am would cut the body at the line {line!r}")
    for key, rule in _RULES.items():
        values = header.values(key)
        if not values:
            found.append(f"no {key}: line")
        found += [f"{key}: {v!r} is none of {rule}" for v in values if not re.fullmatch(rule, v)]
    if header.overlay == "module" and not header.values("Switch"):
        found.append("no Switch: line; a module patch says how it is switched off at run time")
    return found


def _is_mail_date(value: str) -> bool:
    from email.utils import parsedate_to_datetime  # lint alone needs it, and it is slow to import

    try:
        parsedate_to_datetime(value)
    except ValueError:
        return False
    return True
