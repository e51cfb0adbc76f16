"""Table-batched embeddings in plain PyTorch: the definition of correct.

Same terms as `emblib.ops.tbe`, no native code, any floating dtype (float64 for gradient checks),
any device. `features` is int64 `[F, 8]`, see `FeatureColumn`. The rules for invalid input:

- offsets are clamped to `[0, L]` and made non-decreasing, and the last one is L
- ids before the first offset are in no bag
- index -1 is skipped, but counts in the length of its bag; any other index outside the table reads
  and updates row 0; all indices of a table without rows are skipped
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import BagColumn, FeatureColumn, Tier
from emblib.reference import optim
from emblib.specs import Pooling


class Extras(NamedTuple):
    """Optional inputs of a batch.

    Attributes:
        slots: int `[L]`, cache slot of the row of each lookup, -1 for none; None without a cache.
        bag_layout: int64 `[bags, 2]`, feature and first output element of each bag; None if all
            features have the same number of bags.
    """

    slots: Tensor | None = None
    bag_layout: Tensor | None = None


NO_EXTRAS = Extras()


class RowGroups(NamedTuple):
    """Lookups grouped by row: row `rows[u]` has `lookups[segments[u] : segments[u + 1]]`.

    Attributes:
        rows: int64 `[U]`, linear rows, ascending.
        segments: int64 `[U + 1]`, from 0.
        lookups: int64, positions in the batch, ascending within a row.
        bags: int64, the bag of each of `lookups`.
    """

    rows: Tensor
    segments: Tensor
    lookups: Tensor
    bags: Tensor


def repair_offsets(offsets: Tensor, num_lookups: int) -> Tensor:
    """Clamp offsets to `[0, L]` and make them non-decreasing; if there are bags, end them at L."""
    repaired = offsets.long().clamp(0, num_lookups).cummax(0).values
    if repaired.numel() > 1:
        repaired[-1] = num_lookups
    return repaired


def bag_of_lookup(offsets: Tensor, num_lookups: int) -> Tensor:
    """Return the bag of each lookup, int64 `[L]`; -1 before the first bag.

    The offsets must be repaired, see `repair_offsets`.
    """
    positions = torch.arange(num_lookups, device=offsets.device)
    return torch.searchsorted(offsets[:-1].long().contiguous(), positions, right=True) - 1


def num_lost_ids(indices: Tensor, offsets: Tensor) -> Tensor:
    """Return the number of ids before the first bag that are not padding (-1), a scalar tensor.

    It is 0 if there are no bags.
    """
    if offsets.numel() < 2:
        return indices.new_zeros(())
    return (indices[: int(repair_offsets(offsets, indices.numel())[0])] != -1).sum()


def feature_of_bag(features: Tensor, offsets: Tensor, bag_layout: Tensor | None = None) -> Tensor:
    """Return the feature of each bag, int64 `[bags]`.

    Without a layout every feature has the same number of bags.
    """
    if bag_layout is not None:
        return bag_layout[:, BagColumn.FEATURE]
    bags = torch.arange(offsets.numel() - 1, device=offsets.device)
    return bags // max((offsets.numel() - 1) // max(features.size(0), 1), 1)


def _locate_lookups(
    features: Tensor, indices: Tensor, offsets: Tensor, bag_layout: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return bag, feature and repaired index of each lookup; skipped lookups have index -1."""
    bag = bag_of_lookup(offsets, indices.numel())
    if features.size(0) == 0 or offsets.numel() < 2:
        return bag, torch.zeros_like(bag), torch.full_like(bag, -1)
    feature = feature_of_bag(features, offsets, bag_layout)[bag.clamp(min=0)]
    index = indices.long()
    is_in_table = (index >= 0) & (index < features[feature, FeatureColumn.ROWS])
    index = torch.where(is_in_table | (index == -1), index, 0)
    # A table without rows has no row 0 to read instead.
    index = torch.where(features[feature, FeatureColumn.ROWS] > 0, index, -1)
    return bag, feature, torch.where(bag >= 0, index, -1)


def _flat_tiers(weights: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return flat weights by `Tier`; one tensor is tier 0."""
    return [weights.flatten()] if isinstance(weights, Tensor) else [w.flatten() for w in weights]


def _read_rows(
    tiers: Sequence[Tensor], feature_row: Sequence[int], index: Tensor, slots: Tensor | None
) -> Tensor:
    """Return rows `index` of a table; a row with a cache slot (>= 0) is read from the cache."""
    offset, _, num_rows, dim, _, tier, _, stride = feature_row
    values = tiers[tier][offset : offset + num_rows * dim].view(num_rows, dim)[index]
    if slots is None or stride == 0 or len(tiers) <= Tier.CACHE:
        return values
    cache = tiers[Tier.CACHE][: tiers[Tier.CACHE].numel() // stride * stride].view(-1, stride)[
        :, :dim
    ]
    is_cached = (slots >= 0) & (slots < cache.size(0))
    values = values.clone()
    values[is_cached] = cache[slots[is_cached].long()].to(values.dtype)
    return values


def lookup(
    weights: Tensor | Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None = None,
    pooling: Pooling = Pooling.SUM,
    output_dim: int = 0,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Pool bags to `[B, output_dim]`, or to `[output_dim]` with a bag layout.

    NONE returns the row of each lookup, `[L, output_dim]`, with and without a layout. MEAN divides
    by the length of the bag, skipped lookups included. The result is differentiable in `weights`
    and `sample_weights`.

    Args:
        weights: tensor of all tables, or a list of tensors by `Tier`, each read as flat; tiers of
            tables have one dtype, that of the result.
        features: int64 `[F, 8]`.
        indices: `[L]`.
        offsets: `[bags + 1]`; without a bag layout there are F * B bags, feature after feature.
        sample_weights: `[L]`, factor of each lookup; None for 1.
        pooling: SUM, MEAN, or NONE, which returns the row of each lookup.
        output_dim: columns of the output; with a bag layout its number of elements.
        extras: cache slots and bag layout.
    """
    tiers, offsets = _flat_tiers(weights), repair_offsets(offsets, indices.numel())
    bag, feature, index = _locate_lookups(features, indices, offsets, extras.bag_layout)
    is_unpooled, lengths = pooling is Pooling.NONE, offsets.diff()
    batch_size = (offsets.numel() - 1) // max(features.size(0), 1)
    num_vectors = indices.numel() if is_unpooled else batch_size
    shape: tuple[int, ...] = (num_vectors, output_dim)
    if is_unpooled:
        lookups = torch.arange(indices.numel(), device=indices.device)
        first_elements = lookups * output_dim  # per lookup, else per bag
    elif extras.bag_layout is not None:
        shape, first_elements = (output_dim,), extras.bag_layout[:, BagColumn.ELEMENT]
    else:
        bags = torch.arange(offsets.numel() - 1, device=offsets.device)
        column = features[feature_of_bag(features, offsets), FeatureColumn.COLUMN]
        first_elements = bags % max(batch_size, 1) * output_dim + column
    first_elements = first_elements.to(indices.device)
    out = tiers[0].new_zeros(math.prod(shape))
    for f, feature_row in enumerate(features.tolist()):
        positions = ((feature == f) & (index >= 0)).nonzero().squeeze(1)
        slots = None if extras.slots is None else extras.slots[positions]
        values = _read_rows(tiers, feature_row, index[positions], slots)
        if sample_weights is not None:
            values = values * sample_weights[positions].to(values.dtype).unsqueeze(1)
        if pooling is Pooling.MEAN:
            values = values / lengths[bag[positions]].to(values.dtype).unsqueeze(1)
        first_element = first_elements[positions if is_unpooled else bag[positions]]
        elements = first_element.unsqueeze(1) + torch.arange(
            feature_row[FeatureColumn.DIM], device=first_element.device
        )
        out = out.index_add(0, elements.flatten(), values.flatten())
    return out.view(shape)


def group(
    features: Tensor, indices: Tensor, offsets: Tensor, bag_layout: Tensor | None = None
) -> RowGroups:
    """Group the lookups by linear row (`row_base + index`), stably; skipped ones are left out."""
    offsets = repair_offsets(offsets, indices.numel())
    bag, feature, index = _locate_lookups(features, indices, offsets, bag_layout)
    valid_positions = (index >= 0).nonzero().squeeze(1)
    keys = features[feature[valid_positions], FeatureColumn.ROW_BASE] + index[valid_positions]
    order = keys.argsort(stable=True)
    rows, counts = keys[order].unique_consecutive(return_counts=True)
    segments = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return RowGroups(rows, segments, valid_positions[order], bag[valid_positions[order]])


def sample_weight_grad(
    grad: Tensor,
    weights: Tensor | Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    pooling: Pooling = Pooling.SUM,
    extras: Extras = NO_EXTRAS,
) -> Tensor:
    """Return the gradient of `lookup` in its sample weights, `[L]`.

    `grad` is the gradient of its output; the other arguments are those of `lookup`.
    """
    tiers = [tier.detach() for tier in _flat_tiers(weights)]
    ones = torch.ones(indices.numel(), dtype=tiers[0].dtype, device=indices.device)
    output_dim = grad.size(-1)
    with torch.enable_grad():
        ones.requires_grad_()
        out = lookup(tiers, features, indices, offsets, ones, pooling, output_dim, extras)
        return torch.autograd.grad(out, ones, grad.to(out.dtype))[0]


def update_(
    weights: Tensor | Sequence[Tensor],
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: str,
    weight_grad: Tensor | Sequence[Tensor],
    features: Tensor,
    groups: RowGroups,
    row_slots: Tensor | None = None,
) -> None:
    """Apply `optimizer` to the rows in `groups`, given the dense gradient of the flat weights.

    A row of several features is updated once, for the first of them. A cached row is updated in the
    cache alone.

    Args:
        weights: flat tensor, or a list by `Tier`; changed in place.
        states: all states of tier 0, then of tier 1, ...; changed in place.
        hyper: float64 hyperparameters, see `Hyper`.
        optimizer: name in `optim.OPTIMIZERS`.
        weight_grad: gradients of the weights, by `Tier`; those of cached rows are in the tier of
            their table.
        features: int64 `[F, 8]`.
        groups: lookups by row, of which only the rows are used.
        row_slots: `[U]`, cache slot of each row, -1 for none; None if no row has one.
    """
    weights = [weights] if isinstance(weights, Tensor) else weights
    weight_grad = [weight_grad] if isinstance(weight_grad, Tensor) else weight_grad
    per_row = optim.OPTIMIZERS[optimizer].per_row
    slots = torch.full_like(groups.rows, -1) if row_slots is None else row_slots.long()
    is_pending = torch.ones_like(groups.rows, dtype=torch.bool)
    for offset, base, num_rows, dim, _, table_tier, state_base, stride in features.tolist():
        is_in_table = (groups.rows >= base) & (groups.rows < base + num_rows)
        is_updated = is_pending & is_in_table
        is_pending &= ~is_updated
        capacity = (
            weights[Tier.CACHE].numel() // stride if stride and len(weights) > Tier.CACHE else 0
        )
        is_cached = is_updated & (slots >= 0) & (slots < capacity)
        for tier, is_in_tier in ((table_tier, is_updated & ~is_cached), (Tier.CACHE, is_cached)):
            linear_rows = groups.rows[is_in_tier]
            if linear_rows.numel() == 0:
                continue
            columns = torch.arange(dim, device=linear_rows.device)
            # Elements [n, dim] of the rows in their table, whose gradient is read, and in `tier`.
            table_elements = (offset + (linear_rows - base) * dim).unsqueeze(1) + columns
            if tier == Tier.CACHE:
                elements = (slots[is_in_tier] * stride).unsqueeze(1) + columns
                row_numbers = slots[is_in_tier]
            else:
                elements, row_numbers = table_elements, state_base + linear_rows - base
            tier_states = states[tier * len(per_row) : (tier + 1) * len(per_row)]
            state_positions = [row_numbers if is_per_row else elements for is_per_row in per_row]
            pairs = zip(tier_states, state_positions, strict=True)
            row_states = [state[positions] for state, positions in pairs]
            new_rows, new_states = optim.step_rows(
                optimizer,
                weights[tier][elements],
                weight_grad[table_tier][table_elements],
                row_states,
                hyper,
            )
            optim.store_rounded(weights[tier], elements, new_rows, hyper, linear_rows, 0)
            for k, state in enumerate(tier_states):
                optim.store_rounded(
                    state, state_positions[k], new_states[k], hyper, linear_rows, 1 + k
                )
