"""The doctor's conditions for each all-reduce are those of the pinned source."""

import ast
from pathlib import Path
from typing import Any

import pytest

from sglang_overlay.doctor.checks.all_reduce import CUSTOM_WORLDS, PCIE_IPC_WORLDS

COMMUNICATORS = "python/sglang/srt/distributed/device_communicators"


def assigned(file: Path, name: str) -> Any:
    """The literal that ``name`` has in ``file``, at the top or in a class."""
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                return value
            case ast.AnnAssign(target=ast.Name(id=found), value=value) if found == name:
                return value
    raise AssertionError(f"no {name} in {file}")


def source(fetched: Path, file: str, function: str) -> str:
    """The text of one function, as Python itself writes it."""
    for node in ast.walk(ast.parse((fetched / file).read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.unparse(node)
    raise AssertionError(f"no {function} in {file}")


def test_the_worlds(fetched: Path) -> None:
    folder = fetched / COMMUNICATORS
    pcie = assigned(folder / "pcie_ipc_ar.py", "_SUPPORTED_WORLD_SIZES")
    custom = assigned(folder / "custom_all_reduce.py", "_SUPPORTED_WORLD_SIZES")
    assert ast.literal_eval(pcie) == PCIE_IPC_WORLDS
    assert tuple(ast.literal_eval(custom)) == CUSTOM_WORLDS


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "EnvBool(False)"),
        ("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "EnvBool(True)"),
    ],
)
def test_the_variables(fetched: Path, name: str, default: str) -> None:
    value = assigned(fetched / "python/sglang/srt/environ.py", name)
    assert ast.unparse(value) == default


@pytest.mark.parametrize(
    ("file", "function", "conditions"),
    [
        (
            f"{COMMUNICATORS}/custom_all_reduce_utils.py",
            "can_use_custom_all_reduce_with_nvlink",
            [
                "if not all(in_the_same_node_as(group, source_rank=0))",
                "if world_size not in supported_world_size",
                "device_ids = list(map(int, cuda_visible_devices.split(',')))",
                "if world_size > 2 and (not full_nvlink)",
                "not can_p2p(rank, world_size)",
            ],
        ),
        (
            f"{COMMUNICATORS}/custom_all_reduce_v2.py",
            "can_use_custom_all_reduce_v2",
            ["return full_nvlink is True"],
        ),
        (
            f"{COMMUNICATORS}/pcie_ipc_ar.py",
            "eligible_group",
            ["SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "world_size > 1", "if deterministic"],
        ),
        (
            "python/sglang/srt/layers/flashinfer_comm_fusion.py",
            "_resolve_backend",
            ["if not (get_platform().is_sm90 or get_platform().is_sm100)"],
        ),
        (
            "python/sglang/srt/arg_groups/overrides.py",
            "_flashinfer_allreduce_fusion_auto_enable",
            ["get_platform().is_sm90 or get_platform().is_sm100"],
        ),
    ],
)
def test_the_conditions(fetched: Path, file: str, function: str, conditions: list[str]) -> None:
    text = source(fetched, file, function)
    assert [condition for condition in conditions if condition not in text] == []


def test_the_order(fetched: Path) -> None:
    file = "python/sglang/srt/distributed/parallel_state.py"
    text = source(fetched, file, "_resolve_outplace_all_reduce_method")
    places = [text.index(f"return '{name}'") for name in ("ca", "pcie_ipc", "torch_symm_mem")]
    assert places == sorted(places)
    whole = source(fetched, file, "all_reduce")
    assert whole.index("_can_use_flashinfer_allreduce(input_)") < whole.rindex(
        "_resolve_outplace_all_reduce_method"
    )


def test_the_backend_that_sm120_gets_by_default(fetched: Path) -> None:
    text = source(
        fetched, "python/sglang/srt/arg_groups/model_override_base.py", "get_default_attn_backend"
    )
    mha, _, mla = text.partition("is_hopper_with_cuda_12_3:")
    assert "return 'flashinfer'" in mha
    assert mla.rstrip().endswith("return 'triton'")
