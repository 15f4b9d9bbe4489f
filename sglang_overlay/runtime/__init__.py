"""What an interpreter start imports: standard library only, and little of that.

``boot`` puts a ``finder`` first in line; when ``sglang`` itself is imported,
``attest`` holds every blob against the manifest, once for each process.
"""
