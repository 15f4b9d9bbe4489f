"""Which EAGLE passes the attention backend runs in a CUDA graph.

Each pin's table is made from its source by ``ci/spec_graph_survey.py``; a test holds them true.
"""

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..facts import Facts, Server
from ..finding import Finding, error, ok, unknown, warning

_PATCH = "eagle-flashinfer-mla-draft-extend-graph"
_KV_PATCH = "eagle-flashinfer-mla-draft-kv-lens"
#: The row whose draft steps do not read their own KV without it.
_BLIND = "flashinfer, MLA"
_SWITCH = "SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH"
_TRUE = {"1", "true", "yes", "y"}
_ALGORITHMS = {"EAGLE", "EAGLE3", "NEXTN", "STANDALONE"}
_WHY = (
    "an eager pass launches every kernel from the host, each cycle: measured on one H200, a small "
    "Llama with EAGLE-3 went from 3.8 to 5.6 ms a cycle with only draft-extend eager"
)

_HINT = (
    "Triton for MLA models, FlashInfer for others; FlashInfer with an MLA drafter leaves "
    "draft-extend eager without our patch. Give the server's arguments after -- to check them"
)
_GIVE = "sglang-overlay doctor -- the server's arguments, with models by their folders"


@dataclass(frozen=True)
class Passes:
    """A row of the table for each pass (the target verifies, the drafter does the others), and
    what the table says of it: "captured", "eager" or "refused"."""

    rows: dict[str, str]
    verdicts: dict[str, str]

    def __str__(self) -> str:
        return ", ".join(f"{name} {verdict}" for name, verdict in self.verdicts.items())

    @property
    def backends(self) -> str:
        """Each row once, in the order of the passes."""
        return " and ".join(dict.fromkeys(self.rows.values()))

    def having(self, verdict: str) -> list[str]:
        """The passes of which the table says this."""
        return [name for name, said in self.verdicts.items() if said == verdict]


@cache
def table(pin: str) -> dict[str, dict[str, list[str]]]:
    """Backend -> pass -> [stock verdict, patched verdict], for SM120."""
    text = files(__package__).joinpath(f"eagle_graphs/{pin}.json").read_text(encoding="utf-8")
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
                "by --disable-decode-cuda-graph, --cuda-graph-backend-decode or their older names",
                _WHY.replace("with only draft-extend eager", "and 29 ms with every pass eager"),
                "leave --disable-cuda-graph and its newer names out",
            )
        ]
    if objection := _objection(facts):
        return [unknown(id, *objection)]
    if not _says_anything(server):
        if not facts.cards:
            return [unknown(id, "neither the cards nor the server's arguments are known", _GIVE)]
        return [ok(id, "every pass in a graph, with SGLang's default backend", _HINT)]
    environ = facts.settings.environ
    patched = _PATCH in (facts.active or ())
    kinds = _kinds(server)
    rows = [_rows(server, target, drafter) for target, drafter in kinds]
    known = table(facts.pin)
    if strange := {row for one in rows for row in one.values()} - known.keys():
        return [
            unknown(id, f"{', '.join(sorted(strange))} is not in the table: {', '.join(known)}")
        ]
    found = [Passes(one, {p: known[row][p][patched] for p, row in one.items()}) for one in rows]
    if environ.get(_SWITCH, "").lower() in _TRUE and not any(x.having("refused") for x in found):
        title = "draft-extend is eager: it is switched off"
        return [warning(id, title, f"{_SWITCH}={environ[_SWITCH]}", _WHY, f"unset {_SWITCH}")]
    bad = [one for one in found if set(one.verdicts.values()) != {"captured"}]
    if bad and any(one.verdicts != bad[0].verdicts for one in found):
        whose = (
            "the draft model" if server.own_drafter and server.draft_mla is None else "the model"
        )
        text = f"whether {whose} has MLA is not known; with {bad[0].backends}: {bad[0]}"
        return [unknown(id, text, _GIVE)]
    worst = bad[0] if bad else found[0]
    mends = all(known[worst.rows[p]][p][True] == "captured" for p in worst.having("eager"))
    return [_verdict(id, worst, server, mends)]


def draft_kv(facts: Facts) -> list[Finding]:
    """Each draft decode step reads the KV of the draft tokens before it."""
    server, id = facts.server, "draft-kv"
    if not server.draft_decode or not _says_anything(server) or _objection(facts):
        return []
    rows = {_rows(server, *kind)["draft"] for kind in _kinds(server)}
    if _BLIND not in rows:
        return []
    if server.dcp > 1:
        return [unknown(id, f"{_BLIND}: with decode context parallelism nobody looked")]
    if facts.active is None:
        return [unknown(id, f"{_BLIND}: whether the patch {_KV_PATCH} is active is not known")]
    if _KV_PATCH in facts.active:
        return [ok(id, "draft steps read the draft tokens before them", f"by {_KV_PATCH}")]
    if len(rows) > 1:
        return [unknown(id, f"whether it drafts with {' or '.join(sorted(rows))}", _GIVE)]
    return [
        warning(
            id,
            f"{_BLIND}: draft steps do not read the draft tokens before them",
            "SGLang plans draft decode with the length of the prefix alone",
            "the text is right, but drafts from the second on may be accepted less often: measured "
            "on one H200, with a drafter whose attention alone carries the token, an accept length "
            "of 1.75 in place of 2.32",
            f"--speculative-draft-attention-backend triton, or the patch {_KV_PATCH}",
        )
    ]


def _objection(facts: Facts) -> tuple[str, str] | None:
    """Why the table says nothing of this server, and what would help."""
    server = facts.server
    if server.unread:
        return f"{' and '.join(server.unread)} is not read here", "give what it holds as arguments"
    if server.algorithm and server.algorithm.upper() not in _ALGORITHMS:
        return f"nothing is known here of {server.algorithm}", ""
    if facts.cards and min(gpu.capability for gpu in facts.cards) < (12, 0):
        return "the table is for SM120, and these cards are not", ""
    if server.deterministic and server.attention_backend is None:
        return "deterministic inference has other defaults", "give --attention-backend"
    return None


def _says_anything(server: Server) -> bool:
    backends = (server.attention_backend, server.prefill_backend, server.decode_backend)
    models = (server.mla, server.draft_mla)
    return any(one is not None for one in (*backends, server.draft_backend, *models))


def _kinds(server: Server) -> list[tuple[bool, bool]]:
    """Whether target and drafter have MLA, for each way in which that can be."""
    targets = [True, False] if server.mla is None else [server.mla]
    if not server.own_drafter:
        return [(target, target) for target in targets]
    drafters = [True, False] if server.draft_mla is None else [server.draft_mla]
    return [(target, drafter) for target in targets for drafter in drafters]


def _rows(server: Server, target: bool, drafter: bool) -> dict[str, str]:
    """The row of the table for each pass. On SM120 SGLang's default is Triton for MLA models
    and FlashInfer for others (``get_default_attn_backend``), by the target."""
    base = server.attention_backend or ("triton" if target else "flashinfer")
    prefill, decode = server.prefill_backend or base, server.decode_backend or base
    follows = decode if server.attention_mode == "decode" else prefill
    return {
        "draft": _row(server.draft_backend or decode, drafter),
        "verify": _row(follows, target),
        "draft-extend": _row(server.draft_backend or follows, drafter),
    }


def _row(backend: str, mla: bool) -> str:
    return f"flashinfer, {'MLA' if mla else 'MHA'}" if backend == "flashinfer" else backend


def _verdict(id: str, passes: Passes, server: Server, patch_mends: bool) -> Finding:
    text = ", ".join(f"{name} {passes.verdicts[name]} ({row})" for name, row in passes.rows.items())
    refused, eager = passes.having("refused"), passes.having("eager")
    drafter_alone = server.draft_backend and "verify" not in [*refused, *eager]
    option = "speculative-draft-attention-backend" if drafter_alone else "attention-backend"
    if refused:
        return error(
            id,
            f"{passes.backends}: no server with EAGLE on SM120",
            text,
            "SGLang refuses this backend with speculation",
            f"--{option} triton",
        )
    if not eager:
        return ok(id, f"{passes.backends}: every pass in a graph", text)
    return warning(
        id,
        f"{passes.backends}: {', '.join(eager)} is eager",
        text,
        _WHY,
        f"--{option} triton" + f", or the patch {_PATCH}" * patch_mends,
    )
