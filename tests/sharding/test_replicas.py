"""Replicas of a sharded model: what they train, when they are equal, and what they refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed import init_device_mesh

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import (
    DistributedModelParallel,
    RankGroup,
    ReplicatedModelParallel,
    TrainPipelineSparseDist,
    clip_grad_norm_,
    row_wise,
    table_wise,
)
from emblib.sharding.planner import PlanError, Planner, Topology
from emblib.storage import Hash
from tests.sharding import worlds
from tests.sharding.pipeline_cases import (
    PLANS,
    Net,
    batches_of,
    dense_optimizer,
    make_batch,
    plain_loop,
    to_device,
    values_of,
)

STEPS = 3


def net(optimizer: optim.Optimizer) -> Net:
    """The net of the pipelines' tests, all tables with one optimizer."""
    torch.manual_seed(5)
    made = Net()
    made.bags.set_optimizers(dict.fromkeys("abc", optimizer))
    made.clicks.set_optimizers({"s": optimizer})
    return made


def replicas(
    ranks: RankGroup, plan: str = "parts", wrap: str = "ddp", size: int = 2, **options: Any
) -> ReplicatedModelParallel:
    """Replicas over `size` of four ranks each."""
    names = ("replicas", "shards")
    mesh = init_device_mesh(ranks.device.type, (4 // size, size), mesh_dim_names=names)
    model = net(options.pop("optimizer", optim.SGD(0.1))).to(ranks.device)
    return ReplicatedModelParallel(model, mesh, plan=PLANS[plan](size), wrap=wrap, **options)


def assert_equal_replicas(model: ReplicatedModelParallel) -> None:
    """Compare the values of this rank with those of its counterparts in the other replicas."""
    for other in model.replicas.gather_objects(values_of(model)):
        for key, value in values_of(model).items():
            assert torch.equal(value, other[key]), key


def _synchronised(ranks: RankGroup, plan: str, wrap: str) -> None:
    """With SGD and a sync per step, replicas train as one model over all ranks does."""
    model = replicas(ranks, plan, wrap)
    whole = DistributedModelParallel(
        net(optim.SGD(0.1)).to(ranks.device), ranks, plan=PLANS[plan](4), wrap=wrap
    )
    batches = [make_batch(10 * ranks.rank + i, 3) for i in range(STEPS)]
    losses, expected = plain_loop(model, batches, STEPS), plain_loop(whole, batches, STEPS)
    for loss, wanted in zip(losses, expected, strict=True):
        torch.testing.assert_close(loss, wanted)
        model.sync()
        assert_equal_replicas(model)
    torch.testing.assert_close(tables(model, model.ranks), tables(whole, ranks))


def tables(model: Any, ranks: RankGroup) -> dict[str, Tensor]:
    """The whole tables, of the parts on all ranks of a group."""
    found: dict[str, Tensor] = {}
    for values in ranks.gather_objects(values_of(model)):
        for key, value in values.items():
            if isinstance(key, tuple) and key[-1] == "weight":
                path, table, shard, _ = key
                target = found.setdefault(f"{path}.{table}", torch.full((40, 8), 7.0))
                target[slice(*shard.rows), slice(*shard.columns)] = value.cpu()
    return dict(sorted(found.items()))


@pytest.mark.parametrize(
    ("plan", "wrap"), [("parts", "ddp"), ("copies", "ddp"), ("parts", "fully_shard")]
)
def test_with_sgd_and_a_sync_per_step_it_is_one_model(plan: str, wrap: str) -> None:
    worlds.run(4, _synchronised, plan, wrap)


UNSHARED_STATES = ("prev_iter", "row_counter")


def _averaged(ranks: RankGroup, states: str, chunk: int) -> None:
    """A sync makes of each value the mean over replicas, but for steps and counts of updates."""
    model = replicas(ranks, optimizer=optim.RowwiseAdagrad(0.1, counter=optim.Counter()))
    batches = [make_batch(10 * ranks.rank + i, 3) for i in range(STEPS)]
    list(plain_loop(model, batches, STEPS))
    mine = values_of(model)
    by_replica = model.replicas.gather_objects(mine)
    assert any(not torch.equal(v, by_replica[1 - model.replicas.rank][k]) for k, v in mine.items())
    with mock.patch(
        "emblib.sharding.replicas._VALUES_PER_MESSAGE", chunk
    ):  # a message may cut a table
        model.sync(optimizer_states=states == "with states")
    for key, value in values_of(model).items():
        averaged = states == "with states" or not isinstance(key, tuple) or key[-1] == "weight"
        averaged = averaged and (not isinstance(key, tuple) or key[-1] not in UNSHARED_STATES)
        mean = (by_replica[0][key] + by_replica[1][key]) / 2
        assert torch.equal(value, mean if averaged else mine[key]), key


@pytest.mark.parametrize("states", ["with states", "without"])
@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_sync_averages_tables_and_states(states: str, chunk: int) -> None:
    worlds.run(4, _averaged, states, chunk)


def _from_meta(ranks: RankGroup) -> None:
    """Tables that are drawn when they are sharded start equal on all replicas."""
    mesh = init_device_mesh(ranks.device.type, (2, 2))
    torch.manual_seed(ranks.rank)
    tables = EmbeddingBagCollection([EmbeddingBagConfig(40, 8, "t")], device="meta")
    model = ReplicatedModelParallel(
        tables, mesh, plan={"": {"t": row_wise()}}, optimizer=optim.Adagrad(0.1)
    )
    assert_equal_replicas(model)
    assert all(value.std() > 0 for key, value in values_of(model).items() if key[-1] == "weight")
    # Planned by itself, the plan is the same on all ranks.
    planned = ReplicatedModelParallel(
        EmbeddingBagCollection([EmbeddingBagConfig(40, 8, "t")]), mesh, optimizer=optim.SGD(0.1)
    )
    assert len(set(ranks.gather_objects(str(planned.plan)))) == 1


def test_replicas_start_equal() -> None:
    worlds.run(4, _from_meta)


def _rates_of_one_replica(ranks: RankGroup) -> str:
    """Rank 3, of the second replica, changes its learning rates before a sync."""
    model = replicas(ranks, wrap="none")
    before = values_of(model)
    if ranks.rank == 3:
        for group in model.fused_optimizer.param_groups:
            group["lr"] = 0.5
    with pytest.raises(TypeError, match="optimizer_states must be True or False"):
        model.sync(optimizer_states="no" if ranks.rank == 3 else True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the same on all ranks, got \[True, True, True, "):
        model.sync(optimizer_states=ranks.rank != 3)
    with pytest.raises(RuntimeError, match=r"0\.1 on ranks? .* and 0\.5 on rank 3") as raised:
        model.sync()
    torch.testing.assert_close(values_of(model), before, rtol=0, atol=0)
    return str(raised.value)


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks on GPUs compare no hyperparameters")
def test_a_sync_refuses_rates_that_differ() -> None:
    assert len(set(worlds.run(4, _rates_of_one_replica))) == 1


def _in_pipeline(ranks: RankGroup) -> int:
    """Loaders of different lengths in different replicas end together."""
    model = replicas(ranks)
    pipeline = TrainPipelineSparseDist(model, dense_optimizer(model))
    counts = (3, 0, 1, 4)
    return len(list(pipeline.run(batches_of(ranks.rank, counts))))


def test_a_pipeline_drains_the_loaders_of_all_replicas() -> None:
    assert worlds.run(4, _in_pipeline) == [4, 4, 4, 4]


def _clipped(ranks: RankGroup, size: int, wrap: str) -> list[float]:
    """Steps with clipped gradients; the tables of each replica have other gradients."""
    model = replicas(ranks, wrap=wrap, size=size, optimizer=optim.SGD(0.1, deferred=True))
    optimizer = dense_optimizer(model)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        model(to_device(make_batch(10 * ranks.rank + step, 3), ranks.device))[0].backward()
        whole = [model, list(model.parameters())][step % 2]
        norms.append(float(clip_grad_norm_(whole, 1e-3)))
        optimizer.step()
        model.fused_optimizer.step()
        model.fused_optimizer.zero_grad()
        model.sync()
        assert_equal_replicas(model)
    with pytest.raises(ValueError, match=r"max_norm must be the same on all ranks, got 1\.0 to"):
        clip_grad_norm_(model, 1.0 + model.replicas.rank)
    return norms


@pytest.mark.parametrize(("size", "wrap"), [(2, "ddp"), (1, "ddp"), (2, "fully_shard")])
def test_replicas_clip_their_gradients_alike(size: int, wrap: str) -> None:
    first, *others = worlds.run(4, _clipped, size, wrap)
    assert others == [first] * 3


def _overflowed(ranks: RankGroup) -> None:
    """Rank 3, of the second replica, overflows; then the replicas have other scales."""
    model = replicas(ranks, wrap="none")
    before = values_of(model)
    scaler = torch.amp.GradScaler(ranks.device.type, init_scale=64.0)
    batch = to_device(make_batch(10 * ranks.rank, 3), ranks.device)
    loss = model(batch)[0] * (torch.inf if ranks.rank == 3 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(model.fused_optimizer)
    scaler.update()
    assert scaler.get_scale() == 32.0
    torch.testing.assert_close(values_of(model), before, rtol=0, atol=0)
    if ranks.device.type == "cpu":
        scaler.update(32.0 / (1 + model.replicas.rank))
        with pytest.raises(RuntimeError, match=r"different scales, 16\.0 to 32\.0"):
            scaler.scale(model(batch)[0]).backward()
        scaler.update(32.0)  # until then, backwards of this process that it did not scale raise


def test_no_replica_makes_a_step_that_overflows_in_one() -> None:
    worlds.run(4, _overflowed)


def _scaled_in_part(ranks: RankGroup, scaled_ranks: tuple[int, ...]) -> str:
    """The first losses of some ranks are scaled; after the error all train without a scaler."""
    model = replicas(ranks, wrap="none")
    before = values_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=ranks.rank in scaled_ranks)
    batch = make_batch(10 * ranks.rank, 3)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        scaler.scale(model(batch)[0]).backward()
    torch.testing.assert_close(values_of(model), before, rtol=0, atol=0)
    scaler.update(64.0)
    model(batch)[0].backward()
    return str(raised.value)


@pytest.mark.skipif(worlds.ON_GPUS, reason="ranks with GPUs do not compare losses")
@pytest.mark.parametrize("scaled_ranks", [(2, 3), (3,)])
def test_a_loss_scaled_in_part_of_the_replicas_raises_on_all_ranks(
    scaled_ranks: tuple[int, ...],
) -> None:
    for text in worlds.run(4, _scaled_in_part, scaled_ranks):
        assert "GradScaler" in text
        assert "unused on rank 0 and used on rank 1" in text or "rank 1 and not that of" in text


def _saved(ranks: RankGroup, folder: Path) -> dict[str, Tensor]:
    model = replicas(ranks)
    list(plain_loop(model, [make_batch(10 * ranks.rank, 3)], 1))
    model.sync()
    dcp.save(model.state_dict(), checkpoint_id=folder)
    return tables(model, model.ranks)


def test_checkpoints_are_those_of_the_model(tmp_path: Path) -> None:
    (expected, *_) = worlds.run(4, _saved, tmp_path / "checkpoint")
    alone = net(optim.SGD(0.1))
    state = alone.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for name, table in expected.items():
        path, _, key = name.partition(".")
        kind = "embeddings" if path == "clicks" else "embedding_bags"
        assert torch.equal(state[f"{path}.{kind}.{key}.weight"], table), name


def _refused(ranks: RankGroup) -> list[str]:
    mesh = init_device_mesh(ranks.device.type, (2, 2))
    hashed = EmbeddingBagConfig(40, 8, "t", storage=Hash())
    other = {"t": table_wise(0) if ranks.rank < 2 else row_wise()}

    def collection(config: EmbeddingBagConfig) -> EmbeddingBagCollection:
        return EmbeddingBagCollection([config])

    sgd, plain = optim.SGD(0.1), EmbeddingBagConfig(40, 8, "t")
    rules = {"": {"t": row_wise()}}
    is_wrong = ranks.rank == 3

    def with_options(**options: Any) -> ReplicatedModelParallel:
        options = {"plan": rules, "optimizer": sgd} | options
        return ReplicatedModelParallel(collection(plain), mesh, **options)

    calls = [
        lambda: with_options(local_size=3 if is_wrong else None),
        lambda: with_options(plan=None if is_wrong else rules),
        lambda: with_options(wrap="none" if is_wrong else "ddp"),
        lambda: with_options(optimizer=optim.SGD(0.2) if is_wrong else sgd),
        lambda: ReplicatedModelParallel(collection(plain), ranks.group, plan=rules),
        lambda: ReplicatedModelParallel(collection(hashed), mesh, plan=rules, optimizer=sgd),
        lambda: ReplicatedModelParallel(collection(plain), mesh, plan=rules),
        lambda: ReplicatedModelParallel(collection(plain), mesh, plan={"": other}, optimizer=sgd),
    ]
    texts = []
    for call in calls:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            call()
        texts.append(str(caught.value))
    features = KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
    model = ReplicatedModelParallel(collection(plain), mesh, plan=rules, optimizer=sgd)
    model(features).values().sum().backward()
    model.sync()
    return texts


def test_what_it_refuses() -> None:
    for texts in worlds.run(4, _refused):
        for text, words in zip(
            texts,
            (
                "local_size is None on ranks 0-2 and 3 on rank 3",
                "plan is given on ranks 0-2 and None on rank 3",
                "wrap is DDP on ranks 0-2 and none on rank 3",
                "optimizer.lr is 0.1 on rank 0 and 0.2 on rank 1",
                "mesh must be a DeviceMesh [replicas, shards]",
                "tables ['t'] are hash tables",
                "tables of replicas need a fused optimizer",
                "table t of the model: sharding is ",
            ),
            strict=True,
        ):
            assert words in text


def _planned_by_the_first(ranks: RankGroup, replica_without_memory: int) -> str:
    """Make two replicas, one of whose planners finds no plan; return the error, if any."""
    mesh = init_device_mesh(ranks.device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    memory = 1 if ranks.rank // 2 == replica_without_memory else 1 << 34
    planner = Planner(Topology(2, memory=memory), 8)
    try:
        ReplicatedModelParallel(net(optim.SGD(0.1)).to(ranks.device), mesh, planner=planner)
    except (PlanError, RuntimeError) as error:
        return str(error)
    return ""


def test_the_first_replica_plans_for_all() -> None:
    assert worlds.run(4, _planned_by_the_first, 1) == [""] * 4
    errors = worlds.run(4, _planned_by_the_first, 0)
    assert len(set(errors)) == 1
    assert errors[0].startswith("nothing is left for tables on rank 0")
