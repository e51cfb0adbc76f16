"""Operators of namespace `torch.ops.fbgemm` that TorchRec calls, made of PyTorch's and emblib's.

`register()` registers them; `emblib.compat.fbgemm.install()` calls it. Importing registers nothing.
"""

from emblib.compat.fbgemm_operators import (
    bucketize,
    calibration,
    dense_jagged,
    jagged,
    messages,
    pooled,
    pruning,
    remapping,
    rowwise,
)
from emblib.compat.fbgemm_operators.registry import (
    OPERATORS,
    foreign_operators,
    is_registered,
    register,
)

__all__ = [
    "OPERATORS",
    "bucketize",
    "calibration",
    "dense_jagged",
    "foreign_operators",
    "is_registered",
    "jagged",
    "messages",
    "pooled",
    "pruning",
    "register",
    "remapping",
    "rowwise",
]
