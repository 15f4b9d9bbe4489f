"""docker/Dockerfile, built by a real engine over small images laid out as SGLang's own are.

SGLang's image holds the system's Python, under PEP 668, and SGLang as an editable install of
a checkout; a wheel, without PEP 668, is the other layout. The image itself is never fetched.
"""

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.debian import command, system
from ci.sglang_env import sglang_python
from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.source import pinned_wheel

from ..pins import NEWEST, PINS, each_pin
from .conftest import VERSION

ROOT = Path(__file__).parents[2]
PACKAGES = f"/usr/local/lib/{VERSION}/dist-packages"
# SGLang's dependencies are mounted rather than copied, and pip takes wheels from a folder.
BASE = f"""
FROM localhost/debian
WORKDIR /sgl-workspace
COPY sglang /sgl-workspace/sglang
RUN python3 -m pip config --global set global.no-index true \\
    && python3 -m pip config --global set global.find-links /opt/wheels \\
    && python3 -m pip install --break-system-packages --no-deps --no-build-isolation --no-compile \\
        INSTALL \\
    && echo /opt/links > {PACKAGES}/zz_dependencies.pth
"""
EDITABLE = "--editable /sgl-workspace/sglang/python"
WHEEL = f"/sgl-workspace/sglang/*.whl && rm /usr/lib/{VERSION}/EXTERNALLY-MANAGED"
# The pinned wheel carries no project file; SGLang's own has setuptools find the packages too.
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang"
version = "VERSION"
[tool.setuptools.packages.find]
include = ["sglang*"]
"""


class Engine:
    """buildah, with images of its own below ``folder``."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder, self.wheels = folder, wheels
        self.storage = [
            command("buildah", "buildah"),
            *("--root", str(folder / "images"), "--runroot", str(folder / "run")),
        ]

    def options(self, pin: Pin) -> list[str]:
        """What the pin's SGLang needs is mounted."""
        dependencies = sglang_python(pin.version).parents[1] / "lib" / VERSION / "site-packages"
        links = self.folder / f"links-{pin.version}"
        if not links.exists():
            links.mkdir()
            links.chmod(0o755)
            for entry in dependencies.iterdir():  # all but the sglang that is installed there too
                if not entry.name.startswith("sglang"):
                    (links / entry.name).symlink_to(f"/opt/dependencies/{entry.name}")
        volumes = {dependencies: "dependencies", links: "links", self.wheels: "wheels"}
        given = [("--volume", f"{source}:/opt/{name}:ro") for source, name in volumes.items()]
        return ["--isolation", "chroot", *(word for pair in given for word in pair)]

    def __call__(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.storage, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def build(
        self, context: Path, *args: str | Path, pin: Pin = NEWEST
    ) -> subprocess.CompletedProcess[str]:
        return self("build", *self.options(pin), *args, context)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One that has a Debian with Python, as ``localhost/debian``."""
    folder, wheels = (tmp_path_factory.mktemp(name) for name in ("buildah", "wheels"))
    try:
        debian, engine = system(), Engine(folder, wheels)
    except SystemExit as missing:
        pytest.skip(str(missing))
    recipe = folder / "Dockerfile"
    recipe.write_text(f"FROM scratch\nADD {debian.name} /\nRUN true\n")
    done = engine.build(debian.parent, "--file", recipe, "--tag", "localhost/debian")
    if done.returncode != 0:
        pytest.skip(f"buildah can build no image here: {done.stdout.strip().splitlines()[-1]}")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    download = (sys.executable, *"-m pip download -q --only-binary :all: -d".split(), wheels)
    subprocess.run([*download, *project["dependencies"]], check=True, capture_output=True)
    yield engine
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def context(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``docker build`` is started in: the project's folder after ``make wheel``."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "dist").mkdir()
    shutil.copy(wheel, folder / "dist")
    shutil.copy(ROOT / ".dockerignore", folder)
    (folder / "dist/sglang_overlay.tar.gz").write_text("an sdist")
    (folder / "notes").write_text("no part of the image")
    return folder


def lay_out(engine: Engine, folder: Path, install: str, pin: Pin = NEWEST) -> None:
    """The image ``localhost/base``: ``folder`` holds what is to be installed."""
    (folder / "Dockerfile").write_text(BASE.replace("INSTALL", install))
    done = engine.build(folder, "--tag", "localhost/base", pin=pin)
    assert done.returncode == 0, done.stdout[-3000:]


def build(engine: Engine, context: Path, pin: Pin = NEWEST) -> subprocess.CompletedProcess[str]:
    base = ("--build-arg", "BASE=localhost/base", "--tag", "localhost/overlay")
    release = () if pin == NEWEST else ("--build-arg", f"SGLANG={pin.version}")
    return engine.build(context, *base, *release, "--file", ROOT / "docker/Dockerfile", pin=pin)


def test_the_default_base_is_the_image_of_the_pinned_release() -> None:
    recipe = (ROOT / "docker/Dockerfile").read_text()
    default = (
        f"\nARG SGLANG={NEWEST.version}\nARG BASE=lmsysorg/sglang:v${{SGLANG}}\nFROM ${{BASE}}\n"
    )
    assert default in recipe


@each_pin
def test_over_an_editable_install_every_user_of_the_image_runs_patched(
    pin: Pin, engine: Engine, context: Path, tmp_path: Path
) -> None:
    assert main(["fetch", str(tmp_path / "sglang"), "--pin", pin.name]) == 0
    project = PROJECT.replace("VERSION", pin.version)
    (tmp_path / "sglang/python/pyproject.toml").write_text(project)
    lay_out(engine, tmp_path, EDITABLE, pin)
    done = build(engine, context, pin)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{PACKAGES}/sglang_overlay/_files: sound" in done.stdout
    name = engine("from", "localhost/overlay").stdout.strip()

    def show(folder: str) -> str:
        user = ("--user", "nobody", "--workingdir", folder)
        code = "import sglang, sglang.srt.server_args as m; print(m.__file__, sglang.__path__)"
        python = ("env", "HOME=/tmp", "python3", "-c", code)
        return engine("run", *engine.options(pin), *user, name, "--", *python).stdout

    shown = show("/sgl-workspace/sglang")
    assert f"on SGLang {pin.version}: cuda-device-max-connections" in shown, shown
    assert shown.splitlines()[-1] == (
        f"{PACKAGES}/sglang_overlay/_files/modules/sglang/srt/server_args.py "
        "['/sgl-workspace/sglang/python/sglang']"
    )
    # Beside the checkout, the checkout's folder is what `import sglang` finds; stock Python too.
    assert "/sgl-workspace/sglang is no package, but hides one" in show("/sgl-workspace")
    engine("rm", name)


def test_over_another_sglang_the_build_fails_and_says_why(
    engine: Engine, context: Path, tmp_path: Path
) -> None:
    other = PINS[0]
    (tmp_path / "sglang").mkdir()
    shutil.copy(pinned_wheel(other), tmp_path / "sglang")
    lay_out(engine, tmp_path, WHEEL)
    done = build(engine, context)
    assert done.returncode != 0
    assert (
        f"{PACKAGES}/sglang is not SGLang {NEWEST.version}'s but {other.version}'s" in done.stdout
    )


def test_the_build_context_is_the_wheel_alone(
    engine: Engine, context: Path, tmp_path: Path
) -> None:
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    out = tmp_path / "out"
    done = engine.build(context, "--file", tmp_path / "Dockerfile", "--output", out)
    assert done.returncode == 0, done.stdout
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert {file for file in files if not file.startswith("opt/")} == {
        f"dist/{path.name}" for path in (context / "dist").glob("*.whl")
    }
