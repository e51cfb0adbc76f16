"""Shared tables over ranks: one memory and one step, as in one process, whatever the plan."""

from __future__ import annotations

import copy
import gc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import emblib
from emblib import Placement, Pooling, optim, sharding
from emblib.collections.optimizers import FusedOptimizer
from emblib.sharding import (
    GradientReduction,
    checkpoints,
    input_dist,
    planner,
    row_wise,
    table_wise,
)
from emblib.sharding.pipelines import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from emblib.sharding.pipelines.inputs import sharded_modules
from emblib.sharding.planner.simulate import compare as compare_plans
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import ParameterSharding
from emblib.storage import TableSlice
from tests import nightly
from tests.sharding import worlds
from tests.sharding.sharded_cases import WORDS, Case, batch, compare_tables, expanded, joined
from tests.sharding.shared_cases import (
    DIMS,
    KEYS,
    ROWS,
    Model,
    Shared,
    backward,
    batch_of,
    batch_on,
    compare,
    gradient,
    make,
    make_sharded,
    plan_of,
    step_of_all,
    train,
)
from tests.sharding.test_sharded import tilings

PLANS = {
    **{word: dict.fromkeys(ROWS, word) for word in ("dp", "tw", "rw", "cw", "twrw", "grid")},
    "mixed": {"item": "rw", "user": "dp", "own": "tw", "seen": "rw"},
    "other": {"item": "dp", "user": "cw", "own": "dp", "seen": "tw"},
}
ADAGRAD = optim.Adagrad(0.5)
CACHED = emblib.storage.Dense(Placement.MANAGED_CACHING, emblib.CacheConfig(sets=1))


# One rank has every table whole, whatever the plan.
@pytest.mark.parametrize(
    ("plan", "size"), [("mixed", 1), *((plan, size) for plan in PLANS for size in (2, 3))]
)
def test_every_plan(plan: str, size: int) -> None:
    case = Shared(PLANS[plan], ADAGRAD, joint=plan in ("rw", "other"))
    assert set(worlds.run(size, train, case)) == {"equal"}


@settings(max_examples=nightly.number(8, 12), deadline=None, phases=[Phase.reuse, Phase.generate])
@given(data=st.data())
def test_any_tiling(data: Any) -> None:
    size = data.draw(st.integers(1, 4))
    plan = {
        name: data.draw(st.one_of(st.just("dp"), tilings(ROWS[name], DIMS[name], size)))
        for name in ROWS
    }
    optimizer = data.draw(st.sampled_from([ADAGRAD, optim.Adam(0.1, eps=1e-3), optim.SGD(0.5)]))
    batches = data.draw(st.tuples(*[st.integers(0, 4)] * size))
    joint, how = data.draw(st.booleans()), data.draw(st.sampled_from(["sum", "mean"]))
    storage = data.draw(st.sampled_from([emblib.storage.Dense(), CACHED]))
    case = Shared(plan, optimizer, batches, storage, gradients=how, joint=joint)
    worlds.run(size, train, case)


@pytest.mark.parametrize("plan", ["rw", "dp", "mixed"])
def test_cached_tables(plan: str) -> None:
    worlds.run(2, train, Shared(PLANS[plan], ADAGRAD, storage=CACHED))


@pytest.mark.parametrize("plan", ["tw", "dp"])
def test_optimizers_of_rows(plan: str) -> None:
    worlds.run(3, train, Shared(PLANS[plan], optim.RowwiseAdagrad(0.5)))


# Gradients that are not applied in backward


def _deferred(ranks: RankGroup, plan: str, optimizer: Any) -> None:
    """Two backwards and a step of an optimizer, for two steps."""
    case = Shared(PLANS[plan], optimizer)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    if optimizer is None:
        steppers: list[Any] = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (oracle, model)]
    else:
        steppers = [FusedOptimizer.of(m) for m in (oracle, model)]
    for step in range(2):
        for micro in range(2):
            numbers = [100 * step + 10 * micro + r for r in range(ranks.size)]
            step_of_all(case, oracle, numbers)
            backward(model(batch_on(ranks, case, numbers[ranks.rank])), numbers[ranks.rank])
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        compare(model, oracle, 1e-5)


@pytest.mark.parametrize("plan", ["rw", "tw", "cw"])
def test_gradients_that_are_left_to_an_optimizer(plan: str) -> None:
    worlds.run(2, _deferred, plan, None)
    worlds.run(2, _deferred, plan, optim.Adagrad(0.5, deferred=True))


def test_deferred_replicas() -> None:
    worlds.run(2, _deferred, "dp", optim.Adagrad(0.5, deferred=True))


def _averaged(ranks: RankGroup) -> None:
    """Replicas without a fused optimizer: `DistributedDataParallel` averages their gradients."""
    case = Shared(PLANS["dp"], None, gradients="mean", joint=True)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    steppers = [torch.optim.Adagrad(m.parameters(), lr=0.1) for m in (oracle, model)]
    for step in range(3):
        numbers = [10 * step + r for r in range(ranks.size)]
        step_of_all(case, oracle, numbers)
        backward(model(batch_on(ranks, case, numbers[ranks.rank])), numbers[ranks.rank])
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        compare(model, oracle, 1e-5)


def test_replicas_without_optimizer_are_averaged() -> None:
    worlds.run(2, _averaged)


def _scaled(ranks: RankGroup, plan: str) -> None:
    """Scaled gradients make the same step; where one is infinite, there is none."""
    input_dist._MIN_SAVED_ELEMENTS = 0  # also for shards whose bags have no ids, and are not sent
    case = Shared(PLANS[plan], ADAGRAD)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    fused = FusedOptimizer.of(model)
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=64.0)
    for step in range(3):
        numbers = [10 * step + r for r in range(ranks.size)]
        overflows = step == 1
        if not overflows:
            step_of_all(case, oracle, numbers)
        outputs = model(batch_on(ranks, case, numbers[ranks.rank]))
        loss = weighted_sum(outputs, numbers[ranks.rank])
        scaler.scale(loss * torch.inf if overflows else loss).backward()
        scaler.step(fused)
        scaler.update()
        fused.zero_grad()
        compare(model, oracle, 1e-5)
    assert scaler.get_scale() == 32.0


def weighted_sum(outputs: dict[str, Tensor], number: int) -> Tensor:
    """The loss whose gradients are those of `backward`."""
    parts = [(out * gradient(name, number, out)).sum() for name, out in outputs.items()]
    return torch.stack(parts).sum()


@pytest.mark.parametrize("plan", ["rw", "dp", "tw"])
def test_gradients_of_a_scaler(plan: str) -> None:
    worlds.run(2, _scaled, plan)


def _partly_used(ranks: RankGroup, plan: str) -> None:
    """Backward of one output, of none, and of two forwards at once."""
    case = Shared(PLANS[plan], ADAGRAD)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    same = batch_of(1, 4).to(ranks.device)  # of all ranks
    for used in ((("scaled",), 1), (("scaled", "f5"), 2), ((), 1)):
        names, count = used
        for one, factor in ((oracle, ranks.size), (model, 1)):
            losses = []
            for _ in range(count):
                outputs = one(same)
                losses += [factor * outputs[name].sin().sum() for name in names]
            model.history(same) if one is model else None
            if losses:
                torch.stack(losses).sum().backward()
        compare_shared(model, oracle)


def compare_shared(model: Any, oracle: Model) -> None:
    """Compare the collections that read only shared tables."""
    for shard in model.scaled.local_shards():
        view = shard.groups.views(shard.index)
        whole = oracle.scaled.groups.views(["item", "user"].index(shard.table))
        part = shard.groups.slices[shard.index]
        for name, tensor in view.items():
            torch.testing.assert_close(tensor, part.view_of(whole[name]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("plan", ["rw", "dp"])
def test_outputs_that_no_loss_uses(plan: str) -> None:
    worlds.run(2, _partly_used, plan)


def _weights(ranks: RankGroup, plan: str, storage: Any) -> None:
    """The gradient of sample weights, on every rank, and frozen tables."""
    case = Shared(PLANS[plan], ADAGRAD, storage=storage)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    found = []
    for one in (oracle, model):
        own = batch_of(ranks.rank, 4).to(ranks.device)
        weights = own.weights().clone().requires_grad_()
        given = emblib.KeyedJaggedTensor(list(KEYS), own.values(), weights, own.lengths())
        weighted_sum(one(given), ranks.rank).backward()
        found.append(weights.grad)
    torch.testing.assert_close(*found)
    before = {k: v.clone() for k, v in values_of(model).items()}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("own" in name)
    outputs = model(batch_of(ranks.rank, 4).to(ranks.device))
    backward({name: out for name, out in outputs.items() if out.requires_grad}, ranks.rank)
    after = values_of(model)
    frozen = [key for key in before if key[1] in ("item", "user")]
    assert all(torch.equal(before[key], after[key]) for key in frozen)


def values_of(model: Any) -> dict[Any, Tensor]:
    """Weights and states of the shards on this rank."""
    return {
        (path, shard.table, shard.shard, name): view
        for path, part in sharded_modules(model).items()
        for shard in part.local_shards()
        for name, view in shard.groups.views(shard.index).items()
    }


@pytest.mark.parametrize("plan", ["rw", "dp"])
def test_gradients_of_weights_and_frozen_tables(plan: str) -> None:
    for storage in (emblib.storage.Dense(), CACHED):
        worlds.run(2, _weights, plan, storage)


# Copies, meta, checkpoints, pipelines


def _copied(ranks: RankGroup) -> None:
    """A copy of a sharded model shares its own tables, and leaves the original alone."""
    case = Shared(PLANS["other"], ADAGRAD)
    oracle = make(case, ranks.device)
    model = make_sharded(case, ranks, copy.deepcopy(oracle))
    number = ranks.rank
    step_of_all(case, oracle, list(range(ranks.size)))
    backward(model(batch_on(ranks, case, number)), number)
    before = {key: value.clone() for key, value in values_of(model).items()}
    clone = copy.deepcopy(model)
    step_of_all(case, oracle, [10 + r for r in range(ranks.size)])
    backward(clone(batch_on(ranks, case, 10 + number)), 10 + number)
    compare(clone, oracle, 1e-5)
    assert all(torch.equal(value, before[key]) for key, value in values_of(model).items())
    assert [n for n, _ in clone.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert list(clone.state_dict()) == list(oracle.state_dict())


def test_a_copy_shares_as_the_original() -> None:
    worlds.run(2, _copied)


def _from_meta(ranks: RankGroup, plan: str) -> Any:
    """Tables from meta have one set of initial values, whatever the plan."""
    case = Shared(PLANS[plan], ADAGRAD)
    torch.manual_seed(8)
    model = make_sharded(case, ranks, Model(case, "meta"))
    state = checkpoints.sharded_table.gather_state(model.state_dict())
    oracle = make(case, ranks.device)
    if ranks.rank == 0:
        oracle.load_state_dict(state)
    for values in ranks.gather_objects(oracle.state_dict() if ranks.rank == 0 else None)[:1]:
        oracle.load_state_dict(values)
    compare(model, oracle, 0.0)
    step_of_all(case, oracle, list(range(ranks.size)))
    backward(model(batch_on(ranks, case, ranks.rank)), ranks.rank)
    compare(model, oracle, 1e-5)
    return {name: value.clone() for name, value in state.items()} if ranks.rank == 0 else None


def test_tables_on_meta() -> None:
    first, second = (worlds.run(2, _from_meta, plan)[0] for plan in ("rw", "other"))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


CHECKPOINT = optim.RowwiseAdagrad(0.1)


def _trained(case: Shared, ranks: int, device: Any = None) -> Model:
    oracle = make(case, device)
    for step in range(2):
        step_of_all(case, oracle, [10 * step + r for r in range(ranks)])
    return oracle


def _save(ranks: RankGroup, plan: str, path: Path) -> None:
    case = Shared(PLANS[plan], CHECKPOINT)
    model = make_sharded(case, ranks, make(case, ranks.device))
    for step in range(2):
        number = 10 * step + ranks.rank
        backward(model(batch_on(ranks, case, number)), number)
    compare(model, _trained(case, ranks.size, ranks.device), 1e-5)
    checkpoints.save({"model": model, "tables": FusedOptimizer.of(model)}, path / "steps", ranks)
    checkpoints.export({"model": model, "tables": FusedOptimizer.of(model)}, path / "file", ranks)


def _resume(ranks: RankGroup, plan: str, path: Path, saved_by: int) -> None:
    case = Shared(PLANS[plan], CHECKPOINT)
    for source in ("steps", "file"):
        torch.manual_seed(9)
        model = make_sharded(case, ranks, Model(case))
        fused = FusedOptimizer.of(model)
        if source == "steps":
            checkpoints.load({"model": model, "tables": fused}, path / "steps", ranks)
        else:
            whole = checkpoints.load_export(path / "file")
            model.load_state_dict(whole["model"])
            fused.load_state_dict(whole["tables"])
        oracle = _trained(case, saved_by, ranks.device)
        compare(model, oracle, 1e-5)
        step_of_all(case, oracle, [50 + r for r in range(ranks.size)])
        backward(model(batch_on(ranks, case, 50 + ranks.rank)), 50 + ranks.rank)
        compare(model, oracle, 1e-5)


@pytest.mark.parametrize(("start", "saved_by"), [("rw", 3), ("dp", 2), ("tw", 1)])
def test_checkpoints_resume_at_another_world_size(
    start: str, saved_by: int, tmp_path: Path
) -> None:
    worlds.run(saved_by, _save, start, tmp_path)
    whole = checkpoints.load_export(tmp_path / "file")
    assert list(whole["model"]) == list(make(Shared(PLANS[start], CHECKPOINT)).state_dict())
    assert sorted(whole["tables"]["state"]) == sorted(whole["model"])
    for size, plan in ((1, "mixed"), (2, "other"), (3, "tw")):
        worlds.run(size, _resume, plan, tmp_path, saved_by)
    oracle, one = (
        _trained(Shared(PLANS[start], CHECKPOINT), saved_by),
        Model(Shared({}, CHECKPOINT)),
    )
    one.load_state_dict(whole["model"])
    FusedOptimizer.of(one).load_state_dict(whole["tables"])
    torch.testing.assert_close(dict(one.state_dict()), dict(oracle.state_dict()))


def _duplicates(ranks: RankGroup) -> None:
    """Entries under several names, as of tables that are not shared, load if they are equal."""
    case = Shared(PLANS["mixed"], ADAGRAD)
    oracle, model = make(case, ranks.device), make_sharded(case, ranks, make(case, ranks.device))
    state = dict(oracle.state_dict())
    state["sums.embedding_bags.item.weight"] = state["sums.embedding_bags.item.weight"] + 1
    moved = state.pop("sums.embedding_bags.item.weight")
    state["history.embeddings.item.weight"] = moved
    model.load_state_dict(state)
    oracle.load_state_dict(state)
    compare(model, oracle, 0.0)
    model.load_state_dict({**state, "scaled.embedding_bags.item.weight": moved.clone()})
    with pytest.raises(RuntimeError, match="remove one of the two entries"):
        model.load_state_dict({**state, "scaled.embedding_bags.item.weight": moved + 1})
    del state["history.embeddings.item.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*sums\.embedding_bags\.item"):
        model.load_state_dict(state)


def test_state_dicts_with_duplicates() -> None:
    worlds.run(2, _duplicates)


class Loss(torch.nn.Module):
    """The model with a loss, as pipelines take it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: tuple[Any, int]) -> tuple[Tensor, Tensor]:
        """Return the loss whose gradients are those of `backward`."""
        loss = weighted_sum(self.model(batch[0]), batch[1])
        return loss, loss.detach()


PIPELINES = {
    "plain": (TrainPipelineSparseDist, emblib.storage.Dense()),
    "prefetching": (PrefetchTrainPipelineSparseDist, CACHED),
}


def _piped(ranks: RankGroup, plan: str, kind: str) -> None:
    make_pipeline, storage = PIPELINES[kind]
    case = Shared(PLANS[plan], ADAGRAD, storage=storage)
    oracle = make(case, ranks.device)
    rules = {f"model.{path}": tables for path, tables in plan_of(case, ranks).items()}
    source = Loss(copy.deepcopy(oracle))
    model = sharding.DistributedModelParallel(
        source, ranks, plan=rules, gradients=GradientReduction.SUM
    )
    numbers = [[10 * step + r for r in range(ranks.size)] for step in range(4)]
    batches = iter([(batch_on(ranks, case, n[ranks.rank]), n[ranks.rank]) for n in numbers])
    pipeline = make_pipeline(model, model.fused_optimizer, ranks.device)
    for step in numbers:
        pipeline.progress(batches)
        step_of_all(case, oracle, step)
    for path, part in sharded_modules(model.module).items():
        compare_tables(part, oracle.get_submodule(path.removeprefix("model.")), 1e-5)


@pytest.mark.parametrize("plan", ["rw", "other"])
@pytest.mark.parametrize("kind", PIPELINES)
def test_pipelines(kind: str, plan: str) -> None:
    worlds.run(2, _piped, plan, kind)


def _variable(ranks: RankGroup, plan: str) -> None:
    """Batches whose features differ in their bags, of a weighted and an unweighted collection."""
    torch.manual_seed(6)
    shared = emblib.SharedTables([emblib.EmbeddingConfig(13, 8, "item")], optimizer=ADAGRAD)
    sums, means = (
        shared.pooled("item", keys, how)
        for keys, how in ((["f0", "f1"], Pooling.SUM), (["f3"], Pooling.MEAN))
    )
    oracle = torch.nn.ModuleDict(
        {
            "sums": emblib.EmbeddingBagCollection([sums], shared=shared),
            "means": emblib.EmbeddingBagCollection([means], shared=shared, is_weighted=True),
        }
    ).to(ranks.device)
    case = Case((sums,), (plan,), variable=True, weighted=True)
    rule = {"item": WORDS[plan](sharding.World(ranks.size, ranks.size), 0)}
    model: Any = sharding.shard(
        copy.deepcopy(oracle),
        {"sums": rule, "means": rule},
        ranks,
        gradients=GradientReduction.SUM,
    )
    for step in range(2):
        batches = [batch(case, 10 * step + r, 4 - r).to(ranks.device) for r in range(ranks.size)]
        whole = joined([expanded(one) for one in batches])
        for one, own in ((model, batches[ranks.rank]), (oracle, whole)):
            outs = [one["sums"](own).values(), one["means"](own).values()]
            sum(out.sin().sum() for out in outs).backward()
        for path in ("sums", "means"):
            compare_tables(model[path], oracle[path], 1e-5)


@pytest.mark.parametrize("plan", ["rw", "dp", "cw"])
def test_features_that_differ_in_their_bags(plan: str) -> None:
    worlds.run(2, _variable, plan)


# What is refused


def _refused(ranks: RankGroup) -> None:
    case = Shared(PLANS["rw"], ADAGRAD)
    model, plan = make(case, ranks.device), plan_of(case, ranks)
    unequal = {**plan, "scaled": {**plan["scaled"], "item": table_wise(0)}}
    with pytest.raises(ValueError, match=r"'sums' and 'scaled' read one shared table 'item'.*same"):
        sharding.shard(model, unequal, ranks)
    some = {path: plan[path] for path in ("sums", "scaled")}
    with pytest.raises(ValueError, match=r"'item' is read by the collections \['history'\]"):
        sharding.shard(model, some, ranks)
    with pytest.raises(ValueError, match="read by other collections"):
        sharding.shard(model.sums, {"": plan["sums"]}, ranks)
    world = sharding.World(ranks.size, ranks.size)
    made = sharding.construct_module_plan(model.sums, plan["sums"], world)
    with pytest.raises(TypeError, match="shard the model with all collections"):
        sharding.ShardedEmbeddingBagCollection(model.sums, made, ranks)
    train = emblib.storage.Hashed(2)
    item = ParameterSharding(sharding.ShardingType.DATA_PARALLEL, (), train)
    hashed = {path: {**tables, "item": item} for path, tables in plan.items()}
    with pytest.raises(ValueError, match="shared tables must be Dense"):
        sharding.shard(model, hashed, ranks)
    left = model.history
    del model.history
    with pytest.raises(ValueError, match="read by other collections"):
        sharding.shard(model, some, ranks)
    del left
    gc.collect()
    sharding.shard(model, some, ranks)


def test_ways_out_of_errors() -> None:
    for size in (1, 2):
        worlds.run(size, _refused)


def _differs(ranks: RankGroup) -> None:
    case = Shared(PLANS["rw"], ADAGRAD)
    model, plan = make(case, ranks.device), plan_of(case, ranks)
    if ranks.rank == 1:  # another table of the same name
        other = make(case, ranks.device)
        model.scaled = other.scaled
        del other
    with pytest.raises((ValueError, RuntimeError), match=r"shared_first_by|other collections"):
        sharding.shard(model, plan, ranks)


def test_ranks_that_share_differently() -> None:
    worlds.run(2, _differs)


# Plans, replicas, duplicates


def test_a_table_is_planned_once() -> None:
    model = make(Shared({}, ADAGRAD))
    constraints = {"scaled.item": planner.TableConstraints(pooling_factor=3.0)}
    own = planner.Planner(planner.Topology(4, memory=1 << 24), 64, constraints)
    prediction = own.solve(model)
    names = ["sums.item", "sums.own", "scaled.user", "history.seen"]
    assert [table.workload.name for table in prediction.tables] == names
    item = prediction.tables[0].workload
    assert [one.name for one in item.by_reader] == ["sums.item", "scaled.item", "history.item"]
    assert sum(one.ids_per_example for one in item.by_reader) == 2 + 3 + 2
    for name in ("item", "user"):
        found = [tables[name] for tables in prediction.plan.modules.values() if name in tables]
        assert len(found) > 1
        assert all(one == found[0] for one in found)
    large = replace(item, config=replace(item.config, num_embeddings=1 << 20))
    whole, costs = TableSlice.whole(large.config), own.model([item])
    for cost in (
        costs.shard_load,
        lambda workload, shard, share: costs.replicated_cost(workload, shard),
    ):
        together, alone = cost(large, whole, 1.0), cost(replace(large, readers=()), whole, 1.0)
        assert 0 < together.nbytes.device - alone.nbytes.device < 1 << 20
        assert sum(together.seconds) > sum(alone.seconds)
    differ = {"scaled.item": planner.TableConstraints(min_partition=4)}
    with pytest.raises(ValueError, match="give them the same"):
        planner.Planner(planner.Topology(4), 64, differ).solve(model)
    train_ = {"item": planner.TableConstraints(storages=(emblib.storage.TensorTrain((2, 2)),))}
    with pytest.raises(ValueError, match="must be Dense"):
        planner.Planner(planner.Topology(4), 64, train_).solve(model)


def _planned(ranks: RankGroup) -> None:
    """A model without a plan; and one whose duplicates were made one table."""
    case = Shared({}, ADAGRAD)
    oracle = make(case, ranks.device)
    model = sharding.DistributedModelParallel(
        copy.deepcopy(oracle), ranks, gradients=case.gradients
    )
    step_of_all(case, oracle, list(range(ranks.size)))
    backward(model(batch_on(ranks, case, ranks.rank)), ranks.rank)
    compare(model, oracle, 1e-5)
    points = compare_plans(
        planner.Planner(planner.Topology(ranks.size), 4),
        make(case, ranks.device),
        {"planned": model.plan},
        ranks,
        rounds=1,
    )
    assert len(points[0].seconds_per_round) == 1


def test_models_without_a_plan() -> None:
    worlds.run(2, _planned)


def _duplicates_shared(ranks: RankGroup) -> None:
    torch.manual_seed(4)
    rule = optim.Adagrad(0.1)
    item = emblib.EmbeddingBagConfig(ROWS["item"], DIMS["item"], "item", ["f0"])
    bags = emblib.EmbeddingBagCollection([item], optimizer=rule)
    item = emblib.EmbeddingConfig(ROWS["item"], DIMS["item"], "item", ["f1"])
    model: Any = torch.nn.ModuleDict(
        {"bags": bags, "vectors": emblib.EmbeddingCollection([item], optimizer=rule)}
    )
    model.to(ranks.device)
    plan = {path: {"item": row_wise()} for path in ("bags", "vectors")}
    with pytest.warns(UserWarning, match="share_tables"):
        sharding.shard(copy.deepcopy(model), plan, ranks)
    emblib.share_tables(model)
    sharded: Any = sharding.shard(
        copy.deepcopy(model), plan, ranks, gradients=GradientReduction.SUM
    )
    assert emblib.duplicate_tables(sharded) == {}
    same = batch_of(1, 4).to(ranks.device)
    for one, factor in ((model, ranks.size), (sharded, 1)):
        loss = one["bags"](same).values().sum() + one["vectors"](same)["f1"].values().sum()
        (factor * loss).backward()
    for path in ("bags", "vectors"):
        compare_tables(sharded[path], model[path], 1e-5)
    with pytest.raises(TypeError, match="before the model is sharded"):
        emblib.share_tables(torch.nn.ModuleDict({"a": sharded["bags"], "b": bags}))


def test_duplicates_become_one_table_over_ranks() -> None:
    worlds.run(2, _duplicates_shared)


def _replicas(ranks: RankGroup) -> None:
    """Replicas of the tables are averaged once, and stay equal."""
    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    case = Shared(PLANS["mixed"], optim.SGD(0.1), gradients="mean")
    oracle = make(case, ranks.device)
    inner = replace_size(ranks, 2)
    model = sharding.ReplicatedModelParallel(
        copy.deepcopy(oracle), mesh, plan=plan_of(case, inner), wrap="none"
    )
    for step in range(2):
        numbers = [10 * step + r for r in range(ranks.size)]
        step_of_all(case, oracle, numbers)
        backward(model(batch_on(ranks, case, numbers[ranks.rank])), numbers[ranks.rank])
        model.sync()
        for path, part in sharded_modules(model.module).items():
            compare_tables(part, oracle.get_submodule(path), 1e-5)


def replace_size(ranks: RankGroup, size: int) -> Any:
    """What a plan needs to know of a group of `size` ranks."""
    return SimpleNamespace(size=size, local_size=size)


def test_replicas_are_averaged_once() -> None:
    worlds.run(4, _replicas)


@pytest.mark.parametrize("shared", [3, {"t": 3}])
@pytest.mark.parametrize(
    ("sharded", "collection", "config"),
    [
        (
            sharding.ShardedEmbeddingBagCollection,
            emblib.EmbeddingBagCollection,
            emblib.EmbeddingBagConfig,
        ),
        (sharding.ShardedEmbeddingCollection, emblib.EmbeddingCollection, emblib.EmbeddingConfig),
    ],
)
def test_shared_must_be_shards_by_name(
    shared: object, sharded: Any, collection: Any, config: Any
) -> None:
    source = collection([config(4, 4, feature_names=["f"], name="t")], "cpu")
    with pytest.raises(TypeError, match="shared must have SharedTableShards by table name"):
        sharded(source, {}, shared=shared)
