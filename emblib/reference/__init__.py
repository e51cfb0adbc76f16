"""Every operation in plain PyTorch: the definition of correct, and a baseline in benchmarks."""

from emblib.reference import optim, random, tbe, tt

__all__ = ["optim", "random", "tbe", "tt"]
