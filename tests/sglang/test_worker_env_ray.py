"""--worker-env with Ray: a cluster that was started beforehand, and the processes of the package.

Ray is installed for this alone; the cluster is told of GPUs that are not there.
"""

import json
import os
import secrets
import shutil
import socket
import subprocess
import venv
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python

from .conftest import runner
from .test_worker_env import ARGUMENTS, driver, result_of, value_of

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
    file, model = driver(tmp_path, RAY)
    (address, token, addresses), arguments = ray_cluster, dict(ARGUMENTS, model_path=model)
    pairs = ["NCCL_ALGO=Ring", "NCCL_NET_PLUGIN=$HOME", "SGLANG_CPU_OMP_THREADS_BIND=0"]
    pairs += ["NCCL_SOCKET_IFNAME@tp0=eth1", "NCCL_NET@node0=Socket"]
    run = python(
        patched,
        *(file, address, json.dumps(pairs), json.dumps(arguments), len(addresses)),
        **token,
    )
    result = result_of(run)
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
    assert value_of(scheduler, "NCCL_ALGO") == ("Ring", "user")
    assert value_of(scheduler, "NCCL_SOCKET_IFNAME") == ("eth1", "user")
    assert value_of(scheduler, "NCCL_DEBUG") == (None, None)
    assert value_of(scheduler, "CUDA_VISIBLE_DEVICES")[1] == "ray"
    # Ray expands "$" in a runtime_env; the scheduler restores the value.
    assert tp0["NCCL_NET_PLUGIN"] == str(Path.home())
    assert value_of(scheduler, "NCCL_NET_PLUGIN") == ("$HOME", "user")
