"""The enums and option objects of NVIDIA's DynamicEmb, with its names, values and defaults."""

import abc
import enum
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BATCH_SIZE_PER_DUMP = 65536
BUCKET_ALIGNMENT = 16
"""Number that divides every `bucket_capacity`."""
DEMB_TABLE_ALIGN_SIZE = BUCKET_ALIGNMENT
MAX_BUCKET_CAPACITY = 2**63 - 1
"""The bucket_capacity that asks for one bucket per table."""
DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")


DynamicEmbCheckMode = enum.IntEnum("DynamicEmbCheckMode", "ERROR WARNING IGNORE", start=0)
"""Reaction to keys that found no slot; with NO_EVICTION, IGNORE warns, too."""


DynamicEmbPoolingMode = enum.IntEnum("DynamicEmbPoolingMode", "SUM MEAN NONE", start=0)
"""Operation that makes one vector of the rows of a bag."""


DynamicEmbEvictStrategy = enum.Enum(
    "DynamicEmbEvictStrategy", "LRU LFU EPOCH_LRU EPOCH_LFU CUSTOMIZED", start=0
)
"""The eviction order, which follows from the score strategy."""


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Meaning of a key's score; the tuple (TIMESTAMP, LFU) has both, in either order.

    TIMESTAMP is the number of the training step; in DynamicEmb it is a clock.
    """

    TIMESTAMP = 0
    STEP = 1
    CUSTOMIZED = 2
    LFU = 3
    NO_EVICTION = 4


ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]
COMPOUND = frozenset({DynamicEmbScoreStrategy.TIMESTAMP, DynamicEmbScoreStrategy.LFU})


class DynamicEmbInitializerMode(enum.Enum):
    """Distribution of the initial values of a row."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "truncated_normal"
    UNIFORM = "uniform"
    CONSTANT = "constant"
    DEBUG = "debug"


@dataclass
class DynamicEmbInitializerArgs:
    """Distribution of the initial values of a row, and its numbers.

    `mean` and `std_dev` are of the normal modes, `value` of CONSTANT. `lower` and `upper` are the
    bounds of UNIFORM and TRUNCATED_NORMAL; None is +-1/sqrt(max_capacity), but a planner fills in
    those of UNIFORM, see `complete_initializer_args`.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0


class AdmissionStrategy(abc.ABC):
    """Base of the rules for which keys get a row; a subclass needs `admit` only.

    In training, keys without a row read initial values: those of the attribute `initializer_args`
    of the strategy, or those of the table if that is None or missing. In evaluation they read the
    value of `DynamicEmbTableOptions.eval_initializer_args`.
    """

    @abc.abstractmethod
    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        """Return which keys may have a row, bool `[N]`.

        `keys` and `frequencies`, the uses of each key so far, are int64 `[N]`.
        """


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Keys get a row once they were seen `threshold` times; 0 admits all keys.

    In training, keys without a row read the initial values of `initializer_args`; None means those
    of the table. A negative `threshold` raises ValueError.
    """

    def __init__(
        self, threshold: int, initializer_args: DynamicEmbInitializerArgs | None = None
    ) -> None:
        if threshold < 0:
            raise ValueError(f"threshold must be >= 0, got {threshold}")
        self.threshold = threshold
        self.initializer_args = initializer_args

    def __eq__(self, other: object) -> bool:
        """Return whether the other object is the same rule."""
        return isinstance(other, FrequencyAdmissionStrategy) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.threshold)

    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        """Return which frequencies are at least the threshold; `keys` must be as many."""
        if keys.shape[:1] != frequencies.shape[:1]:
            raise ValueError(
                "there must be one frequency per key, got "
                f"{tuple(frequencies.shape)} for keys {tuple(keys.shape)}"
            )
        return frequencies >= self.threshold


@dataclass
class KVCounter:
    """Exact counter of up to `capacity` keys that have no row yet.

    `bucket_capacity` has no effect; `key_type` must be int64 or uint64.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64


def _zero_values() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """The options of one table; `docs/dynamicemb.md` lists the meaning of each in emblib.

    Two objects are equal if the fields of `get_grouped_key` are.

    Attributes:
        embedding_dtype: dtype of the rows; None is float32.
        dim: length of a row; None only before a planner fills it in.
        max_capacity: maximum number of rows per rank; None as for `dim`.
        evict_strategy: without effect; `score_strategy` determines the eviction order. A table
            raises for one that is neither LRU, the default, nor that of `score_strategy`.
        local_hbm_for_values: bytes of device memory for rows and states per rank; 0 uses
            `global_hbm_for_values`.
        device_id: number of the GPU, if no device is passed.
        training: whether rows have optimizer states.
        initializer_args: initial values of new rows.
        eval_initializer_args: value that missing keys read in evaluation, of mode CONSTANT.
        caching: whether every row that a batch uses is promoted to the device.
        init_capacity: initial number of rows; None is `max_capacity`.
        max_load_factor: load at which a table grows, in (0, 1].
        score_strategy: meaning of a key's score, which determines the eviction order.
        bucket_capacity: multiple of BUCKET_ALIGNMENT, to which a planner rounds capacities;
            without effect on a table, which raises for MAX_BUCKET_CAPACITY.
        safe_check_mode: reaction to keys that found no slot.
        global_hbm_for_values: bytes of device memory over all ranks.
        external_storage: `emblib.RowStore` that takes the rows that the device evicts.
        index_type: int64 or uint64, without effect on lookups, which take all integer ids; None is
            int64.
        dist_type: routing of keys to ranks in dumps, one of DIST_TYPES.
        admit_strategy: rule for which keys get a row; None admits all.
        admission_counter: counter of keys without a row; with `admit_strategy` only.

    Raises:
        NotImplementedError: a tuple of scores is not TIMESTAMP and LFU.
        TypeError: `score_strategy` is no strategy and no tuple of them.
        ValueError: `eval_initializer_args` has another mode, or `dist_type` another value.
    """

    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    evict_strategy: DynamicEmbEvictStrategy = DynamicEmbEvictStrategy.LRU
    local_hbm_for_values: int = 0
    device_id: int | None = None
    training: bool = True
    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    eval_initializer_args: DynamicEmbInitializerArgs = field(default_factory=_zero_values)
    caching: bool = False
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    score_strategy: ScoreStrategy = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int = 128
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: Any = None
    index_type: torch.dtype | None = None
    dist_type: str = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: KVCounter | None = None

    def __post_init__(self) -> None:
        if self.eval_initializer_args.mode is not DynamicEmbInitializerMode.CONSTANT:
            raise ValueError(
                "eval_initializer_args must be CONSTANT, got "
                f"{self.eval_initializer_args.mode.name}"
            )
        if self.dist_type not in DIST_TYPES:
            raise ValueError(f"dist_type must be one of {DIST_TYPES}, got {self.dist_type!r}")
        self.score_strategy = _normal_form(self.score_strategy)

    def get_grouped_key(self) -> dict[str, Any]:
        """Return the fields, by name, that must be equal for all tables of a module.

        `embedding_dtype` must be equal, too, but is not among them.
        """
        names = (
            "training",
            "caching",
            "external_storage",
            "index_type",
            "dist_type",
            "score_strategy",
            "admit_strategy",
        )
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        """Return whether the fields of `get_grouped_key` are equal."""
        if not isinstance(other, DynamicEmbTableOptions):
            return NotImplemented
        return self.get_grouped_key() == other.get_grouped_key()

    def __hash__(self) -> int:
        return hash(tuple(self.get_grouped_key().items()))


def _normal_form(strategy: Any) -> ScoreStrategy:
    """Return the strategy; a tuple of one strategy becomes that strategy.

    Raises:
        TypeError: the value is not a strategy.
        NotImplementedError: a tuple is not of TIMESTAMP and LFU.
    """
    strategies = strategy if isinstance(strategy, tuple) else (strategy,)
    for member in strategies:
        if not isinstance(member, DynamicEmbScoreStrategy):
            raise TypeError(
                "score_strategy must be a DynamicEmbScoreStrategy or a tuple of them, got "
                f"{strategy!r}"
            )
    if len(strategies) == 1:
        return strategies[0]
    if len(strategies) != 2 or frozenset(strategies) != COMPOUND:
        raise NotImplementedError(
            "of several scores only TIMESTAMP and LFU go together, got "
            f"{tuple(member.name for member in strategies)}"
        )
    return tuple(strategies)


def warns_of_lower_scores() -> bool:
    """Return whether a lower CUSTOMIZED score warns; DYNAMICEMB_CSTM_SCORE_CHECK=0 disables it."""
    return os.environ.get("DYNAMICEMB_CSTM_SCORE_CHECK") != "0"
