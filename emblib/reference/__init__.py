"""Every operation in plain PyTorch: the definition of correct, and a contender in benchmarks."""

from emblib.reference import optim, random, rounding, tbe, tt

__all__ = ["optim", "random", "rounding", "tbe", "tt"]
