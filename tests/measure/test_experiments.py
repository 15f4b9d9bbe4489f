"""Sweep files: what they mean, and what is wrong with one."""

import json
from collections import Counter
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure.experiment import load
from sglang_overlay.measure.sweep import SHIPPED

H200 = Path(__file__).parents[2] / "ci/gpu/h200.toml"
FILE = """\
name = "few"
[values]
model = "/models/one"
[server]
command = ["python3", "-m", "sglang.launch_server", "--model-path", "$model", "--port", "$port"]
args = { "--tensor-parallel-size" = 8, "--node-rank" = 0, "--trust-remote-code" = true }
env = { NCCL_DEBUG = "WARN" }
[bench]
runs = 3
temperature = 1
[[experiment]]
name = "plain"
[[experiment]]
name = "nccl"
baseline = "plain"
args = { "--trust-remote-code" = false }
env = { NCCL_ALGO = ["Ring", "Tree"], NCCL_MAX_NCHANNELS = [1, 2], NCCL_DEBUG = "INFO" }
"""


def write(folder: Path, text: str) -> Path:
    file = folder / "few.toml"
    file.write_text(text)
    return file


def test_lists_become_one_experiment_for_each_combination(tmp_path: Path) -> None:
    sweep = load(write(tmp_path, FILE), {"model": "/m"})
    assert [one.name for one in sweep.experiments] == [
        "plain",
        "nccl NCCL_ALGO=Ring NCCL_MAX_NCHANNELS=1",
        "nccl NCCL_ALGO=Ring NCCL_MAX_NCHANNELS=2",
        "nccl NCCL_ALGO=Tree NCCL_MAX_NCHANNELS=1",
        "nccl NCCL_ALGO=Tree NCCL_MAX_NCHANNELS=2",
    ]
    plain, *_, last = sweep.experiments
    start = ["python3", "-m", "sglang.launch_server", "--model-path", "/m", "--port", "7"]
    sized = ["--tensor-parallel-size", "8", "--node-rank", "0"]
    assert plain.argv(7) == [*start, *sized, "--trust-remote-code"]
    assert last.argv(7) == [*start, *sized]
    assert plain.env == {"NCCL_DEBUG": "WARN"}
    assert last.env == {"NCCL_DEBUG": "INFO", "NCCL_ALGO": "Tree", "NCCL_MAX_NCHANNELS": "2"}
    assert last.settings == {"--trust-remote-code": "False", **last.env}
    assert (sweep.protocol.runs, sweep.protocol.tokens, sweep.profile_steps) == (3, 2048, 0)


def test_a_result_is_known_again_only_while_nothing_that_bears_on_it_changes(
    tmp_path: Path,
) -> None:
    def digests(text: str) -> list[str]:
        sweep = load(write(tmp_path, text))
        return [sweep.digest(one) for one in sweep.experiments]

    before = digests(FILE)
    assert len(set(before)) == 5
    assert digests(f"# a comment\n{FILE}[stop]\nfailures = 2\n") == before
    assert digests(FILE.replace('"INFO"', '"TRACE"'))[:1] == before[:1]
    for change in (('"/models/one"', '"/models/two"'), ("runs = 3", "runs = 4")):
        assert not set(digests(FILE.replace(*change))) & set(before)


def test_a_file_of_prompts_is_read_once_and_bears_on_the_result(tmp_path: Path) -> None:
    prompts = tmp_path / "mine.txt"
    text = FILE.replace("runs = 3", f'prompts = "{prompts}"')
    digests = set()
    for words in (["one", "two"], ["one", "three"]):
        prompts.write_text("\n".join(words))
        sweep = load(write(tmp_path, text))
        prompts.unlink()
        assert list(sweep.prompts) == words
        digests.add(sweep.digest(sweep.experiments[0]))
    assert len(digests) == 2
    assert len(load(write(tmp_path, FILE.replace("runs = 3", 'prompts = "random ids"'))).prompts)


@pytest.mark.parametrize("file", [*sorted(SHIPPED.glob("*.toml")), H200], ids=lambda f: f.stem)
def test_a_sweep_that_comes_along_says_what_it_starts(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = load(file)
    assert sweep.name == file.stem and sweep.about
    assert any(one.baseline for one in sweep.experiments)
    assert main(["sweep", str(file), "--dry-run", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["experiments"]
    assert [one["name"] for one in printed] == [one.name for one in sweep.experiments]
    for one in printed:
        assert one["argv"][:3] == ["python3", "-m", "sglang.launch_server"]
        assert not any("$" in word for word in one["argv"])


def test_the_sweeps_of_the_campaign_hold_what_was_tried() -> None:
    def varied(name: str) -> dict[str, set[str]]:
        table: dict[str, set[str]] = {}
        for one in load(SHIPPED / f"{name}.toml").experiments:
            for key, value in one.settings.items():
                table.setdefault(key, set()).add(value)
        return table

    nccl = varied("nccl")
    assert nccl["NCCL_ALGO"] == {"Ring", "Tree"}
    names = {"NCCL_MAX_NCHANNELS", "NCCL_BUFFSIZE", "NCCL_PROTO", "NCCL_P2P_LEVEL"}
    assert all(len(nccl[name]) >= 3 for name in names)
    assert varied("fusion")["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE"] == {"1"}
    assert len(varied("speculation")["--speculative-num-draft-tokens"]) > 4
    assert varied("attention")["--attention-backend"] == {"triton", "flashinfer"}


def test_the_h200_table_comes_in_parts_that_fit_ten_minutes() -> None:
    names = [one.name for one in load(H200).experiments]
    parts = Counter(name.partition(",")[0] for name in names)
    assert parts == {"llama": 4, "dsv3": 4, "deep": 4, "fa2": 3}
    assert load(H200).protocol.tokens == 512


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[values]", "[values", "at line 2"),
        ("[server]", "[servers]", ":4: servers: not known here"),
        ("runs = 3", 'runs = "3"', ":9: bench.runs: '3' is no whole number"),
        ("runs = 3", "runs = true", ":9: bench.runs: True is no whole number"),
        ("runs = 3", "runs = 0", ":9: bench.runs: 0 is too few: 1 or more"),
        ("runs = 3", "tokens = 0", ":9: bench.tokens: 0 is too few: 1 or more"),
        ("runs = 3", "concurrency = 0", ":9: bench.concurrency: 0 is too few: 1 or more"),
        ("runs = 3", 'api = "grpc"', ":9: bench.api: 'grpc' is none of native, openai, chat"),
        ("runs = 3", 'prompts = "nowhere"', ":9: bench.prompts: nowhere: No such file"),
        ("temperature = 1", "temperature = -1", ":10: bench.temperature: -1 is none: 0 or more"),
        ("temperature = 1", "temperature = nan", ":10: bench.temperature: nan is no number"),
        ("[bench]", "ready_s = inf\n[bench]", ":8: server.ready_s: inf is no number"),
        ("[bench]", "port = 70000\n[bench]", ":8: server.port: 70000 is no port"),
        ("[bench]", "[profile]\nsteps = 0\n[bench]", ":9: profile.steps: 0 is too few"),
        ("runs = 3", "rums = 3", ":9: bench.rums: not known here: warmup, runs"),
        ('NCCL_DEBUG = "INFO"', "NCCL_DEBUG = []", ":17: experiment.1.env.NCCL_DEBUG: an empty"),
        ('NCCL_DEBUG = "INFO"', "NCCL_X = [[1]]", ":17: experiment.1.env.NCCL_X: [1] is no"),
        ("$model", "$nodel", ":5: server.command: '$nodel' names no value; there is $model"),
        ("$model", "$", ":5: server.command: '$' names no value"),
        ('name = "plain"', 'name = "x"', "no experiment 'plain'"),
        ('name = "nccl"\nbaseline = "plain"', 'name = "plain"', None),
        ('name = "nccl"', "", ":13: experiment.1: wants a name"),
        ('name = "few"', 'name = "a/b"', ":1: name: wants a name of letters"),
        ('name = "few"', "", "few.toml: wants a name of letters"),
        ("command = ", "commands = ", ":5: server.commands: not known here"),
        ("command = ", "args_ = 1 #", ":5: server.args_: not known here"),
        ("[[experiment]]", "[[experiments]]", ":11: experiments: not known here"),
    ],
)
def test_what_is_wrong_is_named_with_its_line_and_key(
    old: str, new: str, message: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, FILE.replace(old, new))
    expected = 0 if message is None else 2
    assert main(["sweep", str(file), "--dry-run"]) == expected
    said = capsys.readouterr().err
    assert said.count("error: ") == (message is not None)
    assert (message or "") in said
    assert message is None or str(file) in said


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "nowhere: no such file; sweeps that come along: attention, fusion, nccl"),
        (["nccl", "-D", "model"], "wants NAME=VALUE"),
        (["nccl", "-D", "modell=x"], "no value modell: python, model"),
        (["nccl", "--only", "tree*"], "none is called tree*: no speculation, as it is"),
    ],
)
def test_a_sweep_that_is_not_there(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *args, "--dry-run"]) == 2
    assert message in capsys.readouterr().err
