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
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from ci.sglang_env import sglang_python
from sglang_overlay.patchset.pin import Pin

from ..pins import NEWEST, pins_with
from .conftest import Python, runner
from .test_worker_env import ARGUMENTS, driver, result_of, value_of

ACTORS = '''
import ctypes, json, os, sys
import ray
from sglang.srt.ray import engine as ray_engine
from sglang.srt.runtime_context import publish
from sglang.srt.server_args import ServerArgs
from ray.util.placement_group import placement_group


class Probe:
    """What an actor that SGLang creates has from Ray, without a model."""

    def __init__(self, **kwargs):
        pass

    def get_info(self):
        getenv = ctypes.CDLL(None).getenv
        getenv.restype = ctypes.c_char_p
        names = ("NCCL_DEBUG", "NCCL_ALGO", "NCCL_SOCKET_IFNAME", "NCCL_NET", "NCCL_NET_PLUGIN")
        values = {name: (getenv(name.encode()) or b"").decode() for name in names}
        return values | {"ip": ray.util.get_node_ip_address()}


if __name__ == "__main__":
    os.environ["NCCL_DEBUG"] = "WARN"  # in the driver, after ray start
    ray.init(address=sys.argv[1], log_to_driver=False)
    nodes = int(sys.argv[2])
    group = placement_group([{"CPU": 1, "GPU": 2 // nodes}] * nodes, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    sizes = dict(tp_size=2, nnodes=nodes)
    args = ServerArgs(model_path="dummy", device="cpu", **sizes, **json.loads(sys.argv[3]))
    args.resolve_once()
    publish(args, role="tokenizer")
    ray_engine.SchedulerActor = ray.remote(Probe)
    actors = [
        ray_engine._create_scheduler_actor(
            pg=group, bundle_idx=tp % nodes, gpu_id=0, server_args=args, port_args=None,
            tp_rank=tp, pp_rank=0, dp_rank=0, dist_init_addr="", rank0_node_ip="",
        )
        for tp in range(2)
    ]
    print("RESULT=" + json.dumps(ray.get([a.get_info.remote() for a in actors])), flush=True)
'''

ENGINE = """
import json, os, sys
if __name__ == "__main__":
    import ray
    from sglang.srt.ray.engine import RayEngine
    os.environ["NCCL_DEBUG"] = "WARN"
    ray.init(address=sys.argv[1], log_to_driver=False)
    engine = RayEngine(**json.loads(sys.argv[3]))
    # The event loop of a Ray actor asks for a CUDA device: no request can be served here.
    reports = engine._scheduler_init_result.scheduler_infos[0]["worker_env_reports"]
    print("RESULT=" + json.dumps(reports), flush=True)
    engine.shutdown()
"""

# RayEngine itself (0.5.23's) stops before it makes this controller, also without our patches: it
# declares dist_init_addr when the configuration is published already.
CONTROLLER = """
import json, os, sys
if __name__ == "__main__":
    import ray
    from ray.util.placement_group import placement_group
    from sglang.srt.ray.data_parallel_controller import RayDataParallelController
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, ServerArgs
    os.environ["NCCL_DEBUG"] = "WARN"
    ray.init(address=sys.argv[1], log_to_driver=False)
    strategy = "PACK" if sys.argv[2] == "1" else "STRICT_SPREAD"
    group = placement_group([{"CPU": 1, "GPU": 1}] * 2, strategy=strategy)
    ray.get(group.ready())
    args = ServerArgs(**json.loads(sys.argv[3]))
    args.resolve_once()
    publish(args, role="tokenizer")
    ip, ports = ray.util.get_node_ip_address(), PortArgs.init_new(args)
    controller = RayDataParallelController(args, ports, group, None, ip, True)
    if hasattr(controller, "get_init_info"):
        reports = controller.get_init_info()["worker_env_reports"]
    else:  # 0.5.22 puts its answer together in RayEngine
        from sglang.srt.utils.worker_env_report import merge_reports
        reports = merge_reports(controller.scheduler_infos)
    print("RESULT=" + json.dumps(reports), flush=True)
"""


@pytest.fixture(scope="module")
def ray_python(tmp_path_factory):
    """Runs python with Ray and a pin's rest, in an environment of its own over that of the rest."""

    @cache
    def make(pin):
        place = tmp_path_factory.mktemp("ray")
        venv.create(place, with_pip=True)
        executable = place / "bin/python"
        below = sglang_python(pin.version).parents[1] / "lib/python3.11/site-packages"
        (place / "lib/python3.11/site-packages/below.pth").write_text(f"{below}\n")
        subprocess.run([executable, "-m", "pip", "install", "-q", "ray"], check=True)
        return runner(executable)

    return make


@pytest.fixture(scope="module")
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


@dataclass(frozen=True)
class Cluster:
    """Where it is, and what runs there."""

    pin: Pin
    python: Python
    patched: Path
    token: dict[str, str]
    addresses: list[str]
    port: int

    def run(self, source, file, arguments):
        """Run ``file`` on ``source`` in a driver of this cluster."""
        address = f"{self.addresses[0]}:{self.port}"
        given = (file, address, len(self.addresses), json.dumps(arguments))
        return self.python(source, *given, **self.token)


#: A pin and how many nodes. What Ray loses and what a node is are the newest pin's; an older one
#: has the reports, which its own code gathers.
NEWEST_CLUSTERS = [(NEWEST, 1), (NEWEST, 2)]
OLDER_CLUSTERS = [(pin, 1) for pin in pins_with("worker-env-report") if pin != NEWEST]


def named(cluster):
    return f"{cluster[0].name}-{cluster[1]}"


@pytest.fixture(scope="module", params=NEWEST_CLUSTERS + OLDER_CLUSTERS, ids=named)
def ray_cluster(request, ray_python, trees):
    """A cluster that was started beforehand, with two GPUs in all that are not there."""
    pin, nodes = request.param
    python, patched = ray_python(pin), trees(pin, True)
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
        yield Cluster(pin, python, patched, token, addresses, port)
    finally:
        for node in reversed(started):
            node.terminate()
            node.wait(60)
        for place in places:
            shutil.rmtree(place, ignore_errors=True)


PAIRS = [
    "NCCL_ALGO=Ring",
    "NCCL_NET_PLUGIN=$HOME",
    "NCCL_SOCKET_IFNAME@tp0=eth1",
    "NCCL_NET@node0=Socket",
]


@pytest.mark.parametrize("ray_cluster", NEWEST_CLUSTERS, ids=named, indirect=True)
def test_what_the_driver_has_is_lost_and_what_it_gives_arrives(trees, tmp_path, ray_cluster):
    addresses = ray_cluster.addresses
    file, _ = driver(tmp_path, ACTORS)
    lost, delivered = (
        result_of(ray_cluster.run(source, file, arguments))
        for source, arguments in (
            (trees(ray_cluster.pin, False), {}),
            (ray_cluster.patched, {"worker_env": PAIRS}),
        )
    )
    assert {values.pop("ip") for values in lost} == set(addresses)
    assert not any(value for values in lost for value in values.values())
    tp0, tp1 = delivered
    assert tp0["NCCL_ALGO"] == tp1["NCCL_ALGO"] == "Ring"
    assert (tp0["NCCL_SOCKET_IFNAME"], tp1["NCCL_SOCKET_IFNAME"]) == ("eth1", "")
    second = "" if len(addresses) == 2 else "Socket"
    assert (tp0["NCCL_NET"], tp1["NCCL_NET"]) == ("Socket", second)
    assert tp0["NCCL_NET_PLUGIN"] == str(Path.home())  # Ray expands "$" in a runtime_env


def test_the_schedulers_in_ray_actors_report(tmp_path, ray_cluster):
    drivers = [("controller", CONTROLLER, 2)]
    if len(ray_cluster.addresses) == 1:
        drivers.append(("engine", ENGINE, 1))
    for name, code, dp_size in drivers:
        (tmp_path / name).mkdir()
        check_reports(ray_cluster, tmp_path / name, code, dp_size)


def check_reports(ray_cluster, folder, code, dp_size):
    file, model = driver(folder, code)
    pairs = [*PAIRS, "SGLANG_CPU_OMP_THREADS_BIND=0|1", "CUDA_CACHE_TOKEN=s3cret"]
    pairs += ["NCCL_DEBUG_FILE@dp1=/tmp/one"] if dp_size == 2 else []
    arguments = dict(ARGUMENTS, model_path=model, dp_size=dp_size, worker_env=pairs)
    run = ray_cluster.run(ray_cluster.patched, file, arguments)
    reports = result_of(run)
    assert [report["ranks"]["dp"] for report in reports] == list(range(dp_size))
    assert len({report["pid"] for report in reports}) == dp_size
    for report in reports:
        assert report["process"] == "scheduler"
        assert value_of(report, "NCCL_ALGO") == ("Ring", "user")
        assert value_of(report, "NCCL_SOCKET_IFNAME") == ("eth1", "user")
        assert value_of(report, "NCCL_NET_PLUGIN") == ("$HOME", "user")  # restored
        assert value_of(report, "CUDA_CACHE_TOKEN") == ("<redacted>", "user")
        assert value_of(report, "NCCL_DEBUG") == (None, None)
        assert value_of(report, "CUDA_VISIBLE_DEVICES")[1] == "ray"
    files = [value_of(report, "NCCL_DEBUG_FILE")[0] for report in reports]
    assert files == [None, "/tmp/one"][:dp_size]
    assert "s3cret" not in run.stdout + run.stderr
