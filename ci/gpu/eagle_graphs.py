"""EAGLE with FlashInfer MLA on one GPU: draft-extend in a CUDA graph against eager, and speed.

usage: python3 eagle_graphs.py [--list] [--out DIR] [--budget SECONDS] CASE...

Each case starts an engine in a process of its own, prints RESULT lines and keeps its log and
traces under --out. Which SGLang runs is the environment's business: stock, or with the overlay
wheel; SGLANG_OVERLAY=0 gives the stock side of a pair. `--against A B` compares two traced cases,
`--equal A B` the tokens of any two, `--same A B` also fails where they differ, `--ties A B` says of
two traced ones why their tokens part. Exit 1 when a case failed or was left out.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from comparisons import FAILED, against, equal, result, shadow, ties

HERE = Path(__file__).resolve().parent
SPECULATION = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 2,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 3,
}
ENGINE = {
    "skip_tokenizer_init": True,
    "log_level": "info",
    "mem_fraction_static": 0.6,
    "max_total_tokens": 65536,  # small, so that several engines fit on one GPU
    "sampling_backend": "pytorch",
    "max_running_requests": 16,
    "disable_radix_cache": True,
    "cuda_graph_backend_prefill": "disabled",
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16],
    "attention_backend": "flashinfer",
    "model_path": "mtp",
    **SPECULATION,
}
EAGER = {"SGLANG_DISABLE_DRAFT_EXTEND_CUDA_GRAPH": "1"}
TRACE, SHADOW = {"HOOK_TRACE": "1"}, {"HOOK_TRACE": "1", "HOOK_SHADOW": "1"}
PCIE_IPC = {"HOOK_PCIE_IPC": "1"}
FA2, SPLIT, MEMORY = {"FORCE_FA2": "1"}, {"HOOK_SPLIT": "1"}, {"HOOK_MEMORY": "1"}
TRITON, NOSPEC = {"attention_backend": "triton"}, dict.fromkeys(SPECULATION)
#: So many layers that the GPU bounds a cycle, not the host. Speed asks nothing of the weights.
DEEP = {"load_format": "dummy", "json_model_override_args": '{"num_hidden_layers": 48}'}
#: An EAGLE-3 drafter with MLA and a vocabulary of its own, and the target that it goes with.
D2T = {
    "speculative_algorithm": "EAGLE3",
    "model_path": "eagle3/target",
    "speculative_draft_model_path": "eagle3/drafter",
}
#: The same with leads that no rounding turns over, for engines that round differently.
SURE = D2T | {"model_path": "sure/target", "speculative_draft_model_path": "sure/drafter"}
#: Several ranks (--tp). What one of them is given shows whether the report tells ranks apart.
TP = {"worker_env": ["NCCL_DEBUG=VERSION", "NCCL_DEBUG@tp1=WARN"]}
FUSION = "flashinfer_allreduce_fusion_backend"
FUSION_OFF = {"enforce_disable_flashinfer_allreduce_fusion": True}
#: name: (what is done, engine arguments that differ, environment)
CASES = {
    "flashinfer": ("speed", {}, {}),
    "flashinfer-eager": ("speed", {}, EAGER),
    "flashinfer-fa2": ("speed", {}, FA2),
    "flashinfer-nospec": ("speed", NOSPEC, {}),
    "triton": ("speed", TRITON, {}),
    "triton-nospec": ("speed", TRITON | NOSPEC, {}),
    "deep-flashinfer": ("speed", DEEP, {}),
    "deep-flashinfer-nospec": ("speed", DEEP | NOSPEC, {}),
    "deep-triton": ("speed", DEEP | TRITON, {}),
    "split": ("speed", {}, SPLIT),
    "split-triton": ("speed", TRITON, SPLIT),
    "graph": ("accept", {}, SHADOW),
    "eager": ("accept", {}, EAGER | TRACE),
    # SHADOW writes the eager pass's KV before each graph; these have the graph's own alone.
    "graph-alone": ("accept", {}, TRACE),
    "graph-alone-fa2": ("accept", {}, TRACE | FA2),
    "graph-fa2": ("accept", {}, SHADOW | FA2),
    "eager-fa2": ("accept", {}, EAGER | TRACE | FA2),
    "graph-fp8": ("accept", {"kv_cache_dtype": "fp8_e4m3"}, SHADOW),
    "graph-frspec": ("accept", {"speculative_token_map": "mtp/hot.pt"}, SHADOW),
    "graph-d2t": ("accept", D2T, SHADOW),
    "graph-d2t-alone": ("accept", D2T, TRACE),
    "eager-d2t": ("accept", D2T, EAGER | TRACE),
    # Accept lengths that the second draft decides: every pass in a graph, and none.
    "sure": ("timed", SURE, TRACE),
    "sure-eager": ("timed", SURE | {"disable_decode_cuda_graph": True}, TRACE),
    "sure-nospec": ("speed", SURE | NOSPEC | {"speculative_draft_model_path": None}, {}),
    "churn": ("churn", {}, SHADOW),
    "soak": ("soak", {}, MEMORY),
    "tp": ("timed", TP | FUSION_OFF, TRACE),
    "tp-trtllm": ("timed", TP | {FUSION: "trtllm"}, TRACE),
    "tp-measured": ("timed", TP | {FUSION: "measured"}, TRACE),
    "tp-eagle3": ("timed", TP | SURE | FUSION_OFF, TRACE),
    "tp-eagle3-measured": ("timed", TP | SURE | {FUSION: "measured"}, TRACE),
    # With the file of pinned_table.py as SGLANG_ALLREDUCE_TABLE.
    "tp-eagle3-pcie-ipc": ("timed", TP | SURE | {FUSION: "measured"}, TRACE | PCIE_IPC),
    **{
        # After tp-measured, whose table chose the fused kernel for some rows.
        f"tp-fail-{stage}": ("timed", TP | {FUSION: "measured"}, {"HOOK_FAIL": stage})
        for stage in ("preflight", "build", "self-test")
    },
    "refuse": ("refuse", {"speculative_require_cuda_graph": True}, EAGER),
}
_STAYED_ON = (
    "no rank said that the fusion is off; if its table has no fused row, none was brought up"
)
#: What the hook writes when it did what it was told.
HOOKS = {
    "HOOK_SHADOW": "shadow.jsonl",
    "HOOK_TRACE": "trace.pkl",
    "HOOK_SPLIT": "split.json",
    "HOOK_MEMORY": "memory.jsonl",
    "HOOK_FAIL": "failed",
    "HOOK_PCIE_IPC": "pcie_ipc",
}
#: Prompt lengths at and around a page of 64; 3 requests are padded to 4; 16 is the largest graph.
BATCHES = {
    1: [65],
    3: [1, 63, 129],
    16: [1, 2, 3, 31, 32, 33, 61, 62, 63, 64, 65, 127, 128, 129, 255, 600],
}
GREEDY = {"temperature": 0, "ignore_eos": True}


def prompt(length, salt):
    return [(7919 * (n + 1) + 104729 * salt) % 30000 + 5 for n in range(length)]


def speed(engine, tokens):
    """Milliseconds a cycle and tokens a second, batch 1: the median of five runs."""
    runs = []
    for count in (64, *[512] * 5):
        start = time.perf_counter()
        output = engine.generate(
            input_ids=[prompt(32, 0)], sampling_params=GREEDY | {"max_new_tokens": count}
        )[0]
        seconds = time.perf_counter() - start
        cycles = output["meta_info"].get("spec_verify_ct") or count
        runs.append((seconds / cycles * 1e3, count / seconds, count / cycles))
    cycle, rate, accepted = statistics.median(runs[1:])
    return {
        "cycle_ms": round(cycle, 3),
        "tps": round(rate, 1),
        "accept_length": round(accepted, 3),
        "cycle_ms_all": [round(run[0], 3) for run in runs[1:]],
    }


def accept(engine, tokens):
    """The tokens and verify passes of every request of BATCHES."""
    runs = []
    for size, lengths in BATCHES.items():
        # The largest batch shrinks: its requests end one after the other.
        counts = [max(tokens - 12 * n, 16) if size == 16 else tokens for n in range(size)]
        outputs = engine.generate(
            input_ids=[prompt(length, 100 * size + n) for n, length in enumerate(lengths)],
            sampling_params=[GREEDY | {"max_new_tokens": count} for count in counts],
            rid=[f"b{size}-{n}" for n in range(size)],
        )
        runs.append(
            {
                "bs": size,
                "prompt": lengths,
                "ids": [output["output_ids"] for output in outputs],
                "verify": [output["meta_info"]["spec_verify_ct"] for output in outputs],
            }
        )
    return {"runs": runs}


def timed(engine, tokens):
    """Both, of one engine: here ``speed`` has the drafts that its model accepts, none simulated."""
    return accept(engine, tokens) | speed(engine, tokens)


def churn(engine, tokens):
    """Requests that join while others run; every fourth is aborted."""

    async def one(number):
        await asyncio.sleep(0.15 * number)
        count = 60 + 40 * (number % 7)
        stream = await engine.async_generate(
            input_ids=prompt(3 + 29 * number, number),
            sampling_params=GREEDY | {"max_new_tokens": count},
            rid=f"c-{number}",
            stream=True,
        )
        length, stays = 0, number % 4 != 3
        async for output in stream:
            length = len(output["output_ids"])
            # Not before it decodes: an abort in the queue meets no verify pass.
            if length >= 20 and not stays:
                engine.tokenizer_manager.abort_request(rid=f"c-{number}")
                stays = True
        return length

    async def every():
        return await asyncio.gather(*map(one, range(24)), return_exceptions=True)

    found = engine.loop.run_until_complete(every())
    return {"lengths": [n if isinstance(n, int) else repr(n)[:80] for n in found]}


def soak(engine, tokens):
    """50,000 cycles, or seven minutes of them, at batch 4."""
    cycles, end = 0, time.monotonic() + 420
    while cycles < 50_000 and time.monotonic() < end:
        outputs = engine.generate(
            input_ids=[prompt(32, n) for n in range(4)],
            sampling_params=GREEDY | {"max_new_tokens": 3900},
        )
        cycles += max(output["meta_info"]["spec_verify_ct"] for output in outputs)
    return {"cycles": cycles}


def refuse(engine, tokens):
    """Only reached when an engine with an eager pass did start."""
    return {"refused": False}


def child(spec):
    """What an engine's own process does."""
    given = json.loads(spec)
    kind, tokens = given.pop("kind"), given.pop("tokens")
    import sglang

    start = time.perf_counter()
    engine = sglang.Engine(**given)
    started = round(time.perf_counter() - start, 1)
    work = {f.__name__: f for f in (speed, accept, timed, churn, soak, refuse)}[kind]
    print("CHILD", json.dumps(work(engine, tokens) | {"start_s": started}), flush=True)
    engine.shutdown()


def kind_of_model(name):
    return (ENGINE | CASES[name][1])["model_path"].partition("/")[0]


def run(name, options):
    kind, differing, environment = CASES[name]
    out = options.out / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    shutil.copy(HERE / "hook.py", out / "sitecustomize.py")
    engine = {k: v for k, v in (ENGINE | differing).items() if v is not None}
    engine |= {"kind": kind, "tokens": options.tokens}
    for key in ("model_path", "speculative_draft_model_path", "speculative_token_map"):
        if key in engine:
            engine[key] = str(options.models / engine[key])
    if name.partition("-")[0] == "tp":
        engine["tp_size"] = options.tp
    path = os.pathsep.join([str(out), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | environment | {"HOOK_OUT": str(out), "PYTHONPATH": path}
    if kind in ("speed", "soak") and "speculative_algorithm" in engine:
        environment["SGLANG_SIMULATE_ACC_LEN"] = "2.1"
    command = [sys.executable, str(HERE / "eagle_graphs.py"), "--child", json.dumps(engine)]
    log = out / "log"
    with log.open("w") as stream:
        try:
            code = subprocess.run(
                command, env=environment, stdout=stream, stderr=subprocess.STDOUT, check=False,
                timeout=options.timeout,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = "timeout"
    report(name, kind, code, log.read_text(errors="replace"), out)
    for switch in HOOKS.keys() & environment.keys():
        if not (out / HOOKS[switch]).exists():
            result(case=name, error=f"{switch}=1 saw nothing")


def report(name, kind, code, text, out):
    """The RESULT lines of one engine, from its log and from what the hook wrote."""
    found = re.findall(r"^CHILD (.*)$", text, re.MULTILINE)
    table = json.loads(found[-1]) if found else {}
    captured = re.search(r"Capture draft extend CUDA graph end\. (.*)", text)
    overlay = "sglang-overlay[" in text and "switched off by SGLANG_OVERLAY=0" not in text
    runs = table.pop("runs", [])
    if kind == "speed":
        name = f"dsv3-mtp-{name}-{'patched' if overlay else 'stock'}"
    fields = {"case": name, "rc": code, **table, "capture": captured and captured[1]}
    result(**fields, overlay=overlay, fa2="HOOK fa2 is forced" in text)
    if kind == "refuse":
        reasons = re.findall(r"^.*speculative-require-cuda-graph.*$", text, re.MULTILINE)
        return result(case=name, refused=not found and bool(reasons), why=reasons[-1:])
    if name.startswith("tp-fail"):
        off = Counter(re.findall(r"fusion is off on every rank: (.*)", text))  # a line a rank
        result(case=name, off=off, **({} if off else {"error": _STAYED_ON}))
    if not found:
        print("\n".join(text.splitlines()[-40:]), flush=True)
    (out / "runs.json").write_text(json.dumps(runs))
    for one in runs:
        lengths = [round(len(i) / v, 3) for i, v in zip(one["ids"], one["verify"], strict=True)]
        result(case=name, bs=one["bs"], accept_length=lengths)
    if (out / "split.json").exists():
        result(case=name, host_ms_a_cycle=json.loads((out / "split.json").read_text()))
    if (out / "memory.jsonl").exists():
        lines = [json.loads(line) for line in (out / "memory.jsonl").read_text().splitlines()]
        quarter = max(len(lines) // 4, 1)
        result(case=name, memory=[lines[0], *lines[quarter::quarter]])
    if (out / "pcie_ipc").exists():
        captured = Counter((out / "pcie_ipc").read_text().splitlines())
        result(case=name, captured_pcie_ipc_by_rank_and_rows=dict(sorted(captured.items())))
    if (out / "shadow.jsonl").exists():
        shadow(name, out / "shadow.jsonl")
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--against", nargs=2, action="append", default=[], metavar="CASE")
    parser.add_argument("--equal", nargs=2, action="append", default=[], metavar="CASE")
    parser.add_argument("--same", nargs=2, action="append", default=[], metavar="CASE")
    parser.add_argument("--ties", nargs=2, action="append", default=[], metavar="CASE")
    parser.add_argument("--out", type=Path, default=Path("/tmp/eagle-graphs"))
    parser.add_argument("--models", type=Path, default=Path("/tmp/models"))
    parser.add_argument("--tokens", type=int, default=512, help="new tokens a request")
    parser.add_argument("--tp", type=int, default=2, help="ranks of the cases tp...")
    parser.add_argument("--timeout", type=int, default=280, help="seconds for one case")
    parser.add_argument("--budget", type=int, default=470, help="start no case after these seconds")
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    if options.list:
        return print(*CASES, sep="\n")
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there is {', '.join(CASES)}")
    start = time.monotonic()
    # In a child, so that this process holds no CUDA context beside the engines'.
    for model in sorted({kind_of_model(name) for name in options.cases}):
        make = [sys.executable, str(HERE / "model.py"), model, str(options.models / model)]
        subprocess.run(make, check=True)
    for name in options.cases:
        if time.monotonic() - start > options.budget:
            result(case=name, skipped="out of time")
        else:
            run(name, options)
    for pair in options.against:
        against(*pair, options)
    for pair in options.equal:
        equal(*pair, options)
    for pair in options.same:
        equal(*pair, options, wanted=True)
    for pair in options.ties:
        ties(*pair, options)
    return 1 if FAILED else 0


if __name__ == "__main__":
    sys.exit(main())
