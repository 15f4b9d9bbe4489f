"""Put beside an engine as ``sitecustomize.py``: watches the passes of its scheduler child.

Environment: HOOK_OUT (where to write), and what to do: HOOK_TRACE=1 keeps draft logits, hidden
states, accept lengths and the best verify logits of each cycle of the requests b<size>-<n>;
HOOK_SHADOW=1 also runs the eager draft-extend before each graph, on the same inputs, and compares;
HOOK_SPLIT=1 times the parts of a cycle on the host; HOOK_MEMORY=1 writes down the scheduler's
memory now and then; FORCE_FA2=1 has FlashInfer MLA use the kernels that SM120 uses;
HOOK_FAIL=preflight, build or self-test has the last rank's bring-up of the fused all-reduce fail
there; HOOK_PCIE_IPC=1 writes down the rank and rows of each PCIe-IPC all-reduce that is captured.
"""

import importlib.abc
import importlib.util
import itertools
import json
import os
import pickle
import re
import sys
import time
from pathlib import Path

OUT = Path(os.environ.get("HOOK_OUT", "."))
CYCLES = range(400, 600)  # those that HOOK_SPLIT looks at


def on(name):
    return os.environ.get(name) == "1"


def force_fa2(module):
    stock = module.BatchMLAPagedAttentionWrapper
    module.BatchMLAPagedAttentionWrapper = lambda *a, **k: stock(*a, **{**k, "backend": "fa2"})
    print("HOOK fa2 is forced", flush=True)


def fail_on_the_last_rank(module):
    import torch.distributed as dist

    stage = os.environ["HOOK_FAIL"]
    owner, name = {
        "preflight": (module, "device_facts"),
        "build": (module, "module_objection"),
        "self-test": (module.SelfTest, "_close"),
    }[stage]
    stock = getattr(owner, name)

    def failing(*args):
        if dist.get_rank() < dist.get_world_size() - 1:
            return stock(*args)
        (OUT / "failed").touch()
        if stage == "self-test":
            return False  # a wrong number
        raise RuntimeError(f"made to fail at {stage}")

    setattr(owner, name, failing)


def watch_pcie_ipc(module):
    """Those in a graph: the server's own check of its sums is eager."""
    import torch
    import torch.distributed as dist

    stock = module.PcieIpcCommunicator.pcie_ipc_all_reduce

    def all_reduce(self, tensor):
        if torch.cuda.is_current_stream_capturing():
            with (OUT / "pcie_ipc").open("a") as stream:
                print(dist.get_rank(), tensor.shape[0], file=stream)
        return stock(self, tensor)

    module.PcieIpcCommunicator.pcie_ipc_all_reduce = all_reduce


def trace_worker(module):
    """Keep what each draft-extend returns, and the eight best tokens of each row of its verify.

    The draft's logits pass by in the worker's NaN check. The first rank alone writes.
    """
    import torch
    import torch.distributed as dist

    columns = torch.randperm(32000, generator=torch.Generator().manual_seed(1))[:1024]
    state = {}
    stream = (OUT / "trace.pkl").open("ab")
    stock = module.EagleDraftWorker._draft_extend_for_decode

    def keep(logits, what="", *args, **kwargs):
        if what.startswith("draft_extend_for_decode"):
            state["logits"] = logits

    def watched(request):
        return re.fullmatch(r"b\d+-\d+", request.rid)  # those that are timed have other names

    def draft_extend(self, batch, result, **kwargs):
        if batch.forward_mode.is_idle() or dist.get_rank() or not all(map(watched, batch.reqs)):
            return stock(self, batch, result, **kwargs)
        lengths = batch.seq_lens.tolist()
        best = result.logits_output.next_token_logits.float().topk(8)
        state["graph"] = False
        returned = stock(self, batch, result, **kwargs)
        logits, accepted = state.pop("logits"), result.accept_lens
        if logits.shape[0] != len(lengths):
            rows = torch.arange(len(lengths), device=accepted.device)
            logits = logits[rows * self.speculative_num_draft_tokens + accepted - 1]
        drafts = result.next_draft_input
        kept = columns[columns < logits.shape[1]].to(logits.device)
        entry = {
            "rid": [request.rid for request in batch.reqs],
            "lengths": lengths,
            "accepted": accepted.tolist(),
            "graph": state["graph"],
            "best": best.values.view(len(lengths), -1, 8).tolist(),
            "best_ids": best.indices.view(len(lengths), -1, 8).tolist(),
            "index": drafts.topk_index.flatten().tolist(),
            "nan": int(logits.isnan().sum()) + int(drafts.hidden_states.isnan().sum()),
            "logits": logits[:, kept].float().cpu().numpy(),
            "hidden": drafts.hidden_states.float().cpu().numpy(),
        }
        pickle.dump(entry, stream)
        stream.flush()
        return returned

    module.maybe_detect_nan = keep
    module.EagleDraftWorker._draft_extend_for_decode = draft_extend
    shadow_runner(module.EAGLEDraftExtendCudaGraphRunner, state)
    print("HOOK trace is on", flush=True)


def shadow_runner(runner, state):
    """Mark cycles that replay a graph; with HOOK_SHADOW compare each with the eager pass."""
    import copy

    stock_execute, stock_replay = runner.execute, runner._replay_graph
    stream = (OUT / "shadow.jsonl").open("a")

    def replay(self, key, batch):
        state["padded"] = output = stock_replay(self, key, batch)
        return output

    def execute(self, batch, select_index):
        state["graph"] = True
        if not on("HOOK_SHADOW"):
            return stock_execute(self, batch, select_index)
        eager = copy.copy(batch)
        eager.spec_info = copy.copy(batch.spec_info)
        model = self.eagle_worker.draft_runner
        model.attn_backend.init_forward_metadata(eager)
        eager.mark_forward_metadata_ready()
        wanted = model.forward(eager).logits_output
        logits = wanted.next_token_logits[select_index].float().clone()
        hidden = wanted.hidden_states[select_index].float().clone()
        output = stock_execute(self, batch, select_index)
        found, found_hidden = output.next_token_logits.float(), output.hidden_states.float()
        padded = state["padded"]
        rows = slice(batch.batch_size, self.bs)
        spare = [padded.next_token_logits[rows], padded.hidden_states[rows]]
        entry = {
            "bs": batch.batch_size,
            "graph_bs": self.bs,
            "dlogit": float((found - logits).abs().max()),
            "dhidden": float((found_hidden - hidden).abs().max()),
            "std": float(logits.std()),
            "flips": int((found.argmax(-1) != logits.argmax(-1)).sum()),
            "nan": int(found.isnan().sum()) + int(found_hidden.isnan().sum()),
            "padded_nan": sum(int(tensor.isnan().sum()) for tensor in spare),
            "kv_lens": batch.seq_lens_cpu.tolist(),
        }
        print(json.dumps(entry), file=stream, flush=True)
        return output

    runner.execute, runner._replay_graph = execute, replay


class Split:
    """Seconds that the host spends in each part, over CYCLES."""

    def __init__(self):
        self.parts, self.count, self.start = {}, 0, 0.0

    def watch(self, owner, name, label=None):
        import torch

        stock = getattr(owner, name)

        def timed(*args, **kwargs):
            part = label(*args) if label else name
            start = time.perf_counter()
            with torch.profiler.record_function(f"PART {part}"):
                result = stock(*args, **kwargs)
            self.parts[part] = self.parts.get(part, 0.0) + time.perf_counter() - start
            return result

        setattr(owner, name, timed)

    def cycle(self, scheduler):
        """Count the scheduler's batches; write the split after the last one of CYCLES."""
        stock = scheduler.run_batch

        def run_batch(this, *args, **kwargs):
            if self.count == CYCLES.start:
                self.parts, self.start = {}, time.perf_counter()
            if self.count == CYCLES.stop:
                wall = time.perf_counter() - self.start
                table = {"wall": wall, **self.parts}
                parts = {k: round(v / len(CYCLES) * 1e3, 3) for k, v in table.items()}
                (OUT / "split.json").write_text(json.dumps(parts))
            self.count += 1
            return stock(this, *args, **kwargs)

        scheduler.run_batch = run_batch
        for name in ("get_next_batch_to_run", "process_batch_result", "ingest_requests"):
            self.watch(scheduler, name)


SPLIT = Split()


def split_worker(module):
    SPLIT.watch(module.EagleDraftWorker, "draft")
    SPLIT.watch(module.EAGLEWorkerV2, "verify")
    SPLIT.watch(module.EagleDraftWorker, "_draft_extend_for_decode")


def split_backend(module):
    for value in list(vars(module).values()):
        own = isinstance(value, type) and value.__module__ == module.__name__
        if own and "init_forward_metadata_out_graph" in vars(value):
            SPLIT.watch(
                value,
                "init_forward_metadata_out_graph",
                lambda this, batch, *rest: f"plan {type(this).__name__} {batch.forward_mode.name}",
            )


def watch_memory(module):
    """Every 1,000 batches: torch's memory on the GPU and the process's own, in MiB."""
    import psutil
    import torch

    stock, count = module.Scheduler.run_batch, itertools.count()
    stream = (OUT / "memory.jsonl").open("a")

    def run_batch(this, *args, **kwargs):
        if (batch := next(count)) % 1000 == 999:
            gpu = torch.cuda.memory_allocated() >> 20, torch.cuda.memory_reserved() >> 20
            entry = {"batch": batch, "allocated": gpu[0], "reserved": gpu[1]}
            entry["resident"] = psutil.Process().memory_info().rss >> 20
            print(json.dumps(entry), file=stream, flush=True)
        return stock(this, *args, **kwargs)

    module.Scheduler.run_batch = run_batch


ATTENTION = "layers.attention"
PATCHES = {}


def patch(module, function, *, when):
    if when:
        PATCHES.setdefault(f"sglang.srt.{module}", []).append(function)


patch(f"{ATTENTION}.flashinfer_mla_backend", force_fa2, when=on("FORCE_FA2"))
patch("layers.flashinfer_fusion_bringup", fail_on_the_last_rank, when="HOOK_FAIL" in os.environ)
patch("distributed.device_communicators.pcie_ipc_ar", watch_pcie_ipc, when=on("HOOK_PCIE_IPC"))
patch("speculative.eagle_worker_v2", trace_worker, when=on("HOOK_TRACE"))
patch("speculative.eagle_worker_v2", split_worker, when=on("HOOK_SPLIT"))
patch("managers.scheduler", lambda m: SPLIT.cycle(m.Scheduler), when=on("HOOK_SPLIT"))
patch("managers.scheduler", watch_memory, when=on("HOOK_MEMORY"))
patch(f"{ATTENTION}.flashinfer_mla_backend", split_backend, when=on("HOOK_SPLIT"))
patch(f"{ATTENTION}.triton_backend", split_backend, when=on("HOOK_SPLIT"))


class Finder(importlib.abc.MetaPathFinder):
    """Runs a module's patches right after it; stays in front of the overlay, which moves there."""

    def find_spec(self, name, path=None, target=None):
        if name.startswith("sglang.") and sys.meta_path[0] is not self:
            sys.meta_path.remove(self)
            sys.meta_path.insert(0, self)
        patches = PATCHES.pop(name, None)
        if patches is None:
            return None
        spec = importlib.util.find_spec(name)
        stock = spec.loader.exec_module

        def exec_module(module):
            stock(module)
            for change in patches:
                change(module)

        spec.loader.exec_module = exec_module
        return spec


if PATCHES:
    sys.meta_path.insert(0, Finder())
