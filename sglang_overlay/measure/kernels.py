"""What a GPU kernel does, by its name: all-reduce, attention, gemm, and so on.

A name is all that a trace says of a kernel. The patterns come from names in traces (one H200),
in ``libnccl.so`` and ``common_ops.abi3.so``, and in the sources of SGLang 0.5.23 and FlashInfer
0.7.2. A kernel that none fits is ``rest``; ``profile --top`` shows who that is.
"""

import re
from functools import cache

ALL_REDUCE, COLLECTIVE, ATTENTION, GEMM, COPY, REST = KINDS = (
    "all-reduce",  # fused ones too: all-reduce with a norm, with MoE's last step
    "collective",  # gather, scatter, all-to-all
    "attention",
    "gemm",  # MoE's routing and sorting too
    "copy",
    "rest",
)

# The first that fits counts: FlashAttention's names hold "cutlass", fused all-reduces "moe".
_PATTERNS = tuple(
    (kind, re.compile("|".join(patterns), re.VERBOSE))
    for kind, patterns in (
        (
            COLLECTIVE,
            (
                r"nccl\w*(?:AllGather|ReduceScatter|Broadcast|SendRecv|AlltoAll|Kernel_Reduce_)",
                r"pcie_ipc.*(?:flat_|topology_4plus4|recursive_doubling|copy_engine|ce_)",
                r"(?:all_gather|reduce_scatter|allgather|reducescatter)\w*kernel",
                r"moeAllToAll|deep_ep::",
            ),
        ),
        (
            ALL_REDUCE,
            (
                r"nccl\w*AllReduce",
                r"cross_device_reduce",
                r"(?<!lamport_initialize_)all_?reduce\w*kernel",
                r"all_reduce_(?:one_shot|norm)",
                r"(?:one_?shot|two_?shot)_?All_?[Rr]educe",
                r"AllReduce\w*Kernel",
                r"multimem_one_shot_reduce",
                r"pcie_ipc.*(?:push|rsag)\w*kernel",
                r"inkling_multimem_\w*oneshot",
            ),
        ),
        (
            ATTENTION,
            (
                r"fmha|[Ff]lash_?[Aa]tt|flash_(?:fwd|mla)|\bflash::",
                r"flashinfer::(?:mla|Batch|Single|Prefill|Decode|Merge|Persistent|Variable)",
                r"(?:Paged|Ragged)?KVCacheKernel|MLAPage|BatchMLA",
                r"^_fwd_(?:kernel|grouped_kernel)",
                r"[Mm]erge_?[Ss]tate|VariableLengthMerge",
                r"_attn_fwd|unified_attention|paged_attention|attention_kernel|mla_decode",
            ),
        ),
        (
            GEMM,
            (
                r"gemm|gemv|nvjet|cutlass|cublas|splitK|split_k|deep_gemm|xmma|matmul",
                r"moe|Moe|MoE|marlin|Marlin|expert|router|grouped_mm",
            ),
        ),
        (COPY, (r"^Mem(?:cpy|set)", r"small_copy|memcpy")),
    )
)


@cache
def kind_of(name: str) -> str:
    """One of ``KINDS`` for the kernel ``name``, as a trace has it (demangled)."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), REST)
