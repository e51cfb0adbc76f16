"""`TableGroups`: the same as every table alone, in few modules, and first values by element."""

import copy
import pickle
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from emblib import (
    CacheConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    KeyedJaggedTensor,
    Placement,
    Pooling,
    Precision,
    StochasticRounding,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    optim,
)
from emblib.collections import TableConfig, TableGroups
from emblib.init import ByRows
from emblib.sharding.planner import Planner, Topology
from emblib.storage import (
    Dense,
    Hash,
    Hashed,
    Quantized,
    QuotientRemainder,
    Storage,
    TableSlice,
    TensorTrain,
)
from tests.collections.cases import IDS, OPTIMIZERS, bag_configs, sequence_configs

MIXES = [("plain",), ("tt",), ("dynamic",), ("plain", "plain"), ("plain", "tt", "dynamic", "plain")]


def _slices_of_units(configs: Sequence[TableConfig]) -> list[int]:
    return [t for t, config in enumerate(configs) for _ in config.feature_names]


def _groups(configs: Sequence[TableConfig], optimizer: object, **options: object) -> TableGroups:
    slices = [TableSlice.whole(config) for config in configs]
    seeds = {config.name: t for t, config in enumerate(configs)}
    pooling = Pooling.SUM if configs[0].pooled else Pooling.NONE
    given = {"pooling": pooling, "seeds": seeds, **options}
    return TableGroups(slices, _slices_of_units(configs), optimizer=optimizer, **given)


def _batch(units: int, size: int) -> tuple[Tensor, Tensor]:
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 4, (units * size,))])
    offsets = offsets.cumsum(0)
    return torch.randint(IDS, (int(offsets[-1]),)), offsets


def _unit(ids: Tensor, offsets: Tensor, place: int, size: int) -> tuple[Tensor, Tensor]:
    own = offsets[place * size : (place + 1) * size + 1]
    return ids[own[0] : own[-1]], own - own[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kinds", MIXES)
def test_equals_every_table_alone(kinds: tuple[str, ...], optimizer: str) -> None:
    """Bit for bit, outputs and updates; a table is one place whatever else there is."""
    configs, update = bag_configs(kinds), OPTIMIZERS[optimizer]
    groups = _groups(configs, update)
    alone = [_groups([config], update, seeds={config.name: t}) for t, config in enumerate(configs)]
    slice_of_unit, size = _slices_of_units(configs), 3
    for _ in range(3):
        ids, offsets = _batch(len(slice_of_unit), size)
        out = groups(ids, offsets)
        assert out.shape == (size, groups.output_dim)
        (out * torch.arange(1, out.shape[1] + 1)).sum().backward()
        for t, single in enumerate(alone):
            mine = [u for u in range(len(slice_of_unit)) if slice_of_unit[u] == t]
            parts = [_unit(ids, offsets, groups.order.index(u), size) for u in mine]
            lengths = torch.cat([o.diff() for _, o in parts]).cumsum(0)
            own = torch.cat([torch.zeros(1, dtype=torch.int64), lengths])
            part = single(torch.cat([i for i, _ in parts]), own)
            columns = [groups.column_of[u] + c for u in mine for c in range(groups.dims[u])]
            at = torch.tensor(columns)
            assert torch.equal(part, out.detach()[:, at])
            (part * (at + 1)).sum().backward()
            for name, parameter in groups.parameters_of(t).items():
                other = single.parameters_of(0)[name]
                if update is None:
                    assert torch.equal(parameter.grad, other.grad)
                    parameter.grad = other.grad = None
                else:
                    assert parameter.grad is None
                    assert parameter.requires_grad
            for name, view in groups.views(t).items():
                assert torch.equal(view, single.views(0)[name]), name


def test_one_kernel_for_tables_that_agree() -> None:
    configs = bag_configs(("plain",) * 5)
    groups = _groups(configs, optim.SGD(0.1))
    assert len(groups.groups) == 1
    assert groups.has_one_module
    assert groups.order == list(range(9))
    half = EmbeddingBagConfig(10, 4, "h", data_type=torch.float16)
    other = EmbeddingBagConfig(10, 4, "o", optimizer=optim.Adam(0.1))
    mixed = _groups([configs[0], half, other, configs[1], EmbeddingBagConfig(9, 4, "l")], None)
    assert [info.units for info in mixed.groups] == [(0, 1, 4, 5), (2,), (3,)]
    assert mixed.order == [0, 1, 4, 5, 2, 3]


@pytest.mark.parametrize("kinds", [("plain", "plain"), ("plain", "tt", "dynamic")])
def test_variable_batches(kinds: tuple[str, ...]) -> None:
    """Rank after rank, for each unit after unit: the rows a batch of one rank alone has."""
    configs = bag_configs(kinds)
    groups = _groups(configs, optim.SGD(0.1)).eval()
    units = len(groups.slice_of_unit)
    sizes = [[u % 3, (u + 1) % 3] for u in range(units)]
    bags = sum(map(sum, sizes))
    ids, offsets = _batch(bags, 1)
    out = groups(ids, offsets, batch_sizes=sizes)
    blocks = []
    first = 0
    for row in sizes:
        for size in row:
            blocks.append(offsets[first : first + size + 1])
            first += size
    pieces = []
    for rank in range(2):
        for place, unit in enumerate(groups.order):
            for begin, end in pairwise(blocks[place * 2 + rank].tolist()):
                one = torch.zeros(units + 1, dtype=torch.int64)
                one[place + 1 :] = end - begin
                column = groups.column_of[unit]
                columns = slice(column, column + groups.dims[unit])
                pieces.append(groups(ids[begin:end], one)[0, columns])
    assert torch.equal(out, torch.cat(pieces))


def test_id_counts_save_a_look_at_the_offsets() -> None:
    groups = _groups(bag_configs(("plain", "tt", "dynamic")), optim.SGD(0.1))
    ids, offsets = _batch(len(groups.slice_of_unit), 2)
    ends = [0]
    for info in groups.active:
        ends.append(ends[-1] + 2 * len(info.units))
    counts = [int(offsets[b] - offsets[a]) for a, b in pairwise(ends)]
    told = groups(ids, offsets, id_counts=counts)
    assert torch.equal(told, groups(ids, offsets))


def test_vectors_of_one_dim_come_in_the_order_of_ids_and_of_several_in_one_vector() -> None:
    for dims in ((4, 4, 4), (4, 8, 4)):
        groups = _groups(sequence_configs(("plain", "tt", "plain"), dims), optim.SGD(0.1))
        ids, offsets = _batch(6, 2)
        out = groups(ids, offsets)
        parts = []
        for place, unit in enumerate(groups.order):
            own, _ = _unit(ids, offsets, place, 2)
            config = groups.slices[groups.slice_of_unit[unit]].config
            alone = _groups(
                [config], optim.SGD(0.1), seeds={config.name: groups.slice_of_unit[unit]}
            )
            both = torch.tensor([0, own.numel(), own.numel()])
            parts.append(alone(own, both).view(-1))
        assert torch.equal(out.view(-1), torch.cat(parts))
        assert out.dim() == (2 if len(set(dims)) == 1 else 1)


def test_nothing_here() -> None:
    groups = TableGroups([], [], pooling=Pooling.SUM)
    out = groups(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))
    assert out.shape == (0, 0)
    unread = TableGroups([TableSlice.whole(EmbeddingBagConfig(9, 4, "t"))], [], pooling=Pooling.SUM)
    assert unread(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).shape == (
        0,
        0,
    )
    assert unread.views(0)["weight"].shape == (9, 4)
    with pytest.raises(ValueError, match=r"slice_of_unit\[0\] must be in"):
        TableGroups([], [0], pooling=Pooling.SUM)


CUTS = [((0, 50), (50, 131)), ((0, 131),), ((0, 1), (1, 130), (130, 131))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", CUTS)
def test_first_values_do_not_depend_on_the_cut(
    rows: tuple, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emblib.storage.initial_values._BLOCK_ELEMENTS", 40 * 8)
    by_rows = ByRows(lambda block, rows: block.normal_().add_(rows.start))
    for options in (
        {},
        {"init_fn": torch.nn.init.normal_},
        {"init_fn": by_rows},
        {"weight_init_min": 0.0},
    ):
        config = EmbeddingBagConfig(131, 8, "t", data_type=dtype, **options)
        whole = TableGroups([TableSlice.whole(config)], [], pooling=Pooling.SUM, seeds={"t": 7})
        table = whole.views(0)["weight"]
        assert float(table.float().std()) > 0.01
        parts = [TableSlice(config, r, c) for r in rows for c in ((0, 3), (3, 8))]
        cut = TableGroups(parts, [], pooling=Pooling.SUM, seeds={"t": 7})
        for i, part in enumerate(parts):
            assert torch.equal(cut.views(i)["weight"], part.view_of(table))
    low, high = config.bounds
    assert low == 0.0
    assert float(table.min()) >= low
    assert float(table.max()) <= high


@pytest.mark.parametrize("columns", [(0, 8), (2, 8)], ids=str)
def test_a_slice_fills_the_blocks_of_its_rows_only(
    columns: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emblib.storage.initial_values._BLOCK_ELEMENTS", 40 * 8)
    blocks = []

    def fill(block: torch.Tensor, rows: range) -> None:
        assert block.shape == (len(rows), 8)
        blocks.append(rows)
        block.copy_(torch.arange(rows.start, rows.stop)[:, None] * 10 + torch.arange(8))

    config = EmbeddingBagConfig(131, 8, "t", init_fn=ByRows(fill))
    part = TableSlice(config, (45, 85), columns)
    groups = TableGroups([part], [], pooling=Pooling.SUM)
    assert blocks == [range(40, 80), range(80, 120)]
    assert groups.views(0)["weight"].tolist() == [
        [10.0 * row + column for column in range(*columns)] for row in range(45, 85)
    ]
    with pytest.raises(TypeError, match="function of ByRows must be a function of a block"):
        ByRows(3)
    whole = torch.empty(131, 8)
    config.init_fn(whole)
    assert torch.equal(whole[45:85, slice(*columns)], groups.views(0)["weight"])


def test_first_values_of_tensor_trains_do_not_depend_on_the_cut() -> None:
    kind = TensorTrain((2, 2), row_factors=(6, 4, 5), dim_factors=(2, 2, 2))
    config = EmbeddingBagConfig(115, 8, "t", storage=kind)
    whole = TableGroups([TableSlice.whole(config)], [], pooling=Pooling.SUM, seeds={"t": 3})
    dense = whole.module_of(0)[0].to_dense(0)
    for rows in ((0, 60), (60, 115)):
        for columns in ((0, 4), (4, 8)):
            part = TableSlice(config, rows, columns)
            cut = TableGroups([part], [], pooling=Pooling.SUM, seeds={"t": 3})
            assert torch.allclose(cut.module_of(0)[0].to_dense(0), part.view_of(dense), atol=1e-7)
    assert float(dense.std()) == pytest.approx((3 * 115) ** -0.5, rel=0.3)


def test_permuted_trains_are_not_cut_by_rows() -> None:
    kind = TensorTrain((2, 2), (6, 4, 5), (2, 2, 2), ids="permuted", seed=4)
    config = EmbeddingBagConfig(120, 8, "t", storage=kind)
    assert config.spec().permutation != (1, 0)
    with pytest.raises(ValueError, match="must be multiples of 120"):
        TableSlice(config, (0, 60), (0, 8))
    whole = TableGroups([TableSlice.whole(config)], [0], pooling=Pooling.SUM, seeds={"t": 3})
    cut = TableGroups(
        [TableSlice(config, (0, 120), (4, 8))], [0], pooling=Pooling.SUM, seeds={"t": 3}
    )
    ids, offsets = torch.tensor([0, 5, 119, 60]), torch.arange(5)
    assert torch.allclose(whole(ids, offsets)[:, 4:], cut(ids, offsets), atol=1e-7)


@pytest.mark.parametrize("optimizer", ["none", "adam"])
def test_copies_and_moves_keep_views(optimizer: str) -> None:
    configs = bag_configs(("plain", "tt", "dynamic", "plain"))
    groups = _groups(configs, OPTIMIZERS[optimizer])
    ids, offsets = _batch(len(groups.slice_of_unit), 2)
    groups(ids, offsets).sum().backward()
    moved = copy.deepcopy(groups).to("cpu").double()
    for other in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups)), moved):
        for t in range(len(configs)):
            for name, view in groups.views(t).items():
                if configs[t].name == "t2":
                    continue  # by slot: only what the index names means anything
                own = other.views(t)[name]
                assert torch.equal(own, view)
                assert own.data_ptr() != view.data_ptr()
            for name, parameter in other.parameters_of(t).items():
                assert parameter.data_ptr() == other.views(t)[name].data_ptr()
        before = groups.eval()(ids, offsets)
        assert torch.equal(other.eval()(ids, offsets), before)
        groups.train()
        other.train()(ids, offsets).sum().backward()
        assert torch.equal(groups.eval()(ids, offsets), before)
        groups.train()


def test_meta() -> None:
    configs = bag_configs(("plain", "tt", "dynamic"))
    groups = _groups(configs, optim.Adam(0.1), device="meta")
    assert all(p.is_meta for t in range(3) for p in groups.parameters_of(t).values())
    groups.to_empty(device="cpu")
    groups.reset_parameters({f"t{i}": i for i in range(3)})
    ready = _groups(configs, optim.Adam(0.1))
    ids, offsets = _batch(len(groups.slice_of_unit), 2)
    for _ in range(2):
        out, other = groups(ids, offsets), ready(ids, offsets)
        assert torch.equal(out, other)
        out.sum().backward()
        other.sum().backward()
    assert groups.device == torch.device("cpu")


def test_output_dtype() -> None:
    groups = _groups(bag_configs(("plain", "tt", "dynamic")), optim.SGD(0.1)).eval()
    ids, offsets = _batch(len(groups.slice_of_unit), 2)
    wide = groups(ids, offsets)
    groups.set_output_dtype(torch.bfloat16)
    assert groups(ids, offsets).dtype is torch.bfloat16
    assert torch.equal(groups(ids, offsets), wide.bfloat16())
    with pytest.raises(ValueError, match="output_dtype must be"):
        groups.set_output_dtype(torch.int8)


def test_kernels_are_no_modules_of_it() -> None:
    """What is saved and listed is up to who has the tables; moving and modes reach the modules."""
    groups = _groups(bag_configs(("plain", "tt", "dynamic")), optim.SGD(0.1))
    assert list(groups.modules()) == [groups]
    assert groups.state_dict() == {}
    assert not list(groups.parameters())
    groups.eval()
    assert not any(info.module.training for info in groups.groups)
    assert "DenseModule" in repr(groups)
    assert groups.nbytes()["weights"] > 0


@pytest.mark.parametrize("more", [[], ["dynamic", "tt"]])
def test_prefetched_batches_are_looked_up_from_the_cache(more: list[str]) -> None:
    """With other groups next to the cached one as well, and any number of batches ahead."""
    far = Dense(Placement.MANAGED_CACHING, CacheConfig(sets=2))
    configs = [EmbeddingBagConfig(900, 4, f"c{i}", storage=far) for i in range(2)]
    configs += bag_configs(more)
    one, two = (_groups(configs, optim.SGD(0.5)) for _ in range(2))
    batches = [_batch(len(one.slice_of_unit), 3) for _ in range(4)]
    for ids, offsets in batches[:2]:
        one.prefetch(ids, offsets)
    (cached,) = (info.module for info in one.groups if hasattr(info.module, "row_cache"))
    for i, (ids, offsets) in enumerate(batches):
        before = cached.cache_stats().lookups
        out = one(ids, offsets)
        assert (cached.cache_stats().lookups == before) == (i < 2)
        assert torch.equal(out, two(ids, offsets))
        out.sum().backward()
        two(ids, offsets).sum().backward()
    for t in range(2):
        assert torch.equal(one.views(t)["weight"], two.views(t)["weight"])


def test_a_prefetched_batch_is_known_by_ids_and_offsets() -> None:
    """Equal tensors are taken as the batch, but the same ids in other bags are another batch."""
    storage = Dense(Placement.MANAGED_CACHING, CacheConfig(sets=2))
    configs = [EmbeddingBagConfig(900, 4, "c", storage=storage), *bag_configs(["tt"])]
    one, two = (_groups(configs, optim.SGD(0.5)) for _ in range(2))
    ids, offsets = _batch(len(one.slice_of_unit), 3)
    others = torch.full_like(offsets, int(offsets[-1]))
    others[0] = 0
    one.prefetch(ids, offsets)
    with torch.no_grad():
        assert torch.equal(one(ids, others), two(ids, others))
    with pytest.raises(RuntimeError, match="order"):
        one(ids, others)
    assert torch.equal(one(ids.clone(), offsets.clone()), two(ids, offsets))
    assert not one._prefetched
    for _ in range(3):
        one.prefetch(ids, offsets)
        one(ids.clone(), offsets.clone())
    assert not one._prefetched


def test_sparse_gradients_are_by_table() -> None:
    configs = [EmbeddingConfig(30, 4, "a", ["f", "g"]), EmbeddingConfig(40, 4, "b")]
    sparse = _groups(configs, optim.External())
    full = _groups(configs, None)
    ids, offsets = _batch(3, 2)
    for groups in (sparse, full):
        groups(ids, offsets).square().sum().backward()
    for t in range(2):
        grad = sparse.parameters_of(t)["weight"].grad
        assert grad.is_sparse
        assert grad.shape == (configs[t].num_embeddings, 4)
        assert torch.equal(grad.to_dense(), full.parameters_of(t)["weight"].grad)


ROUNDED = {
    "dense": Dense(),
    "train": TensorTrain((2, 2)),
    "hashed": Hashed(20),
    "parts": QuotientRemainder(5),
    "keyed": Hash(),
}


def _small_updates(storage: Storage, rounding: StochasticRounding | None) -> list[Tensor]:
    """Return how much 200 updates far below half a unit in the last place move the parameters."""
    config = EmbeddingBagConfig(
        64, 8, "t", storage=storage, data_type=torch.bfloat16, rounding=rounding
    )
    groups = _groups([config], optim.SGD(lr=1e-5))
    ids, offsets = torch.arange(32), torch.arange(33)
    groups.train()
    groups(ids, offsets)  # keys get their rows
    before = [p.detach().float().clone() for p in groups.parameters_of(0).values()]
    for _ in range(200):
        groups(ids, offsets).sum().backward()
    return [
        p.detach().float() - b
        for p, b in zip(groups.parameters_of(0).values(), before, strict=True)
    ]


@pytest.mark.parametrize("kind", ROUNDED)
def test_updates_of_16_bit_rows_are_rounded_as_the_configuration_says(kind: str) -> None:
    nearest = _small_updates(ROUNDED[kind], None)
    at_random = _small_updates(ROUNDED[kind], StochasticRounding(3))
    again = _small_updates(ROUNDED[kind], StochasticRounding(3))
    assert all(torch.equal(a, b) for a, b in zip(at_random, again, strict=True))
    if kind in ("dense", "hashed", "keyed"):  # a gradient of 1 per lookup: 200 updates of -1e-5
        per_row = -0.002 * (32 / 20 if kind == "hashed" else 1)
        moved = at_random[0][at_random[0].ne(0).any(1)]
        assert float(moved.mean()) == pytest.approx(per_row, rel=0.25)
    assert sum(int(d.ne(0).sum()) for d in at_random) > 2 * sum(int(d.ne(0).sum()) for d in nearest)


def test_a_table_rounds_like_a_module_of_its_own() -> None:
    precision = Precision(weights=torch.bfloat16, stochastic_rounding=StochasticRounding(5))
    bags = TableBatchedEmbeddingBags([TableSpec(50, 8)], optim.SGD(lr=0.01), precision=precision)
    config = EmbeddingBagConfig(
        50, 8, "t", data_type=torch.bfloat16, rounding=StochasticRounding(5)
    )
    groups = _groups([config], optim.SGD(lr=0.01))
    bags.table_weights()[0].copy_(groups.views(0)["weight"])
    for _ in range(5):
        ids, offsets = torch.randint(50, (40,)), torch.arange(0, 41, 4)
        bags(ids, offsets).square().sum().backward()
        groups(ids, offsets).square().sum().backward()
    assert torch.equal(bags.table_weights()[0], groups.views(0)["weight"])


def test_tables_of_other_roundings_have_other_kernels() -> None:
    roundings = (None, StochasticRounding(1), StochasticRounding(1), StochasticRounding(2))
    configs = [
        EmbeddingBagConfig(9, 8, f"t{i}", data_type=torch.float16, rounding=rounding)
        for i, rounding in enumerate(roundings)
    ]
    assert len(_groups(configs, optim.SGD(lr=0.1)).groups) == 3


def test_a_train_that_is_rounded_at_random_is_not_cut() -> None:
    config = EmbeddingBagConfig(
        64,
        8,
        "t",
        data_type=torch.bfloat16,
        rounding=StochasticRounding(),
        storage=TensorTrain((2, 2)),
    )
    unit = replace(config, rounding=None).storage.cut_units(replace(config, rounding=None)).rows
    with pytest.raises(ValueError, match="cannot be cut: place it whole"):
        TableSlice(config, (0, unit), (0, 8))
    model = EmbeddingBagCollection([config], optimizer=optim.SGD(lr=0.1), device="meta")
    plan = Planner(Topology(2), batch_size=8).plan(model)
    assert len(plan[""]["t"].shards) == 1


def test_rounding_without_an_optimizer_is_refused() -> None:
    config = EmbeddingBagConfig(9, 8, "t", data_type=torch.bfloat16, rounding=StochasticRounding(1))
    with pytest.raises(ValueError, match="leaves gradients to others"):
        EmbeddingBagCollection([config])


@pytest.mark.parametrize(
    "storage",
    [Dense(), Hash(), TensorTrain((4, 4)), TensorTrain((4, 4), cache=TTCache(20, every=1_000))],
    ids=["dense", "hash", "train", "train with a cache"],
)
@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), None], ids=["fused", "gradients"])
def test_tables_that_were_frozen_on_meta_stay_frozen(
    storage: Storage, optimizer: optim.Optimizer | None
) -> None:
    """`to_empty` makes new modules for hash tables and caches, which cannot be on meta."""
    configs = [EmbeddingBagConfig(IDS, 16, name, [name], storage=storage) for name in ("x", "y")]
    bags = EmbeddingBagCollection(configs, optimizer=optimizer, device="meta")
    bags.embedding_bags["x"].requires_grad_(False)
    bags.to_empty(device="cpu")
    trained = {name: p.requires_grad for name, p in bags.named_parameters()}
    assert {name.split(".")[1]: value for name, value in trained.items()} == {"x": False, "y": True}
    if optimizer is not None:
        assert [h.is_trained(n) for h in bags.groups.handles for n, _ in h.named_parameters()] == [
            *trained.values()
        ]


@pytest.mark.parametrize("storage", [Hash(), TensorTrain((4, 4), cache=TTCache(20))], ids=str)
def test_a_lookup_in_a_placeholder_says_how_to_get_off_meta(storage: Storage) -> None:
    configs = [EmbeddingBagConfig(IDS, 16, "x", ["x"], storage=storage)]
    bags = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1), device="meta")
    with pytest.raises(RuntimeError, match=r"to_empty\(device=\.\.\.\)"):
        bags(KeyedJaggedTensor(["x"], torch.tensor([1]), lengths=torch.tensor([1])))


@pytest.mark.parametrize(
    "storage", [Dense(), Hash(), TensorTrain((4, 4)), Quantized()], ids=lambda s: s.plan_name
)
@pytest.mark.filterwarnings("error")
def test_a_load_into_tables_on_meta_raises(storage: Storage) -> None:
    configs = [EmbeddingBagConfig(IDS, 16, "x", ["x"], storage=storage)]
    state = EmbeddingBagCollection(configs).state_dict()
    bags = EmbeddingBagCollection(configs, device="meta")
    with pytest.raises(RuntimeError, match=r"call to_empty\(device=") as caught:
        bags.load_state_dict(state)
    assert "Missing key" not in str(caught.value)
