"""Finds a Chromium, or installs Debian's where that can be done, and prints its path.

usage: python ci/browser.py
"""

import os
import shutil
import subprocess

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_INSTALL = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", "chromium")


def chromium() -> str:
    """The browser on the path. Raises ``SystemExit`` with a message when there is none."""
    found = _found()
    if not found and os.geteuid() == 0 and shutil.which("apt-get"):
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        for command in (("apt-get", "update", "--quiet"), _INSTALL):
            subprocess.run(command, env=environment, check=False, stdout=subprocess.DEVNULL)
        found = _found()
    if not found:
        raise SystemExit("error: no Chromium\n  next: apt-get install chromium, as root")
    return found


def _found() -> str | None:
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


if __name__ == "__main__":
    print(chromium())
