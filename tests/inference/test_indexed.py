"""Read-only tables behind an index: pruned rows read zeros, missing keys the default."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib import BoundsCheck, Pooling, QuantizedEmbeddingBags, TableSpec
from emblib.inference import InferenceEmbeddingBags, RowIndex, prune, top_rows

INDEXES = pytest.mark.parametrize("index", ["array", "hash", None])


def tables(**changes: Any) -> QuantizedEmbeddingBags:
    generator = torch.Generator().manual_seed(0)
    bags = QuantizedEmbeddingBags(
        [TableSpec(60, 8, "item"), TableSpec(9, 5), TableSpec(41, 8, "user")],
        feature_tables=(2, 0, 1, 0),
        formats=["int8", "float16", "int4"],
        **changes,
    )
    for table, spec in enumerate(bags.tables):
        bags.write_rows(table, torch.randn(spec.rows, spec.dim, generator=generator))
    return bags


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "item": torch.rand(60, generator=generator) < 0.4,
        "user": torch.rand(41, generator=generator) < 0.1,
    }


def batch(bags: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    sizes = torch.tensor([41, 60, 9, 60]).repeat_interleave(bags)
    lengths = torch.randint(0, 7, (4 * bags,), generator=generator)
    ids = torch.rand(int(lengths.sum()), generator=generator) * sizes.repeat_interleave(lengths)
    ids[3] = -1
    return ids.long(), torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def with_zeros(bags: QuantizedEmbeddingBags, keep: dict[str, Tensor]) -> QuantizedEmbeddingBags:
    """The same tables, in which the rows that are not kept are zeros."""
    zeroed = copy.deepcopy(bags)
    for name, view in zip(zeroed.table_names, zeroed.table_views(), strict=True):
        if name in keep:
            view["packed"][~keep[name]] = 0
    return zeroed


@INDEXES
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
def test_pruned_ids_read_zeros(index: str | None, pooling: Pooling, device: torch.device) -> None:
    whole = tables(pooling=pooling, device=device)
    keep = {name: mask.to(device) for name, mask in masks().items()}
    pruned, zeroed = prune(whole, keep, index=index), with_zeros(whole, keep)
    kept = {name: int(mask.sum()) for name, mask in keep.items()}
    assert [spec.rows for spec in pruned.rows.tables] == [kept["item"], 9, kept["user"]]
    ids, offsets = (tensor.to(device) for tensor in batch())
    weights = torch.rand(ids.numel(), device=device)
    for dtype in (torch.int64, torch.int32):
        assert_close(pruned(ids.to(dtype), offsets), zeroed(ids, offsets))
    assert_close(pruned(ids, offsets, weights), zeroed(ids, offsets, weights))
    sizes = [[2, 3], [5, 0], [4, 1], [0, 5]]
    want = zeroed(ids, offsets, batch_sizes=sizes)
    assert_close(pruned(ids, offsets, batch_sizes=sizes), want)
    for other in (copy.deepcopy(pruned), pickle.loads(pickle.dumps(pruned)), pruned.to("cpu")):
        moved = other.index.device
        assert_close(other(ids.to(moved), offsets.to(moved)).cpu(), zeroed(ids, offsets).cpu())


@INDEXES
def test_ids_out_of_range_are_handled_as_the_mode_says(index: str | None) -> None:
    keep = {"item": torch.arange(10) % 2 == 1}
    rows = QuantizedEmbeddingBags.from_float(
        {"item": torch.ones(10, 4)}, bounds_check=BoundsCheck.FATAL
    )
    pruned = prune(rows, keep, index=index)
    offsets = torch.tensor([0, 1])
    assert pruned(torch.tensor([2]), offsets).eq(0).all()
    assert pruned(torch.tensor([9]), offsets).gt(0.9).all()
    for wrong in (10, 2**40, -2):
        with pytest.raises(RuntimeError, match="must be in"):
            pruned(torch.tensor([wrong]), offsets)


def test_the_smaller_index_is_taken() -> None:
    rows = QuantizedEmbeddingBags.from_float({"item": torch.ones(800, 4)})
    few, many = torch.zeros(800, dtype=torch.bool), torch.ones(800, dtype=torch.bool)
    few[7] = True
    assert "index: hash" in repr(prune(rows, {"item": few}))
    assert "index: array" in repr(prune(rows, {"item": many}))
    assert prune(rows, {"item": many}).nbytes() == {"weights": 6400, "index": 3200}


@INDEXES
def test_an_id_of_no_bag_is_refused_and_padding_is_not(index: str | None) -> None:
    rows = QuantizedEmbeddingBags.from_float(torch.eye(4), formats="float32")
    if index is None:
        served = InferenceEmbeddingBags(rows, [RowIndex.of_keys(torch.arange(4))])
    else:
        served = prune(rows, {rows.table_names[0]: torch.arange(4) < 3}, index=index)
    offsets = torch.tensor([1, 3])
    with pytest.raises(RuntimeError, match="no bag would have the ids before it"):
        served(torch.tensor([0, 1, 2]), offsets)
    assert served(torch.tensor([-1, 1, 2]), offsets).tolist() == [[0.0, 1.0, 1.0, 0.0]]


def test_any_key_and_the_default() -> None:
    rows = QuantizedEmbeddingBags.from_float(torch.tensor([[1.0] * 4, [2.0] * 4, [7.0] * 4]))
    keys = torch.tensor([-1, 2**63 - 1])
    served = InferenceEmbeddingBags(rows, [RowIndex.of_keys(keys, missing=2)])
    got = served(torch.tensor([-1, 2**63 - 1, 0, -(2**63)]), torch.arange(5))[:, 0]
    assert got.tolist() == [1.0, 2.0, 7.0, 7.0]
    unsigned = torch.tensor([-1]).view(torch.uint64)
    assert served(unsigned, torch.tensor([0, 1]))[0, 0] == 1.0


def test_state_dicts_are_of_the_same_index() -> None:
    rows, keys = torch.arange(1.0, 4.0)[:, None].repeat(1, 4), torch.tensor([-1, 5, 9])
    source = QuantizedEmbeddingBags.from_float(rows)
    served = InferenceEmbeddingBags(source, [RowIndex.of_keys(keys)])
    other = InferenceEmbeddingBags(
        QuantizedEmbeddingBags([TableSpec(3, 4)]), [RowIndex.of_keys(keys.clone())]
    )
    other.load_state_dict(served.state_dict())
    assert torch.equal(other(keys, torch.arange(4)), served(keys, torch.arange(4)))
    others = InferenceEmbeddingBags(
        QuantizedEmbeddingBags([TableSpec(3, 4)]), [RowIndex.of_keys(keys + 1)]
    )
    with pytest.raises(RuntimeError, match="of tables with another index"):
        others.load_state_dict(served.state_dict())
    assert not others(keys + 1, torch.arange(4)).any(), "nothing was written"


def test_offsets_without_their_last_entry_and_no_pooling() -> None:
    keep = {"table_0": torch.arange(6) != 2}
    rows = torch.arange(1.0, 7.0)[:, None].repeat(1, 3)
    source = QuantizedEmbeddingBags.from_float(rows, include_last_offset=False, formats="float32")
    got = prune(source, keep)(torch.tensor([2, 3, 5]), torch.tensor([0, 2]))
    assert got[:, 0].tolist() == [4.0, 6.0]
    source = QuantizedEmbeddingBags([TableSpec(6, 3)], pooling=Pooling.NONE, formats="float32")
    source.write_rows(0, rows)
    got = prune(source, keep)(torch.tensor([2, 3, 5]), torch.tensor([0, 2, 3]))
    assert got[:, 0].tolist() == [0.0, 4.0, 6.0]


def test_exports_with_any_batch() -> None:
    pruned = prune(tables(bounds_check=BoundsCheck.IGNORE), masks()).eval()
    lengths = ({0: torch.export.Dim.AUTO}, {0: torch.export.Dim.AUTO})
    with torch.no_grad():
        program = torch.export.export(pruned, batch(), dynamic_shapes=lengths, strict=False)
        for bags in (2, 9):
            assert torch.equal(program.module()(*batch(bags)), pruned(*batch(bags)))


def test_empty_batches() -> None:
    pruned = prune(tables(), masks())
    assert (
        pruned(torch.empty(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)).shape[0] == 0
    )
    zeros = pruned(torch.empty(0, dtype=torch.int64), torch.zeros(9, dtype=torch.int64))
    assert torch.equal(zeros, torch.zeros(2, 29))


def test_top_rows() -> None:
    scores = torch.tensor([5, 1, 5, 3])
    assert top_rows(scores, 0.25).tolist() == [True, False, False, False]
    assert top_rows(scores, 0.6).tolist() == [True, False, True, True]
    assert top_rows(scores, 1.0).all()
    assert not top_rows(scores, 0.0).any()
    assert top_rows(torch.arange(100), 0.07).sum() == 7  # 100 * 0.07 > 7 in floating point
    for wrong, message in (((scores, 1.1), "share"), ((scores.view(2, 2), 0.5), "vector")):
        with pytest.raises(ValueError, match=message):
            top_rows(*wrong)
    with pytest.raises(ValueError, match="NaN"):
        top_rows(torch.tensor([torch.nan]), 1.0)
    for no_numbers in ([5, 1], torch.tensor([1j])):
        with pytest.raises(TypeError, match="scores must be a tensor of real numbers"):
            top_rows(no_numbers, 0.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="share must be a number, got None"):
        top_rows(torch.arange(3), None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keys must be int64"):
        RowIndex.of_keys([1, 2])  # type: ignore[arg-type]


def test_wrong_use_is_refused() -> None:
    bags = tables()
    for keep, error, message in (
        ({"other": torch.ones(60, dtype=torch.bool)}, KeyError, "no tables"),
        ({"item": torch.ones(61, dtype=torch.bool)}, ValueError, r"must be bool \[60\]"),
        ({"item": torch.ones(60)}, ValueError, "got torch.float32"),
        ({"item": [True] * 60}, ValueError, r"must be bool \[60\], got <class 'list'>"),
        ({"item": torch.zeros(60, dtype=torch.bool)}, ValueError, "at least one row"),
    ):
        with pytest.raises(error, match=message):
            prune(bags, keep)
    with pytest.raises(ValueError, match="index must be 'array', 'hash' or None"):
        prune(bags, {}, index="tree")
    for keys in (torch.ones(2), torch.tensor([1, 2]).int(), torch.tensor([[1, 2]])):
        with pytest.raises(TypeError, match=r"keys must be int64 \[n\], got"):
            RowIndex.of_keys(keys)
    with pytest.raises(TypeError, match="for_inference"):
        prune(torch.nn.Linear(2, 2), {})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one entry per table, 3, got 1"):
        InferenceEmbeddingBags(bags, [None])
    with pytest.raises(ValueError, match="distinct"):
        RowIndex.of_keys(torch.tensor([3, 3]))
