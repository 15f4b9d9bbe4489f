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
from sglang_overlay.patchset.source import released_wheel

from .conftest import PIN, VERSION

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
PROJECT = f"""
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "sglang"
version = "{PIN.version}"
[tool.setuptools.packages.find]
include = ["sglang*"]
"""


class Engine:
    """buildah, with images of its own below ``folder``."""

    def __init__(self, folder: Path, wheels: Path, links: Path) -> None:
        self.storage = [
            command("buildah", "buildah"),
            *("--root", str(folder / "images"), "--runroot", str(folder / "run")),
        ]
        dependencies = sglang_python().parents[1] / "lib" / VERSION / "site-packages"
        links.chmod(0o755)
        for entry in dependencies.iterdir():  # all but the sglang that is installed there too
            if not entry.name.startswith("sglang"):
                (links / entry.name).symlink_to(f"/opt/dependencies/{entry.name}")
        volumes = {dependencies: "dependencies", links: "links", wheels: "wheels"}
        self.options = ["--isolation", "chroot"]
        for source, name in volumes.items():
            self.options += ["--volume", f"{source}:/opt/{name}:ro"]

    def __call__(self, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.storage, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    def build(self, context: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
        return self("build", *self.options, *args, context)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One that has a Debian with Python, as ``localhost/debian``."""
    folder, wheels, links = (tmp_path_factory.mktemp(n) for n in ("buildah", "wheels", "links"))
    try:
        debian, engine = system(), Engine(folder, wheels, links)
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


def lay_out(engine: Engine, folder: Path, install: str) -> None:
    """The image ``localhost/base``: ``folder`` holds what is to be installed."""
    (folder / "Dockerfile").write_text(BASE.replace("INSTALL", install))
    done = engine.build(folder, "--tag", "localhost/base")
    assert done.returncode == 0, done.stdout[-3000:]


def build(engine: Engine, context: Path) -> subprocess.CompletedProcess[str]:
    base = ("--build-arg", "BASE=localhost/base", "--tag", "localhost/overlay")
    return engine.build(context, *base, "--file", ROOT / "docker/Dockerfile")


def test_the_default_base_is_the_image_of_the_pinned_release() -> None:
    recipe = (ROOT / "docker/Dockerfile").read_text()
    assert f"\nARG BASE=lmsysorg/sglang:{PIN.name}\nFROM ${{BASE}}\n" in recipe


def test_over_an_editable_install_every_user_of_the_image_runs_patched(
    engine: Engine, context: Path, tmp_path: Path
) -> None:
    assert main(["fetch", str(tmp_path / "sglang")]) == 0
    (tmp_path / "sglang/python/pyproject.toml").write_text(PROJECT)
    lay_out(engine, tmp_path, EDITABLE)
    done = build(engine, context)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{PACKAGES}/sglang_overlay/_files: sound" in done.stdout
    name = engine("from", "localhost/overlay").stdout.strip()

    def show(folder: str) -> str:
        user = ("--user", "nobody", "--workingdir", folder)
        code = "import sglang, sglang.srt.server_args as m; print(m.__file__, sglang.__path__)"
        python = ("env", "HOME=/tmp", "python3", "-c", code)
        return engine("run", *engine.options, *user, name, "--", *python).stdout

    shown = show("/sgl-workspace/sglang")
    assert f"on SGLang {PIN.version}: cuda-device-max-connections" in shown, shown
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
    (tmp_path / "sglang").mkdir()
    shutil.copy(released_wheel("0.5.22", PIN), tmp_path / "sglang")
    lay_out(engine, tmp_path, WHEEL)
    done = build(engine, context)
    assert done.returncode != 0
    assert f"{PACKAGES}/sglang is not SGLang {PIN.version}'s but 0.5.22's" in done.stdout


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
