"""Collections against plain torch: any mix of tables, pooling, weights and batches."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from emblib import (
    CacheConfig,
    DynamicEmbeddingBags,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Eviction,
    KeyedJaggedTensor,
    KeyedTensor,
    Placement,
    Pooling,
    TTCache,
    optim,
    share_tables,
)
from emblib.collections.optimizers import FusedOptimizer
from emblib.dynamic.keys import hash_key_of
from emblib.sharding import RankGroup, ShardedEmbeddingBagCollection, row_wise
from emblib.storage import Dense, Hash, Hashed, Storage, TensorTrain
from tests.collections.cases import (
    IDS,
    bag_configs,
    batch,
    dense,
    expected,
    features_of,
    sequence_configs,
)

MIXES = [
    ("plain",),
    ("tt",),
    ("dynamic",),
    ("plain", "plain", "plain"),
    ("tt", "plain", "dynamic", "plain"),
]


def _rows(collection: EmbeddingBagCollection) -> dict[str, torch.Tensor]:
    return {config.name: dense(collection, config.name) for config in collection.configs}


def _check(out: KeyedTensor, pieces: dict[str, torch.Tensor], **tolerance: float) -> None:
    assert out.keys() == list(pieces)
    assert out.length_per_key() == [piece.shape[1] for piece in pieces.values()]
    assert out.values().dtype is torch.float32
    torch.testing.assert_close(out.values(), torch.cat(list(pieces.values()), 1), **tolerance)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", ["sum", "mean", "both"])
@pytest.mark.parametrize("kinds", MIXES)
def test_outputs(kinds: tuple[str, ...], pooling: str, weighted: bool) -> None:
    first = Pooling.SUM if pooling == "both" else Pooling(pooling)
    configs = bag_configs(kinds, first)
    if pooling == "both":
        means = bag_configs(kinds, Pooling.MEAN)
        configs = [m if i % 2 else c for i, (c, m) in enumerate(zip(configs, means, strict=True))]
    collection = EmbeddingBagCollection(configs, is_weighted=weighted, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    for order in (keys, [*keys[::-1], "more"], ["more", *keys]):
        for size in (3, 1):
            features = batch(order, size, weighted=weighted)
            collection.train()(features)  # dynamic tables take in their keys
            out = collection.eval()(features)
            _check(out, expected(configs, _rows(collection), features, weighted=weighted))


@pytest.mark.parametrize("pooling", list(Pooling)[:2])
def test_empty_batches(pooling: Pooling) -> None:
    configs = bag_configs(("tt", "plain", "dynamic"), pooling)
    collection = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    columns = sum(c.embedding_dim * len(c.feature_names) for c in configs)
    for size in (0, 2):
        nothing = torch.empty(0, dtype=torch.int64)
        lengths = torch.zeros(len(keys) * size, dtype=torch.int64)
        features = KeyedJaggedTensor(keys, nothing, None, lengths, stride=size)
        out = collection(features).values()
        assert torch.equal(out, torch.zeros(size, columns))
        if size:
            out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_training_after_an_evaluation_in_inference_mode(dtype: torch.dtype) -> None:
    tables = [
        EmbeddingBagConfig(10, 4, "b", pooling="mean"),
        EmbeddingBagConfig(10, 4, "a", data_type=dtype),
    ]
    bags = EmbeddingBagCollection(tables, optimizer=optim.SGD(0.1))
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    before = bags.embedding_bags["b"].weight.clone()
    with torch.inference_mode():
        expected = bags(batch).values()
    result = bags(batch).values()
    assert torch.equal(result, expected)
    result.sum().backward()
    assert torch.allclose(bags.embedding_bags["b"].weight[2], before[2] - 0.1)


@pytest.mark.parametrize("variable", [False, True])
def test_means_in_16_bits_do_not_overflow_with_tables_of_sums(variable: bool) -> None:
    tables = [EmbeddingBagConfig(2, 4, "m", pooling="mean"), EmbeddingBagConfig(2, 4, "s")]
    bags = EmbeddingBagCollection(tables)
    nn.init.constant_(bags.embedding_bags["m"].weight, 300.0)
    bags.groups.set_output_dtype(torch.float16)
    batch = KeyedJaggedTensor(
        ["m", "s"],
        torch.zeros(251, dtype=torch.int64),
        lengths=torch.tensor([250, 1]),
        stride_per_key_per_rank=[[1], [1]] if variable else None,
    )
    means = bags(batch)["m"]
    assert means.dtype is torch.float16
    assert means.tolist() == [[300.0] * 4]


def test_dtypes_of_ids() -> None:
    configs = bag_configs(("plain", "tt", "dynamic"))
    collection = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    features = batch(features_of(configs), 3)
    wanted = collection.train()(features).values()
    for ids in (torch.int32, torch.int64):
        for lengths in (torch.int32, torch.int64):
            other = KeyedJaggedTensor(
                features.keys(), features.values().to(ids), None, features.lengths().to(lengths)
            )
            assert torch.equal(collection.eval()(other).values(), wanted)


@pytest.mark.parametrize("pooling", list(Pooling)[:2])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_trains_as_plain_torch_with_torch_optim(optimizer: type, pooling: Pooling) -> None:
    """Dense gradients, by table: parameters of their own, of which each can have its rate."""
    configs = bag_configs(("plain", "plain", "plain"), pooling)
    collection = EmbeddingBagCollection(configs, is_weighted=True)
    theirs = {c.name: nn.Parameter(dense(collection, c.name)) for c in configs}
    names = [f"embedding_bags.{name}.weight" for name in theirs]
    assert [name for name, _ in collection.named_parameters()] == names
    ours = dict(collection.named_parameters())
    rates = [{"lr": 0.1 * (i + 1)} for i in range(3)]
    steps = [
        optimizer([{"params": [p], **rate} for p, rate in zip(params, rates, strict=True)])
        for params in (ours.values(), theirs.values())
    ]
    for _ in range(3):
        features = batch(features_of(configs), 4, weighted=True)
        out = collection(features)
        pieces = expected(configs, theirs, features, weighted=True)
        _check(out, pieces)
        scale = torch.linspace(-1, 1, out.values().shape[1])
        for values, step in zip(
            (out.values(), torch.cat(list(pieces.values()), 1)), steps, strict=True
        ):
            step.zero_grad()
            (values * scale).sum().backward()
            step.step()
        for name, wanted in theirs.items():
            got = ours[f"embedding_bags.{name}.weight"].detach()[:IDS]
            torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kinds", [("plain", "plain"), ("tt", "plain", "dynamic")])
def test_fused_steps_are_those_of_sgd(kinds: tuple[str, ...]) -> None:
    """The update in backward, of means and sums, is that of the gradients of plain torch."""
    configs = [
        c if i % 2 else EmbeddingBagConfig(**{**vars(c), "pooling": Pooling.MEAN})
        for i, c in enumerate(bag_configs(kinds))
    ]
    collection = EmbeddingBagCollection(configs, is_weighted=True, optimizer=optim.SGD(0.01))
    features = batch(features_of(configs), 4, weighted=True)
    collection(features)
    rows = {name: table.requires_grad_() for name, table in _rows(collection).items()}
    weights = features.weights().requires_grad_()
    out = collection(features).values()
    scale = torch.linspace(-1, 1, out.shape[1])
    (out * scale).sum().backward()
    own, weights.grad = weights.grad, None
    pieces = expected(configs, rows, features, weighted=True)
    (torch.cat(list(pieces.values()), 1) * scale).sum().backward()
    torch.testing.assert_close(own, weights.grad, rtol=1e-4, atol=1e-5)
    for config in configs:
        if isinstance(config.storage, TensorTrain):
            continue  # its cores are trained, not its rows
        table = rows[config.name]
        after = dense(collection, config.name)
        wanted = table.detach() - 0.01 * table.grad
        torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
        assert not torch.equal(after, table.detach())
    assert all(p.grad is None for p in collection.parameters())


@pytest.mark.parametrize("pooling", list(Pooling)[:2])
@pytest.mark.parametrize("kinds", [("plain",), ("tt", "plain", "dynamic")])
def test_variable_batches(kinds: tuple[str, ...], pooling: Pooling) -> None:
    """Merged examples, brought back by the inverse indices, are the batch without merging."""
    configs = bag_configs(kinds, pooling)
    keys = features_of(configs)
    strides = [[i % 3 + 1] for i in range(len(keys))]
    inverse = torch.stack([torch.randint(n, (5,)) for (n,) in strides])
    lengths = torch.randint(0, 4, (sum(n for (n,) in strides),))
    ids = torch.randint(IDS, (int(lengths.sum()),))
    weights = torch.rand(ids.numel())
    merged = KeyedJaggedTensor(
        keys,
        ids,
        weights,
        lengths,
        stride_per_key_per_rank=strides,
        inverse_indices=(keys, inverse),
    )
    bags = ids.split(lengths.tolist())
    scales = weights.split(lengths.tolist())
    firsts = [sum(n for (n,) in strides[:f]) for f in range(len(keys))]
    chosen = [firsts[f] + int(b) for f in range(len(keys)) for b in inverse[f]]
    whole = KeyedJaggedTensor(
        keys,
        torch.cat([bags[c] for c in chosen]),
        torch.cat([scales[c] for c in chosen]),
        lengths[chosen],
    )
    one = EmbeddingBagCollection(configs, is_weighted=True, optimizer=optim.SGD(0.1))
    two = copy.deepcopy(one)
    for order in (keys, keys[::-1]):
        out = one(merged.permute([keys.index(key) for key in order])).values()
        plain = two(whole).values()
        torch.testing.assert_close(out, plain)
        scale = torch.linspace(-1, 1, out.shape[1])
        (out * scale).sum().backward()
        (plain * scale).sum().backward()
        for config in configs:
            torch.testing.assert_close(
                dense(one, config.name), dense(two, config.name), rtol=1e-4, atol=1e-6
            )
    alone = KeyedJaggedTensor(keys, ids, weights, lengths, stride_per_key_per_rank=strides)
    if len({n for (n,) in strides}) > 1:
        with pytest.raises(ValueError, match="need inverse indices"):
            one(alone)


def test_state_dicts() -> None:
    configs = bag_configs(("plain", "tt", "dynamic"))
    one = EmbeddingBagCollection(configs, optimizer=optim.Adam(0.1))
    for _ in range(2):
        one(batch(features_of(configs), 3)).values().sum().backward()
    state = one.state_dict()
    assert list(state) == [
        "embedding_bags.t0.weight",
        "embedding_bags.t1.tt_layout",
        *(f"embedding_bags.t1.cores.{k}" for k in range(3)),
        *(
            f"embedding_bags.t2.{key}"
            for key in (
                "keys",
                "stamps",
                "weight",
                "exp_avg",
                "exp_avg_sq",
                "clock",
                "index.hash_keys",
            )
        ),
    ]
    assert state["embedding_bags.t0.weight"].shape == (IDS + 32, 4)
    two = EmbeddingBagCollection(configs, optimizer=optim.Adam(0.1))
    features = batch(features_of(configs), 3)
    two.load_state_dict(pickle.loads(pickle.dumps(state)))
    assert torch.equal(one.eval()(features).values(), two.eval()(features).values())
    for key, value in two.state_dict().items():
        assert torch.equal(value, state[key]), key
    del state["embedding_bags.t2.keys"]
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags.t2.keys"):
        two.load_state_dict(state)
    small = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t0")])
    with pytest.raises(RuntimeError, match="size mismatch"):
        small.load_state_dict({"embedding_bags.t0.weight": torch.zeros(6, 4)})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        small.load_state_dict({**small.state_dict(), "embedding_bags.x.weight": torch.zeros(1)})


def test_plain_tables_load_what_torch_saves() -> None:
    """A module of nn.EmbeddingBags by these names has the same state dict."""
    theirs = nn.ModuleDict({"embedding_bags": nn.ModuleDict({"t": nn.EmbeddingBag(30, 4)})})
    ours = EmbeddingBagCollection([EmbeddingBagConfig(30, 4, "t")])
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(ours.embedding_bags["t"].weight, theirs["embedding_bags"]["t"].weight)


def test_cached_tables_are_saved_and_loaded_behind_the_cache() -> None:
    config = EmbeddingBagConfig(
        2000, 4, "t", storage=Dense(Placement.MANAGED_CACHING, CacheConfig(sets=1))
    )
    one = EmbeddingBagCollection([config], optimizer=optim.SGD(0.5))
    features = batch(["t"], 8)
    before = one.state_dict()["embedding_bags.t.weight"].clone()
    one(features).values().sum().backward()
    state = one.state_dict()
    assert not torch.equal(state["embedding_bags.t.weight"], before)
    two = EmbeddingBagCollection([config], optimizer=optim.SGD(0.5))
    two(features).values().sum().backward()
    two.load_state_dict(state)
    assert torch.equal(two(features).values(), one(features).values())


def test_copies_pickles_and_meta() -> None:
    configs = bag_configs(("plain", "tt", "dynamic"))
    one = EmbeddingBagCollection(configs, optimizer=optim.RowwiseAdagrad(0.1))
    features = batch(features_of(configs), 3)
    one(features).values().sum().backward()
    for other in (copy.deepcopy(one), pickle.loads(pickle.dumps(one)), one.to("cpu")):
        names = [name for name, _ in other.named_parameters()]
        assert names == [name for name, _ in one.named_parameters()]
        wanted = one.eval()(features).values()
        assert torch.equal(other.eval()(features).values(), wanted)
        if other is not one:
            other.train()(features).values().sum().backward()
            assert torch.equal(one.eval()(features).values(), wanted)
            assert not torch.equal(other.eval()(features).values(), wanted)
        one.train()
    empty = EmbeddingBagCollection(configs, "meta", optimizer=optim.RowwiseAdagrad(0.1))
    empty.to_empty(device="cpu").reset_parameters()
    empty.load_state_dict(one.state_dict())
    assert torch.equal(empty.eval()(features).values(), one.eval()(features).values())


def test_seeds_make_first_values() -> None:
    configs = bag_configs(("plain", "tt"))
    torch.manual_seed(3)
    one = EmbeddingBagCollection(configs)
    torch.manual_seed(3)
    two = EmbeddingBagCollection(configs)
    three = EmbeddingBagCollection(configs)
    for name in ("t0", "t1"):
        assert torch.equal(dense(one, name), dense(two, name))
        assert not torch.equal(dense(one, name), dense(three, name))


def test_tables_with_optimizers_of_their_own() -> None:
    configs = [
        EmbeddingBagConfig(30, 4, "a", optimizer=optim.SGD(1.0)),
        EmbeddingBagConfig(30, 4, "b"),
        EmbeddingBagConfig(30, 4, "c", optimizer=optim.SGD(0.0)),
    ]
    collection = EmbeddingBagCollection(configs)
    before = {name: dense(collection, name) for name in "abc"}
    features = batch(["a", "b", "c"], 4)
    collection(features).values().sum().backward()
    grads = {name: p.grad for name, p in collection.named_parameters()}
    assert grads["embedding_bags.a.weight"] is None
    assert grads["embedding_bags.b.weight"] is not None
    assert not torch.equal(dense(collection, "a"), before["a"])
    assert torch.equal(dense(collection, "b"), before["b"])
    assert torch.equal(dense(collection, "c"), before["c"])


@pytest.mark.parametrize("change", [False, True])
@pytest.mark.parametrize("storage", [Dense(), TensorTrain((2,)), Hash(seed=1), Hashed(5, 2)])
def test_max_gradient_bounds_the_gradients_of_means(storage: Storage, change: bool) -> None:
    """Also where means are divided after the lookup: with a table of sums, and sharded."""

    def config(name: str, pooling: str, storage: Storage) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(32, 4, name, pooling=pooling, storage=storage)

    configs = [config("m", "mean", storage), config("s", "sum", Dense())]
    optimizer = optim.SGD(1.0, max_gradient=None if change else 0.5)
    only_means = EmbeddingBagCollection(configs[:1], optimizer=optimizer)
    models = [only_means]
    for variant in (EmbeddingBagCollection(configs, optimizer=optimizer), only_means):
        variant.reset_parameters({"m": 3, "s": 4})
        models.append(variant)
    models[2] = ShardedEmbeddingBagCollection(only_means, {"m": row_wise()}, RankGroup.single())
    ids, lengths = torch.tensor([1, 2, 3, 4, 2]), torch.tensor([4, 1])
    outputs = []
    for model in models:
        if change:
            FusedOptimizer.of(model).param_groups[0]["max_gradient"] = 0.5
        pair = KeyedJaggedTensor(["m", "s"], ids.repeat(2), lengths=lengths.repeat(2))
        merged = KeyedJaggedTensor(
            ["m", "s"],
            ids.repeat(2),
            lengths=lengths.repeat(2),
            stride_per_key_per_rank=[[2], [2]],
            inverse_indices=(["m", "s"], torch.tensor([[0, 0, 1], [1, 1, 0]])),
        )
        for features in (pair, merged):
            (2 * model(features)["m"]).sum().backward()
        outputs.append(model(pair)["m"])
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[2], outputs[0])


def test_dynamic_tables_take_any_id() -> None:
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(64, 4, "d", storage=Hash())], optimizer=optim.SGD(0.1)
    )
    ids = torch.tensor([-1, 2**62, -(2**63)])
    features = KeyedJaggedTensor(["d"], ids, None, torch.tensor([1, 2]))
    out = collection(features).values()
    assert float(out.detach().abs().min()) > 0
    collection.eval()
    fresh = KeyedJaggedTensor(["d"], ids + 1, None, torch.tensor([1, 2]))
    assert torch.equal(collection(fresh).values(), torch.zeros(2, 4))


def test_wrong_use() -> None:
    configs = bag_configs(("plain", "plain"))
    collection = EmbeddingBagCollection(configs, is_weighted=True)
    with pytest.raises(KeyError, match=r"missing are \['g0'\]"):
        collection(batch(["f0", "f1", "x"], 2, weighted=True))
    with pytest.raises(ValueError, match="batches must have weights"):
        collection(batch(["f0", "g0", "f1"], 2))
    with pytest.raises(ValueError, match="must differ in name"):
        EmbeddingBagCollection([configs[0], configs[0]])
    with pytest.raises(TypeError, match="must be of EmbeddingBagConfig"):
        EmbeddingBagCollection([EmbeddingConfig(5, 4, "t")])
    with pytest.raises(TypeError, match="optimizer must be None or one of"):
        EmbeddingBagCollection(configs, optimizer=torch.optim.SGD)
    assert collection.is_weighted()
    assert collection.embedding_bag_configs() == configs
    assert "t0: 56 x 4" in repr(collection)


def _dynamic(seed: int | None = None, device: str | None = None) -> EmbeddingBagCollection:
    """Two tables that share a module, of features of their names."""
    kind = Hash(eviction="none", seed=seed)
    configs = [EmbeddingBagConfig(10_000, 4, name, storage=kind) for name in ("users", "ads")]
    return EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1), device=device)


def _hash_keys(collection: EmbeddingBagCollection) -> list[int]:
    handles = collection.handles().values()
    return [handle.module.index.hash_key(handle.index) for handle in handles]


def test_hash_keys_follow_from_torchs_generator_or_from_a_seed_of_the_kind() -> None:
    def made(drawn: int, **options: Any) -> list[int]:
        torch.manual_seed(drawn)
        return _hash_keys(_dynamic(**options))

    public = [hash_key_of(0, name) for name in ("users", "ads")]
    assert made(1) == made(1)
    assert len({*made(1), *made(2), *public}) == 6
    assert made(1, seed=5) == made(2, seed=5) == [hash_key_of(5, n) for n in ("users", "ads")]
    assert "5" not in repr(Hash(seed=5)), "it may be a secret"
    torch.manual_seed(1)
    on_meta = _dynamic(device="meta")
    torch.manual_seed(2)
    assert _hash_keys(on_meta.to_empty(device="cpu")) == made(1)
    with pytest.raises(ValueError, match="seed must be >= 0"):
        Hash(seed=-1)


def test_tables_of_unequal_seeds_are_those_of_modules_of_their_own() -> None:
    configs = [
        EmbeddingBagConfig(64, 4, name, storage=Hash(seed=seed))
        for name, seed in (("a", 5), ("b", 6), ("c", 5))
    ]
    one = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))
    assert len(one.groups.groups) == 2
    keys = torch.arange(30)
    out = one(KeyedJaggedTensor(["a", "b", "c"], keys, lengths=torch.ones_like(keys)))
    for at, config in enumerate(configs):
        alone = DynamicEmbeddingBags([config.spec()], optim.SGD(0.1), seed=config.storage.seed)
        mine = alone(keys[10 * at : 10 * at + 10], torch.arange(11))
        assert torch.equal(out[config.name], mine)
        assert alone.index.hash_key(0) == _hash_keys(one)[at]


def test_hash_keys_go_with_the_tables() -> None:
    """Into copies, state dicts, collections for inference, and modules of another optimizer."""
    one, other = _dynamic(), _dynamic()
    own = _hash_keys(one)
    assert own != _hash_keys(other)
    assert _hash_keys(copy.deepcopy(one)) == own
    assert _hash_keys(pickle.loads(pickle.dumps(one))) == own
    assert _hash_keys(one.quantized()) == own
    other.load_state_dict(one.state_dict())
    assert _hash_keys(other) == own
    other.set_optimizers(dict.fromkeys(other.handles(), optim.Adam(0.1)))
    assert _hash_keys(other) == own


@pytest.mark.parametrize(
    "storage",
    [
        Dense(),
        Dense(placement=Placement.MANAGED_CACHING),
        Hash(),
        Hash(fallback_rows=5, eviction=Eviction.LFU),
        TensorTrain((2, 2)),
        TensorTrain((2, 2), cache=TTCache(20, every=2)),
    ],
    ids=["dense", "cached", "hash", "fallback", "train", "cached_train"],
)
@pytest.mark.parametrize("change", ["set_optimizers", "share_tables"])
def test_tables_beside_one_that_changes_train_on(storage: Storage, change: str) -> None:
    """As if nothing had happened, with their optimizer states, steps and learning rates."""
    config = EmbeddingBagConfig(30, 4, "a", ["x"], storage=storage)
    other = EmbeddingBagConfig(30, 4, "b", ["x"], optimizer=optim.Adam(0.1))
    bags = EmbeddingBagCollection([config, other], optimizer=optim.Adam(0.1))
    untouched, keys = copy.deepcopy(bags), torch.tensor([3, 14, 15, 3])
    features = KeyedJaggedTensor(["x"], keys, lengths=torch.tensor([3, 1]))
    for step in range(6):
        if step == 3:
            FusedOptimizer.of(bags).param_groups[0]["lr"] = 0.3
            FusedOptimizer.of(untouched).param_groups[0]["lr"] = 0.3
            if change == "set_optimizers":
                bags.set_optimizers({"b": optim.SGD(0.1)})
            else:
                share_tables(nn.ModuleList([bags, EmbeddingBagCollection([other])]))
        outs = [collection(features)["x@a"] for collection in (bags, untouched)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()


@pytest.mark.parametrize("change", ["set_optimizers", "share_tables", "shard"])
def test_periodic_optimizers_count_on_in_new_modules(change: str) -> None:
    """The third step of five is made by a new module; the fifth replaces the weights."""
    ensemble = optim.EnsembleRowwiseAdagrad(0.1, average_every=2, swap_every=5)
    configs = [
        EmbeddingBagConfig(9, 2, "a", ["x"], optimizer=ensemble),
        EmbeddingBagConfig(9, 2, "b", ["x"], optimizer=optim.SGD(0.1)),
    ]
    bags: Any = EmbeddingBagCollection(configs)
    untouched = copy.deepcopy(bags)
    features = KeyedJaggedTensor(["x"], torch.tensor([3, 4]), lengths=torch.tensor([2]))
    for step in range(6):
        if step == 3 and change == "set_optimizers":
            bags.set_optimizers({"b": optim.SGD(0.2)})
        elif step == 3 and change == "share_tables":
            share_tables(nn.ModuleList([bags, EmbeddingBagCollection(configs)]), ["a"])
        elif step == 3:
            bags = ShardedEmbeddingBagCollection(
                bags, dict.fromkeys("ab", row_wise()), RankGroup.single()
            )
        outs = [collection(features)["x@a"] for collection in (bags, untouched)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()


@pytest.mark.parametrize("dims", [(4, 4, 4), (4, 8, 4)])
@pytest.mark.parametrize("kinds", [("plain",) * 3, ("tt", "plain", "dynamic")])
def test_outputs_and_steps(kinds: tuple[str, ...], dims: tuple[int, ...]) -> None:
    configs = sequence_configs(kinds, dims)
    collection = EmbeddingCollection(configs, need_indices=True, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    for order in (keys, ["more", *keys[::-1]]):
        features = batch(order, 3)
        collection(features)
        out = collection(features)
        assert list(out) == keys
        rows = {c.name: dense(collection, c.name).requires_grad_() for c in configs}
        loss = other = torch.zeros(())
        for config in configs:
            for key in config.feature_names:
                ids = features[key].values()
                torch.testing.assert_close(out[key].values(), rows[config.name][ids])
                assert torch.equal(out[key].lengths(), features[key].lengths())
                assert torch.equal(out[key].weights(), ids)
                scale = torch.arange(1, ids.numel() * config.embedding_dim + 1).float()
                scale = scale.view(ids.numel(), -1) / 100
                loss = loss + (out[key].values() * scale).sum()
                other = other + (rows[config.name][ids] * scale).sum()
        loss.backward()
        other.backward()
        for config, kind in zip(configs, kinds, strict=True):
            if kind != "tt":
                table = rows[config.name]
                after = dense(collection, config.name)
                wanted = table.detach() - 0.1 * table.grad
                torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)


def test_dense_gradients_by_table() -> None:
    configs = sequence_configs(("plain", "plain"), (4, 8))
    collection = EmbeddingCollection(configs)
    tables = {c.name: nn.Parameter(dense(collection, c.name)) for c in configs}
    features = batch(features_of(configs), 4)
    out = collection(features)
    sum(jagged.values().square().sum() for jagged in out.values()).backward()
    sum(
        tables[c.name][features[key].values()].square().sum()
        for c in configs
        for key in c.feature_names
    ).backward()
    for name, parameter in collection.named_parameters():
        table = tables[name.split(".")[1]]
        torch.testing.assert_close(parameter.grad[: table.shape[0]], table.grad)
        assert not parameter.grad[table.shape[0] :].any()


def test_variable_batches_keep_their_bags() -> None:
    configs = sequence_configs(("plain", "tt"), (4, 4))
    collection = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    keys = features_of(configs)
    lengths = torch.tensor([2, 0, 1, 1, 3, 0, 2])
    ids = torch.arange(9)
    features = KeyedJaggedTensor(
        keys, ids, None, lengths, stride_per_key_per_rank=[[2], [1], [3], [1]]
    )
    out = collection(features)
    assert [out[key].lengths().tolist() for key in keys] == [[2, 0], [1], [1, 3, 0], [2]]
    assert torch.equal(out["f0"].values().detach(), dense(collection, "t0")[:2])
    torch.testing.assert_close(out["g1"].values().detach(), dense(collection, "t1")[7:9])


def test_a_feature_of_two_tables() -> None:
    configs = [EmbeddingConfig(30, 4, "a", ["f"]), EmbeddingConfig(30, 4, "b", ["f", "g"])]
    collection = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    features = batch(["g", "f"], 3)
    out = collection(features)
    assert list(out) == ["f@a", "f@b", "g"]
    for key, table in (("f@a", "a"), ("f@b", "b")):
        rows = dense(collection, table)[features["f"].values()]
        assert torch.equal(out[key].values().detach(), rows)
    assert out["g"].weights_or_none() is None


def test_state_dict_and_questions() -> None:
    configs = sequence_configs(("plain", "tt"), (4, 4))
    one = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    state = one.state_dict()
    assert list(state) == [
        "embeddings.t0.weight",
        "embeddings.t1.tt_layout",
        *(f"embeddings.t1.cores.{k}" for k in range(3)),
    ]
    two = EmbeddingCollection(configs, optimizer=optim.SGD(0.1))
    two.load_state_dict(state)
    features = batch(features_of(configs), 3)
    for key, jagged in one(features).items():
        assert torch.equal(jagged.values(), two(features)[key].values())
    assert two.embedding_configs() == configs
    assert not two.need_indices()
    assert configs[0].storage == Dense()
    with pytest.raises(KeyError, match=r"missing are \['f0', 'g0'\]"):
        two(batch(["f1", "g1"], 2))


def test_tables_are_not_replaced_or_removed() -> None:
    """Lookups would not notice, and the state dict would have other rows, or none."""
    collection = EmbeddingBagCollection(
        [EmbeddingBagConfig(9, 4, "a"), EmbeddingBagConfig(9, 4, "b")]
    )
    other, tables = nn.EmbeddingBag(9, 4), collection.embedding_bags
    changes: list[Callable[[], Any]] = [
        lambda: tables.__setitem__("a", other),
        lambda: setattr(tables, "a", other),
        lambda: setattr(tables, "c", other),
        lambda: tables.update({"c": other}),
        lambda: tables.pop("a"),
        lambda: delattr(tables, "a"),
        tables.clear,
    ]
    for copied in (collection, copy.deepcopy(collection), pickle.loads(pickle.dumps(collection))):
        tables = copied.embedding_bags
        for change in changes:
            with pytest.raises(RuntimeError, match="cannot be replaced, removed or added"):
                change()
        assert list(copied.state_dict()) == ["embedding_bags.a.weight", "embedding_bags.b.weight"]


def test_a_collection_without_tables_takes_features_of_different_batch_sizes() -> None:
    ids, lengths = torch.tensor([1, 2, 3]), torch.tensor([1, 1, 1])
    strides = [[1], [2]]
    batch = KeyedJaggedTensor(["a", "b"], ids, lengths=lengths, stride_per_key_per_rank=strides)
    assert EmbeddingBagCollection([])(batch).values().shape == (2, 0)
