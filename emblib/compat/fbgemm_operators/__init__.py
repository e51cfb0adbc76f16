"""The operators `torch.ops.fbgemm.*` that TorchRec calls, implemented by PyTorch's and emblib's.

`register()` registers them, which `emblib.compat.fbgemm.install()` calls. Importing this package
registers nothing.
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
