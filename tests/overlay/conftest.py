import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ci.build_wheel import main as build_wheel
from ci.sglang_env import sglang_python
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.source import pinned_wheel

from ..pins import NEWEST

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Environment:
    """A virtual environment with the real sglang, its dependencies and the overlay wheel."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin/python"

    @property
    def packages(self) -> Path:
        return self.root / "lib" / VERSION / "site-packages"

    @property
    def files(self) -> Path:
        return self.packages / "sglang_overlay/_files"

    def manifest(self) -> dict[str, Any]:
        table = json.loads((self.files / "manifest.json").read_text())
        assert isinstance(table, dict)
        return table

    def run(self, *args: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.python, *args],
            cwd=self.root,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    def code(self, text: str, *flags: str, **env: str) -> str:
        """What ``text`` prints; it must succeed."""
        done = self.run(*flags, "-c", text, **env)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    def refused(self, *flags: str, text: str = "import sglang", **env: str) -> str:
        """The one line with which ``text`` fails, ImportError it must be."""
        done = self.run(*flags, "-c", text, **env)
        assert done.returncode == 1, done.stdout + done.stderr
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ImportError: sglang-overlay: "), done.stderr[-3000:]
        return last

    def pip(self, *args: str | Path) -> None:
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "-q", *args]
        subprocess.run(pip, check=True, capture_output=True)


@contextmanager
def changed(file: Path, content: bytes | None) -> Iterator[None]:
    """``file`` with other content, or gone, for a while."""
    before = file.read_bytes() if file.exists() else None
    try:
        file.unlink(missing_ok=True) if content is None else file.write_bytes(content)
        yield
    finally:
        file.unlink(missing_ok=True) if before is None else file.write_bytes(before)


def make_environment(root: Path, *wheels: Path, pin: Pin = NEWEST) -> Environment:
    """The pin's sglang and ``wheels`` in an environment of their own, the rest from the cache."""
    venv.create(root, with_pip=True)
    environment = Environment(root)
    environment.pip("install", "--no-deps", "--no-index", pinned_wheel(pin), *wheels)
    dependencies = sglang_python(pin.version).parents[1] / "lib" / VERSION / "site-packages"
    (environment.packages / "zz_dependencies.pth").write_text(f"{dependencies}\n")
    return environment


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Pin], Path]:
    """Builds a pin's overlay wheel as a release does, once."""

    @cache
    def build(pin: Pin) -> Path:
        out = tmp_path_factory.mktemp("dist")
        build_wheel(["--out", str(out), "--pin", pin.name])
        return next(out.glob("*.whl"))

    return build


@pytest.fixture(scope="session")
def wheel(pin: Pin, builder: Callable[[Pin], Path]) -> Path:
    """The overlay wheel."""
    return builder(pin)


@pytest.fixture(scope="session")
def maker(
    builder: Callable[[Pin], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Pin], Environment]:
    """Makes the environment with a pin's overlay, once."""

    @cache
    def make(pin: Pin) -> Environment:
        root = tmp_path_factory.mktemp("overlay") / "env"
        environment = make_environment(root, builder(pin), pin=pin)
        environment.pip("install", "click", "rich", "unidiff", "GitPython", "psutil")
        return environment

    return make


@pytest.fixture(scope="session")
def environment(pin: Pin, maker: Callable[[Pin], Environment]) -> Environment:
    """One for all tests that leave it as it was."""
    return maker(pin)
