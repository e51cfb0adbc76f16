"""Hashing of 64-bit keys, and counter-based random numbers, in plain PyTorch.

Random numbers are Philox4x32-10 in int64 arithmetic.
"""

from typing import TypeVar

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FACTORS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))

Bits = TypeVar("Bits", int, Tensor)


def _wrap(x: Bits) -> Bits:
    """Return a Python int modulo 2^64; int64 tensors wrap by themselves."""
    return x % 2**64 if isinstance(x, int) else x


def finalise(x: Bits) -> Bits:
    """Apply the finaliser of MurmurHash3 (Appleby, 2011): every bit of x affects every bit.

    Args:
        x: a number in [0, 2^64), or an int64 tensor of the same bits.
    """
    for factor in _FACTORS:
        x = _wrap((x ^ (x >> 33 & (1 << 31) - 1)) * factor)
    return x ^ (x >> 33 & (1 << 31) - 1)


def unmix(x: Tensor) -> Tensor:
    """Invert `mix`, for an int64 tensor."""
    for factor in reversed(_FACTORS):
        inverse = pow(factor, -1, 1 << 64)
        x = (x ^ (x >> 33 & (1 << 31) - 1)) * (inverse - (inverse >> 63 << 64))
    return (x ^ (x >> 33 & (1 << 31) - 1)) - GOLDEN


def mix(x: Bits) -> Bits:
    """Add a constant and apply the finaliser, which alone would map 0 to 0."""
    return finalise(_wrap(x + GOLDEN))


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low word of the product of two 32-bit numbers, without int64 overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int, blocks: Tensor) -> Tensor:
    """Return the four random words, int64 `[N, 4]` in [0, 2^32), of each block `[N]`."""
    zero = torch.zeros_like(blocks)
    return philox_counters(seed, torch.stack([blocks & _MASK, blocks >> 32, zero, zero], dim=1))


def philox_counters(seed: int, counters: Tensor) -> Tensor:
    """Return the random words of counters of four words each, `[N, 4]` in [0, 2^32)."""
    c = list(counters.unbind(1))
    keys = [seed & _MASK, seed >> 32 & _MASK]
    for _ in range(10):
        (h0, l0), (h1, l1) = _multiply(_MULTIPLIERS[0], c[0]), _multiply(_MULTIPLIERS[1], c[2])
        c = [h1 ^ c[1] ^ keys[0], l1, h0 ^ c[3] ^ keys[1], l0]
        keys = [(key + step) & _MASK for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return torch.stack(c, dim=1)


def uniform(numel: int, low: float, high: float, seed: int) -> Tensor:
    """Return `numel` values `low + (high - low) * u`, float64, as `emblib.ops.primitives` does."""
    words = philox(seed, torch.arange((numel + 3) // 4)).flatten()[:numel]
    return low + (high - low) * (words >> 8).double() * 2.0**-24
