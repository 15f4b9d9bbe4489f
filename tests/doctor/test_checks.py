"""Each check, on a machine where nothing is wrong and on one that differs in one thing."""

import re
from dataclasses import replace

import pytest

from sglang_overlay.doctor.checks import examine
from sglang_overlay.doctor.checks.all_reduce import choose
from sglang_overlay.doctor.checks.fusion import SM120_WORLDS
from sglang_overlay.doctor.facts import Facts, Unknown
from sglang_overlay.doctor.finding import Finding, State
from sglang_overlay.patchset.pin import patches_folder

from .. import nccl_algo
from .cases import CASES, MEASURED, NO_IPC, SEGMENTS, copied
from .machine import NVLINK, ONE, TWO, WELL, environ, fused, healthy, pairs, server, stock


def algo(value: str) -> Finding:
    (finding,) = named(environ(WELL, NCCL_ALGO=value), "nccl-algo")
    return finding


def named(facts: Facts, id: str) -> list[Finding]:
    return [finding for finding in examine(facts) if finding.id == id]


@pytest.mark.parametrize("value", nccl_algo.FINE)
def test_an_algorithm_that_each_collective_has_is_fine(value: str) -> None:
    assert algo(value).state == State.OK


@pytest.mark.parametrize(("value", "without"), nccl_algo.WITHOUT)
def test_a_collective_without_an_algorithm_is_an_error(value: str, without: str) -> None:
    assert algo(value).state == State.ERROR
    assert f"leaves {without} without" in algo(value).title


@pytest.mark.parametrize(("value", "what"), nccl_algo.REFUSED)
def test_an_algorithm_that_nccl_refuses_is_an_error(value: str, what: str) -> None:
    assert algo(value).state == State.ERROR
    assert algo(value).title.startswith("NCCL refuses") and what in algo(value).title


@pytest.mark.parametrize(("value", "_"), nccl_algo.WITHOUT + nccl_algo.REFUSED)
def test_an_algorithm_that_is_proposed_is_one_that_works(value: str, _: str) -> None:
    proposed = algo(value).fix.removeprefix("NCCL_ALGO=").strip("'")
    assert proposed == "unset NCCL_ALGO" or algo(proposed).state == State.OK


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_a_machine_on_which_nothing_is_wrong_has_nothing_to_mend(count: int) -> None:
    assert [f for f in examine(healthy(count)) if f.state != State.OK] == []


def test_of_a_machine_that_cannot_be_read_there_is_no_error_and_every_reason() -> None:
    findings = examine(Facts())
    assert {f.state for f in findings} == {State.OK, State.UNKNOWN}
    assert all(f.evidence for f in findings if f.state == State.UNKNOWN)


def test_what_is_wrong_says_why_it_matters_and_most_of_it_how_to_mend_it() -> None:
    worst = [f for _, _, facts, _ in CASES for f in examine(facts)]
    bad = [f for f in worst if f.state in (State.ERROR, State.WARNING)]
    assert all(f.why and f.evidence for f in bad)
    assert {f.id for f in bad if not f.fix} <= {"all-reduce", "gpus"}


@pytest.mark.parametrize(("id", "state", "facts", "text"), CASES)
def test_a_machine_that_differs_in_one_thing(
    id: str, state: State, facts: Facts, text: str
) -> None:
    found = named(facts, id)
    assert found, f"no finding {id}"
    worst = max(found, key=lambda finding: list(State).index(finding.state))
    assert worst.state == state, worst
    assert re.search(text, f"{worst.title}\n{worst.evidence}\n{worst.fix}", re.DOTALL), worst


@pytest.mark.parametrize(
    ("facts", "name", "because"),
    [
        (ONE, "none", "one rank"),
        (WELL, "pcie-ipc", "not for more than two cards without NVLink"),
        (NO_IPC, "nccl", "PCIe-IPC: SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is not 1"),
        (environ(TWO, SGLANG_ENABLE_PCIE_IPC_ALLREDUCE="0"), "custom", "SM120"),
        (TWO, "custom", "SM120"),
        (server(TWO, custom_all_reduce=False), "pcie-ipc", "--disable-custom-all-reduce"),
        (pairs(TWO, peer="not supported"), "pcie-ipc", "no peer access"),
        (copied(TWO, result="wrong"), "pcie-ipc", "no peer access"),
        (NVLINK, "custom v2", "default for some models"),
        (environ(NVLINK, SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2="0"), "custom", ""),
        (environ(NVLINK, CUDA_VISIBLE_DEVICES="GPU-1"), "pcie-ipc", "no numbers"),
        (server(NVLINK, fusion="auto"), "fused", "auto"),
        (fused(WELL, None), "pcie-ipc", "fused: not without the option"),
        (fused(WELL, "trtllm", MEASURED), "fused", "trtllm"),
        (fused(WELL, "auto", MEASURED), "measured at start", "for each number of rows"),
        (fused(NVLINK, "measured", MEASURED), "measured at start", "PCIe-IPC"),
        (environ(fused(WELL, "trtllm"), **SEGMENTS), "pcie-ipc", "voted out"),
        (server(WELL, deterministic=True), "nccl", "deterministic"),
        (server(WELL, tp=3), "nccl", "for 2, 4, 8 ranks"),
        (server(WELL, nodes=2), "nccl", "several nodes"),
        (server(TWO, tp=2, nodes=2), "nccl", "several nodes"),
    ],
)
def test_the_all_reduce_that_sglang_takes(facts: Facts, name: str, because: str) -> None:
    choice = choose(facts)
    assert choice is not None
    assert choice.name == name
    assert because in "; ".join(choice.because)


@pytest.mark.parametrize(
    "facts",
    [
        WELL,
        stock(attention_backend="flashinfer", mla=True, draft_decode=False),
        stock(attention_backend="flashinfer", mla=True, own_drafter=True, draft_mla=False),
        stock(attention_backend="flashinfer", mla=True, draft_backend="triton"),
        stock(attention_backend="flashinfer", mla=True, decode_backend="triton"),
        stock(attention_backend="flashinfer", mla=True, algorithm="NGRAM"),
        stock(attention_backend="flashinfer", mla=True, unread=("--config",)),
        stock(mla=True),
    ],
)
def test_where_draft_steps_read_all_or_are_none_or_not_known_nothing_is_said(facts: Facts) -> None:
    assert named(facts, "draft-kv") == []


def test_the_worlds_of_the_fused_kernel_are_those_of_the_patch() -> None:
    folder = patches_folder()
    (patch,) = folder.glob("v*/flashinfer-fusion-sm120.patch")
    assert f"\n+SUPPORTED_WORLD_SIZES = {SM120_WORLDS}\n" in patch.read_text()


@pytest.mark.parametrize(
    "facts", [Facts(), replace(TWO, gpus=Unknown()), pairs(TWO, nvlink=Unknown())]
)
def test_no_all_reduce_is_named_for_a_machine_that_is_not_known(facts: Facts) -> None:
    assert choose(facts) is None
