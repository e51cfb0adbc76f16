"""What the tables of a collection are, in frozen descriptions: sizes, features, kinds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from emblib.optim import Optimizer
from emblib.specs import (
    CacheConfig,
    DynamicSpec,
    Eviction,
    FrequencyAdmission,
    Initializer,
    InsertPolicy,
    OnInsertFailure,
    Placement,
    Pooling,
    TableSpec,
    TTSpec,
    Uniform,
    check_count,
    check_float_dtype,
)
from emblib.tt.initializers import INITIALIZERS


@dataclass(frozen=True)
class Plain:
    """Every row is kept as it is.

    Args:
        placement: where the rows are.
        cache: of a placement that has one; tables of one collection with equal ones share it.
    """

    placement: Placement = Placement.DEVICE
    cache: CacheConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", Placement(self.placement))
        if self.cache is not None and not isinstance(self.cache, CacheConfig):
            raise TypeError(f"cache must be None or a Cache, got {self.cache!r}")
        if self.cache is not None and not self.placement.cached:
            raise ValueError(
                f"cache is for the placements MANAGED_CACHING and DISK, got {self.placement}"
            )

    def spec(self, rows: int, dim: int, name: str) -> TableSpec:
        """Of a table of this kind."""
        return TableSpec(rows, dim, name, self.placement)


@dataclass(frozen=True)
class TensorTrain:
    """Rows are products of 2 to 4 small cores, see `TTSpec`; `init` as in `TTEmbeddingBag`."""

    ranks: tuple[int, ...]
    row_factors: tuple[int, ...] = ()
    dim_factors: tuple[int, ...] = ()
    init: str = "gaussian"

    def __post_init__(self) -> None:
        for name in ("ranks", "row_factors", "dim_factors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.init not in INITIALIZERS:
            raise ValueError(f"init must be one of {', '.join(INITIALIZERS)}, got {self.init!r}")

    def spec(self, rows: int, dim: int, name: str) -> TTSpec:
        """Of a table of this kind."""
        return TTSpec(rows, dim, self.ranks, self.row_factors, self.dim_factors, name)


@dataclass(frozen=True)
class Dynamic:
    """Rows for keys of any value; `num_embeddings` is the capacity. Fields are `DynamicSpec`'s.

    `seed` is that of `DynamicEmbeddingBags`; where strangers choose the keys, give one that they do
    not know. Tables of unequal seeds do not share a kernel. None: first values are those of seed 0,
    and keys are hashed by a seed that the collection draws from torch's generator, the same on all
    ranks that have parts of the table.
    """

    initial_capacity: int | None = None
    max_load: float = 0.8
    eviction: Eviction = Eviction.LRU
    newcomer: InsertPolicy = InsertPolicy.ALWAYS_EVICT
    initializer: Initializer = field(default=Uniform())
    initial_state: float = 0.0
    missing: float = 0.0
    admission: FrequencyAdmission | None = None
    ttl: int | None = None
    check: OnInsertFailure = OnInsertFailure.IGNORE
    seed: int | None = field(default=None, repr=False)  # a secret, which no log should have

    def __post_init__(self) -> None:
        if self.seed is not None:
            object.__setattr__(self, "seed", check_count("seed", self.seed, minimum=0))
        for name, choice in (
            ("eviction", Eviction),
            ("newcomer", InsertPolicy),
            ("check", OnInsertFailure),
        ):
            object.__setattr__(self, name, choice(getattr(self, name)))

    def spec(self, rows: int, dim: int, name: str) -> DynamicSpec:
        """Of a table of this kind."""
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "seed"}
        return DynamicSpec(rows, dim, name=name, **given)


@dataclass(frozen=True)
class Quantized:
    """Rows of 8 or 4 bits a value, with a scale and an offset a row; they cannot be trained."""

    bits: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (4, 8):
            raise ValueError(f"bits must be 8 or 4, got {self.bits!r}")

    def spec(self, rows: int, dim: int, name: str) -> TableSpec:
        """Of a table of this kind."""
        return TableSpec(rows, dim, name)


Kind = Plain | TensorTrain | Dynamic | Quantized
Spec = TableSpec | TTSpec | DynamicSpec

_TAKEN = frozenset(dir(nn.ModuleDict()))


@dataclass(frozen=True)
class TableConfig:
    """What the configurations of pooled and of sequence tables have in common.

    Args:
        num_embeddings: rows; the capacity of a dynamic table.
        embedding_dim: length of a row.
        name: of the table, in checkpoints and plans; no dots, and none of `nn.ModuleDict`'s own
            names ("train", "keys", ...), as parameters are found by it.
        feature_names: the features that read the table; left out, one of the table's name.
        data_type: of the rows as they are stored: float32, float16 or bfloat16.
        weight_init_min, weight_init_max: rows start uniform between them; left out, in
            +-sqrt(1 / num_embeddings).
        init_fn: writes the first values into the tensor `[num_embeddings, embedding_dim]` that it
            is given, instead.
        kind: how the rows are kept.
        optimizer: of this table; None for that of its collection.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    feature_names: tuple[str, ...] = ()
    data_type: torch.dtype = field(default=torch.float32, kw_only=True)
    weight_init_min: float | None = field(default=None, kw_only=True)
    weight_init_max: float | None = field(default=None, kw_only=True)
    init_fn: Callable[[Tensor], Any] | None = field(default=None, kw_only=True)
    kind: Kind = field(default=Plain(), kw_only=True)
    optimizer: Optimizer | None = field(default=None, kw_only=True)

    pooled: ClassVar[bool]

    def __post_init__(self) -> None:
        for name in ("num_embeddings", "embedding_dim"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if not isinstance(self.name, str) or not self.name or "." in self.name:
            raise ValueError(
                "name of a table must be a string without dots that is not empty, got "
                f"{self.name!r}"
            )
        if self.name in _TAKEN:
            raise ValueError(
                "a table is found by its name in a module, where nn.ModuleDict has an attribute "
                f"{self.name!r} already: call it otherwise, e.g. '{self.name}_table', and give "
                f"feature_names=[{self.name!r}] where features are called so"
            )
        if isinstance(self.feature_names, str):
            raise TypeError(
                f"feature_names must be a sequence of names, got {self.feature_names!r}; "
                f"write [{self.feature_names!r}]"
            )
        features = tuple(self.feature_names) or (self.name,)
        if not all(isinstance(name, str) and name for name in features):
            raise TypeError(f"feature_names of {self.name!r} must be names, got {features}")
        if len(set(features)) < len(features):
            raise ValueError(f"feature_names of {self.name!r} must differ, got {features}")
        object.__setattr__(self, "feature_names", features)
        check_float_dtype(f"data_type of {self.name!r}", self.data_type)
        self._check_kind()
        self._check_first_values()
        self.spec()

    def _check_kind(self) -> None:
        if not isinstance(self.kind, Kind):
            raise TypeError(
                f"kind of {self.name!r} must be a Plain(), TensorTrain(ranks), Dynamic() or "
                f"Quantized(), got {self.kind!r}"
            )
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise TypeError(
                f"optimizer of {self.name!r} must be None or one of emblib.optim, got "
                f"{self.optimizer!r}"
            )
        if isinstance(self.kind, TensorTrain) and self.data_type is not torch.float32:
            raise ValueError(
                f"cores are float32: data_type of {self.name!r} must be torch.float32, got "
                f"{self.data_type}"
            )
        if isinstance(self.kind, Quantized) and self.optimizer is not None:
            raise ValueError(
                f"a quantised table is not trained: optimizer of {self.name!r} must be None, got "
                f"{self.optimizer!r}"
            )

    def _check_first_values(self) -> None:
        for name in ("weight_init_min", "weight_init_max"):
            bound = getattr(self, name)
            if bound is not None and not isinstance(bound, int | float):
                raise TypeError(f"{name} of {self.name!r} must be None or a number, got {bound!r}")
        if self.init_fn is not None and not callable(self.init_fn):
            raise TypeError(
                f"init_fn of {self.name!r} must be None or a function that fills the tensor it is "
                f"given, e.g. torch.nn.init.zeros_, got {self.init_fn!r}"
            )
        given = self.weight_init_min is not None or self.weight_init_max is not None
        if given and self.init_fn is not None:
            raise ValueError(f"{self.name!r} has init_fn and bounds of first values; give one")
        if isinstance(self.kind, TensorTrain) and (given or self.init_fn is not None):
            raise ValueError(
                f"the cores of {self.name!r} start as kind=TensorTrain(init=...) says, which gives "
                "rows the deviation of the default bounds; leave init_fn and bounds out"
            )
        if isinstance(self.kind, Dynamic) and self.init_fn is not None:
            raise ValueError(
                f"the rows of {self.name!r} start when their keys come: use "
                "kind=Dynamic(initializer=...), not init_fn"
            )
        low, high = self.bounds
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ValueError(
                f"weight_init_min and weight_init_max of {self.name!r} must be finite and in this "
                f"order, got {low} and {high}"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Between which first values are uniform, as given or left out."""
        bound = math.sqrt(1.0 / self.num_embeddings)
        return (
            -bound if self.weight_init_min is None else self.weight_init_min,
            bound if self.weight_init_max is None else self.weight_init_max,
        )

    def spec(self) -> Spec:
        """The whole table as the modules of tables take it."""
        return self.kind.spec(self.num_embeddings, self.embedding_dim, self.name)


@dataclass(frozen=True)
class EmbeddingBagConfig(TableConfig):
    """A table whose rows are pooled; `pooling` SUM or MEAN.

    MEAN divides by the number of ids of a bag, weighted or not: `sum(w * e) / L`.
    """

    pooling: Pooling = field(default=Pooling.SUM, kw_only=True)

    pooled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "pooling", Pooling(self.pooling))
        if self.pooling is Pooling.NONE:
            raise ValueError(
                f"pooling of {self.name!r} must be SUM or MEAN; for one vector an id use an "
                "EmbeddingConfig in an EmbeddingCollection"
            )


@dataclass(frozen=True)
class EmbeddingConfig(TableConfig):
    """A table that gives one vector an id."""

    pooled: ClassVar[bool] = False
