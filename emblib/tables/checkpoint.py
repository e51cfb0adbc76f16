"""State dicts of plain tables: per table, so that they fit any placement, device and grouping.

The keys are `<table>.weight` `[R, D]`, `<table>.<state>` `[R, D]` or `[R]` for each state of the
optimizer, and `hyper`, its numbers. The tensors are views of the module's memory, so what writes
into them (`torch.distributed.checkpoint.load`) writes into the module.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

Views = list[dict[str, Tensor]]


def table_names(names: Sequence[str]) -> list[str]:
    """The name of each table in a state dict: its own, or `table_<i>` where it has none.

    Raises:
        ValueError: two tables of one name.
    """
    result = [name or f"table_{t}" for t, name in enumerate(names)]
    for name in result:
        if result.count(name) > 1:
            raise ValueError(f"tables of a module must differ in name, got {name!r} twice")
    return result


def entries(names: Sequence[str], views: Views) -> Iterator[tuple[str, Tensor]]:
    """Key and tensor of everything that belongs to a table; `views` has `weight` and the states."""
    for name, tensors in zip(names, views, strict=True):
        for key, tensor in tensors.items():
            yield f"{name}.{key}", tensor


def check_keys(targets: Mapping[str, Tensor], state_dict: Mapping[str, Any]) -> None:
    """Raise RuntimeError where a key is missing or none of ours, before anything is written."""
    missing = sorted(targets.keys() - state_dict.keys())
    unexpected = sorted(state_dict.keys() - targets.keys())
    if missing or unexpected:
        raise RuntimeError(
            f"the state dict must have the keys of this module: missing are {missing}, unexpected "
            f"{unexpected}; strict=False loads what there is"
        )


def sources(
    targets: Mapping[str, Tensor],
    state_dict: Mapping[str, Any],
    prefix: str,
    missing_keys: list[str],
    unexpected_keys: list[str],
    error_messages: list[str],
) -> dict[str, Tensor]:
    """What of a state dict belongs into `targets`; fills lists as `_load_from_state_dict` does.

    Nothing does if a shape is wrong: all are looked at before anything is written, so a checkpoint
    of other tables leaves the module as it was.
    """
    given = [key.removeprefix(prefix) for key in state_dict if key.startswith(prefix)]
    found = {key: state_dict[prefix + key] for key in given if key in targets}
    errors = [
        f"{prefix}{key}: the checkpoint is of another table or optimizer; it has shape "
        f"{tuple(value.shape)}, this module's is {tuple(targets[key].shape)}; without this key and "
        "with strict=False the rest can be loaded"
        for key, value in found.items()
        if value.shape != targets[key].shape
    ]
    missing_keys.extend(prefix + key for key in targets if key not in found)
    unexpected_keys.extend(prefix + key for key in sorted(given) if key not in targets)
    error_messages.extend(errors)
    return {} if errors else found


def own(tensors: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, copied where they are the targets themselves."""
    return {
        key: tensor.clone() if tensor.data_ptr() == targets[key].data_ptr() else tensor
        for key, tensor in tensors.items()
    }
