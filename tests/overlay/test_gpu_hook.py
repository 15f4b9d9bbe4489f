"""The hook of ci/gpu fits the pinned source under the overlay: it wraps all that it watches.

Forcing fa2 is left out: without a CUDA device the backend imports no FlashInfer wrapper.
"""

import shutil
from pathlib import Path

from ..pins import each_pin
from .conftest import Environment

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
files = {name.__code__.co_filename == sitecustomize.__file__ for name in names}
print(files, "sglang_overlay" in worker.__file__)
"""


@each_pin
def test_the_hook_wraps_what_it_watches(environment: Environment, tmp_path: Path) -> None:
    shutil.copy(HOOK, tmp_path / "sitecustomize.py")
    switches = dict.fromkeys(("HOOK_TRACE", "HOOK_SHADOW", "HOOK_SPLIT", "HOOK_MEMORY"), "1")
    printed = environment.code(CODE, PYTHONPATH=str(tmp_path), HOOK_OUT=str(tmp_path), **switches)
    assert printed.splitlines()[-1] == "{True} True"
