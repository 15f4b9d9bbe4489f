"""What the record of a session says of the server and its machine."""

import json
import mmap
from pathlib import Path

from sglang_overlay.cli import main
from sglang_overlay.measure import bench, context
from sglang_overlay.measure.runs import Protocol
from sglang_overlay.measure.stream import connect

from .failing import serving


def test_the_record_has_every_workers_environment_and_a_digest_that_goes_by_it() -> None:
    digests = []
    for value in ("Ring", "Tree"):
        entry = {"value": value, "origin": "user", "late": None}
        report = {"process": "scheduler", "ranks": {"tp": 0}, "env": {"NCCL_ALGO": entry}}
        with serving() as (url, server):
            server.pages["/worker_env"] = {"workers": [report]}
            known = bench.run(url, Protocol(warmup=0, runs=1, tokens=2)).context
        assert known["workers"] == [{"worker": "scheduler tp0", "variables": {"NCCL_ALGO": value}}]
        digests.append(known["environment"])
    assert digests[0] != digests[1]


def test_patches_are_read_from_the_process_that_listens(tmp_path: Path) -> None:
    manifest = tmp_path / "_files/manifest.json"
    manifest.parent.mkdir()
    manifest.write_text(json.dumps({"patches": {"worker-env": "", "other": ""}}))
    with serving() as (url, _), connect(url) as client:  # this process is the server, too
        assert context.look(client)["patches"] is None
        with manifest.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
            assert context.look(client)["patches"] == ["worker-env", "other"]


def test_patches_are_read_from_the_tree_that_the_server_runs_from(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    assert main(["fetch", str(tree)]) == 0
    with serving() as (url, _), connect(url) as client:
        assert context.look(client, tree=tree)["patches"] == []
        only = ["--only", "cuda-device-max-connections"]
        assert main(["apply", "--sglang-dir", str(tree), *only]) == 0
        assert context.look(client, tree=tree)["patches"] == ["cuda-device-max-connections"]
