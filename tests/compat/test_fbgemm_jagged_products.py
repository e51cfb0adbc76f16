"""Operators on jagged and dense tensors, calibrations, inputs and pruned tables: against FBGEMM's
CPU build, and against loops by their definition."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from emblib.compat.fbgemm_operators import (
    OPERATORS,
    bucketize,
    calibration,
    dense_jagged,
    jagged,
    pruning,
    rowwise,
)
from tests.compat.peer import peer_module

G = torch.Generator().manual_seed(0)
LENGTHS = torch.tensor([2, 0, 5, 1, 3])
OFFSETS = torch.tensor([0, 2, 2, 7, 8, 11])
STARTS = torch.tensor([1, 0, 2, 1, 0])
ROWS = torch.randn(11, 6, generator=G)
IDS = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5])
OUTER = torch.tensor([0, 2, 5])
SLOTS, SLOT_ENDS = torch.full((48, 2), -1), torch.tensor([0, 16, 16, 48])
MAP_OFFSETS = torch.tensor([0, 2, 5, 7, 8, 10, 11])
LISTS = [
    torch.tensor([4, 5, 6, 0]),
    torch.tensor([1, 2, 0]),
    torch.tensor([7, 8], dtype=torch.int32),
]
ENDS = [torch.tensor([0, 1, 3]), torch.tensor([0, 0, 2]), torch.tensor([0, 2, 2])]
WEIGHTS = [torch.rand(4, generator=G), torch.empty(0), torch.rand(2, generator=G)]
ALL, SOME = torch.tensor([True] * 3), torch.tensor([True, False, True])
LOGITS = torch.randn(7, generator=G)
BINS = 50
EXAMPLES = torch.randint(0, 20, (4 * BINS,), generator=G).double()
POSITIVES = (EXAMPLES * torch.rand(4 * BINS, generator=G)).floor()
HISTOGRAM = (0.4, 0.0, 1.0, 5, 0.9995)
SEGMENTS = (torch.tensor([0, 2, 1, 5, 0]), torch.tensor([1, 0, 1, 1, 0, 1, 1]))
BYTES8, BYTES4 = rowwise.to_fused_8bit(ROWS), rowwise.to_fused_nbit(ROWS[:, :4].contiguous(), 4)
SWAPPED = torch.cat([BYTES8[:, -8:], BYTES8[:, :-8]], dim=1)

CASES: dict[str, tuple[Any, ...]] = {
    "Bfloat16QuantizedToFloat": (ROWS.bfloat16(),),
    "FloatToBfloat16Quantized": (torch.cat([ROWS, ROWS.bfloat16() * (1 + 2**-8)]),),
    "FloatToFused8BitRowwiseQuantized": (ROWS,),
    "FloatToFusedNBitRowwiseQuantizedSBHalf": (ROWS[:, :4].contiguous(), 4),
    "Fused8BitRowwiseQuantizedToBfloat16": (BYTES8,),
    "Fused8BitRowwiseQuantizedToFloatOrHalf": (BYTES8, 1),
    "Fused8BitRowwiseQuantizedToFloatOrHalf#front": (SWAPPED, 0, False),
    "FusedNBitRowwiseQuantizedSBHalfToFloatOrHalf": (BYTES4, 4, 1),
    "FusedNBitRowwiseQuantizedSBHalfToHalf": (BYTES4, 4),
    "HalfToFusedNBitRowwiseQuantizedSBHalf": (ROWS[:, :4].half().contiguous(), 4),
    "asynchronous_batched_complete_cumsum": (LENGTHS.view(1, 5).repeat(2, 1),),
    "batched_dense_vec_jagged_2d_mul": (torch.randn(10, 4, generator=G), ROWS, OFFSETS),
    "batched_unary_embeddings": (
        torch.randn(2, 20, 1, generator=G),
        torch.tensor([0, 10, 20]),
        torch.tensor([0, 2, 2, 7, 8, 11, 11]),
        IDS,
    ),
    "bottom_k_per_row": (torch.randint(0, 9, (3, 30), generator=G), torch.tensor([0, 4]), True),
    "bottom_k_per_row#varied": (IDS.repeat(3, 1), torch.tensor([0, 4, 4, 9]), False),
    "embedding_bag_rowwise_prune": (ROWS, ROWS[:, 0], 0.5, torch.int32),
    "embedding_bag_rowwise_prune#signed": (ROWS, ROWS[:, 0], 0.5, torch.int64, False, 9, None),
    "generate_vbe_metadata": (
        torch.tensor([0, 3, 8], dtype=torch.int32),
        torch.tensor([[0, 2, 3], [0, 1, 5]], dtype=torch.int32),
        torch.tensor([0, 8, 16, 20, 52]),
        torch.tensor([0, 4, 12], dtype=torch.int32),
        -1,
        False,
        4,
        26,
        8,
    ),
    "generic_histogram_binning_calibration_by_feature": (
        LOGITS,
        *SEGMENTS,
        3,
        EXAMPLES,
        POSITIVES,
        torch.linspace(0.02, 0.98, BINS - 1, dtype=torch.float64),
        0.4,
        5,
        0.9995,
    ),
    "get_infos_metadata": (ROWS, 100, 33),
    "get_source_mask": (LENGTHS, STARTS, 15),
    "get_unique_indices": (IDS, 10, True),
    "get_unique_indices_with_inverse": (IDS, 10, True, True),
    "histogram_binning_calibration": (LOGITS, EXAMPLES, POSITIVES, *HISTOGRAM),
    "histogram_binning_calibration#half": (LOGITS.half(), EXAMPLES, POSITIVES, *HISTOGRAM),
    "histogram_binning_calibration_by_feature": (
        LOGITS,
        *SEGMENTS,
        3,
        EXAMPLES,
        POSITIVES,
        BINS,
        *HISTOGRAM,
    ),
    "index_select_dim0": (ROWS, IDS),
    "jagged_1d_to_truncated_values": (IDS, LENGTHS, 2),
    "jagged_acc_weights_and_counts": (ROWS[:, 0], IDS, 10),
    "jagged_dense_bmm": (ROWS, OFFSETS, torch.randn(5, 6, 3, generator=G), 5),
    "jagged_dense_dense_elementwise_add_jagged_output": (
        ROWS,
        [OFFSETS],
        torch.randn(5, 5, 6, generator=G),
        torch.randn(5, 5, 6, generator=G),
    ),
    "jagged_dense_elementwise_add": (ROWS, [OUTER, OFFSETS], torch.randn(2, 3, 4, 6, generator=G)),
    "jagged_index_add_2d_forward": (
        ROWS,
        torch.tensor([1, 0, 1, 0, 1]),
        OFFSETS[1:],
        torch.tensor([2, 7]),
        11,
        7,
    ),
    "jagged_jagged_bmm": (ROWS, ROWS[:, :4], OFFSETS, 3),
    "jagged_slice": (IDS, LENGTHS, STARTS, 2),
    "jagged_softmax": (ROWS, OFFSETS, 5),
    "jagged_to_padded_dense_forward": (ROWS, [OFFSETS], [4], 0.5),
    "masked_select_jagged_1d": (IDS, LENGTHS, IDS > 3),
    "pack_segments": (ROWS, LENGTHS, 3),
    "pack_segments_v2": (ROWS, LENGTHS, 6, True, True),
    "padding_fused_tbe_input_combine": (LISTS, ENDS, WEIGHTS, SOME, 4),
    "padding_fused_tbe_input_combine_with_length": (LISTS, ENDS, WEIGHTS, 4),
    "permute102_baddbmm_permute102": (
        torch.randn(3, 4, generator=G),
        torch.randn(5, 3, 2, generator=G),
        torch.randn(3, 2, 4, generator=G),
    ),
    "permute_sequence_embeddings": (
        torch.tensor([4, 0, 2, 1, 3], dtype=torch.int32),
        LENGTHS.view(5, 1),
        ROWS[:, 0].contiguous(),  # FBGEMM's CPU build drops the columns of rows
    ),
    "permute_sparse_features": (
        torch.tensor([1, 0, 1], dtype=torch.int32),
        torch.tensor([[2, 3], [5, 1]]),
        IDS,
        ROWS[:, 0].contiguous(),
    ),
    "populate_bucketized_permute": (
        LENGTHS,
        torch.tensor([1, 0, 2, 1, 0, 1, 0, 3, 0, 3]),
        torch.tensor([0, 1, 1, 0, 1, 0, 1, 0, 1, 1, 1]),
    ),
    "pruned_array_lookup": (
        IDS,
        MAP_OFFSETS,
        torch.randint(-1, 8, (20,), generator=G),
        torch.tensor([0, 10, 10, 20]),
    ),
    "pruned_hashmap_lookup": (IDS, MAP_OFFSETS, SLOTS, SLOT_ENDS),
    "repeat_arange": (LENGTHS.int(),),
    "stacked_jagged_1d_to_dense": (IDS, torch.tensor([[2, 3], [5, 1]]), [0, 5, 11], [2, 4], 7),
    "stacked_jagged_2d_to_dense": (ROWS, torch.tensor([[2, 3], [5, 1]]), [0, 5, 11], [2, 4]),
    "tbe_input_combine": (LISTS, ENDS, WEIGHTS, ALL),
    "tbe_input_combine#first": (LISTS, ENDS, WEIGHTS, SOME),
    "tbe_input_combine_with_length": (LISTS, ENDS, WEIGHTS),
}
ROUNDED = ("batched", "calibration", "bmm", "softmax", "index_add", "acc_weights", "Fused8Bit")


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_fbgemm(case: str) -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    name, arguments = case.partition("#")[0], CASES[case]
    found, theirs = OPERATORS[name][1](*arguments), getattr(torch.ops.fbgemm, name)(*arguments)
    pairs = (
        [(found, theirs)] if isinstance(theirs, Tensor | int) else zip(found, theirs, strict=True)
    )
    tolerance = 2e-6 if any(word in name for word in ROUNDED) else 0.0
    for mine, other in pairs:
        if isinstance(other, list):
            mine, other = mine[0], other[0]
        if not isinstance(other, Tensor):
            assert mine == other
            continue
        assert mine.dtype == other.dtype
        low = 2**-10 if other.dtype in (torch.float16, torch.bfloat16) and tolerance else tolerance
        torch.testing.assert_close(mine, other, rtol=low, atol=low)


# Against loops


def sequences(values: Tensor) -> list[Tensor]:
    return list(values.split(LENGTHS.tolist()))


def test_products_with_sequences() -> None:
    y, v = torch.randn(5, 6, 3, generator=G), torch.randn(10, 3, generator=G)
    found, _ = dense_jagged.jagged_dense_bmm(ROWS, OFFSETS, y, 5)
    expected = [x @ y[b] for b, x in enumerate(sequences(ROWS))]
    torch.testing.assert_close(found, torch.cat(expected))
    cut, _ = dense_jagged.jagged_dense_bmm(ROWS, OFFSETS, y, 3)
    assert torch.equal(cut[5:7], torch.zeros(2, 3))
    pairs = dense_jagged.jagged_jagged_bmm(ROWS, ROWS[:, :2], OFFSETS, 4)
    expected = [x[:4].t() @ x[:4, :2] for x in sequences(ROWS)]
    torch.testing.assert_close(pairs, torch.stack(expected))
    found = dense_jagged.batched_vector_product(v, ROWS, OFFSETS)
    for b, x in enumerate(sequences(ROWS)):
        for head in range(2):
            count = min(len(x), 3)
            row = v[2 * b + head, :count] @ x[:count, 3 * head : 3 * head + 3]
            torch.testing.assert_close(found[2 * b + head], row)
    none = dense_jagged.batched_vector_product(v[:0], ROWS[:0], OFFSETS[:1])
    assert none.shape == (0, 6)


def test_softmax_and_sums_of_sequences() -> None:
    values = ROWS.double().requires_grad_()
    found, _ = dense_jagged.jagged_softmax(values, OFFSETS, 5)
    torch.testing.assert_close(found, torch.cat([x.softmax(0) for x in sequences(values)]))
    dense = torch.randn(5, 4, 6, generator=G)
    added = dense_jagged.jagged_dense_add_to_dense(ROWS, [OFFSETS], dense)
    both, _ = dense_jagged.jagged_dense_dense_add(ROWS, [OFFSETS], dense, dense)
    for b, x in enumerate(sequences(ROWS)):
        count = min(len(x), 4)
        assert torch.equal(added[b, :count], dense[b, :count] + x[:count])
        assert torch.equal(added[b, count:], dense[b, count:])
        part = sequences(both)[b]
        assert torch.equal(part[:count], x[:count] + dense[b, :count] + dense[b, :count])
        assert torch.equal(part[count:], x[count:])
    summed = dense_jagged.jagged_acc_weights_and_counts(ROWS[:, 0], IDS, 10)
    for row in range(10):
        torch.testing.assert_close(float(summed[row, 0]), float(ROWS[row == IDS, 0].sum()))
        assert summed[row, 1] == (row == IDS).sum()


def test_selections_from_sequences() -> None:
    values, lengths = dense_jagged.jagged_slice(IDS, LENGTHS, STARTS, 2)
    parts = zip(sequences(IDS), STARTS.tolist(), strict=True)
    expected = [x[start : start + 2] for x, start in parts]
    assert values.tolist() == torch.cat(expected).tolist()
    assert lengths.tolist() == [len(x) for x in expected]
    for start in (LENGTHS + 1, STARTS - 1):
        with pytest.raises(RuntimeError, match="within the sequences"):
            dense_jagged.jagged_slice(IDS, LENGTHS, start, 2)
    cut = dense_jagged.jagged_1d_to_truncated_values(IDS, LENGTHS, 2)
    assert cut.tolist() == torch.cat([x[:2] for x in sequences(IDS)]).tolist()
    chosen, counts = dense_jagged.masked_select_jagged_1d(IDS, LENGTHS, IDS > 3)
    assert chosen.tolist() == [i for i in IDS.tolist() if i > 3]
    assert counts.tolist() == [int((x > 3).sum()) for x in sequences(IDS)]
    with pytest.raises(RuntimeError, match="same numel"):
        dense_jagged.masked_select_jagged_1d(IDS, LENGTHS, IDS[1:] > 3, True)
    packed, mask = dense_jagged.pack_segments_v2(ROWS, LENGTHS, 4, True, True)
    assert mask is not None
    for b, x in enumerate(sequences(ROWS)):
        count = min(len(x), 4)
        assert torch.equal(packed[b, :count], x[:count])
        assert bool((packed[b, count:] == -math.inf).all())
        assert mask[b].tolist() == [i < count for i in range(4)]
    mask = dense_jagged.get_source_mask_with_optional_size(LENGTHS, STARTS)
    pairs = zip(LENGTHS.tolist(), STARTS.tolist(), strict=True)
    assert mask.tolist() == [b for s, t in pairs for b in [True] * s + [False] * t]
    into, index = torch.tensor([2, 7]), torch.tensor([1, 0, 1, 0, 1])
    summed = dense_jagged.jagged_index_add_2d(ROWS, index, OFFSETS[1:], into, 7, 11)
    reference = torch.zeros(7, 6)
    for x, target in zip(sequences(ROWS), index.tolist(), strict=True):
        first = 2 * target
        reference[first : first + len(x)] += x
    assert torch.equal(summed, reference)


def test_ranges_of_lengths() -> None:
    expected = [i for n in LENGTHS.tolist() for i in range(n)]
    assert dense_jagged.repeat_arange(LENGTHS).tolist() == expected
    assert dense_jagged.repeat_arange(LENGTHS.to("meta")).numel() == 0
    with pytest.raises(ValueError, match="must be non-negative"):
        dense_jagged.repeat_arange(torch.tensor([-5]))


def test_output_offsets_of_a_variable_batch_are_one_per_bag() -> None:
    arguments = CASES["generate_vbe_metadata"]
    offsets = torch.zeros(len(arguments[0]), dtype=torch.int64)
    with pytest.raises(RuntimeError, match="vbe_output_offsets must have one entry per bag"):
        bucketize.generate_vbe_metadata(*arguments[:9], offsets)


def test_predictions_outside_all_bins_are_calibrated_in_the_nearest_one() -> None:
    logit = torch.tensor([-400.0, 0.0, 400.0])  # predictions of 0, 0.5 and 1
    counts = torch.full((8,), 10.0), torch.arange(8.0)
    options = 1.0, 0.0, 0.5, 0, 1.0
    found, bins = calibration.histogram_binning_calibration(logit, *counts, *options)
    assert bins.tolist() == [0, 7, 7]
    assert torch.equal(found, torch.tensor([0.0, 0.7, 0.7]))
    segments = torch.tensor([0, 0]), torch.tensor([1, 0, 1]), 1
    _, bins = calibration.histogram_binning_calibration_by_feature(
        logit, *segments, *counts, 4, *options
    )
    assert bins.tolist() == [4, 3, 7]


def test_calibration_uses_the_share_of_a_bin_with_enough_examples() -> None:
    found, bins = calibration.histogram_binning_calibration_by_feature(
        LOGITS, *SEGMENTS, 3, EXAMPLES, POSITIVES, BINS, *HISTOGRAM
    )
    values, lengths = (part.tolist() for part in SEGMENTS)
    at = 0
    for i, logit in enumerate(LOGITS.tolist()):
        plain = 1 / (1 + math.exp(-(logit + math.log(0.4))))
        segment = values[at] + 1 if lengths[i] == 1 else 0
        at += lengths[i]
        segment = segment if segment <= 3 else 0
        index = math.ceil(plain * BINS) - 1 + segment * BINS
        assert bins[i] == index
        if EXAMPLES[index] > 5:
            share = float(POSITIVES[index] / EXAMPLES[index])
            plain = share * 0.9995 + plain * (1 - 0.9995)
        assert abs(float(found[i]) - plain) < 1e-6


def test_unary_embeddings_and_bottom_values() -> None:
    weight = torch.randn(2, 20, 1, generator=G)
    offsets, tables = [0, 2, 2, 7, 8, 11, 11], [0, 10, 20]
    found = calibration.batched_unary_embeddings(
        weight, torch.tensor(tables), torch.tensor(offsets), IDS
    )
    for task, sample, table in itertools.product(range(2), range(3), range(2)):
        first, last = offsets[3 * table + sample : 3 * table + sample + 2]
        expected = weight[task, IDS[first:last] + tables[table], 0].sum()
        torch.testing.assert_close(found[task, sample, table], expected)
    rows = torch.tensor([[5, 5, 1, 9, 0]])
    assert calibration.bottom_k_per_row(rows, torch.tensor([0, 3]), True).tolist() == [[[1, 5, 9]]]
    assert calibration.bottom_k_per_row(rows, torch.tensor([0, 3]), False).tolist() == [[[5, 5, 1]]]
    with pytest.raises(RuntimeError, match="too skewed"):
        calibration.bottom_k_per_row(rows, torch.tensor([0, 5]), True)


def test_inputs_are_combined() -> None:
    """Table 0 has one index of padding, and table 1 has one and no weights."""
    indices, offsets, weights = calibration.tbe_input_combine(LISTS, ENDS, WEIGHTS, ALL)
    assert indices.tolist() == [4, 5, 6, 1, 2, 7, 8, 0, 0]
    assert offsets.tolist() == [0, 1, 3, 3, 5, 7, 7]
    assert weights.tolist() == [*WEIGHTS[0][:3].tolist(), 1, 1, *WEIGHTS[2].tolist(), 1, 1]
    assert {x.dtype for x in (indices, offsets)} == {torch.int32}
    _, offsets, _ = calibration.padding_fused_tbe_input_combine(LISTS, ENDS, WEIGHTS, ALL, 3)
    assert offsets.tolist() == [0, 1, 4, 4, 4, 7, 7, 9, 9, 9]
    bad = [torch.rand(3), *WEIGHTS[1:]]
    with pytest.raises(RuntimeError, match="one per index"):
        calibration.tbe_input_combine_with_length(LISTS, ENDS, bad)
    with pytest.raises(RuntimeError, match="at least the number of bags of each table = 2, got 1"):
        calibration.padding_fused_tbe_input_combine(LISTS, ENDS, WEIGHTS, ALL, 1)
    lengths = [torch.ones_like(ids) for ids in LISTS]
    with pytest.raises(RuntimeError, match="batch_size must be at least"):
        calibration.padding_fused_tbe_input_combine_with_length(LISTS, lengths, WEIGHTS, 1)


# Pruned tables


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_hash_maps_are_those_of_fbgemm(dtype: torch.dtype) -> None:
    peer_module("fbgemm_gpu.sparse_ops")
    ids = torch.cat([torch.randperm(4000, generator=G)[:60] for _ in range(3)]).to(dtype)
    rows = torch.randint(-1, 50, (180,), generator=G).to(dtype)
    offsets, ends = (torch.arange(7) * 30).to(dtype), torch.tensor([0, 70, 70, 131])
    tables = [torch.full((131, 2), -1) for _ in range(2)]
    pruning.pruned_hashmap_insert(ids, rows, offsets, tables[0], ends)
    torch.ops.fbgemm.pruned_hashmap_insert(ids, rows, offsets, tables[1], ends)
    assert torch.equal(*tables)
    asked = torch.where(torch.arange(180) % 3 == 0, ids + 1, ids)
    found = pruning.pruned_hashmap_lookup(asked, offsets, tables[0], ends)
    assert torch.equal(
        found, torch.ops.fbgemm.pruned_hashmap_lookup(asked, offsets, tables[0], ends)
    )


def test_a_hash_map_finds_what_was_inserted() -> None:
    ids, rows = torch.arange(12) * 7919 - 40000, torch.tensor([-1, *range(11)])
    offsets, ends = torch.tensor([0, 3, 6, 9, 12]), torch.tensor([0, 6, 12])
    slots = torch.full((12, 2), -1)
    pruning.pruned_hashmap_insert(ids, rows, offsets, slots, ends)
    assert pruning.pruned_hashmap_lookup(ids, offsets, slots, ends).tolist() == rows.tolist()
    moved = ids.roll(6)
    assert set(pruning.pruned_hashmap_lookup(moved, offsets, slots, ends).tolist()) == {-1}
    with pytest.raises(RuntimeError, match="is full"):
        pruning.pruned_hashmap_insert(ids, rows, offsets, slots[:8], torch.tensor([0, 4, 8]))


def test_a_table_without_ids_in_a_map_has_no_rows() -> None:
    map_ = pruning.PrunedMap()
    with pytest.raises(RuntimeError, match="call insert first"):
        map_.lookup(torch.tensor([5]), torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="T must be > 0, got 0"):
        map_.insert(torch.tensor([5]), torch.tensor([0]), torch.tensor([0]), 0)
    map_.insert(torch.tensor([5, 9, 7]), torch.tensor([0, -1, 1]), torch.tensor([0, 2, 2, 3]), 3)
    found = map_.lookup(torch.tensor([5, 9, 3, 5, 7]), torch.tensor([0, 2, 4, 5]))
    assert found.tolist() == [0, -1, -1, -1, 1]


def test_rows_below_a_threshold_are_pruned() -> None:
    rows, map_ = pruning.embedding_bag_rowwise_prune(ROWS, ROWS[:, 0], 0.5, torch.int32)
    kept = [i for i in range(11) if abs(float(ROWS[i, 0])) > 0.5]
    assert torch.equal(rows, ROWS[kept])
    assert map_.tolist() == [kept.index(i) if i in kept else -1 for i in range(11)]
    rows, map_ = pruning.embedding_bag_rowwise_prune(
        ROWS, ROWS[:, 0] * 0, 0.5, torch.int32, True, 9
    )
    assert map_.tolist() == [-1, -1, *range(9)]


# Variable batches


def test_lookups_are_sorted_by_row() -> None:
    sums, offsets = torch.tensor([0, 10, 30]), torch.tensor([0, 2, 4, 7, 11])
    found = bucketize.transpose_embedding_input(sums, 6, IDS, offsets)
    bag = torch.repeat_interleave(torch.arange(4), offsets.diff())
    linear = IDS + sums[bag // 2]
    order = linear.argsort(stable=True)
    assert torch.equal(found[0], linear)
    assert torch.equal(found[1], linear[order])
    assert torch.equal(found[2].long(), (bag // 2 << 26 | bag % 2)[order])
    rows, counts = linear.unique(return_counts=True)
    number = int(found[5])
    assert number == len(rows)
    assert torch.equal(found[3][:number], rows)
    assert torch.equal(found[4][:number].long(), counts)
    assert found[6][: number + 1].tolist() == [0, *itertools.accumulate(counts.tolist())]


def test_requests_of_several_tensors_and_of_rows() -> None:
    first, lengths = torch.tensor([0, 2, 3], dtype=torch.int32), torch.tensor([1, 2, 0, 3, 2, 3])
    ids = torch.arange(11)
    reordered = jagged.reorder_batched_ad_lengths(lengths, first, 3)
    sums = jagged.complete_cumsum(lengths), jagged.complete_cumsum(reordered)
    expected = jagged.reorder_batched_ad_indices(sums[0], ids, sums[1], first, 3)
    parts = list(ids.split([6, 5]))
    found = jagged.cat_reorder_batched_ad_indices(sums[0], parts, sums[1], first, 3, False, 11)
    assert torch.equal(found, expected)
    padded = functional.pad(reordered.view(2, 3), (0, 2)).flatten()
    wide = jagged.complete_cumsum(padded)
    found = jagged.cat_reorder_batched_ad_indices(
        sums[0], parts, wide, first, 3, False, 11, max_batch_size=5
    )
    assert torch.equal(found, expected)
    rows = jagged.reorder_batched_ad_indices(sums[0], ROWS, sums[1], first, 3)
    assert torch.equal(rows, ROWS[expected])
