"""What the workflows run, run here."""

import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ci import nightly_drift, release
from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.source import pinned_wheel

from ..patchset.workshop import snapshot

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / "ci/workflows").glob("*.yml"))
#: A stand-in for GitHub: issues in a file, for the calls of ``gh`` that are made.
GH = """#!{python}
import json, pathlib, sys
store = pathlib.Path({store!r})
issues = json.loads(store.read_text())
verb, args = sys.argv[2], sys.argv[3:]
def value(name): return args[args.index(name) + 1]
if verb == "list":
    assert value("--label") == "drift" and value("--state") == "open"
    print(json.dumps([{{"number": i["number"]}} for i in issues if i["open"]]))
elif verb == "create":
    assert value("--label") == "drift" and value("--body-file") == "-"
    issues.append(dict(number=len(issues) + 7, open=True, title=value("--title"),
                       body=sys.stdin.read()))
else:
    issue = next(i for i in issues if str(i["number"]) == args[0])
    if verb == "edit":
        issue.update(title=value("--title"), body=sys.stdin.read())
    else:
        assert verb == "close"
        issue["open"] = False
store.write_text(json.dumps(issues))
"""


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_each_workflow_runs_one_script_that_is_there(file: Path) -> None:
    scripts = re.findall(r"^ +- run: (ci/jobs/\S+)", file.read_text(), re.MULTILINE)
    assert scripts == [f"ci/jobs/{file.stem}.sh"]
    assert os.access(ROOT / scripts[0], os.X_OK)
    done = subprocess.run(["bash", "-n", ROOT / scripts[0]], check=False)
    assert done.returncode == 0


def test_the_workflows_are_valid() -> None:
    check = Path(sys.executable).with_name("check-jsonschema")
    command = [check, "--builtin-schema", "vendor.github-workflows"]
    assert subprocess.run([*command, *WORKFLOWS], check=False).returncode == 0


def test_nightly_drift_keeps_one_issue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "issues.json"
    store.write_text("[]")
    (tmp_path / "gh").write_text(GH.format(python=sys.executable, store=str(store)))
    (tmp_path / "gh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    pin = load_pins(patches_folder())[-1]
    for version, count, open_ in (
        (pin.version, 0, False),
        ("0.5.21", 1, True),
        ("0.5.22", 1, True),
        (pin.version, 1, False),
    ):
        code = nightly_drift.main(["--version", version, "--issue"])
        text = capsys.readouterr().out
        issues = json.loads(store.read_text())
        assert (code, len(issues)) == (int(open_), count)
        if open_:
            assert issues[0]["open"]
            assert issues[0]["title"] == f"SGLang {version} against the patches for {pin.name}"
            assert issues[0]["body"] == text[:60_000]
    assert not issues[0]["open"]


def test_a_release_locks_every_hash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "dist"
    release.main(["--dry-run", "--out", str(out)])
    check = subprocess.run(["sha256sum", "-c", "--quiet", "SHA256SUMS"], cwd=out, check=False)
    assert check.returncode == 0
    named = {line.split()[1] for line in (out / "SHA256SUMS").read_text().splitlines()}
    assert named == {file.name for file in out.iterdir()} - {"SHA256SUMS"}
    table = json.loads((out / "lock.json").read_text())
    pins = load_pins(patches_folder())
    assert set(table["pins"]) == {pin.name for pin in pins}
    for pin in pins:
        entry = table["pins"][pin.name]
        assert entry["upstream_sha256"] == pin.sha256
        assert f"sglang_overlay-{entry['overlay']}-py3-none-any.whl" in named
        assert entry["patches"] == {
            file.stem: hashlib.sha256(file.read_bytes()).hexdigest()
            for file in pin.folder.glob("*.patch")
        }


@pytest.mark.parametrize("spoil", ["wheel", "inside", "gh", "index"])
def test_nightly_drift_that_finds_nothing_out_does_not_say_that_something_needs_work(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    spoil: str,
) -> None:
    pin = load_pins(patches_folder())[-1]
    args = ["--version", "0.0.9"]
    wheel = tmp_path / "wheels/release-0.0.9/sglang-0.0.9-cp311-cp311-x.whl"
    if spoil in ("wheel", "inside"):
        whole = pinned_wheel(pin)
        monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path))
        kept = tmp_path / "wheels" / pin.sha256 / pin.wheel
        kept.parent.mkdir(parents=True)
        kept.symlink_to(whole)
        wheel.parent.mkdir(parents=True)
        content = whole.read_bytes()
        half = len(content) // 2
        wheel.write_bytes(content[:half] + (b"" if spoil == "wheel" else b"\0" * half))
        if spoil == "inside":  # the list of files is whole, what they hold is not
            rotten = bytearray(content)
            with zipfile.ZipFile(whole) as archive:
                for info in archive.infolist():
                    start = info.header_offset + 30 + len(info.filename)
                    rotten[start : start + info.compress_size] = bytes(info.compress_size)
            wheel.write_bytes(rotten)
    if spoil == "gh":
        (tmp_path / "gh").write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / "gh").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        args = ["--version", pin.version, "--issue"]
    if spoil == "index":
        monkeypatch.setenv("PIP_INDEX_URL", f"file://{tmp_path}/nowhere")
        args = []
    assert nightly_drift.main(args) == 4
    assert capsys.readouterr().err.startswith("error: ")
    assert not wheel.exists()


@pytest.mark.parametrize(
    ("files", "foreign"),
    [
        ({}, ""),
        ({"SHA256SUMS": "1  a.whl\n2  lock.json\n", "a.whl": "a", "lock.json": "b"}, ""),
        ({"SHA256SUMS": "1  a.whl\n", "a.whl": "a", "thesis.tex": "mine"}, "thesis.tex"),
        ({"SHA256SUMS": "1  sub\n", "sub/a.whl": "a"}, "sub"),
        ({"a.whl": "a"}, "a.whl"),
    ],
)
def test_a_release_replaces_nothing_but_a_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], foreign: str
) -> None:
    out = tmp_path / "home"
    out.mkdir()
    for name, text in files.items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    before = snapshot(out)
    built: list[Path] = []
    monkeypatch.setattr(release, "build", lambda _, place: built.append(place) or place.mkdir())
    if foreign:
        with pytest.raises(SystemExit, match=f"holds {foreign}, which is of no release"):
            release.main(["--dry-run", "--out", str(out)])
        assert (snapshot(out), built) == (before, [])
    else:
        release.main(["--dry-run", "--out", str(out)])
        assert {file.name for file in out.iterdir()} == {"SHA256SUMS", "lock.json"}


def test_what_is_no_release_is_not_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins = load_pins(patches_folder())
    said = {
        ("status", "--porcelain"): "",
        ("tag", "--points-at", "HEAD"): f"v{release.__version__}",
    }
    monkeypatch.setattr(release, "git", lambda *args: said[args])
    monkeypatch.setattr(release, "ROOT", tmp_path)
    names = ", ".join(pin.name for pin in pins)
    entry = f"## [{release.__version__}] - 2026-12-01\n\nPins: {names}.\n\n### Added\n"
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{entry}\n## [0.0.1] - 2026-01-01\n")
    release.check_release(pins)
    (tmp_path / "CHANGELOG.md").write_text(entry.replace(names, "v0.0.0"))
    with pytest.raises(SystemExit, match="CHANGELOG"):
        release.check_release(pins)
    said["tag", "--points-at", "HEAD"] = ""
    with pytest.raises(SystemExit, match="not tagged"):
        release.check_release(pins)
    said["status", "--porcelain"] = " M README.md"
    with pytest.raises(SystemExit, match="not everything is committed"):
        release.check_release(pins)
