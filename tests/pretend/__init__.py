"""The pretend GPU: the CUDA entries of csrc run on host memory (docs/pretend_gpu.md)."""
