import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure.runs import Breakdown, Protocol, Run, Session
from sglang_overlay.measure.store import open_store, read_store
from sglang_overlay.patchset.errors import EnvironmentFailure, Usage

from .failing import serving


def make(name: str = "a", rates: tuple[float, ...] = (100.0,) * 5, **more: object) -> Session:
    """A session of one-stream runs with these tokens a second; ``accept``: their accept lengths."""
    accept = more.pop("accept", (None,) * len(rates))
    assert isinstance(accept, tuple)
    runs = tuple(
        Run(
            number=number,
            warmup=False,
            requests=1,
            prompt_tokens=30,
            tokens=2048,
            seconds=2048 / rate,
            ttft_ms=50.0,
            verify_cycles=length and round(2047 / length),
            accept_length=length,
        )
        for number, (rate, length) in enumerate(zip(rates, accept, strict=True), 1)
    )
    given = {"started": "2026-01-02T03:04:05+00:00", "url": "http://h", "protocol": Protocol()}
    return Session(name=name, runs=runs, **given, **more)  # type: ignore[arg-type]


def sql(file: Path, *statements: str) -> None:
    with closing(sqlite3.connect(file)) as base:
        for statement in statements:
            base.execute(statement)
        base.commit()


def test_a_session_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    session = make(
        labels={"NCCL_ALGO": "Ring"},
        context={"patches": ["worker-env"], "gpus": None},
        failure="killed",
        breakdown=Breakdown(20, {"draft": 0.5}, {"all-reduce": 25.0}, 122.0, {"verify": "eager"}),
        accept=(2.1, 2.0, 2.2, 2.1, 2.1),
    )
    with open_store(tmp_path / "b.sqlite") as store:
        stored = store.append(session)
        assert stored.key == 1
        assert store.append(make("b")).key == 2
        assert store.load()[0] == stored
    with open_store(tmp_path / "b.sqlite") as store:
        assert store.find("a") == store.find("1") == stored
        assert store.find("b").name == "b"
        with pytest.raises(Usage, match="no session 'c'"):
            store.find("c")


def test_runs_are_kept_one_by_one_and_a_name_means_its_latest_session(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    with open_store(file) as store:
        begun = store.begin(make(rates=()))
        run = Run(1, True, 1, 30, 8, 0.5, histogram=(1, 2))
        store.record(begun.key, run)
        with open_store(file) as other:  # as another process sees it
            assert other.load()[0].runs == (run,)
        store.fail(begun.key, "cut")
        store.explain(begun.key, Breakdown(3))
        found = store.find("a")
        assert (found.failure, found.breakdown) == ("cut", Breakdown(3))
        assert store.append(make()).key == store.find("a").key == 2


@pytest.mark.parametrize(
    ("content", "kind", "message"),
    [
        (b"no database at all, but a text that is longer than a header" * 9, Usage, "not a file"),
        (None, EnvironmentFailure, "unable to open"),
    ],
)
def test_what_is_no_store_is_refused(
    content: bytes | None, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "b.sqlite"
    file.mkdir() if content is None else file.write_bytes(content)
    with pytest.raises(kind, match=message):
        open_store(file)


def test_a_store_of_another_version_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    open_store(file).close()
    sql(file, "PRAGMA user_version = 7")
    for opening in (open_store, read_store):
        with pytest.raises(Usage, match="another version"):
            opening(file)


def test_a_store_from_before_the_application_id_is_read_and_written(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    with open_store(file) as store:
        store.append(make())
    sql(file, "PRAGMA application_id = 0")
    with open_store(file) as store:
        store.append(make("b"))
    with read_store(file) as store:
        assert [one.name for one in store.load()] == ["a", "b"]


FOREIGN = {
    "another's": ("CREATE TABLE users (name)",),
    "another's with a version": ("CREATE TABLE users (name)", "PRAGMA user_version = 1"),
    "another's with these names": (
        "CREATE TABLE session (key, name)",
        "CREATE TABLE run (number)",
        "PRAGMA user_version = 1",
    ),
    "another's, empty": ("PRAGMA application_id = 7",),
}


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize(
    "command",
    [
        ["bench", "list", "--store", "FILE"],
        ["bench", "compare", "a", "b", "--store", "FILE"],
        ["breakeven", "--bench", "a", "--store", "FILE"],
        ["report", "FILE", "--out", "OUT"],
        ["bench", "--url", "http://127.0.0.1:9", "--store", "FILE"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_the_database_of_another_program_is_refused_and_left_as_it_is(
    command: list[str],
    statements: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "other.sqlite"
    sql(file, *statements)
    before = file.read_bytes()
    places = {"FILE": str(file), "OUT": str(tmp_path / "r.html")}
    assert main([places.get(word, word) for word in command]) == 2
    assert f"{file}: not a file of bench results" in capsys.readouterr().err
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_an_empty_file_becomes_a_store_only_when_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    file.touch()
    with pytest.raises(Usage, match="not a file of bench results"):
        read_store(file)
    assert file.stat().st_size == 0
    open_store(file).close()
    with read_store(file) as store:
        assert store.load() == []
        with pytest.raises(EnvironmentFailure, match="readonly"):
            store.append(make())


def test_what_a_killed_writer_left_half_written_is_rolled_back_by_a_reader(tmp_path: Path) -> None:
    file = tmp_path / "b.sqlite"
    with open_store(file) as store:
        store.append(make())
    code = (
        "import os, signal, sqlite3, sys\n"
        "base = sqlite3.connect(sys.argv[1])\n"
        "base.execute('PRAGMA cache_size = 1')\n"
        "base.execute('BEGIN')\n"
        "base.execute('UPDATE session SET name = ?', ('x' * 200_000,))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=False)
    assert (tmp_path / "b.sqlite-journal").stat().st_size
    with read_store(file) as store:
        assert [one.name for one in store.load()] == ["a"]


def test_a_full_disk_keeps_what_was_stored_and_says_so(tmp_path: Path) -> None:
    """The system refuses to let any file of the child grow past a size."""
    file, room = tmp_path / "b.sqlite", 22_000
    code = (
        "import resource, sys\n"
        "from sglang_overlay.cli import main\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    with serving() as (url, _):
        given = ["bench", "--url", url, "--tokens", "2", "--runs", "5000", "--warmup", "0"]
        done = subprocess.run(
            [sys.executable, "-c", code, *given, "--store", str(file)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 4, done.stderr
    assert f"error: {file}: " in done.stderr and "what was stored before is kept" in done.stderr
    assert "Traceback" not in done.stderr
    with open_store(file) as store:
        (session,) = store.load()
    assert len(session.counted) > 5


def test_list_and_compare_name_a_store_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = ["--store", str(tmp_path / "none.sqlite")]
    for command in (["bench", "list"], ["bench", "compare", "a", "b"]):
        assert main([*command, *store]) == 2
        assert "no such file" in capsys.readouterr().err
    assert not (tmp_path / "none.sqlite").exists()
    assert main(["bench", *store]) == 2
    assert "which server?" in capsys.readouterr().err


def test_list_prints_every_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "b.sqlite"
    with open_store(file) as store:
        store.append(make("quick", (200.0, 210.0, 190.0)))
        store.append(make("tree", (), failure="graph capture failed"))
    assert main(["bench", "list", "--store", str(file), "--json"]) == 0
    quick, tree = json.loads(capsys.readouterr().out)["sessions"]
    assert quick["median"]["tok_s"] == pytest.approx(200) and quick["spread"] == pytest.approx(0.1)
    assert tree["failure"] == "graph capture failed" and tree["median"]["tok_s"] is None
    assert main(["bench", "list", "--store", str(file)]) == 0
    assert "graph capture failed" in capsys.readouterr().out
