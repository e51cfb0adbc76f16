"""The examples of docs/tiers.md: the first one runs, and the store in Redis is a store."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import BackingStore, DynamicEmbeddingBags, DynamicSpec, RowStore, optim
from tests.dynamic.row_store_cases import EDGES, TABLES, as_dict, contents, random_rows, take

BLOCKS = re.findall(
    r"```python\n(.*?)```",
    (Path(__file__).resolve().parents[2] / "docs" / "tiers.md").read_text(),
    re.DOTALL,
)


class Client:
    """As much of a Redis client as the example uses; fields and values are bytes."""

    def __init__(self) -> None:
        self.hashes: dict[str, dict[bytes, bytes]] = {}
        self.strings: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.strings.get(name)

    def set(self, name: str, value: str) -> None:
        self.strings[name] = value.encode()

    def hmget(self, name: str, fields: list[bytes]) -> list[bytes | None]:
        assert fields, "Redis refuses an HMGET of nothing"
        return [self.hashes.get(name, {}).get(field) for field in fields]

    def hset(self, name: str, mapping: dict[bytes, bytes]) -> None:
        self.hashes.setdefault(name, {}).update(mapping)

    def hdel(self, name: str, *fields: bytes) -> None:
        for field in fields:
            self.hashes.get(name, {}).pop(field, None)

    def hkeys(self, name: str) -> list[bytes]:
        return [*self.hashes.get(name, {})]

    def hgetall(self, name: str) -> dict[bytes, bytes]:
        return dict(self.hashes.get(name, {}))

    def delete(self, name: str) -> None:
        self.hashes.pop(name, None)

    def pipeline(self, *, transaction: bool) -> "Transaction":
        assert transaction
        return Transaction(self)

    def close(self) -> None:
        pass


class Transaction:
    """Commands that have no effect before `execute`."""

    def __init__(self, client: Client) -> None:
        self.client, self.commands = client, list[tuple[str, Any, Any]]()

    def __enter__(self) -> "Transaction":
        return self

    def __exit__(self, *error: object) -> None:
        self.commands = []

    def __getattr__(self, command: str) -> Any:
        return lambda *args, **kwargs: self.commands.append((command, args, kwargs))

    def execute(self) -> None:
        for command, args, kwargs in self.commands:
            getattr(self.client, command)(*args, **kwargs)


@pytest.fixture
def store() -> RowStore:
    names: dict[str, Any] = {}
    (source,) = [block for block in BLOCKS if "class RedisRows" in block]
    exec(source, names)
    made: RowStore = names["RedisRows"](Client())
    return made


def test_the_example_of_a_store_is_one(store: RowStore) -> None:
    assert isinstance(store, RowStore)
    store.open(TABLES)
    rows = random_rows([*EDGES, *range(10, 30)], 12, seed=0)
    assert not store.put(0, rows).keys.numel()
    assert contents(store, 0) == as_dict(rows)
    assert store.size(1) == 0
    taken = take(store, 0, torch.tensor([5, -1, 2**63 - 1]))
    assert taken.positions.tolist() == [1, 2]
    assert store.erase(0, torch.tensor([10, -1])).tolist() == [True, False]
    gone = store.expire(0, 0)
    left = {key: row for key, row in as_dict(rows).items() if key not in (10, -1, 2**63 - 1)}
    assert set(gone.tolist()) == {key for key, row in left.items() if row[0] < 0}
    assert contents(store, 0) == {key: row for key, row in left.items() if row[0] >= 0}
    store.clear(0)
    assert store.size(0) == 0


def test_the_example_of_a_store_trains(store: RowStore) -> None:
    module = DynamicEmbeddingBags(
        [DynamicSpec(32, 4)], optim.SGD(0.01), backing=BackingStore(store)
    )
    for step in range(4):
        ids = torch.randint(0, 90, (60,), generator=torch.Generator().manual_seed(step))
        module(ids, torch.arange(0, 61, 10)).sum().backward()
    module.flush()
    assert module.size(0) > 32
    assert store.note


def test_the_example_of_a_store_resumes_at_its_last_flush(store: RowStore) -> None:
    """A process that is killed leaves no stamps that are later than the step of the note."""
    store.open(TABLES)
    rows, fast_rows = random_rows(range(8), 12, seed=0), random_rows([7, 50], 12, seed=1)
    store.put(0, rows)
    store.flush([[fast_rows], []], "step 1")
    committed = as_dict(rows) | as_dict(fast_rows)
    store.put(0, random_rows(range(4, 20), 12, seed=2))
    store.lift(0, torch.tensor([0, 50]))
    assert store.size(0) == 19
    for _ in range(2):  # also where a second process is killed before it has flushed
        store.open(TABLES)
        assert (store.note, store.size(0)) == ("step 1", 9)
        assert contents(store, 0) == committed
    store.flush([[], []], "step 2")
    store.open(TABLES)
    assert contents(store, 0) == committed


def test_the_first_example_runs(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(BLOCKS[0].replace("~/rows", str(tmp_path / "rows")), names)
    module = names["module"]
    assert module(torch.tensor([2**62, -1]), torch.tensor([0, 2])).shape == (1, 64)
    module.close()
