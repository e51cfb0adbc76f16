"""Pick one choice per table: the least sum of losses whose bytes fit into one or two memories.

Every table has choices, each with bytes of device memory, bytes of backing memory and a cost.
`pick` solves a knapsack over both memories in coarse units, compares it with plans that treat all
tables alike, and spends the bytes that rounding left on the choices that gain most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from emblib.collections.configs import TableConfig
from emblib.sharding.planner.feasible import size

AS_IT_IS = "as it is"
"""The method of a table that is not changed."""

SHARES = tuple(2.0**-n for n in range(1, 13))  # shares of rows or bytes to try
_UNITS = 4096  # units of the budget; more for many tables
_UNITS_OF_TWO = (
    1024,
    256,
)  # steps of the budget and of the memory behind caches, if both are limited
_PER_MISS = 1e-6  # cost if all lookups miss a cache; decides only between equal losses


class BudgetError(ValueError):
    """Tables do not fit into the budget, however they are stored.

    Attributes:
        short: bytes missing.

    Example:
        >>> tables = [emblib.EmbeddingBagConfig(10_000, 64, "item")]
        >>> try:
        ...     emblib.plan_memory(tables, 1_000)
        ... except emblib.BudgetError as error:
        ...     print(f"{error.short:,} bytes are missing")
        24 bytes are missing
    """

    def __init__(self, message: str, short: int = 0) -> None:
        super().__init__(message)
        self.short = short

    def __reduce__(self) -> tuple[object, ...]:
        return BudgetError, (str(self), self.short)


@dataclass(frozen=True)
class MemoryChoice:
    """The storage that a plan chose for one table.

    Attributes:
        path: path of the collection that has the table; empty for a configuration given alone.
        before: the configuration that was given.
        config: the configuration that was chosen.
        method: "as it is", or one of the methods.
        nbytes: bytes of the table in device memory, with optimizer states, or as served.
        plain_nbytes: bytes of the table as it was given, counted like `nbytes`.
        loss: estimated loss of quality of the table, 0 to 1.
        importance: weight of the loss of this table in the total.
        why: the choices next to this one, in a sentence.
        backing_nbytes: bytes of the table in host memory or on disk.
        hit_rate: the expected share of lookups that a cache serves; 1 for a table without one.
        lookups: the table's share of all lookups.

    Example:
        >>> user = emblib.EmbeddingBagConfig(1_000_000, 64, "user")
        >>> day = emblib.EmbeddingBagConfig(100, 64, "day")
        >>> plan = emblib.plan_memory([user, day], 1 << 26, optimizer=emblib.optim.SGD(0.1))
        >>> for choice in plan.choices:
        ...     print(choice.config.name, choice.method, choice.nbytes <= choice.plain_nbytes)
        user narrow True
        day as it is True
    """

    path: str
    before: TableConfig
    config: TableConfig
    method: str
    nbytes: int
    plain_nbytes: int
    loss: float
    importance: float
    why: str = ""
    backing_nbytes: int = 0
    hit_rate: float = 1.0
    lookups: float = 1.0

    @property
    def cost(self) -> float:
        """Return the loss by importance; of equal losses, fewer misses cost less."""
        return self.importance * self.loss + _PER_MISS * self.lookups * (1.0 - self.hit_rate)


Options = Sequence[Sequence[MemoryChoice]]
"""The choices of each table, the largest in device memory first."""


class Limits(NamedTuple):
    """Maximum bytes of device memory and of backing memory for all tables; None: no limit."""

    budget: int
    backing: int | None = None

    def allow(self, options: Options, picked: Sequence[int]) -> bool:
        """Return whether the picked choices fit."""
        nbytes, backing = totals(options, picked)
        return nbytes <= self.budget and (self.backing is None or backing <= self.backing)


def without_dominated(choices: Sequence[MemoryChoice]) -> list[MemoryChoice]:
    """Return the Pareto-optimal choices, the largest first."""
    frontier: list[MemoryChoice] = []
    for candidate in sorted(
        choices, key=lambda c: (c.nbytes, c.loss, -c.hit_rate, c.backing_nbytes)
    ):
        if not any(
            (k.loss, -k.hit_rate) <= (candidate.loss, -candidate.hit_rate)
            and k.backing_nbytes <= candidate.backing_nbytes
            for k in frontier
        ):
            frontier.append(candidate)
    return frontier[::-1]


def pick(options: Options, limits: Limits) -> list[int]:
    """Return the index of one choice per table, with the least sum of costs within the limits.

    Raises:
        BudgetError: no combination of choices was found that fits.
    """
    picked = _smallest(options, limits)
    picks = [_knapsack(options, Limits(limits.budget), _units_of_one(options))]
    if picks[0] and not limits.allow(options, picks[0]):
        picks = [_knapsack(options, limits, _UNITS_OF_TWO)]
    for candidate in [*picks, *_uniform(options)]:
        if (
            candidate
            and limits.allow(options, candidate)
            and _cost(options, candidate) < _cost(options, picked)
        ):
            picked = candidate
    return _filled(options, picked, limits)


def totals(options: Options, picked: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of device memory and of backing memory."""
    picked_choices = [choices[k] for choices, k in zip(options, picked, strict=True)]
    return sum(c.nbytes for c in picked_choices), sum(c.backing_nbytes for c in picked_choices)


def _smallest(options: Options, limits: Limits) -> list[int]:
    """Return choices that minimise device memory within the limit of backing memory."""
    picked = [len(choices) - 1 for choices in options]
    nbytes, backing = totals(options, picked)
    while limits.backing is not None and backing > limits.backing:
        exchanges = []
        for t, (choices, k) in enumerate(zip(options, picked, strict=True)):
            for index, choice in enumerate(choices):
                less = choices[k].backing_nbytes - choice.backing_nbytes
                if less > 0:
                    exchanges.append(((choice.nbytes - choices[k].nbytes) / less, t, index))
        if not exchanges:
            short = backing - limits.backing
            raise BudgetError(
                f"the tables take at least {size(backing)} of host memory or disk, which is "
                f"{size(short)} more than backing has: raise it, or move tables to the device",
                short,
            )
        _, t, picked[t] = min(exchanges)
        nbytes, backing = totals(options, picked)
    if nbytes > limits.budget:
        picked_choices = [choices[k] for choices, k in zip(options, picked, strict=True)]
        largest, short = (
            max(picked_choices, key=lambda choice: choice.nbytes),
            nbytes - limits.budget,
        )
        raise BudgetError(
            f"the tables take at least {size(nbytes)}, which is {size(short)} more than the "
            f"budget of {size(limits.budget)}: raise it, allow other methods, or make tables "
            f"smaller; the largest is then {largest.before.name!r} with {size(largest.nbytes)}",
            short,
        )
    return picked


def _units_of_one(options: Options) -> tuple[int, int]:
    return max(_UNITS, 16 * len(options)), 0


def _knapsack(options: Options, limits: Limits, units: tuple[int, int]) -> list[int]:
    """Return the indices of the best choices; empty if bytes rounded up to units do not fit."""
    best = torch.zeros(units[0] + 1, units[1] + 1, dtype=torch.float64)  # by units that may be used
    choices_taken = []
    for choices in options:
        losses = torch.full_like(best, math.inf)
        number = torch.zeros_like(best, dtype=torch.int16)
        for k, choice in enumerate(choices):
            device, backing = _units(choice, limits, units)
            if device <= units[0] and backing <= units[1]:
                remainder = best[: units[0] + 1 - device, : units[1] + 1 - backing] + choice.cost
                target = losses[device:, backing:]
                number[device:, backing:][remainder < target] = k
                torch.minimum(target, remainder, out=target)
        best = losses
        choices_taken.append(number)
    if not math.isfinite(float(best[-1, -1])):
        return []
    picked, units_left = [], list(units)
    for choices, number in zip(reversed(options), reversed(choices_taken), strict=True):
        picked.append(int(number[units_left[0], units_left[1]]))
        used = _units(choices[picked[-1]], limits, units)
        units_left = [have - units_used for have, units_used in zip(units_left, used, strict=True)]
    return picked[::-1]


def _units(choice: MemoryChoice, limits: Limits, units: tuple[int, int]) -> tuple[int, int]:
    device = -(-choice.nbytes * units[0] // limits.budget)
    if limits.backing is None or not choice.backing_nbytes:
        return device, 0
    return device, -(-choice.backing_nbytes * units[1] // max(limits.backing, 1))


def _uniform(options: Options) -> Iterator[list[int]]:
    """Yield plans that treat all tables alike: the same method at about the same share of bytes."""
    for method in {choice.method for choices in options for choice in choices}:
        for share in SHARES:
            picked = []
            for choices in options:
                fits = [
                    k
                    for k, choice in enumerate(choices)
                    if choice.method == method and choice.nbytes <= share * choices[0].nbytes
                ]
                picked.append(fits[0] if fits else len(choices) - 1)
            yield picked


def _filled(options: Options, picked: Sequence[int], limits: Limits) -> list[int]:
    """Replace choices while bytes are left, the one with the largest gain per byte first."""
    result = list(picked)
    while True:
        nbytes, backing = totals(options, result)
        gains: dict[tuple[int, int], float] = {}  # (table, its better choice) -> gain per byte
        for table, (choices, k) in enumerate(zip(options, result, strict=True)):
            for index, better in enumerate(choices):
                gain = choices[k].cost - better.cost
                more = better.nbytes - choices[k].nbytes
                behind = backing + better.backing_nbytes - choices[k].backing_nbytes
                fits = limits.backing is None or behind <= max(limits.backing, backing)
                if gain > 0 and nbytes + more <= limits.budget and fits:
                    gains[table, index] = gain / max(more, 1)
        if not gains:
            return result
        # Of equal gains the first table's, and of that table the last choice's.
        table, index = max(gains, key=lambda key: (gains[key], -key[0], key[1]))
        result[table] = index


def _cost(options: Options, picked: Sequence[int]) -> float:
    return sum(choices[k].cost for choices, k in zip(options, picked, strict=True))
