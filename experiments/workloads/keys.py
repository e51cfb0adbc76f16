"""Keys for hash tables: a numbering of keys, their values, and the calls of a workload.

A *present* key is one that was inserted before the calls; a *new* key was never inserted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.config.schema import Distribution, KeysConfig, Order, WorkloadConfig
from experiments.workloads import distributions
from experiments.workloads.distributions import Ids

VALUE_BITS = 24  # bits of a key's hash in its value: the precision of a float32
GOLDEN_RATIO = 0x9E3779B97F4A7C15 - 2**64  # multiplier of Fibonacci hashing, as an int64


@dataclass(frozen=True)
class KeySpace:
    """A numbering of keys: key n is n (`Order.ranked`), or a hash of n that has 64 bits (permuted).

    The hash is a bijection that depends on `seed`.
    """

    order: Order
    seed: int

    def keys(self, key_numbers: Ids) -> Tensor:
        """Return the keys of `key_numbers`, int64 [keys]; distinct numbers have distinct keys."""
        if self.order is Order.ranked:
            return torch.from_numpy(key_numbers.copy())
        start = np.random.default_rng(self.seed).integers(0, 2**64, dtype=np.uint64)
        mixed: NDArray[np.uint64] = key_numbers.astype(np.uint64) + start
        # SplitMix64 (Steele, Lea, Flood 2014) of a counter.
        mixed = mixed * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy((mixed ^ mixed >> np.uint64(31)).view(np.int64))

    def key_range(self, first: int, count: int) -> Tensor:
        """Return the `count` keys of the numbers first, first + 1, ..., int64 [count]."""
        return self.keys(np.arange(first, first + count, dtype=np.int64))


def values_of(keys: Tensor, dim: int) -> Tensor:
    """Return values computed from int64 keys, float32 [keys, dim]; equal keys have equal values."""
    hashes = keys * GOLDEN_RATIO >> 64 - VALUE_BITS & (1 << VALUE_BITS) - 1
    base = hashes.float() / (1 << VALUE_BITS)
    return base[:, None] + torch.arange(dim)


@dataclass(frozen=True)
class KeyCall:
    """The keys int64 [keys] and values float32 [keys, dim] of a call.

    Attributes:
        keys: keys in random order.
        values: values of the keys; [keys, 0] if the operation takes none.
        new_keys: keys of the call that the table never had, also in `keys`.
    """

    keys: Tensor
    values: Tensor
    new_keys: Tensor


class KeyCalls:
    """Calls on a table into which the keys numbered 0 to num_resident - 1 were inserted.

    These are the present keys; a full table may have evicted some of them.

    Calls that insert nothing draw present keys by the zipf distribution of the workload, else
    uniformly. Calls that insert (`inserts`) all use the present keys of the highest numbers, in
    random order, because a full table does not evict keys that every call uses. The absent keys of
    a call are new.

    Attributes:
        num_resident: number of keys inserted before the first call; absent keys are numbered from
            it on. A caller that fills the table with another number of keys sets it first.
        keys_per_call: keys per call, B × L.
        num_present: present keys per call, at most the argument `num_resident` if calls insert.
        space: numbering of the keys.
    """

    def __init__(
        self,
        workload: WorkloadConfig,
        keys: KeysConfig,
        num_resident: int,
        seed: int,
        *,
        inserts: bool,
    ) -> None:
        self.workload, self.num_resident = workload, num_resident
        self.inserts, self.seed = inserts, seed
        self.space = KeySpace(workload.order, seed)
        self.keys_per_call = workload.B * workload.L
        self.num_present = round(keys.hits * self.keys_per_call)
        if inserts:
            self.num_present = min(self.num_present, num_resident)
        self.num_calls = 0

    @property
    def hits(self) -> float:
        """Return the share of present keys in a call, which few present keys may limit."""
        return self.num_present / self.keys_per_call

    def next(self, dim: int) -> KeyCall:
        """Return the next call, with values of `dim` columns (0: none)."""
        rng = np.random.default_rng([self.seed, self.num_calls])
        num_new = self.keys_per_call - self.num_present
        new_keys = self.space.key_range(self.num_resident + self.num_calls * num_new, num_new)
        self.num_calls += 1
        keys = torch.cat([self.space.keys(self._present_numbers(rng)), new_keys])
        keys = keys[torch.from_numpy(rng.permutation(self.keys_per_call))]
        values = values_of(keys, dim) if dim else torch.empty(self.keys_per_call, 0)
        return KeyCall(keys, values, new_keys)

    def _present_numbers(self, rng: np.random.Generator) -> Ids:
        if self.inserts:
            return np.arange(
                self.num_resident - self.num_present, self.num_resident, dtype=np.int64
            )
        if self.workload.distribution is Distribution.zipf and self.workload.s:
            ranks = distributions.zipf_ranks(
                rng, self.num_present, self.num_resident, self.workload.s, self.workload.q
            )
            return distributions.permute(ranks, self.num_resident, self.seed)
        return rng.integers(0, self.num_resident, self.num_present, dtype=np.int64)
