"""Plans and optimizers of models over ranks: where they come from, and what they do."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.collections.optimizers import (
    CombinedOptimizer,
    KeyedOptimizerWrapper,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel
from emblib.sharding.plan import ShardingPlan
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import World, row_wise, table_wise
from tests.sharding import worlds
from tests.sharding.pipeline_cases import (
    DIM,
    ROWS,
    Batch,
    Case,
    Net,
    dense_optimizer,
    make_batch,
    plain_loop,
    rules,
    values_of,
)

SIZE = 3


def _planned(ranks: RankGroup) -> tuple[ShardingPlan, list[float]]:
    torch.manual_seed(5)
    model = DistributedModelParallel(Net(), ranks)
    losses = list(plain_loop(model, [make_batch(ranks.rank, SIZE)], 1))
    return model.plan, [loss.item() for loss in losses]


def test_a_model_without_a_plan_gets_one() -> None:
    (first, _), (second, _) = worlds.run(2, _planned)
    assert first.to_json() == second.to_json()
    assert first.world == World(2, 2)
    assert {path: set(tables) for path, tables in first.modules.items()} == {
        "bags": {"a", "b", "c"},
        "clicks": {"s"},
    }


def _sharding_types(ranks: RankGroup) -> set[str]:
    tables = [EmbeddingBagConfig(20_000, 128, "item")]
    model = DistributedModelParallel(
        EmbeddingBagCollection(tables, device="meta"), ranks, optimizer=optim.RowwiseAdagrad(0.1)
    )
    return {sharding.type.value for sharding in model.plan[""].values()}


def test_a_model_is_planned_for_the_optimizer_that_it_gets() -> None:
    # Columns apart would have a state per row and shard, and train otherwise.
    assert all("column_wise" not in types for types in worlds.run(2, _sharding_types))


def _one_collection(ranks: RankGroup) -> tuple[list[str], list[str], Tensor]:
    torch.manual_seed(5)
    net = Net()
    batch = make_batch(1, SIZE)
    expected = net.bags(batch.bags).values()
    model = DistributedModelParallel(net.bags, ranks, plan={"": rules(ranks.size)["bags"]})
    out = model(batch.bags)
    return list(model.plan.modules), list(out.keys()), out.values() - expected


@pytest.mark.parametrize("size", [1, 2])
def test_one_collection_is_a_model(size: int) -> None:
    for paths, keys, difference in worlds.run(size, _one_collection):
        assert (paths, keys) == ([""], ["a", "b", "c"])
        torch.testing.assert_close(difference, torch.zeros_like(difference))


def _scheduled(ranks: RankGroup) -> list[tuple[bool, float]]:
    """Whether the tables moved, with the rate that they had, in each of some steps."""
    model = Case((0,) * ranks.size).model(ranks)
    fused = model.fused_optimizer
    scheduler = torch.optim.lr_scheduler.LambdaLR(fused, lambda i: float(i % 2))
    found = []
    for i in range(4):
        before = values_of(model)
        fused.zero_grad()
        loss, _ = model(make_batch(i, SIZE))
        loss.backward()
        fused.step()
        after = values_of(model)
        moved = any(
            not torch.equal(value, before[place])
            for place, value in after.items()
            if place[0] == "bags" and place[-1] == "weight"
        )
        found.append((moved, fused.param_groups[0]["lr"]))
        scheduler.step()
    return found


def test_the_rates_of_the_tables_follow_a_scheduler() -> None:
    for found in worlds.run(2, _scheduled):
        assert [moved for moved, _ in found] == [False, True, False, True]


def _groups(ranks: RankGroup) -> list[dict[str, Any]]:
    """Groups, on a rank without tables too, after a scheduler, a resume and moments of torch."""
    optimizer = optim.Adam(0.5)
    configs = [EmbeddingBagConfig(ROWS, DIM, "a", ("a",), optimizer=optimizer)]
    models = [
        DistributedModelParallel(
            nn.ModuleDict({"bags": EmbeddingBagCollection(configs)}),
            ranks,
            plan={"bags": {"a": table_wise(0)}},
        )
        for _ in range(2)
    ]
    first, second = (model.fused_optimizer for model in models)
    schedule = torch.optim.lr_scheduler.OneCycleLR(first, 0.5, 10)
    for _ in range(3):
        first.step()
        schedule.step()
    second.load_state_dict(first.state_dict())
    found = [{k: v for k, v in o.param_groups[0].items() if k != "params"} for o in (first, second)]
    weight = nn.Parameter(torch.zeros(ROWS, DIM))
    theirs = torch.optim.AdamW([weight], lr=0.125)
    weight.grad = torch.ones_like(weight)
    theirs.step()
    first.load_state_dict(theirs.state_dict())
    found.append({k: v for k, v in first.param_groups[0].items() if k != "params"})
    steps = [float(v["hyper"].full_tensor()[1]) for v in first.state_dict()["state"].values()]
    assert steps == [1.0]
    return found


def test_groups_agree_on_all_ranks() -> None:
    one, two = worlds.run(2, _groups)
    assert one == two
    assert one[0]["betas"] != (0.9, 0.999)
    assert one[0] == one[1]
    assert (one[2]["lr"], one[2]["weight_decay"]) == (0.125, 0.01)


def _given_before(ranks: RankGroup, how: str) -> dict[Any, Tensor]:
    """Trained by one optimizer for all, by optimizers that the tables got in one way or another."""
    torch.manual_seed(5)
    adagrad = optim.RowwiseAdagrad(lr=0.1)
    net = PlainNet(adagrad if how == "config" else None)
    if how == "in backward":
        apply_optimizer_in_backward(optim.RowwiseAdagrad, net.bags.parameters(), {"lr": 0.1})
    if how == "torch's own":
        # What it makes is of torch, and a table knows the class by its name.
        arguments = {"lr": 0.1, "eps": adagrad.eps}
        _apply_optimizer_in_backward(RowWiseAdagrad, net.bags.parameters(), arguments)
        net.bags.to("cpu")  # rebinds parameters, which must keep what torch said of them
    model = DistributedModelParallel(
        net,
        ranks,
        plan={"bags": {"a": row_wise(), "b": table_wise(0)}},
        optimizer=adagrad if how == "argument" else None,
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    assert list(dense.params) == ["top.weight", "top.bias"]
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    for i in range(3):
        optimizer.zero_grad()
        model(make_batch(i + 10 * ranks.rank, SIZE)).backward()
        optimizer.step()
    return values_of(model)


class RowWiseAdagrad(torch.optim.SGD):
    """Stands for the class that TorchRec has; it is never stepped."""

    def __init__(self, params: Any, lr: float = 0.01, eps: float = 1e-10) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["eps"] = eps


class PlainNet(nn.Module):
    """Two tables whose optimizers come from wherever."""

    def __init__(self, optimizer: optim.Optimizer | None) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, DIM, name, optimizer=optimizer) for name in "ab"]
        )
        self.top = nn.Linear(2 * DIM, 1)

    def forward(self, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(
            self.top(self.bags(batch.bags).values()).squeeze(1), batch.labels
        )


def test_ways_to_give_tables_an_optimizer_are_equal() -> None:
    expected = worlds.run(2, _given_before, "config")
    assert {place[-1] for place in expected[0] if not isinstance(place, str)} > {"weight"}
    for how in ("argument", "in backward", "torch's own"):
        for values, by_config in zip(worlds.run(2, _given_before, how), expected, strict=True):
            torch.testing.assert_close(values, by_config, rtol=0, atol=0)


def _by_torch_alone(ranks: RankGroup) -> list[tuple[str, ...]]:
    """Error and notes of what torch may say of tables that they do not run."""

    def told(optimizer: Any, arguments: dict[str, Any], steps: int = 0) -> tuple[str, ...]:
        net = PlainNet(None)
        _apply_optimizer_in_backward(optimizer, net.bags.parameters(), arguments)
        for i in range(steps):
            net(make_batch(i, SIZE)).backward()
        with pytest.raises((TypeError, ValueError)) as caught:
            DistributedModelParallel(net, ranks, plan={"bags": {"a": row_wise(), "b": row_wise()}})
        return str(caught.value), *getattr(caught.value, "__notes__", ())

    def twice() -> tuple[str, ...]:
        net = PlainNet(None)
        for rate in (0.1, 0.2):
            _apply_optimizer_in_backward(torch.optim.SGD, net.bags.parameters(), {"lr": rate})
        with pytest.raises(TypeError, match="already has an optimizer in backward, from torch's"):
            apply_optimizer_in_backward(torch.optim.SGD, net.bags.parameters(), {"lr": 0.1})
        with pytest.raises(ValueError, match="table 'a' must have one optimizer") as caught:
            DistributedModelParallel(net, ranks, plan={"bags": {"a": row_wise(), "b": row_wise()}})
        return (str(caught.value),)

    return [
        told(torch.optim.RMSprop, {"lr": 0.1}),
        told(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        told(torch.optim.Adagrad, {"lr": 0.1}, steps=1),
        twice(),
    ]


def test_what_torch_applies_in_backward_is_run_by_tables_or_refused() -> None:
    """Unsharded, torch's own function works as it does for any parameter; sharded, fused."""
    for of_rank in worlds.run(2, _by_torch_alone):
        (unknown, note), (momentum, _), (trained,), _ = of_rank
        assert "tables run torch.optim.SGD, Adagrad, Adam or AdamW" in unknown
        assert "(of table 'a', by torch's own _apply_optimizer_in_backward)" in note
        assert "{'momentum': 0.9} of SGD are not supported" in momentum
        assert "table 'a' has made steps" in trained


def test_torch_steps_unsharded_tables_itself() -> None:
    """Its hook steps the dense gradient of a table, as that of any parameter."""
    configs = [EmbeddingBagConfig(9, 4, "a")]
    collection, twin = EmbeddingBagCollection(configs), EmbeddingBagCollection(configs)
    twin.load_state_dict(collection.state_dict())
    _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    apply_optimizer_in_backward(torch.optim.SGD, twin.parameters(), {"lr": 0.5})
    batch = KeyedJaggedTensor(["a"], torch.tensor([1, 3, 1]), None, torch.tensor([2, 1]))
    for one in (collection, twin):
        one.to("cpu")
        one(batch).values().square().sum().backward()
        assert not list(in_backward_optimizer_filter(one.named_parameters()))
    assert torch.equal(*[one.embedding_bags["a"].weight for one in (collection, twin)])
    with pytest.raises(TypeError, match="already has an optimizer in backward, from torch's own"):
        apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    unmade = EmbeddingBagCollection(configs, "meta")
    _apply_optimizer_in_backward(torch.optim.SGD, unmade.parameters(), {"lr": 0.5})
    with pytest.raises(RuntimeError, match=r"table 'a' while it was on.*apply it after to_empty"):
        unmade.to_empty(device="cpu")


def _left_out(ranks: RankGroup) -> None:
    DistributedModelParallel(Net(), ranks, plan={"bags": rules(2)["bags"]})


def test_tables_that_the_plan_leaves_out_are_told() -> None:
    says = r"(?s)must belong to collections in the plan.*'clicks.embeddings.s.weight'.*to the plan"
    with pytest.raises(worlds.RankError, match=says):
        worlds.run(2, _left_out)


def _dense_in_backward(ranks: RankGroup) -> None:
    net = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, net.top.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match=r"\['top.weight', 'top.bias'\] have an optimizer.*only"):
        DistributedModelParallel(net, ranks, plan=rules(2))


def test_an_optimizer_in_backward_of_the_dense_part_is_refused() -> None:
    worlds.run(2, _dense_in_backward)


def test_the_optimizer_of_the_dense_part_has_no_tables() -> None:
    model = Case((0,)).model(RankGroup.single())
    optimizer = dense_optimizer(model)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sorted(names[id(p)] for p in optimizer.param_groups[0]["params"]) == sorted(
        ["bottom.weight", "bottom.bias", "top.weight", "top.bias"]
    )


def test_a_second_optimizer_by_torch_is_refused() -> None:
    table = EmbeddingBagConfig(10, 8, "t", ("f",))
    parameter = next(EmbeddingBagCollection([table], optimizer=optim.SGD(0.1)).parameters())
    with pytest.raises(AttributeError, match="by an optimizer that it already has"):
        _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": 0.1})
    with pytest.raises(AttributeError, match="'ViewParameter' object has no attribute 'x'"):
        _ = parameter.x  # type: ignore[attr-defined]
