"""Stochastic rounding from float32 to 16 bits, in integer arithmetic: bit for bit what kernels do.

The random words come from Philox: key `seed`, counter (low and high half of the linear row id,
column / 4 and tensor, step). Tensor 0 is the weights, 1 and 2 are the element-wise states, 8 on are
the same when a cache writes them back.
"""

import torch
from torch import Tensor

from emblib.reference.random import philox_counters


def words(seed: int, rows: Tensor, dim: int, step: int, tensor: int) -> Tensor:
    """A random word for each element, int64 `[U, dim]`, of the linear rows `rows [U]`."""
    blocks = torch.arange((dim + 3) // 4)
    row, block = torch.meshgrid(rows.cpu().long(), blocks, indexing="ij")
    counters = torch.stack(
        [
            *(row & 0xFFFFFFFF, row >> 32 & 0xFFFFFFFF),
            *(block | tensor << 28, torch.full_like(row, step & 0xFFFFFFFF)),
        ],
        dim=-1,
    )
    random = philox_counters(seed, counters.view(-1, 4))
    return random.view(len(rows), -1)[:, :dim].to(rows.device)


def round_stochastically(values: Tensor, dtype: torch.dtype, words: Tensor) -> Tensor:
    """`values` (as float32) rounded up or down at random to `dtype`; exact where it is float32.

    The chance of either neighbour is proportional to how near it is. A finite value becomes
    infinite only where rounding to nearest makes it so.
    """
    values = values.float()
    if dtype not in (torch.float16, torch.bfloat16):
        return values.to(dtype)
    bits = values.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    magnitude, sign = bits & 0x7FFFFFFF, bits >> 16 & 0x8000
    rounded = (_half if dtype == torch.float16 else _bfloat)(magnitude, words)
    infinite = 0x7C00 if dtype == torch.float16 else 0x7F80
    nearest = values.abs().to(dtype).view(torch.int16).long()
    rounded = torch.where(rounded >= infinite, nearest.clamp(max=infinite), rounded)
    word = sign | rounded
    result = torch.where(word >= 0x8000, word - 0x10000, word).to(torch.int16).view(dtype)
    return torch.where(values.isnan(), torch.full_like(result, torch.nan), result)


def _bfloat(magnitude: Tensor, words: Tensor) -> Tensor:
    return (magnitude + (words & 0xFFFF)) >> 16


def _half(magnitude: Tensor, words: Tensor) -> Tensor:
    normal = (magnitude - 0x38000000 + (words & 0x1FFF)) >> 13
    exponent = magnitude >> 23
    mantissa = (magnitude & 0x7FFFFF) | torch.where(exponent > 0, 0x800000, 0)
    # Below 2^-14 numbers are spaced by 2^-24; see csrc/core/rounding.h for the limit of 31 bits.
    shift = (126 - exponent.clamp(min=1)).clamp(min=0)
    low, high = shift.clamp(max=31), (shift - 31).clamp(0, 31)
    subnormal = ((mantissa >> high) + (words & ((1 << low) - 1))) >> low
    return torch.where(magnitude < 0x38800000, subnormal, normal)
