"""What a Python start imports before SGLang."""

from ..facts import Facts, Unknown
from ..finding import Finding, ok, warning


def sitecustomize(facts: Facts) -> list[Finding]:
    """At most one ``sitecustomize.py`` is on the path: Python imports the first and no other."""
    if isinstance(facts.python, Unknown):
        return []
    files = facts.python.sitecustomize
    if len(files) < 2:
        return [ok("sitecustomize", files[0] if files else "none")]
    active = facts.active or ()
    place = "--worker-env" if "worker-env" in active else "the environment of the server"
    return [
        warning(
            "sitecustomize",
            f"{len(files)} sitecustomize.py files, of which only the first is read",
            "; ".join(files),
            "NCCL settings in the second one never reach a worker, and nothing says so",
            f"move the settings of {files[1]} to {place} or into {files[0]}",
        )
    ]
