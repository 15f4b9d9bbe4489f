from pathlib import Path

import pytest

from sglang_overlay.measure import prompts
from sglang_overlay.patchset.errors import Usage

_SHARED = (
    '[{"id": 1, "conversations": [{"from": "system", "value": "be good"}, '
    '{"from": "human", "value": "one"}, {"from": "gpt", "value": "no"}]}, '
    '{"conversation": [{"role": "user", "content": "two"}]}, {"conversations": []}]'
)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("a.txt", "one\n\n two \n", ["one", " two "]),
        ("a.json", '["one", "two"]', ["one", "two"]),
        ("a.json", _SHARED, ["one", "two"]),
        ("a.jsonl", '{"prompt": "one"}\n\n{"text": "two"}\n', ["one", "two"]),
        ("a.jsonl", '{"input_ids": [1, 2]}\n[3]\n', [[1, 2], [3]]),
        (
            "a.jsonl",
            '{"text": "one\u2028line"}\r\n["x"]\n{"text": "two"}',
            ["one\u2028line", "two"],
        ),
        ("a.txt", "one\u2028line\ntwo\x0cwords", ["one\u2028line", "two\x0cwords"]),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "one"}]}', ["one"]),
    ],
)
def test_prompts_are_read_from(
    name: str, text: str, found: list[prompts.Prompt], tmp_path: Path
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert prompts.read(file) == found


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"{", "no JSON"),
        ("a.json", b"3", "no prompt in it"),
        ("a.json", b'{"prompt": "one"}', "no prompt in it"),
        ("a.json", b'[{"conversations": 5}, {"messages": "one"}]', "no prompt in it"),
        ("a.jsonl", b'{"conversations": 5}', "no prompt in it"),
        ("a.jsonl", b'{"conversations": {"from": "human"}}', "no prompt in it"),
        ("a.jsonl", b'{"id": 1}', "no prompt in it"),
        ("a.jsonl", b"[1.5, true]", "no prompt in it"),
        ("a.txt", b"\n", "no prompt in it"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", None, "No such file"),
    ],
)
def test_a_file_without_prompts_is_one_message(
    name: str, content: bytes | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(Usage, match=message):
        prompts.read(file)


def test_built_in_prompts_are_short_and_all_different() -> None:
    texts = prompts.built_in()
    assert len(set(map(str, texts))) == 32  # enough for 32 at once
    assert all(23 <= len(str(text).split()) <= 28 for text in texts)


def test_random_ids_are_the_same_each_time_and_in_every_vocabulary() -> None:
    ids = prompts.random_ids(4)
    assert ids == prompts.random_ids(4) != prompts.random_ids(4, seed=1)
    assert all(len(one) == 30 and min(one) >= 0 and max(one) < 100 for one in ids)  # type: ignore
