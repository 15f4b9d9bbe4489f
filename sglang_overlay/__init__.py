"""sglang-overlay: speculative decoding that pays on GPUs linked by PCIe alone."""

__version__ = "0.1.0"
