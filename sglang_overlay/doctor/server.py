"""What the user means to start, from the server's own arguments."""

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from .facts import Server

_FLAGS = {
    "--tp": "tp",
    "--tp-size": "tp",
    "--tensor-parallel-size": "tp",
    "--pp-size": "pp",
    "--pipeline-parallel-size": "pp",
    "--base-gpu-id": "first",
    "--gpu-id-step": "step",
    "--dp": "dp",
    "--dp-size": "dp",
    "--data-parallel-size": "dp",
    "--cuda-graph-backend-decode": "decode_graph",
    "--nnodes": "nodes",
    "--model": "model",
    "--model-path": "model",
    "--attention-backend": "attention_backend",
    "--prefill-attention-backend": "prefill_backend",
    "--decode-attention-backend": "decode_backend",
    "--speculative-draft-attention-backend": "draft_backend",
    "--speculative-attention-mode": "attention_mode",
    "--speculative-draft-model-path": "drafter",
    "--speculative-draft-model": "drafter",
    "--speculative-num-steps": "draft_steps",
    "--dcp-size": "dcp",
    "--decode-context-parallel-size": "dcp",
    "--speculative-algorithm": "algorithm",
    "--speculative-algo": "algorithm",
    "--flashinfer-allreduce-fusion-backend": "fusion",
}
# These have no draft layers in the target's own checkpoint.
_OWN_DRAFTER = {"EAGLE3", "STANDALONE"}
# What they hold may say anything that the flags say.
_UNREAD = ("--config", "--cuda-graph-config")
_NO_FUSION = "--enforce-disable-flashinfer-allreduce-fusion"


def read_server(arguments: Sequence[str]) -> Server:
    """The few of a server's ``arguments`` that the checks ask about; others are passed over."""
    words = [part for word in arguments for part in _split(word)]
    given: dict[str, str] = {}
    for flag, value in pairwise([*words, ""]):
        if flag in _FLAGS:
            given[_FLAGS[flag]] = value
    group = Server(
        tp=_number(given.get("tp")),
        pp=_number(given.get("pp")) or 1,
        nodes=_number(given.get("nodes")) or 1,
    )
    return replace(
        group,
        cards=None if given.keys() & {"pp", "first", "step", "dp"} else group.local_tp,
        attention_backend=given.get("attention_backend"),
        prefill_backend=given.get("prefill_backend"),
        decode_backend=given.get("decode_backend"),
        draft_backend=given.get("draft_backend"),
        attention_mode=given.get("attention_mode", "prefill"),
        mla=_mla(given.get("model")),
        own_drafter="drafter" in given or given.get("algorithm", "").upper() in _OWN_DRAFTER,
        draft_mla=_mla(given.get("drafter")),
        algorithm=given.get("algorithm"),
        draft_decode="--enable-multi-layer-eagle" not in words
        and ("--speculative-adaptive" in words or _number(given.get("draft_steps")) != 1),
        dcp=_number(given.get("dcp")) or 1,
        fusion=None if _NO_FUSION in words else given.get("fusion"),
        custom_all_reduce="--disable-custom-all-reduce" not in words,
        deterministic="--enable-deterministic-inference" in words,
        cuda_graph=not {"--disable-cuda-graph", "--disable-decode-cuda-graph"} & {*words}
        and given.get("decode_graph") != "disabled",
        unread=tuple(flag for flag in _UNREAD if flag in words),
    )


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() and int(text) else None


def _split(word: str) -> list[str]:
    return word.split("=", 1) if word.startswith("--") and "=" in word else [word]


def _mla(model: str | None) -> bool | None:
    """Whether a local model has multi-head latent attention; ``None`` when that is not known.

    The models that SGLang gives MLA carry a ``kv_lora_rank`` in their configuration, beside
    or inside the text model's part.
    """
    try:
        config: Any = json.loads((Path(model or "") / "config.json").read_text())
        parts = [config, config.get("text_config", {}), config.get("llm_config", {})]
        return any(part.get("kv_lora_rank") for part in parts)
    except (OSError, ValueError, AttributeError):
        return None
