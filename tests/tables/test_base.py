"""Offsets of another form than the modules take: ids and bags are never dropped silently."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from emblib import (
    BoundsCheck,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
    optim,
)

IDS = torch.tensor([1, 2, 3, 4, 5])
MODULES: dict[str, Callable[..., Any]] = {
    "plain": lambda **options: TableBatchedEmbeddingBags([TableSpec(10, 8)], **options),
    "tt": lambda **options: TTEmbeddingBag(TTSpec(100, 8, (2,)), **options),
    "quantized": lambda **options: QuantizedEmbeddingBags([TableSpec(10, 8)], **options),
    "dynamic": lambda bounds_check=None, **options: DynamicEmbeddingBags(
        [DynamicSpec(32, 8)], **options
    ),
}
kinds = pytest.mark.parametrize("kind", list(MODULES))
checks = pytest.mark.parametrize("check", [BoundsCheck.FATAL, BoundsCheck.WARNING], ids=str)


@kinds
@checks
def test_ids_before_the_first_bag_are_refused(kind: str, check: BoundsCheck) -> None:
    with pytest.raises(RuntimeError, match=r"offsets must (begin with|start at) 0"):
        MODULES[kind](bounds_check=check)(IDS, torch.tensor([2, 4, 5]))


@kinds
@checks
def test_offsets_without_the_last_entry_are_refused(kind: str, check: BoundsCheck) -> None:
    with pytest.raises(RuntimeError, match=r"append it.*KeyedJagged.*include_last_offset=False"):
        MODULES[kind](bounds_check=check)(IDS, torch.tensor([0, 2, 3]))


@kinds
def test_compiled_modules_refuse_another_form(kind: str) -> None:
    compiled = torch.compile(MODULES[kind](), backend="aot_eager")
    assert compiled(IDS, torch.tensor([0, 2, 3, 5])).shape == (3, 8)
    with pytest.raises(RuntimeError, match="must begin with 0, got 2"):
        compiled(IDS, torch.tensor([2, 4, 5, 5]))
    with pytest.raises(RuntimeError, match="bag would be lost"):
        compiled(IDS, torch.tensor([0, 2, 3, 4]))


def test_rows_are_as_wide_as_kernels_count() -> None:
    assert TableSpec(1, 2**25).dim == 2**25
    with pytest.raises(ValueError, match="dim must be at most"):
        TableSpec(1, 2**25 + 1)


def test_offsets_that_end_below_another_entry_are_clamped_as_wrong_numbers() -> None:
    table = TableBatchedEmbeddingBags([TableSpec(10, 8)])
    with pytest.warns(UserWarning, match="1 offsets out of bounds"):
        out = table(IDS, torch.tensor([0, 5, 3]))
    assert_close(out, table(IDS, torch.tensor([0, 5, 5])))


def test_a_feature_of_a_variable_batch_that_lacks_ids_is_clamped() -> None:
    """The number of bags is given there, so that a missing last offset is noticed by it."""
    table = TableBatchedEmbeddingBags([TableSpec(10, 8)])
    with pytest.warns(UserWarning, match="1 offsets out of bounds"):
        out = table(IDS, torch.tensor([0, 2, 3]), batch_sizes=[[2]])
    assert_close(out.view(2, 8), table(IDS, torch.tensor([0, 2, 5])))


def test_a_collection_says_what_its_batch_lacks() -> None:
    collection = EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "a", ["f"])])
    batch = KeyedJaggedTensor(["f"], IDS, offsets=torch.tensor([0, 2, 3]))
    with pytest.raises(RuntimeError, match="in a KeyedJaggedTensor it never is"):
        collection(batch)


@kinds
def test_offsets_without_the_last_entry_work_where_asked_for(kind: str) -> None:
    torch.manual_seed(0)
    whole, start = MODULES[kind](), MODULES[kind](include_last_offset=False)
    start.load_state_dict(whole.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = start(IDS, torch.tensor([0, 2, 3], dtype=torch.int32))
        assert_close(out, whole(IDS, torch.tensor([0, 2, 3, 5])))
    assert out.shape == (3, 8)


def test_include_last_offset_means_what_it_means_in_torch() -> None:
    table = TableBatchedEmbeddingBags([TableSpec(10, 4)], include_last_offset=False)
    weights, offsets = table.table_weights()[0], torch.tensor([0, 0, 4])
    peer = nn.EmbeddingBag.from_pretrained(weights.clone(), mode="sum")
    assert_close(table(IDS, offsets), peer(IDS, offsets))


def test_features_of_a_module_that_leaves_out_the_last_offset() -> None:
    tables = [TableSpec(10, 4), TableSpec(10, 2)]
    table = TableBatchedEmbeddingBags(tables, optim.SGD(0.1), include_last_offset=False)
    table.prefetch(IDS, torch.tensor([0, 2, 3, 4]))
    assert table(IDS, torch.tensor([0, 2, 3, 4])).shape == (2, 6)


def test_ignore_repairs_without_a_word() -> None:
    table = TableBatchedEmbeddingBags([TableSpec(10, 4)], bounds_check=BoundsCheck.IGNORE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = table(IDS, torch.tensor([2, 4]))
    assert_close(out, table.table_weights()[0][3:6].sum(0, keepdim=True))


def test_a_refused_batch_changes_nothing() -> None:
    table = TableBatchedEmbeddingBags([TableSpec(10, 4)], optim.SGD(0.1))
    with pytest.raises(RuntimeError, match="begin with 0"):
        table(IDS, torch.tensor([1, 5]))
    assert table.bounds_violations.tolist() == [0, 0]


@pytest.mark.parametrize("check", [BoundsCheck.WARNING, BoundsCheck.FATAL, BoundsCheck.NONE])
def test_padding_is_no_violation(check: BoundsCheck, device: torch.device) -> None:
    table = TableBatchedEmbeddingBags([TableSpec(9, 4)], device=device, bounds_check=check)
    ids = torch.tensor([-1, -1, 3, 1, 4], device=device)
    out = table(ids, torch.tensor([2, 4, 5], device=device))
    assert torch.equal(out, table(ids[2:], torch.tensor([0, 2, 3], device=device)))
    assert table.bounds_violations.tolist() == [0, 0]


def test_lost_ids_are_a_violation(device: torch.device) -> None:
    table = TableBatchedEmbeddingBags([TableSpec(9, 4)], device=device)
    ids = torch.tensor([-1, 2, 3, 1, 4], device=device)
    offsets = torch.tensor([2, 4, 5], device=device)
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match="begin with 0, got 2"):
            table(ids, offsets)
    else:
        table(ids, offsets)
        assert table.bounds_violations.tolist() == [0, 1]


@pytest.mark.parametrize("kind", ["plain", "quantized", "dynamic"])
@pytest.mark.parametrize("tables", ["0", 3, [0.0], [None]], ids=str)
def test_features_have_numbers_of_tables(kind: str, tables: Any) -> None:
    with pytest.raises(TypeError, match="feature_tables must be the number of a table for each"):
        MODULES[kind](feature_tables=tables)
