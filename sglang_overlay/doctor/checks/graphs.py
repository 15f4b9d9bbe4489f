"""Which EAGLE passes the attention backend runs in a CUDA graph.

The table is made from SGLang's source by ``ci/spec_graph_survey.py``; a test holds it true.
"""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from ..facts import Facts, Unknown
from ..finding import Finding, error, ok, unknown, warning

_PATCH = "eagle-flashinfer-mla-draft-extend-graph"
_ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"}
_WHY = (
    "an eager pass launches every kernel from the host, each cycle: measured on one H200, a small "
    "Llama with EAGLE-3 went from 3.8 to 5.6 ms a cycle with only draft-extend eager"
)

_HINT = (
    "Triton for MLA models, FlashInfer for others; FlashInfer with an MLA drafter leaves "
    "draft-extend eager without our patch. Give the server's arguments after -- to check them"
)


@cache
def table() -> dict[str, dict[str, list[str]]]:
    """Backend -> pass -> [stock verdict, patched verdict], for SM120."""
    text = files(__package__).joinpath("eagle_graphs.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def eagle(facts: Facts) -> list[Finding]:
    """Every pass of the cycle is captured with this backend."""
    server, id = facts.server, "eagle-graphs"
    if not server.cuda_graph:
        return [
            warning(
                id,
                "CUDA graphs are switched off",
                "--disable-cuda-graph",
                _WHY.replace("with only draft-extend eager", "and 29 ms with every pass eager"),
                "leave --disable-cuda-graph out",
            )
        ]
    if server.algorithm and server.algorithm.upper() not in _ALGORITHMS:
        return [unknown(id, f"nothing is known here of {server.algorithm}")]
    if facts.cards and min(gpu.capability for gpu in facts.cards) < (12, 0):
        return [unknown(id, "the table is for SM120, and these cards are not")]
    if server.attention_backend is None and server.mla is None:
        return [ok(id, "every pass in a graph, with SGLang's default backend", _HINT)]
    names = _rows(facts)
    if not names:
        known = ", ".join(table())
        return [unknown(id, f"{server.attention_backend} is not in the table: {known}")]
    patched = not isinstance(facts.python, Unknown) and _active(facts.python.patches)
    return [
        _verdict(id, name, {step: two[int(patched)] for step, two in table()[name].items()})
        for name in names
    ]


def _active(patches: object) -> bool:
    return isinstance(patches, tuple) and _PATCH in patches


def _rows(facts: Facts) -> list[str]:
    """The rows that the server's backend and model can mean. On SM120 SGLang's default is Triton
    for MLA models and FlashInfer for others (``get_default_attn_backend``)."""
    backend, mla = facts.server.attention_backend, facts.server.mla
    if backend is None:
        return ["triton" if mla else "flashinfer, MHA"]
    if backend != "flashinfer":
        return [backend] if backend in table() else []
    kinds = {True: ["flashinfer, MLA"], False: ["flashinfer, MHA"]}
    return kinds[mla] if mla is not None else [*kinds[False], *kinds[True]]


def _verdict(id: str, name: str, passes: dict[str, str]) -> Finding:
    text = ", ".join(f"{step} {verdict}" for step, verdict in passes.items())
    if "refused" in passes.values():
        return error(
            id,
            f"{name}: no server with EAGLE on SM120",
            text,
            "SGLang refuses this backend with speculation",
            "--attention-backend triton",
        )
    if "eager" not in passes.values():
        return ok(id, f"{name}: every pass in a graph", text)
    eager = ", ".join(step for step, verdict in passes.items() if verdict == "eager")
    return warning(
        id,
        f"{name}: {eager} is eager",
        text,
        _WHY,
        f"--attention-backend triton, or the patch {_PATCH}",
    )
