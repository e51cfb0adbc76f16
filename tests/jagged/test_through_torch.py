"""Jagged tensors through pytrees, torch.fx and torch.export: keys, their order, and strides."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, optim
from emblib.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def batch(*keys: str, stride: int = 3) -> KeyedJaggedTensor:
    lengths = torch.arange(len(keys) * stride) % 3
    count = int(lengths.sum())
    return KeyedJaggedTensor(
        list(keys), torch.arange(count) % 7, torch.arange(float(count)), lengths
    )


def varied() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["b", "a"],
        torch.arange(4),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["b", "a"], torch.tensor([[0, 0, 0], [0, 1, 0]])),
    )


@pytest.mark.parametrize("make", [lambda: batch("b", "a"), varied, lambda: batch(stride=0)])
def test_pytrees_keep_keys_strides_and_inverse_indices(make: Any) -> None:
    before = make()
    leaves, spec = pytree.tree_flatten({"x": [before]})
    after = pytree.tree_unflatten([leaf.clone() for leaf in leaves], spec)["x"][0]
    assert after.keys() == before.keys()
    assert after.stride() == before.stride()
    assert after.stride_per_key() == before.stride_per_key()
    assert after.stride_per_key_per_rank() == before.stride_per_key_per_rank()
    assert str(after.inverse_indices_or_none()) == str(before.inverse_indices_or_none())
    assert torch.equal(after.lengths(), before.lengths())


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def mapped(value: Any) -> Any:
    return pytree.tree_map(Tensor.clone, value)


@pytest.mark.parametrize("is_read", [False, True])
def test_pytrees_leave_out_padding(is_read: bool) -> None:
    ids, weights = torch.tensor([-1, -1, 5, 6]), torch.tensor([0.0, 0.0, 1.0, 2.0])
    offsets = torch.tensor([2, 3, 4])
    batch = KeyedJaggedTensor(["a", "b"], ids, weights, offsets=offsets)
    if is_read:
        batch.offset_per_key()
    after = mapped({"keyed": batch, "bags": JaggedTensor(ids, weights, offsets=offsets)})
    for tensor in after.values():
        assert tensor.offsets().tolist() == [0, 1, 2]
        assert tensor.values().tolist() == [5, 6]
        assert tensor.weights().tolist() == [1.0, 2.0]
    assert after["keyed"]["b"].values().tolist() == [6]


def test_pytrees_of_other_keys_are_other_structures() -> None:
    specs = [pytree.tree_structure(batch(*keys)) for keys in ("ab", "ba", "ab")]
    assert specs[0] == specs[2]
    assert specs[0] != specs[1]
    restored = pytree.treespec_loads(pytree.treespec_dumps(specs[1]))
    leaves = pytree.tree_leaves(batch("b", "a"))
    assert pytree.tree_unflatten(leaves, restored).keys() == ["b", "a"]


class Model(nn.Module):
    """A lookup, and arithmetic with its blocks by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(7, 4, name, feature_names=[name]) for name in ("b", "a")]
        )

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        found = self.ebc(features)
        return found["b"] - 2 * found["a"]


def expected(model: Model, features: KeyedJaggedTensor) -> Tensor:
    rows = {}
    for key in ("a", "b"):
        weight = model.ebc.embedding_bags[key].weight
        rows[key] = torch.stack([weight[ids].sum(0) for ids in features[key].to_dense()])
    return rows["b"] - 2 * rows["a"]


@pytest.mark.parametrize("keys", [("a", "b"), ("b", "a"), ("c", "b", "a")])
def test_an_exported_model_takes_features_by_name(keys: tuple[str, ...]) -> None:
    model, features = Model(), batch(*keys)
    exported = torch.export.export(model, (features,), strict=False)
    other = batch(*keys)
    other.values().add_(1).remainder_(7)
    torch.testing.assert_close(exported.module()(other), expected(model, other))


def test_an_exported_model_refuses_another_order_of_keys() -> None:
    exported = torch.export.export(Model(), (batch("a", "b"),), strict=False)
    with pytest.raises((ValueError, RuntimeError)):
        exported.module()(batch("b", "a"))


def test_an_exported_batch_comes_out_with_its_keys() -> None:
    class Shifted(nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedTensor]:
            moved = KeyedJaggedTensor(
                features.keys(), features.values() + 1, lengths=features.lengths()
            )
            return moved, KeyedTensor(["y", "x"], [1, 2], torch.zeros(2, 3))

    features = batch("b", "a")
    moved, rows = torch.export.export(Shifted(), (features,), strict=False).module()(features)
    assert moved.keys() == ["b", "a"]
    assert moved.stride() == 3
    assert torch.equal(moved["a"].values(), features["a"].values() + 1)
    assert rows.keys() == ["y", "x"]
    assert rows["x"].shape == (2, 2)


class _WholeCollections(torch.fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, EmbeddingBagCollection)


def test_a_traced_model_takes_features_by_name() -> None:
    model = Model()
    traced = torch.fx.GraphModule(model, _WholeCollections().trace(model))
    for keys in (("a", "b"), ("b", "a")):
        features = batch(*keys)
        torch.testing.assert_close(traced(features), expected(model, features))


def test_traced_code_reads_and_makes_batches() -> None:
    def doubled(features: KeyedJaggedTensor) -> Tensor:
        return features.values() * 2 + features["a"].values().sum()

    traced = torch.fx.symbolic_trace(doubled)
    for keys in (("a", "b"), ("b", "a")):
        features = batch(*keys)
        assert torch.equal(traced(features), doubled(features))


def as_in(value: Any, structure: Any) -> Any:
    """What a graph that was made for `structure` sees of `value`."""
    spec = pytree.tree_structure((structure,))
    return pytree.tree_unflatten(fx_pytree.tree_flatten_spec((value,), spec), spec)[0]


def test_a_graph_finds_the_blocks_of_a_keyed_tensor_by_name() -> None:
    made_for = KeyedTensor(["q", "p", "r"], [1, 3, 2], torch.zeros(2, 6))
    given = KeyedTensor(["r", "s", "p", "q"], [2, 1, 3, 1], torch.randn(2, 7))
    seen = as_in(given, made_for)
    assert seen.keys() == ["q", "p", "r"]
    for key in seen.keys():  # noqa: SIM118
        assert torch.equal(seen[key], given[key])
    along_rows = KeyedTensor(["y", "x"], [2, 1], torch.randn(3, 4), key_dim=0)
    seen = as_in(along_rows, KeyedTensor(["x", "y"], [1, 2], torch.zeros(3, 4), key_dim=0))
    assert torch.equal(seen["y"], along_rows["y"])
    with pytest.raises(KeyError, match=r"the key 'r'; there are \['q', 'p'\]"):
        as_in(KeyedTensor(["q", "p"], [1, 3], torch.zeros(2, 4)), made_for)
    with pytest.raises(ValueError, match=r"length_per_key \[1, 2, 3\] instead of \[1, 3, 2\]"):
        as_in(KeyedTensor(["r", "p", "q"], [3, 2, 1], torch.zeros(2, 6)), made_for)
    with pytest.raises(ValueError, match="key_dim 0 instead of 1"):
        as_in(KeyedTensor(["q", "p", "r"], [1, 3, 2], torch.zeros(6, 2), 0), made_for)


def test_a_graph_finds_features_by_name() -> None:
    made_for = batch("a", "c", "b")
    given = batch("b", "c", "d", "a")
    seen = as_in(given, made_for)
    assert seen.keys() == ["a", "c", "b"]
    for key in seen.keys():  # noqa: SIM118
        assert torch.equal(seen[key].values(), given[key].values())
        assert torch.equal(seen[key].weights(), given[key].weights())
        assert torch.equal(seen[key].lengths(), given[key].lengths())
    unweighted = KeyedJaggedTensor(["a", "c", "b"], given.values()[:3], lengths=torch.ones(3).int())
    with pytest.raises(ValueError, match="is weighted False instead of True"):
        as_in(unweighted, made_for)
    with pytest.raises(ValueError, match="is weighted True instead of False"):
        as_in(given["a"], unweighted["a"])
    with pytest.raises(KeyError, match="the key 'c'"):
        as_in(batch("b", "a"), made_for)


def test_a_graph_finds_inverse_indices_by_name() -> None:
    given = varied()
    turned = given.permute([1, 0])
    inverse_keys, inverse = given.inverse_indices()
    turned = KeyedJaggedTensor(
        turned.keys(),
        turned.values(),
        lengths=turned.lengths(),
        stride_per_key_per_rank=turned.stride_per_key_per_rank(),
        inverse_indices=(inverse_keys[::-1], inverse.flip(0)),
    )
    seen = as_in(turned, given)
    assert torch.equal(seen.values(), given.values())
    assert torch.equal(seen.inverse_indices()[1], inverse)
    assert torch.equal(turned.inverse_indices()[1], inverse.flip(0)), "the input was changed"
    other = KeyedJaggedTensor(
        ["b", "a"],
        torch.arange(4),
        lengths=torch.tensor([1, 2, 1]),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=given.inverse_indices(),
    )
    with pytest.raises(ValueError, match="stride_per_key_per_rank"):
        as_in(other, given)


@pytest.mark.parametrize("make", [lambda: batch("b", "a"), varied])
@pytest.mark.parametrize("remake", [pickled, copy.deepcopy, mapped])
def test_parts_of_a_batch_keep_its_stride(make: Any, remake: Any) -> None:
    """A part of a batch whose features differ in bags may have fewer than the batch has."""
    whole = make()
    for part in (*whole.split([1, 0, 1]), KeyedJaggedTensor.empty_like(whole)):
        again = remake(part)
        assert again.keys() == part.keys()
        assert again.stride() == whole.stride()
        assert again.variable_stride_per_key() == whole.variable_stride_per_key()
        assert again.stride_per_key_per_rank() == part.stride_per_key_per_rank()


@pytest.mark.parametrize("given", ["lengths", "offsets"])
def test_a_batch_that_was_evaluated_in_inference_mode_is_trained_on(given: str) -> None:
    """As in evaluation of each batch before it is trained on."""
    table = EmbeddingBagConfig(8, 4, "item")
    bags = EmbeddingBagCollection([table], optimizer=optim.SGD(0.1))
    sizes = {"lengths": torch.tensor([2, 1]), "offsets": torch.tensor([0, 2, 3])}[given]
    batch = KeyedJaggedTensor(["item"], torch.tensor([1, 2, 3]), **{given: sizes})
    with torch.inference_mode():
        before = bags(batch).values().clone()
        batch["item"].lengths()
    bags(batch).values().sum().backward()
    assert not batch.lengths().is_inference()
    assert not batch.offsets().is_inference()
    assert not torch.equal(bags(batch).values(), before)
    jagged = JaggedTensor(torch.rand(3), **{given: sizes})
    with torch.inference_mode():
        jagged.lengths(), jagged.offsets()
    assert not jagged.lengths().is_inference()
    assert not jagged.offsets().is_inference()
