"""Select one choice per table, with a small total cost, within the limits of two memories.

Every table has candidates: choices, each with bytes of device memory, bytes of backing memory and
a cost. `select_choices` solves a knapsack with bytes rounded up to coarse units: over device memory
alone, and over both memories if that plan takes too much backing memory. It compares the result
with plans that treat all tables alike, and spends the bytes that rounding left unused on the
choices with the largest gain per byte. So the total cost is not always the least.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from emblib.collections.configs import TableConfig
from emblib.sharding.planner.feasible import format_bytes
from emblib.sharding.planner.topology import refuse_old_names

AS_IT_IS = "as it is"
"""The method of a table that is not changed."""

SHARES = tuple(2.0**-n for n in range(1, 13))  # shares of rows or bytes to try
# Units into which the knapsack divides bytes: a compromise of precision and time, not measured.
_DEVICE_UNITS = 4096  # of the budget alone, at least
_DEVICE_UNITS_PER_TABLE = 16  # so that rounding up does not use up the budget of many tables
_UNITS_OF_BOTH = (1024, 256)  # of the budget and of backing memory, if both are limited
_COST_PER_MISS = 1e-6  # so small that it decides only between equal losses


class BudgetError(ValueError):
    """No plan was found that fits into the budget and into backing memory.

    Attributes:
        missing_nbytes: bytes by which the smallest plan that was found exceeds one of the two.

    Example:
        >>> tables = [emblib.EmbeddingBagConfig(10_000, 64, "item")]
        >>> try:
        ...     emblib.plan_memory(tables, 1_000)
        ... except emblib.BudgetError as error:
        ...     print(f"{error.missing_nbytes:,} bytes are missing")
        24 bytes are missing
    """

    def __init__(self, message: str, missing_nbytes: int = 0) -> None:
        super().__init__(message)
        self.missing_nbytes = missing_nbytes

    if not TYPE_CHECKING:
        __getattr__ = refuse_old_names({"short": "missing_nbytes"})

    def __reduce__(self) -> tuple[object, ...]:
        return BudgetError, (str(self), self.missing_nbytes)


@dataclass(frozen=True)
class MemoryChoice:
    """The storage that a plan chose for one table.

    Attributes:
        path: path of the collection that has the table; "" if there is no model.
        before: the configuration before planning.
        config: the chosen configuration.
        method: `AS_IT_IS`, or one of the methods of `plan_memory`.
        nbytes: bytes of the table in device memory: in training, with optimizer states or a dense
            gradient, or served.
        plain_nbytes: bytes of the table as it was configured, counted like `nbytes`.
        loss: estimated fraction of the table's information that is lost, 0 to 1.
        importance: weight of the loss of this table in the total.
        why: the next larger and smaller choices, in a sentence.
        backing_nbytes: bytes of the table in host memory or on disk.
        hit_rate: expected share of lookups that the cache serves; 1 for a table without a cache.
        lookups: the table's share of the lookups of all tables.

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
        """Return importance times loss, plus a tiny cost of cache misses to break ties."""
        return self.importance * self.loss + _COST_PER_MISS * self.lookups * (1.0 - self.hit_rate)


Candidates = Sequence[Sequence[MemoryChoice]]
"""The choices of each table, the largest in device memory first."""


class Limits(NamedTuple):
    """Maximum bytes of device memory, and of backing memory (None: no limit), for all tables."""

    budget: int
    backing: int | None = None

    def allow(self, candidates: Candidates, indices: Sequence[int]) -> bool:
        """Return whether the choices with these indices, one per table, fit."""
        nbytes, backing_nbytes = total_nbytes(candidates, indices)
        return nbytes <= self.budget and (self.backing is None or backing_nbytes <= self.backing)


def without_dominated(choices: Sequence[MemoryChoice]) -> list[MemoryChoice]:
    """Return the choices that no other one dominates, the largest in device memory first.

    A choice dominates another one if it takes no more bytes of either memory, and loses less or,
    with equal loss, has no lower hit rate.
    """
    frontier: list[MemoryChoice] = []
    for candidate in sorted(
        choices,
        key=lambda choice: (choice.nbytes, choice.loss, -choice.hit_rate, choice.backing_nbytes),
    ):
        if not any(
            (other.loss, -other.hit_rate) <= (candidate.loss, -candidate.hit_rate)
            and other.backing_nbytes <= candidate.backing_nbytes
            for other in frontier
        ):
            frontier.append(candidate)
    return frontier[::-1]


def select_choices(candidates: Candidates, limits: Limits) -> list[int]:
    """Return the index of one choice per table, with a small total cost within the limits.

    Raises:
        BudgetError: no combination of choices was found that fits.
    """
    try:
        indices = _choose_smallest(candidates, limits)
    except BudgetError:
        indices = (
            [] if limits.backing is None else _solve_knapsack(candidates, limits, _UNITS_OF_BOTH)
        )
        if not indices:
            raise
    plans = [_solve_knapsack(candidates, Limits(limits.budget), _device_units(candidates))]
    if plans[0] and not limits.allow(candidates, plans[0]):
        plans = [_solve_knapsack(candidates, limits, _UNITS_OF_BOTH)]
    for plan in [*plans, *_uniform_plans(candidates)]:
        if (
            plan
            and limits.allow(candidates, plan)
            and _total_cost(candidates, plan) < _total_cost(candidates, indices)
        ):
            indices = plan
    return _use_remaining_bytes(candidates, indices, limits)


def total_nbytes(candidates: Candidates, indices: Sequence[int]) -> tuple[int, int]:
    """Return the bytes of device memory and of backing memory of the selected choices."""
    picks = [choices[index] for choices, index in zip(candidates, indices, strict=True)]
    return sum(pick.nbytes for pick in picks), sum(pick.backing_nbytes for pick in picks)


def _choose_smallest(candidates: Candidates, limits: Limits) -> list[int]:
    """Return choices that take little device memory within the limit of backing memory.

    It is the minimum without that limit; with it, choices are exchanged by the least device bytes
    per saved byte of backing memory.

    Raises:
        BudgetError: these choices take more than a limit.
    """
    indices = [len(choices) - 1 for choices in candidates]
    nbytes, backing_nbytes = total_nbytes(candidates, indices)
    while limits.backing is not None and backing_nbytes > limits.backing:
        # Device bytes per saved byte of backing memory, table, and index of the other choice.
        exchanges: list[tuple[float, int, int]] = []
        for table, (choices, index) in enumerate(zip(candidates, indices, strict=True)):
            for other_index, choice in enumerate(choices):
                saved_nbytes = choices[index].backing_nbytes - choice.backing_nbytes
                if saved_nbytes > 0:
                    more_nbytes = choice.nbytes - choices[index].nbytes
                    exchanges.append((more_nbytes / saved_nbytes, table, other_index))
        if not exchanges:
            missing_nbytes = backing_nbytes - limits.backing
            raise BudgetError(
                f"the tables take at least {format_bytes(backing_nbytes)} of host memory or disk, "
                f"which is {format_bytes(missing_nbytes)} more than backing has: raise it, or move "
                "tables to the device",
                missing_nbytes,
            )
        _, table, indices[table] = min(exchanges)
        nbytes, backing_nbytes = total_nbytes(candidates, indices)
    if nbytes > limits.budget:
        picks = [choices[index] for choices, index in zip(candidates, indices, strict=True)]
        largest = max(picks, key=lambda choice: choice.nbytes)
        missing_nbytes = nbytes - limits.budget
        bound = "at least" if limits.backing is None else "about"
        raise BudgetError(
            f"the tables take {bound} {format_bytes(nbytes)}, which is "
            f"{format_bytes(missing_nbytes)} more than the budget of "
            f"{format_bytes(limits.budget)}: raise it, allow other methods, or make tables "
            f"smaller; the largest is then {largest.before.name!r} with "
            f"{format_bytes(largest.nbytes)}",
            missing_nbytes,
        )
    return indices


def _device_units(candidates: Candidates) -> tuple[int, int]:
    """Return the units of the budget, and none of backing memory."""
    return max(_DEVICE_UNITS, _DEVICE_UNITS_PER_TABLE * len(candidates)), 0


def _solve_knapsack(candidates: Candidates, limits: Limits, units: tuple[int, int]) -> list[int]:
    """Return the index of the best choice per table; empty if bytes rounded up do not fit.

    Dynamic programming: `least_cost[i, j]` is the least cost of the tables so far, within i units
    of device memory and j of backing memory. `units` are the numbers of units into which the two
    limits are divided; 0 for backing memory without limit.
    """
    least_cost = torch.zeros(units[0] + 1, units[1] + 1, dtype=torch.float64, device="cpu")
    best_choices = []
    for choices in candidates:
        costs = torch.full_like(least_cost, math.inf)
        best_choice = torch.zeros_like(least_cost, dtype=torch.int16)
        for index, choice in enumerate(choices):
            device_units, backing_units = _units_used(choice, limits, units)
            if device_units <= units[0] and backing_units <= units[1]:
                cost = (
                    least_cost[: units[0] + 1 - device_units, : units[1] + 1 - backing_units]
                    + choice.cost
                )
                table_costs = costs[device_units:, backing_units:]
                best_choice[device_units:, backing_units:][cost < table_costs] = index
                torch.minimum(table_costs, cost, out=table_costs)
        least_cost = costs
        best_choices.append(best_choice)
    if not math.isfinite(float(least_cost[-1, -1])):
        return []
    indices, units_left = [], list(units)
    for choices, best_choice in zip(reversed(candidates), reversed(best_choices), strict=True):
        indices.append(int(best_choice[units_left[0], units_left[1]]))
        used_units = _units_used(choices[indices[-1]], limits, units)
        units_left = [
            num_left - num_used for num_left, num_used in zip(units_left, used_units, strict=True)
        ]
    return indices[::-1]


def _units_used(choice: MemoryChoice, limits: Limits, units: tuple[int, int]) -> tuple[int, int]:
    """Return the units of both memories that a choice takes, rounded up; see `_solve_knapsack`."""
    device_units = -(-choice.nbytes * units[0] // limits.budget)
    if limits.backing is None or not choice.backing_nbytes:
        return device_units, 0
    return device_units, -(-choice.backing_nbytes * units[1] // max(limits.backing, 1))


def _uniform_plans(candidates: Candidates) -> Iterator[list[int]]:
    """Yield plans that treat all tables alike: the same method at about the same share of bytes."""
    # In the order of the candidates: of plans with equal costs, every process selects the same one.
    for method in dict.fromkeys(choice.method for choices in candidates for choice in choices):
        for share in SHARES:
            indices = []
            for choices in candidates:
                small_indices = [
                    index
                    for index, choice in enumerate(choices)
                    if choice.method == method and choice.nbytes <= share * choices[0].nbytes
                ]
                indices.append(small_indices[0] if small_indices else len(choices) - 1)
            yield indices


def _use_remaining_bytes(
    candidates: Candidates, indices: Sequence[int], limits: Limits
) -> list[int]:
    """Replace choices by better ones while bytes are left, by descending gain per byte."""
    new_indices = list(indices)
    while True:
        nbytes, backing_nbytes = total_nbytes(candidates, new_indices)
        gains: dict[tuple[int, int], float] = {}  # (table, its better choice) -> gain per byte
        for table, (choices, index) in enumerate(zip(candidates, new_indices, strict=True)):
            for better_index, better in enumerate(choices):
                gain = choices[index].cost - better.cost
                extra_nbytes = better.nbytes - choices[index].nbytes
                new_backing_nbytes = (
                    backing_nbytes + better.backing_nbytes - choices[index].backing_nbytes
                )
                fits_backing = limits.backing is None or new_backing_nbytes <= max(
                    limits.backing, backing_nbytes
                )
                if gain > 0 and nbytes + extra_nbytes <= limits.budget and fits_backing:
                    gains[table, better_index] = gain / max(extra_nbytes, 1)
        if not gains:
            return new_indices
        # Ties: the first table, and the last of its choices.
        table, better_index = max(gains, key=lambda entry: (gains[entry], -entry[0], entry[1]))
        new_indices[table] = better_index


def _total_cost(candidates: Candidates, indices: Sequence[int]) -> float:
    return sum(choices[index].cost for choices, index in zip(candidates, indices, strict=True))
