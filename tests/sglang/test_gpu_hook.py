"""The hook of ci/gpu fits the pinned source: it wraps all that it watches.

Forcing fa2 is left out: without a CUDA device the backend imports no FlashInfer wrapper.
"""

import shutil
from pathlib import Path

from .conftest import Python

HOOK = Path(__file__).parents[2] / "ci/gpu/hook.py"
CODE = """
import sitecustomize
from sglang.srt.layers.attention import flashinfer_mla_backend, triton_backend
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.speculative import eagle_worker_v2 as worker
names = [
    worker.EagleDraftWorker._draft_extend_for_decode, worker.EagleDraftWorker.draft,
    worker.EAGLEWorkerV2.verify, worker.maybe_detect_nan,
    worker.EAGLEDraftExtendCudaGraphRunner.execute,
    worker.EAGLEDraftExtendCudaGraphRunner._replay_graph,
    flashinfer_mla_backend.FlashInferMLAAttnBackend.init_forward_metadata_out_graph,
    triton_backend.TritonAttnBackend.init_forward_metadata_out_graph,
    Scheduler.run_batch, Scheduler.process_batch_result,
]
print({name.__code__.co_filename == sitecustomize.__file__ for name in names})
"""


def test_the_hook_wraps_what_it_watches(python: Python, patched: Path, tmp_path: Path) -> None:
    shutil.copy(HOOK, tmp_path / "sitecustomize.py")
    done = python(
        patched,
        "-c",
        CODE,
        PYTHONPATH=f"{tmp_path}:{patched / 'python'}",
        HOOK_OUT=str(tmp_path),
        HOOK_TRACE="1",
        HOOK_SHADOW="1",
        HOOK_SPLIT="1",
        HOOK_MEMORY="1",
    )
    assert done.stdout.splitlines()[-1] == "{True}", done.stdout + done.stderr[-3000:]
