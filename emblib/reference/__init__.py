"""Every operation in plain PyTorch: the definition of correct, and a contender in benchmarks."""

from emblib.reference import tbe, tt

__all__ = ["tbe", "tt"]
