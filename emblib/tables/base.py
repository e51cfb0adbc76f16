"""What every table with a fused optimizer has: hyper-parameters, bounds checks, fixed dtypes."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.ops import tbe
from emblib.optim import SGD, Optimizer, check_learning_rate
from emblib.specs import BoundsCheck, Pooling

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class FusedTable(nn.Module):
    """Base of the tables: an optimizer whose numbers live in `hyper`, on the device.

    `anchor` is a scalar that requires grad; it ties outputs to autograd while the weights, which
    backward mutates in place, stay out of it.
    """

    hyper: Tensor
    anchor: Tensor
    bounds_violations: Tensor

    def __init__(
        self,
        optimizer: Optimizer | None,
        pooling: Pooling,
        output_dtype: torch.dtype,
        bounds_check: BoundsCheck,
    ) -> None:
        super().__init__()
        self.optimizer = SGD(0.01) if optimizer is None else optimizer
        self.pooling = Pooling(pooling)
        self.bounds_check = BoundsCheck(bounds_check)
        self.output_dtype = output_dtype
        if output_dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"output_dtype must be float32, float16 or bfloat16, got {output_dtype}"
            )

    def _register_common(self, device: torch.device) -> None:
        """The buffers every table has; the step and the learning rate are part of the state."""
        self.register_buffer("hyper", self.optimizer.hyper(device))
        anchor = torch.zeros((), device=device, requires_grad=True)
        self.register_buffer("anchor", anchor, persistent=False)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("bounds_violations", counts, persistent=False)

    def _reset_common(self) -> None:
        self.hyper.copy_(self.optimizer.hyper())
        self.bounds_violations.zero_()

    def _check_bounds(self, indices: Tensor, offsets: Tensor, features: Tensor) -> Tensor:
        """Offsets repaired as `bounds_check` says; on CUDA violations are only counted."""
        if self.bounds_check is BoundsCheck.NONE:
            return offsets
        mode = self.bounds_check
        offsets, violations = tbe.check_bounds(indices, offsets, features, mode.value)
        if mode is not BoundsCheck.WARNING:
            return offsets
        if violations.is_cuda or torch.compiler.is_compiling():
            self.bounds_violations.add_(violations)
            return offsets
        bad_indices, bad_offsets = violations.tolist()
        if bad_indices or bad_offsets:
            self.bounds_violations.add_(violations)
            warnings.warn(
                f"emblib: {bad_indices} indices and {bad_offsets} offsets out of bounds; "
                "such indices read row 0, such offsets are clamped "
                "(bounds_check=BoundsCheck.FATAL raises instead)",
                stacklevel=4,
            )
        return offsets

    @property
    def learning_rate(self) -> float:
        """Of the fused optimizer (reads the device)."""
        return float(self.hyper[0])

    def set_learning_rate(self, lr: float) -> None:
        """Takes effect from the next backward on, in captured CUDA graphs too."""
        check_learning_rate(lr)
        self.hyper[0] = lr

    @property
    def step(self) -> int:
        """Number of updates so far (reads the device)."""
        return int(self.hyper[1])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(ops.keep_dtype(fn), recurse)
        self.anchor = self.anchor.detach().requires_grad_()  # a copy is no leaf that requires grad
        return self
