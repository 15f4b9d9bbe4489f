"""Prompts: built in, from a file, or random token ids."""

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..patchset.errors import Usage

#: A text, or token ids for a server without a tokenizer.
Prompt = str | list[int]
BUILT_IN, RANDOM_IDS = "built in", "random ids"

_TASKS = (
    "Explain {} to a reader who has never heard of it, step by step, "
    "and give two examples from daily life.",
    "Write a short story in which {} plays the main part "
    "and an old teacher learns something new about it.",
    "Compare {} with the way the same was done a hundred years ago, "
    "in a few short and plain paragraphs.",
    "List the mistakes that beginners make with {}, "
    "and say for each of them, in short, how to avoid it.",
)
_SUBJECTS = (
    "the cooling of a large building in summer",
    "the way a small bakery plans its week",
    "a bridge that opens for tall ships",
    "the repair of an old mechanical clock",
    "a river that changes its course",
    "the timetable of a mountain railway",
    "a garden that feeds a large family",
    "the printing of a daily newspaper",
)


def built_in() -> list[Prompt]:
    """32 different English texts: 26 to 32 tokens each in OpenAI's cl100k and o200k."""
    return [task.format(subject) for subject in _SUBJECTS for task in _TASKS]


def random_ids(count: int = 32, length: int = 30, seed: int = 0) -> list[Prompt]:
    """``count`` prompts of ``length`` token ids below 100, which every vocabulary has."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 100) for _ in range(length)] for _ in range(count)]


def read(file: Path) -> list[Prompt]:
    """The prompts in ``file``. Raises ``Usage``.

    ``.json`` holds a list, ``.jsonl`` a value a line: a text, a list of token ids, an object
    with ``prompt``, ``text`` or ``input_ids``, or a ShareGPT conversation, of which the first
    human turn counts. Any other file holds one text a line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Usage(f"{file}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    lines = [line for line in text.split("\n") if line.strip()]  # U+2028 is part of a text
    try:
        if file.suffix == ".json":
            values = json.loads(text)
        elif file.suffix == ".jsonl":
            values = [json.loads(line) for line in lines]
        else:
            values = lines
    except ValueError as error:
        raise Usage(f"{file}: no JSON: {error}") from error
    values = values if isinstance(values, list) else []
    found = [prompt for value in values if (prompt := _prompt(value))]
    if not found:
        raise Usage(f"{file}: no prompt in it", "one text a line, or ShareGPT-style JSON")
    return found


def digest(prompts: Sequence[Prompt]) -> str:
    """Eight hex digits that tell these prompts from others."""
    return hashlib.sha256(json.dumps(list(prompts)).encode()).hexdigest()[:8]


def _prompt(value: Any) -> Prompt | None:
    for candidate in _candidates(value):
        if isinstance(candidate, str) and candidate.strip():
            return candidate
        if isinstance(candidate, list) and candidate and all(type(n) is int for n in candidate):
            return candidate
    return None


def _candidates(value: Any) -> Iterator[Any]:
    if not isinstance(value, dict):
        yield value
        return
    yield from (value.get(name) for name in ("prompt", "text", "input_ids"))
    for name in ("conversations", "conversation", "messages"):
        turns = value.get(name)
        for turn in turns if isinstance(turns, list) else ():
            if isinstance(turn, dict) and turn.get("from", turn.get("role")) in ("human", "user"):
                yield turn.get("value", turn.get("content"))
