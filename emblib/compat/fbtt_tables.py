"""Tensor trains whose cores are stacked over tables, and FBTT-Embedding's state dicts.

FBTT has one parameter per core k, for all tables: `[T, p_k, R_k * q_k * R_{k+1}]`. emblib has one
per core and table. The modules of this file have FBTT's parameters, and look up in slices of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib import CachedTTEmbeddingBags, TableBatchedTTEmbeddingBags, ops, optim

LAYOUT = "tt_layout"
"""Name of the entry of a state dict that has rows, dim, factors and ranks of a tensor train."""


class StackedCores(nn.ParameterList):
    """List of parameters, one per core: core k of all T tables, `[T, p_k, width_k]`."""

    def as_list(self) -> list[nn.Parameter]:
        """Return the parameters; iterating over a `ParameterList` is slow."""
        cores: Any = list(self._parameters.values())
        return cores if len(cores) == len(self) else list(self)

    @ops.keeping_parameters()
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the cores, but keep their dtype, as tables do: kernels need it."""
        return super()._apply(ops.keep_dtype(fn), recurse)

    @ops.keeping_parameters()
    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *arguments: Any
    ) -> None:
        """Copy the values, also with `assign=True`: lookups read this memory."""
        metadata_for_copy = {
            k: v for k, v in local_metadata.items() if k != "assign_to_params_buffers"
        }
        super()._load_from_state_dict(state_dict, prefix, metadata_for_copy, *arguments)


class CoreViews:
    """Sequence of the cores of all tables, table after table, as views of stacked parameters.

    Args:
        stacked: parameters `[T, p_k, width_k]`.
        num_tables: number of tables, T.
        in_graph: whether gradients of the views reach the parameters.
    """

    def __init__(self, stacked: StackedCores, num_tables: int, *, in_graph: bool) -> None:
        self.stacked = stacked
        self._num_tables, self._is_in_graph = num_tables, in_graph
        # The last views, and the addresses of the parameters that they are views of.
        self._views: tuple[list[int], list[Tensor]] = ([], [])

    def __len__(self) -> int:
        return self._num_tables * len(self.stacked)

    def __getitem__(self, view_index: int) -> Tensor:
        table, k = divmod(view_index, len(self.stacked))
        core: Tensor = self.stacked.as_list()[k]
        return (core if self._is_in_graph else core.detach())[table]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.as_list())

    def as_list(self) -> list[Tensor]:
        """Return all views; backward computes one gradient per parameter, not one per view.

        Views outside the autograd graph are the same objects in each call, until a parameter is
        replaced or moved.
        """
        cores = self.stacked.as_list()
        addresses = [address for core in cores for address in (id(core), core.data_ptr())]
        if not self._is_in_graph and addresses == self._views[0]:
            return self._views[1]
        views_of_cores = [
            (core if self._is_in_graph else core.detach()).unbind(0) for core in cores
        ]
        views = [core for core_views in zip(*views_of_cores, strict=True) for core in core_views]
        self._views = (addresses, views)
        return views


class StackedTTBags(TableBatchedTTEmbeddingBags):
    """Tensor-train tables of equal sizes, whose cores and optimizer states are stacked.

    The module around this one has the parameters, `stacked`: they are neither parameters of this
    module nor in its state dict. Ranks that are greater than a core can use are accepted.
    """

    cores: Any
    stacked: StackedCores
    tt_layout: Tensor

    def _check_ranks(self) -> None:
        """Do nothing: all ranks are accepted, as in FBTT."""

    def _allocate_cores(self, shapes: Sequence[tuple[int, int]], device: torch.device) -> None:
        """Allocate stacked cores and states; `shapes` are those of the cores, table after table."""
        in_graph = isinstance(self.optimizer, optim.External)
        num_tables = len(self.tables)
        shapes_of_table = shapes[: len(shapes) // num_tables]
        dtype, states_dtype = self.precision.weights, self.precision.states
        stacked = StackedCores(
            nn.Parameter(
                torch.empty(num_tables, *shape, dtype=dtype, device=device), requires_grad=in_graph
            )
            for shape in shapes_of_table
        )
        self.__dict__["stacked"] = stacked  # not registered: see the class
        self.cores = CoreViews(stacked, num_tables, in_graph=in_graph)
        for k, shape in enumerate(shapes_of_table):
            for state in self.optimizer.states:
                size = (num_tables, shape[0]) if state.per_row else (num_tables, *shape)
                state_dtype = torch.float32 if state.per_row else states_dtype
                values = torch.zeros(size, dtype=state_dtype, device=device)
                self.register_buffer(f"state_{state.name}_{k}", values)

    def stacked_states(self) -> list[list[Tensor]]:
        """Return the optimizer states of each core, for all tables: `[T, p, width]` or `[T, p]`."""
        names = [state.name for state in self.optimizer.states]
        buffers: Any = self._buffers
        return [[buffers[f"state_{name}_{k}"] for name in names] for k in range(len(self.stacked))]

    def core_states(self) -> list[list[Tensor]]:
        """Return the states of each core, table after table, as views of the stacked ones."""
        states_by_core = self.stacked_states()
        return [
            [state[t] for state in states_of_core]
            for t in range(len(self.tables))
            for states_of_core in states_by_core
        ]

    def _mark_parameters(self) -> None:
        for core in self.stacked.as_list():
            self._mark_parameter(core)

    def _numbers_of(self, parameter: nn.Parameter) -> frozenset[int]:
        cores = self.stacked.as_list()
        return frozenset(k for k in range(len(self.cores)) if cores[k % len(cores)] is parameter)

    def _check_not_wrapped(self, weights: Any) -> None:
        super()._check_not_wrapped(self.stacked.as_list())


class StackedCachedTTBags(CachedTTEmbeddingBags):
    """Cached tensor trains of equal sizes, whose cores and optimizer states are stacked."""

    def _make_trains(
        self, optimizer: optim.Optimizer | None, init: str, options: dict[str, Any]
    ) -> StackedTTBags:
        return StackedTTBags(self.tables, optimizer, init=init, **options)


class StateDictReader:
    """Conversion of state dicts of FBTT, and of emblib's earlier versions, for a module.

    Args:
        bags: tables of the module.
        state_dict: state dict, which is converted in place.
        prefix: prefix of the module's keys; keys of `bags` begin with `{prefix}bags.`.
        errors: list that gets a message for every entry that does not fit.
    """

    def __init__(
        self,
        bags: StackedTTBags | StackedCachedTTBags,
        state_dict: MutableMapping[str, Any],
        prefix: str,
        errors: list[str],
    ) -> None:
        self._bags, self._entries, self._prefix = bags, state_dict, prefix
        self._cached_bags = bags if isinstance(bags, StackedCachedTTBags) else None
        trains: Any = bags.trains if isinstance(bags, StackedCachedTTBags) else bags
        self._trains: StackedTTBags = trains
        self._bags_prefix = f"{prefix}bags."
        self._trains_prefix = f"{prefix}bags.{'trains.' if self._cached_bags else ''}"
        self._errors = errors

    def convert(self) -> None:
        """Convert all entries; if one does not fit, replace all by the module's own."""
        emblib_keys = [key for key in self._entries if key.startswith(self._bags_prefix)]
        num_errors_before = len(self._errors)
        if emblib_keys:
            self._stack_tables()
        elif f"{self._prefix}tt_cores.0" in self._entries:
            self._convert_fbtt()
        self._check_layout()
        if len(self._errors) > num_errors_before:
            self._restore_module_entries()

    def _stack_tables(self) -> None:
        """Stack cores and states, of which earlier versions had one per table."""
        num_cores, num_tables = len(self._trains.stacked), len(self._trains.tables)
        if f"{self._trains_prefix}cores.0" not in self._entries:
            return
        target_of_name = {"cores.": f"{self._prefix}tt_cores."}
        for state in self._trains.optimizer.states:
            target_of_name[f"state_{state.name}_"] = f"{self._trains_prefix}state_{state.name}_"
        stacked_entries = {}
        for name, target in target_of_name.items():
            for k in range(num_cores):
                keys = [
                    f"{self._trains_prefix}{name}{t * num_cores + k}" for t in range(num_tables)
                ]
                if all(key in self._entries for key in keys):
                    tensors = [self._entries.pop(key) for key in keys]
                    stacked_entries[f"{target}{k}"] = torch.stack(tensors)
        self._entries.update(stacked_entries)

    def _convert_fbtt(self) -> None:
        """Convert FBTT's entries; those that FBTT does not save are the module's own.

        FBTT saves neither ranks nor factors of the dimension. As in FBTT, cores of equal shapes are
        assumed to have those of this module.
        """
        module_entries = self._bags.state_dict(prefix=self._bags_prefix)
        self._check_rows(self._entries.pop(f"{self._prefix}L", None))
        self._convert_states(module_entries)
        names = ("hashtbl", "cache_freq", "cache_state", "cache_weight", "cache_optimizer_state")
        saved_tensors = {name: self._entries.pop(f"{self._prefix}{name}", None) for name in names}
        self._convert_cache(module_entries, saved_tensors)
        self._entries.update(module_entries)

    def _check_rows(self, saved_rows: Tensor | None) -> None:
        """Add an error if FBTT's `L`, the rows per row of each core, differs from the module's."""
        factors = self._trains.tables[0].row_factors
        rows_per_core_row = [math.prod(factors[k + 1 :]) for k in range(len(factors))]
        if saved_rows is not None and saved_rows.tolist() != rows_per_core_row:
            self._errors.append(
                f"{self._prefix}L: the cores are of other row factors, {saved_rows.tolist()} rows "
                f"share a core row there and {rows_per_core_row} here: give the tt_p_shapes "
                "of the module that was saved"
            )

    def _convert_states(self, module_entries: MutableMapping[str, Any]) -> None:
        """Convert FBTT's optimizer states, sums of squares, if the module has such states.

        Add an error if it has not, and a sum is not 0.
        """
        has_sums = [state.name for state in self._trains.optimizer.states] == ["sum"]
        for k, states in enumerate(self._trains.stacked_states()):
            name = f"{self._prefix}optimizer_state.optimizer_state{k}"
            saved_sums = self._entries.pop(name, None)
            if saved_sums is None or not saved_sums.numel():
                continue
            if has_sums and saved_sums.shape == states[0].shape:
                module_entries[f"{self._trains_prefix}state_sum_{k}"] = saved_sums
            elif saved_sums.count_nonzero():
                self._errors.append(
                    f"{name}: FBTT's states are Adagrad's, whatever its optimizer is called, and "
                    f"this module's optimizer is {self._trains.optimizer!r}: construct it with "
                    "OptimType.EXACT_ADAGRAD, or leave optimizer_state out of the state dict"
                )

    def _convert_cache(
        self, module_entries: MutableMapping[str, Any], saved_tensors: Mapping[str, Tensor | None]
    ) -> None:
        """Convert the counts and rows of the cache; without rows the cache is empty afterwards."""
        ids, slots = saved_tensors["hashtbl"], saved_tensors["cache_state"]
        rows = saved_tensors["cache_weight"]
        counted_ids = (
            torch.zeros(0, dtype=torch.int64, device="cpu") if ids is None else ids[ids >= 0].cpu()
        )
        id_of_slot: dict[int, int] = {}
        if ids is not None and slots is not None and rows is not None:
            slots = slots[ids >= 0].long().cpu()
            has_one_id = torch.bincount(slots[slots >= 0], minlength=len(rows)) == 1
            # If two ids have one slot, one replaced the other: it is unknown which row is stored.
            id_of_slot = {
                slot: key
                for key, slot in zip(counted_ids.tolist(), slots.tolist(), strict=True)
                if slot >= 0 and has_one_id[slot]
            }
        if self._cached_bags is None:
            if id_of_slot:
                self._errors.append(
                    f"{self._prefix}cache_weight: FBTT stored {len(id_of_slot)} rows in its cache, "
                    "which the cores do not have: construct the module with use_cache=True"
                )
            return
        module_entries[f"{self._bags_prefix}key_of_row"] = torch.full_like(
            self._cached_bags.key_of_row, -1
        )
        counts_prefix = f"{self._bags_prefix}counts."
        uses = saved_tensors["cache_freq"]
        module_entries[f"{counts_prefix}keys"] = counted_ids
        module_entries[f"{counts_prefix}values"] = torch.zeros(len(counted_ids), 1, device="cpu")
        module_entries[f"{counts_prefix}stamps"] = torch.zeros_like(counted_ids)
        module_entries[f"{counts_prefix}scores"] = (
            torch.ones_like(counted_ids)
            if ids is None or uses is None
            else uses[ids >= 0].to(counted_ids)
        )
        if id_of_slot and rows is not None:
            keys = torch.full((len(rows),), -1, device="cpu")
            keys[list(id_of_slot)] = torch.tensor(list(id_of_slot.values()), device="cpu")
            module_entries[f"{self._bags_prefix}key_of_row"] = keys
            table_prefix = f"{self._bags_prefix}rows.{self._cached_bags.rows.table_names[0]}."
            for name, view in self._cached_bags.rows.table_views()[0].items():
                shape = (len(rows), *view.shape[1:])
                module_entries[f"{table_prefix}{name}"] = (
                    rows if name == "weight" else view.new_zeros(shape)
                )
            sums, sums_name = saved_tensors["cache_optimizer_state"], f"{table_prefix}sum"
            if (
                sums is not None
                and sums_name in module_entries
                and sums.shape == module_entries[sums_name].shape
            ):
                module_entries[sums_name] = sums

    def _check_layout(self) -> None:
        """Add an error if cores have another shape, or are those of another tensor train."""
        for k, core in enumerate(self._trains.stacked.as_list()):
            saved_core = self._entries.get(f"{self._prefix}tt_cores.{k}")
            if saved_core is not None and saved_core.shape != core.shape:
                self._errors.append(
                    f"{self._prefix}tt_cores.{k}: it must be {list(core.shape)}, tables first, got "
                    f"{list(saved_core.shape)}"
                )
        saved_layout, layout = (
            self._entries.get(self._trains_prefix + LAYOUT),
            self._trains.tt_layout.cpu(),
        )
        if saved_layout is not None and not torch.equal(saved_layout.cpu(), layout):
            self._errors.append(
                f"{self._trains_prefix}{LAYOUT}: the cores are of another tensor train, rows, dim, "
                f"row factors, dim factors and ranks are {saved_layout.tolist()} there and "
                f"{layout.tolist()} here"
            )

    def _restore_module_entries(self) -> None:
        """Replace all entries by the module's own, so that loading them changes nothing."""
        self._entries.update(self._bags.state_dict(prefix=self._bags_prefix))
        for k, core in enumerate(self._trains.stacked.as_list()):
            self._entries[f"{self._prefix}tt_cores.{k}"] = core.detach()
