"""FBGEMM's inference module over emblib's tables: against plain PyTorch and against FBGEMM."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat import fbgemm as names
from emblib.compat.fbgemm_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from emblib.compat.fbgemm_operators import rowwise
from tests.compat.peer import peer_module

HOST = names.EmbeddingLocation.HOST
FORMATS = {"INT8": 8, "INT4": 4, "INT2": 2, "FP16": 16, "FP32": 32}
SIZES = [(7, 8), (5, 16), (9, 8)]
FEATURES = [0, 1, 1, 2]
BATCH = 3


def specs(*formats: str, sizes: list[tuple[int, int]] | None = None) -> list[Any]:
    kinds = [names.SparseType[name] for name in formats]
    given = SIZES if sizes is None else sizes
    return [
        (f"t{n}", *size, kind, HOST)
        for n, (size, kind) in enumerate(zip(given, kinds, strict=True))
    ]


def packed(rows: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return the bytes of rows, as TorchRec makes them: numbers, and scale and bias."""
    if FORMATS[kind] > 8:
        return rows.to(names.SparseType[kind].as_dtype()).view(torch.uint8), None
    codes = rowwise.to_fused_nbit(rows, FORMATS[kind])
    return codes[:, :-4], codes[:, -4:]


def values(rows: Tensor, kind: str) -> Tensor:
    """Return the values that rows have in a format."""
    if FORMATS[kind] > 8:
        return rows.to(names.SparseType[kind].as_dtype()).float()
    return rowwise.fused_nbit_to_float(rowwise.to_fused_nbit(rows, FORMATS[kind]), FORMATS[kind])


def batch(*, weighted: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(0, 4, (len(FEATURES) * BATCH,), generator=generator)
    ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    weights = torch.rand(ids.numel(), generator=generator) if weighted else None
    return ids, offsets, weights


def tables(sizes: list[tuple[int, int]] = SIZES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*size, generator=generator) for size in sizes]


def plain(rows: list[Tensor], mode: str, *, weighted: bool) -> Tensor:
    """Pool feature by feature with PyTorch."""
    ids, offsets, weights = batch(weighted=weighted)
    columns = []
    for number, table in enumerate(FEATURES):
        ends = offsets[number * BATCH : (number + 1) * BATCH + 1]
        part = slice(int(ends[0]), int(ends[-1]))
        found = rows[table][ids[part]]
        if weights is not None:
            found = found * weights[part].unsqueeze(1)
        if mode == "NONE":
            columns.append(found)
            continue
        bags = found.split(ends.diff().tolist())
        sums = [bag.sum(0) / (max(len(bag), 1) if mode == "MEAN" else 1) for bag in bags]
        columns.append(torch.stack(sums))
    return torch.cat(columns, 0 if mode == "NONE" else 1)


MIXES = [*((kind,) * 3 for kind in FORMATS), ("INT4", "FP16", "INT8")]


@pytest.mark.parametrize("formats", MIXES, ids="-".join)
@pytest.mark.parametrize("mode", ["SUM", "MEAN", "NONE"])
def test_lookups(formats: tuple[str, ...], mode: str) -> None:
    sizes = [(rows, 8) for rows, _ in SIZES] if mode == "NONE" else SIZES
    rows = tables(sizes)
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs(*formats, sizes=sizes),
        FEATURES,
        pooling_mode=names.PoolingMode[mode],
        device="cpu",
        output_dtype=names.SparseType.FP32,
    )
    with pytest.raises(RuntimeError, match="initialize_weights"):
        module(*batch()[:2])
    module.assign_embedding_weights(
        [packed(table, kind) for table, kind in zip(rows, formats, strict=True)]
    )
    expected = [values(table, kind) for table, kind in zip(rows, formats, strict=True)]
    weighted = mode == "SUM"
    found = module(*batch(weighted=weighted))
    torch.testing.assert_close(found, plain(expected, mode, weighted=weighted))
    assert not found.requires_grad
    assert torch.equal(copy.deepcopy(module)(*batch(weighted=weighted)), found)


def test_views_of_rows() -> None:
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs("INT8", "INT4", "FP16"), device="cpu", row_alignment=1
    )
    module.initialize_weights()
    whole = module.split_embedding_weights(split_scale_shifts=False)
    assert [tuple(rows.shape) for rows, _ in whole] == [(7, 12), (5, 12), (9, 16)]
    split = module.split_embedding_weights_with_scale_bias(2)
    shapes = [[None if part is None else tuple(part.shape) for part in rows] for rows in split]
    assert shapes == [[(7, 8), (7, 1), (7, 1)], [(5, 8), (5, 1), (5, 1)], [(9, 16), None, None]]
    numbers, scale, bias = split[0]
    assert scale is not None
    assert bias is not None
    numbers[2], scale[2], bias[2] = torch.arange(8), 0.5, 1.0
    ids, offsets = torch.tensor([2, 0, 0]), torch.tensor([0, 1, 2, 3])
    found = module(ids, offsets)
    assert found.dtype == torch.float16
    assert found[0, :8].tolist() == [1 + 0.5 * n for n in range(8)]
    row = whole[0][0][2].clone()
    module.embedding_inplace_update([0], [[4]], [row.unsqueeze(0)])
    assert torch.equal(whole[0][0][4], row)
    with pytest.raises(ValueError, match=r"one entry per update, got \[2, 1, 1\]"):
        module.embedding_inplace_update([0, 0], [[4]], [torch.zeros_like(row).unsqueeze(0)])
    module.embedding_inplace_update([1], [[]], [torch.zeros(0)])
    two = torch.stack([row, row])
    for tables_, rows_, new_rows, error in (
        ([0, 9], [[4], [0]], [two[:1] + 1, two[:1]], IndexError),
        ([0, 0], [[4], [99]], [two[:1] + 1, two[:1]], IndexError),
        ([0, 0], [[4], [-1]], [two[:1] + 1, two[:1]], IndexError),
        ([0, 0], [[4], [1, 2]], [two[:1] + 1, two[:1]], ValueError),
        ([0, 0], [[4], [1]], [two[:1] + 1, two[:1].float() + 300], ValueError),
    ):
        with pytest.raises(error):
            module.embedding_inplace_update(tables_, rows_, new_rows)
    assert torch.equal(whole[0][0][4], row)
    module.fill_random_weights()
    assert int(whole[1][0][:, 4:].max()) > 0
    assert int(whole[1][0][:, :4].max()) == 0
    wrong = module.split_embedding_weights()
    wrong[1] = (wrong[1][0][:, 1:], wrong[1][1])
    with pytest.raises(ValueError, match=r"table 't1': expected \[5, 8\], got \[5, 7\]"):
        module.assign_embedding_weights(wrong)
    with pytest.raises(ValueError, match="table 't0': expected 2 tensors or None, got 1"):
        module.assign_embedding_weights([wrong[0][:1], *wrong[1:]])


@pytest.mark.parametrize("kinds", [("INT4",) * 3, ("FP16", "INT8", "INT4")], ids="-".join)
def test_graphs(kinds: tuple[str, ...]) -> None:
    module = IntNBitTableBatchedEmbeddingBagsCodegen(specs(*kinds), device="cpu")
    module.assign_embedding_weights(
        [packed(table, kind) for table, kind in zip(tables(), kinds, strict=True)]
    )
    ids, offsets = torch.tensor([2, 0, 0, 4]), torch.tensor([0, 1, 3, 4])
    expected = module(ids, offsets)

    class Caller(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [module]

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            return self.tables[0].forward(indices=ids, offsets=offsets)

    graph = torch.fx.symbolic_trace(Caller())
    assert torch.equal(graph(ids, offsets), expected)
    assert torch.equal(torch.jit.script(module)(ids, offsets), expected)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"index_remapping": [torch.arange(7)]}, ValueError, "3 maps, got 1"),
        ({"reverse_qparam": True}, NotImplementedError, "begins with scale"),
        ({"scale_bias_size_in_bytes": 8}, NotImplementedError, "two float16"),
        ({"gather_uvm_cache_stats": True}, NotImplementedError, "no cache"),
        ({"output_dtype": names.SparseType.INT8}, NotImplementedError, "output_dtype"),
        ({"fp8_exponent_bits": 3}, NotImplementedError, "4 or 5 exponent bits"),
        ({"feature_table_map": [0, 0]}, ValueError, "feature_table_map"),
        ({"pooling_mode": names.PoolingMode.NONE}, ValueError, "one dim"),
    ],
)
def test_other_options_raise(arguments: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        IntNBitTableBatchedEmbeddingBagsCodegen(
            specs("INT8", "INT8", "INT8"), **{"device": "cpu", **arguments}
        )


def pruned(kinds: Any, module: type, *, is_array: bool) -> Any:
    """Make two tables: the first has every third of 30 ids, the second all of its 8."""
    host, fp32 = kinds.EmbeddingLocation.HOST, kinds.SparseType.FP32
    ids = torch.arange(30)
    rows = torch.rand(10, 4, generator=torch.Generator().manual_seed(0))
    return module(
        [("a", 10, 4, fp32, host), ("b", 8, 4, fp32, host)],
        index_remapping=[torch.where(ids % 3 == 0, ids // 3, -1), None],
        device="cpu",
        output_dtype=kinds.SparseType.FP32,
        use_array_for_index_remapping=is_array,
        weight_lists=[(rows.view(torch.uint8), None), (rows[:8].view(torch.uint8), None)],
    )


@pytest.mark.parametrize("is_array", [True, False])
def test_pruned_tables(is_array: bool) -> None:
    module = pruned(names, IntNBitTableBatchedEmbeddingBagsCodegen, is_array=is_array)
    ids, offsets = torch.tensor([3, 4, 27, 5, 0, 7, 29]), torch.tensor([0, 3, 5, 6, 7])
    ids[-1] = 2
    rows = module.split_embedding_weights()[0][0].view(torch.float32)
    found = module(ids, offsets)
    expected = [rows[1] + rows[9], rows[0], rows[7], rows[2]]
    torch.testing.assert_close(
        found.view(2, 2, 4).transpose(0, 1).reshape(4, 4), torch.stack(expected)
    )
    assert ids.tolist() == [3, 4, 27, 5, 0, 7, 2]
    with pytest.warns(UserWarning, match="index 30 at position 0"):
        module(torch.tensor([30]), torch.tensor([0, 1, 1]))
    assert torch.equal(torch.jit.script(module)(ids, offsets), found)
    shared = IntNBitTableBatchedEmbeddingBagsCodegen(
        [("a", 2, 4, names.SparseType.FP16, names.EmbeddingLocation.HOST)],
        [0, 0],
        [torch.tensor([-1, 1, 0])],
        device="cpu",
    )
    shared.fill_random_weights()
    table = shared.split_embedding_weights()[0][0].view(torch.float16)
    found = shared(torch.tensor([1, 0, 2]), torch.tensor([0, 1, 3]))
    assert torch.equal(found, torch.cat([table[1], table[0]]).unsqueeze(0))


@pytest.mark.parametrize("is_array", [True, False])
def test_pruned_tables_are_those_of_fbgemm(is_array: bool) -> None:
    theirs = peer()
    other = pruned(theirs, theirs.IntNBitTableBatchedEmbeddingBagsCodegen, is_array=is_array)
    mine = pruned(names, IntNBitTableBatchedEmbeddingBagsCodegen, is_array=is_array)
    generator = torch.Generator().manual_seed(1)
    ids = torch.cat([torch.randint(0, n, (20,), generator=generator) for n in (30, 8)]).int()
    offsets = torch.arange(0, 41, 5).int()
    assert torch.equal(mine(ids, offsets), other(ids, offsets))


@pytest.mark.parametrize("is_pruned", [False, True])
def test_bytes_of_rows(is_pruned: bool) -> None:
    """INT8 output without pooling is the rows themselves, zeros for pruned ids."""
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs("INT8", "INT8", sizes=[(3, 8), (2, 8)]),
        index_remapping=[torch.tensor([2, -1, 0]), torch.arange(2)] if is_pruned else None,
        pooling_mode=names.PoolingMode.NONE,
        device="cpu",
        output_dtype=names.SparseType.INT8,
    )
    module.fill_random_weights()
    header = torch.tensor([2, 1], dtype=torch.float16).view(torch.uint8)
    module.assign_embedding_weights(
        [(numbers.clone(), header) for numbers, _ in module.split_embedding_weights()]
    )
    found = module(torch.tensor([2, 1, 1, 0]), torch.tensor([0, 1, 2, 3, 4]))
    (first, _), (second, _) = module.split_embedding_weights(split_scale_shifts=False)
    expected = [first[0], 0 * first[0]] if is_pruned else [first[2], first[1]]
    assert torch.equal(found, torch.stack([*expected, second[1], second[0]]))
    with pytest.warns(UserWarning, match="1 indices and 0 offsets out of bounds"):
        assert torch.equal(module(torch.tensor([7]), torch.tensor([0, 1, 1]))[0], first[0])
    assert module(torch.tensor([]).long(), torch.tensor([0])).shape == (0, first.size(1))
    with pytest.raises(RuntimeError, match="with NONE, scale the output"):
        module(torch.tensor([1]), torch.tensor([0, 1, 1]), torch.tensor([2.0]))


@pytest.mark.parametrize("bits", [4, 5])
@pytest.mark.parametrize("bias", [7, 15])
def test_fp8_rows_are_those_of_fbgemm(bits: int, bias: int) -> None:
    theirs = peer()
    made = []
    codes = torch.arange(240).view(2, 120).to(torch.uint8) % 120
    codes[1] |= 0x80
    for kinds, kind in (
        (names, IntNBitTableBatchedEmbeddingBagsCodegen),
        (theirs, theirs.IntNBitTableBatchedEmbeddingBagsCodegen),
    ):
        module = kind(
            [("t", 2, 120, kinds.SparseType.FP8, kinds.EmbeddingLocation.HOST)],
            device="cpu",
            output_dtype=kinds.SparseType.FP32,
            weight_lists=[(codes, None)],
            fp8_exponent_bits=bits,
            fp8_exponent_bias=bias,
        )
        made.append(module(torch.tensor([1, 0], dtype=torch.int32), torch.tensor([0, 1, 2]).int()))
    assert torch.equal(*made)
    largest = torch.full((2, 120), 0xFF, dtype=torch.uint8)
    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        specs("FP8", sizes=[(2, 120)]), device="cpu", fp8_exponent_bits=bits
    )
    with pytest.raises(ValueError, match="FP8 rows have bytes up to"):
        module.assign_embedding_weights([(largest, None)])


def test_other_formats_raise() -> None:
    with pytest.raises(NotImplementedError, match="rows of MX4 are not supported"):
        IntNBitTableBatchedEmbeddingBagsCodegen(specs("INT8", "MX4", "INT8"), device="cpu")


def test_other_locations_raise() -> None:
    caching = names.EmbeddingLocation.MANAGED_CACHING
    with pytest.raises(NotImplementedError, match="location"):
        IntNBitTableBatchedEmbeddingBagsCodegen(
            [("t", 4, 8, names.SparseType.INT8, caching)], device="meta"
        )


# Against FBGEMM


def peer() -> Any:
    return peer_module("fbgemm_gpu.split_table_batched_embeddings_ops_inference")


def test_signatures_are_those_of_fbgemm() -> None:
    theirs = peer().IntNBitTableBatchedEmbeddingBagsCodegen
    mine = IntNBitTableBatchedEmbeddingBagsCodegen
    for method, function in vars(mine).items():
        if inspect.isfunction(function) and (method == "__init__" or not method.startswith("_")):
            if method == "extra_repr":
                continue
            found = list(inspect.signature(function).parameters)
            assert found == list(inspect.signature(getattr(theirs, method)).parameters), method


@pytest.mark.parametrize("formats", MIXES, ids="-".join)
@pytest.mark.parametrize("mode", ["SUM", "MEAN", "NONE"])
@pytest.mark.parametrize("output", ["FP32", "FP16"])
def test_lookups_of_fbgemm(formats: tuple[str, ...], mode: str, output: str) -> None:
    """Rows and views have the bytes of FBGEMM's, and lookups its values."""
    theirs = peer()
    sizes = [(rows, 8) for rows, _ in SIZES] if mode == "NONE" else SIZES
    weights = [packed(table, kind) for table, kind in zip(tables(sizes), formats, strict=True)]
    made = []
    for kinds, kind in (
        (names, IntNBitTableBatchedEmbeddingBagsCodegen),
        (theirs, theirs.IntNBitTableBatchedEmbeddingBagsCodegen),
    ):
        given = [
            (name, *size, kinds.SparseType[fmt.name], kinds.EmbeddingLocation.HOST)
            for name, *size, fmt, _ in specs(*formats, sizes=sizes)
        ]
        made.append(
            kind(
                given,
                FEATURES,
                pooling_mode=kinds.PoolingMode[mode],
                device="cpu",
                output_dtype=kinds.SparseType[output],
                weight_lists=weights,
            )
        )
    for split in (0, 1, 2):
        for mine, other in zip(
            *(module.split_embedding_weights_with_scale_bias(split) for module in made), strict=True
        ):
            for part, their_part in zip(mine, other, strict=True):
                assert (part is None) == (their_part is None)
                assert part is None or torch.equal(part, their_part)
    given_batch = batch(weighted=mode == "SUM")
    mine, other = (
        module(*(None if x is None else x.clone() for x in given_batch)) for module in made
    )
    assert mine.dtype == other.dtype
    tolerance = 1e-5 if output == "FP32" else 2e-3
    torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
