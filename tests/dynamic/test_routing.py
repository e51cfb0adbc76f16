"""Which rank holds a key, and in what order checkpoints are: the same for every number of ranks."""

import pytest
import torch

from emblib.dynamic import keys as routing
from tests.dynamic import entry_cases

MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finaliser in Python's integers."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = (x ^ x >> 33) * 0xFF51AFD7ED558CCD & MASK
    x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return x ^ x >> 33


def test_a_route_is_two_mixes_and_its_owner_the_part_it_lies_in() -> None:
    keys = entry_cases.keys(500)
    routes = [mixed(mixed(key & MASK)) for key in keys.tolist()]
    assert [route + 2**63 for route in routing.route(keys).tolist()] == routes
    for world_size in (1, 2, 3, 7, 1000):
        wanted = [(route >> 32) * world_size >> 32 for route in routes]
        assert routing.owner(keys, world_size).tolist() == wanted


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12, 64])
def test_ranks_follow_each_other_and_have_like_many_keys(world_size: int) -> None:
    keys = torch.arange(-20_000, 20_000)
    owners = routing.owner(keys, world_size)
    assert bool((owners[routing.canonical_order(keys)].diff() >= 0).all())
    counts = torch.bincount(owners, minlength=world_size)
    mean = keys.numel() / world_size
    assert counts.numel() == world_size
    assert int((counts - mean).abs().max()) < 6 * mean**0.5 + 1


def test_keys_of_one_rank_are_spread_over_the_buckets_of_its_table() -> None:
    keys = torch.arange(1 << 16)
    mine = keys[routing.owner(keys, 8) == 3]
    first = torch.tensor([mixed(key) & 0xFF for key in mine.tolist()])
    counts = torch.bincount(first, minlength=256)
    assert int(counts.min()) > 8
    assert int(counts.max()) < 64


def test_unsigned_keys_are_the_same_bits() -> None:
    keys = torch.tensor([-1, -(2**63), 5])
    assert torch.equal(routing.route(keys.view(torch.uint64)), routing.route(keys))


def test_what_is_no_key_is_refused() -> None:
    with pytest.raises(TypeError, match="keys must be int64, uint64 or int32, got"):
        routing.route(torch.ones(3))
    with pytest.raises(ValueError, match="world_size must be in"):
        routing.owner(torch.arange(3), 0)
