"""Drift of the real patches: against another release, and against a pin made to differ."""

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from ci.drift_table import PAGE, VERSIONS, column
from sglang_overlay.cli import main
from sglang_overlay.drift import judge
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.release import open_release, released
from sglang_overlay.patchset.series import Series
from sglang_overlay.patchset.source import pinned_wheel, released_wheel

from ..conftest import git
from ..pins import PINS


@pytest.fixture(scope="session")
def version(pin: Pin) -> str:
    """The release nearest to the pin that the table has."""
    return next(version for version in VERSIONS if version != pin.version)


def test_the_table_in_the_docs_is_what_drift_says(pin: Pin, version: str) -> None:
    section = PAGE.read_text().split(f"## Patches for {pin.name}\n")[1].split("\n## ")[0]
    titles, _, *rows = [
        line.strip("| ").split(" | ") for line in section.split("\n") if "|" in line
    ]
    place = titles.index(version)
    assert {row[0].strip("`"): row[place] for row in rows} == column(pin, version)


def test_a_release_that_is_a_pin_is_its_pinned_wheel(
    pin: Pin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, other = [one for one in PINS if one != pin]
    whole = pinned_wheel(pin)
    assert released_wheel(other.version, pin) == pinned_wheel(other)
    monkeypatch.setenv("SGLANG_OVERLAY_CACHE", str(tmp_path))
    for one in (pin, other):  # the other's place in the cache holds what is not its wheel
        place = tmp_path / "wheels" / one.sha256 / one.wheel
        place.parent.mkdir(parents=True)
        place.symlink_to(whole)
    assert main(["drift", "--pin", pin.name, "--version", other.version]) == 4
    assert f"the pin says {other.sha256}; the file was removed" in capsys.readouterr().err


def test_git_applies_what_fits_and_refuses_what_does_not(
    pin: Pin, series: Series, version: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(released_wheel(version, pin)) as wheel:
        wheel.extractall(tmp_path / "python")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A", "-f")
    git(tmp_path, "commit", "-q", "-m", version)
    verdicts = {verdict.name: verdict for verdict in judge(series, released(version, pin))}
    assert {verdict.word for verdict in verdicts.values()} & {"clean", "offset"}
    for patch in series.patches:
        chain = [p for p in series.patches if p.name in {*patch.requires, patch.name}]
        mails = b"".join((pin.folder / f"{p.name}.patch").read_bytes() for p in chain)
        done = subprocess.run(["git", "apply"], cwd=tmp_path, input=mails, capture_output=True)
        fits = not any(verdicts[p.name].needs_action for p in chain)
        assert (done.returncode == 0) == fits, (patch.name, done.stderr.decode())
        git(tmp_path, "checkout", "-q", "--", ".")
        git(tmp_path, "clean", "-q", "-f", "-d")


def test_drift_against_the_pin_is_clean_and_against_the_patched_pin_all_upstreamed(
    checkout: Path, series: Series
) -> None:
    verdicts = judge(series, open_release(checkout))
    assert {verdict.word for verdict in verdicts} == {"clean"}
    assert main(["apply", "--sglang-dir", str(checkout)]) == 0
    words = {verdict.name: verdict.word for verdict in judge(series, open_release(checkout))}
    for patch in series.patches:
        # Where one patch stands on another, either may have changed the other's lines: drift then
        # says that there is work to do, which is the safe side.
        below = any(patch.name in other.requires for other in series.patches)
        above = any(words[name] != "upstreamed" for name in patch.requires)
        assert words[patch.name] == "upstreamed" or below or above, words


def test_a_patch_made_obsolete_on_purpose_is_recognised(
    checkout: Path, series: Series, capsys: pytest.CaptureFixture[str]
) -> None:
    patch = series.by_name["cuda-device-max-connections"]
    path = patch.diffs[0].path
    new = checkout / "python/sglang/srt/entrypoints/environment_setup.py"
    text = (checkout / path).read_text()
    found = re.search(r"^def _set_envs_and_config\(.*?(?=^\S)", text, re.MULTILINE | re.DOTALL)
    assert found
    new.write_text(found[0])
    (checkout / path).write_text(text.replace(found[0], ""))
    assert main(["drift", "--pin", series.pin.name, "--sglang-dir", str(checkout)]) == 1
    output = capsys.readouterr().out
    assert f"{patch.name}: {path}:" in output
    assert "obsolete; likely now python/sglang/srt/entrypoints/environment_setup.py:1" in output
    words = {verdict.name: verdict.word for verdict in judge(series, open_release(checkout))}
    assert words[patch.name] == "obsolete"

    (checkout / path).write_text(text)  # and once upstream has made the change itself
    new.unlink()
    assert main(["apply", "--sglang-dir", str(checkout), "--only", patch.name]) == 0
    words = {verdict.name: verdict.word for verdict in judge(series, open_release(checkout))}
    assert words[patch.name] == "upstreamed"
