"""The operations in plain Python and PyTorch: the definition of correct.

Benchmarks use the tensor trains of `tt` as a baseline.
"""

from emblib.reference import optim, random, tbe, tt

__all__ = ["optim", "random", "tbe", "tt"]
