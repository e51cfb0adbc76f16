"""Tables of INT8 rows in FBGEMM's training layout, which are looked up and not trained.

A row has `dim + 8` bytes: `dim` codes, then a scale and a minimum in float32. A lookup decodes the
rows of the batch and pools them with PyTorch's operators. There is no backward pass, as in FBGEMM.
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


def refuse_weights_without_pooling(pooling: PoolingMode, per_sample_weights: Tensor | None) -> None:
    """Raise RuntimeError for weights with pooling NONE, as emblib's kernels do."""
    if pooling is PoolingMode.NONE and per_sample_weights is not None:
        raise RuntimeError(
            "per_sample_weights need PoolingMode.SUM or MEAN; with NONE, scale the output"
        )


class _UntrainedFunction(torch.autograd.Function):
    """Function that returns `output`, and whose backward pass raises NotImplementedError.

    `anchor` requires a gradient. Without such an argument, autograd would skip the backward pass.
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
    """The `bags` of a `SplitTableBatchedEmbeddingBagsCodegen` with INT8 rows.

    The class has those attributes and methods of `emblib.TableBatchedEmbeddingBags` that
    `SplitTableBatchedEmbeddingBagsCodegen` uses.

    Args:
        args: result of `fbgemm_arguments.normalise`.

    Raises:
        NotImplementedError: the output dtype is not FP32, FP16 or BF16.
    """

    weights: Tensor  # uint8, the rows of all tables, concatenated
    num_rows_of_feature: Tensor  # int64 [F], rows of the table that each feature reads
    hyperparams: Tensor  # zeros, as nothing is trained
    anchor: Tensor

    def __init__(self, args: SimpleNamespace) -> None:
        super().__init__()
        self._shapes = [(rows, dim + _HEADER_BYTES) for rows, dim, _, _ in args.embedding_specs]
        self.feature_tables = list(args.feature_table_map)
        self._pooling = args.pooling_mode
        self._output_dtype = float_dtype("output_dtype", args.output_dtype)
        check_mode = args.bounds_check_mode.name.removeprefix("V2_")
        self._bounds_check_mode = BoundsCheckMode[check_mode].value
        self.optimizer = optim.SGD(0.0)
        self.learning_rate = args.learning_rate
        self.tables: list[Any] = []  # none is cached
        num_bytes = sum(rows * row_bytes for rows, row_bytes in self._shapes)
        num_rows = [self._shapes[t][0] for t in self.feature_tables]
        self.register_buffer(
            "weights", torch.zeros(num_bytes, dtype=torch.uint8, device=args.device)
        )
        num_rows_of_feature = torch.tensor(num_rows, device=args.device)
        self.register_buffer("num_rows_of_feature", num_rows_of_feature, persistent=False)
        hyperparams = torch.zeros(len(optim.Hyper), dtype=torch.float64, device=args.device)
        self.register_buffer("hyperparams", hyperparams, persistent=False)
        anchor = torch.zeros((), device=args.device, requires_grad=True)
        self.register_buffer("anchor", anchor, persistent=False)

    def table_weights(self) -> list[Tensor]:
        """Return the rows of each table, uint8 `[rows, dim + 8]`, as views."""
        table_bytes = self.weights.split([rows * row_bytes for rows, row_bytes in self._shapes])
        return [rows.view(shape) for rows, shape in zip(table_bytes, self._shapes, strict=True)]

    def table_optimizer_states(self) -> list[dict[str, Tensor]]:
        """Return an empty dictionary per table."""
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
        """Look up and pool; the backward pass raises NotImplementedError. Waits for a GPU.

        Args:
            indices: int32 or int64 `[L]`; index -1 reads zeros, and counts in a mean.
            offsets: `[F * B + 1]`.
            per_sample_weights: factor of each row, `[L]`, which gets no gradient; None for ones.
            batch_sizes: argument that must be None.

        Returns:
            `[B, sum D]`, or `[L, D]` for pooling NONE, in the output dtype.

        Raises:
            NotImplementedError: `batch_sizes` is not None.
            RuntimeError: there are weights without pooling, or tensors do not fit each other, or in
                mode FATAL an index or offset is invalid.
        """
        if batch_sizes is not None:
            raise NotImplementedError("INT8 tables are looked up with one batch size per feature")
        refuse_weights_without_pooling(self._pooling, per_sample_weights)
        indices, offsets = indices.clone(), offsets.to(indices.dtype, copy=True)
        num_invalid = torch.zeros(1, dtype=torch.int64, device=indices.device)
        bucketize.bounds_check_indices(
            self.num_rows_of_feature, indices, offsets, self._bounds_check_mode, num_invalid
        )
        num_features = len(self.feature_tables)
        batch_size = (offsets.numel() - 1) // num_features
        id_ends = offsets[::batch_size].tolist() if batch_size else [0] * (num_features + 1)
        weights = None if per_sample_weights is None else per_sample_weights.detach()
        pooled_of_features, tables = [], self.table_weights()
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
            pooled_of_features.append(self._pool(rows, bag_starts))
        output = torch.cat(pooled_of_features, int(self._pooling is not PoolingMode.NONE)).to(
            self._output_dtype
        )
        result: Tensor = _UntrainedFunction.apply(output, self.anchor)
        return result

    def _pool(self, rows: Tensor, bag_starts: Tensor) -> Tensor:
        """Pool the rows of a feature, `[n, D]`; `bag_starts` are offsets, `[B + 1]`."""
        if self._pooling is PoolingMode.NONE:
            return rows
        return functional.embedding_bag(
            torch.arange(len(rows), device=rows.device),
            functional.pad(rows, (0, 0, 0, int(not len(rows)))),
            bag_starts,
            mode=self._pooling.name.lower(),
            include_last_offset=True,
        )
