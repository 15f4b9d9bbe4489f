"""The patches on the real pinned source."""

import hashlib
import itertools
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from sglang_overlay.cli import main
from sglang_overlay.patchset.blobs import blob_id
from sglang_overlay.patchset.manifest import Manifest
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.series import Series
from sglang_overlay.patchset.source import pinned_wheel

from ..conftest import IMPORT, git


def tree_id(place: Path) -> str:
    """The git tree id of everything in the work tree."""
    git(place, "add", "-A", "-f")
    return git(place, "write-tree").decode().strip()


def run(place: Path, *args: str) -> int:
    return main([*args, "--sglang-dir", str(place)])


def select(names: tuple[str, ...]) -> list[str]:
    return [word for name in names for word in ("--only", name)]


def test_lint_finds_nothing() -> None:
    assert main(["lint"]) == 0


def test_the_fetched_checkout_is_the_pins_tree_and_commit(fetched: Path, pin: Pin) -> None:
    assert git(fetched, "rev-parse", "HEAD^{tree}").decode().strip() == pin.tree
    assert git(fetched, "rev-parse", f"{pin.name}^{{commit}}") == git(fetched, "rev-parse", "HEAD")


def test_the_series_goes_in_twice_and_out_again(checkout: Path, pin: Pin, series: Series) -> None:
    assert run(checkout, "status") == 0
    assert run(checkout, "apply") == 0
    assert run(checkout, "verify") == 0
    applied = tree_id(checkout)
    assert applied != pin.tree
    assert run(checkout, "apply") == 0
    assert tree_id(checkout) == applied
    for path in series.weaves:
        if path.endswith(".py") and (checkout / path).exists():
            compile((checkout / path).read_bytes(), path, "exec")
    assert run(checkout, "reverse") == 0
    assert tree_id(checkout) == pin.tree


def test_git_am_of_the_series_gives_the_commits_and_tree_of_apply(
    checkout: Path, series: Series
) -> None:
    mails = [(series.pin.folder / f"{name}.patch").read_bytes() for name in series.names]
    git(checkout, *IMPORT, data=b"".join(mails))
    log = ["log", "--format=%T %an %ae %ad %B", f"{series.pin.name}..HEAD"]
    theirs = git(checkout, *log)
    git(checkout, "reset", "-q", "--hard", series.pin.name)
    assert run(checkout, "apply", "--commit") == 0
    assert git(checkout, *log) == theirs
    assert run(checkout, "reverse", "--commit") == 0
    assert git(checkout, "rev-parse", "HEAD^{tree}").decode().strip() == series.pin.tree


def test_each_patch_and_each_pair_is_what_git_am_makes_of_it(
    checkout: Path, series: Series, versions: Manifest
) -> None:
    for names in itertools.chain(
        itertools.combinations(series.names, 1), itertools.combinations(series.names, 2)
    ):
        chosen = series.needed_by(frozenset(names))
        mails = [
            (series.pin.folder / f"{name}.patch").read_bytes()
            for name in series.names
            if name in chosen
        ]
        git(checkout, *IMPORT, data=b"".join(mails))
        theirs = git(checkout, "rev-parse", "HEAD^{tree}").decode().strip()
        git(checkout, "reset", "-q", "--hard", series.pin.name)
        assert run(checkout, "apply", *select(names)) == 0
        assert tree_id(checkout) == theirs, names
        for path, weave in series.weaves.items():
            place = checkout / path
            content = place.read_bytes() if place.exists() else None
            assert blob_id(content) == versions.blob(path, weave.restrict(chosen))
        assert run(checkout, "reverse") == 0
        git(checkout, "reset", "-q")
        assert git(checkout, "status", "--porcelain") == b"", names


def digests(packages: Path) -> dict[str, str]:
    return {
        str(path.relative_to(packages)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in packages.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


def test_a_pip_installed_sglang_is_patched_in_place_and_restored_to_the_byte(
    tmp_path: Path, pin: Pin, series: Series
) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "--no-index", pinned_wheel(pin)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "env/lib" / version / "site-packages"
    before = digests(packages)
    for given in (packages, packages / "sglang"):
        assert run(given, "apply") == 0
        assert run(given, "verify") == 0
        changed = {path for path, digest in digests(packages).items() if before.get(path) != digest}
        assert changed == {
            path.removeprefix("python/") for path in series.weaves if path.startswith("python/")
        }
        assert run(given, "reverse") == 0
        assert digests(packages) == before
    subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", "sglang"], check=True)
    assert not (packages / "sglang").exists()
    shutil.rmtree(tmp_path / "env")
