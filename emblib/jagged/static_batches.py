"""Static tensors for batches whose number of ids varies, as CUDA graphs need them.

`BatchLayout` has what all batches share: keys, shapes, dtypes, plain values. Only the number of
values of a jagged tensor may vary. A `StaticBatch` has buffers for any batch of a layout with at
most `bound` ids per jagged tensor. The ids of a batch are at the end of the buffer, with padding
before them: -1 for ids, 0 for weights and values that are not integers. The first offset is the
number of padding entries. All kernels ignore ids before the first offset.

`StaticBatch.fill` does not wait for the device, unless the host is `MAX_STAGING_BLOCKS` batches
ahead. For a GPU, tensors on the host are written into a block of pinned memory and copied from
there, in one copy if the whole batch is on the host. `StagingRing` reuses a block once its copy has
ended. The caller must not use one of these objects in several threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from emblib.jagged.jagged_tensor import JaggedTensor
from emblib.jagged.keyed_jagged_tensor import KeyedJaggedTensor

PADDING_ID = -1
ALIGNMENT_BYTES = 256  # alignment of tensors in a buffer, as in GPU allocations
MAX_STAGING_BLOCKS = 8  # batches that the host may be ahead of their copies; not measured

_PLAIN_TYPES = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, Enum)


_MUST_MATCH = (
    "a batch must differ from the first one in the number of ids only (use run_eagerly for an odd "
    "one, e.g. the last, or reset() before others): "
)


class BatchPart(NamedTuple):
    """One static tensor: its leaf, its kind, its dtype, and its shape without the number of ids."""

    leaf_index: int  # in the flattened batch
    kind: str  # "values", "weights", "offsets" or "dense"
    shape: tuple[int, ...]  # of values and weights without the first dimension
    dtype: torch.dtype

    @property
    def is_padded(self) -> bool:
        """Return whether the first dimension is the bound, which `shape` leaves out."""
        return self.kind in {"values", "weights"}

    def shape_with(self, bound: int) -> tuple[int, ...]:
        """Return the shape of the static tensor for `bound` ids."""
        return (bound, *self.shape) if self.is_padded else self.shape


class _FixedPart(NamedTuple):
    """The part of a leaf that all batches share.

    Attributes:
        kind: "KeyedJaggedTensor", "JaggedTensor", "tensor", or "value" for a plain value.
        value: (keys, stride) of a keyed jagged tensor; a plain value itself; None for the others.
    """

    kind: str
    value: Any


class BatchLayout:
    """The tree of a batch, and everything about each leaf except the number of ids.

    Attributes:
        tree: the pytree of the batch, in which jagged tensors are leaves.
        parts: the static tensors, leaf after leaf.
        fixed_parts: parts that all batches share, one per leaf.
    """

    def __init__(self, tree: Any, leaves: Sequence[Any]) -> None:
        self.tree = tree
        self.parts: list[BatchPart] = []
        self.fixed_parts: list[_FixedPart] = []
        for leaf_index, leaf in enumerate(leaves):
            self.fixed_parts.append(_fixed_part_of(leaf, leaf_index))
            if isinstance(leaf, KeyedJaggedTensor | JaggedTensor):
                values, weights = leaf.values(), leaf.weights_or_none()
                self.parts.append(
                    BatchPart(leaf_index, "values", tuple(values.shape[1:]), values.dtype)
                )
                if weights is not None:
                    shape = tuple(weights.shape[1:])
                    self.parts.append(BatchPart(leaf_index, "weights", shape, weights.dtype))
                count, dtype = _num_offsets(leaf)
                self.parts.append(BatchPart(leaf_index, "offsets", (count,), dtype))
            elif isinstance(leaf, Tensor):
                self.parts.append(BatchPart(leaf_index, "dense", tuple(leaf.shape), leaf.dtype))

    @classmethod
    def of(cls, batch: Any) -> tuple[BatchLayout, list[Any]]:
        """Return the layout and the leaves of a batch.

        Raises:
            TypeError: a leaf is neither a tensor, a jagged tensor nor a plain value.
            ValueError: the features of a jagged tensor differ in their bags, or a tensor is not
                dense or requires a gradient.
        """
        leaves, tree = pytree.tree_flatten(batch, is_leaf=_is_jagged)
        return cls(tree, leaves), leaves

    def check(self, other: BatchLayout) -> None:
        """Raise ValueError unless another batch has this layout."""
        if self.tree != other.tree:
            raise ValueError(f"{_MUST_MATCH}it is {other.tree}, the first one was {self.tree}")
        if self.parts != other.parts or self.fixed_parts != other.fixed_parts:
            other_entries: dict[int, list[Any]] = {}
            entries: dict[int, list[Any]] = {}
            for entries_of_leaf, layout in ((entries, self), (other_entries, other)):
                for leaf_index, fixed_part in enumerate(layout.fixed_parts):
                    entries_of_leaf[leaf_index] = [fixed_part]
                for part in layout.parts:
                    entries_of_leaf[part.leaf_index].append(
                        f"{part.kind} {list(part.shape)} {part.dtype}"
                    )
            leaf_index = next(i for i in entries if entries[i] != other_entries[i])
            raise ValueError(
                f"{_MUST_MATCH}leaf {leaf_index} has {other_entries[leaf_index]}, that of the "
                f"first one {entries[leaf_index]}"
            )

    def device_of(self, leaves: Sequence[Any]) -> torch.device:
        """Return the device of the batch's first tensor; raise ValueError without tensors."""
        for part in self.parts:
            return _tensor_of(leaves[part.leaf_index], part.kind).device
        raise ValueError("a batch must have a tensor, got none")

    def check_devices(self, leaves: Sequence[Any], device: torch.device) -> None:
        """Raise ValueError for tensors that are neither on the CPU nor on `device`."""
        for part in self.parts:
            leaf_device = _values_of(leaves[part.leaf_index]).device
            if leaf_device.type != "cpu" and leaf_device != device:
                raise ValueError(
                    f"a batch must be on the host or on {device}, the device of this CapturedStep, "
                    f"got a tensor on {leaf_device}: move it, or pass device={str(leaf_device)!r}"
                )

    def num_ids(self, leaves: Sequence[Any]) -> int:
        """Return the largest number of ids of a jagged tensor; 0 without jagged tensors."""
        return max((leaf.values().size(0) for leaf in leaves if _is_jagged(leaf)), default=0)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Return the tree with these leaves."""
        return pytree.tree_unflatten(list(leaves), self.tree)

    def move(self, leaves: Sequence[Any], device: torch.device) -> Any:
        """Return the tree of `leaves` with its tensors on the device.

        Copies are `non_blocking`: the host does not wait if its tensors are in pinned memory.
        """
        return self.unflatten(
            [
                leaf.to(device, non_blocking=True) if _is_jagged(leaf) or _is_tensor(leaf) else leaf
                for leaf in leaves
            ]
        )


class StaticBatch:
    """Static tensors on a device for any batch of a layout with at most `bound` ids.

    They are views of one buffer, which this object owns. They begin as zeros.

    Args:
        layout: layout of the batches.
        bound: maximum number of ids per jagged tensor.
        device: device of the static tensors.
    """

    def __init__(self, layout: BatchLayout, bound: int, device: torch.device) -> None:
        self._layout, self._bound = layout, bound
        shapes = [part.shape_with(bound) for part in layout.parts]
        byte_sizes = [
            torch.Size(shape).numel() * part.dtype.itemsize
            for shape, part in zip(shapes, layout.parts, strict=True)
        ]
        byte_offsets = [0]
        for size in byte_sizes:
            byte_offsets.append(byte_offsets[-1] + -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        self._byte_ranges = [
            (begin, begin + size) for begin, size in zip(byte_offsets, byte_sizes, strict=False)
        ]
        self._shapes = shapes
        self._buffer = torch.zeros(byte_offsets[-1], dtype=torch.uint8, device=device)
        self._tensors = self._views(self._buffer)
        self._staging = StagingRing(byte_offsets[-1]) if device.type == "cuda" else None

    def _views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors of the batch as views of its memory, uint8 `[n]`."""
        return [
            memory[begin:end].view(part.dtype).view(shape)
            for (begin, end), part, shape in zip(
                self._byte_ranges, self._layout.parts, self._shapes, strict=True
            )
        ]

    def batch(self) -> Any:
        """Return a new batch of the static tensors; it has cached no numbers on the host yet."""
        tensors_by_leaf: dict[int, dict[str, Tensor]] = {}
        for part, tensor in zip(self._layout.parts, self._tensors, strict=True):
            tensors_by_leaf.setdefault(part.leaf_index, {})[part.kind] = tensor
        leaves: list[Any] = []
        for leaf_index, fixed_part in enumerate(self._layout.fixed_parts):
            tensors = tensors_by_leaf.get(leaf_index, {})
            if "dense" in tensors:
                leaves.append(tensors["dense"])
            elif "values" in tensors:
                leaves.append(_make_jagged(fixed_part, tensors))
            else:
                leaves.append(fixed_part.value)
        return self._layout.unflatten(leaves)

    def fill(self, leaves: Sequence[Any]) -> None:
        """Copy a batch into the static tensors, on the current stream.

        The host waits only if it is `MAX_STAGING_BLOCKS` batches ahead of the copies. `leaves` must
        be those of a batch with the layout and at most `bound` ids per jagged tensor, on the host
        or on the device; the caller must check this (`BatchLayout.check`, `num_ids`).
        """
        sources = [_tensor_of(leaves[part.leaf_index], part.kind) for part in self._layout.parts]
        num_paddings = [
            self._bound - _values_of(leaves[part.leaf_index]).size(0) if part.kind != "dense" else 0
            for part in self._layout.parts
        ]
        host_parts = [i for i, source in enumerate(sources) if source.is_cpu]
        if self._staging is None or not host_parts:
            targets = self._tensors
        else:
            block = self._staging.acquire()
            staging_views, targets = self._views(block), list(self._tensors)
            for i in host_parts:
                targets[i] = staging_views[i]
        for i, part in enumerate(self._layout.parts):
            _write(targets[i], sources[i], part.kind, num_paddings[i])
        if self._staging is None or not host_parts:
            return
        if len(host_parts) == len(sources):
            self._buffer.copy_(block, non_blocking=True)
        else:
            for i in host_parts:
                self._tensors[i].copy_(targets[i], non_blocking=True)
        self._staging.release(block)


class StagingRing:
    """Blocks of `nbytes` of pinned memory; a block is reused once the copy from it has ended.

    Only the copy of the block that was released first is examined. So all copies should be on one
    stream, where they end in the order of `release`.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._blocks: list[tuple[Tensor, Any]] = []  # in the order of their copies

    def acquire(self) -> Tensor:
        """Return a block, uint8 `[nbytes]`, that no copy reads any more.

        Allocates a block if all are being read; if these are `MAX_STAGING_BLOCKS`, waits for the
        oldest copy instead.
        """
        if self._blocks:
            memory, event = self._blocks[0]
            is_free = event.query()
            if is_free or len(self._blocks) >= MAX_STAGING_BLOCKS:
                if not is_free:
                    event.synchronize()
                del self._blocks[0]
                return memory
        return torch.empty(self._nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")

    def release(self, memory: Tensor) -> None:
        """Release a block; it is reused after the copy on the current stream has ended."""
        event = torch.cuda.Event()
        event.record()
        self._blocks.append((memory, event))


def _fixed_part_of(leaf: Any, leaf_index: int) -> _FixedPart:
    """Return the part of a leaf that all batches share.

    Raises:
        TypeError: a leaf has another type, which may contain tensors that a graph would not see.
        ValueError: a leaf has no fixed shape, or requires a gradient.
    """
    if _is_jagged(leaf):
        for tensor in (leaf.values(), leaf.weights_or_none()):
            if tensor is not None:
                _refuse_gradient(tensor, leaf_index)
    if isinstance(leaf, KeyedJaggedTensor):
        if leaf.variable_stride_per_key() or leaf.inverse_indices_or_none() is not None:
            raise ValueError(
                "a KeyedJaggedTensor whose features differ in their bags has no fixed shape, so "
                "its step cannot be captured: use one without stride_per_key_per_rank and "
                "inverse_indices"
            )
        return _FixedPart("KeyedJaggedTensor", (tuple(leaf.keys()), leaf.stride()))
    if isinstance(leaf, JaggedTensor):
        return _FixedPart("JaggedTensor", None)
    if not isinstance(leaf, Tensor):
        if not isinstance(leaf, _PLAIN_TYPES):
            raise TypeError(
                f"leaf {leaf_index} of a batch must be a tensor, a KeyedJaggedTensor, a "
                "JaggedTensor or a plain value, in lists, tuples and dicts, got "
                f"{type(leaf).__name__}"
            )
        return _FixedPart("value", leaf)
    if leaf.layout is not torch.strided or leaf.is_nested:
        raise ValueError(
            f"leaf {leaf_index} of a batch must be a dense tensor, got one of layout "
            f"{leaf.layout}; pass jagged data as a KeyedJaggedTensor or JaggedTensor"
        )
    _refuse_gradient(leaf, leaf_index)
    return _FixedPart("tensor", None)


def _refuse_gradient(tensor: Tensor, leaf_index: int) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"leaf {leaf_index} of a batch requires a gradient, which would be that of a static "
            "copy: detach it, or make it a parameter of the model"
        )


def _make_jagged(
    fixed_part: _FixedPart, tensors: dict[str, Tensor]
) -> KeyedJaggedTensor | JaggedTensor:
    """Construct a jagged tensor from its static tensors, by the `kind` of their parts."""
    values, weights, offsets = tensors["values"], tensors.get("weights"), tensors["offsets"]
    if fixed_part.kind == "JaggedTensor":
        return JaggedTensor.from_valid(values, weights, None, offsets)
    keys, stride = fixed_part.value
    return KeyedJaggedTensor.from_valid(list(keys), values, weights, None, offsets, stride)


def _is_jagged(leaf: Any) -> bool:
    return isinstance(leaf, KeyedJaggedTensor | JaggedTensor)


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, Tensor)


def _values_of(leaf: Any) -> Tensor:
    values: Tensor = leaf.values() if _is_jagged(leaf) else leaf
    return values


def _tensor_of(leaf: Any, kind: str) -> Tensor:
    """Return a tensor of a leaf by its kind."""
    if kind == "offsets":
        offsets: Tensor = leaf.offsets()
        return offsets
    weights: Tensor | None = leaf.weights_or_none() if kind == "weights" else None
    return _values_of(leaf) if weights is None else weights


def _num_offsets(leaf: KeyedJaggedTensor | JaggedTensor) -> tuple[int, torch.dtype]:
    """Return number and dtype of the offsets without computing them."""
    offsets = leaf.offsets_or_none()
    if offsets is not None:
        return offsets.numel(), offsets.dtype
    lengths = leaf.lengths()
    return lengths.numel() + 1, lengths.dtype


def _write(target: Tensor, source: Tensor, kind: str, num_padding: int) -> None:
    """Write a tensor of a batch after `num_padding` padding values; add `num_padding` to offsets.

    A dense tensor has no padding. The host does not wait for a device.
    """
    source = source.detach()
    if kind == "dense":
        target.copy_(source, non_blocking=True)
    elif kind == "offsets":
        torch.add(source, num_padding, out=target)
    else:
        is_id = kind == "values" and not target.dtype.is_floating_point
        target[:num_padding].fill_(PADDING_ID if is_id else 0)
        target[num_padding:].copy_(source, non_blocking=True)
