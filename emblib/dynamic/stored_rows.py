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
        """Return the views of each table by their names in a state dict."""
        return [
            {f"{prefix}rows.{name}.{view_name}": view for view_name, view in views.items()}
            for name, views in zip(self.names, self.views, strict=True)
        ]

    def problems(self, state_dict: Mapping[str, Any], prefix: str) -> Iterator[str]:
        """Yield messages of problems of stored rows in a state dict.

        A saved table may have any number of rows, if at most as many of them have keys as the
        module has rows. Missing entries are not a problem here, since torch reports them.

        `<prefix>key_of_row`, int64, has the key of each stored row, of all tables one after the
        other, -1 for none.
        """
        keys_name, begin = f"{prefix}key_of_row", 0
        tables = self.entries(prefix)
        if keys_name not in state_dict or any(
            name not in state_dict for views in tables for name in views
        ):
            return
        saved_keys = state_dict[keys_name]
        problem = state_dicts.key_problem(saved_keys, self.first_keys[-1])
        if problem:
            yield f"{keys_name}: {problem}"
            return
        for t, views in enumerate(tables):
            weight = state_dict[next(iter(views))]
            num_rows = len(weight) if isinstance(weight, Tensor) and weight.dim() else 0
            for name, view in views.items():
                value, shape = state_dict[name], (num_rows, *view.shape[1:])
                problem = state_dicts.tensor_problem(value, view, shape)
                if problem:
                    yield f"{name}: {problem}"
                    return
            keys = saved_keys[begin : begin + num_rows]
            yield from self._key_problems(t, keys[keys >= 0])
            begin += num_rows
        if begin != len(saved_keys):
            yield f"{keys_name}: there are {len(saved_keys)} keys of {begin} stored rows"

    def _key_problems(self, table: int, used_keys: Tensor) -> Iterator[str]:
        """Yield a message if `used_keys`, int64, are of other tables or too many for the table.

        The caller must have checked that they are distinct.
        """
        first_key, end_key = self.first_keys[table : table + 2]
        name, num_rows = self.names[table], len(self.views[table]["weight"])
        if bool(((used_keys < first_key) | (used_keys >= end_key)).any()):
            key_range = f"[{first_key}, {end_key})"
            yield f"key_of_row: keys of table {name!r} must be in {key_range}, got {used_keys}"
        if len(used_keys) > num_rows:
            yield (
                f"the state dict has {len(used_keys)} stored rows of table {name!r}, this module "
                f"has {num_rows}: construct it with a larger TTCache, or call empty_cache() before "
                "saving"
            )

    def resized_entries(self, state_dict: Mapping[str, Any], prefix: str) -> dict[str, Tensor]:
        """Return entries to load for tables that have another number of rows, and `key_of_row`.

        Rows without a key are left out, or added as zeros, so that rows fit the views. {} if
        entries are missing. `problems` must have found none.
        """
        saved_keys = state_dict.get(f"{prefix}key_of_row")
        tables = self.entries(prefix)
        if saved_keys is None or any(name not in state_dict for views in tables for name in views):
            return {}
        entries, new_keys, begin = {}, [], 0
        for views in tables:
            weight_name, weight = next(iter(views.items()))
            num_rows, capacity = len(state_dict[weight_name]), len(weight)
            keys = saved_keys[begin : begin + num_rows]
            begin += num_rows
            if num_rows != capacity:
                used_rows = (keys >= 0).nonzero().squeeze(1)
                for name, view in views.items():
                    saved_rows = state_dict[name]
                    entries[name] = torch.zeros_like(view)
                    entries[name][: len(used_rows)] = saved_rows[
                        used_rows.to(saved_rows.device)
                    ].to(view)
                keys = torch.cat([keys[used_rows], keys.new_full((capacity - len(used_rows),), -1)])
            new_keys.append(keys)
        return {**entries, f"{prefix}key_of_row": torch.cat(new_keys)}
