"""Configurations of the tables of a collection: sizes, features, initial values, storage.

`table_features` lists the features that read the tables of configurations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from emblib.optim import Optimizer
from emblib.specs import Pooling, StochasticRounding, check_count, check_float_dtype
from emblib.storage import Dense, Storage, kinds
from emblib.torch_names import refuse_names_of_torch

_MODULE_DICT_NAMES = frozenset(dir(nn.ModuleDict()))  # tables are entries of one


@dataclass(frozen=True)
class TableConfig:
    """Base of the configurations of pooled and of sequence tables.

    Args:
        num_embeddings: rows; the capacity of a hash table.
        embedding_dim: elements per row.
        name: name of the table in checkpoints and plans, which must be given. Dots are not allowed,
            nor the names that `nn.ModuleDict` defines ("train", "keys", ...), because it becomes an
            attribute there.
        feature_names: names of the features that read the table; () is one feature with the name of
            the table.
        data_type: dtype of the stored rows, or of the cores of a tensor train: float32, float16 or
            bfloat16.
        rounding: how updates of 16-bit rows are rounded. None rounds to nearest, which loses
            updates smaller than half a step; `StochasticRounding(seed)` keeps them on average.
        weight_init_min, weight_init_max: bounds of the uniform initial values; None for -b or b,
            where b is sqrt(1 / num_embeddings).
        init_fn: function that writes initial values into a tensor
            `[num_embeddings, embedding_dim]`, or an `emblib.init.ByRows`, which writes blocks of
            it; None draws uniform values. Not allowed with these bounds.
        storage: how the rows are stored, one of `emblib.storage`.
        optimizer: optimizer of this table; None uses the optimizer of its collection.

    Raises:
        TypeError: an argument has another type, or the name of a feature is empty.
        ValueError: `name` breaks these rules or is not a string, `data_type` is another dtype, a
            size is below 1, a feature is named twice, bounds are not finite or not in order, or
            `storage` does not support an argument.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    feature_names: tuple[str, ...] = ()
    data_type: torch.dtype = field(default=torch.float32, kw_only=True)
    rounding: StochasticRounding | None = field(default=None, kw_only=True)
    weight_init_min: float | None = field(default=None, kw_only=True)
    weight_init_max: float | None = field(default=None, kw_only=True)
    init_fn: Callable[[Tensor], Any] | None = field(default=None, kw_only=True)
    storage: Storage = field(default=Dense(), kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    pooled: ClassVar[bool]
    """Whether bags are pooled; otherwise there is one vector per id."""

    __new__ = refuse_names_of_torch  # names the argument to use for one of torch.nn.EmbeddingBag

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ValueError(
                "name of a table must be a string without dots that is not empty, got "
                f"{self.name!r}"
            )
        if self.name in _MODULE_DICT_NAMES:
            raise ValueError(
                "the name of a table is an attribute of an nn.ModuleDict, which already has "
                f"{self.name!r}: rename the table, e.g. '{self.name}_table', and give "
                f"feature_names=[{self.name!r}] if the features have this name"
            )
        if isinstance(self.feature_names, str):
            raise TypeError(
                f"feature_names must be a sequence of names, got {self.feature_names!r}; "
                f"write [{self.feature_names!r}]"
            )
        if not isinstance(self.feature_names, Iterable):
            raise TypeError(
                f"feature_names must be a sequence of names, got {self.feature_names!r}"
            )
        features = tuple(self.feature_names) or (self.name,)
        if not all(isinstance(name, str) and name for name in features):
            raise TypeError(f"feature_names of {self.name!r} must be names, got {features}")
        if len(set(features)) < len(features):
            raise ValueError(f"feature_names of {self.name!r} must differ, got {features}")
        object.__setattr__(self, "feature_names", features)
        check_float_dtype(f"data_type of {self.name!r}", self.data_type)
        self._check_types()
        self._check_initial_values()
        self.storage.check_table(self)
        self.spec()  # raises for sizes that the storage cannot have

    def _check_types(self) -> None:
        """Raise TypeError for a storage, rounding or optimizer of another type."""
        if not isinstance(self.storage, Storage):
            names = ", ".join(f"{kind.__name__}()" for kind in kinds().values())
            raise TypeError(
                f"storage of {self.name!r} must be one of emblib.storage, {names}, got "
                f"{self.storage!r}"
            )
        if self.rounding is not None and not isinstance(self.rounding, StochasticRounding):
            raise TypeError(
                f"rounding of {self.name!r} must be None or a StochasticRounding(seed=...), got "
                f"{self.rounding!r}"
            )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer of {self.name!r} must be None or one of emblib.optim, got "
                f"{self.optimizer!r}"
            )

    def _check_initial_values(self) -> None:
        """Raise TypeError or ValueError for wrong bounds of initial values or a wrong `init_fn`."""
        for name in ("weight_init_min", "weight_init_max"):
            bound = getattr(self, name)
            if bound is None:
                continue
            if not isinstance(bound, Real) or isinstance(bound, bool):
                raise TypeError(f"{name} of {self.name!r} must be None or a number, got {bound!r}")
            object.__setattr__(self, name, float(bound))
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(
                f"init_fn of {self.name!r} must be None or a function that fills the tensor it is "
                f"given, e.g. torch.nn.init.zeros_, got {self.init_fn!r}"
            )
        if self.has_bounds and self.init_fn is not None:
            raise ValueError(f"{self.name!r} has init_fn and bounds of initial values; set one")
        lower_bound, upper_bound = self.bounds
        if not (
            math.isfinite(lower_bound) and math.isfinite(upper_bound) and lower_bound <= upper_bound
        ):
            raise ValueError(
                f"weight_init_min and weight_init_max of {self.name!r} must be finite and in this "
                f"order, got {lower_bound} and {upper_bound}"
            )

    @property
    def has_bounds(self) -> bool:
        """Return whether `weight_init_min` or `weight_init_max` is set."""
        return self.weight_init_min is not None or self.weight_init_max is not None

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the bounds (low, high) of the uniform initial values."""
        bound = math.sqrt(1.0 / self.num_embeddings)
        return (
            -bound if self.weight_init_min is None else self.weight_init_min,
            bound if self.weight_init_max is None else self.weight_init_max,
        )

    def spec(self) -> Any:
        """Return the spec of the whole table that `storage` makes, e.g. a `TableSpec`."""
        return self.storage.spec(self.num_embeddings, self.embedding_dim, self.name)


@dataclass(frozen=True)
class EmbeddingBagConfig(TableConfig):
    """Configuration of a table whose bags are pooled; `pooling` is SUM or MEAN, else ValueError.

    MEAN divides by the number of ids of a bag, weighted or not: `sum(w * e) / L`.

    Example:
        >>> features = ["basket", "seen"]
        >>> config = emblib.EmbeddingBagConfig(1_000, 16, "item", features, pooling="mean")
        >>> config.pooling, config.feature_names
        (<Pooling.MEAN: 'mean'>, ('basket', 'seen'))
    """

    pooling: Pooling = field(default=Pooling.SUM, kw_only=True)

    pooled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooling", Pooling(self.pooling))
        if self.pooling is Pooling.NONE:
            raise ValueError(
                f"pooling of {self.name!r} must be SUM or MEAN; for one vector per id use an "
                "EmbeddingConfig in an EmbeddingCollection"
            )


@dataclass(frozen=True)
class EmbeddingConfig(TableConfig):
    """Configuration of a table with one vector per id.

    Example:
        >>> config = emblib.EmbeddingConfig(1_000_000, 16, "item", data_type=torch.bfloat16)
        >>> config.feature_names, config.data_type
        (('item',), torch.bfloat16)
    """

    pooled: ClassVar[bool] = False


class TableFeature(NamedTuple):
    """A feature that reads a table.

    Attributes:
        feature: name of the feature in batches.
        table: index of the table among the configurations.
        name: name in the output.
    """

    feature: str
    table: int
    name: str


def table_features(configs: Sequence[TableConfig]) -> list[TableFeature]:
    """Return one entry per feature and table that it reads.

    A feature of several tables has one output per table, named `feature@table`.

    Raises:
        ValueError: two entries would have one name in the output.
    """
    feature_tables = [
        (feature, table) for table, config in enumerate(configs) for feature in config.feature_names
    ]
    num_tables_by_feature = Counter(feature for feature, _ in feature_tables)
    features = [
        TableFeature(
            key, table, key if num_tables_by_feature[key] == 1 else f"{key}@{configs[table].name}"
        )
        for key, table in feature_tables
    ]
    for name, count in Counter(feature.name for feature in features).items():
        if count > 1:
            raise ValueError(
                f"{name!r} would be the name of {count} outputs, one of a feature that reads "
                "several tables: rename the feature or the table"
            )
    return features
