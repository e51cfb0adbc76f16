"""Modules of torch: `nn.EmbeddingBag` and `nn.Embedding`, and the drop-in modules for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer as TorchOptimizer

from emblib import optim
from emblib.attribute_errors import shows_attribute_errors
from emblib.grad_mode import in_grad_mode
from emblib.jagged.padding import drop_padding_from_bags
from emblib.migration.base import (
    Bags,
    MigratedTable,
    NotMigrated,
    Replaced,
    TorchWeight,
    Trained,
    TrainingMemory,
    chosen_rows,
    optimizer_for,
)
from emblib.ops import autograd
from emblib.optim import Optimizer
from emblib.specs import BoundsCheck, Pooling, Precision, TableSpec
from emblib.tables import TableBatchedEmbeddingBags
from emblib.tables.batches import is_eager

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_TORCH_ATTRIBUTES = (
    "num_embeddings",
    "embedding_dim",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_UNKNOWN_ID = -2  # outside every table; -1 would be skipped
_POOLING = {"sum": Pooling.SUM, "mean": Pooling.MEAN}


def refuse_skipped_ids(ids: Tensor, make_error: Callable[[], Exception | None]) -> Tensor:
    """Return ids whose bounds check fails for -1 too: torch has no id that is skipped.

    Where the host can read the ids without a wait, an error is raised at once. Elsewhere -1 becomes
    an id that the bounds check refuses.

    Args:
        ids: integers of any shape.
        make_error: function that returns the error, called if an id is -1; it returns None if no
            table looks up such an id.

    Raises:
        Exception: the error that `make_error` returned.
    """
    is_skipped = ids == -1
    if ids.device.type != "cpu" or not is_eager(ids):
        return ids.masked_fill(is_skipped, _UNKNOWN_ID)
    error = make_error() if is_skipped.any() else None
    if error is not None:
        raise error
    return ids


class _DropIn(nn.Module):
    """A table of emblib that takes the calls of a module of torch.

    Unknown ids raise, on a GPU as a failed device assert, as in torch; `table.bounds_check` has the
    other reactions.

    Args:
        source: the module, whose attributes are copied, but not its rows.
        optimizer: optimizer that backward applies; None for none.

    Attributes:
        table: module with the one table.
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None

    def __init__(self, source: nn.EmbeddingBag | nn.Embedding, optimizer: Optimizer | None) -> None:
        super().__init__()
        pooling = Pooling.NONE
        if isinstance(source, nn.EmbeddingBag):
            pooling = _POOLING[source.mode]
        for name in _TORCH_ATTRIBUTES:
            setattr(self, name, getattr(source, name))
        self.table = TableBatchedEmbeddingBags(
            [TableSpec(source.num_embeddings, source.embedding_dim)],
            optimizer,
            pooling=pooling,
            precision=Precision(weights=source.weight.dtype, output=source.weight.dtype),
            bounds_check=BoundsCheck.FATAL,
            device=source.weight.device,
        )
        self.train(source.training)

    def _refuse_skipped_ids(self, ids: Tensor) -> Tensor:
        """Return ids whose check fails for -1 too, in mode FATAL; see `refuse_skipped_ids`.

        Raises:
            RuntimeError: an id is -1, and the host can read the ids without a wait.
        """
        if self.table.bounds_check is not BoundsCheck.FATAL:
            return ids

        def make_error() -> RuntimeError:
            position = int((ids == -1).nonzero()[0])
            return RuntimeError(
                f"index {position} is -1, ids must be in [0, {self.num_embeddings}): padding_idx "
                "or weights exclude ids from a sum; other modes of table.bounds_check skip -1"
            )

        return refuse_skipped_ids(ids, make_error)

    @property
    @shows_attribute_errors
    def weight(self) -> Tensor:
        """Return a view of the rows, `[num_embeddings, embedding_dim]`; detached if fused."""
        if autograd.updates_in_backward(self.table.optimizer):
            return self.table.table_weights()[0]
        return self.table.weights.view(self.num_embeddings, self.embedding_dim)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise AttributeError(
                "weight is a view of the table and cannot be replaced: write the rows with "
                "weight.data.copy_(rows)"
            )
        super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load a state dict of this module, or of the module of torch that it replaced.

        The latter has rows alone; optimizer states then stay as they are.
        """
        rows = state_dict.pop(f"{prefix}weight", None)
        if rows is not None:
            state_dict.update(self.table.state_dict(prefix=f"{prefix}table."))
            state_dict[f"{prefix}table.table_0.weight"] = rows
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Return rows and columns."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class MigratedEmbeddingBag(_DropIn):
    """A table of emblib with the interface of the `nn.EmbeddingBag` that it replaces."""

    def __init__(self, source: nn.EmbeddingBag, optimizer: Optimizer | None) -> None:
        super().__init__(source, optimizer)
        self.mode = source.mode
        self.include_last_offset = source.include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Pool each bag to `[B, embedding_dim]`.

        Args:
            input: int32 or int64 ids: `[B, N]`, bags of N, or `[L]` with `offsets`.
            offsets: `[B]`, or `[B + 1]` with `include_last_offset`: where the bags start.
            per_sample_weights: weights of the shape of `input`, only for the mode "sum".

        Raises:
            ValueError: there are `offsets` and the ids have two dimensions, or there are none and
                they have one; or the weights have another shape than the ids.
            NotImplementedError: there are `per_sample_weights` in another mode than "sum", as in
                `nn.EmbeddingBag`.
            RuntimeError: an id is outside the table, or offsets do not fit, on the CPU.
        """
        if per_sample_weights is not None and self.mode != "sum":
            raise NotImplementedError(
                f'per_sample_weights are for mode="sum", as in nn.EmbeddingBag, got {self.mode!r}'
            )
        if per_sample_weights is not None and per_sample_weights.shape != input.shape:
            raise ValueError(
                "per_sample_weights must have the shape of the ids, got "
                f"{tuple(per_sample_weights.shape)} and {tuple(input.shape)}"
            )
        if (input.dim() == 2) is (offsets is not None):
            raise ValueError(
                "ids must be [B, N] without offsets or [L] with them, got ids of shape "
                f"{tuple(input.shape)} and {'no ' * (offsets is None)}offsets"
            )
        if offsets is None:
            num_bags, bag_size = input.shape
            offsets = torch.arange(num_bags + 1, device=input.device, dtype=input.dtype) * bag_size
            input = input.flatten()
            if per_sample_weights is not None:
                per_sample_weights = per_sample_weights.flatten()
        elif not self.include_last_offset:
            offsets = nn.functional.pad(offsets, (0, 1), value=input.numel())
        if per_sample_weights is not None:
            per_sample_weights = per_sample_weights.float()
        input = self._refuse_skipped_ids(input)
        if self.padding_idx is not None:
            input, offsets, per_sample_weights = drop_padding_from_bags(
                input, offsets, self.padding_idx, per_sample_weights
            )
        output: Tensor = self.table(input, offsets, per_sample_weights)
        return output


class MigratedEmbedding(_DropIn):
    """A table of emblib with the interface of the `nn.Embedding` that it replaces."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vector of each id, `[*, embedding_dim]`; ids are int32 or int64 `[*]`.

        The vector of `padding_idx` is zeros.

        Raises:
            RuntimeError: an id is outside the table, on the CPU.
        """
        ids = self._refuse_skipped_ids(input.flatten())
        if self.padding_idx is not None:  # whose row is zeros and is not trained
            ids = ids.masked_fill(ids == self.padding_idx, -1)  # keeps the dtype, which is checked
        offsets = torch.arange(2, device=ids.device, dtype=ids.dtype) * ids.numel()
        output: Tensor = self.table(ids, offsets)
        return output.view(*input.shape, self.embedding_dim)


class ReplacedEmbedding(Replaced):
    """An `nn.EmbeddingBag` or `nn.Embedding`; `new` is a drop-in with one table."""

    def __init__(
        self,
        paths: Sequence[str],
        old: nn.EmbeddingBag | nn.Embedding,
        optimizers: Sequence[TorchOptimizer],
        table_optimizer: Optimizer | None,
    ) -> None:
        _check_replaceable(old)
        weight: Any = old.weight
        self.weight = TorchWeight(weight, Trained.of(optimizers, weight), old.sparse)
        fused_optimizer, self.note = optimizer_for(self.weight.trained, weight, table_optimizer)
        if fused_optimizer is None and old.sparse:
            fused_optimizer = optim.External()  # leaves a sparse gradient, as the old module did
        if isinstance(old, nn.EmbeddingBag):
            super().__init__(paths, old, MigratedEmbeddingBag(old, fused_optimizer))
        else:
            super().__init__(paths, old, MigratedEmbedding(old, fused_optimizer))

    @property
    def _table(self) -> MigratedTable:
        table = self.new.table
        states = table.table_optimizer_states()[0]
        return MigratedTable(table.table_weights()[0], states, table, table.weights)

    @property
    def memory(self) -> tuple[TrainingMemory, TrainingMemory]:
        """Return the bytes in training before and after."""
        before = self.weight.memory
        return before, self._table.memory if self.is_fused else before

    @property
    def optimizers(self) -> list[Optimizer]:
        """Return the optimizer of the table if backward applies it, else an empty list."""
        return [self.new.table.optimizer] if self._table.is_fused else []

    @property
    def is_trained(self) -> bool:
        """Return whether an optimizer of torch trained the weight before the migration."""
        return self.weight.trained is not None and self.old.weight.requires_grad

    @property
    def measured_nbytes(self) -> int:
        """Return the bytes of the table by its `nbytes()`."""
        return sum(self.new.table.nbytes().values())

    def carry_over(self) -> None:
        """Copy rows and optimizer states."""
        self.weight.carry_over(self._table)

    def replace_in_optimizers(self) -> None:
        """Replace the weight in torch's parameter group."""
        self.weight.replace_in_optimizer(self._table)

    def carry_back(self) -> None:
        """Copy rows and optimizer states back, and restore the weight in torch's group."""
        self.weight.carry_back(self._table)

    def sample(self, max_rows: int | None, seed: int) -> tuple[nn.Module, list[TorchOptimizer]]:
        """Return a copy of the module of torch, and its optimizer if one trained the weight.

        With `max_rows` a padding row is the first one, so there may be `max_rows + 1`.
        """
        old, table = self.old, self._table
        rows = chosen_rows(old.num_embeddings, max_rows, seed)
        if max_rows is not None and old.padding_idx is not None:
            rows = torch.cat(
                [torch.tensor([old.padding_idx], device="cpu"), rows[rows != old.padding_idx]]
            )
        rows = rows.to(old.weight.device)
        padding = None if old.padding_idx is None else int((rows == old.padding_idx).nonzero()[0])
        options: dict[str, Any] = {"padding_idx": padding, "sparse": old.sparse}
        if isinstance(old, nn.EmbeddingBag):
            options["mode"] = old.mode
        module = type(old)(
            len(rows), old.embedding_dim, dtype=old.weight.dtype, device=rows.device, **options
        )
        in_grad_mode(module.weight.copy_, enabled=False)(table.rows[rows])
        if not self.is_trained or self.weight.trained is None:
            return module, []
        optimizer = self.weight.trained.make_copy([module.weight])
        state = self.weight.state_of(table, rows)
        if state:
            optimizer.state[module.weight] = state
        return module, [optimizer]

    def features(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the one feature, which has the names of the module."""
        return [(self.paths, 0)]

    def call(self, module: Any, bags: Sequence[Bags]) -> Tensor:
        """Look up the bags, or the ids."""
        ids, lengths = bags[0]
        is_bag = isinstance(self.old, nn.EmbeddingBag)
        output: Tensor = module(ids, lengths.cumsum(0) - lengths) if is_bag else module(ids)
        return output

    def rows(self, module: Any) -> list[Tensor]:
        """Return the rows of the old or the new module, as one tensor `[rows, dim]`."""
        return [module.weight.detach()]


def _check_replaceable(module: Any) -> None:
    """Raise NotMigrated for a module that has no counterpart."""
    if type(module) not in (nn.EmbeddingBag, nn.Embedding):
        raise NotMigrated(f"{type(module).__name__} is a subclass, whose code would be lost")
    if isinstance(module, nn.EmbeddingBag) and module.mode not in _POOLING:
        raise NotMigrated(f'mode="{module.mode}" has no counterpart: emblib pools by sum or mean')
    if module.max_norm is not None:
        raise NotMigrated("max_norm has no counterpart")
    if module.scale_grad_by_freq:
        raise NotMigrated("scale_grad_by_freq has no counterpart")
    check_weight(module.weight)
    is_padded = isinstance(module, nn.Embedding) and module.padding_idx is not None
    if is_padded and module.weight[module.padding_idx].count_nonzero():
        raise NotMigrated("its padding row is not zeros, which emblib returns for padding")


def check_weight(weight: Tensor) -> None:
    """Raise NotMigrated for a dtype that emblib does not support."""
    if weight.dtype not in DTYPES:
        raise NotMigrated(
            f"it has rows of {weight.dtype}; emblib has float32, float16 and bfloat16"
        )
