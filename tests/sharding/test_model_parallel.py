"""A model over ranks is the model: values, names, first values, and how its parts are trained."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from emblib import TableBatchedEmbeddingBags, TableSpec, TTEmbeddingBag, TTSpec, optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.collections.feature_processors import PositionWeightedProcessor
from emblib.collections.optimizers import FusedOptimizer
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DDP, DistributedModelParallel, FullyShard
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import data_parallel, row_wise, table_wise
from tests.sharding import worlds
from tests.sharding.pipeline_cases import (
    DENSE,
    DIM,
    NETS,
    ROWS,
    Batch,
    Case,
    Net,
    make_batch,
    plain_loop,
    rules,
    values_of,
)

SIZE, STEPS = 3, 4


def joined(batches: list[Batch]) -> Batch:
    """The examples of all ranks, as one batch."""

    def one(get: Callable[[Batch], KeyedJaggedTensor]) -> KeyedJaggedTensor:
        by_rank = [get(batch) for batch in batches]
        keys = by_rank[0].keys()
        parts = [kjt[key] for key in keys for kjt in by_rank]
        return KeyedJaggedTensor(
            list(keys),
            torch.cat([part.values() for part in parts]),
            lengths=torch.cat([part.lengths() for part in parts]),
        )

    return Batch(
        torch.cat([batch.dense for batch in batches]),
        one(lambda batch: batch.bags),
        {"clicks": one(lambda batch: batch.more["clicks"])},
        torch.cat([batch.labels for batch in batches]),
    )


def _whole(size: int, net: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The unsharded model on the batches of all ranks."""
    torch.manual_seed(5)
    model = NETS[net]()
    batches = [joined([make_batch(10 * r + i, SIZE) for r in range(size)]) for i in range(STEPS)]
    losses = list(plain_loop(model, batches, STEPS))
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, values


def _sharded(ranks: RankGroup, case: Case) -> tuple[list[Tensor], dict[Any, Tensor]]:
    model = case.model(ranks)
    batches = [make_batch(10 * ranks.rank + i, SIZE) for i in range(STEPS)]
    losses = list(plain_loop(model, batches, STEPS))
    return losses, values_of(model)


def assembled(by_rank: list[dict[Any, Tensor]]) -> dict[str, Tensor]:
    """Whole tables of the parts of all ranks, by the names of parameters of the model."""
    whole: dict[str, Tensor] = {}
    for values in by_rank:
        for place, value in values.items():
            if isinstance(place, str):
                assert torch.equal(whole.setdefault(place, value), value), place  # on all ranks
            elif place[-1] == "weight":
                path, table, shard, _ = place
                kind = "embeddings" if path == "clicks" else "embedding_bags"
                unset = torch.full((ROWS, DIM), 7.0)
                target = whole.setdefault(f"{path}.{kind}.{table}.weight", unset)
                target[slice(*shard.rows), slice(*shard.columns)] = value
    return whole


@pytest.mark.parametrize(
    "case",
    [
        Case((0,)),
        Case((0,) * 2),
        Case((0,) * 4),
        Case((0,) * 2, wrap="fully_shard"),
        Case((0,) * 3, plan="copies"),
        Case((0,) * 2, net="weighted"),
        Case((0,) * 3, net="weighted", plan="copies"),
        Case((0,) * 2, net="unfused"),
        Case((0,) * 3, net="unfused", plan="copies"),
    ],
    ids=lambda case: f"{len(case.counts)} ranks, {case.net}, {case.plan}, {case.wrap}",
)
def test_it_trains_as_the_whole_model(case: Case) -> None:
    size = len(case.counts)
    losses, expected = _whole(size, case.net)
    found = worlds.run(size, _sharded, case)
    mean = [torch.stack(of_step).mean() for of_step in zip(*(ls for ls, _ in found), strict=True)]
    torch.testing.assert_close(mean, losses)
    values = assembled([values for _, values in found])
    assert values.keys() == expected.keys()
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], msg=lambda text, n=name: f"{n}: {text}")


# Compiled


def _compiled(ranks: RankGroup, case: Case) -> tuple[list[Tensor], list[Tensor], bool]:
    """Losses of a model and of the same one compiled, and whether their values are the same."""
    batches = [make_batch(10 * ranks.rank + i, SIZE) for i in range(STEPS)]
    model, again = case.model(ranks), case.model(ranks)
    losses = list(plain_loop(model, batches, STEPS))
    found = list(plain_loop(torch.compile(again, backend="eager"), batches, STEPS))
    values, same = values_of(model), values_of(again)
    return losses, found, all(torch.equal(values[key], same[key]) for key in values)


def test_compiling_it_breaks_the_graph_at_its_tables() -> None:
    for losses, found, same in worlds.run(2, _compiled, Case((0,) * 2)):
        assert torch.equal(torch.stack(losses), torch.stack(found))
        assert same


# Names


def _names(ranks: RankGroup, wrap: str) -> tuple[list[str], list[str], bool]:
    model = Case((0,) * ranks.size, wrap=wrap).model(ranks)
    return (
        sorted(model.state_dict()),
        sorted(name for name, _ in model.named_parameters() if name.startswith(("bottom", "top"))),
        isinstance(model.module, Net),
    )


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard", "none"])
def test_names_are_those_of_the_model(wrap: str) -> None:
    net = Net()
    dense = sorted(n for n, _ in net.named_parameters() if n.startswith(("bottom", "top")))
    for found in worlds.run(2, _names, wrap):
        assert found == (sorted(net.state_dict()), dense, True)


def _loaded(ranks: RankGroup, state: dict[str, Tensor]) -> dict[Any, Tensor]:
    model = Case((0,) * ranks.size).model(ranks)
    model.load_state_dict(state)
    return values_of(model)


def test_it_takes_the_state_dict_of_the_model() -> None:
    torch.manual_seed(8)
    state = Net().state_dict()
    values = assembled(worlds.run(2, _loaded, state))
    torch.testing.assert_close(values, state, rtol=0, atol=0)


# First values


class Odd(nn.Module):
    """Different on every rank before it is spread."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection(
            [EmbeddingBagConfig(10, 4, "t")], device=device, optimizer=optim.SGD(lr=0.1)
        )
        self.dense = nn.Linear(4, 2, device=device)
        self.places = PositionWeightedProcessor({"t": 3}, device)
        self.norm = nn.BatchNorm1d(2, device=device)

    def forward(self, batch: KeyedJaggedTensor) -> Tensor:
        """Something of all parts."""
        return self.norm(self.dense(self.sparse(batch).values())).sum()


def _first_values(ranks: RankGroup, device: str) -> tuple[dict[str, Tensor], bool]:
    torch.manual_seed(ranks.rank)
    if device != "meta":
        model = Odd(device)
        with torch.no_grad():
            model.norm.running_mean.fill_(ranks.rank + 3)
    else:
        model = Odd(device)
    plan = {"sparse": {"t": data_parallel()}}
    model = DistributedModelParallel(model, ranks, plan=plan)
    table = model.module.sparse.local_shards()[0]
    bare = model.module
    found = {"table": table.groups.views(table.index)["weight"].clone()}
    found |= {n: p.detach().clone() for n, p in bare.dense.named_parameters()}
    found |= {n: p.detach().clone() for n, p in bare.places.named_parameters()}
    found |= {n: p.detach().clone() for n, p in bare.norm.named_buffers()}
    return found, any(tensor.is_meta for tensor in (*bare.parameters(), *bare.buffers()))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_ranks_begin_with_the_values_of_the_first(device: str) -> None:
    (first, _), *others = worlds.run(3, _first_values, device)
    assert (first["running_mean"] == (3 if device == "cpu" else 0)).all()
    assert first["table"].abs().max() > 0
    for found, any_meta in others:
        assert not any_meta
        for name, value in found.items():
            assert torch.equal(value, first[name]), name


class Unready(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, device="meta"))


def test_a_meta_module_that_cannot_be_made_is_told() -> None:
    model = nn.ModuleDict({"odd": Odd(), "unready": Unready()})
    with pytest.raises(RuntimeError, match=r"unready \(Unready\) is on the meta device and has no"):
        DistributedModelParallel(
            model, RankGroup.single(), plan={"odd.sparse": {"t": table_wise(0)}}
        )


# The dense part


class Sparse(nn.Module):
    """Nothing but tables."""

    def __init__(self, optimizer: optim.Optimizer | None) -> None:
        super().__init__()
        self.sparse = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t")], optimizer=optimizer)


def _wrapper(ranks: RankGroup, wrap: Any, *, dense: bool) -> type:
    model: nn.Module = Odd() if dense else Sparse(optim.SGD(lr=0.1))
    made = DistributedModelParallel(model, ranks, plan={"sparse": {"t": row_wise()}}, wrap=wrap)
    return type(made._wrapped)


def _dense_wrapper(ranks: RankGroup, wrap: Any) -> type:
    return _wrapper(ranks, wrap, dense=True)


def _sparse_wrapper(ranks: RankGroup, wrap: Any) -> type:
    return _wrapper(ranks, wrap, dense=False)


def test_what_wraps_the_dense_part() -> None:
    assert worlds.run(2, _dense_wrapper, DDP({"bucket_cap_mb": 1})) == [DistributedDataParallel] * 2
    assert worlds.run(2, _dense_wrapper, None) == [Odd] * 2
    assert worlds.run(1, _dense_wrapper, "ddp") == [Odd]  # no rank to share gradients with
    assert worlds.run(2, _sparse_wrapper, "ddp") == [Sparse] * 2  # nothing dense


def _blocks(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Net)
    return [model.bottom, model.top]


def _in_blocks(ranks: RankGroup) -> list[str]:
    torch.manual_seed(5)
    wrap = FullyShard(_blocks, {"reshard_after_forward": True})
    model = DistributedModelParallel(Net(), ranks, plan=rules(2), wrap=wrap)
    list(plain_loop(model, [make_batch(1, SIZE)], 1))
    with pytest.raises(RuntimeError, match="sharded with fully_shard, so this rank cannot copy it"):
        model.copy("cpu")
    return [type(part).__name__ for part in (model.module, model.module.bottom, model.module.bags)]


def test_fully_shard_in_blocks() -> None:
    assert (
        worlds.run(2, _in_blocks)
        == [["FSDPNet", "FSDPLinear", "ShardedEmbeddingBagCollection"]] * 2
    )


def _wrapped_later(ranks: RankGroup) -> bool:
    torch.manual_seed(5)
    model = DistributedModelParallel(Net(), ranks, plan=rules(2), wrap="none")
    model.wrap_dense("ddp")
    list(plain_loop(model, [make_batch(ranks.rank, SIZE)], 1))
    with pytest.raises(RuntimeError, match="wrapped already"):
        model.wrap_dense("fully_shard")
    model.copy("cpu").wrap_dense("none")  # whose dense part is not wrapped
    return isinstance(model._wrapped, DistributedDataParallel)


def test_the_dense_part_may_be_wrapped_later() -> None:
    assert worlds.run(2, _wrapped_later) == [True, True]


class _OverMeta(nn.Module):
    """A module with a tensor of its own and a child on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.linear = nn.Linear(2, 2, device="meta")
        self.moved: list[torch.device] = []

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self.moved.append(fn(self.scale).device)
        return self


def test_a_module_over_one_on_meta_moves_to_the_device_of_the_rank() -> None:
    model = _OverMeta()
    DistributedModelParallel(model, RankGroup.single(), plan={}, wrap="none", init_parameters=False)
    assert model.moved == [RankGroup.single().device]
    assert model.linear.weight.is_meta


def _dense_table(ranks: RankGroup) -> tuple[Tensor, Tensor]:
    """A replicated table without a fused optimizer, trained by torch's."""
    torch.manual_seed(0)
    model = DistributedModelParallel(
        Sparse(None), ranks, plan={"sparse": {"t": data_parallel()}}, wrap="none"
    )
    model.module.forward = lambda batch: model.module.sparse(batch).values()  # type: ignore[method-assign]
    model.wrap_dense("ddp")
    ((_, weight),) = model.named_parameters()
    before = weight.detach().clone()
    optimizer = torch.optim.SGD([weight], lr=1.0)
    batch = KeyedJaggedTensor(["t"], torch.tensor([ranks.rank]), lengths=torch.tensor([1]))
    model(batch).sum().backward()
    optimizer.step()
    part = model.module.sparse.local_shards()[0]
    return before, part.groups.views(part.index)["weight"].clone()


def test_replicated_tables_without_an_optimizer_are_dense() -> None:
    for before, after in worlds.run(2, _dense_table):
        step = torch.zeros(10, 4)
        step[:2] = 0.5  # each row was read on one of two ranks
        torch.testing.assert_close(after, before - step)


def test_wrong_words_are_told() -> None:
    with pytest.raises(ValueError, match=r"wrap must be 'ddp', 'fully_shard', 'none', .*'fsdp'"):
        DistributedModelParallel(nn.Linear(DENSE, 1), RankGroup.single(), plan={}, wrap="fsdp")
    with pytest.raises(ValueError, match=r"wrap must be .*\['ddp'\]"):  # a list cannot be hashed
        DistributedModelParallel(nn.Linear(DENSE, 1), RankGroup.single(), plan={}, wrap=["ddp"])  # type: ignore[arg-type]


class _OverBareTables(nn.Module):
    def __init__(self, tables: nn.Module) -> None:
        super().__init__()
        self.tables, self.over = tables, nn.Linear(8, 1)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.over(self.tables(indices, offsets))


def _wrap_bare_tables(ranks: RankGroup) -> list[int]:
    """Return the steps of tables, plain and tensor-train, in DDP; -1 where it refuses."""
    steps = []
    for tables in (
        TableBatchedEmbeddingBags([TableSpec(10, 8)], optim.SGD(0.1)),
        TTEmbeddingBag(TTSpec(100, 8, (2,)), optim.SGD(0.1)),
    ):
        for ignored in (False, True):
            model = _OverBareTables(copy.deepcopy(tables))
            named = (*model.named_parameters(), *model.named_buffers())
            names = [name for name, _ in named if name.startswith("tables.")]
            if ignored:
                ddp = DistributedDataParallel
                ddp._set_params_and_buffers_to_ignore_for_model(model, names)
            wrapped = DistributedDataParallel(model, process_group=ranks.group)
            try:
                for _ in range(3):
                    wrapped(torch.tensor([1, 2]), torch.tensor([0, 1, 2])).sum().backward()
            except RuntimeError as error:
                steps.append(-1 if "DistributedDataParallel replicates" in str(error) else -2)
            else:
                steps.append(model.tables.step)
    return steps


def test_ddp_replicates_no_tables_that_backward_updates() -> None:
    assert worlds.run(2, _wrap_bare_tables) == [[-1, 3, -1, 3]] * 2


def _wrap_tables_with_gradients(ranks: RankGroup) -> tuple[list[str], Tensor]:
    """Return why DDP refuses tables, and cores that it trains with the batches of all ranks."""
    deferred = optim.SGD(0.1, deferred=True)
    ids = torch.tensor([ranks.rank, 2]), torch.tensor([0, 1, 2])
    refusals = []
    for tables in (
        TableBatchedEmbeddingBags([TableSpec(10, 8)], deferred),
        TableBatchedEmbeddingBags([TableSpec(10, 8)], optim.External()),
    ):
        model = DistributedDataParallel(_OverBareTables(tables), process_group=ranks.group)
        with pytest.raises(RuntimeError) as error:
            model(*ids)
        refusals.append(str(error.value))
    config = EmbeddingBagConfig(10, 8, "t", ("f",))
    collection = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))
    wrapped = DistributedDataParallel(collection, process_group=ranks.group)
    with pytest.raises(RuntimeError) as error:
        wrapped(KeyedJaggedTensor(["f"], ids[0], offsets=ids[1]))
    refusals.append(str(error.value))
    torch.manual_seed(3)
    model = _OverBareTables(TTEmbeddingBag(TTSpec(100, 8, (2,)), deferred))
    over_cores = DistributedDataParallel(model, process_group=ranks.group)
    fused = FusedOptimizer.of(model)
    for _ in range(2):
        over_cores(*ids).mean().backward()
        fused.step()
        fused.zero_grad()
        model.over.zero_grad()
    return refusals, model.tables.to_dense()


def test_ddp_and_tables_with_gradients() -> None:
    """Sparse gradients are refused; dense ones of tensor-train cores train as on one process."""
    (refusals, rows), (_, other_rows) = worlds.run(2, _wrap_tables_with_gradients)
    assert ["sparse" in text for text in refusals] == [True, True, False]
    assert refusals[2].startswith("DistributedDataParallel replicates these tables")
    torch.manual_seed(3)
    model = _OverBareTables(TTEmbeddingBag(TTSpec(100, 8, (2,)), optim.SGD(0.1, deferred=True)))
    for _ in range(2):
        model(torch.tensor([0, 2, 1, 2]), torch.arange(5)).mean().backward()
        model.tables.apply_gradients()
        model.zero_grad()
    torch.testing.assert_close(rows, other_rows, rtol=0, atol=0)
    torch.testing.assert_close(rows, model.tables.to_dense())


def _copied(ranks: RankGroup) -> bool:
    torch.manual_seed(0)
    net = NETS["net"]()
    model = DistributedModelParallel(net, ranks, optimizer=optim.SGD(0.5))
    made = model.copy("cpu")
    shared = set(map(id, model.module.modules())) & set(map(id, made.module.modules()))
    tables = {id(part) for part in model.module.modules() if hasattr(part, "fused_tables")}
    assert tables
    assert tables <= shared
    own = {name: p for name, p in made.named_parameters() if "embedding" not in name}
    theirs = dict(model.named_parameters())
    assert own
    assert all(p is not theirs[name] for name, p in own.items())
    assert all(torch.equal(p, theirs[name]) for name, p in own.items())
    assert not isinstance(made._wrapped, DistributedDataParallel)
    assert made.ranks is model.ranks
    return True


@pytest.mark.parametrize("size", [1, 2])
def test_copies_share_tables_and_own_the_dense_part(size: int) -> None:
    assert all(worlds.run(size, _copied))


class _Named(nn.Parameter):
    """A parameter of a class of its own."""


class _Tied(nn.Module):
    """A module whose two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
        self.first.weight = self.second.weight = _Named(torch.ones(2, 2), requires_grad=False)


def test_a_copy_keeps_tied_parameters_and_their_class() -> None:
    model = DistributedModelParallel(_Tied(), RankGroup.single(), plan={})
    made = model.copy("cpu").module
    assert made.first.weight is made.second.weight
    assert made.first.weight is not model.module.first.weight
    assert type(made.first.weight) is _Named
    assert not made.first.weight.requires_grad


def test_hooks_and_modules_of_a_copy_are_its_own() -> None:
    model = DistributedModelParallel(_Tied(), RankGroup.single(), plan={})
    made = model.copy("cpu")
    made.register_forward_pre_hook(lambda module, arguments: None)
    made.extra = nn.Linear(1, 1)
    assert not model._forward_pre_hooks
    assert not hasattr(model, "extra")


def test_gradients_are_averaged_in_floats_only() -> None:
    with pytest.raises(ValueError, match="gradient_dtype must be"):
        DDP(gradient_dtype=torch.int8)


@pytest.mark.parametrize("wrapping", [DDP, FullyShard])
def test_wrapping_refuses_options_that_are_not_a_mapping(wrapping: type) -> None:
    with pytest.raises(TypeError, match="options must be a dict"):
        wrapping(options=3)


def test_blocks_must_be_a_function() -> None:
    blocks: Any = [nn.Linear(2, 2)]
    with pytest.raises(TypeError, match="blocks must be a function of the model"):
        FullyShard(blocks=blocks)


@pytest.mark.parametrize("strict", [False, True])
def test_export_of_a_sharded_model_names_the_way_out(strict: bool) -> None:
    model = DistributedModelParallel(Net(), RankGroup.single(), plan=rules(1))
    for exported in (model, model.module):
        with pytest.raises(RuntimeError, match="takes no sharded collection: write"):
            torch.export.export(exported, (make_batch(1, 2).bags,), strict=strict)
