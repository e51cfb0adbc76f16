"""The columns of the tensors that Python and csrc share.

csrc has the same numbers, as enums or as the members of a struct: `Hyper` in csrc/core/codes.h, the
columns of tables and bags in csrc/core/layout.h, the others in csrc/*/args.h and
csrc/hash/initial.h. tests/test_columns.py compares them.
"""

from enum import IntEnum
from typing import NamedTuple


class Hyper(IntEnum):
    """Entries of `hyper`; the hyperparameters of one optimizer only start at `OPTIMIZER_ARGS`."""

    LEARNING_RATE = 0
    STEP = 1
    L2 = 2
    DECAY = 3
    SEED = 4  # seed of stochastic rounding; -1 rounds to nearest
    OPTIMIZER_ARGS = 5


class FeatureColumn(IntEnum):
    """Columns of `features`: the table that a feature looks up, and where its output goes."""

    WEIGHT_OFFSET = 0  # elements before the table in its memory tier
    ROW_BASE = 1  # linear row of its first row
    ROWS = 2
    DIM = 3
    COLUMN = 4  # first column in the output
    TIER = 5  # in quantised tables with several row formats: the `RowFormatCode`
    STATE_BASE = 6  # rows before the table in its tier: offset of states with one number per row
    CACHE_STRIDE = 7  # elements between rows of the cache; 0 if the table is not cached


class FeatureRow(NamedTuple):
    """A row of `features`, e.g. `FeatureRow(rows=100, dim=8)`; fields are as in `FeatureColumn`."""

    weight_offset: int = 0
    row_base: int = 0
    rows: int = 0
    dim: int = 0
    column: int = 0
    tier: int = 0
    state_base: int = 0
    cache_stride: int = 0


class RowFormatCode(IntEnum):
    """Formats of the rows of quantised tables; `emblib.RowFormat` describes them."""

    INT2 = 2
    INT4 = 4
    INT8 = 8
    FP8_E4M3 = 9
    FP8_E5M2 = 10
    FP16 = 16
    BF16 = 17
    FP32 = 32


class IndexKind(IntEnum):
    """Kinds of the index before the rows of a feature."""

    NONE = 0
    ARRAY = 1
    HASH = 2


class IndexColumn(IntEnum):
    """Columns of `tables` of `map_ids`, int64 `[F, 6]` (csrc `IndexTable`)."""

    KIND = 0
    BEGIN = 1  # first element of the feature's entries in `index`
    ENTRIES = 2  # number of int32 rows of an array, or of int64 pairs of a hash table
    HASH_BITS = 3
    NUM_IDS = 4  # -1: any id is a key
    MISSING = 5  # row of an id that has none; -1 reads zeros


class Tier(IntEnum):
    """Memory tiers, in the order of the `weights` of an op."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    CACHE = 3


class BagColumn(IntEnum):
    """Columns of `bag_layout`, int64 `[bags, 2]` (csrc `BagLayout`)."""

    FEATURE = 0
    ELEMENT = 1  # first element of the bag in the output


class TTTableColumn(IntEnum):
    """Columns of `tables` of tensor-train ops, int64 `[T, 10]` (csrc `TtTableIds`)."""

    ROWS = 0
    MULTIPLIER = 1  # factor that permutes ids, see emblib.tt.shapes
    OFFSET = 2
    LEFT_OUTER_ROWS = 3  # rows of the first core
    LEFT_INNER_ROWS = 4  # rows of the second core, 1 if the left half has none
    RIGHT_IDS = 5  # number of ids of right halves
    LEFT_IS_PAIR = 6  # 1 if the left half is two cores
    FIRST_KEY = 7  # key of the table's first id, among all tables
    FIRST_LEFT = 8  # the table's first id of a left half, among all tables
    FIRST_RIGHT = 9


class CacheCounter(IntEnum):
    """Columns of the counters of a cache, int64 `[T + 1, 8]`; the last row is of all tables."""

    CALLS = 0
    LOOKUPS = 1
    UNIQUE = 2
    UNIQUE_MISSES = 3
    CONFLICT_UNIQUE_MISSES = 4
    CONFLICT_MISSES = 5
    LOOKUP_MISSES = 6
    WRITE_BACKS = 7


class HashTableColumn(IntEnum):
    """Columns of `tables` of a hash index, int64 `[T, 6]`."""

    FIRST_BUCKET = 0
    BUCKETS = 1  # buckets in use
    MAX_BUCKETS = 2  # buckets up to which the table may grow
    SIZE = 3  # number of keys
    MAX_LOAD = 4  # load above which the table grows, in keys per 1024 slots
    HASH_KEY = 5  # random number that the hashes of the table's keys depend on


class HashEntryColumn(IntEnum):
    """Columns of `entries` of a hash index, int64 `[S, 2]` or, with scores, `[S, 3]`."""

    KEY = 0
    STAMP = 1
    SCORE = 2


class HashCounter(IntEnum):
    """Columns of the counters of a hash index, int64 `[T, 8]`."""

    LOOKUPS = 0
    HITS = 1
    INSERTED = 2
    EVICTED = 3
    REFUSED = 4
    NOT_ADMITTED = 5
    EXPIRED = 6
    ERASED = 7


class InsertStatus(IntEnum):
    """The status of a key after a batch, uint8."""

    MISS = 0
    HIT = 1
    NEW = 2
    EVICTING = 3
    REFUSED = 4
    NOT_ADMITTED = 5
    STORED = 6


class InitialKind(IntEnum):
    """Distribution of initial values: `InitialRuleColumn.KIND` of `hash_initial_rows_`."""

    UNIFORM = 0
    NORMAL = 1
    CONSTANT = 2
    KEY_MODULO = 3


class InitialRuleColumn(IntEnum):
    """Columns of `rules` of `hash_initial_rows_`, float64 `[T, P, 7]` (csrc `InitialRule`).

    P is the number of row buffers: weights and optimizer states.
    """

    KIND = 0
    BASE = 1  # value of a constant, lower bound of a uniform, mean of a normal distribution
    SCALE = 2  # width of a uniform, standard deviation of a normal distribution
    FIRST = 3  # probability of the normal distribution below LOW
    SPAN = 4  # probability of the normal distribution between LOW and HIGH
    LOW = 5
    HIGH = 6


class InitialLayoutColumn(IntEnum):
    """Columns of `layout` of `hash_initial_rows_`, int64 `[T, P, 5]` (csrc `InitialLayout`)."""

    OFFSET = 0  # first element of the table in the buffer
    STRIDE = 1  # elements between rows
    ROWS = 2
    DIM = 3
    STREAM = 4  # number that selects the random numbers of the table and buffer


class RouteFeatureColumn(IntEnum):
    """Columns of `features` of a route, int64 `[F, 4]` (csrc `RouteFeature`)."""

    FIRST_BLOCK = 0
    NUM_BLOCKS = 1
    ROWS = 2
    RULE = 3


class RouteRule(IntEnum):
    """Rule by which a feature selects the block of an id: its range of rows, or a hash of the key.

    BY_RANGE_ELSE_SPREAD is BY_RANGE, except that an id beyond the rows is divided by the number of
    blocks: the remainder is the block, the quotient the id within it.
    """

    BY_RANGE = 0
    BY_KEY = 1
    BY_RANGE_ELSE_SPREAD = 2


class RouteBlockColumn(IntEnum):
    """Columns of `blocks` of a route, int64 `[K, 3]` (csrc `RouteBlock`)."""

    FIRST_ROW = 0
    FIRST_COPY = 1  # first entry in `copies`, the units that get ids of the block
    NUM_COPIES = 2


class TargetColumn(IntEnum):
    """Columns of `targets` of `combine`, int64 `[T, 7]` (csrc `Target`)."""

    OFFSET = 0  # first element in the output
    STRIDE = 1  # elements between rows
    ROWS = 2
    WIDTH = 3  # columns
    FIRST_PIECE = 4  # the target is the sum of these pieces
    END_PIECE = 5
    FIRST_BAG = 6  # row i is divided by lengths[FIRST_BAG + i]; -1 divides none


class PieceColumn(IntEnum):
    """Columns of `pieces` of `combine`, int64 `[P, 3]` (csrc `SourcePiece`)."""

    OFFSET = 0  # first element in the source
    STRIDE = 1  # elements between rows
    FIRST_ROW = 2  # row i of the target uses row rows[FIRST_ROW + i]; -1: it uses row i
