"""Methods that take a table take its number or its name, and refuse all else."""

from typing import Any

import pytest
import torch

from emblib import (
    CachedTTEmbeddingBags,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
)

TRAINS = [TTSpec(rows=12 + 8 * t, dim=4, ranks=(2, 2), name=name) for t, name in enumerate("ab")]
SGD = optim.SGD(0.1)


def _modules() -> dict[str, Any]:
    return {
        "tt": TableBatchedTTEmbeddingBags(TRAINS, SGD),
        "cached": CachedTTEmbeddingBags(TRAINS, TTCache(rows=4), SGD),
        "quantized": QuantizedEmbeddingBags.from_float(
            {"a": torch.ones(12, 4), "b": torch.ones(20, 4)}
        ),
    }


@pytest.mark.parametrize("kind", ["tt", "cached", "quantized"])
def test_a_name_stands_for_the_number(kind: str) -> None:
    module = _modules()[kind]
    assert module.table_number("b") == 1
    assert torch.equal(module.to_dense("b"), module.to_dense(1))
    assert torch.equal(torch.cat([*module.dense_blocks("b")]), module.to_dense(1))
    if kind == "quantized":
        module.write_rows("b", torch.full((1, 4), 7.0), first_row=19)
        assert module.dense_rows("b", 19, 1).eq(7).all()
    if kind == "tt":
        assert module.table_cores("b")[0] is module.table_cores(1)[0]
        assert len(module.core_optimizer_states("b")) == 3
    if kind == "cached":
        module(torch.tensor([3]), torch.tensor([0, 0, 1])).sum().backward()
        module.populate("b")
        assert module.cached_ids("b").tolist() == [3]
        assert module.spilled_ids("b").numel() == 0
        module.empty_cache("b")
        assert module.cached_ids(1).numel() == 0


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        ("c", KeyError, "no table 'c'; have a, b"),
        (2, IndexError, r"in \[0, 2\)"),
        (-1, IndexError, r"in \[0, 2\)"),
        (True, TypeError, "number or name"),
        (1.0, TypeError, "number or name"),
    ],
)
@pytest.mark.parametrize("kind", ["tt", "cached", "quantized"])
def test_what_is_no_table_is_refused(
    kind: str, table: Any, error: type[Exception], message: str
) -> None:
    module = _modules()[kind]
    with pytest.raises(error, match=message):
        module.to_dense(table)
    with pytest.raises(error, match=message):
        list(module.dense_blocks(table))


def test_a_table_that_does_not_exist_is_not_frozen() -> None:
    bags = TableBatchedEmbeddingBags([TableSpec(4, 4, "a"), TableSpec(4, 4, "b")], SGD)
    with pytest.raises(IndexError):
        bags.set_table_trained(2, trained=False)
    bags.set_table_trained("b", trained=False)
    assert bags.frozen_tables == {1}
