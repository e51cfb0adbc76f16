"""What every table with a fused optimizer has: hyper-parameters, bounds checks, fixed dtypes."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from emblib import ops
from emblib.ops import lookups
from emblib.optim import FUSED, SGD, Counter, External, Optimizer, check_learning_rate
from emblib.specs import BoundsCheck, Pooling, check_count, check_float_dtype
from emblib.tables import parameters
from emblib.tables.bounds import CheckedBatches, caller_level
from emblib.tables.locks import ModuleLock, atomic


def warn_of_dtype(fn: Callable[[Tensor], Tensor], argument: str) -> None:
    """Warn where a function of `nn.Module._apply` would change the dtype of a table."""
    asked = fn(torch.empty(0, dtype=torch.float32)).dtype
    if asked != torch.float32:
        warnings.warn(
            f"emblib: tables keep their dtypes, {asked} is ignored; choose them when making one: "
            f"{argument}, in a collection data_type= of the configuration",
            stacklevel=caller_level(),
        )


_FIELDS = 8  # of a row of `features`, see csrc/core/dtype.h


class FusedTable(CheckedBatches, nn.Module):
    """Base of the tables: an optimizer whose numbers live in `hyper`, on the device.

    The weights of a fused table never have a `.grad`: backward applies the optimizer to them at
    once. So neither `torch.optim` nor gradient clipping or accumulation reaches them, and gradients
    that a `GradScaler` has scaled are refused. `requires_grad_(False)`, of the module or of one it
    is in, freezes the tables: from the next forward on there is no update, and no step is counted;
    `requires_grad_(True)` goes on with training. `state_dict` holds the optimizer's numbers as
    well, and loading one restores them.

    `anchor` is a scalar that requires grad; it ties outputs to autograd while the weights, which
    backward mutates in place, stay out of it.
    """

    features: Tensor
    hyper: Tensor
    anchor: Tensor
    bounds_violations: Tensor
    _layout: list[tuple[int, ...]]
    _frozen: bool = False
    """Whether `requires_grad_(False)` was called of the weights: nothing is updated."""

    def __init__(
        self,
        optimizer: Optimizer | None,
        pooling: Pooling,
        output_dtype: torch.dtype,
        bounds_check: BoundsCheck,
    ) -> None:
        super().__init__()
        self._lock = ModuleLock()  # for what changes more than the weights of a lookup's own rows
        self.optimizer = SGD(0.01) if optimizer is None else optimizer
        if not isinstance(self.optimizer, Optimizer):
            choices = ", ".join(cls.__name__ for cls in (*FUSED.values(), External))
            raise TypeError(
                f"optimizer must be an instance of one of emblib.optim's {choices}, e.g. "
                f"optim.SGD(lr=0.01), got {optimizer!r}"
            )
        self.pooling = Pooling(pooling)
        self.bounds_check = BoundsCheck(bounds_check)
        check_float_dtype("output_dtype", output_dtype)
        self.output_dtype = output_dtype

    def _register_common(self, device: torch.device) -> None:
        """The buffers every table has; the step and the learning rate are part of the state.

        `features` tells the kernels where the tables are. It is saved, so that a checkpoint of
        other tables is refused, but what it holds always comes from `_layout`.
        """
        features = torch.empty(len(self._layout), _FIELDS, dtype=torch.int64, device=device)
        self.register_buffer("features", features)
        self.register_buffer("hyper", self._initial_hyper().to(device))
        anchor = torch.zeros((), device=device, requires_grad=True)
        self.register_buffer("anchor", anchor, persistent=False)
        counts = torch.zeros(2, dtype=torch.int64, device=device)
        self.register_buffer("bounds_violations", counts, persistent=False)

    def _reset_common(self) -> None:
        self.hyper.copy_(self._initial_hyper())
        self._restore()

    def _initial_hyper(self) -> Tensor:
        """The optimizer's numbers before the first step, on the CPU."""
        return self.optimizer.hyper()

    def _own_parameters(self) -> None:
        """Be told of changes to the parameters that backward updates."""
        if lookups.is_fused(self.optimizer):
            for parameter in self.parameters(recurse=True):
                parameters.own(parameter, self, parameters.TableParameter)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; a parameter that backward updates is this module's from then on."""
        super().register_parameter(name, param)
        if param is not None and lookups.is_fused(self.optimizer):
            parameters.own(param, self, parameters.TableParameter)

    def set_trained(self, parameter: nn.Parameter, *, trained: bool) -> None:
        """Train the tables of a parameter from the next forward on, or leave them as they are."""
        self._frozen = not trained

    def _check_in_place(self, parameter: Any) -> None:
        """Raise RuntimeError where a wrapper has put memory of its own in the place of ours."""
        if parameters.is_replaced(parameter):
            raise RuntimeError(
                "the weights of a table with a fused optimizer were replaced, as fully_shard does: "
                "updates would go to a copy. Use emblib.sharding.DistributedModelParallel, with "
                'wrap="fully_shard" for the dense part, or give fully_shard the parameters of '
                "tables as ignored_params; write values with load_state_dict"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own_parameters()

    def _restore(self) -> None:
        """What follows from the construction alone, on the device where the table is now."""
        self._own_parameters()
        device = self.hyper.device
        layout = torch.tensor(self._layout, dtype=torch.int64).view(-1, _FIELDS)
        if self.features.device == device and self.anchor.requires_grad and self.anchor.is_leaf:
            self.features.copy_(layout)  # a captured CUDA graph knows it by its address
            return
        self.features = layout if device.type == "cpu" else layout.to(device)
        self.anchor = torch.zeros((), device=device, requires_grad=True)
        self.bounds_violations = torch.zeros(2, dtype=torch.int64, device=device)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        saved = state_dict.get(f"{prefix}features")
        error_messages: list[str] = arguments[-1]
        if saved is not None and saved.tolist() != [list(row) for row in self._layout]:
            error_messages.append(
                f"{prefix}features: the checkpoint is of other tables; its (weight_offset, "
                f"row_base, rows, dim, column, ...) by feature are {saved.tolist()[:4]}, this "
                f"module's are {self._layout[:4]}"
            )
            return
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        self._restore()

    @property
    def learning_rate(self) -> float:
        """Of the fused optimizer (reads the device)."""
        return float(self.hyper[0])

    @atomic
    def set_learning_rate(self, lr: float) -> None:
        """Takes effect from the next backward on; kernels read it from `hyper` on the device."""
        if not lookups.is_fused(self.optimizer):
            raise RuntimeError("optim.External has no learning rate; set that of your optimizer")
        check_learning_rate(lr)
        self.hyper[0].fill_(lr)  # a kernel's argument, where `hyper[0] = lr` may copy from the host

    @atomic
    def set_hyper(self, **changes: Any) -> None:
        """Change numbers of the optimizer: any fields of its dataclass, e.g. `eps=1e-6`.

        Takes effect from the next backward on; the step goes on, and so does a learning rate that
        is not among the changes. What kind of optimizer it is cannot change.

        Raises:
            TypeError: no such field.
            ValueError: a value out of range, or one that makes it another kind of optimizer.
        """
        if not lookups.is_fused(self.optimizer):
            raise RuntimeError("optim.External has no numbers; set those of your optimizer")
        rate = self.learning_rate
        changed = replace(self.optimizer, **{"lr": rate, **changes})
        if (changed.name, changed.states) != (self.optimizer.name, self.optimizer.states):
            raise ValueError(
                f"{changes} make another kind of optimizer, {changed.name} with the states "
                f"{[state.name for state in changed.states]}; make a new module and load the "
                "weights into it"
            )
        self.optimizer = changed
        values = self._initial_hyper()
        if isinstance(getattr(changed, "counter", None), Counter):
            values = values[:-1]  # the largest count is found out, not given
        # The step stays: another thread may be counting it.
        for numbers in (slice(0, 1), slice(2, len(values))):
            self.hyper[numbers].copy_(values[numbers])

    @property
    def step(self) -> int:
        """Number of updates so far (reads the device)."""
        return int(self.hyper[1])

    @atomic
    def set_step(self, step: int) -> None:
        """Continue counting from `step` (>= 0): what bias corrections and row counters see."""
        step = check_count("step", step, least=0)
        self.hyper[1].fill_(step)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        warn_of_dtype(fn, "precision=Precision(weights=...)")
        super()._apply(ops.keep_dtype(fn), recurse)
        self._restore()
        return self
