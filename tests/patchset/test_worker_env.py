"""The table of what workers have, from logs and from a server that answers wrongly."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sglang_overlay import worker_env
from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import load_pins, patches_folder


def report(dp: int, **values: str) -> dict[str, object]:
    env = {n: {"value": v, "origin": "user", "late": None} for n, v in values.items()}
    return {"process": "scheduler", "ranks": {"tp": 0, "dp": dp}, "env": env}


def log(folder: Path, *reports: dict[str, object]) -> str:
    file = folder / "server.log"
    lines = [f"[2026-11-29 DP{n}] worker_env={json.dumps(r)}" for n, r in enumerate(reports)]
    file.write_text("\n".join(["Starting", *lines, "worker_env=['NCCL_ALGO=Ring'], port=1"]))
    return str(file)


def test_ranks_that_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = log(tmp_path, report(0, NCCL_ALGO="Ring"), report(1, NCCL_ALGO="Ring"))
    assert main(["env", "--log", file]) == 0
    lines = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        ["variable", "scheduler tp0 dp0", "scheduler tp0 dp1"],
        ["NCCL_ALGO", "Ring (user)", "Ring (user)"],
        ["2 workers; differing (!): none"],
    ]


def test_a_rank_that_differs_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ring = [report(n, NCCL_ALGO="Ring") for n in range(3)]
    file = log(tmp_path, *ring, report(3, NCCL_ALGO="Tree"), report(4))
    assert main(["env", "--log", file, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["variables"][0]["different"] == [3, 4]
    assert main(["env", "--log", file]) == 1
    printed = capsys.readouterr().out
    assert "!Tree (user)" in printed
    assert "differing (!): NCCL_ALGO" in printed


def test_a_value_that_came_too_late_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    late = report(0, NCCL_ALGO="Ring")
    late["env"]["NCCL_ALGO"]["late"] = "the NCCL communicator was already made"  # type: ignore
    assert main(["env", "--log", log(tmp_path, late)]) == 1
    assert "LATE: the NCCL communicator was already made" in capsys.readouterr().out


def test_a_value_that_the_worker_changed_is_marked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = report(0, NCCL_ALGO="Ring", NCCL_DEBUG="WARN")
    changed["env"]["NCCL_ALGO"]["expected"] = ""  # type: ignore
    file = log(tmp_path, changed)
    assert main(["env", "--log", file]) == 1
    printed = capsys.readouterr().out
    assert "Ring (user) NOT" in printed
    assert "WARN (user) NOT" not in printed
    assert "not what --worker-env gave (NOT): NCCL_ALGO\n" in printed
    assert main(["env", "--log", file, "--json"]) == 1
    variables = json.loads(capsys.readouterr().out)["variables"]
    assert [v["expected"] for v in variables] == [[""], [None]]


def test_visible_devices_differ_by_design(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = [report(n, CUDA_VISIBLE_DEVICES=str(n)) for n in range(4)]
    assert main(["env", "--log", log(tmp_path, *reports)]) == 0
    assert "3 (user)" in capsys.readouterr().out


def test_the_last_report_of_each_worker_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [report(0, NCCL_ALGO="Tree"), report(1, NCCL_ALGO="Tree")]
    after = [report(0, NCCL_ALGO="Ring"), report(1, NCCL_ALGO="Ring")]
    assert main(["env", "--log", log(tmp_path, *before, *after), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["workers"] == ["scheduler tp0 dp0", "scheduler tp0 dp1"]
    assert result["variables"][0]["values"] == ["Ring", "Ring"]


def tokenizer(launch: str | None, pid: int, value: str) -> dict[str, object]:
    of_launch = {"host": "h", "pid": pid} | ({} if launch is None else {"launch": launch})
    return report(0, NCCL_ALGO=value) | {"process": "tokenizer_worker"} | of_launch


NAME = "tokenizer_worker tp0 dp0"


@pytest.mark.parametrize(
    ("reports", "workers", "values"),
    [
        ([("a", 1, "Ring"), ("a", 2, "Tree")], [f"{NAME} pid1", f"{NAME} pid2"], ["Ring", "Tree"]),
        ([("a", 1, "Ring"), ("a", 2, "Ring"), ("a", 1, "Tree")], None, ["Ring", "Tree"]),
        # Another start: what came before is over, also where it had the same pid.
        ([("a", 1, "Ring"), ("a", 2, "Ring"), ("b", 2, "Tree")], [NAME], ["Tree"]),
        # From a patch that did not name the launch.
        ([(None, 1, "Ring"), (None, 2, "Tree")], [NAME], ["Tree"]),
    ],
)
def test_workers_of_one_name_are_kept_apart_within_a_launch(
    reports: list[tuple[str | None, int, str]],
    workers: list[str] | None,
    values: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["env", "--log", log(tmp_path, *(tokenizer(*r) for r in reports)), "--json"])
    result = json.loads(capsys.readouterr().out)
    assert result["workers"] == (workers or [f"{NAME} pid2", f"{NAME} pid1"])
    assert result["variables"][0]["values"] == values


LINE = f"worker_env={json.dumps(report(0, NCCL_ALGO='Ring'))}"


@pytest.mark.parametrize(
    ("damaged", "count"),
    [
        (LINE[:50], 1),
        (LINE[:50] + LINE.replace("Ring", "Tree"), 1),
        (LINE[:-1] + "\n" + LINE[:-3], 2),
        ('worker_env={"process": "scheduler", "ranks": [], "env": {}}', 1),
        ('worker_env={"process": "scheduler", "ranks": {}, "env": {"A": "1"}}', 1),
        ('worker_env={"process": "scheduler", "ranks": {}, "env": {"A": {}}}', 1),
    ],
)
def test_damaged_reports_are_left_out_with_a_note(
    damaged: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.log"
    file.write_text(f"{damaged}\n\x1b[36m(SchedulerActor pid=1)\x1b[0m {LINE}\x1b[0m\n")
    assert main(["env", "--log", str(file)]) == 0
    printed = capsys.readouterr()
    assert "Ring (user)" in printed.out
    assert "Tree" not in printed.out  # it came before
    assert f"{count} damaged reports left out" in printed.err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "give either --url or --log"),
        (["--log", "/nowhere"], 2, "No such file"),
        (["--log", "/dev/null"], 2, "no line with worker_env="),
        (["--url", "http://127.0.0.1:9"], 4, "see that the server is up"),
        (["--url", "nonsense"], 4, "nonsense"),
    ],
)
def test_nothing_to_read(
    args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", *args]) == code
    assert message in capsys.readouterr().err


def test_the_patch_is_offered_for_the_pins_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, newest = load_pins(shutil.copytree(patches_folder(), tmp_path / "patches"))
    monkeypatch.setattr(worker_env, "patches_folder", lambda: tmp_path / "patches")
    for having in (True, False):
        assert main(["env", "--log", "/dev/null"]) == 2
        offered = re.search(r"apply it \(there is one for SGLang (.*)\)", capsys.readouterr().err)
        assert offered and (newest.version in offered[1].split(", ")) == having
        (newest.folder / "worker-env-report.patch").unlink(missing_ok=True)
        series = newest.folder / "series"
        series.write_text(series.read_text().replace("worker-env-report\n", ""))


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answers with the status and body that its ``answer`` holds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = self.server.answer  # type: ignore[attr-defined]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b"", "does not run the patch worker-env-report"),
        (500, b"", "does not run the patch worker-env-report"),
        (200, b"<html>", "does not run the patch worker-env-report"),
        (200, b'{"workers": []}', "does not run the patch worker-env-report"),
        (200, b'{"workers": ["a"]}', "does not run the patch worker-env-report"),
        (200, b'{"workers": [{"process": "x"}]}', "does not run the patch worker-env-report"),
        (401, b"", "wants its admin key"),
    ],
)
def test_a_server_that_cannot_say(
    server: HTTPServer,
    status: int,
    body: bytes,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.answer = (status, body)  # type: ignore[attr-defined]
    assert main(["env", "--url", f"http://127.0.0.1:{server.server_port}"]) == 2
    assert message in capsys.readouterr().err
