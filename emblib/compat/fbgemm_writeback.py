"""FBGEMM's write-back of gradients: of the lookups of one row, only the first one's gradient acts.

With EXACT_SGD, learning rate 1 and a gradient of (row - new value), a backward pass then assigns
rows, however often a batch looks them up.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_first_lookups(
    output: Tensor,
    indices: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    dims: Sequence[int] | None,
    *,
    first_feature_only: bool,
) -> None:
    """Let the gradient of `output` be zero but for the first lookup of each row of each table.

    Args:
        output: what the module returned: `[B, sum D]`, or `[L, D]` for pooling NONE.
        indices: `[L]`.
        offsets: `[F * B + 1]`.
        feature_tables: the table of each feature.
        dims: the columns of each feature; None for pooling NONE.
        first_feature_only: only lookups of the first feature act.

    Raises:
        ValueError: pooled bags of more than one lookup, whose gradients are not one row's.
    """
    if not output.requires_grad:
        return
    lengths = offsets.diff()
    bag = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    if dims is not None and lengths.numel() and int(lengths.max()) > 1:
        raise ValueError(
            "use_writeback_bwd_prehook needs bags of at most one lookup, got one of "
            f"{int(lengths.max())}; look the rows up one a bag, or with PoolingMode.NONE"
        )
    features = len(feature_tables)
    feature = bag // max(lengths.numel() // max(features, 1), 1)
    table = torch.tensor(list(feature_tables), device=indices.device)[feature]
    rows = torch.stack([table, indices.long()])
    keep = _first_of_each(rows)
    if first_feature_only:
        keep &= feature == 0
    if dims is None:
        mask = keep.unsqueeze(1)
    else:
        of_bag = torch.zeros(lengths.numel(), dtype=torch.bool, device=keep.device)
        of_bag[bag] = keep
        columns = torch.tensor(list(dims), device=keep.device)
        mask = of_bag.view(features, -1).t().repeat_interleave(columns, dim=1)
    output.register_hook(lambda grad: torch.where(mask, grad, 0))


def _first_of_each(rows: Tensor) -> Tensor:
    """For columns of `rows`, whether each is the first of its value."""
    keep = torch.zeros(rows.size(1), dtype=torch.bool, device=rows.device)
    if rows.size(1) == 0:
        return keep
    values, group = torch.unique(rows, dim=1, return_inverse=True)
    position = torch.arange(rows.size(1), device=rows.device)
    first = position.new_full((values.size(1),), rows.size(1))
    keep[first.scatter_reduce(0, group, position, "amin")] = True
    return keep
