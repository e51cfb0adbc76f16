"""Invalid indices and offsets: what a module does about them, and whom it tells."""

import sys
import warnings
from types import FrameType

import torch
from torch import Tensor

from emblib.ops import codes, tbe
from emblib.specs import BoundsCheck


def caller_level() -> int:
    """The `stacklevel` at which a warning names the code that called the module."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


_OURS = ("emblib.", "torch.nn.modules.", "torch._dynamo.")


class CheckedBatches:
    """What a module of tables says of a batch before it is looked up."""

    features: Tensor
    bounds_violations: Tensor
    bounds_check: BoundsCheck
    include_last_offset: bool = True
    """Whether offsets end with the number of indices; `nn.EmbeddingBag` leaves that entry out."""

    def _with_last_offset(self, indices: Tensor, offsets: Tensor) -> Tensor:
        """Append the number of indices where the module takes offsets without it."""
        if self.include_last_offset:
            return offsets
        return torch.cat([offsets, offsets.new_full((1,), indices.numel())])

    def _check_bounds(
        self,
        indices: Tensor,
        offsets: Tensor,
        features: Tensor,
        bag_layout: Tensor | None = None,
    ) -> Tensor:
        """Return the offsets repaired as `bounds_check` says; on CUDA WARNING only counts.

        Raises:
            RuntimeError: another device; out of bounds in mode FATAL; in mode WARNING on the CPU,
                offsets that would leave out ids or a bag, in compiled graphs too.
        """
        if indices.device != self.features.device or offsets.device != self.features.device:
            raise RuntimeError(
                f"indices and offsets must be on the device of the table, {self.features.device}, "
                f"got {indices.device} and {offsets.device}; move them with .to(device)"
            )
        if self.bounds_check is BoundsCheck.NONE:
            return offsets
        mode = self.bounds_check
        repaired, violations = tbe.check_bounds(
            indices, offsets, features, bag_layout, codes.BOUNDS_CHECK[mode.value]
        )
        if mode is not BoundsCheck.WARNING:
            return repaired
        if violations.is_cuda or torch.compiler.is_compiling():
            self.bounds_violations.add_(violations)
            return repaired
        bad_indices, bad_offsets = violations.tolist()
        if bad_indices or bad_offsets:
            self.bounds_violations.add_(violations)
            warnings.warn(
                self._told_of_bounds(bad_indices, bad_offsets),
                stacklevel=caller_level(),
            )
        return repaired

    def _told_of_bounds(self, bad_indices: int, bad_offsets: int) -> str:
        return (
            f"emblib: {bad_indices} indices and {bad_offsets} offsets out of bounds; "
            "such indices read row 0, such offsets are clamped (are they offsets, not lengths, "
            "and in this order? bounds_check=BoundsCheck.FATAL raises instead)"
        )
