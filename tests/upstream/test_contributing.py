"""A stranger who does what CONTRIBUTING.md says gets what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

from sglang_overlay.patchset.pin import load_pins

from ..conftest import git

ROOT = Path(__file__).parents[2]
CHANGED = ("manifest.json", "worker-env-lint.patch")


def fresh_clone(folder: Path) -> Path:
    """A clone of this repository as its work tree is now."""
    origin, clone = folder / "origin", folder / "clone"
    listed = git(ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for path in listed.decode().strip("\0").split("\0"):
        if (ROOT / path).is_file():
            (origin / path).parent.mkdir(parents=True, exist_ok=True)
            (origin / path).write_bytes((ROOT / path).read_bytes())
            (origin / path).chmod((ROOT / path).stat().st_mode)
    git(origin, "init", "-q")
    git(origin, "add", "-A")
    git(origin, "commit", "-q", "-m", "as it is")
    git(folder, "clone", "-q", str(origin), str(clone))
    return clone


def follow(clone: Path, page: str, heading: str) -> str:
    """What the first block of commands below ``heading`` prints in ``clone``; it must succeed."""
    text = (clone / page).read_text()
    block = re.search(rf"^## {heading}$.*?^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert block
    who = {f"GIT_{r}_{k}": "reader@x" for r in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if "venv" not in part
    )
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block[1]],
        cwd=clone,
        env={**os.environ, **who, "PATH": path, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_loop_works_word_for_word_on_a_fresh_clone(tmp_path: Path) -> None:
    clone = fresh_clone(tmp_path)
    printed = follow(clone, "CONTRIBUTING.md", "The loop")
    for state in ("new", "changed", "dropped"):
        assert re.search(rf"^hello +{state}$", printed, re.MULTILINE), printed
    assert len(re.findall(r"^\S+ +kept$", printed, re.MULTILINE)) >= 6
    # Everything was kept, changed and dropped again, so the set is what it was.
    assert git(clone, "status", "--porcelain") == b""


def test_one_change_goes_into_every_pin_word_for_word_on_a_fresh_clone(tmp_path: Path) -> None:
    clone = fresh_clone(tmp_path)
    printed = follow(clone, "docs/adding-a-pin.md", "A change to a patch that two pins have")
    assert re.findall(r"^(\S+) +changed$", printed, re.MULTILINE) == ["worker-env-lint"] * 2
    pins = load_pins(clone / "patches")
    changed = [f"patches/{pin.name}/{file}" for pin in pins for file in CHANGED]
    listed = git(clone, "status", "--porcelain", "--untracked-files=no").decode().splitlines()
    assert listed == [f" M {path}" for path in changed]
    assert [(pin.folder / CHANGED[1]).read_text().count("\n+# An example.\n") for pin in pins] == [
        1,
        1,
    ]
