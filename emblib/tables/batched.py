"""T plain tables in one kernel, with the optimizer fused into the backward pass."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.ops import tbe
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling, TableSpec
from emblib.tables.base import FLOAT_DTYPES, FusedTable


class TableBatchedEmbeddingBags(FusedTable):
    """Looks up F features in T tables at once and pools them into one `[B, sum D]` output.

    Backward groups the lookups by row and applies `optimizer` to every distinct row of the batch,
    reading and writing it once; no gradient of the weights is ever stored. Every backward is a
    step of its own: two forwards in one loss are two updates, and gradients do not accumulate.
    With `optim.External()` it leaves a sparse gradient on `weights` instead, for any optimizer
    that takes one.

    Args:
        tables: rows and dim of each table.
        optimizer: one of `emblib.optim`.
        pooling: SUM, MEAN, or NONE for one vector a lookup (needs one dim for all features).
        feature_tables: the table of each feature; left out, feature i reads table i.
        dtype: of the weights: float32, float16 or bfloat16. Optimizer state is float32.
        output_dtype: float32, float16 or bfloat16. Sums are float32 in any case.
        bounds_check: what happens to invalid indices and offsets, see `BoundsCheck`.
        device: where the tables live.

    Weights start uniform in +-1/sqrt(rows) of their table, as DLRM's do.
    """

    weights: nn.Parameter

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        bounds_check: BoundsCheck = BoundsCheck.WARNING,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(optimizer, pooling, output_dtype, bounds_check)
        self.tables = (tables,) if isinstance(tables, TableSpec) else tuple(tables)
        self.feature_tables = (
            tuple(range(len(self.tables))) if feature_tables is None else tuple(feature_tables)
        )
        self._check_arguments(dtype)
        device = torch.empty(0, device=device).device
        ops.require_kernels(device)

        sizes = [spec.rows * spec.dim for spec in self.tables]
        self._weight_offsets = _prefix_sums(sizes)
        self._row_bases = _prefix_sums([spec.rows for spec in self.tables])
        dims = [self.tables[t].dim for t in self.feature_tables]
        columns = _prefix_sums(dims)
        if self.pooling is Pooling.NONE:
            columns = [0] * len(dims) + [max(dims, default=0)]
        self.total_rows = self._row_bases[-1]
        self.columns = columns[-1]
        self._layout = [
            (self._weight_offsets[t], self._row_bases[t], self.tables[t].rows, dim, column)
            for t, dim, column in zip(self.feature_tables, dims, columns, strict=False)
        ]
        self._allocate(dtype, device)
        self.reset_parameters()

    def _check_arguments(self, dtype: torch.dtype) -> None:
        for t, spec in enumerate(self.tables):
            if not isinstance(spec, TableSpec):
                raise TypeError(
                    f"tables[{t}] must be a TableSpec, e.g. TableSpec(rows=1000, dim=64), got "
                    f"{spec!r}; for a TTSpec use TTEmbeddingBag"
                )
        if dtype not in FLOAT_DTYPES:
            raise ValueError(f"dtype must be float32, float16 or bfloat16, got {dtype}")
        for f, t in enumerate(self.feature_tables):
            if not 0 <= t < len(self.tables):
                raise ValueError(
                    f"feature_tables[{f}] must be in [0, {len(self.tables)}), the number of "
                    f"tables, got {t}"
                )
        dims = sorted({spec.dim for spec in self.tables})
        if len(dims) > 1 and self.pooling is Pooling.NONE:
            raise ValueError(f"pooling NONE needs one dim for all tables, got {dims}; make one "
                             "module a dim")  # fmt: skip
        if len(dims) > 1 and not tbe.is_fused(self.optimizer):
            raise ValueError(f"optim.External needs one dim for all tables, got {dims}: its sparse "
                             "gradient is [rows, dim]; make one module a dim")  # fmt: skip

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        elements, rows = self._weight_offsets[-1], self.total_rows
        fused = tbe.is_fused(self.optimizer)
        shape = (elements,) if fused else (rows, elements // max(rows, 1))
        weights = ops.empty_table(shape, dtype, device)
        self.weights = nn.Parameter(weights, requires_grad=not fused)
        for state in self.optimizer.states:
            size = rows if state.per_row else elements
            tensor = ops.empty_table((size,), torch.float32, device).zero_()
            self.register_buffer(f"state_{state.name}", tensor)
        self._register_common(device)

    def reset_parameters(self) -> None:
        """Draw the weights anew; optimizer state, step and learning rate as at construction.

        Also what makes a module usable that was made on `meta` and moved by `to_empty`.
        """
        with torch.no_grad():
            self._reset_common()
            for spec, table in zip(self.tables, self.table_weights(), strict=True):
                bound = 1.0 / math.sqrt(spec.rows)
                ops.random.fill_uniform_(table, -bound, bound, ops.random.new_seed())
            for state in self._states():
                state.zero_()

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pooled embeddings `[B, sum D]`, or `[L, D]` for pooling NONE, in `output_dtype`.

        Args:
            indices: int32 or int64 `[L]`, row of each lookup in the table of its feature; -1 skips.
            offsets: int32 or int64 `[F * B + 1]`, feature-major: bag of feature f and sample b is
                `indices[offsets[f * B + b] : offsets[f * B + b + 1]]`.
            per_sample_weights: float32 `[L]`, scales each row; gets a gradient if it requires one.

        Raises:
            RuntimeError: wrong dtype, device or number of offsets; out of bounds in mode FATAL.
        """
        offsets = self._check_bounds(indices, offsets, self.features)
        batch = tbe.Lookup(
            self.features, indices, offsets, self.pooling, self.total_rows, self.columns
        )
        if not tbe.is_fused(self.optimizer) or not torch.is_grad_enabled():
            return tbe.lookup(self.weights, batch, per_sample_weights, self.output_dtype)
        return tbe.FusedLookup.apply(
            self.anchor,
            self.weights.detach(),
            self._states(),
            self.hyper,
            self.optimizer,
            batch,
            per_sample_weights,
            self.output_dtype,
        )

    def _states(self) -> list[Tensor]:
        return [getattr(self, f"state_{state.name}") for state in self.optimizer.states]

    def table_weights(self) -> list[Tensor]:
        """The tables as `[rows, dim]` views: writing to one writes to the module."""
        flat = self.weights.detach().view(-1)
        return [
            flat[start : start + spec.rows * spec.dim].view(spec.rows, spec.dim)
            for spec, start in zip(self.tables, self._weight_offsets, strict=False)
        ]

    def table_optimizer_states(self) -> list[dict[str, Tensor]]:
        """For each table its optimizer state by name, as views: `[rows, dim]`, or `[rows]`."""
        result = []
        for t, spec in enumerate(self.tables):
            views = {}
            for state, tensor in zip(self.optimizer.states, self._states(), strict=True):
                if state.per_row:
                    views[state.name] = tensor[self._row_bases[t] : self._row_bases[t + 1]]
                else:
                    part = tensor[self._weight_offsets[t] : self._weight_offsets[t + 1]]
                    views[state.name] = part.view(spec.rows, spec.dim)
            result.append(views)
        return result

    def nbytes(self) -> dict[str, int]:
        """Bytes of `weights` and `optimizer_state`."""
        return {
            "weights": self.weights.nbytes,
            "optimizer_state": sum(state.nbytes for state in self._states()),
        }

    def extra_repr(self) -> str:
        """Tables, optimizer and choices."""
        sizes = ", ".join(
            f"{spec.name or f'table_{t}'}: {spec.rows} x {spec.dim}"
            for t, spec in enumerate(self.tables[:4])
        )
        more = f", ... {len(self.tables)} tables" if len(self.tables) > 4 else ""
        dtype = str(self.weights.dtype).removeprefix("torch.")
        return f"[{sizes}{more}], {self.optimizer}, pooling={self.pooling.value}, dtype={dtype}"


def _prefix_sums(sizes: Sequence[int]) -> list[int]:
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    return sums
