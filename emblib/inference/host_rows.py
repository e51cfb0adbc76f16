"""Read-only tables in host memory, with copies of the most used rows on a GPU.

A batch is looked up twice: in the copies on the GPU, with -1 for ids that have no copy, and in the
pinned memory of the host, with -1 for ids that have one. Tables skip -1, so the sum of the two
outputs has every row once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from emblib.inference.indexed import InferenceEmbeddingBags, prune
from emblib.ops import quant
from emblib.tables import QuantizedEmbeddingBags
from emblib.tables.base import warn_of_dtype
from emblib.tables.batches import append_last_offset, check_tensor
from emblib.tables.mapped_memory import map_pinned


class HostEmbeddingBags(nn.Module):
    """Look up F features in T read-only tables whose rows are in host memory.

    Lookups return what `tables` returns. Pooled results may differ in the last bits, because rows
    of the two memories are summed separately. The copied rows are fixed at construction; for other
    rows make another module over the same `tables`. `to` another device raises RuntimeError.

    Args:
        tables: the rows, on the CPU, whose memory is used; for a GPU it is copied once, into pinned
            memory. The rows must not change afterwards, since the copies on `device` would not.
        stored: mask by table name, bool `[rows]`, for every table: the rows to copy to `device`,
            at least one. `top_rows` makes a mask from the number of lookups of each row.
        device: device of batches and of the copies; on the CPU rows are copied as well.

    Attributes:
        rows: all rows, in host memory.
        stored: the copies on `device`, and the index that finds them.
        device: device of batches and outputs.
        output_dtype: dtype of the output, that of `tables`.

    Raises:
        KeyError: a mask is of an unknown table.
        TypeError: `tables` has another class.
        ValueError: tables are not on the CPU, a table has no mask, or a mask does not fit or has no
            row.

    Example:
        >>> tables = emblib.inference.for_inference({"item": torch.eye(4)})
        >>> uses = torch.tensor([9, 1, 7, 0])
        >>> mask = emblib.inference.top_rows(uses, share=0.5)
        >>> served = emblib.inference.HostEmbeddingBags(tables, {"item": mask}, "cpu")
        >>> served(torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3]))
        tensor([[1., 1., 0., 0.],
                [0., 0., 0., 1.]])
    """

    def __init__(
        self,
        tables: QuantizedEmbeddingBags,
        stored: Mapping[str, Tensor],
        device: torch.device | str,
    ) -> None:
        super().__init__()
        if not isinstance(tables, QuantizedEmbeddingBags):
            raise TypeError(
                f"tables must be QuantizedEmbeddingBags, got {type(tables).__name__}: "
                "for_inference(module) makes them of tables whose ids are row numbers"
            )
        if not tables.packed.is_cpu:
            raise ValueError(f"tables must be on the CPU, got {tables.packed.device}")
        if unmasked_tables := [name for name in tables.table_names if name not in stored]:
            raise ValueError(
                f"stored must have a mask for every table, {unmasked_tables} have none: "
                "top_rows(uses, share) makes one"
            )
        self.output_dtype = tables.output_dtype
        pruned = prune(tables, stored, index="hash")
        # Any id is a key, so that an invalid one is looked up, and reported, in all rows.
        indexes = [replace(index, num_ids=-1) for index in pruned.indexes if index is not None]
        self.stored = InferenceEmbeddingBags(pruned.rows, indexes).to(device)
        self.device = self.stored.index.device
        row_counts = [spec.rows for spec in tables.tables]
        self.rows = tables.with_rows(row_counts, device="meta")
        packed = tables.packed
        if self.device.type == "cuda":
            packed = map_pinned(packed.pin_memory(), self.device)
        self.rows.use_memory(packed)
        self.rows.output_dtype = self.stored.rows.output_dtype = torch.float32

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        *,
        batch_sizes: Sequence[Sequence[int]] | None = None,
    ) -> Tensor:
        """Return pooled rows `[B, sum of dims]`, with Pooling.NONE `[L, D]`, in `output_dtype`.

        Arguments and errors are those of `InferenceEmbeddingBags.forward`, with int32 or int64
        `indices` alone; with `batch_sizes` the result is flat, as there.
        """
        check_tensor("indices", indices)
        check_tensor("offsets", offsets)
        rows, all_offsets = self.rows, offsets
        if not rows.include_last_offset:
            all_offsets = append_last_offset(indices, offsets)
        bag_layout, _ = rows.lay_out_bags(all_offsets, batch_sizes)
        index, index_tables = self.stored.index, self.stored.index_tables
        # Rows in the copies, -1 for ids without a copy; each module skips -1.
        device_rows = quant.map_ids(
            index, index_tables, rows.features, indices, all_offsets, bag_layout
        )
        host_rows = torch.where(device_rows >= 0, -1, indices)
        options: dict[str, Any] = {"batch_sizes": batch_sizes}
        output: Tensor = self.stored.rows(device_rows, offsets, per_sample_weights, **options)
        output = output + rows(host_rows, offsets, per_sample_weights, **options)
        return output.to(self.output_dtype)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of all rows, `host`, of the copies, `weights`, and of the `index`."""
        return {"host": sum(self.rows.nbytes().values()), **self.stored.nbytes()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        warn_of_dtype(fn, "formats= and output_dtype= of for_inference")
        device = fn(torch.empty(0, device=self.device)).device
        if device != self.device:
            raise RuntimeError(
                f"the rows in host memory are mapped for {self.device}: make another "
                f"HostEmbeddingBags(tables, stored, {str(device)!r})"
            )
        return self
