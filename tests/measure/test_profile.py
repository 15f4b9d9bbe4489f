"""A cycle's split, from a real trace and from ones whose answer is known."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_overlay.cli import main
from sglang_overlay.measure import stream
from sglang_overlay.measure.kernels import kind_of
from sglang_overlay.measure.profile import Capture, _pace, look
from sglang_overlay.measure.runs import Protocol, Run, Session
from sglang_overlay.measure.split import Split, split
from sglang_overlay.measure.store import open_store
from sglang_overlay.measure.trace import cycles, read

from . import failing
from .failing import plain, serving

# One H200, SGLang 0.5.23 stock, DeepSeek-V3-like model with MTP, Triton attention, TP 1. Of the
# whole trace: the spans of SGLang, the GPU's events and the calls that launched them.
H200 = Path(__file__).with_name("data") / "h200-dsv3-triton.trace.json.gz"
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def span(name: str, start: float, end: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 9,
        "tid": 9,
        "ts": start,
        "dur": end - start,
    }


def launch(number: int, at: float, call: str = "cudaLaunchKernel") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": call,
        "pid": 9,
        "tid": 9,
        "ts": at,
        "dur": 1,
        "args": {"correlation": number},
    }


def kernel(number: int, start: float, end: float, name: str = "some_kernel") -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "pid": 0,
        "tid": 7,
        "ts": start,
        "dur": end - start,
        "args": {"correlation": number},
    }


def eagle(count: int, verify: str = "cudaGraphLaunch") -> list[dict[str, Any]]:
    """Cycles of 1,000 us: the GPU is 60 us behind the host, and each pass has its own kernels."""
    events = []
    for cycle in range(count):
        at, first = 1000.0 * cycle, 10 * cycle
        events += [
            span("scheduler.run_batch", at, at + 800),
            span("draft", at + 100, at + 200),
            span("step[VERIFY bs=3]", at + 250, at + 400),
            span("draft_extend", at + 500, at + 600),
            launch(first, at + 110, "cudaGraphLaunch"),
            kernel(first, at + 170, at + 200, "_fwd_kernel"),
            launch(first + 1, at + 260, verify),
            kernel(first + 1, at + 320, at + 420, "nvjet_sm90_tst_8x64"),
            kernel(first + 1, at + 420, at + 620, NCCL),
            kernel(first + 1, at + 600, at + 640, "fused_moe_kernel"),  # hides 20 us of it
            launch(first + 2, at + 510),
            kernel(first + 2, at + 700, at + 750),
            launch(first + 3, at + 850),  # after the batch: the scheduler's own
            kernel(first + 3, at + 740, at + 780, "Memcpy DtoH (Device -> Pinned)"),
        ]
    return events


def parts(found: Split) -> dict[str, tuple[float, float]]:
    return {one.name: (one.gpu_ms, one.gap_ms) for one in found.passes}


def test_every_moment_of_a_cycle_belongs_to_one_pass_or_the_gap_before_it() -> None:
    found = split(cycles(eagle(6)))
    assert (found.cycles, found.batch_size, found.cycle_ms) == (3, 3, 1.0)
    assert parts(found) == {
        "draft": (0.03, 0.390),  # from the copy's end to the next cycle
        "verify": (0.32, 0.120),
        "extend": (0.05, 0.060),
        "other": (0.03, 0.0),
    }
    assert found.main.kinds == {"all-reduce": 0.18, "gemm": 0.14}
    assert [one.host_ms for one in found.passes] == [0.1, 0.3, 0.1, 0.5]
    assert [(one.count, one.each_us) for one in found.all_reduces] == [(1.0, 200.0)]
    kept = found.breakdown(cycle_ms=0.9)  # measured without the profiler
    assert kept.verify == {"all-reduce": 0.18, "attention": 0.0, "gemm": 0.14, "rest": 0.0}
    gpu = {"draft": 0.03, "verify": 0.32, "extend": 0.05}
    assert kept.phases == {**gpu, "host": pytest.approx(0.9 - sum(gpu.values()))}
    assert (kept.allreduces, kept.graphs["extend"]) == (1.0, "eager")


@pytest.mark.parametrize(
    ("call", "modes"),
    [
        ("cudaGraphLaunch", ["graph", "graph", "eager", ""]),
        ("cuLaunchKernelEx", ["graph", "eager", "eager", ""]),
    ],
)
def test_a_pass_without_a_graph_launch_is_eager(call: str, modes: list[str]) -> None:
    assert [one.mode for one in split(cycles(eagle(6, call))).passes] == modes


def test_a_pass_that_fell_back_now_and_then_is_named_so() -> None:
    events = eagle(8)
    for event in events:
        if event.get("args") == {"correlation": 31} and event["cat"] == "cuda_runtime":
            event["name"] = "cudaLaunchKernel"
    assert split(cycles(events)).main.mode == "graph in 4 of 5"


@pytest.mark.parametrize("alone", [True, False])
def test_a_prefill_between_cycles_is_no_part_of_one(alone: bool) -> None:
    events = eagle(9)
    batch = next(e for e in events if e["name"] == "scheduler.run_batch" and e["ts"] == 4000)
    if alone:
        events = [e for e in events if not 4000 <= e["ts"] < 5000]
    events += [batch, span("step[EXTEND bs=1 toks=32]", 4200, 4300)]
    found = split(cycles(events))
    assert (found.cycles, found.cycle_ms_all) == (4, (1.0,) * 4)


def test_what_runs_on_into_the_next_cycle_counts_there() -> None:
    events = eagle(6)
    for event in events:
        if event["cat"] == "kernel" and event["name"].startswith("Memcpy"):
            event["dur"] = 600.0  # 430 us until the next cycle begins, then 170
    found = split(cycles(events))
    assert sum(sum(pair) for pair in parts(found).values()) == pytest.approx(found.cycle_ms)
    # The next draft runs meanwhile, 30 us, and has them; verify begins 20 us before the copy's end.
    assert parts(found)["other"] == (pytest.approx(0.420 + 0.120), 0.0)
    assert parts(found)["draft"] == (pytest.approx(0.03), 0.0)


def test_the_passes_of_a_real_h200_trace_add_up_to_its_cycle() -> None:
    found = split(cycles(read(H200)))
    assert (found.cycles, found.batch_size) == (4, 1)
    assert sum(sum(pair) for pair in parts(found).values()) == pytest.approx(found.cycle_ms, 1e-3)
    assert [(one.name, one.mode) for one in found.passes[:3]] == [
        ("draft", "graph"),
        ("verify", "graph"),
        ("extend", "graph"),
    ]
    # 8 layers: the target's, and one MTP layer each in draft and extend.
    attention = [one for one in found.main_kernels if one.kind == "attention"]
    assert [(one.name, one.count) for one in attention] == [("_fwd_kernel", 8.0)]
    assert 0.9 < found.main.gpu_ms < 1.0 and found.main.all_reduces == 0


def test_without_speculation_the_cycle_is_a_decode_step() -> None:
    events = []
    for step in range(5):
        at = 500.0 * step
        events += [
            span("scheduler.run_batch", at, at + 300),
            span("step[DECODE bs=1]", at + 50, at + 250),
            launch(step, at + 60, "cudaGraphLaunch"),
            kernel(step, at + 100, at + 450, "nvjet_sm90"),
        ]
    found = split(cycles(events))
    assert parts(found) == {"decode": (0.35, 0.15), "other": (0.0, 0.0)}
    assert found.main.mode == "graph"


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (
            "all-reduce",
            [
                NCCL,
                "ncclDevKernel_AllReduce_Sum_bf16_TREE_LL(ncclDevKernelArgsStorage<4096ul>)",
                "void sglang::cross_device_reduce_1stage<__nv_bfloat16, 8>(sglang::RankData*)",
                "void all_reduce_1shot_push_kernel<__nv_bfloat16, 8u, true>(AllReducePushParams)",
                "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport"
                "<(flashinfer::AllReduceFusionPattern)1, __nv_bfloat16, 8, true>(Params)",
                "void flashinfer::comm::pcie_ipc::ipc_topo_rsag8_push_param_kernel<8>(Params)",
                "void flashinfer::comm::pcie_ipc::push_oneshot_param_kernel<2>(Params)",
                "void (anonymous namespace)::moe_finalize_all_reduce_kernel<7168u>(Params)",
                "void two_shot_all_reduce_kernel<c10::BFloat16, 16, 8>(c10::BFloat16**)",
            ],
        ),
        (
            "collective",
            [
                "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                "void flashinfer::comm::pcie_ipc::all_gather::flat_push_kernel(KernelParams)",
                "void reduce_scatter_pull_kernel(Params)",
            ],
        ),
        (
            "attention",
            [
                "_fwd_kernel",
                "_fwd_grouped_kernel_stage1",
                "void flashinfer::mla::hopper::BatchMLAPageAttentionHopperKernel<true>(Params)",
                "void flashinfer::BatchDecodeWithPagedKVCacheKernel<0>(Params)",
                "void cutlass::device_kernel<flash::FlashAttnFwdSm90<cutlass::gemm>>(Params)",
                "fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausalP32",
            ],
        ),
        (
            "gemm",
            [
                "nvjet_sm90_tst_8x64_64x16_2x1_v_bz_TNN",
                "fused_moe_kernel",
                "void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l>(int4 const*)",
                "_router_triton_kernel",
                "void sglang::tiny_n_gemm_kernel<sglang::GEMMTraitN<16u>>(Params)",
                "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<int>>(Params)",
            ],
        ),
        ("copy", ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "_small_copy_kernel"]),
        (
            "rest",
            [
                "void flashinfer::norm::FusedAddRMSNormKernel<8u, __nv_bfloat16>(__nv_bfloat16*)",
                "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(ReduceOp)",
                "void flashinfer::trtllm_allreduce::lamport_initialize_kernel<float>(float*)",
                "create_flashinfer_kv_indices_triton",
                "void sglang::set_mla_kv_buffer_kernel<1024l, 128l, true, long>(Params)",
                "some_kernel",
            ],
        ),
    ],
)
def test_a_kernel_is_known_by_its_name(kind: str, names: list[str]) -> None:
    assert {name: kind_of(name) for name in names} == dict.fromkeys(names, kind)


def test_the_command_prints_the_table_and_keeps_the_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "b.sqlite"
    with open_store(store) as opened:
        opened.begin(Session("eagle3", "2026-11-29T00:00:00+00:00", "http://x", Protocol()))
    keep = ["--store", str(store), "--session", "eagle3"]
    assert main(["profile", "--trace", str(H200), "--top", "2", *keep]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^verify +0\.9\d\d +\d\.\d+ +\d\.\d+ +219 +0 +graph$", printed, re.M)
    assert re.search(r"^attention +0\.2\d\d +28%$", printed, re.M)
    assert "_fwd_kernel" in printed and "fused_moe_kernel" in printed
    with open_store(store) as opened:
        kept = opened.find("eagle3").breakdown
    assert kept and kept.graphs == {"draft": "graph", "verify": "graph", "extend": "graph"}
    assert main(["profile", "--trace", str(H200), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passes"][1]["name"] == "verify" and result["passes"][1]["mode"] == "graph"


def test_of_several_ranks_the_one_that_waits_for_nobody_is_kept(tmp_path: Path) -> None:
    """Rank 1 comes last to each all-reduce, so rank 0's holds its waiting."""
    late = eagle(6)
    for event in late:
        if event["name"] == NCCL:
            event["ts"], event["dur"] = event["ts"] + 150, 50.0
    files = []
    for rank, events in enumerate((eagle(6), late, eagle(6))):
        files.append(tmp_path / f"x-TP-{rank}.trace.json.gz")
        files[-1].write_bytes(packed(events))
    kept, shown = look(Capture(tuple(files), 0.9))
    assert kept.main.kinds["all-reduce"] == pytest.approx(0.03)
    assert shown["trace"] == str(files[1])
    assert [one["all_reduce_ms"] for one in shown["ranks"]] == [0.18, pytest.approx(0.03), 0.18]
    assert kept.breakdown().verify["all-reduce"] == pytest.approx(0.03)


def packed(events: object) -> bytes:
    # No time in it: two workers have to name its test alike.
    return gzip.compress(json.dumps({"traceEvents": events}).encode(), mtime=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"", "not a trace"),
        (b"{}", "not a trace"),
        (b"[1, 2]", "not a trace"),
        (b"\x1f\x8b garbage", "the file is cut off"),
        (packed(eagle(6))[:-40], "the file is cut off"),
        (packed(None), "not a trace of torch.profiler"),
        (packed([1]), "not a trace of torch.profiler"),
        (packed([]), "no scheduler.run_batch in the trace"),
        (packed(eagle(1)), "no whole cycle in the trace"),
        (packed(eagle(3)[:-4]), "no two cycles follow each other"),
        (packed([*eagle(5), span("draft", 1, 2) | {"pid": 10}]), "a merged trace of several"),
    ],
)
def test_what_is_no_trace_of_a_cycle_is_refused(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.trace.json.gz"
    if content is not None:
        file.write_bytes(content)
    assert main(["profile", "--trace", str(file)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        ([], 2, "give either --url or --trace"),
        (["--url", "http://127.0.0.1:9"], 4, "see that the server is up"),
        (["--url", "nonsense"], 2, "not an address"),
        (["--trace", "x", "--store", "y"], 2, "go together"),
    ],
)
def test_a_profile_of_nothing(
    args: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *args]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plan", "code", "message"),
    [
        (["locked"], 2, "the server wants its API key"),
        (["404"], 2, "no such endpoint"),
        (["ok", "ok", "ok", "500", "500"], 4, "/start_profile: 500, the server failed: "),
        (["ok", "ok", "ok", "404", "404"], 2, "/start_profile: 404, no such endpoint"),
        (["ok", "ok", "ok", "200", "ok", "ok", "200"], 4, "no trace came to"),
        (["error"], 4, "out of memory"),
        (["cut"], 4, "the stream was cut off"),
        (["ok", "ok", "cut"], 4, "see that the server is up"),
    ],
)
def test_a_server_that_cannot_be_profiled(
    plan: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sglang_overlay.measure.profile._PATIENCE", 0.3)
    with serving(*plan) as (url, server):
        assert main(["profile", "--url", url, "--out", str(tmp_path)]) == code
    said = capsys.readouterr().err
    assert message in said and said.count("error: ") == 1
    started = [body for body in server.bodies if "profile_id" in body]
    if started:  # the window is closed, whatever happened
        assert started[0]["num_steps"] == 16 and started[0]["with_stack"] is False
        assert server.bodies[-1] == {}


def test_a_window_that_opens_when_the_request_is_over_has_the_next_ones_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    after: list[int] = []

    def events(tokens: int) -> list[dict[str, Any]]:
        for name in [body["profile_id"] for body in server.bodies if "profile_id" in body]:
            after.append(tokens)
            if len(after) == 2:
                shutil.copy(H200, tmp_path / f"{name}-TP-0.trace.json.gz")
        return plain(tokens)

    with serving("ok", "ok", "ok", "200", events=events) as (url, server):
        assert main(["profile", "--url", url, "--out", str(tmp_path)]) == 0
    assert after == [8 + 16 + 100] * 2
    assert "verify" in capsys.readouterr().out


def test_a_request_that_ends_before_the_window_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(events=lambda tokens: plain(5)) as (url, _):
        assert main(["profile", "--url", url, "--out", str(tmp_path)]) == 4
    assert "the request ended before 8 tokens" in capsys.readouterr().err


def test_a_cycle_is_counted_by_the_verify_passes_that_the_last_event_tells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def speculating(tokens: int) -> list[dict[str, Any]]:
        told = {"spec_verify_ct": tokens // 3, "spec_accept_length": 3.0}
        return [*plain(tokens)[:-1], failing.event(tokens, tokens, **told)]

    runs: list[Run] = []
    ask = stream.ask
    monkeypatch.setattr(stream, "ask", lambda *args: runs.append(ask(*args)) or runs[-1])
    with serving(events=speculating) as (url, _), stream.connect(url) as client:
        found = _pace(client, 192, lambda *_: None)
    assert [run.warmup for run in runs] == [True, False]
    first = runs[-1].ttft_ms
    assert first is not None and runs[-1].tokens == 192
    assert found == round((runs[-1].seconds * 1e3 - first) / 64, 3) > 0
