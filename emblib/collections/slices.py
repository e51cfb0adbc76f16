"""The part of a table that one place holds: a box of rows and columns, and its first values."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from emblib.collections.configs import Dynamic, Quantized, Spec, TableConfig, TensorTrain
from emblib.dynamic_specs import Constant, DynamicSpec, Uniform
from emblib.ops import random
from emblib.specs import TTSpec
from emblib.tt.initializers import INITIALIZERS, Layout

_BLOCK = 1 << 22  # elements that are drawn at a time


@dataclass(frozen=True)
class TableSlice:
    """Rows `[r0, r1)` and columns `[c0, c1)` of a table.

    The rows of a dynamic table are room for keys, and not a range of them. A slice of a tensor
    train is one of its first core: rows and columns are multiples of the product of the other
    factors, as far as they do not end with the table.
    """

    config: TableConfig
    rows: tuple[int, int]
    columns: tuple[int, int]

    @staticmethod
    def whole(config: TableConfig) -> TableSlice:
        """All of a table."""
        return TableSlice(config, (0, config.num_embeddings), (0, config.embedding_dim))

    def __post_init__(self) -> None:
        sizes = (self.config.num_embeddings, self.config.embedding_dim)
        for name, (begin, end), size in zip(
            ("rows", "columns"), (self.rows, self.columns), sizes, strict=True
        ):
            if not 0 <= begin < end <= size:
                raise ValueError(
                    f"{name} of a slice of {self.config.name!r} must be a range that is not empty "
                    f"within [0, {size}), got [{begin}, {end})"
                )
        if isinstance(self.config.kind, Dynamic) and self.columns != (0, sizes[1]):
            raise ValueError(
                f"dynamic table {self.config.name!r} is not divided by columns, got columns "
                f"{self.columns} of {sizes[1]}: every part would have to take in the same keys"
            )
        if isinstance(self.config.kind, Quantized) and self.columns != (0, sizes[1]):
            raise ValueError(
                f"quantised table {self.config.name!r} is not divided by columns, got columns "
                f"{self.columns} of {sizes[1]}: a row has one scale"
            )
        if isinstance(self.config.kind, TensorTrain) and not self.is_whole:
            self._core_part()

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the table."""
        sizes = (self.config.num_embeddings, self.config.embedding_dim)
        return (self.num_rows, self.dim) == sizes

    @property
    def num_rows(self) -> int:
        """How many rows."""
        return self.rows[1] - self.rows[0]

    @property
    def dim(self) -> int:
        """How many columns."""
        return self.columns[1] - self.columns[0]

    @property
    def spec(self) -> Spec:
        """The part as a table of its own."""
        return self.named(self.config.name)

    def named(self, name: str) -> Spec:
        """The part as a table of its own, of another name."""
        config = self.config
        if isinstance(config.kind, TensorTrain) and not self.is_whole:
            return replace(self._core_part(), name=name)
        spec = config.kind.spec(self.num_rows, self.dim, name)
        if isinstance(config.kind, Dynamic) and config.kind.initializer == Uniform():
            # Bounds of the whole table, so that they do not depend on how it is divided.
            low, high = config.bounds
            first = Uniform(low, high) if low < high else Constant(low)
            assert isinstance(spec, DynamicSpec)
            return replace(spec, initializer=first)
        return spec

    def core_range(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of a tensor train: which of the first row factor and of the first dim factor it has.

        The factors may make more rows than there are; what ends with the table has those, too.
        """
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        rest = math.prod(whole.row_factors[1:]), math.prod(whole.dim_factors[1:])
        ends = self.config.num_embeddings, self.config.embedding_dim
        factors = whole.row_factors[0], whole.dim_factors[0]
        ranges = []
        for name, (begin, end), step, last, factor in zip(
            ("rows", "columns"), (self.rows, self.columns), rest, ends, factors, strict=True
        ):
            if begin % step or (end % step and end != last):
                raise ValueError(
                    f"{name} of a slice of tensor train {self.config.name!r} must be multiples of "
                    f"{step}, the product of the factors of all cores but the first, got "
                    f"[{begin}, {end}) of {last}"
                )
            ranges.append((begin // step, factor if end == last else end // step))
        return ranges[0], ranges[1]

    def _core_part(self) -> TTSpec:
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        (p0, p1), (q0, q1) = self.core_range()
        return TTSpec(
            self.num_rows,
            self.dim,
            whole.ranks,
            (p1 - p0, *whole.row_factors[1:]),
            (q1 - q0, *whole.dim_factors[1:]),
        )

    def cores_of(self, cores: list[Tensor]) -> list[Tensor]:
        """The part of each core of the whole table: of the first a slice, the others as they are.

        Serves whatever is laid out as the cores are, optimizer states among them; of one number a
        core row (`[p]`) it is the rows.
        """
        whole = self.config.spec()
        assert isinstance(whole, TTSpec)
        (p0, p1), (q0, q1) = self.core_range()
        first = cores[0][p0:p1]
        if first.dim() == 2:
            rank = whole.ranks[0]
            first = first[:, q0 * rank : q1 * rank]
        return [first, *cores[1:]]

    def part_of(self, table: Tensor) -> Tensor:
        """The view of what has one row a row of the whole table: `[rows, dim]` or `[rows]`."""
        part = table[self.rows[0] : self.rows[1]]
        return part if part.dim() == 1 else part[:, self.columns[0] : self.columns[1]]


@torch.no_grad()
def draw(part: TableSlice, weight: Tensor, seed: int) -> None:
    """Write first values of a plain table: the same for an element however the table is divided.

    `init_fn` makes the whole table to begin with, and sees torch's generator seeded.
    """
    config = part.config
    if weight.is_meta:
        return
    if config.init_fn is not None:
        with _seeded(weight.device, seed):
            if part.is_whole:
                config.init_fn(weight)
                return
            whole = torch.empty(
                config.num_embeddings, config.embedding_dim, dtype=weight.dtype, device="cpu"
            )
            config.init_fn(whole)
        weight.copy_(part.part_of(whole))
        return
    for rows, block_seed in _blocks(part, seed):
        _draw_block(part, weight, rows, block_seed)


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Torch's generators begin with `seed`, and are as they were afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda in devices:
            with torch.cuda.device(cuda):
                torch.cuda.manual_seed(seed)
        yield


def _rows_of_block(config: TableConfig) -> int:
    return max(1, _BLOCK // config.embedding_dim)


def _blocks(part: TableSlice, seed: int) -> Iterator[tuple[range, int]]:
    """Blocks of rows of the whole table that the part meets, and the seed of each."""
    step, rows = _rows_of_block(part.config), part.config.num_embeddings
    for number in range(part.rows[0] // step, -(-part.rows[1] // step)):
        block_seed = (seed + number * 0x9E3779B97F4A7C15) % (2**63 - 1)
        yield range(number * step, min((number + 1) * step, rows)), block_seed


def _draw_block(part: TableSlice, weight: Tensor, rows: range, seed: int) -> None:
    begin, end = max(rows.start, part.rows[0]), min(rows.stop, part.rows[1])
    target = weight[begin - part.rows[0] : end - part.rows[0]]
    low, high = part.config.bounds
    all_columns = part.dim == part.config.embedding_dim
    if all_columns and begin == rows.start and target.is_contiguous():
        random.fill_uniform_(target, low, high, seed)  # a value depends on its place in the block
        return
    block = target.new_empty(end - rows.start, part.config.embedding_dim)
    random.fill_uniform_(block, low, high, seed)
    target.copy_(block[begin - rows.start :, part.columns[0] : part.columns[1]])


@torch.no_grad()
def draw_cores(part: TableSlice, cores: list[Tensor], seed: int) -> None:
    """Write first values of the cores of a tensor train, by the same rule."""
    config, whole = part.config, part.config.spec()
    assert isinstance(whole, TTSpec)
    assert isinstance(config.kind, TensorTrain)
    if cores[0].is_meta:
        return
    layout = Layout(whole.row_factors, whole.dim_factors, whole.full_ranks, torch.device("cpu"))
    with _seeded(layout.device, seed):
        values = INITIALIZERS[config.kind.init](layout, 1.0 / math.sqrt(3.0 * whole.rows))
    for core, value in zip(cores, part.cores_of(values), strict=True):
        core.copy_(value)
