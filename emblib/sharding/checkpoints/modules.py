"""State dicts of sharded collections."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from emblib.collections.states import FusedTable
from emblib.sharding.checkpoints import tables


class StateOfTables(nn.Module):
    """Base of sharded collections: a state dict with the names of the collection they are made of.

    Its values are `ShardedTable`s, and tensors where every rank has a copy. Loading takes them, and
    whole tensors as an unsharded collection has them; each rank takes its part. Where there are
    dynamic tables, all ranks call `state_dict` together.
    """

    handles_name: ClassVar[str]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # The kernels of a copy have made their parameters anew.
        held: Any = self._modules[self.handles_name]
        held.bind()

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        spread: Any = self
        for key, value in tables.module_state(spread).items():
            destination[f"{prefix}{self.handles_name}.{key}"] = value

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *arguments: Any
    ) -> None:
        missing, unexpected, errors = arguments[2:]
        own = f"{prefix}{self.handles_name}."
        given = {k.removeprefix(own): v for k, v in state_dict.items() if k.startswith(own)}
        spread: Any = self
        lacking = tables.missing_names(spread, given)
        missing.extend(own + key for key in lacking)
        # Children have no state: all that is here is the tables'.
        known = tables.known_prefixes(spread)
        unexpected.extend(
            key
            for key in state_dict
            if key.startswith(prefix) and not key.removeprefix(own).startswith(known)
        )
        try:
            tables.load_module_state(spread, given)
        except (ValueError, RuntimeError) as error:
            errors.append(f"{prefix}: {error}")

    def fused_tables(self) -> Sequence[FusedTable]:
        """The tables that backward updates: the same, in the same order, on every rank."""
        spread: Any = self
        return tables.fused_tables(spread, f"{self.handles_name}.")

    def optimizer_state(self) -> dict[str, dict[str, Tensor]]:
        """States and numbers of fused optimizers, by the name of the parameter in the state dict.

        Dynamic tables have their states in the state dict, beside the keys.
        """
        spread: Any = self
        return {
            f"{self.handles_name}.{parameter}": states
            for parameter, states in tables.optimizer_state(spread).items()
        }

    def load_optimizer_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write what `optimizer_state` gave, or whole tensors as an unsharded collection has them.

        Raises:
            KeyError: a parameter or a state is missing.
            ValueError: a tensor of another size, or spread over ranks in another way.
        """
        own = f"{self.handles_name}."
        spread: Any = self
        given = {
            key.removeprefix(own): value for key, value in state.items() if key.startswith(own)
        }
        tables.load_optimizer_state(spread, given)
