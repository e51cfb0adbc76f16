"""Enums and option objects of NVIDIA's DynamicEmb, with its names, values and defaults."""

import abc
import enum
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from emblib.compat.checks import check_flags

BATCH_SIZE_PER_DUMP = 65536
"""Maximum number of rows that are handled at a time."""
BUCKET_ALIGNMENT = 16
"""Number that must divide every `bucket_capacity`."""
DEMB_TABLE_ALIGN_SIZE = BUCKET_ALIGNMENT
MAX_BUCKET_CAPACITY = 2**63 - 1
"""The `bucket_capacity` that requests one bucket per table."""
DIST_TYPES = ("continuous", "roundrobin", "hash_roundrobin")


DynamicEmbCheckMode = enum.IntEnum("DynamicEmbCheckMode", "ERROR WARNING IGNORE", start=0)
"""Reaction to keys for which there is no slot; with NO_EVICTION, IGNORE warns, too."""


DynamicEmbPoolingMode = enum.IntEnum("DynamicEmbPoolingMode", "SUM MEAN NONE", start=0)
"""Pooling of the rows of a bag."""


DynamicEmbEvictStrategy = enum.Enum(
    "DynamicEmbEvictStrategy", "LRU LFU EPOCH_LRU EPOCH_LFU CUSTOMIZED", start=0
)
"""Eviction order; the score strategy determines it."""


class DynamicEmbScoreStrategy(enum.IntEnum):
    """Meaning of a key's score, which determines the eviction order.

    TIMESTAMP is the number of the training step; in DynamicEmb it is a clock. A tuple of TIMESTAMP
    and LFU, in either order, gives keys both scores.
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
    """Distribution of the initial values of a row, and its parameters.

    Attributes:
        mode: distribution.
        mean: mean, of the normal distributions.
        std_dev: standard deviation, of the normal distributions.
        lower: lower bound, of UNIFORM and TRUNCATED_NORMAL; None is -1/sqrt(max_capacity). For
            UNIFORM a planner replaces None, see `complete_initializer_args`.
        upper: upper bound; None is 1/sqrt(max_capacity), or what the planner sets.
        value: value, of CONSTANT.

    Raises:
        ValueError: `mode` is neither a member of `DynamicEmbInitializerMode` nor its value.
    """

    mode: DynamicEmbInitializerMode = DynamicEmbInitializerMode.UNIFORM
    mean: float = 0.0
    std_dev: float = 1.0
    lower: float | None = None
    upper: float | None = None
    value: float = 0.0

    def __post_init__(self) -> None:
        self.mode = DynamicEmbInitializerMode(self.mode)


class AdmissionStrategy(abc.ABC):
    """Base of the rules that decide which keys get a row; a subclass must define `admit`.

    In training, keys without a row read initial values: those of the attribute `initializer_args`
    of the strategy, or if this is None or missing, those of the table. In evaluation they read the
    value of `DynamicEmbTableOptions.eval_initializer_args`.
    """

    @abc.abstractmethod
    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        """Return whether each key may have a row, bool `[N]`.

        Args:
            keys: int64 `[N]`.
            frequencies: number of uses of each key so far, int64 `[N]`.
        """


class FrequencyAdmissionStrategy(AdmissionStrategy):
    """Rule that gives a row to keys that were used at least `threshold` times.

    Args:
        threshold: number of uses; 0 admits all keys.
        initializer_args: initial values that keys without a row read in training; None is those of
            the table.

    Raises:
        ValueError: `threshold` is negative.
    """

    def __init__(
        self, threshold: int, initializer_args: DynamicEmbInitializerArgs | None = None
    ) -> None:
        if threshold < 0:
            raise ValueError(f"threshold must be >= 0, got {threshold}")
        self.threshold = threshold
        self.initializer_args = initializer_args

    def __eq__(self, other: object) -> bool:
        """Return whether the other object is a rule with the same arguments."""
        return isinstance(other, FrequencyAdmissionStrategy) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(self.threshold)

    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        """Return whether each frequency is at least the threshold, bool `[N]`.

        ValueError is raised if there is not one frequency per key.
        """
        if keys.shape[:1] != frequencies.shape[:1]:
            raise ValueError(
                "there must be one frequency per key, got "
                f"{tuple(frequencies.shape)} for keys {tuple(keys.shape)}"
            )
        return frequencies >= self.threshold


@dataclass
class KVCounter:
    """Exact counter of the uses of keys that do not have a row yet.

    Attributes:
        capacity: maximum number of keys.
        bucket_capacity: ignored.
        key_type: dtype that must be int64 or uint64.
    """

    capacity: int
    bucket_capacity: int = 1024
    key_type: torch.dtype = torch.int64


def _zero_values() -> DynamicEmbInitializerArgs:
    return DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.CONSTANT, value=0.0)


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """Options of one table; `docs/dynamicemb.md` says what each does here.

    Two objects are equal if the fields of `get_grouped_key` are equal.

    Attributes:
        embedding_dtype: dtype of the rows; None is float32.
        dim: length of a row; None only until a planner sets it.
        max_capacity: maximum number of rows per rank; None only until a planner sets it.
        evict_strategy: eviction order, which must be LRU, the default, or that of `score_strategy`;
            it has no effect.
        local_hbm_for_values: bytes of device memory for rows and states per rank; 0 is
            `global_hbm_for_values`.
        device_id: number of the GPU, if no device is passed.
        training: whether rows have optimizer states.
        initializer_args: initial values of new rows.
        eval_initializer_args: value that missing keys read in evaluation, of mode CONSTANT.
        caching: whether every row that a batch uses is moved to the device.
        init_capacity: initial number of rows; None is `max_capacity`.
        max_load_factor: load at which a table grows, in (0, 1].
        score_strategy: meaning of a key's score, which determines the eviction order.
        bucket_capacity: multiple of BUCKET_ALIGNMENT, to which a planner rounds capacities. A table
            ignores it, but raises for MAX_BUCKET_CAPACITY.
        safe_check_mode: reaction to keys for which there is no slot.
        global_hbm_for_values: bytes of device memory over all ranks.
        external_storage: `emblib.RowStore` that gets the rows that the device evicts; None is host
            memory.
        index_type: dtype int64 or uint64; None is int64. Lookups ignore it, and take all integers.
        dist_type: rule that routes keys to the files of ranks in dumps, one of DIST_TYPES.
        admit_strategy: rule that decides which keys get a row; None admits all.
        admission_counter: counter of keys without a row, which `admit_strategy` needs.

    Raises:
        NotImplementedError: a tuple of scores is not one of TIMESTAMP and LFU.
        TypeError: `score_strategy` is neither a strategy nor a tuple of strategies, a flag is text,
            or initial values or `evict_strategy` are objects of another class.
        ValueError: the mode of `eval_initializer_args` is not CONSTANT, or `dist_type` is unknown.
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
        check_flags(training=self.training, caching=self.caching)
        for name, kind in (
            ("initializer_args", DynamicEmbInitializerArgs),
            ("eval_initializer_args", DynamicEmbInitializerArgs),
            ("evict_strategy", DynamicEmbEvictStrategy),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
        if self.eval_initializer_args.mode is not DynamicEmbInitializerMode.CONSTANT:
            raise ValueError(
                "eval_initializer_args must be CONSTANT, got "
                f"{self.eval_initializer_args.mode.name}"
            )
        if self.dist_type not in DIST_TYPES:
            raise ValueError(f"dist_type must be one of {DIST_TYPES}, got {self.dist_type!r}")
        self.score_strategy = _normal_form(self.score_strategy)

    def get_grouped_key(self) -> dict[str, Any]:
        """Return the fields that must be equal for all tables of a module, by name.

        `embedding_dtype` must be equal, too, but is not one of them.
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
    """Return a score strategy; a tuple of one strategy becomes that strategy.

    Raises:
        NotImplementedError: a tuple of several is not one of TIMESTAMP and LFU.
        TypeError: the value is neither a strategy nor a tuple of strategies.
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
    """Return whether a CUSTOMIZED score below the last one warns.

    The environment variable DYNAMICEMB_CSTM_SCORE_CHECK=0 turns the warning off.
    """
    return os.environ.get("DYNAMICEMB_CSTM_SCORE_CHECK") != "0"
