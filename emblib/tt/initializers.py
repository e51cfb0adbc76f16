"""Initial values of tensor-train cores, scaled so that the rows they make have a chosen deviation.

A row is a sum of products of core entries, so the deviation of the entries must take the ranks
into account: for independent entries of deviation s, rows have `s**d * sqrt(prod(ranks))`. Every
scheme of `INITIALIZERS` gives rows the deviation `std`, `1 / sqrt(3 * rows)` by default in
`TTEmbeddingBag`, that of DLRM's uniform +-1/sqrt(rows). Those of `FBTT_INITIALIZERS` are the five
of FBTT-Embedding with the scales that they have there, to compare with its runs; most give rows
another deviation. Numbers come from torch's generator of the device. Terms: p row factors, q dim
factors, R ranks with the 1 at both ends, d cores.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CoreLayout(NamedTuple):
    """Sizes of the cores: core k is `[p[k], R[k] * q[k] * R[k + 1]]`."""

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

    def entry_std(self, std: float) -> float:
        """Return the standard deviation of core entries that gives rows the deviation `std`."""
        cores = len(self.row_factors)
        return (std / math.sqrt(math.prod(self.full_ranks))) ** (1.0 / cores)


def gaussian(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries."""
    scale = layout.entry_std(std)
    return [torch.randn(shape, device=layout.device) * scale for shape in layout.shapes()]


def uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw entries uniform around zero."""
    bound = layout.entry_std(std) * math.sqrt(3.0)
    return [
        torch.empty(shape, device=layout.device).uniform_(-bound, bound)
        for shape in layout.shapes()
    ]


def first_core(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries: core 0 has the deviation of rows, and the others keep it.

    The gradient of core 0 then is as large as that of rows, and the other cores begin as random
    projections. For a train whose core 0 has most of the values (`TensorTrain.projected`).
    """
    ranks = layout.full_ranks
    return [
        torch.randn(shape, device=layout.device) * (1.0 / math.sqrt(ranks[k]) if k else std)
        for k, shape in enumerate(layout.shapes())
    ]


def sampled_gaussian(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries with |z| >= 2: TT-Rec's scheme, with the scale that it lacks.

    Without entries near zero the rows, products of d entries, come closer to a normal distribution.
    """
    tail = 0.5 * math.erfc(math.sqrt(2.0))  # P(z >= 2)
    density = math.exp(-2.0) / math.sqrt(2.0 * math.pi)
    scale = layout.entry_std(std) / math.sqrt(1.0 + 2.0 * density / tail)
    return [_tails(shape, layout.device) * scale for shape in layout.shapes()]


def _tails(shape: tuple[int, int], device: torch.device) -> Tensor:
    """Draw normal numbers with |z| >= 2."""
    tail = 0.5 * math.erfc(math.sqrt(2.0))
    u = torch.rand(shape, dtype=torch.float64, device=device)
    z = -torch.special.ndtri(tail * (1.0 - u))
    sign = torch.randint(0, 2, shape, device=device) * 2 - 1
    return (z * sign).float()


_JITTER = 0.01


def approx_uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Make rows whose values are uniform around zero, rows of one table unlike each other.

    Every value is one entry of the last core, where values are dealt out evenly, with a random
    sign. Which one, the other cores select: from each place of a bond they lead to one random place
    of the next. (A sum of several entries would be closer to a normal distribution.) A jitter of 1%
    tells equal selections apart.

    FBTT's scheme of this name selects levels by the last digits of row and column alone, so that
    the rows of a table lie in few dimensions: the effective rank is 4 of 64.
    """
    ranks, cores, device = layout.full_ranks, len(layout.row_factors), layout.device
    scale = (std * math.sqrt(3.0)) ** (1.0 / cores)
    values = []
    for k, (p, q) in enumerate(zip(layout.row_factors, layout.dim_factors, strict=True)):
        shape = (p, ranks[k], q, ranks[k + 1])
        if k == cores - 1:
            # Dealt out, not drawn: a small core would miss parts of the interval by chance.
            count = math.prod(shape)
            place = torch.randperm(count, device=device).view(shape)
            core = (2.0 * place + 1.0) / count - 1.0
        else:
            sign = torch.randint(0, 2, (*shape[:3], 1), device=device) * 2.0 - 1.0
            chosen = torch.randint(0, shape[3], (*shape[:3], 1), device=device)
            core = torch.zeros(shape, device=device).scatter_(3, chosen, sign)
        noise = torch.randn(shape, device=device) * (_JITTER / math.sqrt(ranks[k] * ranks[k + 1]))
        values.append(((core + noise) * scale).reshape(p, -1))
    return values


INITIALIZERS: dict[str, Callable[[CoreLayout, float], list[Tensor]]] = {
    "gaussian": gaussian,
    "first_core": first_core,
    "sampled_gaussian": sampled_gaussian,
    "uniform": uniform,
    "approx_uniform": approx_uniform,
}


def _rows(std: float) -> float:
    """Return the number of rows of a table from the deviation that its rows should have."""
    return 1.0 / (3.0 * std * std)


def fbtt_uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw entries uniform from 0 up: all are positive, and rows almost equal."""
    cores = len(layout.row_factors)
    variance = 2.0 / (_rows(std) + math.prod(layout.dim_factors))
    bound = (variance / math.prod(layout.full_ranks)) ** (1.0 / (2 * cores))
    return [torch.rand(shape, device=layout.device) * bound for shape in layout.shapes()]


def fbtt_naive_uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw entries uniform in [0, 1/sqrt(rows)), whatever the number of cores."""
    bound = 1.0 / math.sqrt(_rows(std))
    return [torch.rand(shape, device=layout.device) * bound for shape in layout.shapes()]


def fbtt_normal(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries of deviation 1/sqrt(rows), whatever the number of cores."""
    scale = 1.0 / math.sqrt(_rows(std))
    return [torch.randn(shape, device=layout.device) * scale for shape in layout.shapes()]


def fbtt_approx_normal(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries with |z| >= 2, times the cube root of `std` for 2 and 4 cores as well."""
    return [_tails(shape, layout.device) * std ** (1.0 / 3.0) for shape in layout.shapes()]


def fbtt_approx_uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Make rows of uniform values that lie in few dimensions, by saw teeth in 3 cores.

    Entries of the first core, and of the second, are near 1/sqrt(R[1]). In the second, each row and
    column has one even place of the second bond with nearly zeros and one tooth, and in the last
    core each has one tooth at an odd place and nearly zeros elsewhere.

    Raises:
        ValueError: another number of cores than 3, a second rank below 2.
    """
    if len(layout.row_factors) != 3 or layout.full_ranks[2] < 2:
        raise ValueError(
            "init 'fbtt:approx-uniform' needs 3 cores and a second rank of at least 2, got the "
            f"ranks {tuple(layout.full_ranks[1:-1])}; use 'approx_uniform'"
        )
    (p0, p1, p2), (q0, q1, q2) = layout.row_factors, layout.dim_factors
    first, second, device = layout.full_ranks[1], layout.full_ranks[2], layout.device
    level = 1.0 / math.sqrt(first)
    head = level + _JITTER * torch.randn(p0, q0 * first, device=device)

    middle = level + _JITTER * torch.randn(p1, first, q1, second, device=device)
    even = 2 * torch.randint((second + 1) // 2, (p1, 1, q1, 1), device=device)
    place = torch.randint(first, (p1, 1, q1, 1), device=device)
    quiet = torch.randn(p1, first, q1, 1, device=device) * (_JITTER**2 / level)
    quiet.scatter_(1, place, _saw_tooth((p1, 1, q1, 1), device) / level)
    middle.scatter_(3, even.expand(p1, first, q1, 1), quiet)

    last = _JITTER * torch.randn(p2, second, q2, device=device)
    odd = 1 + 2 * torch.randint(second // 2, (p2, 1, q2), device=device)
    last.scatter_(1, odd, _saw_tooth((p2, 1, q2), device))
    scale = _rows(std) ** (-1.0 / 6.0)
    return [core.reshape(core.shape[0], -1) * scale for core in (head, middle, last)]


_TEETH = 15  # on either side of zero, that at zero included
_TOOTH = 0.7 / (2 * _TEETH)


def _saw_tooth(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Draw numbers in (-1, 1) near multiples of 1/15."""
    tooth = torch.randint(1 - _TEETH, _TEETH, shape, device=device) / _TEETH
    return tooth + (torch.rand(shape, device=device) - 0.5) * _TOOTH


FBTT_INITIALIZERS: dict[str, Callable[[CoreLayout, float], list[Tensor]]] = {
    "fbtt:uniform": fbtt_uniform,
    "fbtt:naive-uniform": fbtt_naive_uniform,
    "fbtt:normal": fbtt_normal,
    "fbtt:approx-uniform": fbtt_approx_uniform,
    "fbtt:approx-normal": fbtt_approx_normal,
}

_OF_SAME_KIND = {
    "normal": "gaussian",
    "approx-uniform": "approx_uniform",
    "approx-normal": "sampled_gaussian",
    "naive-uniform": "uniform",
}


def find_initializer(name: str) -> Callable[[CoreLayout, float], list[Tensor]]:
    """Return the scheme of a name, which is called with sizes and the deviation `std` of rows.

    Raises:
        ValueError: no such scheme. Names of FBTT are refused without their prefix, since ours of
            the same kind have other scales; "uniform" is ours.
    """
    schemes = {**INITIALIZERS, **FBTT_INITIALIZERS}
    if name in schemes:
        return schemes[name]
    if name in _OF_SAME_KIND:
        raise ValueError(
            f"init {name!r} is a name of FBTT-Embedding, whose scales differ: use "
            f"{_OF_SAME_KIND[name]!r} for rows of deviation 1/sqrt(3 * rows), or 'fbtt:{name}' for "
            "its own formula"
        )
    raise ValueError(f"init must be one of {', '.join(schemes)}, got {name!r}")
