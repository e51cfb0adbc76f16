"""Every operation in plain PyTorch: the definition of correct, and a contender in benchmarks."""

from emblib.reference import optim, random, tbe, tt
from emblib.reference import optim as rounding

__all__ = ["optim", "random", "rounding", "tbe", "tt"]
