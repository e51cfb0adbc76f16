"""Load parameter groups of optimizers from checkpoints of other groups, by names of parameters.

A `KeyedOptimizer` names the parameters of its groups. The groups of a checkpoint may have more or
fewer parameters, or another order. So a group gets its options, such as the learning rate, from the
saved group that has its parameters. Tables that the checkpoint lacks keep their states, but get the
step count of their group: tables of one group may share a kernel, and which ones do depends on the
rank.
"""

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from emblib.collections.fused_states import HYPER
from emblib.collections.optimizers import KeyedOptimizer
from emblib.columns import Hyper
from emblib.sharding.checkpoints.sharded_table import ShardedTable
from emblib.sharding.checkpoints.state_trees import CheckpointError, leaves

Read = Callable[[Iterable[str]], dict[str, Any]]
"""Function that returns the saved values with these names."""


class SavedGroups:
    """The parameter groups of an optimizer, and those that a checkpoint has for it.

    Args:
        key: key of the optimizer in the state to load, the first part of all saved names.
        optimizer: the optimizer, of torch or a `KeyedOptimizer`.
        tree: state dict of the optimizer; `read_options` and `share_steps` write into it.
        saved_metadata: metadata of each saved entry, by name.
        read: function that reads saved values.

    Raises:
        CheckpointError: the saved groups are not groups.
    """

    def __init__(
        self,
        key: Any,
        optimizer: torch.optim.Optimizer,
        tree: MutableMapping[str, Any],
        saved_metadata: Mapping[str, Any],
        read: Read,
    ) -> None:
        self._prefix, self._saved_metadata, self._read = f"{key}.", saved_metadata, read
        self._optimizer, self._tree = optimizer, tree
        # A class of the user may have state dicts of other entries.
        groups = tree.get("param_groups", [])
        self._groups: list[list[Any]] = [list(group["params"]) for group in groups]
        self._saved_groups = self._read_parameters()

    def _read_parameters(self) -> list[list[Any]]:
        """Return the names or numbers of the saved parameters of each group."""
        names: list[str] = []
        while (name := f"{self.options_prefix}{len(names)}.params") in self._saved_metadata:
            names.append(name)
        values = self._read(names)
        if not all(isinstance(values[name], list | tuple) for name in names):
            raise CheckpointError(f"{self._prefix}param_groups of the checkpoint are not groups")
        return [list(values[name]) for name in names]

    @property
    def options_prefix(self) -> str:
        """Return the first part of the names of the options of groups, e.g. "opt.param_groups."."""
        return f"{self._prefix}param_groups."

    @property
    def parameter_names(self) -> set[Any]:
        """Return the names or numbers of the parameters of the optimizer."""
        return {name for names in self._groups for name in names}

    @property
    def are_saved(self) -> bool:
        """Return whether the checkpoint has the same groups, so that they load one by one.

        Also True if the checkpoint or the optimizer has no groups. Groups of named parameters are
        the same if they have the same names, other groups if they have as many parameters.
        """
        if not self._saved_groups or not self._groups:
            return True
        if isinstance(self._optimizer, KeyedOptimizer):
            return list(map(set, self._groups)) == list(map(set, self._saved_groups))
        return list(map(len, self._groups)) == list(map(len, self._saved_groups))

    def read_options(self, *, strict: bool) -> list[str]:
        """Read the options of each group from the saved group that has most of its parameters.

        For groups that are not `are_saved`. Returns the names of the options that the checkpoint
        lacks, which stay as they are.

        Raises:
            CheckpointError: the parameters have no names, or, with `strict`, no saved group has all
                parameters of a group.
        """
        if not isinstance(self._optimizer, KeyedOptimizer):
            raise CheckpointError(
                f"{self._prefix[:-1]} has groups of {list(map(len, self._groups))} parameters, "
                f"the checkpoint {list(map(len, self._saved_groups))}, and numbered parameters "
                "cannot be matched: pass a KeyedOptimizerWrapper, whose parameters have names, to "
                "save and load"
            )
        missing_names: list[str] = []
        for index, names in enumerate(self._groups):
            common = [
                len(set(names).intersection(saved_names)) for saved_names in self._saved_groups
            ]
            source = common.index(max(common))
            if strict and common[source] < len(names):
                raise CheckpointError(
                    f"{self._prefix[:-1]} has other parameters or groups than the checkpoint: "
                    f"{self._groups}, the checkpoint has {self._saved_groups}; strict=False takes "
                    "what it has by the names of parameters"
                )
            missing_names += self._read_options_of(index, source if common[source] else None)
        return missing_names

    def _read_options_of(self, index: int, source: int | None) -> list[str]:
        """Read the options of group `index` from the saved group `source`, None for no group.

        Returns the names of the options that the checkpoint lacks.
        """
        group = self._tree["param_groups"][index]
        own_prefix = f"{self.options_prefix}{index}."
        options = {key: value for key, value in group.items() if key != "params"}
        all_leaves = list(leaves({"": options}, own_prefix[:-1]))
        missing_names, targets = [], {}
        for leaf in all_leaves:
            suffix = leaf.name.removeprefix(own_prefix)
            name = f"{self.options_prefix}{source}.{suffix}"
            if source is None or name not in self._saved_metadata:
                missing_names.append(leaf.name)
                continue
            targets[name] = leaf
        for name, value in self._read(targets).items():
            targets[name].replace(value)
        group.update(options)
        return missing_names

    def share_steps(self) -> None:
        """Give tables without saved hyperparameters those of their group with the most steps."""
        states = self._tree.get("state", {})
        for names in self._groups:
            entry_names = {name: f"{self._prefix}state.{name}.{HYPER}" for name in names}
            absent_names = [
                name
                for name in names
                if entry_names[name] not in self._saved_metadata and HYPER in states.get(name, {})
            ]
            present_names = [name for name in entry_names.values() if name in self._saved_metadata]
            if not absent_names or not present_names:
                continue
            values = self._read(present_names)
            newest = max(values.values(), key=lambda hyper: float(hyper[Hyper.STEP]))
            for name in absent_names:
                write_hyperparams(states[name][HYPER], newest)


def write_hyperparams(target: Tensor, values: Tensor) -> None:
    """Copy hyperparameters `[n]` into a tensor `[n]`, or into each local copy of a sharded one."""
    for copy in target.parts.values() if isinstance(target, ShardedTable) else [target]:
        copy.copy_(values)
