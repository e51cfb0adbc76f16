"""Routing problems for tests/ops and tests/simt: random layouts of units, targets and pieces."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from emblib.columns import RouteRule
from emblib.ops.route import Routing
from emblib.reference import route


@dataclass(frozen=True)
class Case:
    """Features of any number of bags, in blocks over `holders`; broken ids where asked."""

    bags: tuple[int, ...] = (5, 5, 5)
    most_blocks: int = 4
    most_copies: int = 2
    longest: int = 6
    uneven: bool = False  # every ninth bag has more ids than one lane of a GPU routes
    rows: int = 50
    id_dtype: torch.dtype = torch.int64
    offset_dtype: torch.dtype = torch.int64
    by_key: bool = False
    spread: bool = False  # ids beyond the rows
    broken: bool = False
    equal: bool = False  # blocks of ceil(rows / blocks) rows
    seed: int = 0


class Problem(NamedTuple):
    """The arguments of `route_lengths` and, with `starts` and `total`, of `route_ids`."""

    ids: Tensor
    offsets: Tensor
    routing: Routing
    weights: Tensor

    @property
    def starts(self) -> Tensor:
        """Sums of the reference's lengths, in the dtype of the offsets."""
        lengths = route.route_lengths(self.ids, self.offsets, *self.routing)
        return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(self.offsets.dtype)


def _draw(generator: torch.Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, (), generator=generator))


def _ids(case: Case, count: int, generator: torch.Generator) -> Tensor:
    if case.by_key:
        return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(case.id_dtype)
    ids = torch.randint(0, max(case.rows, 1), (count,), generator=generator)
    if case.broken:
        ids[::7] = -1
        ids[3::11] = case.rows
        ids[5::13] = -2
        ids[6::17] = torch.iinfo(case.id_dtype).max
    return ids.to(case.id_dtype)


def make(case: Case) -> Problem:
    """The problem of a case; some features have no blocks and some blocks no copies."""
    generator = torch.Generator().manual_seed(case.seed)
    bags = sum(case.bags)
    lengths = torch.randint(0, case.longest + 1, (bags,), generator=generator)
    if case.uneven:
        lengths[::9] = 17 + 9 * lengths[::9]
    ids = _ids(case, int(lengths.sum()), generator)
    features, blocks, sizes = [], [], []
    for count in case.bags:
        num_blocks = _draw(generator, 0 if case.most_copies > 1 else 1, case.most_blocks)
        cuts = torch.randint(0, case.rows + 1, (num_blocks,), generator=generator).sort().values
        if num_blocks:
            cuts[0] = 0
        if case.equal and num_blocks:
            step = -(-case.rows // num_blocks)
            cuts = (torch.arange(num_blocks) * step).clamp(max=case.rows)
        rule = RouteRule.BY_KEY if case.by_key else RouteRule.BY_RANGE
        rule = RouteRule.BY_RANGE_ELSE_SPREAD if case.spread else rule
        features.append((len(blocks), num_blocks, case.rows, int(rule)))
        for row in cuts.tolist():
            copies = _draw(generator, 0, case.most_copies) if case.most_copies > 1 else 1
            blocks.append((row, len(sizes), copies))
            sizes += [count] * copies
    copies = torch.randperm(len(sizes), generator=generator)
    unit_bags = torch.empty(len(sizes), dtype=torch.int64)
    unit_bags[copies] = torch.tensor(sizes, dtype=torch.int64)
    routing = Routing(
        first_bags=_sums(torch.tensor(case.bags, dtype=torch.int64)),
        features=torch.tensor(features, dtype=torch.int64).view(-1, 4),
        blocks=torch.tensor(blocks, dtype=torch.int64).view(-1, 3),
        copies=copies,
        units=_sums(unit_bags),
    )
    weights = torch.randn(ids.numel(), generator=generator)
    return Problem(ids, _sums(lengths).to(case.offset_dtype), routing, weights)


def _sums(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


CASES = {
    "plain": Case(),
    "one block each": Case(most_blocks=1, most_copies=1, bags=(7, 7)),
    "int32": Case(id_dtype=torch.int32, offset_dtype=torch.int32, seed=1),
    "mixed dtypes": Case(id_dtype=torch.int32, seed=2, broken=True),
    "broken ids": Case(broken=True, longest=40, seed=3),
    "many blocks": Case(most_blocks=60, rows=300, most_copies=1, broken=True, seed=4),
    "many equal blocks": Case(
        most_blocks=60, rows=300, most_copies=1, equal=True, broken=True, longest=40, seed=2
    ),
    "equal blocks of huge tables": Case(
        most_blocks=200, rows=(1 << 52) - 3, most_copies=1, equal=True, seed=3
    ),
    "more blocks than rows": Case(most_blocks=60, rows=20, most_copies=1, equal=True, seed=5),
    "by key": Case(by_key=True, most_blocks=5, seed=5),
    "by key, int32": Case(by_key=True, most_blocks=3, id_dtype=torch.int32, seed=6),
    "spread": Case(spread=True, broken=True, longest=40, most_blocks=5, seed=3),
    "spread, one block": Case(spread=True, broken=True, most_blocks=1, most_copies=1, seed=3),
    "spread, int32, many blocks": Case(
        spread=True,
        broken=True,
        equal=True,
        most_blocks=60,
        rows=300,
        most_copies=1,
        id_dtype=torch.int32,
        longest=700,
        seed=4,
    ),
    "spread, empty tables": Case(spread=True, rows=0, seed=10, broken=True),
    "variable bags": Case(bags=(3, 0, 17, 1, 33), longest=3, seed=7),
    "long bags": Case(bags=(2, 3), longest=1500, most_copies=1, seed=8, broken=True),
    "long bags among short ones": Case(bags=(40, 33), longest=3, uneven=True, seed=8, broken=True),
    "more rows than int32 holds": Case(rows=1 << 40, broken=True, seed=9),
    "more rows than their int32 ids hold": Case(
        rows=1 << 31, id_dtype=torch.int32, broken=True, seed=9
    ),
    "empty tables": Case(rows=0, seed=10, broken=True),
    "nothing looked up": Case(longest=0, seed=11),
    "no bags": Case(bags=(0, 0), seed=12),
    "no features": Case(bags=(), seed=13),
}


class Pieces(NamedTuple):
    """The arguments of `combine` and, with a gradient for `source`, of `combine_backward`."""

    source: Tensor
    targets: Tensor
    pieces: Tensor
    lengths: Tensor | None
    out_numel: int


@dataclass(frozen=True)
class Combining:
    """Targets `widths` side by side in `rows` rows, or one after the other (`flat`)."""

    rows: tuple[int, ...] = (9,)
    widths: tuple[int, ...] = (4, 12, 7)
    most_pieces: int = 3
    means: bool = False
    gap: int = 0  # elements of the source between rows that no piece names
    seed: int = 0


def make_pieces(case: Combining, dtype: torch.dtype = torch.float32) -> Pieces:
    """One width of rows: a [rows, sum of widths] output; several: target after target, flat."""
    generator = torch.Generator().manual_seed(case.seed)
    side_by_side = len(case.rows) == 1
    columns = sum(case.widths)
    targets, pieces, at, out, bag = [], [], 0, 0, 0
    for t, width in enumerate(case.widths):
        rows = case.rows[t % len(case.rows)]
        count = _draw(generator, 0 if case.most_pieces > 1 else 1, case.most_pieces)
        mean = case.means and t % 3 != 1
        stride = columns if side_by_side else width
        first = len(pieces)
        for _ in range(count):
            pieces.append((at, width + case.gap, -1))
            at += rows * (width + case.gap)
        targets.append((out, stride, rows, width, first, len(pieces), bag if mean else -1))
        out += width if side_by_side else rows * width
        bag += rows
    source = torch.randn(at, generator=generator).to(dtype)
    return Pieces(
        source,
        torch.tensor(targets, dtype=torch.int64).view(-1, 7),
        torch.tensor(pieces, dtype=torch.int64).view(-1, 3),
        torch.randint(0, 5, (bag,), generator=generator) if case.means else None,
        case.rows[0] * columns if side_by_side else out,
    )


COMBININGS = {
    "sums": Combining(),
    "copies": Combining(most_pieces=1, widths=(8, 8, 5)),
    "means": Combining(means=True, widths=(1, 3, 16, 40, 64)),
    "wide": Combining(widths=(300, 129), rows=(5,), means=True, seed=1),
    "gaps": Combining(gap=3, means=True, seed=2),
    "own numbers of rows": Combining(rows=(3, 0, 11), widths=(5, 6, 17, 2), means=True, seed=3),
    "no rows": Combining(rows=(0,)),
    "no columns": Combining(widths=(0, 3, 0)),
    "nothing": Combining(widths=()),
}


def local_parts(problem: Pieces) -> list[tuple[int, int]]:
    """Parts `[begin, end)` of the source that may be a tensor of their own: no piece crosses them.

    At the start, in the middle, at the end, everything and nothing.
    """
    ends = [0, problem.source.numel()]
    ends += [min(offset, problem.source.numel()) for offset, _, _ in problem.pieces.tolist()]
    cuts = sorted(set(ends))
    a, b = cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3]
    return sorted({(0, b), (a, b), (a, cuts[-1]), (0, cuts[-1]), (a, a)})


def without(values: Tensor, part: tuple[int, int]) -> Tensor:
    """Return the elements outside of a part."""
    return torch.cat([values[: part[0]], values[part[1] :]])


def some_rows(problem: Pieces) -> tuple[Pieces, Tensor]:
    """The same targets, of whose rows every piece has about half, packed; and where they are."""
    pieces, found = problem.pieces.clone(), []
    generator = torch.Generator().manual_seed(5)
    first_row = 0
    for _, _, count, _, first, end, _ in problem.targets.tolist():
        for piece in range(first, end):
            there = torch.rand(count, generator=generator) < 0.5
            packed = there.cumsum(0, dtype=torch.int32) - 1
            found.append(torch.where(there, packed, -1).to(torch.int32))
            pieces[piece, 2] = first_row
            first_row += count
    return problem._replace(pieces=pieces), torch.cat([torch.empty(0, dtype=torch.int32), *found])
