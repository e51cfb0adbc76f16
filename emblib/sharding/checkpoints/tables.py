"""What a sharded collection has, as tensors for a state dict, and back from them.

The names are those of the collection that is not sharded: `<table>.weight`, `<table>.cores.<k>` of
a tensor train, and of a dynamic table its entries with the states of the optimizer. Other states
are by parameter: those that are as long as a row in the boxes of the table, those of one number a
row as `RowStates` where columns are cut, and `hyper`, the numbers of the optimizer.

Every rank has every name; ranks without a part of a table have tensors without one.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from emblib.collections.states import HYPER, FusedTable
from emblib.sharding.checkpoints.kinds import KINDS, Held, PlainTable, Table, Tables


def module_state(tables: Tables) -> dict[str, Tensor]:
    """The weights of all tables, and all that dynamic tables have; all ranks call this."""
    return {
        f"{table.name}.{key}": value
        for table in _tables(tables)
        for key, value in table.parameters().items()
    }


def load_module_state(tables: Tables, state: Mapping[str, Tensor]) -> None:
    """Write what `module_state` gave, or whole tensors, into the tables that it has.

    Raises:
        ValueError: a tensor of another size, or spread over ranks in another way: `load` reads a
            checkpoint in the way that is wanted here. Nothing is written to that table. Or cores of
            another tensor train; nothing is written at all.
    """
    every = [
        (table, {k.removeprefix(p): v for k, v in state.items() if k.startswith(p)})
        for table in _tables(tables)
        for p in (f"{table.name}.",)
    ]
    for table, given in every:
        table.check_parameters(given)
    for table, given in every:
        table.set_parameters(given)


def missing_names(tables: Tables, state: Mapping[str, Any]) -> list[str]:
    """Names without which tables stay as they are."""
    names = [f"{t.name}.{key}" for t in _tables(tables) for key in t.parameter_names()]
    return sorted(name for name in names if name not in state)


def known_prefixes(tables: Tables) -> tuple[str, ...]:
    """How the names begin that are of some table."""
    return tuple(f"{name}." for name in tables.plan)


def optimizer_state(tables: Tables) -> dict[str, dict[str, Tensor]]:
    """The states of fused optimizers, and their numbers, by the name of the parameter."""
    return {
        f"{table.name}.{parameter}": states
        for table in _tables(tables)
        for parameter, states in table.states().items()
    }


def load_optimizer_state(tables: Tables, state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Write what `optimizer_state` gave, or whole tensors, into the tables.

    Tables that share a kernel share its numbers: those of the table with the most steps are taken.
    """
    numbers: list[tuple[Any, Tensor]] = []
    for table in _tables(tables):
        for parameter in table.states():
            given = state.get(f"{table.name}.{parameter}")
            if given is None:
                raise KeyError(f"the state of the optimizer lacks {table.name}.{parameter}")
            table.set_states(parameter, given)
            if HYPER in given:
                mine = table.numbers.parts_of(given[HYPER], HYPER)
                numbers += [(k, hyper) for k in table.kernels() for hyper in mine.values()]
    newest: dict[int, tuple[Any, Tensor]] = {}
    for kernel, hyper in numbers:
        known = newest.get(id(kernel))
        if known is None or float(hyper[1]) > float(known[1][1]):
            newest[id(kernel)] = kernel, hyper
    for kernel, hyper in newest.values():
        kernel.hyper.copy_(hyper)
        kernel.set_step(int(hyper[1]))


def fused_tables(tables: Tables, prefix: str) -> list[FusedTable]:
    """The tables with a fused optimizer, and of each what is here."""
    return [
        FusedTable(
            table.optimizer,
            tuple(f"{prefix}{table.name}.{name}" for name in table.fused_names()),
            table.kernels(),
            {f"{prefix}{table.name}.{key}": p for key, p in table.fused_parameters().items()},
        )
        for table in _tables(tables)
        if table.is_fused
    ]


def _tables(tables: Tables) -> list[Table]:
    held: dict[str, list[Held]] = {name: [] for name in tables.plan}
    for part in tables.parts():
        held[part.table].append(part)
    return [
        KINDS.get(type(tables.kept_as(name).kind), PlainTable)(tables, name, parts)
        for name, parts in held.items()
    ]
