"""Gradients of a model over ranks are clipped by one norm: that of the whole model."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import optim
from emblib.collections import EmbeddingBagCollection, EmbeddingBagConfig
from emblib.collections.optimizers import (
    FusedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    gradient_norms,
)
from emblib.collections.optimizers.gradient_norms import GradientShare, mark_gradient
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import DistributedModelParallel, clip_grad_norm_, shard
from emblib.sharding.ranks import RankGroup
from emblib.sharding.sharding_types import data_parallel, row_wise, table_wise
from emblib.storage import Dense, TensorTrain
from tests.sharding import worlds

TRAIN = TensorTrain((2,), (4, 6), (2, 2))
TABLES = ("r", "t", "d", "tt")
INF, NAN = float("inf"), float("nan")
EXAMPLES, ROWS, STEPS, BOUND = 8, 24, 2, 0.25


class Net(nn.Module):
    """Tables without a fused optimizer, and a dense part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        tables = [
            EmbeddingBagConfig(ROWS, 4, name, storage=TRAIN if name == "tt" else Dense())
            for name in TABLES
        ]
        self.sparse = EmbeddingBagCollection(tables)
        self.dense = nn.Linear(16, 1)  # of which fully_shard leaves the second rank nothing

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """A loss whose gradients are larger than the bound."""
        return (self.dense(self.sparse(ids).values()) * 10).square().mean()


def batch(step: int, rank: int, size: int) -> KeyedJaggedTensor:
    """The examples of a rank: consecutive ones of all."""
    ids = torch.randint(ROWS, (4, EXAMPLES), generator=torch.Generator().manual_seed(step))
    # Rank 0 alone has these, so that the norms of the ranks' own gradients differ much.
    ids[:, : EXAMPLES // 4] = 1
    own = ids.chunk(size, dim=1)[rank].reshape(-1)
    return KeyedJaggedTensor(list(TABLES), own, lengths=torch.ones_like(own))


def train(model: nn.Module, rank: int, size: int, way: str, norm_type: float) -> list[float]:
    """Steps of SGD with clipped gradients; the norms."""
    named = dict(model.named_parameters())
    plain = KeyedOptimizerWrapper(named, partial(torch.optim.SGD, lr=0.1))
    clipping = GradientClippingOptimizer(plain, GradientClipping.NORM, BOUND, norm_type)
    norms = []
    for step in range(STEPS):
        plain.zero_grad()
        model(batch(step, rank, size)).backward()
        if way == "model":
            norms.append(clip_grad_norm_(model, BOUND, norm_type))
        elif way == "parameters":
            norms.append(clip_grad_norm_(model.parameters(), BOUND, norm_type))
        elif way == "torch":
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), BOUND, norm_type))
        (clipping if way == "optimizer" else plain).step()
    return [float(norm) for norm in norms]


Found = tuple[list[float], dict[str, Tensor]]


def _over_ranks(ranks: RankGroup, wrap: str, way: str, norm_type: float) -> Found:
    # The last rank of four has no part of a table but the rows.
    rules = {
        "r": row_wise(),
        "t": table_wise(0),
        "d": data_parallel(),
        "tt": row_wise([0, ranks.size // 2]),
    }
    if ranks.size == 1:
        rules["tt"] = table_wise(0)
    model = DistributedModelParallel(Net(), ranks, plan={"sparse": rules}, wrap=wrap)
    norms = train(model, ranks.rank, ranks.size, way, norm_type)
    state = model.state_dict()
    return norms, {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in state.items()
    }


def whole(norm_type: float) -> Found:
    """The model in one process, with torch's own function."""
    model = Net()
    norms = train(model, 0, 1, "torch", norm_type)
    assert min(norms) > 2 * BOUND  # it is clipped
    return norms, dict(model.state_dict())


def assert_same(found: list[Found], expected: Found) -> None:
    """Each rank has what the whole model has, and all ranks the same bits."""
    for norms, state in found:
        if norms:
            torch.testing.assert_close(norms, expected[0])
            assert norms == found[0][0]
        for name, value in expected[1].items():
            torch.testing.assert_close(state[name], value, msg=lambda text, n=name: f"{n}: {text}")
            assert torch.equal(state[name], found[0][1][name]), name


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("way", "norm_type"), [("optimizer", 2.0), ("model", 2.0), ("parameters", float("inf"))]
)
def test_one_norm_of_the_whole_model(size: int, way: str, norm_type: float) -> None:
    found = worlds.run(size, _over_ranks, "ddp", way, norm_type)
    assert_same(found, whole(norm_type))


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_one_norm_with_a_dense_part_in_parts(norm_type: float) -> None:
    found = worlds.run(2, _over_ranks, "fully_shard", "model", norm_type)
    assert_same(found, whole(norm_type))


class OtherRank:
    """A second rank with the same arguments, and gradients of other norms, or none."""

    def __init__(self, shards: float, replicas: float = 0.0) -> None:
        self.numbers = torch.tensor([shards, replicas, 0.0])

    def all_gather_floats(self, numbers: Tensor) -> Tensor:
        """Return the numbers of both ranks."""
        assert numbers.device.type == "cpu"
        return torch.stack([numbers, torch.cat([self.numbers, numbers[3:]])])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("values", [[], [3.0, -4.0]])
def test_a_rank_whose_gradients_have_no_rows(norm_type: float, values: list[float]) -> None:
    """Of a batch without a lookup of its tables, sparse and dense."""
    other = OtherRank(2.0)
    rows, table, shard = (nn.Parameter(torch.ones(n, 2)) for n in (3, 5, 0))
    at = torch.zeros(1, len(values) // 2, dtype=torch.int64)
    of_rows = torch.tensor(values).view(-1, 2)
    rows.grad = torch.sparse_coo_tensor(at, of_rows, (3, 2), is_coalesced=True)
    shard.grad = torch.zeros(0, 2)
    for parameter in (rows, table, shard):
        mark_gradient(parameter, GradientShare.SHARD, other)
    norm = gradient_norms.clip_grad_norm_([rows, table, shard], 1.0, norm_type)
    expected = torch.linalg.vector_norm(torch.tensor([*values, 2.0]), norm_type)
    torch.testing.assert_close(norm, expected)
    scaled = torch.tensor(values).view(-1, 2) / expected
    torch.testing.assert_close(rows.grad._values(), scaled)


def _no_part(ranks: RankGroup, wrap: str) -> list[float]:
    """A model of one table: the second rank has no parameter at all, or a dense one alone."""
    norms = []
    for model in (EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 4, "t")]), Net()):
        path = "sparse" if isinstance(model, Net) else ""
        rules = {name: table_wise(0) for name in (TABLES if path else ("t",))}
        model = DistributedModelParallel(model, ranks, plan={path: rules}, wrap=wrap)
        if path:
            model(batch(0, ranks.rank, ranks.size)).backward()
            norms.append(float(clip_grad_norm_(model.parameters(), BOUND)))
        else:
            ids = KeyedJaggedTensor(["t"], torch.tensor([1]), lengths=torch.tensor([1]))
            model(ids).values().sum().backward()
            norms.append(float(clip_grad_norm_(model, BOUND)))
    for name, parameter in model.named_parameters():
        if name.startswith("sparse"):
            parameter.grad = torch.full_like(parameter, float("nan"))
    with pytest.raises(RuntimeError, match="all gradients together have a norm of nan"):
        clip_grad_norm_(model, BOUND, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"max_norm must be the same on all ranks, got 1\.0 to"):
        clip_grad_norm_(model, 1.0 + ranks.rank)
    # A wrong argument of one rank raises on both.
    is_wrong = ranks.rank == 1
    for wrong_arguments, message in (
        ({"error_if_nonfinite": "no"}, "error_if_nonfinite must be True or False"),
        ({"norm_type": 0.0}, "norm_type must be above 0"),
        ({"max_norm": -1.0}, "max_norm must be >= 0"),
    ):
        arguments: dict[str, Any] = {"max_norm": BOUND, **(wrong_arguments if is_wrong else {})}
        match = message if is_wrong else "a wrong argument on another rank"
        with pytest.raises((TypeError, ValueError, RuntimeError), match=match):
            clip_grad_norm_(model, **arguments)
    return norms


@pytest.mark.parametrize("wrap", ["ddp", "fully_shard"])
def test_a_rank_without_a_part_takes_part(wrap: str) -> None:
    first, second = worlds.run(2, _no_part, wrap)
    assert first == second
    assert first[0] == 2.0  # one row of 4, the mean over two ranks of 1 each


def clipped_norm_of_deferred_tables(ranks: RankGroup) -> float:
    """Return the norm of a step that clips the gradients of a table that rank 0 has."""
    config = EmbeddingBagConfig(8, 4, "t")
    bags = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1, deferred=True))
    model = shard(nn.ModuleDict({"bags": bags}), {"bags": {"t": table_wise(0)}}, ranks)
    optimizer = GradientClippingOptimizer(FusedOptimizer.of(model), GradientClipping.NORM, 1.0)
    batch = KeyedJaggedTensor(["t"], torch.tensor([3]), lengths=torch.tensor([1])).to(ranks.device)
    model["bags"](batch).values().sum().backward()
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None
    return float(optimizer.last_total_grad_norm)


def test_a_rank_without_tables_takes_part_in_the_norm_of_an_optimizer() -> None:
    norms = worlds.run(2, clipped_norm_of_deferred_tables)
    assert norms[0] == norms[1] > 0


def clip_tables_that_backward_updates(ranks: RankGroup) -> None:
    """Clip a model whose table rank 0 has, by every way; then the dense part alone, and frozen."""
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t")], optimizer=optim.SGD(0.1))
    plan = {"0": {"t": table_wise(0)}}
    model = DistributedModelParallel(nn.Sequential(bags, nn.Linear(4, 1)), ranks, plan=plan)
    dense = model.module[1]
    for parameter in dense.parameters():
        parameter.grad = torch.ones_like(parameter)
    refusal = pytest.raises(ValueError, match="1 of the parameters are of tables that backward")
    with refusal:
        clip_grad_norm_(model, BOUND)
    with refusal:
        clip_grad_norm_(model.parameters(), BOUND)
    optimizer = GradientClippingOptimizer(model.fused_optimizer, GradientClipping.NORM, BOUND)
    with refusal:
        optimizer.step()
    assert all(parameter.grad.eq(1).all() for parameter in dense.parameters())
    assert float(clip_grad_norm_(dense.parameters(), BOUND)) == pytest.approx(5**0.5)
    model.module[0].requires_grad_(requires_grad=False)
    assert float(clip_grad_norm_(model, 1.0)) == pytest.approx(BOUND, rel=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_tables_that_backward_updates_are_refused_on_all_ranks(size: int) -> None:
    worlds.run(size, clip_tables_that_backward_updates)


def test_tables_that_backward_updates_are_not_clipped_by_value() -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "t")], optimizer=optim.SGD(0.1))
    optimizer = GradientClippingOptimizer(FusedOptimizer.of(bags), GradientClipping.VALUE, BOUND)
    with pytest.raises(ValueError, match="set its max_gradient"):
        optimizer.step()


def test_one_parameter_is_clipped_by_value() -> None:
    parameter = nn.Parameter(torch.ones(2, 2))
    parameter.grad = torch.full((2, 2), 5.0)
    gradient_norms.clip_grad_value_(parameter, BOUND)
    assert parameter.grad.eq(BOUND).all()


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), (NAN, 2.0), (1.0, 0.0), (INF, 0)])
def test_bounds_and_exponents_without_a_meaning_are_refused(
    max_norm: float, norm_type: float
) -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    with pytest.raises(ValueError, match=r"(max_norm must be >=|norm_type must be above) 0"):
        clip_grad_norm_(model, max_norm, norm_type)
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
