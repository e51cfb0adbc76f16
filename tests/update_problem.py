"""Random problems for the fused update: tables in memory tiers, a cache, bags and gradients."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from emblib.ops.codes import OPTIMIZER, POOLING
from emblib.optim import Optimizer, State
from emblib.reference import tbe

CACHE = 3


@dataclass
class Problem:
    """One update of `optimizer`; `tiers` says where each table is, `cached` which have a cache.

    With `layout` the bags are a variable batch: each feature has its own number of them.
    """

    optimizer: Optimizer
    rows: tuple[int, ...] = (40, 7, 1)
    dims: tuple[int, ...] = (8, 20, 3)
    tiers: tuple[int, ...] = (0, 0, 0)
    cached: tuple[bool, ...] = (False, False, False)
    features_of: tuple[int, ...] = (0, 1, 2, 0)
    batch: int = 6
    longest: int = 5
    layout: bool = False
    weights_dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    states_dtype: torch.dtype = torch.float32
    seed: int = 0
    rounding: int = -1
    step: int = 3

    weights: list[Tensor] = field(init=False)
    states: list[Tensor] = field(init=False)
    features: Tensor = field(init=False)
    hyper: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._random = torch.Generator().manual_seed(self.seed)
        self.hyperparams = self.optimizer.hyperparams()
        self.hyperparams[1], self.hyperparams[4] = self.step, self.rounding
        self._place_tables()
        self._make_bags()
        slots, stride = 16, max(self.dims)
        sizes = [*self._elements, slots * stride]
        entries = [*self._entries, slots]
        last = CACHE if any(self.cached) else max(self.tiers, default=0)
        dtypes = [self.weights_dtype] * 3 + [self.cache_dtype or self.weights_dtype]
        self.weights = [self._normal(sizes[t]).to(dtypes[t]) for t in range(last + 1)]
        self.states = [
            self._state(kept, entries[t] if kept.per_row else sizes[t])
            for t in range(last + 1)
            for kept in self.optimizer.states
        ]
        self.row_slots = self._slots(slots) if any(self.cached) else None

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._random)

    def _state(self, kept: State, size: int) -> Tensor:
        if kept.name == "prev_iter":
            return torch.randint(0, max(self.step, 1), (size,), generator=self._random).float()
        if kept.name == "row_counter":
            return torch.randint(0, 4, (size,), generator=self._random).float()
        values = self._normal(size)
        values = values * 0.1 if kept.name in ("exp_avg", "momentum_buffer") else values.abs()
        return values if kept.per_row else values.to(self.states_dtype)

    def _place_tables(self) -> None:
        self._elements, self._entries = [5, 0, 0], [2, 0, 0]  # unused memory comes first
        base, lines = 3, []
        for table, (rows, dim, tier) in enumerate(
            zip(self.rows, self.dims, self.tiers, strict=True)
        ):
            stride = max(self.dims) if self.cached[table] else 0
            place = (self._elements[tier], base, rows, dim, 0, tier, self._entries[tier], stride)
            lines.append(place)
            self._elements[tier] += rows * dim
            self._entries[tier] += rows
            base += rows
        self.total_rows, self.columns, of_features = base, 0, []
        for table in self.features_of:
            of_features.append((*lines[table][:4], self.columns, *lines[table][5:]))
            self.columns += self.dims[table]
        self.features = torch.tensor(of_features, dtype=torch.int64).view(-1, 8)

    def _make_bags(self) -> None:
        many = len(self.features_of)
        batches = [self.batch] * many
        if self.layout:
            batches = torch.randint(0, self.batch + 1, (many,), generator=self._random).tolist()
        feature = torch.repeat_interleave(torch.arange(many), torch.tensor(batches))
        dims = torch.tensor([self.dims[t] for t in self.features_of])[feature]
        within = torch.cat([torch.arange(n) for n in batches])
        if self.layout:  # a gap of 2 after each row, last bag first
            ends = (dims + 2).flip(0).cumsum(0).flip(0)
            self.starts = ends - dims - 2
            self.bag_layout = torch.stack([feature, self.starts], 1)
            shape: tuple[int, ...] = (int((dims + 2).sum()),)
        else:
            self.starts = within * self.columns + self.features[feature, 4]
            self.bag_layout = None
            shape = (self.batch, self.columns)
        lengths = torch.randint(0, self.longest + 1, feature.shape, generator=self._random)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        self.bag_of = torch.repeat_interleave(torch.arange(len(feature)), lengths)
        self.feature_of = feature[self.bag_of]
        limits = self.features[self.feature_of, 2]
        draw = torch.rand(len(limits), generator=self._random)
        self.indices = (draw * draw * limits).long()
        # Sums of eighths: exact in float32 in any order.
        self.grad = torch.randint(-24, 25, shape, generator=self._random) / 8.0

    def _slots(self, slots: int) -> Tensor:
        """About half of the cached rows are held; some slots lie outside the cache."""
        rows = self.groups().rows
        held = torch.randperm(slots, generator=self._random).repeat(1 + len(rows) // slots)
        result = torch.full_like(rows, -1, dtype=torch.int32)
        for i in range(min(len(rows), slots)):
            result[i] = -1 if i % 3 == 0 else held[i]
        result[slots:] = slots + 7
        return result

    def groups(self) -> tbe.RowGroups:
        """Lookups by row."""
        keys = self.features[self.feature_of, 1] + self.indices
        order = keys.argsort(stable=True)
        rows, counts = keys[order].unique_consecutive(return_counts=True)
        segments = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return tbe.RowGroups(rows, segments, order, self.bag_of[order])

    def padded_groups(self) -> tuple[Tensor, ...]:
        """The same as `tbe_group` returns it."""
        groups, n = self.groups(), self.indices.numel()
        unique = len(groups.rows)
        rows = torch.cat([groups.rows, groups.rows.new_zeros(n - unique)])
        rest = groups.segments.new_full((n - unique,), n)
        segments = torch.cat([groups.segments, rest]).int()
        count = torch.tensor([unique], dtype=torch.int32)
        return rows, segments, groups.lookups.int(), groups.bags.int(), count

    def weight_grads(self) -> list[Tensor]:
        """The dense gradient of the tables of each tier, float64."""
        dense = [torch.zeros(n, dtype=torch.float64) for n in self._elements]
        for bag, f, index in zip(
            self.bag_of.tolist(), self.feature_of.tolist(), self.indices.tolist(), strict=True
        ):
            offset, _, _, dim, _, tier, *_ = self.features[f].tolist()
            at = offset + index * dim
            start = int(self.starts[bag])
            dense[tier][at : at + dim] += self.grad.flatten()[start : start + dim]
        return dense

    def expected(self) -> list[Tensor]:
        """Weights and states after the update, by the reference."""
        weights = [w.clone() for w in self.weights]
        states = [s.clone() for s in self.states]
        rest = (self.weight_grads(), self.features, self.groups(), self.row_slots)
        tbe.update_(weights, states, self.hyperparams, self.optimizer.name, *rest)
        return [*weights, *states]

    def arguments(self, weights: list[Tensor], states: list[Tensor]) -> tuple[object, ...]:
        """What `tbe_update_` takes."""
        return (
            *(weights, states, self.hyperparams, OPTIMIZER[self.optimizer.name], self.grad),
            self.features,
            *(*self.padded_groups(), self.offsets, self.row_slots, self.bag_layout, None),
            POOLING["sum"],
        )
