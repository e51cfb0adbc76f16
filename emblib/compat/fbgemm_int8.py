"""Tables of INT8 rows in FBGEMM's training layout, which are looked up and not trained.

A row is `dim` codes, then float32 scale and minimum, `dim + 8` bytes; FBGEMM has no backward pass
for them either. The rows of a batch are decoded and pooled by PyTorch's operators.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from emblib import optim
from emblib.compat.fbgemm_arguments import float_dtype
from emblib.compat.fbgemm_operators import bucketize, rowwise
from emblib.compat.fbgemm_types import BoundsCheckMode, PoolingMode

_HEADER_BYTES = 8  # bytes of the scale and the minimum, two float32


def check_pooled(pooling: PoolingMode, per_sample_weights: Tensor | None) -> None:
    """Raise RuntimeError for weights without pooling, as emblib's kernels do."""
    if pooling is PoolingMode.NONE and per_sample_weights is not None:
        raise RuntimeError(
            "per_sample_weights need PoolingMode.SUM or MEAN; with NONE, scale the output"
        )


class _UntrainedFunction(torch.autograd.Function):
    """Function that returns its first argument, and raises in the backward pass.

    `anchor` requires a gradient, so that there is such a pass.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            "tables of INT8 rows are looked up and not trained: look them up under "
            "torch.no_grad(), or train in FP16"
        )


class Int8Tables(nn.Module):
    """The tables and lookups of a training module with `weights_precision=SparseType.INT8`.

    It has the attributes and methods of `emblib.TableBatchedEmbeddingBags` that the module uses.

    Args:
        args: arguments of the module, as `fbgemm_arguments.normalise` returns them.

    Raises:
        NotImplementedError: an output dtype other than FP32, FP16 and BF16.
    """

    weights: Tensor  # uint8, the rows of all tables
    rows: Tensor  # int64 [F], rows of the table of each feature
    hyperparams: Tensor  # zeros, as nothing is trained
    anchor: Tensor

    def __init__(self, args: SimpleNamespace) -> None:
        super().__init__()
        self._shapes = [(rows, dim + _HEADER_BYTES) for rows, dim, _, _ in args.embedding_specs]
        self.feature_tables = list(args.feature_table_map)
        self._pooling = args.pooling_mode
        self._output = float_dtype("output_dtype", args.output_dtype)
        self._check = BoundsCheckMode[args.bounds_check_mode.name.removeprefix("V2_")].value
        self.optimizer = optim.SGD(0.0)
        self.learning_rate = args.learning_rate
        self.tables: list[Any] = []  # none is cached
        size = sum(rows * row_bytes for rows, row_bytes in self._shapes)
        rows = torch.tensor([self._shapes[t][0] for t in self.feature_tables], device=args.device)
        self.register_buffer("weights", torch.zeros(size, dtype=torch.uint8, device=args.device))
        self.register_buffer("rows", rows, persistent=False)
        numbers = torch.zeros(len(optim.Hyper), dtype=torch.float64, device=args.device)
        self.register_buffer("hyperparams", numbers, persistent=False)
        anchor = torch.zeros((), device=args.device, requires_grad=True)
        self.register_buffer("anchor", anchor, persistent=False)

    def table_weights(self) -> list[Tensor]:
        """Return the rows of each table, uint8 `[rows, dim + 8]`, as views."""
        parts = self.weights.split([rows * row_bytes for rows, row_bytes in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    def table_optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return no states."""
        return [{} for _ in self._shapes]

    def no_cache(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: there is no cache."""

    flush = prefetch = reset_cache_states = no_cache

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        batch_sizes: object = None,
    ) -> Tensor:
        """Pool rows to `[B, sum D]`, or `[L, D]` for pooling NONE; its backward pass raises.

        `indices` are `[L]`, `offsets` `[F * B + 1]`; neither is written to. -1 reads zeros, and
        counts in a mean. `per_sample_weights` `[L]` scale rows and get no gradient. Waits for a
        GPU.

        Raises:
            NotImplementedError: `batch_sizes`.
            RuntimeError: weights without pooling; invalid input in mode FATAL.
        """
        if batch_sizes is not None:
            raise NotImplementedError("INT8 tables are looked up with one batch size per feature")
        check_pooled(self._pooling, per_sample_weights)
        indices, offsets = indices.clone(), offsets.to(indices.dtype, copy=True)
        counter = torch.zeros(1, dtype=torch.int64, device=indices.device)
        bucketize.bounds_check_indices(self.rows, indices, offsets, self._check, counter)
        num_features = len(self.feature_tables)
        batch_size = (offsets.numel() - 1) // num_features
        id_ends = offsets[::batch_size].tolist() if batch_size else [0] * (num_features + 1)
        weights = None if per_sample_weights is None else per_sample_weights.detach()
        blocks, tables = [], self.table_weights()
        for feature, table in enumerate(self.feature_tables):
            id_range = slice(id_ends[feature], id_ends[feature + 1])
            ids = indices[id_range]
            rows = rowwise.fused_8bit_to_float(tables[table].index_select(0, ids.clamp(min=0)))
            rows.masked_fill_((ids < 0).unsqueeze(1), 0.0)
            if weights is not None:
                rows *= weights[id_range].unsqueeze(1)
            bag_starts = (
                offsets[feature * batch_size : (feature + 1) * batch_size + 1].long()
                - id_ends[feature]
            )
            blocks.append(self._pool(rows, bag_starts))
        output = torch.cat(blocks, int(self._pooling is not PoolingMode.NONE)).to(self._output)
        result: Tensor = _UntrainedFunction.apply(output, self.anchor)
        return result

    def _pool(self, rows: Tensor, starts: Tensor) -> Tensor:
        if self._pooling is PoolingMode.NONE:
            return rows
        return functional.embedding_bag(
            torch.arange(len(rows), device=rows.device),
            functional.pad(rows, (0, 0, 0, int(not len(rows)))),
            starts,
            mode=self._pooling.name.lower(),
            include_last_offset=True,
        )
