"""How commands are called, and how they answer."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import load_pins

from .workshop import Workshop, snapshot

ROOT = Path(__file__).parents[2]


def test_the_folder_may_stand_before_or_after_the_command_or_alone(shop: Workshop) -> None:
    place = shop.tree("folder")
    before = snapshot(place)
    assert shop.run("--sglang-dir", place) == 0
    after = snapshot(place)
    assert shop.run("--sglang-dir", place, "reverse") == 0
    assert snapshot(place) == before
    assert shop.run("apply", "--sglang-dir", place) == 0
    assert snapshot(place) == after
    assert shop.run("--sglang-dir", place, "--only", "head", "--json") == 0


def test_a_folder_named_like_a_command_is_a_folder(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.tree("folder").rename(shop.root / "status")
    monkeypatch.chdir(shop.root)
    before = snapshot(shop.root / "status")
    assert shop.run("--sglang-dir", "status") == 0
    assert snapshot(shop.root / "status") != before


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["apply"], "Missing option '--sglang-dir'"),
        (["--sglang-dir"], "requires an argument"),
        (["frobnicate"], "No such command 'frobnicate'"),
        (["status", "--only", "x", "--sglang-dir", "."], "No such option"),
    ],
)
def test_wrong_calls_are_usage_errors(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("args", [["--help"], ["--version"], ["apply", "--help"]])
def test_help_is_no_failure(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    assert "overlay" in capsys.readouterr().out


def test_no_arguments_at_all_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage:" in "".join(capsys.readouterr())


def test_every_command_answers_in_json(shop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    place = shop.tree("folder")
    for command in ("check", "apply", "status", "verify", "reverse"):
        capsys.readouterr()
        assert shop.on(place, command, "--json") == 0
        result = json.loads(capsys.readouterr().out)
        assert result["command"] == command
        assert result["tree"] == str(place)
        assert result["pin"] == "v1.0.0"
    assert shop.on(place / "nowhere", "status", "--json") == 2
    result = json.loads(capsys.readouterr().out)
    assert result["error"] == "Usage"
    assert result["exit_code"] == 2
    assert shop.run("lint", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"pins": ["v1.0.0"], "findings": []}


def test_the_table_names_patch_files_state_and_what_it_does(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.tree("site-packages")
    shop.on(place, "apply", "--only", "head")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == [
        ["patch", "files", "state", "what", "it", "does"],
        ["head", "2", "applied", "make", "head"],
        ["tail", "3", "not", "applied", "make", "tail"],
        ["more", "2", "not", "applied", "make", "more"],
    ]


def test_fetch_lays_the_pinned_source_out_and_knows_its_own_work(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shop.root / "fetched"
    partial = shop.root / ".fetched.partial"
    (partial / "left/by/a/kill").mkdir(parents=True)
    assert shop.run("fetch", place) == 0
    assert not partial.exists()
    before = snapshot(place)
    assert shop.run("fetch", place) == 0
    assert "was already in" in capsys.readouterr().out
    assert shop.on(place, "apply", "--commit") == 0
    assert shop.run("fetch", place) == 0
    assert shop.on(place, "reverse") == 0
    assert snapshot(place) == before
    other = shop.root / "other"
    other.mkdir()
    assert shop.run("fetch", other, "--json") == 0
    (other / ".git/refs/tags/v1.0.0").unlink()
    assert shop.run("fetch", other) == 2
    assert shop.run("fetch", shop.root) == 2


def test_without_git_there_is_one_line_and_the_right_exit_code(
    shop: Workshop, tmp_path: Path
) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sglang_overlay",
            "fetch",
            tmp_path / "x",
            "--patches",
            shop.root / "patches",
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": str(tmp_path)},
    )
    assert done.returncode == 4
    assert done.stderr.startswith("error: git cannot be used: ")
    assert len(done.stderr.splitlines()) == 2


def test_the_newest_pin_is_the_highest_version(tmp_path: Path) -> None:
    for version in ("0.5.9", "0.5.23", "0.5.10"):
        Workshop(tmp_path / version, {"python/sglang/v.py": version.encode()}, version)
        (tmp_path / version / f"patches/v{version}").rename(tmp_path / f"v{version}")
    assert [pin.version for pin in load_pins(tmp_path)] == ["0.5.9", "0.5.10", "0.5.23"]


def test_a_wheel_with_the_wrong_hash_is_refused_and_removed(
    shop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.wheel.write_bytes(shop.wheel.read_bytes() + b"\0")
    assert shop.run("fetch", shop.root / "fetched") == 4
    assert "sha256 is" in capsys.readouterr().err
    assert not shop.wheel.exists()
    assert not (shop.root / "fetched").exists()


def test_a_wheel_that_cannot_be_had_is_named(
    shop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shop.wheel.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop.root))
    assert shop.run("fetch", shop.root / "fetched") == 4
    assert f"pip could not download {shop.wheel.name}" in capfd.readouterr().err
    assert not any(shop.wheel.parent.iterdir())


def test_apply_without_its_dependencies_prints_the_command_that_installs_them(
    tmp_path: Path,
) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = subprocess.run(
        [tmp_path / "bare/bin/python", ROOT / "apply.py", "--help"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 4
    assert "click is not installed" in done.stderr
    assert f"-m pip install {ROOT}" in done.stderr


def test_the_three_ways_to_call_it_are_one(shop: Workshop) -> None:
    place, patches = shop.tree("folder"), str(shop.folder.parent)
    ways = [
        [sys.executable, str(ROOT / "apply.py")],
        [sys.executable, "-m", "sglang_overlay"],
        [str(Path(sys.executable).parent / "sglang-overlay")],
    ]
    printed = {
        subprocess.run(
            [*way, "status", "--json", "--sglang-dir", place, "--patches", patches],
            capture_output=True,
            check=True,
        ).stdout
        for way in ways
    }
    assert len(printed) == 1
