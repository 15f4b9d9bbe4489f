"""What is installed: versions against the pins, NCCL, torch, the patches."""

from ..facts import Facts, Torch, Unknown
from ..finding import Finding, error, ok, unknown, warning


def versions(facts: Facts) -> list[Finding]:
    """SGLang is a pin, and the others are what SGLang and torch ask for."""
    python = facts.python
    if isinstance(python, Unknown):
        return [unknown("versions", python.why)]
    have = python.versions
    if "sglang" not in have:
        return [
            unknown(
                "versions",
                f"SGLang is not installed for {python.executable}",
                "--python PATH of the environment that runs the server",
            )
        ]
    text = ", ".join(f"{name} {version}" for name, version in sorted(have.items()))
    wrong = {
        name: version
        for name, version in sorted(python.wanted.items())
        if _release(have.get(name, "")) != _release(version)
    }
    if wrong:
        return [
            error(
                "versions",
                "packages do not fit together",
                "; ".join(
                    f"{name} is {have.get(name, 'missing')}, SGLang or torch asks for {version}"
                    for name, version in wrong.items()
                ),
                "SGLang checks some of them at start and stops; kernels of another version may "
                "crash or be missing in a verify pass",
                f"{python.executable} -m pip install "
                + " ".join(f"'{name}=={version}'" for name, version in wrong.items()),
            )
        ]
    found = _release(have["sglang"])
    if facts.pins and found not in facts.pins:
        return [
            warning(
                "versions",
                f"SGLang {found} is no pin; there is {', '.join(facts.pins)}",
                text,
                "the patches are for exact bytes of a pin, and what this command knows of "
                "SGLang is read from the pins",
                f"{python.executable} -m pip install sglang=={facts.pin}",
            )
        ]
    return [ok("versions", f"SGLang {found} and what it asks for", text)]


def _release(version: str) -> str:
    """Without the local part: 2.14.1+cu130 is 2.14.1."""
    return version.partition("+")[0]


def nccl_library(facts: Facts) -> list[Finding]:
    """One NCCL is installed, and torch has loaded that one."""
    if isinstance(facts.python, Unknown):
        return []
    python, id = facts.python, "nccl-library"
    wheels = {n: v for n, v in python.versions.items() if n.startswith("nvidia-nccl")}
    why = (
        "both put libnccl.so.2 into one place, so torch gets the one that was installed last: "
        "undefined symbols at import, or an older NCCL in every all-reduce"
    )
    if len(wheels) > 1:
        keep = next((name for name in wheels if name in python.wanted), max(wheels))
        drop = next(name for name in wheels if name != keep)
        pip = f"{python.executable} -m pip"
        return [
            error(
                id,
                "two NCCL wheels are installed",
                ", ".join(f"{name} {version}" for name, version in wheels.items()),
                why,
                f"{pip} uninstall {drop} && {pip} install --force-reinstall --no-deps "
                f"{keep}=={wheels[keep]}",
            )
        ]
    loaded = "" if isinstance(python.torch, Unknown) else python.torch.nccl
    if not wheels or not loaded:
        return [unknown(id, "torch or its NCCL wheel is not there")]
    version = next(iter(wheels.values()))
    if loaded != version:
        paths = facts.settings.environ
        return [
            warning(
                id,
                f"torch has loaded NCCL {loaded}, the wheel is {version}",
                f"LD_LIBRARY_PATH={paths.get('LD_LIBRARY_PATH', '')!r}, "
                f"LD_PRELOAD={paths.get('LD_PRELOAD', '')!r}",
                "another libnccl comes first: what is tuned and measured is not what runs",
                "unset LD_PRELOAD LD_LIBRARY_PATH",
            )
        ]
    return [ok(id, f"NCCL {loaded}")]


def torch_works(facts: Facts) -> list[Finding]:
    """torch starts CUDA, and has kernels for these cards."""
    if isinstance(facts.python, Unknown):
        return []
    torch = facts.python.torch
    if isinstance(torch, Unknown):
        return [unknown("torch", torch.why)]
    text = f"torch {torch.version}, CUDA {torch.cuda or 'none'}, {torch.devices} devices"
    if torch.problem and not facts.cards:
        return [unknown("torch", f"{text}: {torch.problem}")]
    if torch.problem:
        return [
            error(
                "torch",
                "torch cannot use the cards",
                f"{text}: {torch.problem}",
                "no server starts before torch sees the cards",
                f"{facts.python.executable} -c 'import torch; torch.cuda.init()'",
            )
        ]
    if missing := sorted({g.capability for g in facts.cards if not _runs(torch, g.capability)}):
        names = ", ".join(f"sm_{major}{minor}" for major, minor in missing)
        return [
            error(
                "torch",
                f"this torch has no kernels for {names}",
                f"{text}; it has {', '.join(torch.archs)}",
                "every kernel fails with 'no kernel image is available'",
                f"{facts.python.executable} -m pip install "
                f"torch=={facts.python.wanted.get('torch', '2.14.1')}",
            )
        ]
    return [ok("torch", text)]


def _runs(torch: Torch, capability: tuple[int, int]) -> bool:
    """Code of one major version runs on its later minors; PTX on all later ones."""
    major, minor = capability
    for arch in torch.archs:
        digits = arch.partition("_")[2].rstrip("af")
        built = int(digits[:-1]), int(digits[-1])
        if arch.startswith("compute_") and built <= capability:
            return True
        if arch.startswith("sm_") and built[0] == major and built[1] <= minor:
            return True
    return not torch.archs


def patches(facts: Facts) -> list[Finding]:
    """Which of our patches the server will run."""
    if isinstance(facts.python, Unknown):
        return []
    active = facts.python.patches
    if isinstance(active, Unknown):
        return [unknown("patches", active.why)]
    if facts.settings.environ.get("SGLANG_OVERLAY") == "0":
        return [
            warning(
                "patches",
                "the overlay is switched off",
                "SGLANG_OVERLAY=0",
                "stock SGLang runs: with FlashInfer MLA, draft-extend is eager",
                "unset SGLANG_OVERLAY",
            )
        ]
    if facts.python.patch_problems:
        return [
            error(
                "patches",
                "the patches are not as they must be",
                "; ".join(facts.python.patch_problems),
                "import sglang fails, or runs a mixture that nobody has tested",
                "sglang-overlay verify",
            )
        ]
    if not active:
        return [
            warning(
                "patches",
                "no patch is active",
                f"SGLang of {facts.python.executable} is stock",
                "nothing says which speculative pass is eager, and with FlashInfer MLA one is",
                "sglang-overlay apply --sglang-dir DIR, or install the overlay wheel",
            )
        ]
    return [ok("patches", f"{len(active)} patches active", ", ".join(active))]
