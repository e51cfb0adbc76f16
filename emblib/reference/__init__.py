"""The operations in plain Python and PyTorch: the definition of correct.

Benchmarks have the tensor trains as a baseline.
"""

from emblib.reference import optim, random, tbe, tt

__all__ = ["optim", "random", "tbe", "tt"]
