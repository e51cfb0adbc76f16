"""Collections under torch.compile; test_compiled_forms.py has all forms, which takes minutes."""

import io
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Pooling,
    optim,
)
from emblib.storage import Dense, Hash, Hashed, Narrow, QuotientRemainder, Storage, TensorTrain
from tests.collections.compiled_forms import FORMS, check_training
from tests.conftest import needs_python_headers


# Columns in another order, with means; vectors of several modules.
@needs_python_headers
@pytest.mark.parametrize("name", ["bags, float16", "sequences"])
def test_inductor_trains(name: str) -> None:
    check_training(FORMS[name], "inductor")


@pytest.mark.cuda
def test_a_collection_with_other_columns_is_traced_on_cuda() -> None:
    if not torch.cuda.is_available() or torch.version.cuda is None:
        pytest.skip("torch compiles for CUDA in its builds with CUDA only")
    check_training(FORMS["bags, float16"], "aot_eager", "cuda")


STORAGES: dict[str, Storage] = {
    "plain": Dense(),
    "tt": TensorTrain((2, 2)),
    "product": QuotientRemainder(7),
    "sum": QuotientRemainder(7, "add"),
    "halves": QuotientRemainder(7, "concatenate"),
    "hashed": Hashed(9, functions=2),
    "other_hashed": Hashed(20, functions=2, seed=1),
    "narrow": Narrow(3),
}
KEYS = ["unused", *reversed(STORAGES), "all"]


def bags(*names: str, pooling: Pooling = Pooling.SUM) -> Any:
    torch.manual_seed(0)
    configs = [
        EmbeddingBagConfig(40, 8, name, [name, "all"], pooling=pooling, storage=STORAGES[name])
        for name in names
    ]
    return EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))


def vectors(*names: str) -> Any:
    torch.manual_seed(0)
    configs = [EmbeddingConfig(40, 8, name, [name], storage=STORAGES[name]) for name in names]
    return EmbeddingCollection(configs, optimizer=optim.SGD(0.1))


def ids_and_lengths(size: int, keys: list[str] = KEYS) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = torch.randint(0, 4, (len(keys) * size,))
    return torch.randint(0, 40, (int(lengths.sum()),)), lengths


class Model(torch.nn.Module):
    def __init__(self, tables: Any, keys: list[str] = KEYS) -> None:
        super().__init__()
        self.tables, self.keys = tables, keys

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out = self.tables(KeyedJaggedTensor(self.keys, ids, lengths=lengths))
        if isinstance(out, dict):
            return torch.cat([jagged.values() for jagged in out.values()])
        result: torch.Tensor = out.values()
        return result


@pytest.mark.parametrize("names", [("tt",), ("plain", "narrow")])
def test_keys_in_another_order_are_in_one_graph(names: tuple[str, ...]) -> None:
    eager, traced = Model(bags(*names)), Model(bags(*names))
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for size in (3, 4, 5):
        batch = ids_and_lengths(size)
        want, got = eager(*batch), compiled(*batch)
        assert torch.equal(got, want)
        want.square().sum().backward()
        got.square().sum().backward()
    for key, value in eager.state_dict().items():
        assert torch.equal(traced.state_dict()[key], value), key


def check_exported(model: Model, *, strict: bool = False) -> None:
    """Export, save and load a model, and compare batches of other sizes."""
    model.eval()
    auto, file = ({0: Dim.AUTO}, {0: Dim.AUTO}), io.BytesIO()
    with torch.no_grad():
        example = ids_and_lengths(4, model.keys)
        torch.export.save(export(model, example, dynamic_shapes=auto, strict=strict), file)
        program = torch.export.load(io.BytesIO(file.getvalue())).module()
        for size in (2, 9):
            batch = ids_and_lengths(size, model.keys)
            assert torch.equal(program(*batch), model(*batch))


@pytest.mark.parametrize("name", STORAGES)
def test_one_kind_is_exported(name: str) -> None:
    check_exported(Model(bags(name)))


@pytest.mark.parametrize(("pooling", "is_quantized"), [(Pooling.SUM, True), (Pooling.MEAN, False)])
def test_a_mix_is_exported(pooling: Pooling, *, is_quantized: bool) -> None:
    names = STORAGES if is_quantized else ("plain", "product", "hashed", "other_hashed")
    collection = bags(*names, pooling=pooling)
    Model(collection)(*ids_and_lengths(8)).square().sum().backward()
    check_exported(Model(collection.quantized(8) if is_quantized else collection))


def test_a_mix_is_exported_by_dynamo() -> None:
    check_exported(Model(bags("tt", "hashed", "other_hashed")), strict=True)


def test_a_mix_in_the_order_of_its_modules_is_exported() -> None:
    """The batch is not permuted, so the numbers of ids are read from its offsets."""
    collection = vectors("plain", "halves")
    assert len(collection.groups.active) == 2
    check_exported(Model(collection, ["plain", "halves"]))
    check_exported(Model(collection))


@pytest.mark.parametrize("storage", [Hash(), TensorTrain((2, 2))], ids=["hash", "train"])
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_a_graph_breaks_once_at_tables_of_several_modules(kind: Any, storage: Storage) -> None:
    """Nothing of the lookup is compiled, such as how it splits ids, for any size of batches."""
    config = EmbeddingBagConfig if kind is EmbeddingBagCollection else EmbeddingConfig
    tables = [config(8, 4, "plain", ["a"]), config(8, 4, "other", ["b"], storage=storage)]
    collection = kind(tables, optimizer=optim.SGD(0.5))

    def model(scale: torch.Tensor, batch: KeyedJaggedTensor) -> torch.Tensor:
        scale, output = scale.exp(), collection(batch)
        vectors = [output[name] for name in ("a", "b")]
        rows = [each if isinstance(each, torch.Tensor) else each.values() for each in vectors]
        return torch.cat(rows) * scale

    batch = KeyedJaggedTensor(
        ["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 1, 1, 0])
    )
    scale = torch.tensor(0.5)
    expected = model(scale, batch)
    explained = torch._dynamo.explain(model)(scale, batch)
    assert explained.graph_break_count == 1
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter)
    assert torch.equal(compiled(scale, batch), expected)
    for size in range(3, 9):
        lengths = torch.arange(2 * size) % 3
        ids = torch.arange(int(lengths.sum())) % 8
        batch = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths)
        assert torch.equal(compiled(scale, batch), model(scale, batch))
    assert counter.frame_count <= 5  # what is before the lookup and after it, twice for other sizes
