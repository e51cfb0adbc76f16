"""Buffers of sharded collections that depend only on the layout: they keep their exact values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib.tables.parameters import version_of


def int64_tensor(values: Sequence[Any], width: int | None = None) -> Tensor:
    """Return numbers as int64 `[n]` on the CPU, or rows of `width` numbers as `[n, width]`."""
    tensor = torch.tensor(values, dtype=torch.int64, device="cpu")
    return tensor if width is None else tensor.view(-1, width)


class LayoutBuffers(nn.Module):
    """A module with buffers that describe the layout of its collection.

    State dicts do not have these buffers, so loading one does not restore values that torch has
    changed: `to_empty` leaves memory uninitialised, casts change dtypes, and
    `AveragedModel(use_buffers=True)` rounds integers. So this module restores them itself: in
    `_apply`, in copies, and in `restore_layout`, which a subclass calls before it reads them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._layout_values: dict[str, Tensor] = {}  # on the CPU
        self._layout_version = 0

    def register_layout(self, name: str, values: Tensor, device: torch.device) -> None:
        """Register a buffer `name` on `device` with a copy of `values`.

        `values` are on the CPU and must not change later.
        """
        self._layout_values[name] = values
        self.register_buffer(name, values.to(device, copy=True), persistent=False)
        self._layout_version = self._version_of_layout()

    def restore_layout(self) -> None:
        """Restore the buffers if the first of them has been written in place since."""
        if self._layout_version != self._version_of_layout():
            for name, values in self._layout_values.items():
                self.get_buffer(name).copy_(values)
            self._layout_version = self._version_of_layout()

    def _version_of_layout(self) -> int:
        """Return the version of the first buffer, which grows with each write in place."""
        return version_of(self.get_buffer(next(iter(self._layout_values))))

    def _replace_buffers(self) -> None:
        """Replace the buffers by new ones with their values, each on the device of the old one."""
        for name, values in self._layout_values.items():
            device = self.get_buffer(name).device
            self.register_buffer(name, values.to(device, copy=True), persistent=False)
        self._layout_version = self._version_of_layout()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._replace_buffers()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._replace_buffers()  # the copied module may not have restored its own yet
