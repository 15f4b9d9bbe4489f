"""Values of ``NCCL_ALGO``: what the doctor and the patch worker-env-lint must both say of them.

As NCCL 2.30 reads them: ``parseList`` and ``ncclTopoTuneModel`` in its ``src/graph/tuning.cc``.
"""

FINE = (
    "",
    ";",
    "^",
    "Ring",
    "ring,tree",
    "^Tree",
    "^tree,nvls",
    "allreduce:tree",
    "AllReduce:Tree",
    "allreduce:tree;",
    "allreduce:tree:x",
    "allreduce:^ring",
    "allreduce:ring,tree",
    "allreduce:tree;broadcast:ring",
    "ring;allreduce:tree,nvls",
    "ring,tree;allgather:nvls;reducescatter:pat",
    "tree;broadcast:ring;reduce:ring;allgather:ring;reducescatter:ring",
)
#: The value, and what is left without an algorithm.
WITHOUT = (
    ("Tree", "broadcast, reduce, allgather, reducescatter"),
    (":tree", "broadcast, reduce, allgather, reducescatter"),
    ("Tree,NVLSTree", "broadcast, reduce, allgather, reducescatter"),
    ("Tree,NVLS", "broadcast, reduce"),
    (",", "broadcast, reduce, allgather, reducescatter, allreduce"),
    ("allreduce:,", "allreduce"),
    ("nvls", "broadcast, reduce"),
    ("^ring", "broadcast, reduce"),
    ("PAT", "broadcast, reduce, allreduce"),
    ("tree;broadcast:ring", "reduce, allgather, reducescatter"),
    ("allreduce:tree;broadcast:tree", "broadcast"),
    ("allgather:nvlstree", "allgather"),
)
#: The value, and what NCCL does not take in it.
REFUSED = (
    ("Ringg", "'ringg'"),
    (" tree", "' tree'"),
    ("tree, ring", "' ring'"),
    ("nvls; allreduce:ring,tree", "' allreduce'"),
    ("allreduce:tree/ring", "'tree/ring'"),
    ("tree:allreduce", "'allreduce'"),
    ("all_reduce:tree", "'all_reduce'"),
    ("allreduce:", "'allreduce'"),
    ("^^ring", "'^ring'"),
    ("allreduce:tree;ring", "only the first entry"),
    (";ring", "only the first entry"),
)
