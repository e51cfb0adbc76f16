"""Initial values of dense tables, which do not depend on how the table is sharded (see `draw`).

The whole table is divided into blocks of rows with at most 4M elements, or of one row. The seed of
a block depends on the table's seed and the block's number; a slice draws the blocks that it
overlaps and copies its part.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from emblib.context_values import with_value
from emblib.grad_mode import without_gradients
from emblib.init import ByRows
from emblib.ops import primitives
from emblib.storage.base import TableDescription, TableSlice

_BLOCK_ELEMENTS = 1 << 22  # fixed: initial values depend on it
_SEED_FACTOR = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, to separate the seeds of blocks


def new_seeds(slices: Iterable[TableSlice]) -> dict[str, int]:
    """Return a seed per table by name, drawn from torch's generator in the order of the tables."""
    names = dict.fromkeys(table_slice.config.name for table_slice in slices)
    return {name: primitives.new_seed() for name in names}


_P = ParamSpec("_P")
_R = TypeVar("_R")

_is_skipping = ContextVar("_is_skipping", default=False)


def without_initial_values(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that constructs tables without initial values; the caller writes all rows.

    `init_fn` is not called, and torch's CPU generator does not advance.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.random.fork_rng(devices=[]):  # seeds of tables are drawn from it
            return function(*args, **kwargs)

    return with_value(_is_skipping, True, call)


def skips_initial_values() -> bool:
    """Return whether the caller is inside `without_initial_values`."""
    return _is_skipping.get()


@without_gradients
def draw(table_slice: TableSlice, weight: Tensor, seed: int) -> None:
    """Write the initial values of a slice of a dense table into `weight` `[rows, dim]`.

    Values do not depend on how the table is sharded, with one exception: an `init_fn` that is no
    `ByRows` writes the whole table, for a slice in CPU memory, and draws other random values there
    than on a GPU. `ByRows` writes each block that the slice overlaps, on the device of `weight`.
    Torch's generators are seeded before each call. Does nothing on meta or inside
    `without_initial_values`.
    """
    config = table_slice.config
    if weight.is_meta or skips_initial_values():
        return
    if isinstance(config.init_fn, ByRows):
        for rows, block_seed in _seeded_blocks(table_slice, seed):
            with seeded(weight.device, block_seed):
                _fill_block(table_slice, weight, rows, config.init_fn)
        return
    if config.init_fn is not None:
        with seeded(weight.device, seed):
            if table_slice.is_whole:
                _check_used(config.name, config.init_fn(weight), weight)
                return
            table = torch.empty(
                config.num_embeddings, config.embedding_dim, dtype=weight.dtype, device="cpu"
            )
            _check_used(config.name, config.init_fn(table), table)
        weight.copy_(table_slice.view_of(table))
        return
    for rows, block_seed in _seeded_blocks(table_slice, seed):
        _draw_block(table_slice, weight, rows, block_seed)


def _check_used(table: str, result: Any, target: Tensor) -> None:
    """Warn if an `init_fn` returned values that are not in the tensor that it should fill."""
    is_alike = isinstance(result, Tensor) and result.shape == target.shape
    if is_alike and result.data_ptr() != target.data_ptr():
        warnings.warn(
            f"init_fn of {table!r} returned another tensor, which is not used: fill the tensor "
            "that it is given, e.g. torch.nn.init.normal_ or lambda rows: rows.copy_(values)",
            stacklevel=2,
        )


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's generators of the CPU and of `device`; restore their states at the end."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield


def _rows_of_block(config: TableDescription) -> int:
    return max(1, _BLOCK_ELEMENTS // config.embedding_dim)


def _seeded_blocks(table_slice: TableSlice, seed: int) -> Iterator[tuple[range, int]]:
    """Yield (rows of the table, seed) of each block that a slice overlaps."""
    rows_per_block, num_rows = _rows_of_block(table_slice.config), table_slice.config.num_embeddings
    for block_number in range(
        table_slice.rows[0] // rows_per_block, -(-table_slice.rows[1] // rows_per_block)
    ):
        block_seed = (seed + block_number * _SEED_FACTOR) % (2**63 - 1)
        yield (
            range(
                block_number * rows_per_block, min((block_number + 1) * rows_per_block, num_rows)
            ),
            block_seed,
        )


def _fill_block(table_slice: TableSlice, weight: Tensor, rows: range, init_fn: ByRows) -> None:
    """Write the slice's part of a block; `init_fn` fills whole blocks."""
    begin, end = max(rows.start, table_slice.rows[0]), min(rows.stop, table_slice.rows[1])
    target = weight[begin - table_slice.rows[0] : end - table_slice.rows[0]]
    if len(target) == len(rows) and table_slice.dim == table_slice.config.embedding_dim:
        _check_used(table_slice.config.name, init_fn.function(target, rows), target)
        return
    block = target.new_empty(len(rows), table_slice.config.embedding_dim)
    _check_used(table_slice.config.name, init_fn.function(block, rows), block)
    target.copy_(block[begin - rows.start : end - rows.start, slice(*table_slice.columns)])


def _draw_block(table_slice: TableSlice, weight: Tensor, rows: range, seed: int) -> None:
    """Draw the rows of one block, and write the slice's part into its `weight`."""
    begin, end = max(rows.start, table_slice.rows[0]), min(rows.stop, table_slice.rows[1])
    target = weight[begin - table_slice.rows[0] : end - table_slice.rows[0]]
    low, high = table_slice.config.bounds
    all_columns = table_slice.dim == table_slice.config.embedding_dim
    if all_columns and begin == rows.start and target.is_contiguous():
        # A value depends on its offset in the block: these rows begin with the first one.
        primitives.fill_uniform_(target, low, high, seed)
        return
    block = target.new_empty(end - rows.start, table_slice.config.embedding_dim)
    primitives.fill_uniform_(block, low, high, seed)
    target.copy_(block[begin - rows.start :, table_slice.columns[0] : table_slice.columns[1]])
