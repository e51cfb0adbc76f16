"""Tables whose ids share rows are served as they were trained, and stay as small."""

import copy
import pickle
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.export import Dim, export

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Pooling,
    TableSpec,
    freeze,
    open_frozen,
    optim,
)
from emblib.inference import for_inference, frozen_file, quantization_errors
from emblib.inference.composed import ComposedEmbeddingBags, lookup_options
from emblib.online import DirectorySink, LogFollower
from emblib.online.tables import find_tables
from emblib.storage import Hash, Hashed, Narrow, QuotientRemainder, RowHash, TensorTrain, kinds

KEYS = ["unused", "k", "d", "b", "c", "a"]
CONFIGS = [
    EmbeddingBagConfig(60, 8, "plain", ["a"]),
    EmbeddingBagConfig(60, 8, "product", ["a", "b"], storage=QuotientRemainder(7)),
    EmbeddingBagConfig(60, 8, "sum", ["b"], storage=QuotientRemainder(9, "add")),
    EmbeddingBagConfig(60, 8, "halves", ["c"], storage=QuotientRemainder(9, "concatenate")),
    EmbeddingBagConfig(60, 6, "other_halves", ["d"], storage=QuotientRemainder(8, "concatenate")),
    EmbeddingBagConfig(60, 8, "hashed", ["c"], storage=Hashed(9, 2), data_type=torch.float16),
    EmbeddingBagConfig(60, 8, "mixed", ["a"], storage=Hashed(11, 2, RowHash.REMAINDER, seed=4)),
    EmbeddingBagConfig(60, 8, "narrow", ["d"], storage=Narrow(3)),
    EmbeddingBagConfig(60, 6, "narrower", ["b"], storage=Narrow(2)),
    EmbeddingBagConfig(60, 8, "tt", ["b"], storage=TensorTrain((2, 2))),
    EmbeddingBagConfig(64, 8, "keyed", ["k"], storage=Hash(default_value=0.5)),
]


def batch(size: int = 5, *, weighted: bool = False) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (len(KEYS) * size,))
    ids = torch.randint(0, 60, (int(lengths.sum()),))
    weights = torch.rand(ids.numel()) if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths=lengths)


def trained(pooling: Pooling, *names: str, weighted: bool = False) -> Any:
    torch.manual_seed(0)
    configs = [replace(c, pooling=pooling) for c in CONFIGS if not names or c.name in names]
    bags = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1), is_weighted=weighted)
    bags(batch(40, weighted=weighted)).values().square().sum().backward()
    return bags.eval()


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_bags_have_the_bits_of_the_trained_collection(
    pooling: Pooling, weighted: bool, tmp_path: Any
) -> None:
    source = trained(pooling, weighted=weighted)
    served = for_inference(source)
    freeze(source, tmp_path / "a")
    opened: Any = open_frozen(tmp_path / "a")
    copies = [opened, copy.deepcopy(opened), pickle.loads(pickle.dumps(opened))]
    for size in (1, 6):
        features = batch(size, weighted=weighted)
        features.values()[::5] = 10**6  # reads the rows of id 0
        with pytest.warns(UserWarning, match="indices"), torch.no_grad():
            want = source(features)
        for module in (served, *copies):
            with pytest.warns(UserWarning, match=r"table 'p|feature"):
                got = module(features)
            assert got.keys() == want.keys()
            assert torch.equal(got.values(), want.values())
    freeze(opened, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("name", [c.name for c in CONFIGS if c.name not in ("tt", "keyed")])
def test_a_kind_alone(name: str, tmp_path: Any) -> None:
    source = trained(Pooling.SUM, name)
    features = batch()
    freeze(source, tmp_path / "a", "int8")
    freeze(source, tmp_path / "b")
    opened: Any = open_frozen(tmp_path / "a")
    exact: Any = open_frozen(tmp_path / "b")
    with torch.no_grad():
        want = source(features).values()
    assert torch.equal(exact(features).values(), want)
    assert not torch.equal(opened(features).values(), want)
    torch.testing.assert_close(opened(features).values(), want, rtol=0, atol=0.02)
    if name != "plain":
        (part,) = exact.parts
        assert part.nbytes()["weights"] < 60 * 8 * 4 // 2
        freeze(part, tmp_path / "part")
        alone: Any = open_frozen(tmp_path / "part")
        assert type(alone) is ComposedEmbeddingBags
        one = features.permute([KEYS.index(f.feature) for f in exact.features])
        assert torch.equal(alone(one.values(), one.offsets()), want)


def test_vectors_have_the_bits_of_the_trained_collection(tmp_path: Any) -> None:
    torch.manual_seed(0)
    configs = [
        EmbeddingConfig(
            c.num_embeddings,
            c.embedding_dim,
            c.name,
            c.feature_names,
            data_type=c.data_type,
            storage=c.storage,
        )
        for c in CONFIGS
    ]
    source = EmbeddingCollection(configs, optimizer=optim.SGD(0.1)).eval()
    freeze(source, tmp_path / "a")
    opened: Any = open_frozen(tmp_path / "a")
    features = batch(4)
    with torch.no_grad():
        want, got = source(features), opened(features)
    assert list(got) == list(want)
    for name in want:
        assert torch.equal(got[name].values(), want[name].values()), name


def test_errors_of_components() -> None:
    source = trained(Pooling.SUM, "plain", "product", "hashed")
    served = for_inference(source, ["int8", "int4", "float16"])
    errors = {error.table: error for error in quantization_errors(source, served)}
    assert list(errors) == ["plain", "product.quotients", "product.remainders", "hashed.weight"]
    formats = [error.format.value for error in errors.values()]
    assert formats == ["int8", "int4", "int4", "float16"]
    assert [error.rows for error in errors.values()] == [60, 9, 7, 9]
    assert errors["product.quotients"].largest > errors["plain"].largest > 0
    assert errors["hashed.weight"].largest == 0


def test_a_quantized_collection_keeps_its_bytes(tmp_path: Any) -> None:
    quantized = trained(Pooling.SUM).quantized(4)
    freeze(quantized, tmp_path / "a")
    opened: Any = open_frozen(tmp_path / "a")
    features = batch()
    with torch.no_grad():
        assert torch.equal(opened(features).values(), quantized(features).values())
    views = quantized.handles()["plain"].views()
    assert torch.equal(opened.parts[0].rows.table_views()[0]["packed"], views["packed"])
    (error, *_) = quantization_errors(quantized, opened)
    assert (error.table, error.format.value, error.largest) == ("plain", "int4", 0)


class _Model(torch.nn.Module):
    def __init__(self, tables: Any) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.tables(KeyedJaggedTensor(KEYS, ids, lengths=lengths)).values()
        return out


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_exported_for_any_batch(pooling: Pooling) -> None:
    source = trained(pooling)
    example, auto = batch(4), ({0: Dim.AUTO}, {0: Dim.AUTO})
    model = _Model(for_inference(source, "int8"))
    arguments = (example.values(), example.lengths())
    program = export(model, arguments, dynamic_shapes=auto, strict=False).module()
    for size in (2, 7):
        other = batch(size)
        assert torch.equal(
            program(other.values(), other.lengths()), model(other.values(), other.lengths())
        )


def test_kinds_of_files(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions refuse files with composed tables, and read all others."""
    freeze(trained(Pooling.SUM, "plain", "tt"), tmp_path / "plain")
    freeze(trained(Pooling.SUM, "plain", "hashed"), tmp_path / "composed")
    assert frozen_file.read(tmp_path / "plain").kind == "collection"
    content = frozen_file.read(tmp_path / "composed")
    assert content.kind == "collection_with_composed_rows"
    (storage,) = content.config["parts"][1]["tables"]["storages"]
    assert storage == ["Hashed", {**asdict(Hashed(9, 2)), "hash": "mixed"}]
    known = {name: kind for name, kind in kinds().items() if name != "Hashed"}
    monkeypatch.setattr("emblib.inference.frozen.kinds", lambda: known)
    with pytest.raises(ValueError, match="storage 'Hashed', which is not registered"):
        open_frozen(tmp_path / "composed")


def test_components_are_no_tables_of_a_follower(tmp_path: Any) -> None:
    served = for_inference(trained(Pooling.SUM, "plain", "hashed"))
    found = find_tables(served)
    assert [table.name for table in found.tables] == ["plain"]
    assert found.other_kinds == {"hashed": "Hashed"}
    assert LogFollower(served, DirectorySink(tmp_path)) is not None


def test_components_move_with_their_part() -> None:
    (part,) = for_inference(trained(Pooling.SUM, "hashed")).to("meta").parts
    assert {part.features.device.type, part.rows.packed.device.type} == {"meta"}


def test_tables_of_one_lookup_are_of_one_kind() -> None:
    specs = [TableSpec(60, 8, "sum"), TableSpec(60, 8, "narrow")]
    storages = [QuotientRemainder(9, "add"), Narrow(3)]
    with pytest.raises(ValueError, match=r"got \['sum', 'narrow'\] of 2 kinds"):
        lookup_options(specs, storages, [0, 1], Pooling.SUM)
    with pytest.raises(ValueError, match=r"at least one: got \[\] of 0 kinds"):
        lookup_options([], [], [], Pooling.SUM)
    # Without pooling, tables of one kind need one dim.
    specs, storages = [TableSpec(60, 8, "a"), TableSpec(60, 4, "b")], [storages[0]] * 2
    assert lookup_options(specs, storages, [0, 1], Pooling.SUM)["pooling"] is Pooling.SUM
    with pytest.raises(ValueError, match="of 2 kinds"):
        lookup_options(specs, storages, [0, 1], Pooling.NONE)
