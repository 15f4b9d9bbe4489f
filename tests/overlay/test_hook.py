"""The pinned SGLang runs patched, in every kind of process, and Python sees the real files."""

import json
import subprocess
import textwrap
from pathlib import Path

import pytest

from sglang_overlay.patchset.pin import Pin

from ..pins import each_pin
from .conftest import Environment, changed

LIGHT = "sglang.srt.model_executor.graph_fallback"  # a new module
PATCHED = "sglang.srt.arg_groups.field_order"  # a changed one, without heavy imports
FILE = f"import {PATCHED} as m; print(m.__file__)"


def line(pin: Pin) -> str:
    """What each process says."""
    return f"on SGLang {pin.version}: cuda-device-max-connections"


@pytest.fixture
def overlay(environment: Environment) -> Path:
    """The patched file of ``PATCHED``."""
    return environment.files / "modules" / (PATCHED.replace(".", "/") + ".py")


@pytest.mark.parametrize("flags", [(), ("-I",), ("-O",), ("-B",), ("-X", "utf8")])
def test_every_way_to_start_python_loads_the_patched_file(
    environment: Environment, overlay: Path, flags: tuple[str, ...]
) -> None:
    assert environment.code(FILE, *flags) == str(overlay)


@each_pin
def test_a_new_module_and_the_modules_that_are_not_patched(environment: Environment) -> None:
    printed = environment.code(
        f"import {LIGHT} as new, sglang.srt.constants as old;"
        "print(new.__file__); print(old.__file__)"
    ).splitlines()
    assert printed == [
        str(environment.files / "modules/sglang/srt/model_executor/graph_fallback.py"),
        str(environment.packages / "sglang/srt/constants.py"),
    ]


@each_pin
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_child_processes_load_the_patched_file(
    environment: Environment, overlay: Path, tmp_path: Path, method: str
) -> None:
    script = tmp_path / "parent.py"
    script.write_text(
        textwrap.dedent(f"""
        import multiprocessing
        def child(queue):
            import {PATCHED} as m
            queue.put(m.__file__)
        if __name__ == "__main__":
            context = multiprocessing.get_context("{method}")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start(); print(queue.get()); process.join()
        """)
    )
    done = environment.run(script)
    assert done.stdout.strip() == str(overlay), done.stderr


@each_pin
def test_a_patched_module_runs_with_dash_m(environment: Environment, overlay: Path) -> None:
    printed = environment.code(f"import runpy; print(runpy.run_module('{PATCHED}')['__file__'])")
    assert printed == str(overlay)
    done = environment.run("-m", PATCHED)
    assert done.returncode == 0, done.stderr


@each_pin
def test_each_process_says_once_what_is_active(pin: Pin, environment: Environment) -> None:
    done = environment.run("-c", FILE)
    lines = [x for x in done.stderr.splitlines() if x.startswith("sglang-overlay[")]
    assert len(lines) == 1
    assert line(pin) in lines[0]
    assert environment.run("-c", "print(1)").stderr == ""


@each_pin
def test_source_tracebacks_reload_pickle_and_bytecode_are_those_of_the_patched_file(
    environment: Environment, overlay: Path
) -> None:
    printed = json.loads(
        environment.code(
            f"""
import importlib, inspect, json, pickle, traceback
import {PATCHED} as m, {LIGHT} as light
source = inspect.getsource(m)
again = importlib.reload(m)
found = light.format_graph_fallbacks
try:
    light.format_graph_fallbacks(3)
except Exception as error:
    frame = traceback.extract_tb(error.__traceback__)[-1]
print(json.dumps(dict(
    source=source == open({str(overlay)!r}).read(), reload=again.__file__, cached=m.__cached__,
    pickled=pickle.loads(pickle.dumps(found)) is found, frame=[frame.filename, frame.line],
)))
""",
            PYTHONDONTWRITEBYTECODE="",
        )
    )
    file = environment.files / "modules/sglang/srt/model_executor/graph_fallback.py"
    assert printed["source"]
    assert printed["pickled"]
    assert printed["reload"] == str(overlay)
    assert Path(printed["cached"]).parent == overlay.parent / "__pycache__"
    assert Path(printed["cached"]).exists()
    assert printed["frame"][0] == str(file)
    assert printed["frame"][1] in [line.strip() for line in file.read_text().splitlines()]


def test_a_triton_kernel_in_a_patched_file_is_read_from_there(environment: Environment) -> None:
    entry = environment.manifest()
    file = environment.files / "modules" / entry["modules"][LIGHT]["place"]
    kernel = b"\nimport triton\n@triton.jit\ndef kernel(x):\n    pass  # patched\n"
    content = file.read_bytes() + kernel
    with changed(file, content), changed_manifest(environment, LIGHT, content):
        printed = environment.code(f"import {LIGHT} as m; print(m.kernel.src)")
    assert "pass  # patched" in printed


def test_a_patched_package_keeps_its_folders_and_its_resources(environment: Environment) -> None:
    """The series patches no ``__init__`` yet, so the wheel is given one."""
    place = "sglang/srt/arg_groups/__init__.py"
    original = environment.packages / place
    name = "sglang.srt.arg_groups"
    patched = environment.files / "modules" / place
    content = b"patched = True\n"
    had_init = original.exists()
    with changed(original, original.read_bytes() if had_init else b""):
        base = original.read_bytes()
        with (
            changed(patched, content),
            changed_manifest(environment, name, content, place=place, base=base),
        ):
            printed = environment.code(
                f"import {name} as p, importlib.resources as r, {PATCHED};"
                "print(p.patched, p.__file__, r.files(p), p.__path__)"
            )
    assert printed == f"True {patched} {original.parent} ['{original.parent}']"


def test_the_root_package_itself_can_be_patched(environment: Environment) -> None:
    original = environment.packages / "sglang/__init__.py"
    patched = environment.files / "modules/sglang/__init__.py"
    content = original.read_bytes() + b"\npatched = True\n"
    with (
        changed(patched, content),
        changed_manifest(
            environment,
            "sglang",
            content,
            place="sglang/__init__.py",
            base=original.read_bytes(),
        ),
    ):
        printed = environment.code("import sglang; print(sglang.patched, sglang.__file__)")
    assert printed == f"True {patched}"


RACE = """
import importlib, sys, threading
def first():
    import sglang
def second():
    while "sglang" not in sys.modules:
        pass
    print(importlib.import_module("sglang.srt.model_executor.graph_fallback").__file__)
threads = [threading.Thread(target=function) for function in (first, second)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_a_second_thread_cannot_come_by_the_hook(environment: Environment) -> None:
    assert environment.code(RACE).startswith(str(environment.files))


def test_a_finder_that_comes_later_and_an_old_loader_call_cannot_either(
    environment: Environment, overlay: Path, tmp_path: Path
) -> None:
    package = environment.packages / "sglang/__init__.py"
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u, sys\n"
        "class Front:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name == 'sglang':\n"
        f"            return u.spec_from_file_location(name, {str(package)!r})\n"
        "sys.meta_path.insert(0, Front)\n"
    )
    assert environment.code(FILE, PYTHONPATH=str(tmp_path)) == str(overlay)
    old = "import pkgutil, sys; l = pkgutil.get_loader('sglang'); print(hasattr(l, 'load_module'))"
    assert environment.code(old, "-W", "ignore") == "False"


def test_the_root_packages_spec_is_an_ordinary_one_afterwards(environment: Environment) -> None:
    environment.code(
        "import copy, pickle, sglang, importlib\n"
        "pickle.loads(pickle.dumps(sglang.__spec__)); copy.deepcopy(sglang.__spec__)\n"
        "assert type(sglang.__loader__).__name__ == 'SourceFileLoader'\n"
        "importlib.reload(sglang)"
    )


@pytest.mark.parametrize("stderr", ["sys.stderr = None", "sys.stderr.close()"])
def test_an_unusable_standard_error_stops_nothing(environment: Environment, stderr: str) -> None:
    code = f"import sys; {stderr}; import sglang; print('fine')"
    assert environment.code(code, "-W", "ignore") == "fine"


def test_looking_for_sglang_checks_nothing_and_never_fails(environment: Environment) -> None:
    code = "import importlib.util as u; print(u.find_spec('sglang').origin)"
    with changed(environment.files / "manifest.json", b"{"):
        done = environment.run("-c", code)
    assert done.returncode == 0
    assert done.stdout.strip() == str(environment.packages / "sglang/__init__.py")
    assert done.stderr == ""


def test_a_process_that_never_imports_sglang_imports_four_small_modules(
    environment: Environment,
) -> None:
    code = "import sys; print(sorted(m for m in sys.modules))"
    with changed(environment.packages / "sglang_overlay.pth", None):
        without = set(eval(environment.code(code)))
    with_hook = set(eval(environment.code(code)))
    assert with_hook - without == {
        "sglang_overlay",
        "sglang_overlay.runtime",
        "sglang_overlay.runtime.boot",
        "sglang_overlay.runtime.finder",
    }


def changed_manifest(environment: Environment, name: str, content: bytes, **entry: object):  # type: ignore[no-untyped-def]
    """The manifest with ``name``'s blob, and what ``entry`` gives, for a while."""
    from sglang_overlay.patchset.blobs import blob_id

    table = environment.manifest()
    base = entry.pop("base", None)
    known = table["modules"].get(name, {"partial": []})
    new = {**known, **entry, "blob": blob_id(content)}
    if isinstance(base, bytes):
        new["base"] = blob_id(base)
    table["modules"][name] = new
    return changed(environment.files / "manifest.json", json.dumps(table).encode())


@each_pin
def test_the_server_command_comes_through_the_hook(pin: Pin, environment: Environment) -> None:
    done = subprocess.run(
        [environment.python, "-m", "sglang.launch_server", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "--speculative-require-cuda-graph" in done.stdout
    assert line(pin) in done.stderr
