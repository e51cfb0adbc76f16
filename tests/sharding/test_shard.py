"""What `shard` takes over, what it refuses, and how sharded collections behave as modules."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import emblib
from emblib import optim, sharding
from emblib.sharding import data_parallel, row_wise, sharding_types, table_wise
from emblib.sharding.ranks import RankGroup
from emblib.specs import CountMinSketch, FrequencyAdmission, Placement, Pooling
from emblib.storage import Dense, Hash, TensorTrain
from tests.sharding import worlds
from tests.sharding.sharded_cases import (
    Case,
    batch,
    compare_tables,
    flat,
    make_sharded,
    make_source,
    sequences,
    tables,
)

SUM, MEAN = Pooling.SUM, Pooling.MEAN
MIXED = ("dp", "rw", "tw", "cw")


def keeps_what_was_trained(ranks: RankGroup, output: str) -> None:
    configs = tables(SUM, MEAN) if output == "pooled" else sequences(tables(SUM))
    case = Case(configs, MIXED, optimizer=optim.Adam(0.1))
    source = make_source(case)
    for step in range(3):
        flat(source(batch(case, step, 4))).sum().backward()
    sharded = make_sharded(case, ranks, source)
    compare_tables(sharded, source, 0.0)
    module, _ = source.groups.module_of(0)
    for part in sharded.local_shards():
        assert part.groups.module_of(part.index)[0].step == module.step == 3


@pytest.mark.parametrize("output", ["pooled", "sequence"])
def test_weights_states_and_steps_are_kept(output: str) -> None:
    worlds.run(3, keeps_what_was_trained, output)


def keeps_what_is_frozen(ranks: RankGroup, device: str, optimizer: optim.Optimizer | None) -> None:
    """Frozen tables of every kind: their parts are frozen and do not change in a step."""
    rules = {"tw": table_wise(0), "rw": row_wise(), "dp": data_parallel()}
    storages = {"dense": Dense(), "hash": Hash(seed=1), "train": TensorTrain((4, 4))}
    plans = {
        f"{kind}_{plan}": rule
        for kind in storages
        for plan, rule in rules.items()
        if (kind, plan) != ("hash", "dp")
    }
    configs = [
        emblib.EmbeddingBagConfig(64, 8, name, [name], storage=storages[name.partition("_")[0]])
        for name in plans
    ]
    configs.append(emblib.EmbeddingBagConfig(64, 8, "trained", ["trained"]))
    source = emblib.EmbeddingBagCollection(configs, device=device, optimizer=optimizer)
    for name in plans:
        source.embedding_bags[name].requires_grad_(False)
    model = sharding.shard(source, {"": {**plans, "trained": row_wise()}}, ranks)
    parameters = dict(model.named_parameters())
    flags = {name: ".trained." in name for name in parameters}
    assert {name: p.requires_grad for name, p in parameters.items()} == flags
    before = {name: p.clone() for name, p in parameters.items()}
    ids = torch.arange(len(configs)) + ranks.rank
    keys = [config.name for config in configs]
    features = emblib.KeyedJaggedTensor(keys, ids, lengths=torch.ones_like(ids))
    model(features.to(ranks.device)).values().sum().backward()
    changed = {name for name, p in parameters.items() if not torch.equal(p, before[name])}
    assert not any(".trained." not in name for name in changed)
    if optimizer is None:
        assert all((p.grad is not None) == flags[name] for name, p in parameters.items())


@pytest.mark.parametrize("optimizer", [optim.SGD(0.1), None], ids=["fused", "gradients"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_frozen_tables_stay_frozen(device: str, optimizer: optim.Optimizer | None) -> None:
    worlds.run(2, keeps_what_is_frozen, device, optimizer)


def hash_keys(ranks: RankGroup, plan: str, device: str) -> dict[str, list[int]]:
    """By table those of the source and of the parts here, with another seed on every rank."""
    torch.manual_seed(7 + 100 * ranks.rank)
    configs = tables(SUM, storage=Hash(admission=FrequencyAdmission(2, CountMinSketch(64))))
    source = emblib.EmbeddingBagCollection(configs, device=device, optimizer=optim.SGD(0.1))
    sharded = make_sharded(Case(configs, (plan,) * len(configs)), ranks, source)
    if device == "meta":
        source.to_empty(device="cpu")
    found: dict[str, list[int]] = {}
    for name, handle in source.handles().items():
        found[name] = [handle.module.index.hash_key(handle.index)] if ranks.rank == 0 else []
    for part in sharded.local_shards():
        module, table = part.groups.module_of(part.index)
        sketches = module.state_dict()["admission.sketches.hash_keys"].tolist()
        found[part.table] += [module.index.hash_key(table), sketches[table]]
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_ranks_hash_the_keys_of_a_table_alike(device: str) -> None:
    """As the collection of rank 0 did."""
    for plan in ("tw", "rw"):
        by_rank = worlds.run(3, hash_keys, plan, device)
        by_table = {name: {k for found in by_rank for k in found[name]} for name in by_rank[0]}
        assert all(len(keys) == 1 for keys in by_table.values())
        assert len(set.union(*by_table.values())) == len(by_table)


def first_values(ranks: RankGroup, plan: Any) -> dict[str, torch.Tensor]:
    """Of all tables, from meta, with another seed on every rank."""
    torch.manual_seed(7 + 100 * ranks.rank)
    case = Case(tables(SUM), plan)
    with torch.device("meta"):
        source = emblib.EmbeddingBagCollection(
            case.configs, device="meta", optimizer=case.optimizer
        )
    sharded = make_sharded(case, ranks, source)
    found = {}
    for config in case.configs:
        whole = torch.zeros(config.num_embeddings, config.embedding_dim)
        for part in sharded.local_shards():
            if part.table == config.name:
                rows, columns = slice(*part.shard.rows), slice(*part.shard.columns)
                whole[rows, columns] = part.groups.views(part.index)["weight"]
        found[config.name] = whole
    return found


def test_first_values_do_not_depend_on_the_plan() -> None:
    by_plan = []
    for plan in (("tw",) * 4, ("rw",) * 4, ("cw",) * 4):
        parts = worlds.run(3, first_values, plan)
        by_plan.append({name: sum(p[name] for p in parts) for name in parts[0]})
    for name, value in by_plan[0].items():
        assert value.abs().max() > 0
        assert torch.equal(value, by_plan[1][name])
        assert torch.equal(value, by_plan[2][name])
    copies = worlds.run(3, first_values, ("dp",) * 4)
    for name, value in by_plan[0].items():
        assert all(torch.equal(one[name], value) for one in copies)


def gradient_of_weights(ranks: RankGroup, plan: Any, gradients: str) -> None:
    case = Case(tables(SUM, MEAN), plan, weighted=True, optimizer=optim.SGD(0.0))
    source = make_source(case)
    sharded = make_sharded(case, ranks, copy.deepcopy(source), gradients)
    grads = []
    for collection in (source, sharded):
        own = batch(case, ranks.rank, 3 + ranks.rank)
        weights = own.weights().requires_grad_()
        output = flat(collection(own))
        output.backward(torch.ones_like(output).cumsum(1))
        assert weights.grad is not None
        grads.append(weights.grad)
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("plan", [MIXED, ("rw",) * 4, ("tw",) * 4, ("dp",) * 4])
@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_sample_weights_get_the_gradient_of_their_own_loss(plan: Any, gradients: str) -> None:
    for size in (1, 3):
        worlds.run(size, gradient_of_weights, plan, gradients)


def trains_with_torch(ranks: RankGroup, plan: Any) -> None:
    """Without a fused optimizer, gradients are on the parameters."""
    case = Case(tables(SUM, MEAN), plan, optimizer=None)
    source = make_source(case)
    oracle = copy.deepcopy(source)
    sharded = make_sharded(case, ranks, source)
    steps = [torch.optim.Adagrad(m.parameters(), lr=0.5) for m in (oracle, sharded)]
    for step in range(3):
        own = [batch(case, 10 * step + r, 3) for r in range(ranks.size)]
        for optimizer in steps:
            optimizer.zero_grad()
        flat(sharded(own[ranks.rank])).square().sum().backward()
        for one in own:
            flat(oracle(one)).square().sum().backward()
        for optimizer in steps:
            optimizer.step()
    compare_tables_by_weight(sharded, oracle)


def compare_tables_by_weight(sharded: Any, oracle: Any) -> None:
    whole = {part.config.name: i for i, part in enumerate(oracle.groups.slices)}
    for part in sharded.local_shards():
        want = oracle.groups.views(whole[part.table])["weight"]
        rows, columns = slice(*part.shard.rows), slice(*part.shard.columns)
        torch.testing.assert_close(part.groups.views(part.index)["weight"], want[rows, columns])


@pytest.mark.parametrize("plan", [("rw",) * 4, ("tw",) * 4, ("cw",) * 4])
def test_torch_optimizers_train_the_parameters(plan: Any) -> None:
    worlds.run(2, trains_with_torch, plan)


def mean_is_sum_over_ranks(ranks: RankGroup) -> None:
    case = Case(tables(SUM), MIXED)
    before = make_source(case)
    moved = []
    for gradients in ("sum", "mean"):
        sharded = sharding.shard(
            copy.deepcopy(before),
            {"": {c.name: sharding_types.row_wise() for c in case.configs}},
            ranks,
            gradients=sharding.GradientReduction(gradients),
        )
        flat(sharded(batch(case, ranks.rank, 4))).sum().backward()
        views = [part.groups.views(part.index)["weight"] for part in sharded.local_shards()]
        whole = {p.config.name: i for i, p in enumerate(before.groups.slices)}
        first = [
            before.groups.views(whole[p.table])["weight"][slice(*p.shard.rows)]
            for p in sharded.local_shards()
        ]
        moved.append([a - b for a, b in zip(views, first, strict=True)])
    for total, mean in zip(*moved, strict=True):
        torch.testing.assert_close(total, mean * ranks.size)


def test_gradients_are_means_or_sums_over_ranks() -> None:
    worlds.run(3, mean_is_sum_over_ranks)


def as_modules(ranks: RankGroup) -> None:
    model = nn.Sequential(make_source(Case(tables(SUM), MIXED)), nn.Linear(4, 4))
    every_type = [
        sharding_types.data_parallel(),
        sharding_types.row_wise(),
        sharding_types.table_wise(0),
        sharding_types.column_wise(),
    ]
    rules = {f"t{i}": rule for i, rule in enumerate(every_type)}
    before = set(dict(model.named_parameters()))
    assert sharding.shard(model, {"0": rules}, ranks) is model
    after = set(dict(model.named_parameters()))
    here = {part.table for part in model[0].local_shards()}  # type: ignore[operator]
    assert after == {n for n in before if n.startswith("1.") or n.split(".")[2] in here}
    clone = copy.deepcopy(model[0])
    case = Case(tables(SUM), MIXED)
    own = batch(case, ranks.rank, 3)
    assert torch.equal(flat(clone(own)), flat(model[0](own)))
    assert model[0].eval().training is False


def test_parameters_keep_their_names_and_copies_work() -> None:
    worlds.run(2, as_modules)


def refusals(ranks: RankGroup) -> None:
    source = make_source(Case(tables(SUM), MIXED))
    every = {f"t{i}": sharding_types.table_wise(0) for i in range(4)}
    with pytest.raises(ValueError, match=r"unknown are \['t9'\]"):
        sharding.shard(source, {"": {**every, "t9": sharding_types.row_wise()}}, ranks)
    with pytest.raises(ValueError, match=r"missing are \['t3'\]"):
        sharding.shard(source, {"": {k: v for k, v in every.items() if k != "t3"}}, ranks)
    with pytest.raises(ValueError, match=r"a rank must be in \[0, 2\)"):
        sharding.shard(source, {"": {**every, "t0": sharding_types.table_wise(2)}}, ranks)
    with pytest.raises(ValueError, match="collections by their paths"):
        sharding.shard(source, {"ebc": every}, ranks)
    half = sharding_types.custom([sharding.Shard(0, (0, 5), (0, 8))])
    with pytest.raises(ValueError, match="must cover"):
        sharding.shard(source, {"": {**every, "t0": half}}, ranks)
    sharded = sharding.shard(source, {"": every}, ranks)
    case = Case(tables(SUM), MIXED)
    own = batch(case, 0, 3)
    few = own.split([1, len(own.keys()) - 1])[1]
    with pytest.raises(KeyError, match="f3"):
        sharded(few)
    mixed = batch(replace(case, ids=(torch.int32, torch.int64)[ranks.rank]), 0, 3)
    with pytest.raises(RuntimeError, match=r"one dtype on all ranks.*rank 0: int32"):
        sharded(mixed)


def test_wrong_use_is_told_on_every_rank() -> None:
    worlds.run(2, refusals)


def cached(ranks: RankGroup) -> None:
    """A plan may keep a table behind a cache; results stay the same."""
    case = Case(tables(SUM), ("rw",) * 4)
    source = make_source(case)
    world = sharding_types.World(ranks.size, ranks.size)
    shapes = [sharding_types.TableShape(c.num_embeddings, c.embedding_dim) for c in case.configs]
    kinds = [
        replace(sharding_types.row_wise()(shape, world), storage=Dense(Placement.MANAGED_CACHING))
        for shape in shapes
    ]
    plan = {"": {c.name: kind for c, kind in zip(case.configs, kinds, strict=True)}}
    models = [
        sharding.shard(copy.deepcopy(source), plan, ranks),
        make_sharded(case, ranks, copy.deepcopy(source)),
    ]
    for step in range(3):
        outputs = [flat(model(batch(case, step + 10 * ranks.rank, 4))) for model in models]
        assert torch.equal(*[output.detach() for output in outputs])
        for output in outputs:
            output.sum().mul(1.0 if output is outputs[0] else 1.0 / ranks.size).backward()
    del models


def test_a_plan_may_keep_tables_behind_a_cache() -> None:
    worlds.run(2, cached)


class _Twice(nn.Module):
    """Has one collection at three paths, one of them through a module that it has twice."""

    def __init__(self) -> None:
        super().__init__()
        self.clicked = make_named()
        self.seen = nn.ModuleDict({"bags": self.clicked})
        self.again = self.seen
        self.top = nn.Linear(4, 1)

    def forward(self, batch: Any) -> torch.Tensor:
        return flat(self.clicked(batch)) + 2 * flat(self.again["bags"](batch))


class _Named(emblib.EmbeddingBagCollection):
    """Changes nothing but how it is made, and has something to say besides."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.configs, optimizer=case.optimizer)

    def of_mine(self) -> str:
        return "nothing that a lookup needs"


class _Scaled(_Named):
    """Looks up something else."""

    def forward(self, features: Any) -> Any:
        return super().forward(features)


CASE = Case(tables(SUM, MEAN), MIXED)
EVERY = {f"t{i}": sharding_types.row_wise() for i in range(4)}


def make_named() -> _Named:
    torch.manual_seed(3)
    return _Named(CASE)


def at_several_paths(ranks: RankGroup, path: str) -> None:
    oracle = _Twice()
    model: Any = sharding.shard(
        copy.deepcopy(oracle), {path: EVERY}, ranks, gradients=sharding.GradientReduction.SUM
    )
    assert isinstance(model.clicked, sharding.ShardedEmbeddingBagCollection)
    assert model.clicked is model.seen["bags"] is model.again["bags"]
    assert list(model.state_dict()) == list(oracle.state_dict())
    for step in range(2):
        batches = [batch(CASE, 10 * step + r, 3) for r in range(ranks.size)]
        torch.testing.assert_close(model(batches[ranks.rank]), oracle(batches[ranks.rank]))
    compare_tables(model.clicked, oracle.clicked, 0.0)


@pytest.mark.parametrize("path", ["clicked", "seen.bags", "again.bags"])
def test_a_collection_at_several_paths_is_one_sharded_collection(path: str) -> None:
    worlds.run(2, at_several_paths, path)


def contradictions(ranks: RankGroup) -> None:
    other = {**EVERY, "t0": sharding_types.table_wise(0)}
    with pytest.raises(ValueError, match=r"'clicked' and 'seen\.bags' are paths of one"):
        sharding.shard(_Twice(), {"clicked": EVERY, "seen.bags": other}, ranks)
    both = sharding.shard(_Twice(), {"clicked": EVERY, "seen.bags": EVERY}, ranks)
    assert both.clicked is both.again["bags"]
    model = nn.ModuleDict({"a": nn.ModuleDict({"scaled": _Scaled(CASE)})})
    says = r"'a\.scaled' is a _Scaled, a subclass of EmbeddingBagCollection that changes forward"
    with pytest.raises(TypeError, match=says):
        sharding.shard(model, {"a.scaled": EVERY}, ranks)
    with pytest.raises(TypeError, match=says):
        sharding.DistributedModelParallel(model, ranks)


class _WithMore(_Named):
    """Has a module besides its tables."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.extra = nn.Linear(2, 2)


class _Shown(_Named):
    """Says something else of itself, which nothing depends on."""

    def extra_repr(self) -> str:
        return "shown"


def _with_forward() -> _Named:
    made: Any = make_named()
    made.forward = lambda features: features
    return made


def _with_buffer() -> _Named:
    made = make_named()
    made.register_buffer("count", torch.zeros(1))
    return made


def _with_hook(name: str) -> _Named:
    made = make_named()
    getattr(made, name)(lambda *args: None)
    return made


def on_the_instance(ranks: RankGroup) -> None:
    for source, says in (
        (_with_forward(), r"at 'a\.bags' has forward set on the instance"),
        (_WithMore(CASE), r"at 'a\.bags' has extra besides its tables"),
        (_with_buffer(), r"at 'a\.bags' has count besides its tables"),
        (_with_hook("register_forward_hook"), r"at 'a\.bags' has hooks \(_forward_hooks\)"),
        (_with_hook("register_forward_pre_hook"), r"hooks \(_forward_pre_hooks\)"),
        (_with_hook("register_full_backward_hook"), r"hooks \(_backward_hooks\)"),
        (_with_hook("register_full_backward_pre_hook"), r"hooks \(_backward_pre_hooks\)"),
    ):
        model = nn.ModuleDict({"a": nn.ModuleDict({"bags": source})})
        with pytest.raises(TypeError, match=says):
            sharding.shard(model, {"a.bags": EVERY}, ranks)
        assert model["a"]["bags"] is source  # type: ignore[index]
    shown = sharding.shard(_Shown(CASE), {"": EVERY}, ranks)
    assert isinstance(shown, sharding.ShardedEmbeddingBagCollection)


def test_what_the_sharded_form_would_lack_is_refused() -> None:
    worlds.run(2, on_the_instance)


def _no_memory(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("none left")


def one_fails_late(ranks: RankGroup) -> None:
    """The second collection cannot be made, when the first has been."""
    clicks = make_source(Case(sequences(tables(SUM)), MIXED))
    model = nn.ModuleDict({"bags": make_named(), "clicks": clicks})
    before = dict(model.named_children())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding.ShardedEmbeddingCollection, "__init__", _no_memory)
        with pytest.raises(MemoryError):
            sharding.shard(model, {"bags": EVERY, "clicks": EVERY}, ranks)
    assert dict(model.named_children()) == before


def test_a_model_is_as_it_was_where_a_collection_fails() -> None:
    worlds.run(2, one_fails_late)


def test_what_cannot_be_sharded_rightly_is_refused_by_its_path() -> None:
    worlds.run(2, contradictions)


def replaces_parameters(ranks: RankGroup, output: str) -> None:
    configs = tables(SUM) if output == "pooled" else sequences(tables(SUM))
    case = Case(configs, MIXED, optimizer=optim.SGD(0.1))
    model = make_sharded(case, ranks, make_source(case))
    held: dict[str, Any] = model.get_submodule(model.handles_name)._parameters
    for name, parameter in list(held.items()):
        held[name] = torch.zeros_like(parameter)
        with pytest.raises(RuntimeError, match="cannot be replaced"):
            model(batch(case, 0, 4))
        held[name] = parameter
    model(batch(case, 0, 4)).wait()


@pytest.mark.parametrize("output", ["pooled", "sequence"])
def test_replaced_parameters_are_refused(output: str) -> None:
    worlds.run(2, replaces_parameters, output)


def error_where_one_rank_refuses(ranks: RankGroup) -> str:
    """Return the error of sharding a table that is in a memory budget on rank 1."""
    config = emblib.EmbeddingBagConfig(64, 4, "t", storage=Hash())
    model = nn.ModuleDict({"bags": emblib.EmbeddingBagCollection([config], optimizer=optim.SGD(1))})
    if ranks.rank == 1:
        budget = emblib.MemoryBudget(1 << 20)
        budget.attach(model)
    with pytest.raises((ValueError, RuntimeError)) as error:
        sharding.shard(model, {"bags": {"t": row_wise()}}, ranks)
    return str(error.value)


def test_a_table_that_one_rank_cannot_replace_raises_on_all() -> None:
    for error in worlds.run(2, error_where_one_rank_refuses):
        assert "table 't' is in a memory budget" in error
