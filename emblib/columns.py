"""Column numbers of the tensors that Python and csrc share.

csrc has the same numbers: `Hyper` in csrc/optim/functor.h, the others in csrc/core/layout.h;
tests/test_schema.py compares them.
"""

from enum import IntEnum


class Hyper(IntEnum):
    """Entries of an optimizer's hyperparameters; its own follow from `OPTIMIZER_ARGS` on."""

    LEARNING_RATE = 0
    STEP = 1
    L2 = 2
    DECAY = 3
    SEED = 4  # of stochastic rounding; -1 rounds to nearest
    OPTIMIZER_ARGS = 5


class FeatureColumn(IntEnum):
    """Columns of `features`: the table that a feature looks up, and where its output goes."""

    WEIGHT_OFFSET = 0  # elements before the table in its memory tier
    ROW_BASE = 1  # linear row of its first row
    ROWS = 2
    DIM = 3
    COLUMN = 4  # of the output
    TIER = 5
    STATE_BASE = 6  # rows before the table in its memory tier
    CACHE_STRIDE = 7  # elements between rows of the cache; 0 if the table is not cached


class Tier(IntEnum):
    """Memory tiers, in the order of the `weights` of an op."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    CACHE = 3
