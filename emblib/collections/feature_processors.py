"""Feature processors: learned weights of ids by their position in a bag."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from emblib.collections.modules import EmbeddingBagCollection
from emblib.grad_mode import without_gradients
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from emblib.jagged.keyed_layout import num_padding_of
from emblib.specs import check_count


class PositionWeightedModule(nn.Module):
    """Weight the ids of features by their position in a bag, with learned weights.

    Weights are parameters `position_weights[feature]` `[max length]`, of torch's default dtype.
    They start at 1, and multiply the weights of the batch, if it has any.

    Args:
        max_feature_lengths: number of weights per feature, the maximum length of its bags.
        device: device of the weights; None is torch's default device.

    Raises:
        TypeError: a length is not an int.
        ValueError: a length is below 1.

    Example:
        >>> positions = emblib.collections.PositionWeightedModule({"seen": 3})
        >>> seen = emblib.JaggedTensor(torch.tensor([7, 8]), lengths=torch.tensor([2]))
        >>> positions({"seen": seen})["seen"].weights()
        tensor([1., 1.], grad_fn=<IndexSelectBackward0>)
    """

    def __init__(
        self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.max_feature_lengths = dict(max_feature_lengths)
        for feature, length in self.max_feature_lengths.items():
            check_count(f"max_feature_lengths of {feature!r}", length)
        self.position_weights = nn.ParameterDict(
            {
                feature: nn.Parameter(torch.ones(length, device=device))
                for feature, length in self.max_feature_lengths.items()
            }
        )

    @without_gradients
    def reset_parameters(self) -> None:
        """Set all weights to 1."""
        for weights in self.position_weights.values():
            weights.fill_(1.0)

    def forward(self, features: Mapping[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return a new dict with weights; features without learned weights are unchanged.

        Raises:
            KeyError: a feature of `max_feature_lengths` is missing.
            ValueError: a bag is longer than its feature has positions (checked on the CPU; on a GPU
                torch checks it).
        """
        weighted = dict(features)
        for feature, weights in self.position_weights.items():
            if feature not in weighted:
                raise KeyError(f"there is no feature {feature!r}; there are {list(features)}")
            jagged = weighted[feature]
            lengths, offsets = jagged.lengths(), jagged.offsets()
            _check_lengths(feature, lengths, weights.numel())
            positions = _positions(offsets, lengths, jagged.values().shape[0])
            scale = weights.index_select(0, positions)
            batch_weights = jagged.weights_or_none()
            scale = scale if batch_weights is None else scale * batch_weights
            weighted[feature] = JaggedTensor(jagged.values(), scale, lengths, offsets)
        return weighted


class PositionWeightedProcessor(PositionWeightedModule):
    """A `PositionWeightedModule` for whole batches; learned weights of other features are 1.

    Example:
        >>> positions = emblib.collections.PositionWeightedProcessor({"seen": 3})
        >>> ids, lengths = torch.tensor([7, 8]), torch.tensor([2])
        >>> batch = emblib.KeyedJaggedTensor(["seen"], ids, lengths=lengths)
        >>> positions(batch).weights()
        tensor([1., 1.], grad_fn=<IndexSelectBackward0>)
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:  # type: ignore[override]
        """Return the batch with weights, in one pass over its ids.

        Raises:
            KeyError: the batch lacks a feature of `max_feature_lengths`.
            ValueError: a bag is longer than its feature has positions. Checked on the CPU only; on
                a GPU the further ids read weights of other features, or fail in torch.
        """
        keys, lengths, offsets = features.keys(), features.lengths(), features.offsets()
        missing_keys = sorted(self.max_feature_lengths.keys() - set(keys))
        if missing_keys:
            raise KeyError(f"there are no features {missing_keys}; there are {keys}")
        lengths_by_key = lengths.split(features.stride_per_key())
        weight_offset_by_key = self._weight_offsets()
        # Per feature: the offset of its weights, and the factor of the position, 0 without weights.
        rules = []
        for feature_index, key in enumerate(keys):
            max_length = self.max_feature_lengths.get(key, 0)
            _check_lengths(key, lengths_by_key[feature_index], max_length)
            rules.append((weight_offset_by_key.get(key, 0), min(max_length, 1)))
        unit_weight = torch.ones(1, device=lengths.device)  # the weight of all other features
        all_weights = torch.cat([unit_weight, *self.position_weights.values()])
        num_ids = features.values().shape[0]
        bags_per_key = torch.tensor(
            features.stride_per_key(), dtype=torch.int64, device=lengths.device
        )
        rules_of_keys = torch.tensor(rules, dtype=torch.int64, device=lengths.device).view(-1, 2)
        rules_of_bags = rules_of_keys.repeat_interleave(
            bags_per_key, 0, output_size=lengths.numel()
        )
        rules_of_ids = _repeat_per_id(rules_of_bags, lengths, offsets, num_ids)
        weight_offset, position_factor = rules_of_ids.unbind(1)
        indices = weight_offset + position_factor * _positions(offsets, lengths, num_ids)
        scale = all_weights.index_select(0, indices)
        batch_weights = features.weights_or_none()
        return _with_weights(features, scale if batch_weights is None else scale * batch_weights)

    def _weight_offsets(self) -> dict[str, int]:
        """Return the offset of each feature's weights; offset 0 has the weight 1 of the others."""
        # In the order of `position_weights`: a ParameterDict sorts the names that it is made from.
        lengths = {name: self.max_feature_lengths[name] for name in self.position_weights}
        return dict(zip(lengths, accumulate(lengths.values(), initial=1), strict=False))


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """A weighted collection whose weights are computed from the batch.

    Args:
        embedding_bag_collection: a weighted collection.
        feature_processors: module that maps a KeyedJaggedTensor to one with weights; or modules by
            feature, each of which maps `{feature: JaggedTensor}` to such a dict with weights, as
            `PositionWeightedModule` does.

    Raises:
        ValueError: the collection is not weighted, or no table reads the feature of a module.

    Example:
        >>> table = emblib.EmbeddingBagConfig(1_000, 16, "seen")
        >>> bags = emblib.EmbeddingBagCollection([table], is_weighted=True)
        >>> positions = emblib.collections.PositionWeightedProcessor({"seen": 3})
        >>> model = emblib.collections.FeatureProcessedEmbeddingBagCollection(bags, positions)
        >>> ids, lengths = torch.tensor([7, 8]), torch.tensor([2])
        >>> batch = emblib.KeyedJaggedTensor(["seen"], ids, lengths=lengths)
        >>> model(batch).values().shape
        torch.Size([1, 16])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: nn.Module | Mapping[str, nn.Module],
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "feature processors compute weights, so the collection must be weighted: make it "
                "with is_weighted=True"
            )
        self.embedding_bag_collection = embedding_bag_collection
        self.feature_processors: nn.Module = (
            feature_processors
            if isinstance(feature_processors, nn.Module)
            else nn.ModuleDict(feature_processors)
        )
        if isinstance(self.feature_processors, nn.ModuleDict):
            configs = embedding_bag_collection.embedding_bag_configs()
            features = {feature for config in configs for feature in config.feature_names}
            if unread_features := sorted(self.feature_processors.keys() - features):
                raise ValueError(
                    f"no table reads {unread_features}; the features are {sorted(features)}"
                )

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up the batch with its computed weights.

        With modules by feature, a feature without a module keeps its weights, or has weights of 1.

        Raises:
            Exception: a feature processor or `EmbeddingBagCollection.forward` raises it.
        """
        result: KeyedTensor = self.embedding_bag_collection(self._with_computed_weights(features))
        return result

    def _with_computed_weights(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the batch with the weights that the feature processors compute."""
        processors: Any = self.feature_processors
        if not isinstance(processors, nn.ModuleDict):
            processed_batch: KeyedJaggedTensor = processors(features)
            return processed_batch
        jagged_by_key = features.to_dict()
        # Padding before the first bag gets weights too.
        weights = [torch.ones(num_padding_of(features), device=features.device())]
        for key, jagged in jagged_by_key.items():
            if key in processors:
                jagged = processors[key]({key: jagged})[key]
            computed_weights = jagged.weights_or_none()
            ones = torch.ones(jagged.values().shape[0], device=jagged.device())
            weights.append(ones if computed_weights is None else computed_weights)
        return _with_weights(features, torch.cat(weights))


def _positions(offsets: Tensor, lengths: Tensor, num_ids: int) -> Tensor:
    """Return the position of each id in its bag, int64 `[L]`; 0 for padding."""
    starts = _repeat_per_id(offsets[:-1], lengths, offsets, num_ids)
    indices = torch.arange(num_ids, device=offsets.device)
    return torch.where(indices < offsets[:1], 0, indices - starts)


def _repeat_per_id(bag_entries: Tensor, lengths: Tensor, offsets: Tensor, num_ids: int) -> Tensor:
    """Repeat the entries `[bags, ...]` of bags for their ids, `[L, ...]`; padding gets zeros.

    The host does not wait for a GPU: padding, before the first offset, counts as one more bag.
    """
    entries_with_padding = torch.cat(
        [bag_entries.new_zeros(1, *bag_entries.shape[1:]), bag_entries]
    )
    return entries_with_padding.repeat_interleave(
        torch.cat([offsets[:1].to(lengths), lengths]), 0, output_size=num_ids
    )


def _check_lengths(feature: str, lengths: Tensor, max_length: int) -> None:
    if max_length and lengths.is_cpu and lengths.numel():
        longest_length = int(lengths.max())
        if longest_length > max_length:
            raise ValueError(
                f"feature {feature!r} has weights for {max_length} positions, got a bag of "
                f"{longest_length} ids: raise max_feature_lengths, or cut the bags"
            )


def _with_weights(features: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """Return the batch with its weights replaced."""
    has_variable_stride = features.variable_stride_per_key()
    return KeyedJaggedTensor(
        features.keys(),
        features.values(),
        weights,
        features.lengths_or_none(),
        features.offsets_or_none(),
        None if has_variable_stride else features.stride(),
        features.stride_per_key_per_rank() if has_variable_stride else None,
        features.inverse_indices_or_none(),
    )
