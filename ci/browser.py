"""Finds a Chromium, or installs Debian's where that can be done, and prints its path.

usage: python -m ci.browser
"""

from .debian import command


def chromium() -> str:
    """The browser on the path. Raises ``SystemExit`` with a message when there is none."""
    return command(
        "chromium", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"
    )


if __name__ == "__main__":
    print(chromium())
