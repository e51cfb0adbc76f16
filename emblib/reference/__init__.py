"""Every operation in plain PyTorch: the definition of correct, and a contender in benchmarks."""

from emblib.reference import random, tbe, tt

__all__ = ["random", "tbe", "tt"]
