"""Grouping by key, the primitive of every backward pass, cache and hash table; random numbers.

`group(keys[L], num_keys)`, of int32 or int64 keys, L <= 2^31 - 4096, returns tensors that are
padded to static sizes, so that nothing waits for the device:

- `unique [L]` the distinct keys, ascending, dtype of `keys`; entries from `count` on are 0
- `segments` int32 `[L + 1]`: group u is `permutation[segments[u] : segments[u + 1]]`; entries
  after `count` repeat `segments[count]`, so that groups from `count` on are empty
- `permutation` int32 `[L]`, the stable order that sorts the keys
- `count` int32 `[1]`, number of groups, on the device of `keys`

Keys outside `[0, num_keys)` belong to no group and are sorted to the end. `group_inverse(segments,
permutation, count)` returns the group of each input position, int32 `[L]`, -1 for none. All sorts
are radix sorts: csrc/group/group_items.h on the CPU; on CUDA csrc/group/small_group.cuh for small
batches, CUB for others.

`fill_uniform_(tensor, low, high, seed)` fills a contiguous float32, float16 or bfloat16 tensor with
`low + (high - low) * u`. `low` and `high - low` are rounded to float32 first. The sum is rounded
once to float32 and then to the dtype, so elements may lie outside `[low, high)` by these errors.
It raises RuntimeError unless `low <= high`, both are finite in the dtype of `tensor`, and `high -
low` is finite in float32. `u`, one of 2^24 equidistant numbers in [0, 1), depends only on the seed
and the position, so the values are the same on any device and any number of threads.
Source: Philox4x32-10 (Salmon et al., 2011).
"""

import torch
from torch import Tensor
from torch._guards import active_fake_mode

group = torch.ops.emblib.group.default
group_inverse = torch.ops.emblib.group_inverse.default


@torch.library.register_fake("emblib::group")
def _(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    length = keys.numel()
    return (
        keys.new_empty(length),
        keys.new_empty(length + 1, dtype=torch.int32),
        keys.new_empty(length, dtype=torch.int32),
        keys.new_empty(1, dtype=torch.int32),
    )


@torch.library.register_fake("emblib::group_inverse")
def _(segments: Tensor, permutation: Tensor, count: Tensor) -> Tensor:
    return torch.empty_like(permutation)


fill_uniform_ = torch.ops.emblib.fill_uniform_.default


def refuse_fake_mode() -> None:
    """Raise RuntimeError, with advice, under a `FakeTensorMode`, whose tensors have no values."""
    if active_fake_mode() is not None:
        raise RuntimeError(
            "tables have no values under a FakeTensorMode: construct them outside of it, with "
            "device='meta' for tables without memory"
        )


def new_seed() -> int:
    """Draw a seed from torch's default generator, so that `torch.manual_seed` fixes it."""
    refuse_fake_mode()
    return int(torch.randint(2**63 - 1, (), device="cpu"))
