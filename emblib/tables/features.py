"""F features that read T tables, side by side in one output: what all such modules have."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from emblib.ops import lookups
from emblib.optim import NUMBERS, External, Gradient, Optimizer
from emblib.specs import BoundsCheck, Pooling, Precision, brief
from emblib.tables import checkpoint
from emblib.tables.base import FusedTable
from emblib.tables.variable_batch import variable_batch


class SpecKind(NamedTuple):
    """The class of the specs of a kind of tables, one of them as code, and the way to others."""

    type: type
    example: str
    otherwise: str


def check_features(tables: Sequence[Any], feature_tables: Sequence[int], pooling: Pooling) -> None:
    """Raise ValueError for features of tables that are not there, or of unlike dims for NONE."""
    for f, t in enumerate(feature_tables):
        if not 0 <= t < len(tables):
            raise ValueError(
                f"feature_tables[{f}] must be in [0, {len(tables)}), the number of tables, got {t}"
            )
    dims = sorted({spec.dim for spec in tables})
    if len(dims) > 1 and pooling is Pooling.NONE:
        raise ValueError(
            f"pooling NONE needs one dim for all tables, got {dims}; make one module a dim"
        )


class FeatureTables(FusedTable):
    """Base of modules of T tables that F features read, pooled into `[B, sum D]`.

    The constructor checks the arguments that they have in common; the subclass then says where the
    tables are and makes `_layout` of it with `_feature_rows`.
    """

    weights: nn.Parameter
    tables: tuple[Any, ...]
    spec_kind: ClassVar[SpecKind]

    def __init__(
        self,
        tables: Sequence[Any],
        optimizer: Optimizer | None,
        pooling: Pooling,
        feature_tables: Sequence[int] | None,
        precision: Precision | None,
        bounds_check: BoundsCheck,
    ) -> None:
        precision = Precision() if precision is None else precision
        if not isinstance(precision, Precision):
            raise TypeError(
                "precision must be a Precision, e.g. Precision(weights=torch.float16), got "
                f"{precision!r}"
            )
        super().__init__(optimizer, pooling, precision.output, bounds_check)
        self.precision = precision
        self.tables = (tables,) if isinstance(tables, self.spec_kind.type) else tuple(tables)
        self.feature_tables = (
            tuple(range(len(self.tables))) if feature_tables is None else tuple(feature_tables)
        )
        self._check_tables()
        self.table_names = checkpoint.table_names([spec.name for spec in self.tables])
        self._dims = [self.tables[t].dim for t in self.feature_tables]
        self.columns = sum(self._dims)
        if self.pooling is Pooling.NONE:
            self.columns = max(self._dims, default=0)

    def _check_tables(self) -> None:
        kind = self.spec_kind
        for t, spec in enumerate(self.tables):
            if not isinstance(spec, kind.type):
                raise TypeError(
                    f"tables[{t}] must be a {kind.type.__name__}, e.g. {kind.example}, got "
                    f"{spec!r}; {kind.otherwise}"
                )
        check_features(self.tables, self.feature_tables, self.pooling)
        dims = sorted({spec.dim for spec in self.tables})
        sparse = isinstance(self.optimizer, External) and (
            self.optimizer.gradient is Gradient.SPARSE
        )
        if len(dims) > 1 and sparse:
            raise ValueError(f"a sparse gradient is [rows, dim], so optim.External() needs one dim "
                             f"for all tables, got {dims}; make one module a dim, or take "
                             "External(gradient=Gradient.DENSE)")  # fmt: skip

    def _feature_rows(
        self, feature: Callable[[int, int], tuple[int, ...]]
    ) -> list[tuple[int, ...]]:
        """`_layout`, where `feature(table, column)` says where a table and its columns are."""
        column, rows = 0, []
        for t, dim in zip(self.feature_tables, self._dims, strict=True):
            rows.append(feature(t, column))
            column += 0 if self.pooling is Pooling.NONE else dim
        return rows

    def _register_planes(
        self, weights: Tensor, states: Sequence[Tensor], *, persistent: bool = True
    ) -> None:
        """Weights `[sum rows * dim]` as a parameter, states as buffers: they move with the module.

        Only `optim.External` leaves a gradient on the weights, which then are `[rows, dim]` where
        there is one dim.
        """
        fused = lookups.is_fused(self.optimizer)
        dims = {spec.dim for spec in self.tables}
        if not fused and len(dims) == 1:
            weights = weights.view(-1, *dims)
        self.weights = nn.Parameter(weights, requires_grad=not fused)
        for state, tensor in zip(self.optimizer.states, states, strict=True):
            self.register_buffer(f"state_{state.name}", tensor, persistent=persistent)

    _untrained: frozenset[int] = frozenset()
    """The tables that backward leaves as they are, where each has a parameter of its own."""

    def set_table_trained(self, table: int, *, trained: bool) -> None:
        """Train a table from the next forward on, or leave it as it is."""
        others = self._untrained - {table}
        self._untrained = others if trained else others | {table}
        self._frozen = len(self._untrained) == len(self.tables)

    def _states(self) -> list[Tensor]:
        return [getattr(self, f"state_{state.name}") for state in self.optimizer.states]

    def _initial_hyper(self) -> Tensor:
        hyper = super()._initial_hyper()
        if self.precision.stochastic_rounding is not None:
            hyper[NUMBERS["seed"]] = float(self.precision.stochastic_rounding.seed)
        return hyper

    def _bag_layout(
        self, offsets: Tensor, batch_sizes: Sequence[Sequence[int]] | None, device: torch.device
    ) -> tuple[Tensor | None, int]:
        """Where each bag goes if batch sizes are unequal, and columns or elements of the output."""
        if batch_sizes is None:
            return None, self.columns
        bags = max(offsets.numel() - 1, 0)
        layout, elements = variable_batch(batch_sizes, self._dims, bags, device)
        return layout, self.columns if self.pooling is Pooling.NONE else elements

    def _size_of(self, spec: Any) -> str:
        """What `extra_repr` says of a table."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """Tables, optimizer and choices."""
        sizes = ", ".join(
            f"{name}: {self._size_of(spec)}"
            for name, spec in zip(self.table_names[:4], self.tables, strict=False)
        )
        more = f", ... {len(self.tables)} tables" if len(self.tables) > 4 else ""
        parts = [f"[{sizes}{more}]", brief(self.optimizer), f"pooling={self.pooling.value}"]
        if self.precision != Precision():
            parts.append(brief(self.precision))
        return ", ".join(parts)
