"""Hashing of 64-bit keys, and counter-based random numbers, in plain PyTorch.

Random numbers are Philox4x32-10 (Salmon et al., 2011) in int64 arithmetic: a block of four 32-bit
words is a function of a 64-bit seed and a 128-bit counter. csrc/core/random.h has the same
functions `finalise`, `mix` and Philox.
"""

from typing import TypeVar

import torch
from torch import Tensor

_UINT32_MASK = 0xFFFFFFFF
_PHILOX_FACTORS = (0xD2511F53, 0xCD9E8D57)  # of words 0 and 2
_PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # of the two words of the key, per round
_PHILOX_ROUNDS = 10
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - (1 << 64)
"""2^64 divided by the golden ratio, as int64."""
_MURMUR_FACTORS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))

Bits = TypeVar("Bits", int, Tensor)
"""64 bits: a Python int in [0, 2^64), or an int64 tensor of any shape. Results have its type."""


def _wrap(x: Bits) -> Bits:
    """Return a Python int modulo 2^64; int64 tensors wrap by themselves."""
    return x % 2**64 if isinstance(x, int) else x


def finalise(x: Bits) -> Bits:
    """Apply the finaliser of MurmurHash3 (Appleby, 2011).

    Every bit of x affects every bit of the result. 0 maps to 0.
    """
    for factor in _MURMUR_FACTORS:
        x = _wrap((x ^ (x >> 33 & (1 << 31) - 1)) * factor)
    return x ^ (x >> 33 & (1 << 31) - 1)


def unmix(x: Tensor) -> Tensor:
    """Invert `mix`, for an int64 tensor."""
    for factor in reversed(_MURMUR_FACTORS):
        inverse = pow(factor, -1, 1 << 64)
        x = (x ^ (x >> 33 & (1 << 31) - 1)) * (inverse - (inverse >> 63 << 64))
    return (x ^ (x >> 33 & (1 << 31) - 1)) - GOLDEN_RATIO


def mix(x: Bits) -> Bits:
    """Hash x: add `GOLDEN_RATIO`, then apply `finalise`, which alone would map 0 to 0."""
    return finalise(_wrap(x + GOLDEN_RATIO))


def _multiply_high_low(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return high and low word of the product of two 32-bit numbers, without int64 overflow."""
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = high + (low >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: int, blocks: Tensor) -> Tensor:
    """Return the four random words of each block.

    Args:
        seed: key of the generator, modulo 2^64.
        blocks: int64 `[N]`, block numbers >= 0.

    Returns:
        int64 `[N, 4]` in [0, 2^32), on the device of `blocks`.
    """
    zero = torch.zeros_like(blocks)
    return philox_counters(
        seed, torch.stack([blocks & _UINT32_MASK, blocks >> 32, zero, zero], dim=1)
    )


def philox_counters(seed: int, counters: Tensor) -> Tensor:
    """Return the four random words of each counter.

    Args:
        seed: key of the generator, modulo 2^64.
        counters: int64 `[N, 4]`, the words of each counter in [0, 2^32). Other dtypes would
            overflow; not checked.

    Returns:
        int64 `[N, 4]` in [0, 2^32), on the device of `counters`.
    """
    c = list(counters.unbind(1))
    keys = [seed & _UINT32_MASK, seed >> 32 & _UINT32_MASK]
    for _ in range(_PHILOX_ROUNDS):
        h0, l0 = _multiply_high_low(_PHILOX_FACTORS[0], c[0])
        h1, l1 = _multiply_high_low(_PHILOX_FACTORS[1], c[2])
        c = [h1 ^ c[1] ^ keys[0], l1, h0 ^ c[3] ^ keys[1], l0]
        keys = [
            (key + step) & _UINT32_MASK for key, step in zip(keys, _PHILOX_KEY_STEPS, strict=True)
        ]
    return torch.stack(c, dim=1)


def uniform(numel: int, low: float, high: float, seed: int) -> Tensor:
    """Return the values of `fill_uniform_` before it rounds them, float64 `[numel]` on the CPU.

    They are `low + span * u`, where `low` and `span = high - low` are rounded to float32, and u is
    a multiple of 2^-24 in [0, 1): the high 24 bits of a word. `fill_uniform_` rounds the values to
    float32 and then to its dtype.
    """
    words = philox(seed, torch.arange((numel + 3) // 4, device="cpu")).flatten()[:numel]
    rounded = torch.tensor([low, high - low], dtype=torch.float32, device="cpu").double()
    return rounded[0] + rounded[1] * (words >> 8).double() * 2.0**-24
