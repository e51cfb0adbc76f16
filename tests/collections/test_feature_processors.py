"""Learned weights by position: what they are for each id, and their gradients."""

import pytest
import torch

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    optim,
)
from emblib.collections import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from tests.collections.cases import batch, dense

POSITIONS = {"c": 6, "a": 4}  # in another order than that of the ParameterDict


def _processor() -> PositionWeightedProcessor:
    processor = PositionWeightedProcessor(POSITIONS)
    with torch.no_grad():
        for weights in processor.position_weights.values():
            weights.copy_(torch.rand(weights.numel()) + 0.5)
    return processor


def _wanted(processor: PositionWeightedProcessor, features: KeyedJaggedTensor) -> torch.Tensor:
    found = []
    for key in list(features.keys()):
        jagged = features[key]
        given = jagged.weights_or_none()
        begin = 0
        for length in jagged.lengths().tolist():
            scale = torch.ones(length)
            if key in POSITIONS:
                scale = processor.position_weights[key][:length]
            found.append(scale if given is None else scale * given[begin : begin + length])
            begin += length
    return torch.cat(found)


@pytest.mark.parametrize("weighted", [False, True])
def test_weights_by_position(weighted: bool) -> None:
    processor = _processor()
    for keys in (["a", "b", "c"], ["c", "a"]):
        features = batch(keys, 3, weighted=weighted)
        out = processor(features)
        assert torch.equal(out.weights(), _wanted(processor, features))
        assert out.values() is features.values()
        assert out.keys() == features.keys()
        alone = PositionWeightedModule(POSITIONS)
        alone.load_state_dict(processor.state_dict())
        by_key = alone(features.to_dict())
        for key in keys:
            if key in POSITIONS:
                assert torch.equal(by_key[key].weights(), out[key].weights())
            elif not weighted:
                assert by_key[key].weights_or_none() is None


def test_variable_batches() -> None:
    processor = _processor()
    lengths = torch.tensor([2, 1, 3, 0, 4])
    features = KeyedJaggedTensor(
        ["a", "b", "c"],
        torch.arange(10),
        None,
        lengths,
        stride_per_key_per_rank=[[2], [1], [2]],
        inverse_indices=(["a", "b", "c"], torch.tensor([[0, 1], [0, 0], [1, 0]])),
    )
    out = processor(features)
    assert torch.equal(out.weights(), _wanted(processor, features))
    assert out.stride_per_key() == [2, 1, 2]
    assert out.inverse_indices_or_none() is not None


@pytest.mark.parametrize("by_feature", [False, True])
def test_collection_trains_them(by_feature: bool) -> None:
    configs = [EmbeddingBagConfig(30, 4, "t", ["a", "b"]), EmbeddingBagConfig(30, 8, "u", ["c"])]
    tables = EmbeddingBagCollection(configs, is_weighted=True, optimizer=optim.SGD(0.0))
    processor = _processor()
    given = processor
    if by_feature:
        given = {}
        for key, length in POSITIONS.items():
            given[key] = PositionWeightedModule({key: length})
            weights = {f"position_weights.{key}": processor.position_weights[key].detach()}
            given[key].load_state_dict(weights)
    model = FeatureProcessedEmbeddingBagCollection(tables, given)
    features = batch(["a", "b", "c"], 4)
    out = model(features)
    out.values().square().sum().backward()
    found = {
        name.rpartition(".")[2]: p.grad
        for name, p in model.named_parameters()
        if "position_weights" in name
    }
    twin = _wanted(processor, features).detach().requires_grad_()
    plain = tables(
        KeyedJaggedTensor(features.keys(), features.values(), twin, features.lengths())
    ).values()
    torch.testing.assert_close(out.values(), plain)
    plain.square().sum().backward()
    begin = 0
    for key in list(features.keys()):
        sums = torch.zeros(8)
        for length in features[key].lengths().tolist():
            sums[:length] += twin.grad[begin : begin + length]
            begin += length
        if key in POSITIONS:
            torch.testing.assert_close(found[key], sums[: POSITIONS[key]])
    assert dense(tables, "t").shape == (24, 4)


def test_a_batch_without_features() -> None:
    empty = KeyedJaggedTensor.empty(values_dtype=torch.int64)
    assert PositionWeightedProcessor({})(empty).weights().shape == (0,)


def test_wrong_use() -> None:
    processor = PositionWeightedProcessor({"a": 2})
    long = KeyedJaggedTensor(["a"], torch.arange(3), None, torch.tensor([3]))
    with pytest.raises(ValueError, match="weights for 2 positions, got a bag of 3"):
        processor(long)
    with pytest.raises(ValueError, match="weights for 2 positions, got a bag of 3"):
        PositionWeightedModule({"a": 2})(long.to_dict())
    with pytest.raises(KeyError, match="there are no features"):
        processor(batch(["b"], 2))
    with pytest.raises(KeyError, match="there is no feature 'a'"):
        PositionWeightedModule({"a": 2})({})
    with pytest.raises(ValueError, match="max_feature_lengths of 'a' must be >= 1, got 0"):
        PositionWeightedModule({"a": 0})
    plain = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")])
    with pytest.raises(ValueError, match="must be weighted"):
        FeatureProcessedEmbeddingBagCollection(plain, processor)
    weighted = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "b")], is_weighted=True)
    with pytest.raises(ValueError, match=r"no table reads \['a'\]; the features are \['b'\]"):
        FeatureProcessedEmbeddingBagCollection(weighted, {"a": PositionWeightedModule({"a": 2})})
    processor.position_weights["a"].data.fill_(3.0)
    processor.reset_parameters()
    assert torch.equal(processor.position_weights["a"].data, torch.ones(2))
