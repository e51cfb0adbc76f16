"""Modules of dynamic tables are copied, moved, compiled and grown, and go on as they were."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from emblib import DynamicEmbeddingBags, DynamicSpec, optim
from emblib.dynamic.saving import snapshots
from tests.saved import saved_and_loaded

SGD = optim.SGD(0.01)


def _each(ids: list[int] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """A bag an id."""
    ids = torch.as_tensor(ids, device=device)
    return ids, torch.arange(ids.numel() + 1, device=device)


def _one(
    spec: DynamicSpec, device: torch.device, optimizer: optim.Optimizer = SGD
) -> DynamicEmbeddingBags:
    return DynamicEmbeddingBags([spec], optimizer, seed=0, device=device)


def _trained(device: torch.device) -> DynamicEmbeddingBags:
    table = DynamicEmbeddingBags(
        [DynamicSpec(500, 4, name="a", initial_capacity=32), DynamicSpec(64, 4)],
        optim.Adam(lr=0.1),
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        ids = torch.randint(0, 300, (200,), generator=generator).to(device)
        table(ids, torch.arange(201, device=device)).sum().backward()
    return table


def _same(a: DynamicEmbeddingBags, b: DynamicEmbeddingBags, device: torch.device) -> None:
    """Both know the same, and go on to the same."""
    for step in range(2):
        ids = torch.arange(step, 200 + step, device=device)
        outs = [table(*_each(ids, device)) for table in (a, b)]
        assert torch.equal(*outs)
        for out in outs:
            out.square().sum().backward()
    one, two = snapshots.take(a), snapshots.take(b)
    assert torch.equal(one["index"]["tables"], two["index"]["tables"])
    for name in ("tags", "entries"):
        assert all(map(torch.equal, one["index"][name], two["index"][name]))
    # Slots that are empty keep what was in them, which no copy needs.
    for t in range(len(a.tables)):
        used = one["index"]["tags"][t] != 0
        for mine, theirs in zip(one["rows"][t], two["rows"][t], strict=True):
            assert torch.equal(mine[used.to(mine.device)], theirs[used.to(mine.device)])
    assert torch.equal(a.hyperparams, b.hyperparams)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "snapshot", "half", "train"])
def test_copies_go_on_alike(device: torch.device, how: str) -> None:
    table = _trained(device)
    if how == "deepcopy":
        other = copy.deepcopy(table)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(table))
    elif how == "save":
        other = saved_and_loaded(table, weights_only=False)
    elif how == "snapshot":
        other = DynamicEmbeddingBags(table.tables, table.optimizer, device=device)
        snapshots.restore(other, snapshots.take(table))
    else:
        other = copy.deepcopy(table)
        other = other.half() if how == "half" else other.to(device).train()
        assert other.weights.dtype == torch.float32
    assert other.weights.data_ptr() != table.weights.data_ptr()
    _same(table, other, device)


def test_moving_takes_what_is_in_use_along() -> None:
    """What `to` does between devices, here from the CPU to the CPU."""
    device = torch.device("cpu")
    for optimizer in (optim.Adam(lr=0.1), optim.External()):
        spec = DynamicSpec(3200, 4, name="a")
        table = DynamicEmbeddingBags([spec], optimizer, device=device)
        for _ in range(2):
            table(*_each(torch.arange(100), device)).square().sum().backward()
        other, weights = copy.deepcopy(table), table.weights
        before = table.weights.detach()
        table._move(torch.clone, device)
        assert table.weights is weights, "an optimizer still knows it"
        assert table.weights.data_ptr() != before.data_ptr()
        _same(table, other, device)
    with pytest.raises(ValueError, match="cannot be on meta"):
        table.to("meta")
    _same(table, other, device)


def test_large_capacities_cost_nothing_yet() -> None:
    """A copy or pickle of a module is as large as it has grown; memory is what is in use."""
    spec = DynamicSpec(1 << 31, 64, initial_capacity=32)
    table = _one(spec, torch.device("cpu"), optimizer=optim.Adam(lr=0.1))
    device = torch.device("cpu")
    table(*_each(torch.arange(10), device)).sum().backward()
    assert len(pickle.dumps(table)) < 100_000
    assert table.nbytes() == {"weights": 8192, "optimizer_state": 16384, "index": 32 * 17 + 64}
    copied = copy.deepcopy(table)
    assert torch.equal(copied(*_each([3], device)), table(*_each([3], device)))
    table.load_state_dict(table.state_dict())  # sets the clock back, which empties queues
    status = Path("/proc/self/status")
    if status.exists():
        resident_kb = int(status.read_text().split("VmRSS:")[1].split()[0])
        assert resident_kb < 4_000_000, "the tables alone would be 1.5 TB, the queues 4 GB"


def test_reserve_and_clear(device: torch.device) -> None:
    table = _one(DynamicSpec(1000, 4, initial_capacity=32), device)
    table(*_each(torch.arange(20), device)).sum().backward()
    before = table.table_rows(0)["weight"][table.find(0, torch.arange(20))].clone()
    table.reserve(0, 700)
    assert table.capacity(0) >= 700
    after = table.table_rows(0)["weight"][table.find(0, torch.arange(20))]
    assert torch.equal(before, after)
    table.reset_parameters()
    assert (table.size(0), table.capacity(0), table.step) == (0, 32, 0)


def test_compiled_models_break_at_the_table() -> None:
    """Outputs and updates are those of the same model in eager mode."""
    device = torch.device("cpu")
    tables = [_one(DynamicSpec(320, 4, initial_capacity=32), device) for _ in range(2)]

    def model(table: DynamicEmbeddingBags, ids: Tensor, offsets: Tensor) -> Tensor:
        return table(ids * 3, offsets).relu().sum(1)

    compiled = torch.compile(model, backend="eager")
    for size in (10, 40, 80):
        batch = _each(torch.arange(size), device)
        outs = [
            function(table, *batch)
            for function, table in zip((model, compiled), tables, strict=True)
        ]
        assert torch.equal(*outs)
        for out in outs:
            out.sum().backward()
    _same(*tables, device)
    explained = torch._dynamo.explain(model)(tables[0], *batch)
    assert explained.graph_break_count == 1, "none of the lookup is compiled"
