"""Emulated `group`, `group_inverse` and the checks of `tbe_group` against plain PyTorch."""

import pytest
import torch

from emblib.captured_step import MAX_BOUND
from emblib.ops.codes import BOUNDS_CHECK
from emblib.reference import tbe
from tests.simt import emulated
from tests.simt.cases import CASES, VARIABLE_CASES, Case, Data
from tests.simt.library import library

KEYS = {
    "none": torch.zeros(0),
    "one": torch.tensor([3]),
    "all_out": torch.tensor([-1, 9, 9, -7]),
    "mixed": torch.randint(-2, 14, (3000,), generator=torch.Generator().manual_seed(0)),
    "one_group": torch.full((2500,), 4),
    "distinct": torch.randperm(2100, generator=torch.Generator().manual_seed(0)),
}
WIDE = 2**32 - 1
# The sort with CUB's place taken by the host, one block, and a cluster of blocks: the largest
# cluster, and from which number of keys on they need 64 bits.
PATHS = {"sort": (0, WIDE), "sort64": (0, 0), "block": (1, WIDE), "cluster": (8, WIDE)}


@pytest.fixture(params=PATHS.values(), ids=PATHS)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Group on one of the paths of a device."""
    monkeypatch.setattr(emulated, "MAX_CLUSTER", request.param[0])
    monkeypatch.setattr(emulated, "WIDE_FROM", request.param[1])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
def test_group(keys: torch.Tensor, dtype: torch.dtype) -> None:
    check_groups(keys.to(dtype), 9 if keys.numel() != 2100 else 2100)


# One key, and the least and most of each number of blocks and keys per thread; the bits of keys
# take one to five passes, of which 2^32 - 2 needs all.
@pytest.mark.parametrize(
    ("n", "num_keys"),
    [
        *((1, 1), (128, 0), (129, 127), (512, 128), (513, 2**14 - 1), (2048, 2**20), (4096, 2**21)),
        *((4097, 26_000_000), (8192, 2**31), (8193, 2**32 - 2), (16384, 1_000_000)),
    ],
)
def test_sizes_of_clusters(n: int, num_keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated, "MAX_CLUSTER", 8)
    keys = torch.randint(-1, num_keys + 1, (n,), generator=torch.Generator().manual_seed(n))
    keys[n // 2 :] = keys[: n - n // 2].clone()
    keys[n // 3] = num_keys - 1
    check_groups(keys, num_keys)


def check_groups(keys: torch.Tensor, num_keys: int) -> None:
    unique, segments, permutation, count = emulated.group(keys, num_keys)
    valid = (keys >= 0) & (keys < num_keys)
    want, lengths = keys[valid].unique(return_counts=True)
    groups, grouped = want.numel(), int(valid.sum())
    assert count.item() == groups
    assert torch.equal(unique[:groups], want)
    assert (unique[groups:] == 0).all()
    assert torch.equal(segments[:groups].long(), lengths.cumsum(0) - lengths)
    assert (segments[groups:] == grouped).all()
    sortable = torch.where(valid, keys.long(), num_keys)
    assert torch.equal(permutation.long(), sortable.argsort(stable=True))
    inverse = emulated.group_inverse(segments, permutation, count)
    assert torch.equal(inverse == -1, ~valid)
    assert torch.equal(want[inverse[valid].long()], keys[valid])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("case", [*CASES, *VARIABLE_CASES], ids=str)
def test_lookups_are_checked_while_they_are_grouped(case: Case) -> None:
    data = Data(case)
    check = emulated.BatchCheck(data.offsets)
    given = (data.features, data.indices, data.offsets, data.bag_layout)
    got = emulated.tbe_group(*given, data.total_rows, check)
    repaired, violations = emulated.bounds_check(
        data.indices, data.offsets, data.features, data.bag_layout, BOUNDS_CHECK["warning"]
    )
    assert torch.equal(check.repaired, repaired)
    assert torch.equal(check.violations, violations + 7)
    want = tbe.group(data.features, *data.batch)
    assert got[4].item() == want.rows.numel()
    assert torch.equal(got[0][: want.rows.numel()], want.rows)
    assert torch.equal(got[2][: want.lookups.numel()].long(), want.lookups)
    assert torch.equal(got[3][: want.lookups.numel()].long(), want.bags)


def test_many_invalid_offsets_are_repaired_on_every_path(monkeypatch: pytest.MonkeyPatch) -> None:
    features = torch.tensor([[0, 0, 1000, 4, 0, 0, 0, 0]])
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(-3, 1009, (5000,), generator=generator)
    offsets = torch.randint(-50, 5100, (3001,), generator=generator)
    offsets[:2000] //= 8
    results = []
    for cluster in (0, 1, 8):
        monkeypatch.setattr(emulated, "MAX_CLUSTER", cluster)
        check = emulated.BatchCheck(offsets)
        groups = emulated.tbe_group(features, indices, offsets, None, 1000, check)
        results.append([*groups, check.repaired, check.violations])
        assert torch.equal(check.repaired.long(), tbe.repair_offsets(offsets, 5000))
    for others in results[1:]:
        for got, want in zip(others, results[0], strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("begin", [0, MAX_BOUND // 2, MAX_BOUND - 64])
def test_a_search_counts_to_the_most_lookups(begin: int) -> None:
    intervals = torch.empty(64, dtype=torch.int32)
    library().call("search", begin, intervals, 64)
    assert torch.equal(intervals.long(), begin + torch.arange(64))
