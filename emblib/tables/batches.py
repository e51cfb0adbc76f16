"""Checks and layouts of the batches of table modules.

`check_bounds` checks indices and repairs offsets before an op reads them. `make_variable_layout`
and `lay_out_bags` compute where the output of each bag begins if features differ in batch size.
`append_last_offset` and `flatten_equal_bags` convert the input forms of `nn.EmbeddingBag`.
`is_eager` tells whether an op may be called without torch's Python dispatch.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, SupportsIndex

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from emblib.ops import codes, tbe
from emblib.ops.one_call import c_function
from emblib.specs import BoundsCheck, Pooling
from emblib.tables.bounds_report import (
    BOUNDS_MESSAGE,
    describe_first_violation,
    error_with_names,
    negative_length_error,
    report_of,
)
from emblib.tables.parameters import caller_level
from emblib.tables.recomputation import is_recomputation

_bounds_check_ = c_function(tbe.bounds_check_)


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError unless `value` is a tensor; `name` names the argument in the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


class BoundsCheckedModule(Protocol):
    """A module whose batches `check_bounds` can check."""

    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`
    bounds_violations: Tensor  # int64 `[2]`, numbers of invalid indices and offsets so far
    bounds_check: BoundsCheck


def append_last_offset(indices: Tensor, offsets: Tensor) -> Tensor:
    """Append L to offsets `[bags]` in the form of `nn.EmbeddingBag`, which omits it.

    `indices` is `[L]`; the result is `[bags + 1]` in the dtype of `offsets`.

    Raises:
        TypeError: `indices` or `offsets` is not a tensor.
    """
    check_tensor("indices", indices)
    check_tensor("offsets", offsets)
    return torch.cat([offsets, offsets.new_full((1,), indices.numel())])


def flatten_equal_bags(
    indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Flatten 2-dimensional indices `[bags, N]`, each row of which is a bag.

    `per_sample_weights` is None or has the shape of `indices`.

    Returns:
        indices `[bags * N]`; int64 offsets `[bags + 1]` on their device; the flat weights, or None.

    Raises:
        TypeError: the weights are not a tensor.
        ValueError: the weights and `indices` differ in shape, or `offsets` is not None.
    """
    if per_sample_weights is not None:
        check_tensor("per_sample_weights", per_sample_weights)
        if per_sample_weights.shape != indices.shape:
            raise ValueError(
                "per_sample_weights must have the shape of 2-dimensional indices, "
                f"{tuple(indices.shape)}, got {tuple(per_sample_weights.shape)}"
            )
    if offsets is not None:
        raise ValueError(
            "2-dimensional indices are bags of equal length and take no offsets; flatten "
            "them, or leave offsets out"
        )
    num_bags, bag_length = indices.shape
    bag_offsets = torch.arange(num_bags + 1, device=indices.device) * bag_length
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    return indices.reshape(-1), bag_offsets, weights


def missing_offsets_error(indices: Tensor) -> ValueError:
    """Return the error for indices without offsets that are not 2-dimensional."""
    return ValueError(
        "indices [L] need offsets, which say where each bag begins, and only indices [B, N] have "
        f"none, got {tuple(indices.shape)}"
    )


def check_bounds(
    module: BoundsCheckedModule,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    bag_layout: Tensor | None = None,
    message: str = BOUNDS_MESSAGE,
    *,
    counts_violations: bool = True,
) -> Tensor:
    """Return the offsets of a batch, repaired according to `module.bounds_check`.

    The host never waits for a GPU: on CUDA, the warning of mode WARNING comes with a later check.
    Invalid indices are not changed here; kernels repair them when they read them. When activation
    checkpointing repeats a forward, violations are not counted again, except in compiled graphs.
    Tensors without values (on meta, or fake) are not checked.

    Args:
        module: module that looks up; it supplies the mode, `bounds_check`, and the counters,
            `bounds_violations`.
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[F * B + 1]`, or `[bags + 1]` with a `bag_layout`.
        features: int64 `[F, 8]` of the batch, see `FeatureColumn`: `module.features`, a part of it,
            or features that read tables of another module.
        bag_layout: int64 `[bags, 2]`, see `VariableBatchLayout`; None if all features have B bags.
        message: format string of the warning, with the fields `{indices}` and `{offsets}`, numbers
            of violations, and `{where}`, a phrase that locates them or is empty.
        counts_violations: whether violations are counted and warned of. A prefetch passes False,
            because the lookup of its batch counts them, possibly at the same time on another
            stream.

    Returns:
        Tensor: the offsets themselves in mode NONE, else int32 in their shape.

    Raises:
        TypeError: `indices` or `offsets` is not a tensor.
        RuntimeError: `indices` or `offsets` is on another device than the module. Except in mode
            NONE: a dtype or the number of offsets is wrong. In mode FATAL: an index or offset is
            invalid (on CUDA a device assert, see `BoundsCheck`). In mode WARNING on the CPU:
            offsets would skip indices or omit a bag. In mode WARNING on the CPU, unless violations
            are not counted or the graph is compiled: a length of a collection is negative.
    """
    device = module.features.device
    check_tensor("indices", indices)
    check_tensor("offsets", offsets)
    if indices.device != device or offsets.device != device:
        raise RuntimeError(
            f"indices and offsets must be on the device of the table, {device}, "
            f"got {indices.device} and {offsets.device}; move them with .to(device)"
        )
    mode = module.bounds_check
    if mode is BoundsCheck.NONE:
        return offsets
    batch = _Batch(indices, offsets, features, bag_layout)
    if device.type == "cuda" and is_eager(indices):
        return _check_eager_on_gpu(module, batch, message, counts_violations=counts_violations)
    if mode is BoundsCheck.FATAL and not torch.compiler.is_compiling():
        return _check_or_raise(module, batch)
    # WARNING or IGNORE; or FATAL in a compiled graph, where the op raises without names.
    repaired_offsets, violations = tbe.check_bounds(*batch, codes.BOUNDS_CHECK[mode.value])
    if mode is BoundsCheck.WARNING and counts_violations:
        _count_violations(module, violations, batch, repaired_offsets, message)
    return repaired_offsets


class _Batch(NamedTuple):
    """The first arguments of the ops that check bounds; see `check_bounds`."""

    indices: Tensor
    offsets: Tensor
    features: Tensor
    bag_layout: Tensor | None


def _check_eager_on_gpu(
    module: BoundsCheckedModule, batch: _Batch, message: str, *, counts_violations: bool
) -> Tensor:
    """Check a batch on a GPU by one op, which also counts; return the repaired offsets.

    In mode WARNING, a later check warns of what this one counts.
    """
    mode = module.bounds_check
    is_counted = mode is BoundsCheck.WARNING and counts_violations and not is_recomputation()
    if mode is BoundsCheck.WARNING and not is_counted:
        mode = BoundsCheck.IGNORE
    repaired_offsets = _bounds_check_(
        *batch, codes.BOUNDS_CHECK[mode.value], module.bounds_violations
    )
    if is_counted:
        report_of(module).add_check(module, message)
    return repaired_offsets


def _check_or_raise(module: BoundsCheckedModule, batch: _Batch) -> Tensor:
    """Check a batch in mode FATAL; return the offsets, or raise an error that names the feature."""
    try:
        return tbe.check_bounds(*batch, codes.BOUNDS_CHECK[BoundsCheck.FATAL.value])[0]
    except RuntimeError as error:
        raise error_with_names(module, error, batch.offsets, batch.bag_layout) from None


def _count_violations(
    module: BoundsCheckedModule,
    violations: Tensor,
    batch: _Batch,
    repaired_offsets: Tensor,
    message: str,
) -> None:
    """Count the violations of a batch, int64 `[2]`, in mode WARNING, and warn of them.

    `repaired_offsets` are the repaired offsets of the batch.
    """
    if isinstance(violations, FakeTensor) or violations.is_meta:  # a shape without numbers
        return
    if torch.compiler.is_compiling():  # a compiled graph counts, and cannot warn
        module.bounds_violations.add_(violations)
        return
    if violations.is_cuda:  # here if a mode or transform of torch must see every op, see `is_eager`
        if not is_recomputation():
            module.bounds_violations.add_(violations)
            report_of(module).add_check(module, message)
        return
    num_indices, num_offsets = violations.tolist()
    if num_offsets:
        length_error = negative_length_error(module, batch.offsets, batch.bag_layout)
        if length_error is not None:
            raise length_error
    if (num_indices or num_offsets) and not is_recomputation():
        module.bounds_violations.add_(violations)
        location = describe_first_violation(
            module, batch.indices, repaired_offsets, batch.features, batch.bag_layout
        )
        warning = message.format(indices=num_indices, offsets=num_offsets, where=location)
        warnings.warn(warning, stacklevel=caller_level())


def is_eager(indices: Tensor) -> bool:
    """Return whether ops may be called directly, without torch's Python dispatch.

    False if `indices` is of a subclass of Tensor, or if a compiler, mode or transform of torch is
    active, which must see every op.
    """
    return (
        not torch.compiler.is_compiling()
        and type(indices) is Tensor
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._is_tracing()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class VariableBatchLayout(NamedTuple):
    """Layout of a batch with unequal batch sizes per feature.

    Attributes:
        bag_layout: int64 `[bags, 2]`, per bag its feature and the first element of its output.
        output_numel: elements of the output.
    """

    bag_layout: Tensor
    output_numel: int


def make_variable_layout(
    batch_sizes: Sequence[Sequence[int]], dims: Sequence[int], num_bags: int, device: torch.device
) -> VariableBatchLayout:
    """Compute the output layout of FBGEMM's variable batch embeddings (VBE).

    Bags are ordered by feature, then by rank: `batch_sizes[f][r]` bags of feature f from rank r.
    The output is one vector, ordered by rank, then by feature, then by bag, `dims[f]` elements per
    bag.

    Args:
        batch_sizes: `[F][ranks]` numbers of bags.
        dims: `[F]` elements per bag.
        num_bags: the sum of `batch_sizes`.
        device: device of the layout.

    Raises:
        TypeError: `batch_sizes` is not a list of lists, or a size is not an int.
        ValueError: there is not one list per feature, the lists differ in length, a size is
            negative, or the sizes do not add up to `num_bags`.
    """
    _check_batch_sizes(batch_sizes, len(dims), num_bags)
    # Of Python numbers, so that a compiled graph accepts other sizes without recompilation.
    output_numel = sum(
        dim_of_feature * sum(sizes) for dim_of_feature, sizes in zip(dims, batch_sizes, strict=True)
    )
    # A block is the bags of feature f from rank r.
    sizes = [size for sizes_of_feature in batch_sizes for size in sizes_of_feature]
    num_bags_of_block = torch.tensor(sizes, dtype=torch.int64, device="cpu")
    dim_of_feature = torch.tensor(list(dims), dtype=torch.int64, device="cpu").unsqueeze(1)
    shape = (len(dims), len(batch_sizes[0]) if len(batch_sizes) else 0)
    elements_of_block = (
        (num_bags_of_block.view(shape) * dim_of_feature).t().reshape(-1)
    )  # rank-major, as the output
    # First element of each block, [F, ranks].
    first_elements = (elements_of_block.cumsum(0) - elements_of_block).view(shape[::-1]).t()
    first_bag_of_block = num_bags_of_block.cumsum(0) - num_bags_of_block
    # If a block's first bag is b and its first element is s, bag i begins at s + (i - b) * dim.
    dim_of_block = dim_of_feature.expand(shape).reshape(-1)
    base_of_block = first_elements.reshape(-1) - first_bag_of_block * dim_of_block
    feature_of_block = torch.arange(shape[0], device="cpu").repeat_interleave(shape[1])
    columns_of_block = torch.stack([feature_of_block, base_of_block, dim_of_block], dim=1)
    columns_of_bag = columns_of_block.repeat_interleave(
        num_bags_of_block, dim=0, output_size=num_bags
    )
    feature_of_bag, base_of_bag, dim_of_bag = columns_of_bag.unbind(1)
    element_of_bag = base_of_bag + torch.arange(num_bags, device="cpu") * dim_of_bag
    bag_layout = torch.stack([feature_of_bag, element_of_bag], dim=1)
    return VariableBatchLayout(bag_layout.to(device, non_blocking=True), output_numel)


def _check_batch_sizes(
    batch_sizes: Sequence[Sequence[int]], num_features: int, num_bags: int
) -> None:
    """Raise the errors of `make_variable_layout`."""
    has_lists = hasattr(batch_sizes, "__len__") and all(
        hasattr(sizes, "__len__") for sizes in batch_sizes
    )
    if not has_lists:
        raise TypeError(f"batch_sizes must be one list of ints per feature, got {batch_sizes}")
    if len(batch_sizes) != num_features:
        raise ValueError(
            f"batch_sizes must have one list per feature = {num_features}, got {len(batch_sizes)}"
        )
    rank_counts = {len(sizes) for sizes in batch_sizes}
    if len(rank_counts) > 1:
        raise ValueError(
            "batch_sizes must have the same number of ranks for every feature, got "
            f"{sorted(rank_counts)}"
        )
    sizes = [size for sizes_of_feature in batch_sizes for size in sizes_of_feature]
    try:
        total_bags: Any = sum(sizes)
    except TypeError:  # e.g. of strings
        total_bags = math.nan
    if not isinstance(total_bags, int) and _is_floating_point(
        total_bags
    ):  # one float makes the sum one
        raise TypeError(f"batch_sizes must be ints, got {batch_sizes}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"batch_sizes must be >= 0, got {min(sizes)}")
    if total_bags != num_bags:
        raise ValueError(
            f"batch_sizes add up to {total_bags} bags, but offsets has {num_bags} + 1 entries"
        )


def _is_floating_point(number: object) -> bool:
    """Return whether a number, or tensor of one number, cannot be an index by its type."""
    if isinstance(number, Tensor):
        return number.is_floating_point()
    return not isinstance(number, SupportsIndex)


def lay_out_bags(
    pooling: Pooling,
    dims: Sequence[int],
    offsets: Tensor,
    batch_sizes: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> tuple[Tensor | None, int]:
    """Return `bag_layout` and `output_dim` of a batch, as in `autograd.Lookup`.

    Args:
        pooling: pooling of all features.
        dims: `[F]` columns of the table of each feature, all equal for NONE.
        offsets: `[bags + 1]`; only its shape is read.
        batch_sizes: `[F][ranks]` numbers of bags; None if all features have B bags. Then the layout
            is None.
        device: device of the layout.

    Raises:
        TypeError, ValueError: the batch sizes do not fit, see `make_variable_layout`.
    """
    output_dim = max(dims, default=0) if pooling is Pooling.NONE else sum(dims)
    if batch_sizes is None:
        return None, output_dim
    num_bags = max(offsets.numel() - 1, 0)
    bag_layout, output_numel = make_variable_layout(batch_sizes, dims, num_bags, device)
    return bag_layout, output_dim if pooling is Pooling.NONE else output_numel
