"""The parameters of the parts of tables that a rank holds, by the names of the whole tables."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from emblib.collections.handles import TableHandle


class HeldParameters(nn.Module):
    """`<table>.weight`, `<table>.cores.0` and so on, of what is here.

    A rank that has several parts of a table lists the second as `<table>#1`, and so on. The memory
    is that of the kernels, which move it; state dicts are made by the collection, with whole tables
    in them.
    """

    def __init__(self, handles: Sequence[tuple[str, TableHandle]]) -> None:
        super().__init__()
        self._handles = tuple(handles)
        self.bind()

    def bind(self) -> None:
        """Have the parameters that the handles have now."""
        seen: dict[str, int] = {}
        self._parameters.clear()
        for table, handle in self._handles:
            number = seen.get(table, 0)
            seen[table] = number + 1
            name = table if not number else f"{table}#{number}"
            for key, parameter in handle.named_parameters():
                # Under dotted names, which register_parameter would refuse.
                self._parameters[f"{name}.{key}"] = parameter

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return self  # the kernels move what they have

    def _save_to_state_dict(self, *arguments: Any) -> None:
        return None

    def _load_from_state_dict(self, *arguments: Any) -> None:
        return None
