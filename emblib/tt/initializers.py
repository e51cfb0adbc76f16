"""Initial values of tensor-train cores, scaled so that rows get a chosen standard deviation.

An initializer takes the sizes of the cores and `row_std`, the wanted standard deviation of the
values of rows. It returns the cores, `[p[k], R[k] * q[k] * R[k + 1]]` each, on the device of the
layout and in torch's default dtype or float32; callers convert them. Torch's generator of the
device draws the numbers. Here p are the row factors, q the dim factors, R the ranks with the 1 at
both ends, and d is the number of cores. Tables pass `dense_row_std(rows)`.

Rows of `INITIALIZERS` have about the deviation `row_std`. `FBTT_INITIALIZERS` are the formulas of
FBTT-Embedding, to compare with its runs; most of their rows have another deviation.

A row is a sum of products of core entries. If all entries are independent with deviation s, rows
have the deviation `s**d * sqrt(prod(R))`. `gaussian`, `uniform` and `sampled_gaussian` solve this
for s (`CoreLayout.entry_std`). `first_core` scales core k > 0 by `1 / sqrt(R[k])`. A value of
`approx_uniform` is one product, not a sum, so it scales cores by `(sqrt(3) * row_std)**(1 / d)`.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CoreLayout(NamedTuple):
    """Sizes and device of the cores of a table: core k is `[p[k], R[k] * q[k] * R[k + 1]]`.

    Attributes:
        row_factors: p, one per core.
        dim_factors: q, one per core.
        full_ranks: R, with the 1 at both ends.
        device: device of the cores.
    """

    row_factors: Sequence[int]
    dim_factors: Sequence[int]
    full_ranks: Sequence[int]
    device: torch.device

    def shapes(self) -> list[tuple[int, int]]:
        """Return the shapes of the cores."""
        ranks = self.full_ranks
        return [
            (p, ranks[k] * q * ranks[k + 1])
            for k, (p, q) in enumerate(zip(self.row_factors, self.dim_factors, strict=True))
        ]

    def entry_std(self, row_std: float) -> float:
        """Return the standard deviation of core entries that gives rows the deviation `row_std`."""
        num_cores = len(self.row_factors)
        return (row_std / math.sqrt(math.prod(self.full_ranks))) ** (1.0 / num_cores)


def gaussian(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw normal entries."""
    entry_std = layout.entry_std(row_std)
    return [torch.randn(shape, device=layout.device) * entry_std for shape in layout.shapes()]


def uniform(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw entries uniform around zero."""
    bound = layout.entry_std(row_std) * math.sqrt(3.0)
    return [
        torch.empty(shape, device=layout.device).uniform_(-bound, bound)
        for shape in layout.shapes()
    ]


def first_core(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw normal entries: core 0 has the deviation `row_std`, and the others preserve it.

    So the gradient of core 0 is about as large as that of a row, and the other cores begin as
    random projections. Meant for trains whose core 0 has most of the entries
    (`TensorTrain.projected`).
    """
    ranks = layout.full_ranks
    return [
        torch.randn(shape, device=layout.device) * (1.0 / math.sqrt(ranks[k]) if k else row_std)
        for k, shape in enumerate(layout.shapes())
    ]


def sampled_gaussian(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw normal entries outside of +-2 deviations, as TT-Rec does.

    A row is a sum of products of d entries; without entries near zero its values are closer to a
    normal distribution. Unlike TT-Rec's, the entries are scaled for rows of deviation `row_std`.
    """
    density_at_2 = math.exp(-2.0) / math.sqrt(2.0 * math.pi)
    tails_std = math.sqrt(1.0 + 2.0 * density_at_2 / _TAIL_PROBABILITY)
    scale = layout.entry_std(row_std) / tails_std
    return [_draw_tails(shape, layout.device) * scale for shape in layout.shapes()]


_TAIL_PROBABILITY = 0.5 * math.erfc(math.sqrt(2.0))  # P(z >= 2) of a normal number z


def _draw_tails(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw a float32 tensor of `shape` of normal numbers with |z| >= 2."""
    u = torch.rand(shape, dtype=torch.float64, device=device)
    z = -torch.special.ndtri(_TAIL_PROBABILITY * (1.0 - u))
    sign = torch.randint(0, 2, shape, device=device) * 2 - 1
    return (z * sign).float()


_NOISE = 0.01  # deviation of the noise on core entries, before factors of the initializer


def approx_uniform(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw cores of rows whose values are about uniform around zero, in independent directions.

    The last core has values spaced evenly between -1 and 1, in random order. The other cores select
    among them: for each left rank index they have one nonzero entry, +1 or -1, at a random right
    rank index. So a value of a row is one entry of the last core with a sign. (A sum of several
    entries would be closer to a normal distribution.) Noise of 1 % separates rows with equal
    selections. Then all cores get the same scale.

    `saw_tooth` selects only by the last digits of row and column, so the rows of a table lie in few
    dimensions: in docs/tensor_trains.md a table of 64 columns has the effective rank 3.8 with
    `saw_tooth`, and 63.8 with `approx_uniform`.
    """
    ranks, num_cores, device = layout.full_ranks, len(layout.row_factors), layout.device
    scale = (row_std * math.sqrt(3.0)) ** (1.0 / num_cores)
    cores = []
    for k, (p, q) in enumerate(zip(layout.row_factors, layout.dim_factors, strict=True)):
        shape = (p, ranks[k], q, ranks[k + 1])
        if k == num_cores - 1:
            # Permuted, not drawn: draws of a small core would miss parts of the interval by chance.
            num_values = math.prod(shape)
            value_index = torch.randperm(num_values, device=device).view(shape)
            core = (2.0 * value_index + 1.0) / num_values - 1.0
        else:
            sign = torch.randint(0, 2, (*shape[:3], 1), device=device) * 2.0 - 1.0
            rank_index = torch.randint(0, shape[3], (*shape[:3], 1), device=device)
            core = torch.zeros(shape, device=device).scatter_(3, rank_index, sign)
        noise = torch.randn(shape, device=device) * (_NOISE / math.sqrt(ranks[k] * ranks[k + 1]))
        cores.append(((core + noise) * scale).reshape(p, -1))
    return cores


INITIALIZERS: dict[str, Callable[[CoreLayout, float], list[Tensor]]] = {
    "gaussian": gaussian,
    "first_core": first_core,
    "sampled_gaussian": sampled_gaussian,
    "uniform": uniform,
    "approx_uniform": approx_uniform,
}


def dense_row_std(rows: int) -> float:
    """Return the deviation of initial rows of a dense table, uniform in +-1/sqrt(rows) as DLRM's.

    `rows` is the number of rows of the table.
    """
    return 1.0 / math.sqrt(3.0 * rows)


def _num_rows_of_std(row_std: float) -> float:
    """Return the number of rows for which `dense_row_std` is `row_std`."""
    return 1.0 / (3.0 * row_std * row_std)


def positive_uniform(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw entries uniform from 0 to a bound: no entry is negative, and rows are almost equal."""
    num_cores = len(layout.row_factors)
    variance = 2.0 / (_num_rows_of_std(row_std) + math.prod(layout.dim_factors))
    bound = (variance / math.prod(layout.full_ranks)) ** (1.0 / (2 * num_cores))
    return [torch.rand(shape, device=layout.device) * bound for shape in layout.shapes()]


def unscaled_uniform(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw entries uniform in [0, 1/sqrt(rows)), whatever the number of cores."""
    bound = 1.0 / math.sqrt(_num_rows_of_std(row_std))
    return [torch.rand(shape, device=layout.device) * bound for shape in layout.shapes()]


def unscaled_normal(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw normal entries of deviation 1/sqrt(rows), whatever the number of cores."""
    entry_std = 1.0 / math.sqrt(_num_rows_of_std(row_std))
    return [torch.randn(shape, device=layout.device) * entry_std for shape in layout.shapes()]


def unscaled_sampled_gaussian(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw normal entries outside of +-2, times the cube root of `row_std` for any core number."""
    scale = row_std ** (1.0 / 3.0)
    return [_draw_tails(shape, layout.device) * scale for shape in layout.shapes()]


def saw_tooth(layout: CoreLayout, row_std: float) -> list[Tensor]:
    """Draw 3 cores of saw-tooth numbers: rows of uniform values that lie in few dimensions.

    Below, a is `1 / sqrt(R[1])`, a tooth is a number of `_draw_teeth`, and "about" means with
    normal noise. At last, all entries are scaled by `rows**(-1/6)`.

    - G0 `[p0, q0, R1]` is about a.
    - G1 `[p1, R1, q1, R2]` is about a, except at one random even index of R2 for each (p1, q1).
      There it is tooth / a at one random index of R1, and about zero at the others.
    - G2 `[p2, R2, q2]` is about zero, except at one random odd index of R2 for each (p2, q2). There
      it is a tooth.

    Raises:
        ValueError: there are not 3 cores, or the second rank is below 2.
    """
    if len(layout.row_factors) != 3 or layout.full_ranks[2] < 2:
        raise ValueError(
            "init 'saw_tooth' needs 3 cores and a second rank of at least 2, got the "
            f"ranks {tuple(layout.full_ranks[1:-1])}; use 'approx_uniform'"
        )
    (p0, p1, p2), (q0, q1, q2) = layout.row_factors, layout.dim_factors
    first_rank, second_rank, device = layout.full_ranks[1], layout.full_ranks[2], layout.device
    a = 1.0 / math.sqrt(first_rank)
    first = a + _NOISE * torch.randn(p0, q0 * first_rank, device=device)

    middle = a + _NOISE * torch.randn(p1, first_rank, q1, second_rank, device=device)
    even_index = 2 * torch.randint((second_rank + 1) // 2, (p1, 1, q1, 1), device=device)
    tooth_index = torch.randint(first_rank, (p1, 1, q1, 1), device=device)
    near_zeros = torch.randn(p1, first_rank, q1, 1, device=device) * (_NOISE**2 / a)
    near_zeros.scatter_(1, tooth_index, _draw_teeth((p1, 1, q1, 1), device) / a)
    middle.scatter_(3, even_index.expand(p1, first_rank, q1, 1), near_zeros)

    last = _NOISE * torch.randn(p2, second_rank, q2, device=device)
    odd_index = 1 + 2 * torch.randint(second_rank // 2, (p2, 1, q2), device=device)
    last.scatter_(1, odd_index, _draw_teeth((p2, 1, q2), device))
    scale = _num_rows_of_std(row_std) ** (-1.0 / 6.0)
    return [core.reshape(core.shape[0], -1) * scale for core in (first, middle, last)]


# As in FBTT-Embedding: teeth on each side of zero, counting the tooth at zero, and their width.
_NUM_TEETH = 15
_TOOTH_WIDTH = 0.7 / (2 * _NUM_TEETH)


def _draw_teeth(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw a tensor of `shape` of numbers in (-1, 1) near multiples of 1/15."""
    centers = torch.randint(1 - _NUM_TEETH, _NUM_TEETH, shape, device=device) / _NUM_TEETH
    return centers + (torch.rand(shape, device=device) - 0.5) * _TOOTH_WIDTH


FBTT_INITIALIZERS: dict[str, Callable[[CoreLayout, float], list[Tensor]]] = {
    "positive_uniform": positive_uniform,
    "unscaled_uniform": unscaled_uniform,
    "unscaled_normal": unscaled_normal,
    "saw_tooth": saw_tooth,
    "unscaled_sampled_gaussian": unscaled_sampled_gaussian,
}

_NAME_OF_FORMER_NAME = {
    "fbtt:uniform": "positive_uniform",
    "fbtt:naive-uniform": "unscaled_uniform",
    "fbtt:normal": "unscaled_normal",
    "fbtt:approx-uniform": "saw_tooth",
    "fbtt:approx-normal": "unscaled_sampled_gaussian",
}
"""Former name -> name in `FBTT_INITIALIZERS`; former names are FBTT-Embedding's with a prefix."""

_SCALED_COUNTERPARTS = {
    "normal": "gaussian",
    "approx-uniform": "approx_uniform",
    "approx-normal": "sampled_gaussian",
    "naive-uniform": "uniform",
}
"""Name that only FBTT-Embedding has -> name in `INITIALIZERS` to use instead."""


def find_initializer(name: str) -> Callable[[CoreLayout, float], list[Tensor]]:
    """Return the initializer called `name`: a function of the core layout and `row_std`.

    The initializer "uniform" of FBTT-Embedding is "positive_uniform" here, not "uniform".

    Raises:
        ValueError: no initializer has this name. For former names, and names of FBTT-Embedding, the
            message says which name to use.
    """
    initializers = {**INITIALIZERS, **FBTT_INITIALIZERS}
    if name in initializers:
        return initializers[name]
    if name in _NAME_OF_FORMER_NAME:
        raise ValueError(f"init {name!r} is now called {_NAME_OF_FORMER_NAME[name]!r}")
    if name in _SCALED_COUNTERPARTS:
        raise ValueError(
            f"init {name!r} is a name of FBTT-Embedding, whose scales differ: use "
            f"{_SCALED_COUNTERPARTS[name]!r} for rows of deviation 1/sqrt(3 * rows), or "
            f"{_NAME_OF_FORMER_NAME[f'fbtt:{name}']!r} for its own formula"
        )
    raise ValueError(f"init must be one of {', '.join(initializers)}, got {name!r}")
