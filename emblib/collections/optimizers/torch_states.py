"""Convert state dicts of `torch.optim` to those of `FusedOptimizer`, with moments and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import optim
from emblib.collections.fused_states import HYPER
from emblib.columns import Hyper
from emblib.optim import Optimizer

State = dict[str, dict[str, Any]]


class Template(NamedTuple):
    """The optimizer of a group, and a copy of its current `hyperparams`, float64 on the CPU.

    `from_torch_states` writes the step into the copy.
    """

    optimizer: Optimizer
    hyperparams: Tensor


def with_names(state_dict: Mapping[str, Any], names: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Replace the numbers of parameters in a state dict of `torch.optim` by their names.

    If a saved group has `param_names`, and they are those of `names` in any order, they are used.
    Otherwise parameters are matched by their position in the group. A state dict by name is
    returned unchanged; one without groups gets groups without options.

    Args:
        state_dict: state dict of a `KeyedOptimizer` or of an optimizer of `torch.optim`.
        names: the names of the parameters of each group.

    Raises:
        KeyError: the state dict has other groups, or groups with other numbers of parameters.
    """
    if "param_groups" not in state_dict:
        return {**state_dict, "param_groups": [{"params": list(group)} for group in names]}
    groups = state_dict["param_groups"]
    if not any(isinstance(number, int) for group in groups for number in group["params"]):
        return state_dict
    num_parameters = [*map(len, names)]
    num_saved_parameters = [len(group["params"]) for group in groups]
    if num_parameters != num_saved_parameters:
        raise KeyError(
            f"the state dict of torch.optim has groups of {num_saved_parameters} parameters, this "
            f"optimizer {num_parameters}: {[*map(list, names)]}; make the groups in torch alike, "
            "or keep only their entries in the state dict"
        )
    name_by_number: dict[int, str] = {}
    renamed_groups = []
    for group, group_names in zip(groups, names, strict=True):
        saved_names = group.get("param_names")
        matched_names = (
            saved_names
            if saved_names is not None and set(saved_names) == set(group_names)
            else group_names
        )
        name_by_number.update(zip(group["params"], matched_names, strict=True))
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        renamed_groups.append({"params": list(matched_names), **options})
    states = {name_by_number[number]: values for number, values in state_dict["state"].items()}
    return {"state": states, "param_groups": renamed_groups}


def without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the mapping `group`, e.g. a parameter group, without its entry `params`."""
    return {name: value for name, value in group.items() if name != "params"}


def is_of_torch(state_dict: Mapping[str, Any], states: Mapping[str, Any]) -> bool:
    """Return whether `torch.optim` made a state dict: no parameter has `hyper` in its state.

    False if `states`, those of the tables, are empty.
    """
    return bool(states) and not any(HYPER in values for values in state_dict["state"].values())


def from_torch_states(
    state_dict: Mapping[str, Any], table_states: State, templates: Sequence[Template]
) -> dict[str, Any]:
    """Return a state dict of `torch.optim` as one of `FusedOptimizer`.

    `torch.optim.SGD` fits SGD, `Adagrad` fits Adagrad, and `Adam`, `AdamW` and `SparseAdam` fit
    Adam. A parameter without a state was never stepped; its states become zeros.

    Args:
        state_dict: state dict of an optimizer of `torch.optim`, with names as keys (`with_names`).
        table_states: the states of the tables, by name.
        templates: one template per parameter group.

    Raises:
        KeyError: the states are of another optimizer, or there are more or fewer groups.
        ValueError: states have other shapes, or tables do not have them; or the parameters of a
            group have different step counts for Adam, whose bias corrections differ then.
    """
    states: State = {}
    groups = state_dict["param_groups"]
    if len(groups) != len(templates):
        raise KeyError(
            f"the state dict has {len(groups)} groups of parameters, this optimizer "
            f"{len(templates)}"
        )
    for group, template in zip(groups, templates, strict=True):
        saved_states = {name: state_dict["state"].get(name, {}) for name in group["params"]}
        _check_class(group, template.optimizer)
        steps = {int(values["step"]) for values in saved_states.values() if "step" in values}
        if hasattr(template.optimizer, "betas"):
            steps |= {0 for values in saved_states.values() if "step" not in values}
            if len(steps) > 1:
                raise ValueError(
                    f"the parameters have made different numbers of steps, {sorted(steps)}, and "
                    "the tables of a group count together: load tables with different steps into "
                    "optimizers of their own (another eps makes another group), or set all to one"
                )
        hyperparams = template.hyperparams
        if steps:
            hyperparams[Hyper.STEP] = max(steps)
        for name, values in saved_states.items():
            views = {key: view for key, view in table_states[name].items() if key != HYPER}
            states[name] = {**_checked_states(name, values, views), HYPER: hyperparams}
    return {"state": states, "param_groups": groups}


def _check_class(group: Mapping[str, Any], optimizer: Optimizer) -> None:
    """Raise KeyError if a group is of another class of `torch.optim` than `optimizer`."""
    expected: type[Optimizer] | None = None
    if "nesterov" in group:
        expected = optim.SGD
    elif "lr_decay" in group:
        expected = optim.Adagrad
    elif "betas" in group and ("amsgrad" in group or "weight_decay" not in group):
        expected = optim.Adam
    if type(optimizer) is not expected:
        entries = sorted(group.keys() - {"params"})
        raise KeyError(
            f"a state dict of torch.optim with the group entries {entries} does not fit "
            f"{type(optimizer).__name__} of tables: SGD fits SGD, Adagrad fits Adagrad, and Adam, "
            "AdamW and SparseAdam fit Adam; others have states of another meaning"
        )


def _checked_states(
    name: str, saved_states: Mapping[str, Any], views: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the states of a parameter, checked against those of its table."""
    states = {
        key: value for key, value in saved_states.items() if key != "step" and value is not None
    }
    unknown_names = sorted(states.keys() - views.keys())
    if unknown_names:
        raise ValueError(
            f"a FusedOptimizer has no place for the states {unknown_names} of {name} (it has "
            f"{sorted(views)}). Optimizer states of bare modules, hash tables and stored rows are "
            "in the state dicts of their modules: copy them there, in bare modules to "
            "table_optimizer_states(), and continue with set_step"
        )
    if states and states.keys() != views.keys():
        raise KeyError(f"the state of {name} lacks {sorted(views.keys() - states.keys())}")
    for key, value in states.items():
        if value.shape != views[key].shape:
            raise ValueError(
                f"{key} of {name} must have the shape {tuple(views[key].shape)}, got "
                f"{tuple(value.shape)}: it is of another table"
            )
    return states or {
        key: torch.zeros(tuple(view.shape), device="cpu") for key, view in views.items()
    }
