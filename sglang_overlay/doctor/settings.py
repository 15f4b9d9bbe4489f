"""Environment variables and NCCL's configuration files, as a server started here has them."""

import re
from collections.abc import Mapping
from pathlib import Path

from .facts import Maybe, Settings, Unknown

#: What the names of secrets contain. PWD and OLDPWD themselves are folders, and a "pass" alone
#: is one of the model's.
SECRET = (
    r"TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|PGPASS|[_-]PASS(?![a-z])|CREDENTIAL"
    r"|(?<=[\w-])(?<!OLD)PWD"
)
_SECRET = re.compile(SECRET, re.IGNORECASE)
_NAMES = re.compile(
    r"(NCCL|CUDA|NVIDIA|TORCH|PYTORCH|SGLANG|FLASHINFER|TRITON|OMP)_\w+|"
    r"LD_LIBRARY_PATH|LD_PRELOAD|PYTHONPATH"
)
REDACTED = "<redacted>"


def is_secret(name: str) -> bool:
    """Whether the value of ``name`` is not shown: the rule of the patch worker-env, and more."""
    return _SECRET.search(name) is not None


def read_settings(
    environ: Mapping[str, str], home: Path, system: Path = Path("/etc/nccl.conf")
) -> Settings:
    """``environ`` cut down to what matters here, and the files that it or NCCL name.

    NCCL reads ``NCCL_CONF_FILE``, else ``~/.nccl.conf``, and ``/etc/nccl.conf``, for what the
    environment does not set.
    """
    kept = {name: value for name, value in environ.items() if _NAMES.fullmatch(name)}
    conf: dict[str, str] = {}
    user = Path(environ["NCCL_CONF_FILE"]) if "NCCL_CONF_FILE" in environ else home / ".nccl.conf"
    read = []
    for file in (system, user):
        text = _text(file)
        if isinstance(text, str):
            conf |= _parse(text)
            read.append(str(file))
    settings = Settings(environ=kept, nccl_conf=conf)
    named = [settings.nccl[n] for n in ("NCCL_GRAPH_FILE", "NCCL_TOPO_FILE") if n in settings.nccl]
    return Settings(
        environ={n: REDACTED if is_secret(n) else v for n, v in kept.items()},
        nccl_conf={n: REDACTED if is_secret(n) else v for n, v in conf.items()},
        nccl_conf_file=", ".join(read),
        files={name: _text(Path(name)) for name in named},
    )


def _parse(text: str) -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    pairs = (line.partition("=") for line in lines if "=" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _text(file: Path) -> Maybe[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return Unknown(f"{error.strerror}")
