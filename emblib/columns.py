"""The columns of the tensors that Python and csrc share.

Each enum here has a counterpart in a header of csrc with the same names and numbers: an enum, or a
struct whose members are the columns, which often says more. A change needs both; tests/
test_columns.py compares them and has the table of their names.
"""

from enum import IntEnum
from typing import NamedTuple


class Hyper(IntEnum):
    """Entries of `hyper`; the hyperparameters of one optimizer only start at `OPTIMIZER_ARGS`."""

    LEARNING_RATE = 0
    STEP = 1  # steps so far; during an update, the number of its step, from 1
    L2 = 2  # coupled penalty: g += l2 * w
    DECAY = 3  # decoupled decay: w *= 1 - lr * decay
    SEED = 4  # seed of stochastic rounding; negative rounds to nearest
    OPTIMIZER_ARGS = 5


class FeatureColumn(IntEnum):
    """Columns of `features`, int64 `[F, 8]` (csrc `Feature`).

    A row has the table that a feature looks up, and where its output goes.
    """

    WEIGHT_OFFSET = 0  # elements before the table in its memory tier
    ROW_BASE = 1  # row r of the table is row ROW_BASE + r among those of all tables
    ROWS = 2
    DIM = 3
    COLUMN = 4  # first column in the output, used with pooling in a fixed batch
    TIER = 5  # a `Tier`; in quantised tables with several row formats a `RowFormatCode`
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

    KIND = 0  # an `IndexKind`
    BEGIN = 1  # first element of the feature's entries in `index`
    ENTRIES = 2  # number of int32 rows of an array, or of int64 pairs of a hash table
    HASH_BITS = 3  # bits of the hash of a key; a hash table has at least 2**HASH_BITS entries
    NUM_IDS = 4  # ids [0, NUM_IDS) are mapped; -1: every id is
    MISSING = 5  # row of a mapped id that has none; -1 reads zeros


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
    MULTIPLIER = 1  # drawn by emblib.tt.shapes
    OFFSET = 2  # id i has row (MULTIPLIER * i + OFFSET) % ROWS
    LEFT_OUTER_ROWS = 3  # rows of the first core
    LEFT_INNER_ROWS = 4  # rows of the second core, 1 if the left half has none
    RIGHT_IDS = 5  # number of ids of right halves
    LEFT_IS_PAIR = 6  # 1 if the left half is two cores
    FIRST_KEY = 7  # the table's first key, among all tables
    FIRST_LEFT = 8  # the table's first id of a left half, among all tables
    FIRST_RIGHT = 9  # the table's first id of a right half, among all tables


class CacheCounter(IntEnum):
    """Columns of the counters of a cache, int64 `[T + 1, 8]`; the last row is of all tables."""

    CALLS = 0  # batches; in the row of a table: batches that look it up
    LOOKUPS = 1
    UNIQUE = 2  # distinct rows, summed over batches
    UNIQUE_MISSES = 3  # distinct rows that were not in the cache
    CONFLICT_UNIQUE_MISSES = 4  # distinct rows that got no way
    CONFLICT_MISSES = 5  # lookups of rows that got no way
    LOOKUP_MISSES = 6  # lookups of rows that were not in the cache
    WRITE_BACKS = 7  # evicted rows


class HashTableColumn(IntEnum):
    """Columns of `tables` of a hash index, int64 `[T, 6]`."""

    FIRST_BUCKET = 0  # the table's first bucket, among those of all tables
    BUCKETS = 1  # buckets in use
    MAX_BUCKETS = 2  # buckets up to which the table may grow
    SIZE = 3  # number of keys
    MAX_LOAD = 4  # load, in keys per 1024 slots, to which a level is filled: `hash.wanted_buckets`
    HASH_KEY = 5  # random number that the hashes of the table's keys depend on


class HashEntryColumn(IntEnum):
    """Columns of `entries` of a hash index, int64 `[S, 2]` or, with scores, `[S, 3]`."""

    KEY = 0
    STAMP = 1
    SCORE = 2


class HashCounter(IntEnum):
    """Columns of the counters of a hash index, int64 `[T, 8]`."""

    LOOKUPS = 0  # positions of training batches
    HITS = 1  # positions whose key was in the table
    INSERTED = 2  # missing keys that got a slot
    EVICTED = 3  # keys that new ones replaced, or that had no slot when the table shrank
    REFUSED = 4  # missing keys that got no slot
    NOT_ADMITTED = 5  # missing keys that the admission policy rejected
    EXPIRED = 6  # keys removed because of their age
    ERASED = 7  # keys removed for another reason than eviction and age


class InsertStatus(IntEnum):
    """Result of an insertion for a missing key, or for the key of a position, uint8."""

    MISS = 0  # not decided yet; in arrays by miss, also the value after the last miss
    HIT = 1  # by position: the key had a slot; by miss: the row was moved from a store
    NEW = 2  # the key got an empty slot, or an overflow row if the table has a store
    EVICTING = 3  # the key got the slot of an evicted key
    REFUSED = 4  # the key got no slot
    NOT_ADMITTED = 5  # the admission policy rejected the key
    STORED = 6  # of `tier_insert_batch_`, by position: the row of the key came from a store


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

    KIND = 0  # an `InitialKind`
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


class SketchColumn(IntEnum):
    """Columns of `layout` of `sketch_count_`, int64 `[T, 5]` (csrc `SketchLayout`)."""

    BEGIN = 0  # first counter
    WIDTH = 1  # counters per row of the sketch
    DEPTH = 2  # rows; 0 for a table without a sketch
    THRESHOLD = 3  # the largest of the table, at which counters stop
    HASH_KEY = 4  # random number that the counters of a key depend on


class RouteFeatureColumn(IntEnum):
    """Columns of `features` of a route, int64 `[F, 4]` (csrc `RouteFeature`)."""

    FIRST_BLOCK = 0  # the feature has rows [FIRST_BLOCK, FIRST_BLOCK + NUM_BLOCKS) of `blocks`
    NUM_BLOCKS = 1  # 0 drops all ids of the feature
    NUM_ROWS = 2  # rows of the table
    RULE = 3  # a `RouteRule`


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

    FIRST_ROW = 0  # first row of the block in its table; BY_KEY does not read it
    FIRST_COPY = 1  # first entry in `copies`, the units that get ids of the block
    NUM_COPIES = 2


class TargetColumn(IntEnum):
    """Columns of `targets` of `combine`, int64 `[T, 7]` (csrc `Target`)."""

    OFFSET = 0  # first element in the output
    STRIDE = 1  # elements between rows
    NUM_ROWS = 2
    WIDTH = 3  # columns
    FIRST_PIECE = 4  # the target is the sum of pieces [FIRST_PIECE, END_PIECE)
    END_PIECE = 5
    FIRST_BAG = 6  # row i is divided by max(lengths[FIRST_BAG + i], 1); -1 divides none


class PieceColumn(IntEnum):
    """Columns of `pieces` of `combine`, int64 `[P, 3]` (csrc `SourcePiece`)."""

    OFFSET = 0  # first element in the source
    STRIDE = 1  # elements between rows
    # Row i of the target adds row rows[FIRST_ROW + i] of the piece, nothing if that is negative;
    # with FIRST_ROW -1 it adds row i.
    FIRST_ROW = 2
