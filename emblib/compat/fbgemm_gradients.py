"""Masks of gradients, which options of FBGEMM's training modules ask for."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib import TableBatchedEmbeddingBags


def mask_gradients(
    sample_weights: Tensor | None,
    feature_requires_grad: Tensor | None,
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
    bags: TableBatchedEmbeddingBags,
) -> Tensor | None:
    """Return the sample weights, detached at the lookups of features that need no gradient.

    The host does not wait for a GPU. If the offsets do not fit the features or the batch sizes,
    nothing is masked, because the lookup that follows raises.

    Args:
        sample_weights: float32 `[L]`; None is returned as it is.
        feature_requires_grad: `[F]`, 0 for features that need no gradient; None masks nothing.
        offsets: int32 or int64 `[bags + 1]`.
        batch_sizes: number of bags per feature and rank, `[F][ranks]`; None if all features have
            the same number.
        bags: module that looks the features up.

    Raises:
        ValueError: `feature_requires_grad` does not have one entry per feature.
    """
    if feature_requires_grad is None:
        return sample_weights
    num_features = len(bags.feature_tables)
    if feature_requires_grad.shape != (num_features,):
        raise ValueError(
            f"feature_requires_grad must have one entry per feature = {num_features}, got shape "
            f"{tuple(feature_requires_grad.shape)}"
        )
    if sample_weights is None or not num_features or not sample_weights.numel():
        return sample_weights
    if batch_sizes is not None:
        if sum(map(sum, batch_sizes)) != len(offsets) - 1:
            return sample_weights
        bag_ends = torch.tensor(list(itertools.accumulate(map(sum, batch_sizes))), device="cpu")
        id_ends = offsets[bag_ends.to(offsets.device)]
    elif (len(offsets) - 1) % num_features:
        return sample_weights
    else:
        id_ends = offsets[1:].view(num_features, -1)[:, -1]
    positions = torch.arange(len(sample_weights), device=id_ends.device)
    feature_of_id = torch.bucketize(positions, id_ends.long().contiguous(), right=True)
    has_gradient = (feature_requires_grad != 0).to(feature_of_id.device)[
        feature_of_id.clamp(max=num_features - 1)
    ]
    return torch.where(has_gradient, sample_weights, sample_weights.detach())


def keep_first_lookups(
    output: Tensor,
    indices: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    dims: Sequence[int] | None,
    *,
    first_feature_only: bool,
) -> None:
    """Let only the first lookup of each row of each table pass a gradient on to the table.

    The function registers a hook on `output`, which sets the gradients of all other lookups to
    zero. It does nothing if `output` needs no gradient. The host waits for a GPU.

    Args:
        output: output of the module: `[B, sum D]`, or `[L, D]` for pooling NONE.
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[F * B + 1]`.
        feature_tables: the table of each feature, `[F]`.
        dims: number of columns of each feature, `[F]`; None for pooling NONE.
        first_feature_only: whether lookups of all features but the first get no gradient, too.

    Raises:
        ValueError: with pooling, a bag has several lookups, which share one gradient.
    """
    if not output.requires_grad:
        return
    lengths = offsets.diff()
    bag_of_lookup = torch.repeat_interleave(
        torch.arange(lengths.numel(), device=lengths.device), lengths
    )
    if dims is not None and lengths.numel() and int(lengths.max()) > 1:
        raise ValueError(
            "use_writeback_bwd_prehook needs bags of at most one lookup, got one of "
            f"{int(lengths.max())}; look the rows up in bags of one, or with PoolingMode.NONE"
        )
    num_features = len(feature_tables)
    feature_of_lookup = bag_of_lookup // max(lengths.numel() // max(num_features, 1), 1)
    table_of_lookup = torch.tensor(list(feature_tables), device=indices.device)[feature_of_lookup]
    rows = torch.stack([table_of_lookup, indices.long()])
    is_first = _mark_first_columns(rows)
    if first_feature_only:
        is_first &= feature_of_lookup == 0
    if dims is None:
        mask = is_first.unsqueeze(1)
    else:
        bag_has_first = torch.zeros(lengths.numel(), dtype=torch.bool, device=is_first.device)
        bag_has_first[bag_of_lookup] = is_first
        columns = torch.tensor(list(dims), device=is_first.device)
        mask = bag_has_first.view(num_features, -1).t().repeat_interleave(columns, dim=1)
    output.register_hook(lambda grad: torch.where(mask, grad, 0))


def _mark_first_columns(rows: Tensor) -> Tensor:
    """Return whether each column of `rows` `[2, L]` differs from all columns before, bool `[L]`."""
    is_first = torch.zeros(rows.size(1), dtype=torch.bool, device=rows.device)
    if rows.size(1) == 0:
        return is_first
    values, group = torch.unique(rows, dim=1, return_inverse=True)
    position = torch.arange(rows.size(1), device=rows.device)
    first_position = position.new_full((values.size(1),), rows.size(1))
    is_first[first_position.scatter_reduce(0, group, position, "amin")] = True
    return is_first
