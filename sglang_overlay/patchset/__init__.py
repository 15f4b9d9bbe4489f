"""The patch-set engine: exact patches over a pinned SGLang source.

Data flows one way: ``pin`` and ``series`` are read, ``diff`` and ``header``
parse each patch, ``weave`` computes every version of a file that a subset of
the patches gives, ``manifest`` keeps the blobs of those versions, ``plan``
compares them with a tree, and ``tree`` or ``checkout`` write.
"""
