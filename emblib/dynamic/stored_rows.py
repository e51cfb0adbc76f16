"""Stored rows of cached tensor trains in state dicts: checks, and conversion to other sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.tables import state_dicts


class StoredTables(NamedTuple):
    """The stored rows of each table of a module.

    Attributes:
        names: names of the tables, `[T]`.
        first_keys: first key of each table, then the number of keys, `[T + 1]`.
        views: `weight` and the optimizer states of each table, `[rows, ...]`.
    """

    names: Sequence[str]
    first_keys: Sequence[int]
    views: Sequence[Mapping[str, Tensor]]

    def entries(self, prefix: str) -> list[dict[str, Tensor]]:
        """Return the views of each table by their keys in a state dict."""
        return [
            {f"{prefix}rows.{name}.{view_name}": view for view_name, view in views.items()}
            for name, views in zip(self.names, self.views, strict=True)
        ]

    def problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield one message per problem of stored rows in a state dict; any number of rows fits."""
        key, begin = f"{prefix}key_of_row", 0
        tables = self.entries(prefix)
        if key not in state_dict or any(
            name not in state_dict for names_of_table in tables for name in names_of_table
        ):
            return  # torch reports the missing entries
        saved = state_dict[key]
        problem = state_dicts.key_problem(saved, self.first_keys[-1])
        if problem:
            yield f"{key}: {problem}"
            return
        for t, names_of_table in enumerate(tables):
            weight = state_dict[next(iter(names_of_table))]
            size = len(weight) if isinstance(weight, Tensor) and weight.dim() else 0
            for name, view in names_of_table.items():
                value, shape = state_dict[name], (size, *view.shape[1:])
                problem = state_dicts.tensor_problem(value, view, shape)
                if problem:
                    yield f"{name}: {problem}"
                    return
            keys = saved[begin : begin + size]
            yield from self._key_problems(t, keys[keys >= 0])
            begin += size
        if begin != len(saved):
            yield f"{key}: there are {len(saved)} keys of {begin} stored rows"

    def _key_problems(self, table: int, used: Tensor) -> Iterator[str]:
        """Yield a message if `used` keys are not distinct keys of the table."""
        low, high = self.first_keys[table : table + 2]
        name, capacity = self.names[table], len(self.views[table]["weight"])
        if bool(((used < low) | (used >= high)).any()):
            yield f"key_of_row: keys of table {name!r} must be in [{low}, {high}), got {used}"
        if len(used) > capacity:
            yield (
                f"the state dict has {len(used)} stored rows of table {name!r}, this module has "
                f"{capacity}: construct it with a larger TTCache, or call empty_cache() before "
                "saving"
            )

    def resized(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """Return the entries resized to the views, if saved with another number of rows."""
        saved = state_dict.get(f"{prefix}key_of_row")
        tables = self.entries(prefix)
        if saved is None or any(
            key not in state_dict for names_of_table in tables for key in names_of_table
        ):
            return {}
        entries, keys, begin = {}, [], 0
        for names_of_table in tables:
            name, weight = next(iter(names_of_table.items()))
            size, capacity = len(state_dict[name]), len(weight)
            saved_keys = saved[begin : begin + size]
            begin += size
            if size != capacity:
                used = (saved_keys >= 0).nonzero().squeeze(1)
                for key, view in names_of_table.items():
                    source = state_dict[key]
                    entries[key] = torch.zeros_like(view)
                    entries[key][: len(used)] = source[used.to(source.device)].to(view)
                saved_keys = torch.cat(
                    [saved_keys[used], saved_keys.new_full((capacity - len(used),), -1)]
                )
            keys.append(saved_keys)
        return {**entries, f"{prefix}key_of_row": torch.cat(keys)}
