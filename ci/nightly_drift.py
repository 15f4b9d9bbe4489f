"""Holds the newest pin's patches against the newest SGLang, and keeps one issue about it.

usage: python -m ci.nightly_drift [--version X] [--issue]

Prints what ``sglang-overlay drift --markdown`` says. The exit code is 0 when nothing needs work, 1
when something does, and above 1 when that could not be found out or told. With --issue the
text goes to GitHub through ``gh``: into the open issue with the label "drift", or a new one; when
nothing needs work any more, that issue is closed.
"""

import argparse
import json
import re
import subprocess
import sys

from sglang_overlay import show
from sglang_overlay.drift import judge, summary
from sglang_overlay.patchset.errors import EnvironmentFailure, PatchsetError, Usage
from sglang_overlay.patchset.pin import load_pins, patches_folder
from sglang_overlay.patchset.release import released
from sglang_overlay.patchset.series import load_series

LABEL = "drift"


def newest() -> str:
    """The newest SGLang release that the package index has. Raises ``EnvironmentFailure``."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.match(r"sglang \(([^)]+)\)", done.stdout)
    if found is None:
        raise EnvironmentFailure(f"pip could not say which SGLang is the newest\n{done.stderr}")
    return found[1]


def gh(*args: str, text: str = "") -> str:
    """Run GitHub's ``gh`` with ``text`` as its input. Raises ``EnvironmentFailure``."""
    try:
        done = subprocess.run(
            ["gh", *args], input=text, stdout=subprocess.PIPE, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise EnvironmentFailure(f"gh {' '.join(args[:2])}: {error}") from error
    return done.stdout


def keep_issue(title: str, text: str, needs_work: bool) -> None:
    """Open, update or close the one issue about drift."""
    listed = gh("issue", "list", "--label", LABEL, "--state", "open", "--json", "number")
    numbers = [str(issue["number"]) for issue in json.loads(listed)]
    if needs_work and numbers:
        gh("issue", "edit", numbers[0], "--title", title, "--body-file", "-", text=text)
    elif needs_work:
        create = ["issue", "create", "--label", LABEL, "--title", title, "--body-file", "-"]
        gh(*create, text=text)
    for number in [] if needs_work else numbers:
        gh("issue", "close", number, "--comment", f"{title}: nothing needs work any more.")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Drift against the newest SGLang.")
    parser.add_argument("--version", help="another release than the newest")
    parser.add_argument("--issue", action="store_true", help="open or update the issue on GitHub")
    given = parser.parse_args(argv)
    try:
        return int(report(given.version, given.issue))
    except PatchsetError as error:
        show.error(error, False)
        return max(error.exit_code, Usage.exit_code)


def report(version: str | None, issue: bool) -> bool:
    """Print what drift says of ``version``, or of the newest; whether something needs work."""
    series = load_series(load_pins(patches_folder())[-1])
    version = version or newest()
    verdicts = judge(series, released(version, series.pin))
    text = summary(series, version, verdicts)
    needs_work = any(verdict.needs_action for verdict in verdicts)
    print(text, end="")
    if issue:
        title = f"SGLang {version} against the patches for {series.pin.name}"
        keep_issue(title, text[:60_000], needs_work)  # GitHub takes 65,536 characters
    return needs_work


if __name__ == "__main__":
    sys.exit(main())
