"""The context of an SM120 server's scheduler on any GPU, healthy or made to fail at a stage."""

import os
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

STAGES = ("preflight", "allocator", "build", "memory", "peers", "create", "self-test", "replay")
SM120 = {"is_sm90": False, "is_sm100": False, "is_sm120": True, "is_blackwell": True}


def failures(stage):
    """What makes this rank fail at ``stage``, from outside of the patch."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion
    from sglang.srt.layers import flashinfer_fusion_bringup as bringup

    def refuse(*args, **kwargs):
        raise RuntimeError(f"made to fail at {stage}")

    def other_facts():
        return real_facts() | {"SM count": 1}

    def spoiled(self, *args, **kwargs):
        norm, residual = real_kernel(self, *args, **kwargs)
        if stage == "self-test" or torch.cuda.is_current_stream_capturing():
            norm[-1, -1:].fill_(40.0)  # no copy from the host: it may be captured
        return norm, residual

    import torch

    real_facts = bringup.device_facts
    real_kernel = fusion.FlashInferWorkspaceManager.allreduce_residual_rmsnorm
    return {
        None: lambda: (),
        "preflight": lambda: (patch.object(bringup, "device_facts", other_facts),),
        "allocator": lambda: (
            patch.dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        ),
        "build": lambda: (patch.object(bringup, "module_objection", refuse),),
        "memory": lambda: (
            patch.object(fusion, "_probe_cumem_create_sequence", lambda *args: False),
        ),
        "peers": lambda: (patch.object(bringup.PeerMemory, "write", lambda *args: None),),
        "create": lambda: (patch.object(fusion, "_create_trtllm_workspace", refuse),),
        "self-test": lambda: (
            patch.object(fusion.FlashInferWorkspaceManager, real_kernel.__name__, spoiled),
        ),
        "replay": lambda: (
            patch.object(fusion.FlashInferWorkspaceManager, real_kernel.__name__, spoiled),
        ),
    }[stage]()


@contextmanager
def server(ranks, stage=None):
    """The context in which a scheduler of an SM120 machine runs, without workspaces yet."""
    from sglang.srt.layers import flashinfer_comm_fusion as fusion
    from sglang.srt.runtime_context import (
        get_context,
        get_parallel,
        get_resources,
        override_platform,
    )

    group, size = ranks.group, ranks.size
    widths = dict.fromkeys(("tp_size", "attn_tp_size", "moe_tp_size"), size)
    groups = dict.fromkeys(("tp_group", "attn_tp_group", "moe_tp_group"), group)
    contexts = (
        get_context().override_server_args(flashinfer_allreduce_fusion_backend="trtllm"),
        get_parallel().override(**widths, **groups, attn_tp_rank=ranks.rank, moe_ep_size=1),
        get_resources().override(buffers={}),
        override_platform(is_cuda=True, **SM120),
        patch.object(fusion, "_flashinfer_allreduce_unavailable", False),
        *(failures(stage) if ranks.rank == size - 1 else ()),
    )
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        try:
            yield
        finally:
            fusion.cleanup_flashinfer_workspace()
