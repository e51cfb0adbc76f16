"""The operators of `torch.ops.fbgemm` against plain Python, and against FBGEMM's schemas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.compat.fbgemm_operators import (
    OPERATORS,
    bucketize,
    calibration,
    jagged,
    pooled,
    rowwise,
)
from tests.compat.peer import peer_module

LENGTHS = torch.tensor([[2, 0, 3], [1, 4, 0], [0, 2, 2]])
TOTAL = int(LENGTHS.sum())
VALUES = torch.arange(100, 100 + TOTAL)
OFFSETS = torch.tensor([0, 2, 2, 5, 6, 10, 10, 10, 12, 14])


def bags(values: Tensor, lengths: Tensor) -> list[list[Any]]:
    return [part.tolist() for part in values.split(lengths.flatten().tolist())]


def test_sums_of_lengths() -> None:
    flat = LENGTHS.flatten().int()
    sums = [0, *itertools.accumulate(flat.tolist())]
    for operation, expected in (
        (jagged.complete_cumsum, sums),
        (jagged.inclusive_cumsum, sums[1:]),
        (jagged.exclusive_cumsum, sums[:-1]),
    ):
        found = operation(flat)
        assert found.dtype == torch.int32
        assert found.tolist() == expected
    assert jagged.complete_cumsum(LENGTHS).tolist() == [[0, 2, 2, 5], [0, 1, 5, 5], [0, 0, 2, 4]]
    ranges = [i for n in flat.tolist() for i in range(n)]
    assert jagged.lengths_range(flat, [TOTAL]).tolist() == ranges
    assert jagged.offsets_range(OFFSETS[:-1], TOTAL).tolist() == ranges


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32])
def test_segment_sums(dtype: torch.dtype) -> None:
    values, ends = torch.arange(8).to(dtype), [0, 1, 1, 4]
    found = jagged.segment_sum_csr(2, torch.tensor(ends), values)
    expected = [sum(range(2 * a, 2 * b)) for a, b in itertools.pairwise(ends)]
    assert found.dtype == dtype
    assert found.tolist() == expected
    for wrong in ([0, 2, 1], [0, 2, 5], [-1, 2, 3]):
        with pytest.raises(RuntimeError, match="must increase within the number of values = 8"):
            jagged.segment_sum_csr(2, torch.tensor(wrong), values)


@pytest.mark.parametrize("permute", [[2, 0, 1], [1], [0, 0, 2, 1], []])
def test_permutations_of_features(permute: list[int]) -> None:
    weights = torch.rand(TOTAL, requires_grad=True)
    order = torch.tensor(permute, dtype=torch.int32)
    lengths, values, chosen = jagged.permute_2d_sparse_data(order, LENGTHS, VALUES, weights)
    table = [bags(VALUES, LENGTHS)[3 * row : 3 * row + 3] for row in range(3)]
    assert lengths.tolist() == [LENGTHS[row].tolist() for row in permute]
    assert values.tolist() == [v for row in permute for bag in table[row] for v in bag]
    assert chosen is not None
    assert torch.equal(chosen, weights[values - 100])
    chosen.sum().backward()
    assert weights.grad is not None
    assert torch.equal(weights.grad, torch.bincount(values - 100, minlength=TOTAL).float())
    flat, again, none = jagged.permute_2d_sparse_data_input1d(
        order, LENGTHS.flatten(), VALUES, 3, None, values.numel()
    )
    assert (flat.tolist(), again.tolist(), none) == (
        lengths.flatten().tolist(),
        values.tolist(),
        None,
    )


def test_padding_and_back() -> None:
    rows = torch.rand(TOTAL, 2, dtype=torch.float64, requires_grad=True)
    dense = jagged.jagged_to_padded_dense(rows, [OFFSETS], [3], 0.5)
    for number, bag in enumerate(bags(VALUES - 100, LENGTHS)):
        for position in range(3):
            found = dense[number, position]
            if position < len(bag):
                assert torch.equal(found, rows[bag[position]])
            else:
                assert found.tolist() == [0.5, 0.5]
    longest = jagged.jagged_to_padded_dense(rows, [OFFSETS], [4])
    assert torch.equal(jagged.dense_to_jagged(longest, [OFFSETS], TOTAL)[0], rows)
    no_columns = longest[:, :0].clone().requires_grad_()
    found, _ = jagged.dense_to_jagged(no_columns, [OFFSETS], TOTAL)
    found.sum().backward()
    assert torch.equal(found, torch.zeros_like(rows))
    assert torch.autograd.gradcheck(lambda x: jagged.jagged_2d_to_dense(x, OFFSETS, 3), rows)
    outer = torch.tensor([0, 2, 5, 9])
    nested = jagged.jagged_to_padded_dense(rows, [outer, OFFSETS], [3, 4])
    assert nested.shape == (3, 3, 4, 2)
    assert torch.equal(nested[1, 2, :4], longest[4])


def test_selection_of_samples() -> None:
    order = torch.tensor([2, 0, 2])
    found, lengths = jagged.keyed_jagged_index_select_dim1(
        VALUES, LENGTHS.flatten(), OFFSETS, order, 3
    )
    every = bags(VALUES, LENGTHS)
    expected = [every[3 * key + sample] for key in range(3) for sample in order.tolist()]
    assert bags(found, lengths) == expected


def test_deduplication() -> None:
    """Two features of table 0 and one of table 1, two samples."""
    offsets = torch.tensor([0, 2, 3, 5, 6, 8, 9])
    indices = torch.tensor([1, 4, 1, 4, 0, 1, 5, 2, 5])
    lengths, ends, unique, reverse = jagged.jagged_unique_indices(
        torch.tensor([0, 0, 10, 20]), torch.tensor([0, 2, 3]), offsets, indices
    )
    assert unique.tolist() == [0, 1, 4, 2, 5]
    assert unique[reverse].tolist() == indices.tolist()
    assert lengths.tolist() == [1, 1, 1, 0, 1, 1]
    assert ends.tolist() == [0, 1, 2, 3, 3, 4, 5]
    for index in (-1, 10):  # of feature 0, whose table has 10 rows
        with pytest.raises(RuntimeError, match=f"must be rows of their table, got .*{index}"):
            jagged.jagged_unique_indices(
                torch.tensor([0, 0, 10, 20]),
                torch.tensor([0, 2, 3]),
                offsets,
                torch.cat([torch.tensor([index]), indices[1:]]),
            )


@pytest.mark.parametrize("kind", ["blocks", "many blocks", "bounds", "kept", "sizes"])
def test_blocks_of_rows(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 5, (12,), generator=generator)
    indices = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(indices.numel(), generator=generator)
    batch = [3, 4, 5] if kind == "sizes" else [4, 4, 4]
    blocks = [1, 2, 3] if kind == "many blocks" else [5, 7, 10]
    bounds = [[0, 3, 9, 20], [0, 13, 19, 50], [0, 3, 5, 6]]
    options: dict[str, Any] = {
        "blocks": {},
        "many blocks": {"total_num_blocks": torch.tensor([12, 21, 6])},
        "bounds": {"block_bucketize_pos": [torch.tensor(b) for b in bounds]},
        "kept": {"keep_orig_idx": True},
        "sizes": {"batch_size_per_feature": torch.tensor(batch), "max_B": 5},
    }[kind]
    found = bucketize.block_bucketize_sparse_features(
        lengths, indices, True, True, torch.tensor(blocks), 3, weights, **options
    )
    feature_of_bag = [f for f, n in enumerate(batch) for _ in range(n)]
    expected: list[list[list[tuple[int, float, int]]]] = [[[] for _ in lengths] for _ in range(3)]
    at = 0
    for bag, length in enumerate(lengths.tolist()):
        for position in range(length):
            row, feature = int(indices[at]), feature_of_bag[bag]
            if kind == "bounds":
                starts = bounds[feature]
                inside = [n for n in range(3) if starts[n] <= row < starts[n + 1]]
                where = (inside[0], row - starts[inside[0]]) if inside else (row % 3, row // 3)
            else:
                total = [12, 21, 6][feature] if kind == "many blocks" else 3
                size = blocks[feature] * total // 3
                if row < size * 3:
                    where = (row // size, row % size)
                else:
                    where = (row % total // (total // 3), row // total)
            local = row if kind == "kept" else where[1]
            expected[where[0]][bag].append((local, float(weights[at]), position))
            at += 1
    flat = [bag for bucket in expected for bag in bucket]
    entries = [entry for bag in flat for entry in bag]
    assert found[0].tolist() == [len(bag) for bag in flat]
    assert found[2] is not None
    assert found[3] is not None
    assert found[4] is not None
    assert list(zip(*(part.tolist() for part in found[1:4]), strict=True)) == entries
    assert torch.equal(found[2][found[4]], weights)


def test_bounds_are_repaired_or_raise() -> None:
    rows, offsets = torch.tensor([5, 7]), [0, 2, 1, 9, 5]
    for mode in (1, 2):
        indices, repaired = torch.tensor([1, 99, 2, -5, -1]), torch.tensor(offsets)
        count = torch.zeros(1, dtype=torch.int64)
        if mode == 1:
            with pytest.warns(UserWarning, match="repaired"):
                bucketize.bounds_check_indices(rows, indices, repaired, mode, count)
        else:
            bucketize.bounds_check_indices(rows, indices, repaired, mode, count)
        assert indices.tolist() == [1, 0, 2, 0, -1]
        assert repaired.tolist() == [0, 2, 2, 5, 5]
        assert bool(count) == (mode == 1)
    with pytest.raises(RuntimeError, match="out of range"):
        bucketize.bounds_check_indices(rows, torch.tensor([5]), torch.tensor([0, 1, 1]), 0, count)


def test_int32_indices_of_more_rows_than_int32_holds() -> None:
    indices = torch.tensor([0, (1 << 31) - 1, -5, -1], dtype=torch.int32)
    offsets, count = torch.tensor([0, 4], dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    bucketize.bounds_check_indices(torch.tensor([1 << 31]), indices, offsets, 2, count)
    assert indices.tolist() == [0, (1 << 31) - 1, 0, -1]


@pytest.mark.parametrize("groups", [[["a", "c"], ["d", "b"]], [["a"], ["d", "b", "a"], ["c"]]])
def test_groups_of_keys(groups: list[list[str]]) -> None:
    inputs = [torch.rand(2, 7, requires_grad=True), torch.rand(2, 11)]
    keys, widths = [["a", "b"], ["c", "d"]], [[3, 4], [5, 6]]
    parts = dict(zip("abcd", inputs[0].split([3, 4], 1) + inputs[1].split([5, 6], 1), strict=True))
    expected = [torch.cat([parts[key] for key in group], 1) for group in groups]
    arguments = pooled.kt_regroup_arguments(inputs[0], keys, widths, groups)
    for found in (
        pooled.regroup_keyed_tensor(inputs, keys, widths, groups),
        pooled.permute_multi_embedding(inputs, *arguments),
    ):
        assert all(map(torch.equal, found, expected))
        (gradient,) = torch.autograd.grad(sum(part.sum() for part in found), inputs[0])
        uses = [sum(key in group for group in groups) for key in "ab"]
        assert gradient[0].tolist() == [uses[0]] * 3 + [uses[1]] * 4


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_of_few_bits(bits: int) -> None:
    rows = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    step = (rows.amax(1) - rows.amin(1)) / (2**bits - 1)
    found = rowwise.fused_nbit_to_float(rowwise.to_fused_nbit(rows, bits), bits)
    assert bool(((found - rows).abs() <= step.unsqueeze(1) * 0.55 + 2e-3).all())
    if bits == 8:
        again = rowwise.fused_8bit_to_float(rowwise.to_fused_8bit(rows))
        assert bool(((again - rows).abs() <= step.unsqueeze(1) * 0.51).all())


NOT_ON_CPUS = {"init_address_lookup", "prune_embedding_tables", "remap_indices_update_utils"}
"""Operators that FBGEMM's CPU build does not register."""


def test_schemas_are_those_of_fbgemm() -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    for name, (schema, _) in OPERATORS.items():
        if name in NOT_ON_CPUS:
            continue
        theirs = getattr(torch.ops.fbgemm, name).default
        assert str(theirs._schema) == f"fbgemm::{torch._C.parse_schema(schema)}"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("buckets", [1, 2, 5])
@pytest.mark.parametrize("is_uneven", [False, True])
def test_buckets_are_those_of_fbgemm(dtype: torch.dtype, buckets: int, is_uneven: bool) -> None:
    """Rows beyond `block size * buckets` too, which raw ids of hashed tables are."""
    peer_module("fbgemm_gpu.sparse_ops")
    generator = torch.Generator().manual_seed(buckets)
    batch = torch.tensor([3, 0, 7, 6] if is_uneven else [4, 4, 4, 4])
    lengths = torch.randint(0, 30, (int(batch.sum()),), generator=generator).to(dtype)
    rows = torch.randint(0, 200, (int(lengths.sum()),), generator=generator).to(dtype)
    sizes = torch.tensor([7, 100, 31, 1], dtype=dtype)
    weights = torch.rand(rows.numel(), generator=generator)
    options: dict[str, Any] = {"keep_orig_idx": buckets == 5}
    if is_uneven:
        options |= {"batch_size_per_feature": batch.to(dtype), "max_B": 7}
    arguments = (lengths, rows, True, True, sizes, buckets, weights)
    found = bucketize.block_bucketize_sparse_features(*arguments, **options)
    theirs = torch.ops.fbgemm.block_bucketize_sparse_features(*arguments, **options)
    for mine, other in zip(found, theirs, strict=True):
        assert mine is not None
        assert mine.dtype == other.dtype
        assert torch.equal(mine, other)


def test_native_buckets_are_the_plain_ones() -> None:
    """The bucket of each lookup, which the plain form returns, does not change the others."""
    lengths, rows = torch.tensor([3, 0, 2, 4]), torch.tensor([5, 60, 0, 9, 19, 7, 20, 3, 3])
    sizes = torch.tensor([10, 4])
    native = bucketize.block_bucketize_sparse_features(lengths, rows, True, True, sizes, 2)
    *plain, bucket = bucketize.block_bucketize_sparse_features_inference(
        lengths, rows, True, True, sizes, 2, return_bucket_mapping=True
    )
    assert bucket is not None
    assert bucket.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    for mine, other in zip(native, plain, strict=True):
        assert (mine is None and other is None) or torch.equal(mine, other)


def arguments_of(name: str) -> dict[str, Any]:
    """Valid arguments of an operator; `#` and a letter after the name tell forms apart."""
    ids, flat = torch.arange(TOTAL) % 4, LENGTHS.flatten()
    lookups = {"indices": ids, "offsets": OFFSETS.clone(), "weights": torch.rand(TOTAL)}
    checked = {"rows_per_table": torch.full((3,), 4), "warning": torch.zeros(1).long(), **lookups}
    blocks = {
        "lengths": flat,
        "indices": ids,
        "bucketize_pos": False,
        "sequence": True,
        "block_sizes": torch.full((3,), 2),
        "my_size": 2,
        "weights": torch.rand(TOTAL),
    }
    varied = torch.tensor([1, 6, 2])
    everything: dict[str, dict[str, Any]] = {
        "bounds_check_indices": {**checked, "bounds_check_mode": 3},
        "bounds_check_indices#v": {
            **checked,
            "bounds_check_mode": 1,
            "B_offsets": torch.tensor([0, 1, 7, 9], dtype=torch.int32),
            "max_B": 6,
        },
        "block_bucketize_sparse_features": blocks,
        "block_bucketize_sparse_features#v": {
            **blocks,
            "batch_size_per_feature": varied,
            "max_B": 6,
        },
        "block_bucketize_sparse_features#p": {
            **blocks,
            "block_bucketize_pos": [torch.tensor([0, 1, 4])] * 3,
        },
        "block_bucketize_sparse_features#t": {
            **blocks,
            "total_num_blocks": torch.full((3,), 4),
            "keep_orig_idx_per_feature": torch.tensor([True, False, True]),
        },
        "block_bucketize_sparse_features_2d_weights": {
            **blocks,
            "weights": torch.rand(TOTAL, 3),
            "weights_dim": 3,
        },
        "bucketize_sparse_features": {
            "lengths": flat,
            "indices": ids,
            "bucketize_pos": True,
            "my_size": 3,
            "weights": torch.rand(TOTAL),
        },
        "expand_into_jagged_permute": {
            "permute": torch.tensor([1, 0], dtype=torch.int32),
            "input_offset": torch.tensor([0, 3, 5], dtype=torch.int32),
            "output_offset": torch.tensor([0, 2, 5], dtype=torch.int32),
            "output_size": 5,
        },
        "segment_sum_csr": {
            "batch_size": 2,
            "csr_seg": torch.tensor([0, 1, 3]),
            "values": torch.rand(6),
        },
        "jagged_2d_to_dense": {
            "values": torch.rand(TOTAL, 2),
            "offsets": OFFSETS,
            "max_sequence_length": 2,
        },
        "dense_to_jagged": {"dense": torch.rand(9, 4, 2), "x_offsets": [OFFSETS]},
        "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf": {"input": torch.rand(3, 8), "bit_rate": 4},
        "FusedNBitRowwiseQuantizedSBHalfToFloat": {
            "input": rowwise.to_fused_nbit(torch.rand(3, 8), 4),
            "bit_rate": 4,
        },
    }
    return everything[name]


WRONG: dict[str, dict[str, Any]] = {
    "bounds_check_indices": {
        "weights": torch.rand(TOTAL + 1),
        "indices": torch.arange(TOTAL).view(2, -1),
        "offsets": torch.arange(9),
        "rows_per_table": torch.ones(3, 1).long(),
    },
    "bounds_check_indices#v": {
        "weights": torch.rand(TOTAL - 2),
        "indices": torch.zeros(TOTAL),
        "B_offsets": torch.tensor([0, 1, 9], dtype=torch.int32),
        "offsets": OFFSETS[:-1].clone(),
        "rows_per_table": torch.full((4,), 4),
    },
    "block_bucketize_sparse_features": {
        "weights": torch.rand(TOTAL + 3),
        "block_sizes": torch.full((2,), 2),
        "my_size": 0,
        "indices": torch.zeros(TOTAL),
    },
    "block_bucketize_sparse_features#v": {
        "batch_size_per_feature": torch.tensor([1, 8]),
        "weights": torch.rand(TOTAL - 1),
    },
    "block_bucketize_sparse_features#p": {
        "block_bucketize_pos": [torch.tensor([0, 1, 4])] * 2,
        "my_size": 3,
        "block_sizes": torch.full((9,), 2)[:0],
        "weights": torch.rand(TOTAL + 1),
    },
    "block_bucketize_sparse_features#t": {
        "total_num_blocks": torch.tensor([4, 4, 3]),
        "keep_orig_idx_per_feature": torch.tensor([True, False]),
    },
    "block_bucketize_sparse_features_2d_weights": {"weights": torch.rand(TOTAL + 1, 3)},
    "bucketize_sparse_features": {
        "weights": torch.rand(TOTAL + 1),
        "my_size": 0,
        "indices": torch.zeros(TOTAL),
    },
    "expand_into_jagged_permute": {
        "input_offset": torch.tensor([0, 3, 5, 5], dtype=torch.int32),
        "output_offset": torch.tensor([0, 5], dtype=torch.int32),
    },
    "segment_sum_csr": {"values": torch.rand(5), "csr_seg": torch.tensor([0, 2, 1])},
    "jagged_2d_to_dense": {"offsets": OFFSETS.view(2, -1), "values": torch.rand(TOTAL - 1, 2)},
    "dense_to_jagged": {"dense": torch.rand(10, 4, 2), "x_offsets": []},
    "FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf": {"input": torch.rand(8)},
    "FusedNBitRowwiseQuantizedSBHalfToFloat": {"input": torch.zeros(12).byte(), "bit_rate": 0},
}


@pytest.mark.parametrize(("name", "wrong"), [(n, w) for n, of in WRONG.items() for w in of])
def test_operators_refuse_tensors_that_do_not_fit(name: str, wrong: str) -> None:
    """FBGEMM's raise, or read memory outside of them."""
    operator = OPERATORS[name.partition("#")[0]][1]
    operator(**arguments_of(name))
    arguments = {**arguments_of(name), wrong: WRONG[name][wrong]}
    before = {k: v.clone() for k, v in arguments.items() if isinstance(v, Tensor)}
    with pytest.raises((RuntimeError, IndexError, ValueError)):
        operator(**arguments)
    for key, value in before.items():
        assert torch.equal(arguments[key], value), f"{key} was written"


ROWS, IDS = torch.rand(2, 4), torch.tensor([0])
WRONG_LENGTHS: list[tuple[str, tuple[Any, ...], str]] = [
    ("regroup_keyed_tensor", ([ROWS], [["a", "b"]], [[2]], [["a"]]), r"keys\[0\], lengths\[0\]"),
    ("regroup_keyed_tensor", ([ROWS], [["a"], ["b"]], [[2], [2]], [["b"]]), "pooled_embs, keys"),
    ("kt_regroup_arguments", (ROWS, [["a"]], [], [["a"]]), "keys, lengths"),
    ("group_index_select_dim0", ([ROWS], [IDS, IDS]), "input_group, indices_group"),
    ("batch_index_select_dim0", (ROWS.flatten(), IDS, [1], [2, 1], [4]), "input_num_indices, "),
    ("sum_reduce_to_one", ([], torch.device("cpu")), "at least one tensor"),
    ("stacked_jagged_1d_to_dense", (IDS, IDS.view(1, 1), [0, 1], [1, 1], 0), "max_lengths_per_key"),
    ("bottom_k_per_row", (ROWS, torch.arange(4), True), "1 or 2 rows"),
    ("bottom_k_per_row", (ROWS[:0], torch.arange(2), True), "input must have rows"),
    ("batched_unary_embeddings", (ROWS, IDS, IDS, IDS[:0]), "table_offsets"),
    ("init_address_lookup", (IDS, torch.tensor([0, 1]), torch.tensor([1, 1])), "emb_sizes"),
    ("prune_embedding_tables", (1, 1, IDS, IDS, torch.tensor([0, 1]), IDS[:0]), "emb_sizes"),
    ("remap_indices_update_utils", (0, IDS, IDS[:0], *[IDS] * 5, None), "buffer_idx"),
    ("remap_indices_update_utils", (0, IDS, IDS, *[IDS] * 5, []), "full_values_list"),
    ("transpose_embedding_input", (IDS, 4, IDS[:0], IDS), "hash_size_cumsum"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG_LENGTHS)
def test_operators_name_arguments_of_wrong_length(
    name: str, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        OPERATORS[name][1](*arguments)


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_weights_of_another_length_raise_as_in_fbgemm(mode: int) -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    for count in (0, TOTAL - 1, TOTAL, TOTAL + 1):
        arguments = arguments_of("bounds_check_indices")
        arguments |= {"bounds_check_mode": mode, "weights": torch.rand(count)}
        refused = []
        for check in (torch.ops.fbgemm.bounds_check_indices, bucketize.bounds_check_indices):
            try:
                check(**arguments)
            except RuntimeError:
                refused.append(check)
        assert len(refused) == (0 if count in (0, TOTAL) else 2)


def test_the_bucket_of_a_lookup_has_the_dtype_of_its_row() -> None:
    arguments = {**arguments_of("block_bucketize_sparse_features"), "return_bucket_mapping": True}
    arguments["lengths"] = arguments["lengths"].int().view(3, 3)
    found = bucketize.block_bucketize_sparse_features_inference(**arguments)
    assert found[5] is not None
    assert found[5].dtype == torch.int64


@pytest.mark.parametrize("tables", [1, 3])
@pytest.mark.parametrize("broadcast", [False, True])
def test_requests_are_reordered_by_table(tables: int, broadcast: bool) -> None:
    first, count = torch.tensor([0, 2, 2, 5], dtype=torch.int32), 5
    segments = tables * (3 if broadcast else count)
    lengths = torch.arange(segments) % 4
    ids = torch.arange(int(lengths.sum()))
    parts, expected = ids.split(lengths.tolist()), []
    for table in range(tables):
        for request, (begin, end) in enumerate(itertools.pairwise(first.tolist())):
            for ad in range(end - begin):
                inside = table * (end - begin) + ad
                segment = request * tables + table if broadcast else tables * begin + inside
                expected.append(parts[segment])
    found = jagged.reorder_batched_ad_lengths(lengths, first, count, broadcast)
    assert found.tolist() == [len(part) for part in expected]
    sums = [jagged.complete_cumsum(x) for x in (lengths, found)]
    options = (broadcast, int(sums[1][-1]))
    moved = jagged.reorder_batched_ad_indices(sums[0], ids, sums[1], first, count, *options)
    assert moved.tolist() == torch.cat(expected).tolist()
    if not broadcast:
        wide = jagged.reorder_batched_ad_lengths(lengths, first, count, max_batch_size=7)
        assert wide.view(tables, 7)[:, 5:].eq(0).all()
        assert torch.equal(wide.view(tables, 7)[:, :5].flatten(), found)
    with pytest.raises(RuntimeError, match="entries per table"):
        jagged.reorder_batched_ad_lengths(lengths[:-1], first, count, broadcast)


def test_jagged_and_dense_elementwise() -> None:
    """Two levels; the dense tensor is shorter than some segments."""
    outer, inner = torch.tensor([0, 2, 5]), torch.tensor([0, 1, 3, 3, 6, 9])
    values, dense = torch.rand(9, 3), torch.rand(2, 2, 2, 3)
    added, offsets = jagged.jagged_dense_add(values, [outer, inner], dense)
    multiplied, _ = jagged.jagged_dense_mul(values, [outer, inner], dense)
    assert offsets[1] is inner
    for row in range(9):
        segment = int((inner <= row).sum()) - 1
        bag = int((outer <= segment).sum()) - 1
        place = (bag, segment - int(outer[bag]), row - int(inner[segment]))
        other = dense[place] if max(place[1:]) < 2 else torch.zeros(3)
        assert torch.equal(added[row], values[row] + other)
        assert torch.equal(multiplied[row], values[row] * other)


def test_outputs_that_are_given_are_written() -> None:
    order, lengths = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[1, 2], [0, 3]])
    outputs = [torch.empty(2, 2, dtype=torch.int64), torch.empty(6, dtype=torch.int64)]
    permute = jagged.permute_2d_sparse_preallocated_out
    found = permute(order, lengths, torch.arange(6), None, 6, *outputs)
    assert found[0] is outputs[0]
    assert found[1] is outputs[1]
    assert outputs[0].tolist() == [[0, 3], [1, 2]]
    assert outputs[1].tolist() == [3, 4, 5, 0, 1, 2]
    with pytest.raises(RuntimeError, match="does not fit"):
        permute(order, lengths, torch.arange(6), None, 6, outputs[0][:1], outputs[1])


def test_sizes_may_be_tensors() -> None:
    rows, index = torch.rand(3 * 4 + 2 * 6), torch.tensor([0, 2, 1, 1, 0])
    sizes = [3, 2], [3, 2], [4, 6]
    found = pooled.batch_index_select_dim0_tensor(rows, index, *map(torch.tensor, sizes))
    assert torch.equal(found, pooled.batch_index_select_dim0(rows, index, *sizes))
    assert pooled.new_unified_tensor(rows, [2, 3], False).shape == (2, 3)


@pytest.mark.parametrize("rows", [torch.zeros(2, 9), torch.zeros(2, 3, dtype=torch.uint8)])
def test_decoding_refuses_what_is_not_quantised_rows(rows: torch.Tensor) -> None:
    with pytest.raises(RuntimeError, match="uint8 rows of at least 8 bytes"):
        rowwise.fused_8bit_to_float(rows)
    with pytest.raises(RuntimeError, match="uint8 rows of at least 4 bytes"):
        rowwise.fused_nbit_to_float(rows, 4)


def test_ids_are_drawn_as_they_are_distributed() -> None:
    """Heavy hitters, a Zipf distribution of the others, and clusters of lookups of an id."""
    torch.manual_seed(1)
    hitters = torch.tensor([0.2, 0.1])
    count, arguments = 100_000, (hitters, 0.5, 1.2, 50)
    ids = calibration.tbe_generate_indices_from_distribution(*arguments, count)
    shares = [0.0, 0.0, *((k + 0.5) ** -1.2 for k in range(2, 50))]
    expected = torch.tensor([share / sum(shares) * 0.7 for share in shares])
    expected[:2] += hitters
    found = ids.bincount(minlength=50) / count
    assert found.shape == expected.shape
    assert ((found - expected).abs() < 5 * (expected / count).sqrt()).all()
    gaps = (ids == 9).nonzero().flatten().diff().double()
    assert gaps.median() < 0.4 * gaps.mean()  # 0.69 if the order were random
    assert calibration.tbe_generate_indices_from_distribution(*arguments, 0).tolist() == []


@pytest.mark.parametrize(
    ("hitters", "max_index", "text"),
    [
        (torch.ones(2, 2), 9, "heavy_hitters must be float32 or float64 with 1 dimension"),
        (torch.ones(2, dtype=torch.int64), 9, "heavy_hitters must be"),
        (torch.ones(9) / 9, 9, "max_index must be greater"),
    ],
)
def test_distributions_of_ids_are_checked(hitters: Tensor, max_index: int, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        calibration.tbe_generate_indices_from_distribution(hitters, 1.0, 1.0, max_index, 5)
