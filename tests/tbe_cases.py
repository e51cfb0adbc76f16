"""Inputs for table-batched embeddings: the awkward cases by name, and random ones by seed."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emblib import (
    BoundsCheck,
    Pooling,
    Precision,
    TableBatchedEmbeddingBags,
    TableSpec,
    optim,
)


@dataclass(frozen=True)
class Case:
    """One problem: tables, features, bags. `lengths` overrides the random bag lengths."""

    rows: tuple[int, ...] = (50, 7)
    dims: tuple[int, ...] = (16, 16)
    feature_tables: tuple[int, ...] | None = None
    batch: int = 5
    longest: int = 6
    lengths: tuple[int, ...] | None = None
    pooling: Pooling = Pooling.SUM
    weighted: bool = False
    index_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    dtype: torch.dtype = torch.float32
    output_dtype: torch.dtype = torch.float32
    invalid: bool = False
    seed: int = 0

    def module(
        self, optimizer: optim.Optimizer, device: torch.device | str = "cpu"
    ) -> TableBatchedEmbeddingBags:
        """The module this case is about, with weights drawn from the seed."""
        torch.manual_seed(self.seed)
        return TableBatchedEmbeddingBags(
            [TableSpec(r, d) for r, d in zip(self.rows, self.dims, strict=True)],
            optimizer,
            pooling=self.pooling,
            feature_tables=self.feature_tables,
            precision=Precision(self.dtype, self.output_dtype),
            bounds_check=BoundsCheck.IGNORE,
            device=device,
        )

    def batch_of(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor | None]:
        """Indices, offsets and per-sample weights."""
        generator = torch.Generator().manual_seed(self.seed)
        tables = self.feature_tables or tuple(range(len(self.rows)))
        bags = len(tables) * self.batch
        if self.lengths is None:
            lengths = torch.randint(0, self.longest + 1, (bags,), generator=generator)
        else:
            lengths = torch.tensor(self.lengths, dtype=torch.int64)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        parts = []
        for f, table in enumerate(tables):
            size = int(lengths[f * self.batch : (f + 1) * self.batch].sum())
            low, high = (-3, self.rows[table] + 3) if self.invalid else (0, self.rows[table])
            parts.append(torch.randint(low, high, (size,), generator=generator))
        indices = torch.cat([*parts, torch.zeros(0, dtype=torch.int64)])
        weights = torch.rand(indices.numel(), generator=generator) if self.weighted else None
        return (
            indices.to(device, self.index_dtype),
            offsets.to(device, self.offset_dtype),
            None if weights is None else weights.to(device),
        )


_PLAIN = Case()

CASES: dict[str, Case] = {
    "plain": _PLAIN,
    "mixed_dims": replace(_PLAIN, rows=(50, 7, 1), dims=(4, 130, 21)),
    "one_lookup_a_bag": replace(_PLAIN, batch=40, lengths=(1,) * 80),
    "long_bags": replace(_PLAIN, batch=2, longest=300),
    "hot_row": replace(_PLAIN, rows=(1, 3), batch=3, longest=4000),
    "dim_1": replace(_PLAIN, dims=(1, 1)),
    "dim_3": replace(_PLAIN, dims=(3, 3)),
    "dim_200": replace(_PLAIN, dims=(200, 200)),
    "dim_1024": replace(_PLAIN, rows=(9, 5), dims=(1024, 1024)),
    "mean": replace(_PLAIN, pooling=Pooling.MEAN),
    "none": replace(_PLAIN, pooling=Pooling.NONE),
    "weighted": replace(_PLAIN, weighted=True),
    "weighted_mean": replace(_PLAIN, weighted=True, pooling=Pooling.MEAN),
    "shared_table": replace(_PLAIN, feature_tables=(1, 0, 1)),
    "shared_none": replace(_PLAIN, feature_tables=(1, 1), pooling=Pooling.NONE),
    "int32": replace(_PLAIN, index_dtype=torch.int32, offset_dtype=torch.int32),
    "int32_offsets": replace(_PLAIN, offset_dtype=torch.int32),
    "fp16": replace(_PLAIN, dtype=torch.float16, output_dtype=torch.float16),
    "bf16": replace(_PLAIN, dtype=torch.bfloat16, output_dtype=torch.bfloat16),
    "fp16_weights": replace(_PLAIN, dtype=torch.float16, dims=(20, 20)),
    "bf16_output": replace(_PLAIN, output_dtype=torch.bfloat16, dims=(20, 20)),
    "invalid": replace(_PLAIN, invalid=True),
    "invalid_mean_weighted": replace(_PLAIN, invalid=True, weighted=True, pooling=Pooling.MEAN),
    "invalid_none": replace(_PLAIN, invalid=True, pooling=Pooling.NONE),
    "empty_bags": replace(_PLAIN, batch=2, lengths=(0, 3, 0, 0)),
    "zero_lookups": replace(_PLAIN, batch=2, lengths=(0, 0, 0, 0)),
    "empty_batch": replace(_PLAIN, batch=0),
    "zero_tables": replace(_PLAIN, rows=(), dims=()),
    "many_lookups": replace(_PLAIN, rows=(3000, 20), batch=700, longest=40),
}

OPTIMIZERS: dict[str, optim.Optimizer] = {
    "sgd": optim.SGD(0.1),
    "adagrad": optim.Adagrad(0.1, eps=1e-4),
    "rowwise_adagrad": optim.RowwiseAdagrad(0.1, eps=1e-4),
    "adam": optim.Adam(0.05, eps=1e-3),
}


def tolerance(case: Case) -> dict[str, float]:
    """Room for rounding: of the storage dtype, and of float32 sums in another order."""
    narrowest = {case.dtype, case.output_dtype}
    if torch.bfloat16 in narrowest:
        return {"rtol": 2e-2, "atol": 2e-2}
    if torch.float16 in narrowest:
        return {"rtol": 3e-3, "atol": 3e-3}
    return {"rtol": 3e-4, "atol": 3e-5}
