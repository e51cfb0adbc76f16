"""Pooled embeddings by key, and their pieces in other orders."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from emblib import JaggedTensor, KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict
from tests.jagged.cases import Features, held, made, same
from tests.saved import saved_and_loaded


def example() -> tuple[KeyedTensor, KeyedTensor]:
    one = KeyedTensor(["a", "b", "c"], [2, 1, 3], torch.arange(12.0).view(2, 6))
    two = KeyedTensor(("d",), (2,), -torch.arange(4.0).view(2, 2))
    return one.validate(), two.validate()


def test_pieces_by_key() -> None:
    one, _ = example()
    assert one.keys() == ["a", "b", "c"]
    assert (one.length_per_key(), one.offset_per_key(), one.key_dim()) == (
        [2, 1, 3],
        [0, 2, 3, 6],
        1,
    )
    assert one.index_per_key() == {"a": 0, "b": 1, "c": 2}
    assert one["b"].tolist() == [[2], [8]]
    every = one.to_dict()
    assert list(every) == ["a", "b", "c"]
    assert all(torch.equal(one[key], piece) for key, piece in every.items())
    assert one["c"].untyped_storage().data_ptr() == one.values().untyped_storage().data_ptr()
    assert one.size_in_bytes() == 48
    assert KeyedTensor([], [], torch.zeros(2, 0)).to_dict() == {}
    with pytest.raises(KeyError, match=r"no key 'z'; there are \['a', 'b', 'c'\]"):
        one["z"]


def test_a_repeated_key_is_its_last_block() -> None:
    twice = KeyedTensor(["a", "b", "a"], [2, 1, 3], torch.arange(12.0).view(2, 6))
    last = twice.values()[:, 3:]
    assert torch.equal(twice["a"], last)
    assert torch.equal(twice.to_dict()["a"], last)
    assert torch.equal(KeyedTensor.regroup([twice], [["a"]])[0], last)


def test_lists_of_tensors_and_other_dimensions() -> None:
    pieces = [torch.randn(2, 3), torch.randn(4, 3)]
    down = KeyedTensor.from_tensor_list(["x", "y"], pieces, key_dim=0, cat_dim=0)
    assert down.length_per_key() == [2, 4]
    assert torch.equal(down["y"], pieces[1])
    (both,) = KeyedTensor.regroup([down], [["y", "x"]])
    assert torch.equal(both, torch.cat(pieces[::-1]))


@pytest.mark.parametrize(
    "groups", [[["a", "b", "c", "d"]], [["c", "a"], ["d"]], [["a", "d"], ["a"], []], []]
)
def test_regroup(groups: list[list[str]]) -> None:
    tensors = example()
    every = tensors[0].to_dict() | tensors[1].to_dict()
    found = KeyedTensor.regroup(tensors, groups)
    names = [str(i) for i in range(len(groups))]
    assert list(KeyedTensor.regroup_as_dict(tensors, groups, names)) == names
    for group, tensor in zip(groups, found, strict=True):
        want = [every[key] for key in group]
        assert torch.equal(tensor, torch.cat(want, 1) if want else torch.zeros(2, 0))
    module = KTRegroupAsDict(groups, names)(tensors)
    assert list(module) == names
    assert all(map(torch.equal, module.values(), found))
    iterators: Any = iter(tensors), (iter(group) for group in groups)
    assert all(map(torch.equal, KeyedTensor.regroup(*iterators), found))
    assert len(KeyedTensor.regroup(tensors, iter(groups))) == len(groups)


def test_regroup_is_differentiable() -> None:
    values = torch.randn(2, 3, requires_grad=True)
    tensor = KeyedTensor(["a", "b"], [1, 2], values)
    first, second = KeyedTensor.regroup([tensor], [["b", "a"], ["b"]])
    (first.sum() + 2 * second.sum()).backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 3, 3]] * 2


def test_moves() -> None:
    one, _ = example()
    meta = one.to("meta")
    assert meta.device().type == "meta"
    assert meta.keys() == one.keys()


def test_wrong_ones_are_refused() -> None:
    one, two = example()
    with pytest.raises(ValueError, match="one entry per key = 1, got 2"):
        KeyedTensor(["a"], [1, 2], torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"size of dimension 1 = 3, got \[2\]"):
        KeyedTensor(["a"], [2], torch.zeros(1, 3)).validate()
    with pytest.raises(ValueError, match=r"the dimension key_dim = 1, got \[\[2\]\]"):
        KeyedTensor.from_tensor_list(["a"], [torch.zeros(2)])
    with pytest.raises(ValueError, match="keys must differ"):
        KeyedTensor(["a", "a"], [1, 1], torch.zeros(1, 2)).validate()
    with pytest.raises(KeyError, match="no key 'z'; there are"):
        KeyedTensor.regroup([one, two], [["z"]])
    with pytest.raises(ValueError, match=r"several have \['a'\]"):
        KeyedTensor.regroup([one, one], [["a"]])
    with pytest.raises(ValueError, match="same key_dim, got 0"):
        KeyedTensor.regroup([], [["a"]])
    with pytest.raises(ValueError, match="name every group = 1, got 2"):
        KTRegroupAsDict([["a"]], ["x", "y"])
    with pytest.raises(ValueError, match="name every group = 1, got 2"):
        KeyedTensor.regroup_as_dict([one], [["a"]], ["x", "y"])
    with pytest.raises(ValueError, match=r"must differ, got \['x', 'x'\]"):
        KTRegroupAsDict([["a"], ["a"]], ["x", "x"])
    with pytest.raises(ValueError, match=r"must differ, got \['x', 'x'\]"):
        KeyedTensor.regroup_as_dict([one], [["a"], ["a"]], ["x", "x"])


def test_says_what_it_holds() -> None:
    _, two = example()
    assert repr(two) == "KeyedTensor({'d': 2}, [2, 2] torch.float32, cpu)"
    blocks = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 0.1], [3.0, 4.0, 5.0]]))
    text = '    "a": [[1.0], [3.0]],\n    "b": [[2.0, 0.1], [4.0, 5.0]]'
    assert str(blocks) == f"KeyedTensor({{\n{text}\n}})\n"
    assert str(KeyedTensor([], [], torch.empty(0))) == "KeyedTensor()\n"


EXAMPLE: Features = {"a": [[0, 1], [], [2]], "b": [[3], [4], [5, 6, 7]]}
VARIED: Features = {"a": [[0, 1], []], "b": [[3]]}


def nodes() -> list[Any]:
    merged = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]])),
    )
    return [
        made(EXAMPLE),
        made(EXAMPLE, given="offsets", weighted=True),
        made(VARIED, weighted=True),
        merged,
        KeyedJaggedTensor([], torch.arange(0), lengths=torch.arange(0), stride=0),
        made(EXAMPLE)["b"],
        made(EXAMPLE, weighted=True)["b"],
        KeyedTensor(["a", "b"], [1, 2], torch.randn(2, 3)),
    ]


def tensors(node: Any) -> list[Tensor]:
    return pytree.tree_leaves(node)


@pytest.mark.parametrize("which", range(8))
def test_trees_pickles_and_files(which: int) -> None:
    node = nodes()[which]
    leaves, structure = pytree.tree_flatten(node)
    assert all(isinstance(leaf, Tensor) for leaf in leaves)
    saved = pytree.treespec_loads(pytree.treespec_dumps(structure))
    assert saved == structure
    path_leaves, _ = pytree.tree_flatten_with_path(node)
    assert same([leaf for _, leaf in path_leaves], leaves)
    others = [
        pytree.tree_unflatten(leaves, saved),
        pytree.tree_map(torch.clone, node),
        pickle.loads(pickle.dumps(node)),
        copy.deepcopy(node),
        saved_and_loaded(node),
    ]
    for other in others:
        assert type(other) is type(node)
        assert repr(other) == repr(node)
        assert str(other) == str(node)
        assert same(tensors(other), leaves)
        for name in ("stride", "stride_per_key", "length_per_key", "key_dim"):
            if hasattr(node, name):
                assert getattr(other, name)() == getattr(node, name)()


def test_the_structure_does_not_tell_what_was_asked() -> None:
    asked = made(EXAMPLE)
    asked.offsets()
    asked.sync()
    structure = pytree.tree_structure(made(EXAMPLE, given="offsets"))
    assert pytree.tree_structure(asked) == structure
    assert pytree.tree_structure(made({"a": [[1]], "b": [[]]})) == structure
    assert pytree.tree_structure(made({"a": [[1]]})) != structure
    # Leaves need not be tensors while a tree is on its way.
    sizes = pytree.tree_map(lambda tensor: tensor.numel(), asked)
    assert pytree.tree_leaves(sizes) == [8, 6]


def test_workers_give_batches() -> None:
    batches = [made(EXAMPLE, weighted=True), made(VARIED)]
    loader = DataLoader(batches, batch_size=None, num_workers=1)
    assert [held(batch) for batch in loader] == [EXAMPLE, VARIED]


def pooled(batch: KeyedJaggedTensor, table: Tensor) -> KeyedTensor:
    lengths = batch.lengths().view(len(batch.keys()), -1)
    rows = torch.nn.functional.embedding_bag(
        batch.values(), table, batch.offsets(), mode="sum", include_last_offset=True
    )
    columns = rows.view(len(batch.keys()), batch.stride(), -1) * (lengths > 0).unsqueeze(-1)
    return KeyedTensor(batch.keys(), [table.size(1)] * 2, columns.transpose(0, 1).flatten(1))


def test_compiles_whole() -> None:
    table = torch.randn(8, 3)

    def run(values: Tensor, lengths: Tensor) -> tuple[KeyedTensor, list[Tensor]]:
        made_here = pooled(KeyedJaggedTensor(["a", "b"], values, lengths=lengths), table)
        return made_here, KeyedTensor.regroup([made_here], [["b", "a"]])

    batch = made(EXAMPLE)
    want = run(batch.values(), batch.lengths())
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found = compiled(batch.values(), batch.lengths())
    assert torch.equal(found[0].values(), want[0].values())
    assert found[0].keys() == ["a", "b"]
    assert same(found[1], want[1])
    whole = torch.compile(pooled, backend="aot_eager", fullgraph=True)(batch, table)
    assert torch.equal(whole["b"], want[0]["b"])


def test_exports_and_loads() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(8, 3))

        def forward(self, batch: KeyedJaggedTensor) -> KeyedTensor:
            return pooled(batch, self.table)

    model = Model()
    program = torch.export.export(model, (made(EXAMPLE),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    other = made({"a": [[7], [6, 5], []], "b": [[4, 3, 2], [1], [0]]})
    for runs in (program.module(), torch.export.load(file).module()):
        assert torch.equal(runs(other).values(), model(other).values())


def test_jagged_tensors_compile() -> None:
    def run(jagged: JaggedTensor) -> Tensor:
        return jagged.to_padded_dense(2) + 1

    jagged = made(EXAMPLE)["b"]
    found = torch.compile(run, backend="aot_eager", fullgraph=True)(jagged)
    assert torch.equal(found, run(jagged))


def test_one_string_is_no_list_of_keys() -> None:
    blocks = KeyedTensor(["a", "b"], [1, 1], torch.ones(2, 2))
    for call in (
        lambda: KeyedTensor("ab", [1, 1], torch.ones(2, 2)),
        lambda: KeyedTensor(3, [1, 1], torch.ones(2, 2)),
        lambda: KeyedJaggedTensor(None, torch.ones(2), lengths=torch.ones(2).int()),
        lambda: KTRegroupAsDict([["a"], ["b"]], "xy"),
        lambda: KTRegroupAsDict(["ab"], ["x"]),
        lambda: KeyedTensor.regroup_as_dict([blocks], [["a"], ["b"]], "xy"),
    ):
        with pytest.raises(TypeError, match="keys must be a list of names"):
            call()
    with pytest.raises(TypeError, match=r"a group must be a list of keys, got 'ab': write"):
        KeyedTensor.regroup([blocks], ["ab"])


@pytest.mark.parametrize(
    ("tensors", "groups", "message"),
    [
        ([3], [["a"]], "a KeyedTensor must have keys.*; int has no"),
        (3, [["a"]], "tensors of regroup must be a list of keyed tensors, got 3"),
        ([KeyedTensor(["a"], [1], torch.ones(1, 1))], 3, "groups must be a list of lists of keys"),
        ([KeyedTensor(["a"], [1], torch.ones(1, 1))], [3], "a group must be a list of keys, got 3"),
    ],
)
def test_errors_of_regroup_name_the_argument(tensors: Any, groups: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        KeyedTensor.regroup(tensors, groups)
