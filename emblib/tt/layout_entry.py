"""The state dict entry `tt_layout`: rows, dim, factors, ranks and permutation of a tensor train.

Cores of different tensor trains may have equal shapes: ranks (2, 8) with dim factors (8, 4, 2) give
the same shapes as ranks (4, 4) with dim factors (4, 4, 4). So state dicts have this entry, and
loading raises if it differs. Functions here describe the difference.
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


def from_spec(spec: Any) -> Tensor:
    """Return the entry of a `TTSpec`: int64 `[n]` on the CPU.

    Its numbers are rows, dim, the row factors, the dim factors and the inner ranks. For a table
    with permuted ids, 1 + seed follows.
    """
    ids = () if spec.ids.value == "as_given" else (1 + spec.seed,)
    numbers = (spec.rows, spec.dim, *spec.row_factors, *spec.dim_factors, *spec.ranks, *ids)
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def from_specs(specs: Sequence[Any]) -> Tensor:
    """Return the entry of a module with T >= 1 tables: `[n]` for one, else `[T, n]`.

    Rows are padded with zeros at their end.
    """
    rows = [from_spec(spec) for spec in specs]
    return rows[0] if len(rows) == 1 else pad_sequence(rows, batch_first=True)


def _entry_per_table(saved_entry: Tensor | None, count: int) -> list[Tensor | None]:
    """Split the entry of a module into `count` entries without padding; None for missing ones.

    An entry that is not `[T, n]` is returned for each table.
    """
    if saved_entry is None or saved_entry.dim() != 2:
        return [saved_entry] * count
    rows: list[Tensor | None] = [row[: int((row != 0).sum())] for row in saved_entry]
    return (rows + [None] * count)[:count]


def describe_difference(saved_entry: Tensor | None, current: Tensor) -> str:
    """Describe how the saved entry of one table differs from the current one; "" if it does not.

    Older state dicts have no entry (None). Then the ids must not be permuted, and the shapes of the
    cores must determine ranks and factors; the number of rows is not compared.
    """
    current_fields = _parse_entry(current)
    if saved_entry is None and current_fields["ids"] != "as_given":
        current_ids = current_fields["ids"]
        return f"there is no {NAME}, so the ids of these cores are as given, here {current_ids}"
    if saved_entry is None:
        other_layouts = [
            layout
            for layout in _layouts_of_equal_shapes(current_fields)
            if layout != current_fields
        ]
        if not other_layouts:
            return ""
        return (
            f"there is no {NAME}, as in state dicts of older versions, and the shapes of the cores "
            f"fit other tensor trains than {_describe(current_fields)}, e.g. "
            f"{_describe(other_layouts[0])}: if they are of this one, add the {NAME} that "
            "state_dict() has here"
        )
    if saved_entry.dim() != 1 or saved_entry.numel() < _MIN_NUMBERS:
        return f"{NAME} must be that of a tensor train, got a tensor {tuple(saved_entry.shape)}"
    saved_fields = _parse_entry(saved_entry)
    if saved_fields == current_fields:
        return ""
    differing_names = ", ".join(
        key for key in current_fields if saved_fields[key] != current_fields[key]
    )
    return (
        f"the cores are of another tensor train, which differs in {differing_names}: saved are "
        f"{_describe(saved_fields)}, here are {_describe(current_fields)}; make the table with "
        "those that were saved"
    )


def describe_mismatch(
    state_dict: Mapping[str, Any], prefix: str, specs: Sequence[Any], cores: Iterable[Tensor]
) -> str:
    """Return why the cores in a state dict do not fit `specs`, as a message; "" if they do.

    Also "" if the state dict has none of the cores; their shapes are not compared here.

    Args:
        state_dict: state dict of a model.
        prefix: prefix of the module's names in it, "" or with a dot at its end.
        specs: specs of the module's tables.
        cores: cores of the module, in the order of their numbers.
    """
    expected_cores = {f"{prefix}cores.{k}": core for k, core in enumerate(cores)}
    saved_names = [key for key in expected_cores if key in state_dict]
    if not saved_names:
        return ""
    saved_entry = state_dict.get(f"{prefix}{NAME}")
    if saved_entry is not None and (not isinstance(saved_entry, Tensor) or saved_entry.is_meta):
        return f"{prefix}{NAME}: must be a tensor with values, got {saved_entry!r}"
    differences = map(
        describe_difference, _entry_per_table(saved_entry, len(specs)), map(from_spec, specs)
    )
    first_difference = next(filter(None, differences), "")
    return f"{prefix}cores: {first_difference}" if first_difference else ""


def _parse_entry(numbers: Tensor) -> dict[str, Any]:
    """Return the fields of the entry of one table, `[n]` without padding, by name."""
    rows, dim, *more_numbers = numbers.tolist()
    num_cores = (
        len(more_numbers) + 1
    ) // 3  # 3 * cores - 1 numbers, and one more if ids are permuted
    seed = more_numbers.pop() - 1 if len(more_numbers) == 3 * num_cores else None
    return {
        "rows": rows,
        "dim": dim,
        "row_factors": tuple(more_numbers[:num_cores]),
        "dim_factors": tuple(more_numbers[num_cores : 2 * num_cores]),
        "ranks": tuple(more_numbers[2 * num_cores :]),
        "ids": "as_given" if seed is None else f"permuted by seed {seed}",
    }


def _describe(fields: dict[str, Any]) -> str:
    """Format fields for a message, without ids that are as given."""
    shown_fields = {
        key: value for key, value in fields.items() if (key, value) != ("ids", "as_given")
    }
    return ", ".join(f"{key}={value}" for key, value in shown_fields.items())


def _layouts_of_equal_shapes(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields of all tensor trains with equal rows, dim and core shapes."""
    full_ranks = (1, *fields["ranks"], 1)
    widths = [
        rank_before * dim_factor * rank_after
        for rank_before, dim_factor, rank_after in zip(
            full_ranks, fields["dim_factors"], full_ranks[1:], strict=False
        )
    ]
    for ranks, dim_factors in _ranks_and_dim_factors(widths, 1):
        if math.prod(dim_factors) != fields["dim"]:
            continue
        try:
            check_ranks(ranks, fields["row_factors"], dim_factors)
        except ValueError:
            continue
        yield {**fields, "dim_factors": dim_factors, "ranks": ranks}


def _ranks_and_dim_factors(
    widths: Sequence[int], first_rank: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (ranks, dim factors) of all trains of cores of these widths.

    The width of a core is `rank * dim factor * next rank`: the elements per row of it. The train
    begins with `first_rank`, which must divide the first width and is not among the ranks.
    """
    product = widths[0] // first_rank  # dim factor * next rank
    if len(widths) == 1:
        yield (), (product,)
        return
    for next_rank in _divisors_of(math.gcd(product, widths[1])):
        for ranks, dim_factors in _ranks_and_dim_factors(widths[1:], next_rank):
            yield (next_rank, *ranks), (product // next_rank, *dim_factors)


def _divisors_of(number: int) -> list[int]:
    """Return the divisors of a positive number, ascending."""
    small_divisors = [
        divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0
    ]
    return sorted({*small_divisors, *(number // divisor for divisor in small_divisors)})
