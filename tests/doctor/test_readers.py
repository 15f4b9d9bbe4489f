"""Settings, caches, the server's arguments, and the environment that runs the server."""

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from sglang_overlay.doctor.cache import read_cache
from sglang_overlay.doctor.facts import Python, Server, Unknown
from sglang_overlay.doctor.python import read_python
from sglang_overlay.doctor.server import read_server
from sglang_overlay.doctor.settings import read_settings

READ = ["free", "filesystem", "writable", "built", "peers"]
#: Prints which facts of the cache are unknown to a user who is not root, and why.
AS_NOBODY = """
import json, os, sys
from pathlib import Path
import psutil
from sglang_overlay.doctor import cache, facts
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
found = vars(cache.read_cache(json.loads(sys.argv[1]), Path(sys.argv[2])))
unknown = {n: v.why.split(": ")[-1] for n, v in found.items() if isinstance(v, facts.Unknown)}
print(json.dumps(dict(sorted(unknown.items()))))
"""


def test_only_what_matters_is_kept_of_the_environment_and_secrets_are_not(tmp_path: Path) -> None:
    environ = {
        "NCCL_ALGO": "Ring",
        "SGLANG_API_KEY": "s3cret",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "HOME": "/home/u",
        "HF_TOKEN": "s3cret",
        "LD_LIBRARY_PATH": "/opt/lib",
    }
    kept = read_settings(environ, tmp_path, tmp_path / "none").environ
    assert kept == {
        "NCCL_ALGO": "Ring",
        "SGLANG_API_KEY": "<redacted>",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "LD_LIBRARY_PATH": "/opt/lib",
    }


def test_the_environment_wins_over_nccls_files_and_the_users_over_the_systems(
    tmp_path: Path,
) -> None:
    system, user, graph = tmp_path / "nccl.conf", tmp_path / ".nccl.conf", tmp_path / "g.xml"
    graph.write_text("<graphs/>")
    system.write_text(f"NCCL_DEBUG=INFO\nNCCL_ALGO=Tree # old\nNCCL_GRAPH_FILE={graph}\nnonsense\n")
    user.write_text(" NCCL_ALGO = Ring \n# NCCL_PROTO=LL\nNCCL_TOPO_FILE=/nowhere.xml\n")
    settings = read_settings({"NCCL_DEBUG": "WARN"}, tmp_path, system)
    assert settings.nccl == {
        "NCCL_DEBUG": "WARN",
        "NCCL_ALGO": "Ring",
        "NCCL_GRAPH_FILE": str(graph),
        "NCCL_TOPO_FILE": "/nowhere.xml",
    }
    assert settings.files == {
        str(graph): "<graphs/>",
        "/nowhere.xml": Unknown("No such file or directory"),
    }
    assert settings.nccl_conf_file == f"{system}, {user}"
    other = tmp_path / "other.conf"
    other.write_text("NCCL_ALGO=Tree")
    named = read_settings({"NCCL_CONF_FILE": str(other)}, tmp_path, tmp_path / "none")
    assert named.nccl_conf == {"NCCL_ALGO": "Tree"}


def test_the_cache_is_where_sglang_puts_it(tmp_path: Path) -> None:
    folder = tmp_path / ".cache/sglang"
    cache = read_cache({}, tmp_path)
    assert cache.folder == str(folder)
    assert (cache.built, cache.peers, cache.writable) == (0, None, True)
    assert isinstance(cache.free, int) and cache.free > 0
    assert isinstance(cache.filesystem, str)
    for name in ("a/a.so", "b/b.so", "b/b.o"):
        file = folder / ".cache/flashinfer/0.7.2/120f/cached_ops" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert read_cache({}, tmp_path).built == 2
    other = {"SGLANG_CACHE_DIR": "~/elsewhere", "FLASHINFER_WORKSPACE_BASE": str(folder)}
    moved = read_cache(other, tmp_path)
    assert (moved.folder, moved.built) == (str(tmp_path / "elsewhere"), 2)


def test_the_file_of_peer_access(tmp_path: Path) -> None:
    folder = tmp_path / ".cache/sglang"
    folder.mkdir(parents=True)
    file = folder / "gpu_p2p_access_cache_for_0,1.json"
    file.write_text(json.dumps({"0->1": False}))
    for environ in ({}, {"CUDA_VISIBLE_DEVICES": "0,1"}):
        cache = read_cache(environ, tmp_path)
        assert (cache.peers_file, cache.peers) == (str(file), {"0->1": False})
    assert read_cache({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path).peers is None
    file.write_text('{"0->1": fal')
    assert isinstance(read_cache({}, tmp_path).peers, Unknown)


@pytest.mark.parametrize(
    ("environ", "home", "closed"),
    [
        ({}, "closed", READ),
        ({"SGLANG_CACHE_DIR": "{}/closed"}, "open", ["built", "peers"]),
        ({"SGLANG_CACHE_DIR": "{}/closed/cache"}, "open", READ),
        ({"FLASHINFER_WORKSPACE_BASE": "{}/closed"}, "open", ["built"]),
        ({"SGLANG_CACHE_DIR": "{}/locked"}, "open", ["peers"]),
    ],
)
def test_what_a_user_may_not_look_into_is_unknown(
    environ: dict[str, str], home: str, closed: list[str]
) -> None:
    # Not tmp_path, which is its owner's alone from further up.
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for folder in ("closed", "open", "locked"):
            (root / folder).mkdir()
        file = root / "locked/gpu_p2p_access_cache_for_0,1.json"
        file.write_text("{}")
        for path, mode in ((root, 0o755), (root / "closed", 0), (file, 0)):
            path.chmod(mode)
        given = {key: value.format(root) for key, value in environ.items()}
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, json.dumps(given), str(root / home)],
            capture_output=True,
            text=True,
            check=False,
        )
        (root / "closed").chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dict.fromkeys(sorted(closed), "Permission denied")


@pytest.mark.parametrize(
    ("line", "server"),
    [
        ("", Server()),
        (
            "--tp 8 --attention-backend flashinfer",
            Server(tp=8, cards=8, attention_backend="flashinfer"),
        ),
        ("--tensor-parallel-size=4 --nnodes 2", Server(tp=4, cards=2, nodes=2)),
        ("--tp 8 --pp-size 2 --nnodes 2", Server(tp=8, pp=2, nodes=2)),
        ("--tp-size x --nnodes 0", Server()),
        ("--tp 2 --base-gpu-id 4", Server(tp=2)),
        ("--tp 2 --pp-size 2", Server(tp=2, pp=2)),
        ("--tp 2 --dp-size 4", Server(tp=2)),  # which cards is not counted
        ("--tp 2 --gpu-id-step 4", Server(tp=2)),
        ("--disable-decode-cuda-graph", Server(cuda_graph=False)),
        ("--cuda-graph-backend-decode disabled", Server(cuda_graph=False)),
        ("--cuda-graph-backend-decode=full", Server()),
        (
            "--cuda-graph-config={} --config x.yaml",
            Server(unread=("--config", "--cuda-graph-config")),
        ),
        (
            "--speculative-algorithm EAGLE3 --disable-cuda-graph",
            Server(algorithm="EAGLE3", own_drafter=True, cuda_graph=False),
        ),
        ("--speculative-algo NEXTN", Server(algorithm="NEXTN")),
        ("--speculative-draft-model a/b", Server(own_drafter=True)),
        ("--speculative-num-steps 3 --dcp-size 2", Server(dcp=2)),
        ("--speculative-num-steps 1", Server(draft_decode=False)),
        ("--speculative-num-steps 1 --speculative-adaptive", Server()),
        ("--speculative-num-steps 3 --enable-multi-layer-eagle", Server(draft_decode=False)),
        (
            "--prefill-attention-backend a --decode-attention-backend=b "
            "--speculative-draft-attention-backend c --speculative-attention-mode decode",
            Server(
                prefill_backend="a", decode_backend="b", draft_backend="c", attention_mode="decode"
            ),
        ),
        ("--disable-custom-all-reduce", Server(custom_all_reduce=False)),
        ("--enable-deterministic-inference", Server(deterministic=True)),
        ("--flashinfer-allreduce-fusion-backend auto", Server(fusion="auto")),
        (
            "--flashinfer-allreduce-fusion-backend auto "
            "--enforce-disable-flashinfer-allreduce-fusion",
            Server(),
        ),
        ("python -m sglang.launch_server --port 1 --tp", Server()),
    ],
)
def test_the_servers_arguments(line: str, server: Server) -> None:
    assert read_server(line.split()) == server


@pytest.mark.parametrize(
    ("config", "mla"),
    [
        ({"kv_lora_rank": 512}, True),
        ({"text_config": {"kv_lora_rank": 512}}, True),
        ({"hidden_size": 4096}, False),
        ([], None),
        (None, None),
    ],
)
def test_whether_the_model_has_mla(tmp_path: Path, config: object, mla: bool | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_server(["--model-path", str(tmp_path)]).mla is mla


def test_the_draft_model_is_asked_for_its_own_attention(tmp_path: Path) -> None:
    for name, config in (("target", {"kv_lora_rank": 512}), ("drafter", {"hidden_size": 4096})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    line = ["--model", str(tmp_path / "target"), "--speculative-draft-model-path"]
    server = read_server([*line, str(tmp_path / "drafter")])
    assert (server.mla, server.own_drafter, server.draft_mla) == (True, True, False)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A Python whose packages are metadata alone."""
    root = tmp_path / "env"
    venv.create(root, with_pip=False)
    packages = next(root.glob("lib/python*/site-packages"))
    needs = {
        "sglang-0.5.23": [
            "flashinfer_python[cu13]==0.7.2",
            "sglang-kernel==0.4.10",
            "torch==2.14.1",
            "numpy",
            'ninja==9.9; extra == "test"',
            'triton==1.0; extra == "old"',
        ],
        "torch-2.14.1": ['nvidia-nccl-cu13==2.30.7; platform_system == "Linux"'],
        "sglang_kernel-0.4.10": [],
        "nvidia_nccl_cu13-2.30.7": [],
    }
    for name, lines in needs.items():
        folder = packages / f"{name}.dist-info"
        folder.mkdir()
        title, _, version = name.partition("-")
        head = f"Metadata-Version: 2.1\nName: {title.replace('_', '-')}\nVersion: {version}\n"
        (folder / "METADATA").write_text(head + "".join(f"Requires-Dist: {x}\n" for x in lines))
    library = packages / "nvidia/nccl/lib/libnccl.so.2"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"\x7fELF\0NCCL_DEBUG\0text\0NCCL_ALGO\0NCCL_IB_HCA\0not NCCL_SAID\0")
    record = packages / "nvidia_nccl_cu13-2.30.7.dist-info/RECORD"
    record.write_text("nvidia/nccl/lib/libnccl.so.2,,\n")
    return root


def test_the_environment_of_the_server(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    (first / "sitecustomize.py").touch()
    second = next(environment.glob("lib/python*/site-packages")) / "sitecustomize.py"
    second.touch()
    monkeypatch.setenv("PYTHONPATH", str(first))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    found = read_python(str(environment / "bin/python"), None)
    assert isinstance(found, Python)
    assert found.versions == {
        "sglang": "0.5.23",
        "torch": "2.14.1",
        "sglang-kernel": "0.4.10",
        "nvidia-nccl-cu13": "2.30.7",
    }
    assert found.wanted == {
        "flashinfer-python": "0.7.2",
        "sglang-kernel": "0.4.10",
        "torch": "2.14.1",
        "nvidia-nccl-cu13": "2.30.7",
    }
    assert found.sitecustomize == (str(first / "sitecustomize.py"), str(second))
    assert found.nvcc == Unknown(f"no nvcc below {tmp_path / 'cuda'}")
    assert isinstance(found.torch, Unknown) and "No module named 'torch'" in found.torch.why
    assert isinstance(found.patches, Unknown)  # there is no SGLang tree
    assert found.nccl_names == {"NCCL_DEBUG", "NCCL_ALGO", "NCCL_IB_HCA"}


def test_the_compiler_is_found_where_flashinfer_looks(
    environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("CUDA_PATH", str(nvcc.parents[1]))
    python = str(environment / "bin/python")
    by_home = read_python(python, None)
    monkeypatch.delenv("CUDA_PATH")
    monkeypatch.setenv("PATH", f"{nvcc.parent}:/usr/bin:/bin")
    by_path = read_python(python, None)
    for found in (by_home, by_path):
        assert isinstance(found, Python)
        assert found.nvcc == str(nvcc)


def test_a_python_that_is_not_there_or_does_not_work(tmp_path: Path) -> None:
    gone = read_python(str(tmp_path / "python"), None)
    assert gone == Unknown(f"{tmp_path / 'python'}: No such file or directory")
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho 'libpython3.so: cannot open' >&2\nexit 127\n")
    failing.chmod(0o755)
    assert read_python(str(failing), None) == Unknown(f"{failing}: libpython3.so: cannot open")
    for words, told in (("hello", "hello"), ("", "it said nothing")):
        failing.write_text(f"#!/bin/sh\necho {words}\n")
        assert read_python(str(failing), None) == Unknown(f"{failing} answered {told!r}")


def test_the_names_of_a_real_interpreter_are_read_without_importing_anything() -> None:
    from sglang_overlay.doctor import children

    code = f"{children.INSTALLED}\nprint(sorted(m for m in sys.modules if 'torch' in m))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
