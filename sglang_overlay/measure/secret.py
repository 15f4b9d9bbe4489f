"""What must not be stored or printed: values of names that look like secrets, and who asks."""

import re
from collections.abc import Iterable, Iterator, Sequence

from ..doctor.settings import REDACTED
from ..doctor.settings import is_secret as is_secret_variable

# Of a flag the last word counts: --speculative-num-draft-tokens and --tokenizer-path are none.
_FLAG = re.compile(r"-.*(key|token|secret|password)", re.IGNORECASE)
_SHORTEST = 4  # characters; what is shorter would be found everywhere
_USER = re.compile(r"^(\w+://)?[^/?#]*@")


def is_secret(name: str) -> bool:
    """Whether the value of a variable (the rule of the patch worker-env) or flag is not shown."""
    return bool(_FLAG.fullmatch(name)) if name.startswith("-") else is_secret_variable(name)


def shown(name: str, value: str) -> str:
    """``value``, or in its place that it is not shown."""
    return REDACTED if is_secret(name) else value


def words(argv: Sequence[str]) -> list[str]:
    """``argv`` with ``--api-key VALUE``, ``--api-key=VALUE`` and ``X_TOKEN=VALUE`` not shown."""
    found: list[str] = []
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, value = word.partition("=")
        hidden = equals and shown(name, value)
        alone = before.startswith("-") and "=" not in before
        found.append(
            shown(before, word) if alone and is_secret(before) else f"{name}{equals}{hidden}"
        )
    return found


def of_words(argv: Sequence[str]) -> Iterator[str]:
    """The values in ``argv`` that ``words`` does not show."""
    for real, told in zip(argv, words(argv), strict=True):
        if real != told:
            yield real.removeprefix(told.removesuffix(REDACTED))


def hide(text: str, values: Iterable[str]) -> str:
    """``text`` without ``values``."""
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _SHORTEST:
            text = text.replace(value, REDACTED)
    return text


def bare(url: str) -> str:
    """``url`` without user and password."""
    return _USER.sub(r"\1", url)
