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


_LEVELS = 15
_JITTER = 0.01


def approx_uniform(layout: CoreLayout, std: float) -> list[Tensor]:
    """Make rows whose values are uniform around zero; the last rank must be at least 2.

    A uniform value is one of 15 levels plus a uniform step of one level's width. The last core
    holds the levels on odd places of the last bond, the core before it the steps on even places,
    each faces ones, and cores before those hand ones through. A jitter of 1% tells otherwise
    equal rows apart.
    """
    ranks, cores = layout.full_ranks, len(layout.row_factors)
    if ranks[-2] < 2:
        raise ValueError(
            f"init 'approx_uniform' needs a last rank >= 2, got {ranks[-2]}; use 'gaussian' or "
            "'uniform'"
        )
    scale = (std * math.sqrt(3.0)) ** (1.0 / cores)
    device, bond = layout.device, ranks[-2]
    odd = torch.arange(bond, device=device) % 2
    values = []
    for k, (p, q) in enumerate(zip(layout.row_factors, layout.dim_factors, strict=True)):
        if k == cores - 1:
            # Dealt out, not drawn: a small core would miss some levels by chance.
            place = torch.randperm(p * q, device=device).view(p, q, 1)
            level = (2 * place + 1) * _LEVELS // (2 * p * q) * 2 + 1 - _LEVELS
            core = (1 - odd) + _one_place((p, q), bond, 1, device) * (level / _LEVELS)
            core = core.transpose(1, 2).unsqueeze(3)  # [p, R, q, 1]
        elif k == cores - 2:
            step = torch.empty((p, q, 1), device=device).uniform_(-1.0 / _LEVELS, 1.0 / _LEVELS)
            core = odd + _one_place((p, q), bond, 0, device) * step
            core = core.unsqueeze(1).expand(p, ranks[k], q, bond) / ranks[k]
        else:
            core = torch.full((p, ranks[k], q, ranks[k + 1]), 1.0 / ranks[k], device=device)
        noise = torch.randn(core.shape, device=device) * (_JITTER / math.sqrt(ranks[k] * bond))
        values.append(((core + noise) * scale).reshape(p, -1))
    return values


def _one_place(shape: tuple[int, int], bond: int, parity: int, device: torch.device) -> Tensor:
    """Return zeros `[*shape, bond]` with a one at a random position of the given parity."""
    places = (bond + 1 - parity) // 2
    place = torch.randint(0, places, (*shape, 1), device=device) * 2 + parity
    return torch.zeros((*shape, bond), device=device).scatter_(2, place, 1.0)


INITIALIZERS: dict[str, Callable[[CoreLayout, float], list[Tensor]]] = {
    "gaussian": gaussian,
    "sampled_gaussian": sampled_gaussian,
    "uniform": uniform,
    "approx_uniform": approx_uniform,
}
