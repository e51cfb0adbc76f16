"""Collections for inference read as the trained ones, whatever their tables and batches are."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.export import Dim, export

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    KeyedTensor,
    Pooling,
    freeze,
    open_frozen,
    optim,
)
from emblib.inference import (
    InferenceEmbeddingBagCollection,
    InferenceEmbeddingCollection,
    for_inference,
    quantization_errors,
)
from emblib.sharding import DistributedModelParallel, GradientReduction, row_wise, table_wise
from emblib.sharding.ranks import RankGroup
from emblib.storage import Hash, TensorTrain
from tests.sharding import worlds
from tests.sharding.sharded_cases import joined

KEYS = [2**40 + 3, -7, 12, 2**62]


def bag_configs(
    first: Pooling = Pooling.SUM, others: Pooling = Pooling.SUM, dtype: torch.dtype = torch.float32
) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(30, 4, "dense", ["a", "b"], pooling=first, data_type=dtype),
        EmbeddingBagConfig(40, 6, "tt", ["c"], pooling=others, storage=TensorTrain((2, 2))),
        EmbeddingBagConfig(64, 4, "hash", ["k"], pooling=others, storage=Hash(default_value=0.5)),
    ]


def batch(*, weighted: bool = False, order: tuple[str, ...] = ("k", "a", "x", "c", "b")) -> Any:
    """Three samples; feature x has no table, and keys occur that no table has."""
    generator = torch.Generator().manual_seed(3)
    values, lengths = [], []
    for feature in order:
        sizes = torch.tensor([2, 0, 3])
        ids = torch.randint(0, 30, (5,), generator=generator)
        values.append(torch.tensor([*KEYS, 99]) if feature == "k" else ids)
        lengths.append(sizes)
    ids = torch.cat(values)
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    return KeyedJaggedTensor(list(order), ids, weights, lengths=torch.cat(lengths))


def trained(collection: Any, features: Any) -> Any:
    """Train one step, which inserts the keys of the batch."""
    out = collection(features)
    pooled = out.values() if isinstance(out, KeyedTensor) else None
    blocks = [vectors.values() for vectors in out.values()] if pooled is None else [pooled]
    torch.stack([block.square().sum() for block in blocks]).sum().backward()
    return collection.eval()


SUM, MEAN = Pooling.SUM, Pooling.MEAN


@pytest.mark.parametrize(
    ("first", "others", "weighted"),
    [(SUM, SUM, False), (SUM, SUM, True), (MEAN, MEAN, False), (MEAN, SUM, False)],
)
def test_bags_read_as_before(
    first: Pooling, others: Pooling, weighted: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    source = EmbeddingBagCollection(
        bag_configs(first, others, torch.float16),
        device,
        optimizer=optim.SGD(0.1),
        is_weighted=weighted,
    )
    some = batch(weighted=weighted, order=("a", "b", "c", "k")).to(device)
    trained(source, some)
    served = for_inference(source)
    assert isinstance(served, InferenceEmbeddingBagCollection)
    assert len(served.parts) == len({first, others})
    unknown = batch(weighted=weighted).to(device)
    unknown.values()[4] = 10**12  # a key without a row
    for features in (some, unknown):
        with torch.no_grad():
            want, got = source(features), served(features)
        assert got.keys() == want.keys()
        assert got.length_per_key() == want.length_per_key()
        torch.testing.assert_close(got.values(), want.values(), rtol=1e-5, atol=1e-6)
    formats = [error.format.value for error in quantization_errors(source, served)]
    assert formats == ["float16", "float32", "float32"]
    assert served.nbytes()["weights"] < 30 * 4 * 2 + 40 * 6 * 4 + 6 * 4 * 4 + 3 * 64
    assert served.nbytes()["index"] > 0
    if weighted:
        with pytest.raises(ValueError, match="batches must have weights"):
            served(batch().to(device))


def test_sequences_of_several_dims() -> None:
    torch.manual_seed(0)
    source = EmbeddingCollection(
        [
            EmbeddingConfig(30, 4, "narrow", ["a", "c"]),
            EmbeddingConfig(40, 6, "wide", ["a", "b"]),
            EmbeddingConfig(64, 6, "hash", ["k"], storage=Hash()),
        ],
        optimizer=optim.SGD(0.1),
        need_indices=True,
    )
    trained(source, batch())
    served = for_inference(source, ["float32", "float32", "float32"])
    assert isinstance(served, InferenceEmbeddingCollection)
    assert len(served.parts) == 2
    with torch.no_grad():
        want, got = source(batch()), served(batch())
    assert list(got) == list(want) == ["a@narrow", "c", "a@wide", "b", "k"]
    for name in want:
        assert torch.equal(got[name].values(), want[name].values())
        assert torch.equal(got[name].lengths(), want[name].lengths())
        assert torch.equal(got[name].weights(), want[name].weights())


def test_formats_errors_and_files_of_a_collection(tmp_path: Any) -> None:
    torch.manual_seed(0)
    source = EmbeddingBagCollection(bag_configs(), optimizer=optim.SGD(0.1))
    trained(source, batch())
    served = for_inference(source, ["int8", "float32", "int4"], output_dtype=torch.float16)
    errors = {error.table: error for error in quantization_errors(source, served)}
    assert [error.format.value for error in errors.values()] == ["int8", "float32", "int4"]
    assert errors["dense"].rows == 30
    assert errors["hash"].rows == 5
    assert 0 < errors["dense"].largest < errors["hash"].largest < 0.1
    assert errors["tt"].largest == 0
    pooled = served(batch()).values()
    assert pooled.dtype == torch.float16
    with torch.no_grad():
        torch.testing.assert_close(pooled.float(), source(batch()).values(), rtol=0, atol=0.1)
    freeze(served.parts[0], tmp_path / "tables")
    served.parts[0] = open_frozen(tmp_path / "tables")
    assert torch.equal(served(batch()).values(), pooled)


@pytest.mark.parametrize("formats", [None, "int8"])
def test_a_collection_in_one_file(formats: str | None, tmp_path: Any) -> None:
    torch.manual_seed(0)
    weighted = EmbeddingBagCollection(bag_configs(), optimizer=optim.SGD(0.1), is_weighted=True)
    ids = batch()
    weights = torch.rand(ids.values().numel())
    ids = KeyedJaggedTensor(ids.keys(), ids.values(), weights, lengths=ids.lengths())
    trained(weighted, ids)
    freeze(weighted, tmp_path / "a", formats)
    opened = open_frozen(tmp_path / "a")
    expected = for_inference(weighted, formats)
    assert type(opened) is type(expected)
    assert opened(ids).keys() == expected(ids).keys()
    assert torch.equal(opened(ids).values(), expected(ids).values())
    assert opened.nbytes() == expected.nbytes()
    with pytest.raises(ValueError, match="batches must have weights"):
        opened(batch())
    freeze(opened, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_sequences_in_one_file(tmp_path: Any) -> None:
    torch.manual_seed(0)
    configs = [EmbeddingConfig(30, 4, "narrow", ["a"]), EmbeddingConfig(40, 6, "wide", ["b"])]
    source = EmbeddingCollection(configs, optimizer=optim.SGD(0.1), need_indices=True)
    freeze(source, tmp_path / "a")
    opened = open_frozen(tmp_path / "a")
    with torch.no_grad():
        want, got = source(batch()), opened(batch())
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name].values(), want[name].values())
        assert torch.equal(got[name].weights(), want[name].weights())


class _Ranker(torch.nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        features = KeyedJaggedTensor(["a", "b", "c", "k"], ids, lengths=lengths)
        result: torch.Tensor = self.tables(features).values()
        return result


def test_exported_for_any_batch(tmp_path: Any) -> None:
    torch.manual_seed(0)
    source = EmbeddingBagCollection(bag_configs(), optimizer=optim.SGD(0.1))
    trained(source, batch())
    freeze(source, tmp_path / "a", "int8")

    def example(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(0, 4, (4 * size,))
        return torch.randint(0, 30, (int(lengths.sum()),)), lengths

    auto = ({0: Dim.AUTO}, {0: Dim.AUTO})
    with pytest.raises(RuntimeError, match="for_inference"):
        export(_Ranker(source).eval(), example(4), dynamic_shapes=auto)
    model = _Ranker(open_frozen(tmp_path / "a"))
    program = export(model, example(4), dynamic_shapes=auto).module()
    for size in (2, 7):
        ids, lengths = example(size)
        assert torch.equal(program(ids, lengths), model(ids, lengths))


@pytest.mark.parametrize("storage", [None, Hash()], ids=["dense", "keyed"])
def test_a_collection_trains_on_after_an_export(storage: Hash | None) -> None:
    """Whether the export succeeds or is refused; nothing of it stays in the collection."""
    fields: dict[str, Any] = {} if storage is None else {"storage": storage}
    configs = [
        EmbeddingBagConfig(30, 4, name, [name], pooling=pooling, **fields)
        for name, pooling in (("a", Pooling.MEAN), ("b", Pooling.SUM))
    ]
    source = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    example = KeyedJaggedTensor(["a", "b"], torch.arange(12), lengths=torch.full((4,), 3))
    if storage is None:
        program = export(source, (example,)).module()
        assert torch.equal(program(example).values(), source(example).values())
    else:
        with pytest.raises(RuntimeError, match="for_inference"):
            export(source, (example,))
    out = source(example).values()
    assert type(out) is torch.Tensor
    out.sum().backward()
    assert not torch.equal(source(example).values(), out)


def test_a_part_that_no_file_can_hold(tmp_path: Any) -> None:
    served = for_inference(EmbeddingBagCollection(bag_configs(), optimizer=optim.SGD(0.1)))
    served.parts[0] = torch.nn.Identity()
    with pytest.raises(TypeError, match="part 0 of the collection is Identity"):
        freeze(served, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_what_a_collection_cannot_do_is_refused() -> None:
    source = EmbeddingBagCollection(bag_configs(), optimizer=optim.SGD(0.1))
    served = for_inference(source)
    with pytest.raises(KeyError, match=r"missing are \['b'\]"):
        served(batch(order=("a", "c", "k")))
    uneven = KeyedJaggedTensor(
        ["a", "b", "c", "k"],
        torch.tensor([1, 2, 3, 4, 5]),
        lengths=torch.tensor([1, 1, 1, 1, 1]),
        stride_per_key_per_rank=[[2], [1], [1], [1]],
    )
    with pytest.raises(ValueError, match="as many bags for every feature"):
        served(uneven)
    with pytest.raises(TypeError, match="read-only already"):
        for_inference(served)
    quantized = source.quantized(8)
    with pytest.raises(ValueError, match="'dense' has rows in int8 already"):
        for_inference(quantized, "int4")
    with pytest.raises(ValueError, match="one entry per table, 3"):
        for_inference(source, ["int8"])


def convert_sharded(ranks: RankGroup) -> tuple[Tensor, Tensor, list[str]]:
    """Train keys over ranks; return what is served, on every rank, and what the oracle reads."""
    torch.manual_seed(5)
    keyed = [
        EmbeddingBagConfig(4096, 4, "user", ["u"], storage=Hash(default_value=0.25)),
        EmbeddingBagConfig(256, 8, "whole", ["w"], storage=Hash()),
    ]
    oracle = EmbeddingBagCollection(keyed, optimizer=optim.SGD(0.1))
    plan = {"": {"user": row_wise(), "whole": table_wise(0)}}
    model = DistributedModelParallel(
        copy.deepcopy(oracle), ranks, plan=plan, gradients=GradientReduction.SUM
    )
    batches = []
    for rank in range(ranks.size):
        ids = torch.arange(12) * (rank + 1) - 5  # each rank has keys of its own, and shared ones
        batches.append(KeyedJaggedTensor(["u", "w"], ids, lengths=torch.full((4,), 3)))
    model(batches[ranks.rank]).values().sum().backward()
    oracle(joined(batches)).values().sum().backward()
    served: Any = for_inference(model.module)
    both = torch.cat([batches[0].values(), torch.tensor([10**9] * 12)])
    asked = KeyedJaggedTensor(["u", "w"], both, lengths=torch.full((8,), 3))
    with torch.no_grad():
        want = oracle.eval()(asked).values()
    dense = EmbeddingBagCollection([EmbeddingBagConfig(16, 4, "c", ["c"])])
    sharded = DistributedModelParallel(dense, ranks, plan={"": {"c": row_wise()}})
    with pytest.raises(TypeError, match=r"checkpoints\.export"):
        for_inference(sharded.module)
    return served(asked).values(), want, [type(part).__name__ for part in served.parts]


def test_a_sharded_dynamic_table_is_converted_on_all_ranks() -> None:
    answers = worlds.run(2, convert_sharded)
    for got, want, parts in answers:
        torch.testing.assert_close(got, want)
        assert parts == ["InferenceEmbeddingBags"]
    assert torch.equal(answers[0][0], answers[1][0])


def test_a_collection_without_tables() -> None:
    source, features = EmbeddingBagCollection([]), batch()
    torch.set_default_dtype(torch.float64)
    try:
        blocks = [bags(features).values() for bags in (source, for_inference(source))]
    finally:
        torch.set_default_dtype(torch.float32)
    for block in blocks:
        assert (block.shape, block.dtype) == ((3, 0), torch.float32)
    assert for_inference(EmbeddingCollection([]))(batch()) == {}


def test_tables_of_other_names_are_not_compared() -> None:
    served = for_inference(EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "a")]))
    other = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "b")])
    with pytest.raises(ValueError, match=r"no table 'a', only \['b'\]"):
        quantization_errors(other, served)
    with pytest.raises(TypeError, match="source must be a collection, as served is, got Tensor"):
        quantization_errors(torch.ones(9, 4), served)
