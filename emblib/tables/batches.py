"""Batches of table modules: the check of their indices and offsets, and the layout of their bags.

`check_bounds` checks a batch before an op reads it, `layout_of_bags` lays out the outputs of bags
if features differ in batch size, and the other functions accept the input forms of
`nn.EmbeddingBag`.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from emblib.ops import codes, tbe
from emblib.ops.one_call import native
from emblib.specs import BoundsCheck, Pooling
from emblib.tables.bounds_report import (
    BOUNDS_MESSAGE,
    first_violation,
    named_violation,
    negative_length,
    report_of,
)
from emblib.tables.parameters import caller_level
from emblib.tables.recomputation import is_repeated

_bounds_check_ = native(tbe.bounds_check_)


def check_tensor(name: str, value: object) -> None:
    """Raise TypeError for a value that is no tensor; `name` is the argument, for the message."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")


class ChecksBounds(Protocol):
    """Module whose batches `check_bounds` can check."""

    features: Tensor  # int64 `[F, 8]`, see `FeatureColumn`
    bounds_violations: Tensor  # int64 `[2]`, invalid indices and offsets so far
    bounds_check: BoundsCheck


def append_last_offset(indices: Tensor, offsets: Tensor) -> Tensor:
    """Append L to offsets `[bags]` in the form of `nn.EmbeddingBag`, which omits it.

    `indices` is `[L]`; the result is `[bags + 1]` in the dtype of `offsets`. TypeError if one of
    them is no tensor.
    """
    check_tensor("indices", indices)
    check_tensor("offsets", offsets)
    return torch.cat([offsets, offsets.new_full((1,), indices.numel())])


def bags_of_equal_length(
    indices: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return indices `[bags, N]` flat, with int64 offsets `[bags + 1]`, and the weights flat.

    Raises:
        TypeError: weights that are no tensor.
        ValueError: weights of another shape than `indices`, or `offsets` is not None.
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
    bags, length = indices.shape
    bag_offsets = torch.arange(bags + 1, device=indices.device) * length
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    return indices.reshape(-1), bag_offsets, weights


def check_bounds(
    module: ChecksBounds,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    bag_layout: Tensor | None = None,
    message: str = BOUNDS_MESSAGE,
    *,
    is_prefetch: bool = False,
) -> Tensor:
    """Return the offsets of a batch, repaired according to `module.bounds_check`.

    The host never waits for a GPU: on CUDA, WARNING warns later. Invalid indices stay as they are:
    kernels repair them as they read. Outside compiled graphs, a forward that checkpointing repeats
    counts violations once.

    Args:
        module: module whose `bounds_check` applies and whose `bounds_violations` count.
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[F * B + 1]`, or `[bags + 1]` with a `bag_layout`.
        features: int64 `[F, 8]`, see `FeatureColumn`.
        bag_layout: int64 `[bags, 2]`, see `VariableBatch`; None if all features have B bags.
        message: the warning, a format of the numbers `indices` and `offsets` and the text `where`.
        is_prefetch: whether violations are not counted: the lookup of the batch counts them,
            possibly on another stream at the same time.

    Returns:
        Tensor: the offsets themselves in mode NONE, else int32 in their shape.

    Raises:
        TypeError: indices or offsets that are no tensors.
        RuntimeError: the batch is not on the module's device. Except in mode NONE, the dtype or the
            number of offsets is wrong. In mode FATAL, something is out of bounds (on CUDA a device
            assert, see `BoundsCheck`). In mode WARNING on the CPU, offsets would skip ids or a bag,
            also in compiled graphs, or a length of a collection is negative.
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
    if device.type == "cuda" and is_eager(indices):
        is_counted = mode is BoundsCheck.WARNING and not is_prefetch and not is_repeated()
        code = "ignore" if mode is BoundsCheck.WARNING and not is_counted else mode.value
        repaired = _bounds_check_(
            indices,
            offsets,
            features,
            bag_layout,
            codes.BOUNDS_CHECK[code],
            module.bounds_violations,
        )
        if is_counted:
            report_of(module).add_check(module, message)
        return repaired
    arguments = indices, offsets, features, bag_layout, codes.BOUNDS_CHECK[mode.value]
    if mode is BoundsCheck.FATAL and not torch.compiler.is_compiling():
        try:
            return tbe.check_bounds(*arguments)[0]
        except RuntimeError as error:
            raise named_violation(module, error, offsets, bag_layout) from None
    repaired, violations = tbe.check_bounds(*arguments)
    if mode is not BoundsCheck.WARNING or is_prefetch:
        return repaired
    if isinstance(violations, FakeTensor):
        return repaired
    if torch.compiler.is_compiling():
        module.bounds_violations.add_(violations)
        return repaired
    if violations.is_cuda:  # not eager: a mode or transform of torch sees every op
        if not is_repeated():
            module.bounds_violations.add_(violations)
            report_of(module).add_check(module, message)
        return repaired
    bad_indices, bad_offsets = violations.tolist()
    negative = negative_length(module, offsets, bag_layout) if bad_offsets else None
    if negative is not None:
        raise negative
    if (bad_indices or bad_offsets) and not is_repeated():
        module.bounds_violations.add_(violations)
        location = first_violation(module, indices, repaired, features, bag_layout)
        text = message.format(indices=bad_indices, offsets=bad_offsets, where=location)
        warnings.warn(text, stacklevel=caller_level())
    return repaired


def is_eager(indices: Tensor) -> bool:
    """Return whether ops may be called past torch's dispatch of Python code.

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


class VariableBatch(NamedTuple):
    """Layout of a batch with unequal batch sizes per feature.

    Attributes:
        bag_layout: int64 `[bags, 2]`, per bag its feature and the first element of its output.
        output_numel: elements of the output.
    """

    bag_layout: Tensor
    output_numel: int


def variable_batch(
    batch_sizes: Sequence[Sequence[int]], dims: Sequence[int], num_bags: int, device: torch.device
) -> VariableBatch:
    """Make the layout of FBGEMM's variable batch embeddings.

    Bags are ordered by feature, then by rank: `batch_sizes[f][r]` bags of feature f from rank r.
    The output is one vector, ordered by rank, then by feature, then by bag, `dims[f]` elements per
    bag.

    Args:
        batch_sizes: `[F][ranks]` numbers of bags.
        dims: `[F]` elements per bag.
        num_bags: the sum of `batch_sizes`.
        device: device of the layout.

    Raises:
        TypeError: sizes that are no ints, or not in lists.
        ValueError: not one list per feature, lists of different lengths, a negative size, or sizes
            that do not add up to `num_bags`.
    """
    if not all(hasattr(sizes, "__len__") for sizes in batch_sizes):
        raise TypeError(f"batch_sizes must be one list of ints per feature, got {batch_sizes}")
    if len(batch_sizes) != len(dims):
        raise ValueError(
            f"batch_sizes must have one list per feature = {len(dims)}, got {len(batch_sizes)}"
        )
    ranks = {len(sizes) for sizes in batch_sizes}
    if len(ranks) > 1:
        raise ValueError(
            f"batch_sizes must have the same number of ranks for every feature, got {sorted(ranks)}"
        )
    sizes = [size for row in batch_sizes for size in row]
    total = sum(sizes)
    if isinstance(total, float):  # true if one of them is
        raise TypeError(f"batch_sizes must be ints, got {batch_sizes}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"batch_sizes must be >= 0, got {min(sizes)}")
    if total != num_bags:
        raise ValueError(
            f"batch_sizes add up to {total} bags, but offsets has {num_bags} + 1 entries"
        )
    # Python numbers up to here, so that a compiled graph accepts other sizes without recompilation.
    output_numel = sum(dim * sum(row) for dim, row in zip(dims, batch_sizes, strict=True))
    bags_of_block = torch.tensor(
        sizes, dtype=torch.int64, device="cpu"
    )  # a block: feature f from rank r
    dim = torch.tensor(list(dims), dtype=torch.int64, device="cpu").unsqueeze(1)
    shape = (len(dims), max(ranks, default=0))
    elements = (bags_of_block.view(shape) * dim).t().reshape(-1)  # rank-major, as in the output
    # First element of each block, [F, ranks].
    starts = (elements.cumsum(0) - elements).view(shape[::-1]).t()
    first_bag = bags_of_block.cumsum(0) - bags_of_block
    # Bag i of a block with its first element at s and its first bag at b is at s + (i - b) * dim.
    dim_of_block = dim.expand(shape).reshape(-1)
    base = starts.reshape(-1) - first_bag * dim_of_block
    feature = torch.arange(shape[0], device="cpu").repeat_interleave(shape[1])
    columns_of_block = torch.stack([feature, base, dim_of_block], dim=1)
    columns_of_bag = columns_of_block.repeat_interleave(bags_of_block, dim=0, output_size=num_bags)
    feature_of_bag, base_of_bag, dim_of_bag = columns_of_bag.unbind(1)
    element_of_bag = base_of_bag + torch.arange(num_bags, device="cpu") * dim_of_bag
    layout = torch.stack([feature_of_bag, element_of_bag], dim=1)
    return VariableBatch(layout.to(device, non_blocking=True), output_numel)


def layout_of_bags(
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
        batch_sizes: `[F][ranks]` numbers of bags. None, if all features have B bags, returns None
            for the layout.
        device: device of the layout.

    Raises:
        TypeError, ValueError: batch sizes that do not fit, see `variable_batch`.
    """
    output_dim = max(dims, default=0) if pooling is Pooling.NONE else sum(dims)
    if batch_sizes is None:
        return None, output_dim
    num_bags = max(offsets.numel() - 1, 0)
    bag_layout, output_numel = variable_batch(batch_sizes, dims, num_bags, device)
    return bag_layout, output_dim if pooling is Pooling.NONE else output_numel
