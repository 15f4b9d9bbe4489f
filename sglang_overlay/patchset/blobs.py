"""Git blob ids, the names by which every version of a file is known."""

import hashlib

#: The blob id that git prints for a file that does not exist.
ABSENT = "0" * 40


def blob_id(content: bytes | None) -> str:
    """The id that ``git hash-object`` gives ``content``; ``ABSENT`` for ``None``."""
    if content is None:
        return ABSENT
    header = b"blob %d\0" % len(content)
    return hashlib.sha1(header + content, usedforsecurity=False).hexdigest()


def short(blob: str) -> str:
    """``blob`` as messages show it: eight digits, or ``no file``."""
    return "no file" if blob == ABSENT else blob[:8]


def split_lines(content: bytes) -> list[bytes]:
    """The lines of ``content`` with their ends, cut at ``\\n`` alone, as git cuts them."""
    lines = [line + b"\n" for line in content.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines
