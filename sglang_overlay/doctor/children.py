"""What is run by the Python that runs the server, which need not be ours: source text for
``python -c``, standard library and torch only, each printing one line of JSON."""

#: Installed versions, what they ask for, sitecustomize files, compilers; imports nothing.
INSTALLED = r"""
import importlib.metadata, json, os, re, shutil, sys, sysconfig
names = ("sglang", "sglang-kernel", "flashinfer-python", "torch", "triton")
names += ("nvidia-nccl-cu12", "nvidia-nccl-cu13", "nvidia-cuda-nvcc", "ninja", "sglang-overlay")
versions, wanted, library = {}, {}, ""
for name in names:
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        continue
    versions[name] = found.version
    for line in found.requires or () if name in ("sglang", "torch") else ():
        match = re.match(r"([\w.-]+)(?:\[[^]]*\])?\s*==\s*([\w.+!-]+)\s*(?:;(.*))?$", line)
        if match and "extra ==" not in (match[3] or ""):
            wanted[re.sub(r"[-_.]+", "-", match[1]).lower()] = match[2]
    for file in found.files or () if name.startswith("nvidia-nccl") else ():
        if file.name == "libnccl.so.2":
            library = str(found.locate_file(file))
paths = [os.path.join(folder, "sitecustomize.py") for folder in sys.path if folder]
home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
if home is None:
    which = shutil.which("nvcc")
    home = os.path.dirname(os.path.dirname(which)) if which else "/usr/local/cuda"
nvcc = os.path.join(home, "bin", "nvcc")
print(json.dumps({
    "version": sys.version.split()[0],
    "versions": versions,
    "wanted": {name: version for name, version in wanted.items() if name in names},
    "sitecustomize": [path for path in dict.fromkeys(paths) if os.path.isfile(path)],
    "nvcc": nvcc if os.access(nvcc, os.X_OK) else None,
    "cuda_home": home,
    "libnccl": library,
    "purelib": sysconfig.get_path("purelib"),
}))
"""

#: What torch says of CUDA, and which NCCL it has really loaded.
TORCH = r"""
import json, warnings
import torch
problem = ""
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        problem = str(error).splitlines()[0]
    usable = torch.cuda.is_available()
if not usable and not problem:
    problem = "; ".join(str(w.message) for w in caught) or "torch.cuda.is_available() is False"
try:
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
except (AttributeError, RuntimeError, ImportError):
    nccl = ""
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda or "",
    "nccl": nccl,
    "archs": torch.cuda.get_arch_list() if usable else [],
    "devices": torch.cuda.device_count() if usable else 0,
    "problem": problem,
}))
"""

#: Copies between the pairs given on standard input as JSON; ``sys.argv[1]`` is the device type.
#: Says "start a b" before each pair, so that whoever waits knows which pair hangs.
COPIES = r"""
import json, statistics, sys, time
import torch
kind, small, large = sys.argv[1], 4096, int(sys.argv[2])
say = lambda **line: print(json.dumps(line), flush=True)
def name(index):
    return torch.device(kind, index) if kind == "cuda" else torch.device(kind)
def wait(*devices):
    if kind == "cuda":
        for device in devices:
            torch.cuda.synchronize(device)
def seconds(target, source, batch, rounds):
    times = []
    for _ in range(rounds):
        wait(source.device, target.device)
        start = time.perf_counter()
        for _ in range(batch):
            target.copy_(source, non_blocking=True)
        wait(source.device, target.device)
        times.append((time.perf_counter() - start) / batch)
    return statistics.median(times)
def copy(a, b):
    source = torch.randint(0, 256, (large,), dtype=torch.uint8, generator=random).to(name(a))
    target = torch.bitwise_not(source.cpu()).to(name(b))  # no byte is right before the copy
    wait(name(a), name(b))
    target.copy_(source)
    wait(name(a), name(b))
    sent, arrived = source.cpu(), target.cpu()
    wrong = int((sent != arrived).sum())
    peer = torch.cuda.can_device_access_peer(b, a) if kind == "cuda" else None
    latency = seconds(target[:small], source[:small], 100, 7)
    bandwidth = large / seconds(target, source, 4, 5) / 1e9
    return {"peer": peer, "wrong_bytes": wrong, "latency_us": latency * 1e6,
            "bandwidth": bandwidth, "result": "wrong" if wrong else "right"}
random = torch.Generator().manual_seed(1)
pairs = json.loads(sys.stdin.readline())
if kind == "cuda":
    torch.cuda.init()
say(event="ready")
for a, b in pairs:
    say(event="start", source=a, target=b)
    try:
        outcome = copy(a, b)
    except RuntimeError as error:
        outcome = {"result": "failed", "detail": str(error).splitlines()[0]}
    say(event="done", source=a, target=b, **outcome)
    if kind == "cuda" and outcome["result"] == "failed":
        sys.exit()  # CUDA's errors stay: in this process every later pair would fail as well
"""
