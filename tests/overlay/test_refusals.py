"""What does not belong together makes ``import sglang`` fail, and nothing else."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_overlay.cli import main
from sglang_overlay.patchset.blobs import blob_id
from sglang_overlay.patchset.pin import Pin
from sglang_overlay.patchset.source import pinned_wheel

from ..pins import NEWEST, PINS, each_pin
from .conftest import Environment, changed, make_environment

ENGINE = "sglang/srt/entrypoints/engine.py"


@each_pin
def test_an_edited_base_file(pin: Pin, environment: Environment) -> None:
    file = environment.packages / ENGINE
    pristine = file.read_bytes()
    with changed(file, pristine + b"# mine\n"):
        message = environment.refused()
    expected = f"expected {blob_id(pristine)[:8]}, found"
    assert f"{file} is not SGLang {pin.version}'s ({expected}" in message
    assert f"Next: pip install --force-reinstall --no-deps sglang=={pin.version}" in message


@each_pin
def test_a_missing_base_file(environment: Environment) -> None:
    with changed(environment.packages / ENGINE, None):
        assert "found 00000000" in environment.refused()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"{}", "is damaged"),
        (b'{"version": 1, "modules": []}', "is damaged"),
        (b'{"version": "1", "sglang": "0.5.23", "patches": {}, "modules": {}}', "is damaged"),
        (None, "is missing: a source tree of the overlay may hide the installed one"),
    ],
)
def test_a_damaged_manifest(environment: Environment, content: bytes | None, message: str) -> None:
    with changed(environment.files / "manifest.json", content):
        assert message in environment.refused()


@each_pin
def test_a_release_that_changed_none_of_our_files(pin: Pin, environment: Environment) -> None:
    file = environment.packages / "sglang/_version.py"
    version = pin.version
    newer = file.read_text().replace(f"'{version}'", f"'{version}.post1'")
    with changed(file, newer.encode()):
        assert f"is not SGLang {version}'s but {version}.post1's" in environment.refused()


@pytest.mark.parametrize("value", ["off", "false", "00", " 0"])
def test_the_switch_takes_0_or_1_alone(environment: Environment, value: str) -> None:
    assert f"SGLANG_OVERLAY={value}: it is 0 for off" in environment.refused(SGLANG_OVERLAY=value)


def test_a_patched_file_that_changes_under_a_process(environment: Environment) -> None:
    name = "sglang.srt.model_executor.graph_fallback"
    file = environment.files / "modules" / f"{name.replace('.', '/')}.py"
    code = f"import sglang; open({str(file)!r}, 'a').write('# later'); import {name}"
    with changed(file, file.read_bytes()):
        assert "changed under this process" in environment.refused(text=code)


def test_a_path_entry_that_cannot_be_read_and_a_linked_install_are_no_second_overlay(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(environment.packages)
    environment.code("import sglang", PYTHONPATH=f"{tmp_path}/link")
    (tmp_path / "sglang_overlay").mkdir()
    (tmp_path / "sglang_overlay/_files").symlink_to("_files")  # a loop: reading it fails
    environment.code("import sglang", PYTHONPATH=f"/nowhere:{tmp_path}")


@each_pin
@pytest.mark.parametrize("content", [b"edited = True\n", None])
def test_a_damaged_patched_file(environment: Environment, content: bytes | None) -> None:
    with changed(environment.files / "modules" / ENGINE, content):
        assert "is not as it was built" in environment.refused()


def test_a_hook_that_cannot_start_stops_sglang_alone(environment: Environment) -> None:
    with changed(environment.packages / "sglang_overlay/runtime/boot.py", b"import nothing_here\n"):
        done = environment.run("-c", "import json; print('fine'); import sglang")
    assert done.stdout == "fine\n"
    assert "its hook cannot start" in done.stderr
    assert "ModuleNotFoundError" in done.stderr.splitlines()[-1]


def test_a_hook_that_cannot_start_can_be_switched_off(environment: Environment) -> None:
    with changed(environment.packages / "sglang_overlay/runtime/boot.py", b"import nothing_here\n"):
        environment.code("import sglang", SGLANG_OVERLAY="0")


def test_two_overlays_at_once(environment: Environment, tmp_path: Path) -> None:
    other = tmp_path / "sglang_overlay/_files"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text("{}")
    assert "two overlays" in environment.refused(PYTHONPATH=f"/nowhere:{tmp_path}")


def test_an_sglang_that_was_imported_before_the_hook(environment: Environment) -> None:
    with changed(environment.packages / "a_first.pth", b"import sglang\n"):
        assert "was imported before the overlay's hook" in environment.refused()


def test_a_checkout_of_another_version_in_front(environment: Environment, tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    message = environment.refused(PYTHONPATH=str(tmp_path))
    assert f"{tmp_path}/sglang" in message
    assert "is not SGLang" in message


@each_pin
def test_a_patched_checkout_in_front_is_recognised_and_used(
    environment: Environment, tmp_path: Path
) -> None:
    packages = tmp_path / "site"
    shutil.copytree(environment.packages / "sglang", packages / "sglang")
    code = "import sglang.srt.arg_groups.field_order as m; print(m.__file__)"
    overlay = environment.code(code, PYTHONPATH=str(packages))
    assert overlay.startswith(str(environment.files))
    assert main(["apply", "--sglang-dir", str(packages), "--only", "spec-graph-report"]) == 0
    assert "holds some of the patches itself" in environment.refused(PYTHONPATH=str(packages))
    assert main(["apply", "--sglang-dir", str(packages)]) == 0
    done = environment.run("-c", code, PYTHONPATH=str(packages))
    assert done.stdout.strip() == str(packages / "sglang/srt/arg_groups/field_order.py")
    assert f"{packages}/sglang holds the patches itself" in done.stderr


@each_pin
def test_an_editable_install_is_held_against_the_same_blobs(
    environment: Environment, tmp_path: Path
) -> None:
    """As setuptools makes them: a finder of its own, no folder on the path."""
    source = tmp_path / "work/sglang"
    shutil.copytree(environment.packages / "sglang", source)
    hidden = environment.packages / "sglang_hidden"
    (environment.packages / "sglang").rename(hidden)
    finder = (
        "import importlib.util as u, sys\n"
        "class Editable:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'sglang':\n"
        f"            return u.spec_from_file_location(name, {str(source / '__init__.py')!r})\n"
        "sys.meta_path.insert(0, Editable)\n"
    )
    code = "import sglang.srt.arg_groups.field_order as m; print(m.__file__)"
    try:
        with (
            changed(environment.packages / "editable_finder.py", finder.encode()),
            changed(environment.packages / "editable.pth", b"import editable_finder\n"),
        ):
            assert environment.code(code).startswith(str(environment.files))
            with (source / "srt/entrypoints/engine.py").open("a") as stream:
                stream.write("# mine\n")
            assert f"{source}/srt/entrypoints/engine.py is not" in environment.refused()
    finally:
        hidden.rename(environment.packages / "sglang")


@each_pin
def test_switched_off_it_says_so_and_stock_sglang_runs(environment: Environment) -> None:
    code = "import sglang.srt.arg_groups.field_order as m; print(m.__file__)"
    done = environment.run("-c", code, SGLANG_OVERLAY="0")
    assert done.stdout.strip() == str(environment.packages / "sglang/srt/arg_groups/field_order.py")
    assert "switched off by SGLANG_OVERLAY=0: SGLang runs as it is on disk" in done.stderr


@each_pin
@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("eagle-flashinfer-mla-draft-extend-graph", "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH=1"),
        ("cuda-device-max-connections", "unset CUDA_DEVICE_MAX_CONNECTIONS"),
        ("nonsense", "no such patch; there is cuda-device-max-connections,"),
    ],
)
def test_one_patch_cannot_be_skipped_but_has_a_switch(
    environment: Environment, name: str, switch: str
) -> None:
    message = environment.refused(SGLANG_OVERLAY_SKIP=name)
    assert f"SGLANG_OVERLAY_SKIP={name}: a built overlay is all or nothing" in message
    assert switch in message


def dependencies(environment: Environment) -> str:
    """The folder that ``python -S`` does not find by itself."""
    return (environment.packages / "zz_dependencies.pth").read_text().strip()


@each_pin
def test_verify_proves_the_overlay_and_names_what_is_wrong(environment: Environment) -> None:
    def verify(*flags: str, **env: str) -> tuple[int, str]:
        done = environment.run(*flags, "-m", "sglang_overlay", "verify", **env)
        return done.returncode, done.stdout + done.stderr

    code, printed = verify()
    assert code == 0, printed
    assert "sglang.srt.speculative.spec_graph_report" in printed
    assert "sound" in printed
    assert str(environment.files / "modules/sglang/srt/managers/scheduler.py") in printed
    file = environment.packages / ENGINE
    with changed(file, b"mine\n"):
        code, printed = verify()
    assert code == 1
    assert f"{file} is not SGLang" in printed
    code, printed = verify(SGLANG_OVERLAY="0")
    assert code == 1
    assert "problem: SGLANG_OVERLAY=0: the overlay is switched off here" in printed
    code, printed = verify("-S", PYTHONPATH=f"{environment.packages}:{dependencies(environment)}")
    assert code == 1
    assert "the hook did not start in this interpreter" in printed


def test_verify_sees_which_running_processes_use_the_overlay(environment: Environment) -> None:
    code = "import sglang; print('ready', flush=True); input()"
    without_site = {"PYTHONPATH": f"{environment.packages}:{dependencies(environment)}"}
    for flag, env, state, expected in (
        ("-u", {}, "patched", 0),
        ("-u", {"SGLANG_OVERLAY": "0"}, "not patched", 1),
        ("-S", without_site, "not patched", 1),
    ):
        with subprocess.Popen(
            [environment.python, flag, "-c", code],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            assert server.stdout
            assert server.stdout.readline() == "ready\n"
            done = environment.run("-m", "sglang_overlay", "verify", "--pid", str(server.pid))
            server.communicate("\n")
        assert done.returncode == expected, done.stdout + done.stderr
        assert f"process {server.pid} (" in done.stdout
        assert f"): {state}\n" in done.stdout
    gone = environment.run("-m", "sglang_overlay", "verify", "--pid", str(server.pid))
    assert gone.returncode == 2


def test_another_sglang_underneath_is_refused_and_pip_check_names_it_and_uninstall_is_clean(
    wheel: Path, tmp_path: Path
) -> None:
    other = PINS[0]
    environment = make_environment(tmp_path / "env")
    before = {path for path in environment.packages.rglob("*") if "pip" not in path.parts}
    environment.pip("install", "--no-deps", "--no-index", wheel)
    environment.code("import sglang.srt.arg_groups.field_order")
    environment.pip("install", "--no-deps", "--no-index", pinned_wheel(other))
    assert f"is not SGLang {NEWEST.version}'s" in environment.refused()
    checked = environment.run("-m", "pip", "check")
    assert checked.returncode == 1
    asked = f"has requirement sglang=={NEWEST.version}, but you have sglang {other.version}"
    assert asked in checked.stdout
    environment.pip("install", "--no-deps", "--no-index", pinned_wheel(NEWEST))
    environment.code("import sglang.srt.arg_groups.field_order")
    environment.pip("uninstall", "-y", "sglang-overlay")
    after = {path for path in environment.packages.rglob("*") if "pip" not in path.parts}
    left = {path for path in after - before if "__pycache__" not in path.parts}
    assert left == set()
    assert not (environment.packages / "sglang_overlay").exists()
    assert environment.run("-c", "import sglang").stderr == ""
