"""Description of the cache in front of tables in host memory and on disk."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from emblib.init import check_finite
from emblib.specs.checks import OptionEnum, check_count, check_float_dtype, normalise_counts


class CachePolicy(OptionEnum):
    """Row that a full set evicts: the least recently (LRU) or least frequently used one (LFU).

    Among equally frequent rows, LFU evicts the most recently used one.

    Example:
        >>> emblib.CacheConfig(emblib.CachePolicy.LFU, load_factor=0.1).policy
        <CachePolicy.LFU: 'lfu'>
    """

    LRU = "lru"
    LFU = "lfu"


class Verify(OptionEnum):
    """Time at which the pages of tables in files are verified against their checksums.

    TOUCH verifies a page before its first use after opening, OPEN verifies all pages at opening,
    which reads the whole files. OFF accepts the files unchecked, damaged ones included; the next
    flush then writes new checksums.

    Example:
        >>> emblib.CacheConfig(directory="tables", verify=emblib.Verify.OPEN).verify
        <Verify.OPEN: 'open'>
    """

    TOUCH = "touch"
    OPEN = "open"
    OFF = "off"


@dataclass(frozen=True)
class MultiPassPrefetch:
    """Prefetch a large batch in several passes, which bounds the memory for grouping it.

    A batch of at least `min_lookups` lookups is prefetched in up to `passes` parts, a smaller one
    at once. Both numbers must be ints (else TypeError) of at least 1 (else ValueError).

    Example:
        >>> passes = emblib.MultiPassPrefetch(passes=4, min_lookups=1 << 20)
        >>> emblib.CacheConfig(load_factor=0.1, passes=passes).passes
        MultiPassPrefetch(passes=4, min_lookups=1048576)
    """

    passes: int = 12
    min_lookups: int = 6_000_000

    def __post_init__(self) -> None:
        normalise_counts(self, "passes", "min_lookups")


@dataclass(frozen=True)
class CacheConfig:
    """The cache of the MANAGED_CACHING and DISK tables of a module: 32-way set-associative.

    Args:
        policy: policy that selects the row that a full set evicts.
        load_factor: fraction of the rows of those tables that fits into the cache, in (0, 1];
            unused if `sets` is set.
        sets: number of sets of 32 rows, at most one set per row of those tables; 0 computes it from
            `load_factor`.
        reserved_bytes: bytes of GPU memory to leave free when the cache is allocated.
        dtype: dtype of the cached rows; None is the dtype of the weights.
        directory: directory of the DISK tables, one per module. It is created if it is missing;
            otherwise the tables in it are opened.
        passes: division of very large batches into several prefetches; None does not divide them.
        verify: time at which the files of DISK tables are verified, see `Verify`.

    Raises:
        TypeError: `sets`, `reserved_bytes`, `directory` or `passes` has another type.
        ValueError: a number is out of range, `load_factor` is not a number, or `policy`, `dtype` or
            `verify` is unknown.

    Example:
        >>> table = emblib.TableSpec(1_000, 16, placement=emblib.Placement.MANAGED_CACHING)
        >>> cache = emblib.CacheConfig(load_factor=0.2)  # up to 200 rows, in sets of 32
        >>> bags = emblib.TableBatchedEmbeddingBags([table], emblib.optim.SGD(0.1), cache=cache)
        >>> for _ in range(2):  # the second lookup finds its rows in the cache
        ...     pooled = bags(torch.tensor([3, 14]), torch.tensor([0, 2]))
        >>> bags.cache_stats().unique, bags.cache_stats().unique_misses
        (4, 2)
    """

    policy: CachePolicy = CachePolicy.LRU
    load_factor: float = 0.2
    sets: int = 0
    reserved_bytes: int = 0
    dtype: torch.dtype | None = None
    directory: str | Path | None = None
    passes: MultiPassPrefetch | None = None
    verify: Verify = Verify.TOUCH

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", CachePolicy(self.policy))
        object.__setattr__(self, "verify", Verify(self.verify))
        check_finite(self, "load_factor")
        if not 0.0 < self.load_factor <= 1.0:
            raise ValueError(f"load_factor must be in (0, 1], got {self.load_factor}")
        if self.directory is not None and not isinstance(self.directory, str | os.PathLike):
            raise TypeError(f"directory must be None or a path, got {self.directory!r}")
        for name in ("sets", "reserved_bytes"):
            object.__setattr__(self, name, check_count(name, getattr(self, name), minimum=0))
        if self.passes is not None and not isinstance(self.passes, MultiPassPrefetch):
            raise TypeError(
                f"passes must be None or a MultiPassPrefetch(passes=...), got {self.passes!r}"
            )
        if self.dtype is not None:
            check_float_dtype("CacheConfig.dtype", self.dtype)
