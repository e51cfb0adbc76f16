"""Read-only tables of keys that take other keys: they read as a dict would."""

import pytest
import torch
from torch import Tensor

import emblib
from emblib.inference import InferenceEmbeddingBags, RowIndex, for_inference
from emblib.online.records import TableChange
from emblib.online.served import served_tables

DIM = 4


def change(keys: list[int], values: list[float], removed: list[int]) -> TableChange:
    weight = torch.tensor(values).view(-1, 1).expand(-1, DIM)
    ids = torch.tensor(keys, dtype=torch.int64)
    gone = torch.tensor(removed, dtype=torch.int64)
    return TableChange(ids, weight, gone, {}, 0, DIM, stamps=torch.ones_like(ids))


def served(default: float, num_keys: int) -> InferenceEmbeddingBags:
    """Two tables, of which the second is to stay as it is."""
    names = ("item", "user")
    first = emblib.init.Constant(1.0)
    specs = [
        emblib.DynamicSpec(128, DIM, name=name, default_value=default, initializer=first)
        for name in names
    ]
    bags = emblib.DynamicEmbeddingBags(specs, emblib.optim.SGD(0.1))
    ids = torch.arange(2 * num_keys) * 2**33
    bags(ids, torch.arange(2 * num_keys + 1)).sum()
    tables = for_inference(bags)
    assert isinstance(tables, InferenceEmbeddingBags)
    return tables


def look_up(tables: InferenceEmbeddingBags, keys: Tensor) -> Tensor:
    ids = keys.repeat(2)
    return tables(ids, torch.arange(ids.numel() + 1)).view(keys.numel(), 2, DIM)


@pytest.mark.parametrize("num_keys", [0, 40])
@pytest.mark.parametrize("default", [0.0, 2.5])
def test_keys_come_and_go(default: float, num_keys: int) -> None:
    tables = served(default, num_keys)
    table = served_tables(tables)["item"]
    # Keys with equal hashes, at the end of the table, next to others, and any others.
    factor = pow(0x9E3779B97F4A7C15, -1, 2**64)
    unhashed = [(2**64 - 1 - i) * factor % 2**64 for i in range(30)]
    close = [(u ^ u >> 32) - 2**64 * ((u ^ u >> 32) >> 63) for u in unhashed]
    old = torch.arange(num_keys) * 2**33
    universe = torch.cat([old, torch.tensor(close), torch.arange(-20, 0)])
    model = dict.fromkeys(old.tolist(), 1.0)
    untouched = look_up(tables, universe)[:, 1]
    generator = torch.Generator().manual_seed(num_keys)
    number = 10.0
    for step in range(40):
        order = universe[torch.randperm(universe.numel(), generator=generator)].tolist()
        count = 1 + step % 25
        upserts, removed = order[:count], order[count : 2 * count]
        values = [number + i for i in range(count)]
        number += count
        if step % 20 == 19:
            model = {}
            table.prepare_whole(change(upserts, values, []))()
        else:
            table.prepare(change(upserts, values, removed))()
        model = {key: value for key, value in model.items() if key not in removed}
        model.update(zip(upserts, values, strict=True))
        expected = torch.tensor([model.get(key, default) for key in universe.tolist()])
        found = look_up(tables, universe)
        assert torch.equal(found[:, 0], expected.view(-1, 1).expand(-1, DIM)), step
        assert torch.equal(found[:, 1], untouched)
    assert tables.rows.tables[0].rows < 4 * universe.numel(), "rows of removed keys are used again"


@pytest.mark.parametrize("default", [0.0, 2.5])
def test_a_second_follower_finds_the_row_of_removed_keys(default: float) -> None:
    tables = served(default, 20)
    keys = torch.arange(20) * 2**33
    served_tables(tables)["item"].prepare(change([], [], keys[:10].tolist()))()
    table = served_tables(tables)["item"]
    table.prepare(change(keys[3:5].tolist(), [7.0, 8.0], keys[10:12].tolist()))()
    removed = torch.cat([keys[:3], keys[5:12]])
    assert torch.equal(look_up(tables, removed)[:, 0], torch.full((10, DIM), default))
    assert look_up(tables, keys[3:5])[:, 0, 0].tolist() == [7.0, 8.0]


def test_an_index_without_room_is_built_again() -> None:
    rows = emblib.QuantizedEmbeddingBags.from_float(torch.ones(2, DIM))
    index = RowIndex.of_keys(torch.tensor([2**40, -5]))
    tables = InferenceEmbeddingBags(rows, [index])
    (table,) = served_tables(tables).values()
    keys = list(range(300))
    table.prepare(change(keys, [3.0] * 300, [2**40]))()
    ids = torch.tensor([*keys, 2**40, -5, -6])
    values = tables(ids, torch.arange(ids.numel() + 1))[:, 0]
    assert values.tolist() == [3.0] * 300 + [0.0, 1.0, 0.0]
