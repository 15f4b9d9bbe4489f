"""What the checks of EAGLE's passes say of a machine or a server that differs in one thing."""

from sglang_overlay.doctor.facts import Facts, Unknown
from sglang_overlay.doctor.finding import State

from .machine import NVLINK, PATCHES, WELL, environ, python, server, stock, versions

#: (id, state, facts, a pattern of its text)
GRAPH_CASES: list[tuple[str, State, Facts, str]] = [
    ("eagle-graphs", State.WARNING, server(WELL, cuda_graph=False), "leave --disable-cuda-graph"),
    (
        "eagle-graphs",
        State.WARNING,
        python(server(WELL, attention_backend="flashinfer", mla=True), patches=()),
        "flashinfer, MLA: draft-extend is eager",
    ),
    (
        "eagle-graphs",
        State.OK,
        server(WELL, attention_backend="flashinfer", mla=True),
        "every pass in a graph",
    ),
    ("eagle-graphs", State.OK, server(WELL, mla=True), "triton: every pass"),
    ("eagle-graphs", State.OK, server(WELL, mla=False), "flashinfer, MHA: every pass"),
    ("eagle-graphs", State.ERROR, server(WELL, attention_backend="fa3"), "no server with EAGLE"),
    (
        "eagle-graphs",
        State.UNKNOWN,
        server(WELL, attention_backend="triton", unread=("--config",)),
        "--config is not read here",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        environ(server(WELL, mla=True), SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH="1"),
        "it is switched off",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        environ(server(WELL, attention_backend="flashinfer", mla=True), SGLANG_OVERLAY="0"),
        "draft-extend is eager.* triton, or the patch eagle-flashinfer-mla-draft-extend-graph$",
    ),
    ("eagle-graphs", State.UNKNOWN, server(WELL, attention_backend="own"), "not in the table"),
    ("eagle-graphs", State.UNKNOWN, server(WELL, algorithm="NGRAM"), "NGRAM"),
    ("eagle-graphs", State.UNKNOWN, Facts(), "doctor -- the server's arguments"),
    (
        "eagle-graphs",
        State.OK,
        server(Facts(pins=PATCHES), attention_backend="triton"),
        "every",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        server(versions(WELL, sglang="0.5.22"), attention_backend="fa4"),
        "fa4: draft-extend is eager.*\n--attention-backend triton$",
    ),
    ("eagle-graphs", State.OK, server(WELL, attention_backend="fa4"), "fa4: every pass"),
    ("eagle-graphs", State.OK, WELL, "every pass in a graph, with SGLang's default backend"),
    # Kimi-K2.5 has MLA, its EAGLE-3 drafter is a small Llama
    (
        "eagle-graphs",
        State.OK,
        stock(attention_backend="flashinfer", mla=True, own_drafter=True, draft_mla=False),
        "flashinfer, MHA and flashinfer, MLA: every pass",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        stock(attention_backend="flashinfer", mla=False, own_drafter=True, draft_mla=True),
        "draft-extend is eager",
    ),
    (
        "eagle-graphs",
        State.UNKNOWN,
        stock(attention_backend="flashinfer", mla=True, own_drafter=True),
        "whether the draft model has MLA.*draft-extend eager",
    ),
    ("eagle-graphs", State.UNKNOWN, stock(attention_backend="flashinfer"), "whether the model has"),
    ("eagle-graphs", State.OK, server(WELL, attention_backend="flashinfer"), "every pass"),
    (
        "eagle-graphs",
        State.OK,
        stock(attention_backend="flashinfer", mla=True, draft_backend="triton"),
        "draft captured .triton., verify captured .flashinfer, MLA., draft-extend captured .triton",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        stock(attention_backend="triton", mla=True, draft_backend="flashinfer"),
        "draft-extend is eager.*--speculative-draft-attention-backend triton",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        stock(prefill_backend="flashinfer", decode_backend="triton", mla=True),
        "draft captured .triton.*draft-extend eager .flashinfer, MLA.",
    ),
    (
        "eagle-graphs",
        State.OK,
        stock(
            prefill_backend="flashinfer", decode_backend="triton", mla=True, attention_mode="decode"
        ),
        "triton: every pass",
    ),
    (
        "eagle-graphs",
        State.WARNING,
        stock(decode_backend="flashinfer", mla=True, attention_mode="decode"),
        "flashinfer, MLA: draft-extend is eager",
    ),
    (
        "eagle-graphs",
        State.ERROR,
        server(WELL, attention_backend="triton", draft_backend="fa3"),
        "no server.*--speculative-draft-attention-backend triton",
    ),
    ("eagle-graphs", State.UNKNOWN, NVLINK, "table is for SM120"),
    (
        "eagle-graphs",
        State.UNKNOWN,
        server(WELL, deterministic=True, mla=True),
        "deterministic.*\ngive --attention-backend$",
    ),
    (
        "draft-kv",
        State.WARNING,
        environ(server(WELL, attention_backend="flashinfer", mla=True), SGLANG_OVERLAY="0"),
        "do not read.*triton, or the patch eagle-flashinfer-mla-draft-kv-lens$",
    ),
    ("draft-kv", State.WARNING, stock(decode_backend="flashinfer", mla=True), "do not read"),
    # an MHA target has FlashInfer by default, and its drafter with it
    ("draft-kv", State.WARNING, stock(mla=False, own_drafter=True, draft_mla=True), "do not read"),
    ("draft-kv", State.OK, server(WELL, attention_backend="flashinfer", mla=True), "by eagle"),
    (
        "draft-kv",
        State.UNKNOWN,
        stock(attention_backend="flashinfer"),
        "flashinfer, MHA or flashinfer, MLA",
    ),
    (
        "draft-kv",
        State.UNKNOWN,
        server(WELL, attention_backend="flashinfer", mla=True, dcp=2),
        "context parallelism",
    ),
    (
        "draft-kv",
        State.UNKNOWN,
        python(server(WELL, attention_backend="flashinfer", mla=True), patches=Unknown()),
        "is active is not known",
    ),
]
