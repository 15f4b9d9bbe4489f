"""A real engine on the CPU under the overlay, and every module against the patched checkout."""

import json
import re
import textwrap
from pathlib import Path

from sglang_overlay.cli import main
from sglang_overlay.patchset.pin import Pin

from ..conftest import GPT2
from ..pins import each_pin
from .conftest import Environment


@each_pin
def test_every_module_loads_byte_identical_to_the_patched_checkout(
    pin: Pin, environment: Environment, tmp_path: Path
) -> None:
    assert main(["fetch", str(tmp_path / "tree"), "--pin", pin.name]) == 0
    assert main(["apply", "--sglang-dir", str(tmp_path / "tree")]) == 0
    environment.pip("install", "ray")  # which some of the modules import
    modules = environment.manifest()["modules"]
    code = (
        "import importlib, json, sys\n"
        f"names = {list(modules)!r}\n"
        "print(json.dumps({n: importlib.import_module(n).__file__ for n in names}))"
    )
    loaded = json.loads(environment.code(code).splitlines()[-1])
    for name, file in loaded.items():
        assert Path(file).is_relative_to(environment.files), name
        checkout = tmp_path / "tree/python" / modules[name]["place"]
        assert Path(file).read_bytes() == checkout.read_bytes(), name


@each_pin
def test_a_real_engine_generates_under_the_overlay_its_scheduler_too(
    environment: Environment, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(GPT2))
    script = tmp_path / "engine.py"
    script.write_text(
        textwrap.dedent(f"""
        import json, os, subprocess, sys
        if __name__ == "__main__":
            import sglang
            engine = sglang.Engine(
                model_path={str(model)!r}, device="cpu", load_format="dummy",
                skip_tokenizer_init=True, attention_backend="torch_native",
                disable_radix_cache=True, max_total_tokens=4096,
            )
            done = engine.generate(
                input_ids=[1, 2, 3, 4],
                sampling_params=dict(max_new_tokens=8, temperature=0, ignore_eos=True),
            )
            verify = [sys.executable, "-m", "sglang_overlay", "verify", "--json", "--pid"]
            seen = subprocess.run([*verify, str(os.getpid())], capture_output=True, text=True)
            engine.shutdown()
            tokens = done["output_ids"]
            print("RESULT", json.dumps([tokens, seen.returncode, json.loads(seen.stdout)]))
        """)
    )
    done = environment.run(script)
    line = next((x for x in done.stdout.splitlines() if x.startswith("RESULT ")), None)
    assert line, done.stdout[-2000:] + done.stderr[-3000:]
    tokens, code, result = json.loads(line.removeprefix("RESULT "))
    assert len(tokens) == 8
    patched = [process["command"] for process in result["processes"]]
    assert code == 0, result["processes"]
    assert any("scheduler" in command for command in patched), patched
    assert any("detokenizer" in command for command in patched), patched
    spoke = set(re.findall(r"sglang-overlay\[(\d+)\]", done.stdout + done.stderr))
    assert len(spoke) >= 3
