"""The state dict entry `tt_layout`: rows, dim, factors and ranks of a tensor train.

Cores of different tensor trains may have equal shapes: ranks (2, 8) with dim factors (8, 4, 2) give
the same shapes as ranks (4, 4) with dim factors (4, 4, 4). So state dicts have this entry, and
loading raises if it differs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from emblib.tt.shapes import check_ranks

NAME = "tt_layout"
_MIN_NUMBERS = 7  # numbers of an entry for two cores: rows, dim, 2 + 2 factors, 1 rank


def entry(spec: Any) -> Tensor:
    """Return rows, dim, row factors, dim factors and ranks of a `TTSpec` as one int64 tensor.

    For a table with permuted ids, 1 + seed follows.
    """
    order = () if spec.ids.value == "as_given" else (1 + spec.seed,)
    numbers = (spec.rows, spec.dim, *spec.row_factors, *spec.dim_factors, *spec.ranks, *order)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def entries(specs: Sequence[Any]) -> Tensor:
    """Return the entry of a module: `[n]` for one table, else one padded row per table."""
    rows = [entry(spec) for spec in specs]
    return rows[0] if len(rows) == 1 else pad_sequence(rows, batch_first=True)


def _rows_of(saved: Tensor | None, count: int) -> list[Tensor | None]:
    """Return the entry of each of `count` tables."""
    if saved is None or saved.dim() != 2:
        return [saved] * count
    rows: list[Tensor | None] = [row[: int((row != 0).sum())] for row in saved]
    return (rows + [None] * count)[:count]


def difference(saved: Tensor | None, current: Tensor) -> str:
    """Describe how the saved entry differs from the current one; "" if it does not.

    Older state dicts have no entry (None). Then the shapes of the cores must determine ranks and
    factors, and the number of rows is not compared: common rows are equal.
    """
    current_fields = _fields(current)
    if saved is None and current_fields["ids"] != "as_given":
        current_ids = current_fields["ids"]
        return f"there is no {NAME}, so the ids of these cores are as given, here {current_ids}"
    if saved is None:
        other_layouts = [
            layout for layout in _of_equal_shapes(current_fields) if layout != current_fields
        ]
        if not other_layouts:
            return ""
        return (
            f"there is no {NAME}, as in state dicts of older versions, and the shapes of the cores "
            f"fit other tensor trains than {_describe(current_fields)}, e.g. "
            f"{_describe(other_layouts[0])}: if they are of this one, add the {NAME} that "
            "state_dict() has here"
        )
    if saved.dim() != 1 or saved.numel() < _MIN_NUMBERS:
        return f"{NAME} must be that of a tensor train, got a tensor {tuple(saved.shape)}"
    saved_fields = _fields(saved)
    if saved_fields == current_fields:
        return ""
    differing = ", ".join(key for key in current_fields if saved_fields[key] != current_fields[key])
    return (
        f"the cores are of another tensor train, which differs in {differing}: saved are "
        f"{_describe(saved_fields)}, here are {_describe(current_fields)}; make the table with "
        "those that were saved"
    )


def problem(
    state_dict: Mapping[str, Any], prefix: str, specs: Sequence[Any], cores: Iterable[Tensor]
) -> str:
    """Return why the cores in a state dict do not fit `specs`, as a message; "" if they do."""
    own_cores = {f"{prefix}cores.{k}": core for k, core in enumerate(cores)}
    names_saved = [key for key in own_cores if key in state_dict]
    if not names_saved:
        return ""
    saved = state_dict.get(f"{prefix}{NAME}")
    if saved is not None and (not isinstance(saved, Tensor) or saved.is_meta):
        return f"{prefix}{NAME}: must be a tensor with values, got {saved!r}"
    differences = map(difference, _rows_of(saved, len(specs)), map(entry, specs))
    differing = next(filter(None, differences), "")
    return f"{prefix}cores: {differing}" if differing else ""


def _fields(numbers: Tensor) -> dict[str, Any]:
    rows, dim, *more_numbers = numbers.tolist()
    cores = (len(more_numbers) + 1) // 3  # 3 * cores - 1 numbers, and one more if ids are permuted
    seed = more_numbers.pop() - 1 if len(more_numbers) == 3 * cores else None
    return {
        "rows": rows,
        "dim": dim,
        "row_factors": tuple(more_numbers[:cores]),
        "dim_factors": tuple(more_numbers[cores : 2 * cores]),
        "ranks": tuple(more_numbers[2 * cores :]),
        "ids": "as_given" if seed is None else f"permuted by seed {seed}",
    }


def _describe(fields: dict[str, Any]) -> str:
    shown_fields = {
        key: value for key, value in fields.items() if (key, value) != ("ids", "as_given")
    }
    return ", ".join(f"{key}={value}" for key, value in shown_fields.items())


def _of_equal_shapes(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of all tensor trains with equal rows, dim and core shapes."""
    full_ranks = (1, *fields["ranks"], 1)
    widths = [
        rank_before * q * rank_after
        for rank_before, q, rank_after in zip(
            full_ranks, fields["dim_factors"], full_ranks[1:], strict=False
        )
    ]
    for ranks, dim_factors in _solutions(widths, 1):
        if math.prod(dim_factors) != fields["dim"]:
            continue
        try:
            check_ranks(ranks, fields["row_factors"], dim_factors)
        except ValueError:
            continue
        yield {**fields, "dim_factors": dim_factors, "ranks": ranks}


def _solutions(
    widths: Sequence[int], remaining: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield all (ranks, dim factors) of cores of these widths whose first rank is `remaining`."""
    product = widths[0] // remaining  # a divisor of it: see below
    if len(widths) == 1:
        yield (), (product,)
        return
    for right in _divisors(math.gcd(product, widths[1])):
        for ranks, factors in _solutions(widths[1:], right):
            yield (right, *ranks), (product // right, *factors)


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})
