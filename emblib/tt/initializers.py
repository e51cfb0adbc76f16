"""Initial values of tensor-train cores, scaled so that the rows they make have a chosen deviation.

A row is a sum of products of core entries, so the deviation of the entries must take the ranks
into account: for independent entries of deviation s, rows have `s**d * sqrt(prod(ranks))`. Every
scheme here gives rows the deviation `std`, `1 / sqrt(3 * rows)` by default in `TTEmbeddingBag`,
that of DLRM's uniform +-1/sqrt(rows). Numbers come from torch's generator of the device. Terms: p
row factors, q dim factors, R ranks with the 1 at both ends.
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


def sampled_gaussian(layout: CoreLayout, std: float) -> list[Tensor]:
    """Draw normal entries with |z| >= 2: TT-Rec's scheme, with the scale that it lacks.

    Without entries near zero the rows, products of d entries, come closer to a normal distribution.
    """
    tail = 0.5 * math.erfc(math.sqrt(2.0))  # P(z >= 2)
    density = math.exp(-2.0) / math.sqrt(2.0 * math.pi)
    scale = layout.entry_std(std) / math.sqrt(1.0 + 2.0 * density / tail)
    cores = []
    for shape in layout.shapes():
        u = torch.rand(shape, dtype=torch.float64, device=layout.device)
        z = -torch.special.ndtri(tail * (1.0 - u))
        sign = torch.randint(0, 2, shape, device=layout.device) * 2 - 1
        cores.append((z * sign * scale).float())
    return cores


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
    "sampled_gaussian": sampled_gaussian,
    "uniform": uniform,
    "approx_uniform": approx_uniform,
}
