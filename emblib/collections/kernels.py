"""The modules of tables as parts of a collection: first values by slice, gradients by table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from emblib.collections.configs import Quantized, TensorTrain
from emblib.collections.slices import TableSlice, draw, draw_cores
from emblib.ops import random
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import Cache, Pooling, Precision, TableSpec, TTSpec
from emblib.tables import QuantizedEmbeddingBags, TableBatchedEmbeddingBags, TTEmbeddingBag
from emblib.tables.locks import atomic
from emblib.tt.shapes import check_ranks


class Rows(NamedTuple):
    """Where a table lies in the weights of a module: elements from `begin`, its first row, size."""

    begin: int
    first_row: int
    rows: int
    dim: int


class JoinedTables(torch.autograd.Function):
    """The weights of a module as its tables' parameters make them, so that each has its gradient.

    `weights` is the memory that the parameters are views of; nothing is copied.
    """

    @staticmethod
    def forward(ctx: Any, weights: Tensor, places: Sequence[Rows], *tables: Tensor) -> Tensor:
        """`weights`."""
        ctx.places = places
        return weights.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The part of each table: views of a dense gradient, slices of a sparse one."""
        split = _split_sparse if grad.is_sparse else _split_dense
        return None, None, *split(grad, ctx.places)


def _split_dense(grad: Tensor, places: Sequence[Rows]) -> list[Tensor]:
    flat = grad.reshape(-1)
    return [flat[p.begin : p.begin + p.rows * p.dim].view(p.rows, p.dim) for p in places]


def _split_sparse(grad: Tensor, places: Sequence[Rows]) -> list[Tensor]:
    """Rows ascend, so those of a table are neighbours; reads where they begin from the device."""
    rows, values = grad._indices()[0], grad._values()
    firsts = torch.tensor([p.first_row for p in places], device=rows.device)
    counts = torch.tensor([p.rows for p in places], device=rows.device)
    begins = torch.searchsorted(rows, torch.stack([firsts, firsts + counts])).tolist()
    return [
        torch.sparse_coo_tensor(
            (rows[begin:end] - p.first_row).unsqueeze(0),
            values[begin:end],
            (p.rows, p.dim),
            is_coalesced=True,
            check_invariants=False,
        )
        for p, begin, end in zip(places, *begins, strict=True)
    ]


class PartTables(TableBatchedEmbeddingBags):
    """Plain tables that are slices; with `optim.External`, a parameter a table gets its gradient.

    `weights` is a buffer here: the parameters that users see are views of it, see `TableGroups`.
    """

    def __init__(
        self,
        parts: Sequence[TableSlice],
        names: Sequence[str],
        feature_tables: Sequence[int],
        optimizer: Optimizer,
        pooling: Pooling,
        seeds: Sequence[int],
        cache: Cache | None,
        device: torch.device,
    ) -> None:
        self._parts, self._seeds, self.parameters_by_table = list(parts), list(seeds), []
        specs = [part.named(name) for part, name in zip(parts, names, strict=True)]
        super().__init__(
            [spec for spec in specs if isinstance(spec, TableSpec)],
            optimizer,
            pooling=pooling,
            feature_tables=feature_tables,
            precision=Precision(weights=parts[0].config.data_type),
            cache=cache,
            device=device,
        )
        weights = self._parameters.pop("weights")
        assert weights is not None
        self.register_buffer("weights", weights.detach(), persistent=False)
        self._places = [
            Rows(place.weight_offset, place.row_base, place.rows, place.dim)
            for place in self._memory.layout.places
        ]

    parameters_by_table: list[nn.Parameter]

    def _draw(self, table: int, weight: Tensor) -> None:
        draw(self._parts[table], weight, self._seeds[table])

    @atomic
    def view_of(self, table: int) -> dict[str, Tensor]:
        """`weight` and optimizer states of a table, without what a cache has of them."""
        self._memory.verify()  # whoever gets the views may read them at any time
        return self._memory.view(table, self.weights.detach(), self._states())

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from these seeds."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def _trained_weights(self) -> Tensor:
        if not torch.is_grad_enabled():
            return self.weights
        return JoinedTables.apply(self.weights, self._places, *self.parameters_by_table)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parameters_by_table": []}  # set again by who has the tables


class PartTT(TTEmbeddingBag):
    """A tensor-train table that is a slice, read by any number of features."""

    def __init__(
        self, part: TableSlice, optimizer: Optimizer, pooling: Pooling, seed: int, device: Any
    ) -> None:
        self._part, self._seed = part, seed
        spec = part.spec
        assert isinstance(spec, TTSpec)
        init = part.config.kind.init if isinstance(part.config.kind, TensorTrain) else "gaussian"
        super().__init__(spec, optimizer, pooling=pooling, init=init, device=device)

    def _check_ranks(self) -> None:
        # What ranks can use is a matter of the whole table, not of how it is divided.
        whole = self._part.config.spec()
        assert isinstance(whole, TTSpec)
        check_ranks(whole.ranks, whole.row_factors, whole.dim_factors)

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from this seed."""
        (self._seed,) = seeds
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the cores anew; optimizer state, step and learning rate as at construction."""
        with torch.no_grad():
            draw_cores(self._part, list(self.cores), self._seed)
            for states in self._states():
                for state in states:
                    state.zero_()
            self._reset_common()


class PartQuantized(QuantizedEmbeddingBags):
    """Quantised tables that are slices. First values are those of plain tables, quantised."""

    optimizer: Optimizer = External(gradient=Gradient.DENSE)  # nothing is trained

    def __init__(
        self,
        parts: Sequence[TableSlice],
        names: Sequence[str],
        feature_tables: Sequence[int],
        pooling: Pooling,
        seeds: Sequence[int],
        device: torch.device,
    ) -> None:
        kind = parts[0].config.kind
        assert isinstance(kind, Quantized)
        self._parts, self._seeds = list(parts), list(seeds)
        specs = [kind.spec(p.num_rows, p.dim, name) for p, name in zip(parts, names, strict=True)]
        super().__init__(
            specs, kind.bits, pooling=pooling, feature_tables=feature_tables, device=device
        )

    def redraw(self, seeds: Sequence[int]) -> None:
        """First values anew, from these seeds."""
        self._seeds = list(seeds)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """First values of all tables."""
        super().reset_parameters()
        if self.values.is_meta:
            return
        for table, (part, seed) in enumerate(zip(self._parts, self._seeds, strict=True)):
            step = part.num_rows if part.config.init_fn is not None else _ROWS
            for first in range(*part.rows, step):
                rows = (first, min(first + step, part.rows[1]))
                some = replace(part, rows=rows)
                weight = torch.empty(some.num_rows, some.dim, device=self.values.device)
                draw(some, weight, seed)
                self.write_rows(table, weight, first - part.rows[0])


_ROWS = 1 << 16  # of a quantised table, drawn as floats at a time


def fresh_seeds(parts: Sequence[TableSlice]) -> dict[str, int]:
    """A seed a table, drawn from torch's generator in the order of the tables."""
    return {name: random.new_seed() for name in dict.fromkeys(p.config.name for p in parts)}


def is_sparse(optimizer: Optimizer) -> bool:
    """Whether the gradient that is handed out has the rows of the batch only."""
    return isinstance(optimizer, External) and optimizer.gradient.value == "sparse"
