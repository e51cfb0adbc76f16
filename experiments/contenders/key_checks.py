"""Check the operations of a hash table before they are timed: slots, values, evictions."""

from __future__ import annotations

import torch
from torch import Tensor

from experiments.contenders.keys import KeyTable
from experiments.contenders.registry import WrongResult
from experiments.machine.bandwidth import WORDS_PER_LINE
from experiments.workloads.keys import KeySpace, values_of

CHECKED_KEYS = 2048  # maximum number of present keys that are checked
FIRST_ABSENT = 1 << 40  # number of a key beyond all keys that calls use


def verify_key_table(table: KeyTable, space: KeySpace, present_keys: Tensor) -> None:
    """Check the operations of a filled table. The check may change the keys of the table.

    If the table can erase keys, the check inserts absent keys and erases them again; a full table
    may evict present keys for them. Without `erase`, inserts of absent keys are not checked. For a
    ceiling, only the numbers of the lines are checked.

    Args:
        table: table to check. A table that has an operation with values has `find`. `KeyTable` has
            the contracts of its operations.
        space: numbering of the keys; absent keys are drawn from it.
        present_keys: int64 `[n]` on the host, n >= 1; their values are `values_of` them. At most
            CHECKED_KEYS are checked.

    Raises:
        WrongResult: an operation returned a wrong result; the first one is named.
    """
    num_checked = min(CHECKED_KEYS, len(present_keys))
    checked_keys = present_keys[torch.linspace(0, len(present_keys) - 1, num_checked).long()]
    # An eighth as many as the present keys, so that inserting them evicts few.
    absent_keys = space.key_range(FIRST_ABSENT, max(1, len(checked_keys) // 8))
    keys = torch.cat([checked_keys, absent_keys, checked_keys[:3]])
    if table.is_ceiling:
        positions = table.prepare(keys, values_of(keys, 0))
        if not torch.equal(table.find_slots(positions) * WORDS_PER_LINE, positions):
            raise WrongResult("find_slots: a line does not hold its own number")
        return
    _check_slots(table, "find_slots", keys, len(checked_keys), len(absent_keys))
    if "find" in table.operations:
        _check_values(table, "find", checked_keys, values_of(checked_keys, table.task.dim))
    if "find_or_insert_slots" in table.operations:
        keys_with_repeats = torch.cat([checked_keys, checked_keys[:3]])
        _check_slots(table, "find_or_insert_slots", keys_with_repeats, len(checked_keys), 0)
    if table.has_erase:
        _check_inserts(table, absent_keys, checked_keys)


def _check_inserts(table: KeyTable, absent_keys: Tensor, checked_keys: Tensor) -> None:
    """Check the operations that insert keys, and `erase`; keys are int64 `[n]` on the host."""
    dim = table.task.dim
    if "find_or_insert" in table.operations:
        # First of all, because inserting absent keys may evict present ones.
        _check_values(
            table,
            "find_or_insert",
            checked_keys,
            values_of(checked_keys, dim),
            passes_other_values=True,
        )
        for passes_other_values in (False, True):  # the first call inserts the keys
            _check_values(
                table,
                "find_or_insert",
                absent_keys,
                values_of(absent_keys, dim),
                passes_other_values=passes_other_values,
            )
        _check_values(table, "find", absent_keys, values_of(absent_keys, dim))
    if "insert_or_assign" in table.operations:
        table.insert_or_assign(table.prepare(absent_keys, -values_of(absent_keys, dim)))
        _check_values(table, "find", absent_keys, -values_of(absent_keys, dim))
    if "insert_and_evict" in table.operations:
        evicted = table.insert_and_evict(
            table.prepare(absent_keys, values_of(absent_keys, dim))
        ).cpu()
        _check_values(table, "find", absent_keys, values_of(absent_keys, dim))
        slots = _result_of(table, "find_slots", evicted)
        if len(evicted) and (slots != table.absent).any():
            raise WrongResult("insert_and_evict: a key that it reports as evicted is still present")
    table.erase(absent_keys.to(table.task.device))
    if (_result_of(table, "find_slots", absent_keys) != table.absent).any():
        raise WrongResult("erase: a key is still present")


def _result_of(table: KeyTable, operation: str, keys: Tensor) -> Tensor:
    prepared = table.prepare(keys, values_of(keys, table.task.dim))
    result: Tensor = getattr(table, operation)(prepared)
    return result.cpu()


def _check_slots(
    table: KeyTable, operation: str, keys: Tensor, num_present: int, num_absent: int
) -> None:
    """Check the slots of `keys`: present ones, then absent ones, then the first ones again.

    `keys` is int64 `[num_present + num_absent + repeats]`.
    """
    slots = _result_of(table, operation, keys)
    if slots.shape != keys.shape:
        raise WrongResult(f"{operation}: shape {tuple(slots.shape)} for {len(keys)} keys")
    present_slots = slots[:num_present]
    if (present_slots == table.absent).any():
        raise WrongResult(f"{operation}: a present key is not found")
    if len(present_slots.unique()) < num_present:
        raise WrongResult(f"{operation}: two keys have one slot")
    if (slots[num_present : num_present + num_absent] != table.absent).any():
        raise WrongResult(f"{operation}: an absent key is found")
    repeated_slots = slots[num_present + num_absent :]
    if not torch.equal(repeated_slots, present_slots[: len(repeated_slots)]):
        raise WrongResult(f"{operation}: a repeated key has two slots")


def _check_values(
    table: KeyTable,
    operation: str,
    keys: Tensor,
    expected_values: Tensor,
    *,
    passes_other_values: bool = False,
) -> None:
    """Check that an operation returns `expected_values`.

    `expected_values` is float32 `[len(keys), dim]`. With `passes_other_values` the call passes
    other values; keys, which are all present, must keep their own.
    """
    passed_values = expected_values + 1 if passes_other_values else expected_values
    actual_values: Tensor = getattr(table, operation)(table.prepare(keys, passed_values))
    if not torch.equal(actual_values.cpu(), expected_values):
        raise WrongResult(f"{operation}: values differ from the inserted ones")
