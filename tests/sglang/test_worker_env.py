"""--worker-env, its report and GET /worker_env with real SGLang processes on the CPU.

Every value is what libc's getenv() says inside the worker: patch worker-env-report logs it.
The drivers are files, since the children of a spawn import the main module.
"""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.cli import main

from .conftest import runner

MODEL = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 64,
    "n_positions": 512,
    "vocab_size": 1000,
    "torch_dtype": "float32",
}

ARGUMENTS = dict(
    device="cpu",
    load_format="dummy",
    skip_tokenizer_init=True,
    attention_backend="torch_native",
    disable_radix_cache=True,
    max_total_tokens=4096,
)

WORKER_ENV = [
    "NCCL_ALGO=Ring",  # over an inherited Tree
    "NCCL_NVLS_ENABLE=1",  # over SGLang's own default, 0
    "NCCL_SOCKET_IFNAME=eth0",
    "NCCL_SOCKET_IFNAME@dp1=eth1",
    "CUDA_CACHE_TOKEN=s3cret",
]

ENGINE = """
import json, os, sys
if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    os.environ["NCCL_ALGO"] = "Tree"
    os.environ["NCCL_DEBUG"] = "WARN"  # set in the parent after its start
    from sglang.srt.entrypoints.engine import Engine
    engine = Engine(**arguments)
    names = ("NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_SOCKET_IFNAME")
    launched = {name: os.environ.get(name) for name in names}
    children = [int(p) for p in os.popen(f"pgrep -P {os.getpid()}").read().split()]
    children += [int(p) for c in children for p in os.popen(f"pgrep -P {c}").read().split()]
    proc = {}
    for pid in children:
        try:
            environ = open(f"/proc/{pid}/environ", "rb").read()
            title = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")[0].decode()
        except OSError:
            continue
        proc[pid] = {"title": title, "has": b"NCCL_DEBUG=WARN" in environ.split(b"\\0")}
    answer = engine.generate(input_ids=[[1, 2, 3]] * 4, sampling_params={"max_new_tokens": 4})
    print("RESULT=" + json.dumps({
        "launched": launched,
        "proc": proc,
        "tokens": [len(a["output_ids"]) for a in answer],
        "server_info": json.dumps(engine.get_server_info(), default=str),
    }), flush=True)
    engine.shutdown()
"""

SERVER = """
import json, os, subprocess, sys, time, urllib.error, urllib.request
port, argv = sys.argv[1], json.loads(sys.argv[2])
log = open(sys.argv[3], "w")
server = subprocess.Popen([sys.executable, "-m", "sglang.launch_server", "--port", port, *argv],
                          stdout=log, stderr=subprocess.STDOUT)

def get(path, key=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as e:
        return e.code, ""
    except OSError:
        return 0, ""

try:
    for _ in range(300):
        if server.poll() is not None or get("/health")[0] == 200:
            break
        time.sleep(1)
    bare = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    ours = [*sys.argv[4:], "--url", f"http://127.0.0.1:{port}", "--key", "admin"]
    seen = subprocess.run(ours, env=bare, cwd="/", capture_output=True, text=True)
    print("RESULT=" + json.dumps({
        "command": [seen.returncode, seen.stdout, seen.stderr],
        "without_key": get("/worker_env")[0],
        "wrong_key": get("/worker_env", "wrong")[0],
        "worker_env": get("/worker_env", "admin"),
        "server_info": get("/server_info", "admin"),
    }), flush=True)
finally:
    server.terminate()
    server.wait(60)
"""


def _driver(tmp_path, text):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    driver = tmp_path / "driver.py"
    driver.write_text(text)
    return driver, str(tmp_path / "model")


def _result(run):
    lines = [x for x in run.stdout.splitlines() if x.startswith("RESULT=")]
    assert lines, run.stdout[-3000:] + run.stderr[-6000:]
    return json.loads(lines[0].removeprefix("RESULT="))


def _reports(text):
    """The worker_env= log lines, by process and DP rank."""
    reports = {}
    for line in text.splitlines():
        match = re.search(r"worker_env=(\{.*\})$", line)
        if match and '"process"' in match[1]:
            report = json.loads(match[1])
            reports[report["process"], report["ranks"].get("dp")] = report
    return reports


def _value(report, name):
    entry = report["env"].get(name, {})
    return entry.get("value"), entry.get("origin")


def test_engine_with_dp_controller(python, patched, tmp_path):
    driver, model = _driver(tmp_path, ENGINE)
    arguments = dict(
        ARGUMENTS, model_path=model, dp_size=2, log_level="info", worker_env=WORKER_ENV
    )
    run = python(patched, driver, json.dumps(arguments), SGLANG_CPU_OMP_THREADS_BIND="0|1")
    result, log = _result(run), run.stdout + run.stderr
    reports = _reports(log)
    assert set(reports) == {
        ("data_parallel_controller", None),
        ("detokenizer", None),
        ("scheduler", 0),
        ("scheduler", 1),
    }
    assert len({r["pid"] for r in reports.values()}) == 4
    for report in reports.values():
        assert _value(report, "NCCL_ALGO") == ("Ring", "user")
        assert _value(report, "NCCL_NVLS_ENABLE") == ("1", "user")
        assert _value(report, "NCCL_DEBUG") == ("WARN", "inherited")
        assert _value(report, "NCCL_CUMEM_ENABLE") == ("0", "sglang")
        assert _value(report, "CUDA_CACHE_TOKEN") == ("<redacted>", "user")
    # Per-rank selectors.
    interface = {k: _value(r, "NCCL_SOCKET_IFNAME")[0] for k, r in reports.items()}
    assert interface.pop(("scheduler", 1)) == "eth1"
    assert set(interface.values()) == {"eth0"}
    # The launcher keeps its own.
    assert result["launched"] == {
        "NCCL_ALGO": "Tree",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_SOCKET_IFNAME": None,
    }
    # /proc/PID/environ says that NCCL_DEBUG is missing where getenv() says WARN.
    proc = {int(pid): p for pid, p in result["proc"].items()}
    wrong = [r for r in reports.values() if not proc[r["pid"]]["has"]]
    assert wrong, proc
    assert all(proc[r["pid"]]["title"].startswith("sglang::") for r in wrong)
    assert result["tokens"] == [4, 4, 4, 4]
    for text in (log, result["server_info"]):
        assert "CUDA_CACHE_TOKEN=<redacted>" in text
        assert "s3cret" not in text


def test_launch_server(python, patched, tmp_path):
    driver, model = _driver(tmp_path, SERVER)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env_file = tmp_path / "env"
    env_file.write_text("# comment\nNCCL_DEBUG=WARN\nSGLANG_SECRET=s3cret\n")
    argv = [
        *("--model-path", model, "--device", "cpu", "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--attention-backend", "torch_native"),
        *("--disable-radix-cache", "--max-total-tokens", "4096", "--dp-size", "2"),
        *("--admin-api-key", "admin", "--skip-server-warmup"),
        *("--worker-env-file", str(env_file)),
    ]
    for pair in WORKER_ENV:
        argv += ["--worker-env", pair]
    log = tmp_path / "server.log"
    ours = [sys.executable, "-m", "sglang_overlay", "env", "--json"]
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    run = python(patched, driver, port, json.dumps(argv), log, *ours, **bind)
    assert main(["env", "--log", str(log)]) == 1
    result, log = _result(run), log.read_text()
    code, printed, errors = result["command"]
    assert code == 1, errors
    table = json.loads(printed)
    assert table["workers"] == [f"scheduler tp0 pp0 dp{dp} node0" for dp in range(2)]
    assert [v["name"] for v in table["variables"] if v["different"]] == ["NCCL_SOCKET_IFNAME"]
    assert (result["without_key"], result["wrong_key"]) == (401, 401), log[-6000:]
    status, body = result["worker_env"]
    assert status == 200, log[-6000:]
    answer = json.loads(body)
    assert answer["differing"] == ["NCCL_SOCKET_IFNAME"]
    assert [w["ranks"] for w in answer["workers"]] == [
        {"tp": 0, "pp": 0, "dp": dp, "node": 0} for dp in range(2)
    ]
    for worker, interface in zip(answer["workers"], ("eth0", "eth1"), strict=False):
        assert _value(worker, "NCCL_SOCKET_IFNAME") == (interface, "user")
        assert _value(worker, "NCCL_DEBUG") == ("WARN", "user")
        assert _value(worker, "SGLANG_SECRET") == ("<redacted>", "user")
        assert not any(entry["late"] for entry in worker["env"].values())
    assert [w["differs"] for w in answer["workers"]] == [[], ["NCCL_SOCKET_IFNAME"]]
    # The log has the same, without the launching process.
    logged = _reports(log)
    for worker in answer["workers"]:
        assert logged["scheduler", worker["ranks"]["dp"]]["pid"] == worker["pid"]
    status, info = result["server_info"]
    assert status == 200 and "worker_env_reports" not in info
    assert json.loads(info)["worker_env"][-1] == "CUDA_CACHE_TOKEN=<redacted>"
    assert "--worker-env CUDA_CACHE_TOKEN=<redacted>" in json.loads(info)["launch_command"]
    assert "s3cret" not in log + body + info


def test_bad_input_is_a_usage_error(python, patched, tmp_path):
    _, model = _driver(tmp_path, "")
    for argv, message in (
        (["--worker-env", "NCCL_ALGO"], "expected KEY=VALUE"),
        (["--worker-env", "NCCL_ALGO@dp1=Ring"], "selects no worker"),
        (["--worker-env-file", str(tmp_path / "none")], "No such file"),
    ):
        run = python(patched, "-m", "sglang.launch_server", "--model-path", model, *argv)
        assert run.returncode == 2, run.stderr[-3000:]
        assert message in run.stderr.splitlines()[-1]


RAY = '''
import json, os, sys
import ray
from sglang.srt.ray.scheduler_actor import SchedulerActor
from sglang.srt.ray import engine as ray_engine
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import PortArgs, ServerArgs
from ray.util.placement_group import placement_group


class Probe:
    """What an actor that SGLang creates has from Ray, without a model."""

    def __init__(self, **kwargs):
        pass

    def get_info(self):
        import ctypes
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        names = ("NCCL_DEBUG", "NCCL_ALGO", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_PLUGIN")
        values = {name: (getenv(name.encode()) or b"").decode() for name in names}
        return values | {"ip": ray.util.get_node_ip_address()}


if __name__ == "__main__":
    os.environ["NCCL_DEBUG"] = "WARN"  # in the driver, after ray start
    ray.init(address=sys.argv[1], log_to_driver=False)
    nodes = int(sys.argv[4])
    group = placement_group([{"CPU": 1, "GPU": 2 // nodes}] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    pairs = json.loads(sys.argv[2])

    # A real scheduler, whose constructor loads the model; on the last node.
    args = ServerArgs(worker_env=pairs, **json.loads(sys.argv[3]))
    args.resolve_once()
    publish(args, role="tokenizer")
    ports = PortArgs.init_new(args)
    actor = ray_engine._create_scheduler_actor(
        pg=group, bundle_idx=nodes - 1, gpu_id=0, server_args=args, port_args=ports, tp_rank=0,
        pp_rank=0, dp_rank=0, dist_init_addr=f"127.0.0.1:{ports.nccl_port}", rank0_node_ip="",
    )
    result = {"scheduler": ray.get(actor.get_info.remote())["worker_env_reports"]}
    ray.kill(actor)

    ray_engine.SchedulerActor = ray.remote(Probe)
    for label, pairs in (("stock", None), ("patched", pairs)):
        sizes = dict(tp_size=2, nnodes=nodes)
        args = ServerArgs(model_path="dummy", device="cpu", worker_env=pairs, **sizes)
        args.resolve_once()
        publish(args, role="tokenizer")
        actors = [
            ray_engine._create_scheduler_actor(
                pg=group, bundle_idx=tp % nodes, gpu_id=0, server_args=args, port_args=None,
                tp_rank=tp, pp_rank=0, dp_rank=0, dist_init_addr="", rank0_node_ip=label,
            )
            for tp in range(2)
        ]
        result[label] = ray.get([a.get_info.remote() for a in actors])
        for actor in actors:
            ray.kill(actor)
    print("RESULT=" + json.dumps(result), flush=True)
'''


@pytest.fixture
def ray_python(tmp_path):
    """Runs python with Ray, in an environment of its own over the one that has SGLang's rest."""
    venv.create(tmp_path / "ray", with_pip=True)
    executable = tmp_path / "ray/bin/python"
    below = sglang_python().parents[1] / "lib/python3.11/site-packages"
    (tmp_path / "ray/lib/python3.11/site-packages/below.pth").write_text(f"{below}\n")
    subprocess.run([executable, "-m", "pip", "install", "-q", "ray"], check=True)
    return runner(executable)


@pytest.fixture
def namespace():
    """A network namespace with an address of its own: (its name, our address, its address)."""
    name, number = f"wenv{os.getpid()}", os.getpid() % 250
    ours, theirs = f"10.213.{number}.1", f"10.213.{number}.2"
    make = f"""
        ip netns add {name}
        ip link add {name}a type veth peer name {name}b netns {name}
        ip addr add {ours}/30 dev {name}a
        ip link set {name}a up
        ip -n {name} addr add {theirs}/30 dev {name}b
        ip -n {name} link set {name}b up
        ip -n {name} link set lo up
    """
    if shutil.which("ip") is None:
        pytest.skip("a second Ray node needs iproute2 and the right to make a network namespace")
    done = [subprocess.run(c.split(), capture_output=True) for c in make.strip().splitlines()]
    if any(one.returncode for one in done):
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        pytest.skip(f"no network namespace: {done[0].stderr.decode() or done[1].stderr.decode()}")
    yield name, ours, theirs
    subprocess.run(["ip", "netns", "del", name], check=True)  # and with it the pair of devices


@pytest.fixture(params=[1, 2], ids=["one node", "two nodes"])
def ray_cluster(request, ray_python, patched):
    """A cluster that was started beforehand, with two GPUs in all that are not there."""
    python, nodes = ray_python, request.param
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    # Recent versions of Ray refuse a cluster without a token.
    token = dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16))
    code = "import ray, sys; print(sys.executable, ray.util.get_node_ip_address())"
    executable, ip = python(patched, "-c", code).stdout.split()
    start = [executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"]
    start += ["--num-cpus=4", f"--num-gpus={2 // nodes}", "--object-store-memory=100000000"]
    addresses, inside = [ip], []
    if nodes == 2:
        name, *addresses = request.getfixturevalue("namespace")
        inside = ["ip", "netns", "exec", name]
    head = [
        *start,
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    second = [*inside, *start, f"--address={addresses[0]}:{port}"]
    # Ray's socket paths must stay below 107 bytes.
    places = [f"/tmp/ray-wenv-{os.getpid()}-{n}" for n in range(nodes)]
    started = [
        subprocess.Popen(
            [*command, f"--node-ip-address={address}", f"--temp-dir={place}"],
            env={**os.environ, "PYTHONPATH": f"{patched}/python", **token},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for command, address, place in zip((head, second), addresses, places, strict=False)
    ]
    try:
        yield f"{addresses[0]}:{port}", token, addresses
    finally:
        for node in reversed(started):
            node.terminate()
            node.wait(60)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


def test_ray_actors(ray_python, patched, tmp_path, ray_cluster):
    python = ray_python
    driver, model = _driver(tmp_path, RAY)
    (address, token, addresses), arguments = ray_cluster, dict(ARGUMENTS, model_path=model)
    pairs = ["NCCL_ALGO=Ring", "NCCL_NET_PLUGIN=$HOME", "SGLANG_CPU_OMP_THREADS_BIND=0"]
    pairs += ["NCCL_SOCKET_IFNAME@tp0=eth1", "NCCL_NET@node0=Socket"]
    run = python(
        patched,
        *(driver, address, json.dumps(pairs), json.dumps(arguments), len(addresses)),
        **token,
    )
    result = _result(run)
    # What stock SGLang does: nothing of the driver's environment arrives.
    assert {values.pop("ip") for values in result["stock"]} == set(addresses)
    assert not any(value for values in result["stock"] for value in values.values())
    tp0, tp1 = result["patched"]
    assert tp0["NCCL_ALGO"] == tp1["NCCL_ALGO"] == "Ring"
    assert (tp0["NCCL_SOCKET_IFNAME"], tp1["NCCL_SOCKET_IFNAME"]) == ("eth1", "")
    second = "" if len(addresses) == 2 else "Socket"
    assert (tp0["NCCL_NET"], tp1["NCCL_NET"]) == ("Socket", second)
    (scheduler,) = result["scheduler"]
    assert scheduler["process"] == "scheduler"
    assert _value(scheduler, "NCCL_ALGO") == ("Ring", "user")
    assert _value(scheduler, "NCCL_SOCKET_IFNAME") == ("eth1", "user")
    assert _value(scheduler, "NCCL_DEBUG") == (None, None)
    assert _value(scheduler, "CUDA_VISIBLE_DEVICES")[1] == "ray"
    # Ray expands "$" in a runtime_env; the scheduler restores the value.
    assert tp0["NCCL_NET_PLUGIN"] == str(Path.home())
    assert _value(scheduler, "NCCL_NET_PLUGIN") == ("$HOME", "user")
