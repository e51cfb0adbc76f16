"""Quantised tables as a module: from floats, in files, in graphs."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    BoundsCheck,
    Placement,
    Pooling,
    Precision,
    QuantizedEmbeddingBags,
    RowFormat,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTEmbeddingBag,
    TTSpec,
)
from tests.quant_cases import error_bound
from tests.saved import saved_and_loaded

BITS = pytest.mark.parametrize("bits", [8, 4])
TABLES = [TableSpec(50, 12, "item"), TableSpec(7, 5)]
BATCH = (torch.tensor([3, 49, -1, 6, 0, 6]), torch.tensor([0, 2, 3, 3, 6]))


def trained(pooling: Pooling = Pooling.SUM, **changes: Any) -> TableBatchedEmbeddingBags:
    torch.manual_seed(0)
    tables = TABLES[:1] if pooling is Pooling.NONE else TABLES
    features = (0, 0) if pooling is Pooling.NONE else (0, 1)
    return TableBatchedEmbeddingBags(tables, pooling=pooling, feature_tables=features, **changes)


def bound(rows: Tensor, bits: int) -> float:
    """The largest error of a value, and room for rounding."""
    return float(error_bound(rows.detach().cpu(), bits).max()) * 1.0002


@BITS
@pytest.mark.parametrize("pooling", list(Pooling))
def test_is_close_to_the_floats(bits: int, pooling: Pooling, device: torch.device) -> None:
    floats = trained(pooling, device=device)
    made = QuantizedEmbeddingBags.from_float(floats, bits)
    assert made.packed.device.type == device.type
    batch = [tensor.to(device) for tensor in BATCH]
    most = 3 if pooling is Pooling.SUM else 1
    rows = floats.table_weights()
    room = most * max(bound(weights, bits) for weights in rows) + 1e-6
    assert (made(*batch) - floats(*batch)).abs().max() <= room
    for table, weights in enumerate(rows):
        got = made.to_dense(table)
        assert got.shape == weights.shape
        assert (got - weights).abs().max() <= bound(weights, bits) + 1e-7
    if pooling is not Pooling.NONE:
        scales = torch.tensor([0.5, 2.0, 1.0, -1.0, 0.1, 3.0], device=device)
        assert (made(*batch, scales) - floats(*batch, scales)).abs().max() <= 2 * room


def test_keeps_what_the_source_says() -> None:
    floats = trained(Pooling.MEAN, precision=Precision(torch.float16, torch.bfloat16))
    made = QuantizedEmbeddingBags.from_float(floats)
    assert made.table_names == ["item", "table_1"]
    assert (made.pooling, made.feature_tables) == (Pooling.MEAN, (0, 1))
    assert made(*BATCH).dtype == made.output_dtype == torch.bfloat16
    other = QuantizedEmbeddingBags.from_float(floats, output_dtype=torch.float16, device="meta")
    assert (other.output_dtype, other.packed.device.type) == (torch.float16, "meta")


def test_keeps_the_form_of_the_offsets_of_the_source() -> None:
    ids, starts, whole = torch.tensor([1, 4, 2]), torch.tensor([0, 2]), torch.tensor([0, 2, 3])
    options: Any = {"include_last_offset": False}
    plain = TableBatchedEmbeddingBags([TableSpec(5, 4)], **options)
    tt = TTEmbeddingBag(TTSpec(30, 8, ranks=(4,)), **options)
    for source in (plain, tt, nn.EmbeddingBag(5, 4, mode="sum")):
        made = QuantizedEmbeddingBags.from_float(source)
        assert made(ids, starts).shape == source(ids, starts).shape
        other = QuantizedEmbeddingBags.from_float(source, include_last_offset=True)
        assert torch.equal(other(ids, whole), made(ids, starts))
    rows = QuantizedEmbeddingBags.from_float(plain.table_weights()[0], **options)
    assert rows(ids, starts).size(0) == 2
    assert QuantizedEmbeddingBags.from_float({"a": torch.zeros(2, 2)}).include_last_offset


def test_other_sources() -> None:
    weights = torch.randn(20, 6)
    ids, offsets = torch.tensor([1, 19, 4]), torch.tensor([0, 2, 3])
    room = 2 * bound(weights, 8) + 1e-6
    for mode in ("sum", "mean"):
        bag = nn.EmbeddingBag.from_pretrained(weights, mode=mode, include_last_offset=True)
        got = QuantizedEmbeddingBags.from_float(bag)(ids, offsets)
        assert (got - bag(ids, offsets)).abs().max() <= room
    rows = QuantizedEmbeddingBags.from_float(nn.Embedding.from_pretrained(weights))
    assert (rows(ids, offsets) - weights[ids]).abs().max() <= room
    one = QuantizedEmbeddingBags.from_float(weights)
    assert (one(ids, offsets)[1] - weights[4]).abs().max() <= room
    named = QuantizedEmbeddingBags.from_float({"a": weights, "b": weights[:3, :2]}, 4)
    assert named.table_names == ["a", "b"]
    assert named.output_dim == 8
    tt = TTEmbeddingBag(TTSpec(30, 8, ranks=(4,)))
    quantised = QuantizedEmbeddingBags.from_float(tt)
    assert (quantised.to_dense(0) - tt.to_dense()).abs().max() <= bound(tt.to_dense(), 8) + 1e-6
    for wrong in (nn.Linear(2, 2), torch.zeros(3), {}, {"a": None}):
        with pytest.raises(TypeError, match="matri"):
            QuantizedEmbeddingBags.from_float(wrong)
    with pytest.raises(TypeError, match="mode sum or mean, got 'max'"):
        QuantizedEmbeddingBags.from_float(nn.EmbeddingBag(3, 2, mode="max"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (nn.EmbeddingBag(10, 4, padding_idx=3), r"padding_idx=3 .*drop_padding_from_bags"),
        (nn.EmbeddingBag(10, 4, max_norm=1.0), "max_norm changes the rows"),
        (nn.Embedding(10, 4, max_norm=1.0), "max_norm changes the rows"),
    ],
)
def test_modules_that_look_up_otherwise_are_refused(source: nn.Module, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        QuantizedEmbeddingBags.from_float(source)
    assert QuantizedEmbeddingBags.from_float(nn.Embedding(10, 4, padding_idx=3)).output_dim == 4


def test_features_may_differ_in_bags() -> None:
    floats = trained()
    made = QuantizedEmbeddingBags.from_float(floats)
    offsets = torch.tensor([0, 2, 3, 3, 6])
    got = made(BATCH[0], offsets, batch_sizes=[[1, 2], [1, 0]])
    want = floats(BATCH[0], offsets, batch_sizes=[[1, 2], [1, 0]])
    assert got.shape == want.shape == (12 + 5 + 24,)
    room = 3 * max(bound(weights, 8) for weights in floats.table_weights()) + 1e-6
    assert (got - want).abs().max() <= room


@pytest.mark.parametrize("formats", [(RowFormat.INT4, "int8"), ("float32", "float8_e5m2"), "int2"])
def test_tables_differ_in_their_formats(formats: Any, device: torch.device) -> None:
    floats = trained(device=device)
    made = QuantizedEmbeddingBags.from_float(floats, formats=formats)
    batch = [tensor.to(device) for tensor in BATCH]
    of_tables = (formats,) * 2 if isinstance(formats, str) else formats
    assert made.formats == tuple(RowFormat(format) for format in of_tables)
    for table, weights in enumerate(floats.table_weights()):
        alone = QuantizedEmbeddingBags.from_float(weights, formats=of_tables[table])
        assert torch.equal(alone.to_dense(0), made.to_dense(table))
        room = error_bound(weights.detach().cpu(), made.formats[table].code)
        assert bool(((made.to_dense(table) - weights).cpu().abs() <= room + 1e-7).all())
    rows = [made.to_dense(table) for table in range(2)]
    other = TableBatchedEmbeddingBags(TABLES, device=device)
    with torch.no_grad():
        for target, values in zip(other.table_weights(), rows, strict=True):
            target.copy_(values)
    torch.testing.assert_close(made(*batch), other(*batch))
    again = QuantizedEmbeddingBags(TABLES, formats=formats, device=device)
    again.load_state_dict(made.state_dict())
    assert torch.equal(again(*batch), made(*batch))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_of_floats_are_those_of_the_source(dtype: torch.dtype) -> None:
    floats = trained(precision=Precision(dtype, torch.float32))
    format = str(dtype).removeprefix("torch.")
    made = QuantizedEmbeddingBags.from_float(floats, formats=format)
    assert torch.equal(made(*BATCH), floats(*BATCH))
    rows = torch.tensor([[torch.inf, torch.nan, 1e30, 0.0]])
    if dtype is torch.float16:
        with pytest.raises(ValueError, match=r"finite and within \+-65504"):
            QuantizedEmbeddingBags.from_float(rows, formats=format)
    else:
        kept = QuantizedEmbeddingBags.from_float(rows, formats=format).to_dense(0)
        torch.testing.assert_close(kept, rows, equal_nan=True, rtol=1e-2, atol=0)


@BITS
def test_state_dict(bits: int) -> None:
    made = QuantizedEmbeddingBags.from_float(trained(), bits)
    state = made.state_dict()
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "item.packed": (50, 4 + (12 if bits == 8 else 8)),  # a multiple of 4
        "table_1.packed": (7, 4 + (8 if bits == 8 else 4)),
    }
    want = made(*BATCH)
    other = QuantizedEmbeddingBags(TABLES, bits)
    assert not other(*BATCH).any(), "rows are zeros until they are filled"
    other.load_state_dict(state)
    assert torch.equal(other(*BATCH), want)
    meta = QuantizedEmbeddingBags(TABLES, bits, device="meta").to_empty(device="cpu")
    meta.reset_parameters()
    meta.load_state_dict(saved_and_loaded(state))
    for module in (meta, copy.deepcopy(made), pickle.loads(pickle.dumps(made)), made.half()):
        assert torch.equal(module(*BATCH), want)
    with pytest.raises(RuntimeError, match="checkpoint is of another table"):
        QuantizedEmbeddingBags(TABLES, 12 - bits).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*table_1\.packed"):
        other.load_state_dict({"item.packed": state["item.packed"]})


def test_header_is_a_view() -> None:
    rows = torch.randn(9, 6)
    packed = QuantizedEmbeddingBags.from_float({"a": rows[:2, :3], "b": rows}).table_views()[1]
    scale, offset = packed["packed"][:, :4].view(torch.float16).float().unbind(1)
    assert (offset - rows.amin(1)).abs().max() <= 0.002
    assert (scale * 255 + offset - rows.amax(1)).abs().max() <= 0.01


def former(rows: Tensor, bits: int) -> dict[str, Tensor]:
    """The entries of a table before 0.1.0."""
    low, high = rows.aminmax(dim=1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    numbers = ((rows - low) / scale).round().to(torch.uint8)
    if bits == 4:
        numbers = nn.functional.pad(numbers, (0, numbers.size(1) % 2))
        numbers = numbers[:, ::2] | numbers[:, 1::2] << 4
    return {"values": numbers, "scales": torch.cat([scale, low], 1)}


@BITS
def test_state_dicts_from_before_0_1_0_are_converted(bits: int) -> None:
    rows = {"item": torch.randn(50, 12), "table_1": torch.randn(7, 5)}
    tables = {name: former(weights, bits) for name, weights in rows.items()}
    state = {f"{n}.{key}": value for n, table in tables.items() for key, value in table.items()}
    made = QuantizedEmbeddingBags(TABLES, bits)
    made.load_state_dict(state)
    for table, weights in enumerate(rows.values()):
        assert (made.to_dense(table) - weights).abs().max() <= 2 * bound(weights, bits)
    # A module inside another, a new table among old ones, a table of another size.
    outer = nn.ModuleDict({"bags": QuantizedEmbeddingBags(TABLES, bits)})
    mixed = {f"bags.{key}": value for key, value in state.items() if "item" in key}
    mixed["bags.table_1.packed"] = made.state_dict()["table_1.packed"]
    outer.load_state_dict(mixed)
    assert torch.equal(outer["bags"](*BATCH), made(*BATCH))
    before, packed = made(*BATCH), made.packed.clone()
    state |= {name: value.flip(0) for name, value in state.items() if "table_1" in name}
    with pytest.raises(RuntimeError, match="item: size mismatch"):
        made.load_state_dict({**state, "item.values": state["item.values"][:, 1:]})
    with pytest.raises(RuntimeError, match=r"item: rows must be finite and within \+-65504"):
        made.load_state_dict({**state, "item.scales": state["item.scales"] * 1e6})
    assert torch.equal(made.packed, packed)  # table_1 neither
    with pytest.raises(RuntimeError, match="item: values and scales must be tensors, got None"):
        made.load_state_dict({**state, "item.values": None})
    with pytest.raises(RuntimeError, match=r"item: values must be uint8, got torch\.float32"):
        made.load_state_dict({**state, "item.values": state["item.values"].float()})
    with pytest.raises(RuntimeError, match=r"item: the rows are from before 0\.1\.0"):
        QuantizedEmbeddingBags(TABLES, formats="float16").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Missing key.*item\.packed"):
        made.load_state_dict({k: v for k, v in state.items() if k != "item.scales"})
    assert torch.equal(made(*BATCH)[:, :12], before[:, :12])


@BITS
def test_rows_are_written_in_place(bits: int) -> None:
    made = QuantizedEmbeddingBags(TABLES, bits)
    rows = torch.randn(3, 5)
    made.write_rows(1, rows, first_row=2)
    dense = made.to_dense(1)
    assert (dense[2:5] - rows).abs().max() <= bound(rows, bits) + 1e-6
    assert not dense[:2].any()
    assert not dense[5:].any()
    assert not made.to_dense(0).any()
    view = made.table_views()[1]
    view["packed"].zero_()
    assert not made.to_dense(1).any()
    rows[1, 1] = torch.nan
    for wrong, first, message in (
        (rows, 0, "table 'table_1': rows must be finite and within .* got nan"),
        (torch.full((3, 5), -65600.0), 0, r"within \+-65504, the range of float16, .* got 65600"),
        (torch.full((3, 5), 65536.0, dtype=torch.bfloat16), 0, "got 65536"),
        (torch.zeros(3, 4), 0, r"must be \[rows, 5\] for table 'table_1', got \[3, 4\]"),
        (torch.zeros(3, 5), 5, "rows 5 to 8 are out of range of table 'table_1' of 7 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            made.write_rows(1, wrong, first)


def test_memory_is_what_the_bits_say() -> None:
    spec = TableSpec(1600, 64)
    assert QuantizedEmbeddingBags([spec]).nbytes() == {"weights": 1600 * (64 + 4)}
    assert QuantizedEmbeddingBags([spec], 4).nbytes() == {"weights": 1600 * (32 + 4)}


def test_compiles_whole() -> None:
    made = QuantizedEmbeddingBags.from_float(trained())
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*BATCH), made(*BATCH))


def test_exports_with_any_batch() -> None:
    made = QuantizedEmbeddingBags.from_float(trained(), bounds_check=BoundsCheck.IGNORE)
    lookups, bags = torch.export.Dim("lookups", min=2), torch.export.Dim("bags", min=2)
    shapes = {"indices": {0: lookups}, "offsets": {0: 2 * bags + 1}}
    program = torch.export.export(made, BATCH, dynamic_shapes=shapes)
    other = (torch.tensor([1, 2, 3]), torch.tensor([0, 1, 1, 2, 3, 3, 3]))
    assert torch.equal(program.module()(*other), made(*other))


@pytest.mark.parametrize(("first_row", "count"), [(-1, 2), (6, 2), (7, 1), (3, -1)])
def test_rows_of_other_tables_are_not_dequantised(first_row: int, count: int) -> None:
    made = QuantizedEmbeddingBags(TABLES)
    assert made.dense_rows(1, 5, 2).shape == (2, 5)
    with pytest.raises(ValueError, match="out of range of table 'table_1' of 7 rows"):
        made.dense_rows(1, first_row, count)


def test_wrong_use_is_refused() -> None:
    made = QuantizedEmbeddingBags.from_float(trained(), bounds_check=BoundsCheck.FATAL)
    weights = torch.ones(6, requires_grad=True)
    with pytest.raises(RuntimeError, match="no gradient"):
        made(*BATCH, weights)
    with torch.no_grad():
        assert torch.equal(made(*BATCH, weights), made(*BATCH))
    with pytest.raises(RuntimeError, match=r"must be in \[0, 50\)"):
        made(torch.tensor([50]), torch.tensor([0, 1, 1, 1, 1]))
    with pytest.raises(ValueError, match="bits must be 8, 4 or 2, got 3; formats="):
        QuantizedEmbeddingBags(TABLES, 3)
    with pytest.raises(ValueError, match="pass bits or formats, got both, 8 and 'int4'"):
        QuantizedEmbeddingBags(TABLES, 8, formats="int4")
    with pytest.raises(ValueError, match="one entry per table, 2, got 3"):
        QuantizedEmbeddingBags(TABLES, formats=["int4"] * 3)
    with pytest.raises(ValueError, match=r"RowFormat must be one of 'int2', .* got 'int3'"):
        QuantizedEmbeddingBags(TABLES, formats="int3")
    with pytest.raises(ValueError, match="one dim for all tables"):
        QuantizedEmbeddingBags(TABLES, pooling=Pooling.NONE)
    with pytest.raises(ValueError, match=r"tables\[0\] asks for"):
        QuantizedEmbeddingBags([TableSpec(3, 4, placement=Placement.HOST)])
    with pytest.raises(ValueError, match="feature_tables"):
        QuantizedEmbeddingBags(TABLES, feature_tables=[2])
    with pytest.raises(TypeError, match="must be a TableSpec"):
        QuantizedEmbeddingBags([3])
    with pytest.raises(ValueError, match="rows must be one number per table, 2, got"):
        made.with_rows([1])
    with pytest.raises(TypeError, match="rows must be a sequence"):
        made.with_rows(3)
    with pytest.raises(ValueError, match="weights must be real"):
        made.write_rows(0, torch.zeros(50, 12, dtype=torch.complex64))


def test_says_what_it_is() -> None:
    text = repr(QuantizedEmbeddingBags(TABLES, 4, pooling=Pooling.MEAN))
    assert "item: 50 x 12, table_1: 7 x 5" in text
    assert "int4, pooling=mean" in text
    both = QuantizedEmbeddingBags(TABLES, formats=["float16", "int2"])
    assert "float16, int2, pooling=sum" in repr(both)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_rows_of_any_real_dtype(dtype: torch.dtype) -> None:
    rows = (torch.randn(50, 12) * 9).to(dtype)
    tables = QuantizedEmbeddingBags.from_float(rows)
    assert torch.equal(tables.packed, QuantizedEmbeddingBags.from_float(rows.float()).packed)


@pytest.mark.parametrize("make", [TableBatchedEmbeddingBags, QuantizedEmbeddingBags])
def test_a_load_into_meta_moves_the_module_or_warns(make: type[nn.Module]) -> None:
    saved: Any = make([TableSpec(9, 4)])
    state = {key: torch.ones_like(value) for key, value in saved.state_dict().items()}
    other: Any = make([TableSpec(9, 4)], device="meta")
    with pytest.warns(UserWarning, match="copying to a module on meta, which is a no-op"):
        other.load_state_dict(state)
    other.load_state_dict(state, assign=True)
    assert all(torch.equal(value, state[key]) for key, value in other.state_dict().items())
