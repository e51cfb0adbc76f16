"""The memory of a module's tables, tier by tier.

The device tier is a parameter and buffers of the module, so it moves with the module. The host
tier stays in host memory wherever the module moves. While the module is on a GPU, that memory is
pinned, and its tensors are CUDA tensors over it (`mapped_memory`). The disk tier is files.
`lay_out` computes tiers, offsets and linear row ids; csrc/core/layout.h has the same columns.

`reserve` and `advise_growth` serve tables that grow: they get memory for their maximum number of
rows at once, and need no copy. On the CPU this is address space, whose pages read as zeros and take
no memory until they are first written. On other devices the memory is allocated in full.
"""

import contextlib
import mmap
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib import ops
from emblib.columns import FeatureRow, Tier
from emblib.optim import Optimizer
from emblib.specs import CacheConfig, Placement, Precision, TableSpec
from emblib.tables.disk import DiskStore
from emblib.tables.mapped_memory import map_pinned

STORED_TIERS = (Tier.DEVICE, Tier.HOST, Tier.DISK)
"""The tiers that tables are stored in, as opposed to the cache."""

_TIER_OF = {
    Placement.DEVICE: Tier.DEVICE,
    Placement.HOST: Tier.DEVICE,  # only for modules on the CPU, whose device is the host
    Placement.MANAGED: Tier.HOST,
    Placement.MANAGED_CACHING: Tier.HOST,
    Placement.DISK: Tier.DISK,
}
# Linear row ids ascend in this order: uncached rows of the device tier, then of the host tier, then
# cached rows of the host tier, then those on disk.
_PLACEMENT_ORDER = {
    Placement.DEVICE: 0,
    Placement.HOST: 0,
    Placement.MANAGED: 1,
    Placement.MANAGED_CACHING: 2,
    Placement.DISK: 3,
}


class TableOffset(NamedTuple):
    """The location of a table in its tier.

    Attributes:
        weight_offset: elements before the table in the weights of its tier.
        row_base: first linear row of the table; linear rows number the rows of all tables.
        rows, dim: shape of the table.
        tier: `emblib.columns.Tier` of the table.
        state_base: rows before the table in its tier.
        cache_stride: elements between rows of the cache; 0 if the table is not cached.
    """

    weight_offset: int
    row_base: int
    rows: int
    dim: int
    tier: int
    state_base: int
    cache_stride: int

    def feature(self, column: int) -> FeatureRow:
        """Return a row of the `features` tensor, for output columns from `column` on."""
        return FeatureRow(column=column, **self._asdict())


@dataclass(frozen=True)
class TableLayout:
    """The locations of the tables of a module, and the sizes of the tiers.

    Attributes:
        offsets: location of each table, in the order of the module.
        num_elements, num_rows: elements of weights, and rows, of each of `STORED_TIERS`.
        total_rows: rows of all tables.
        first_cached_row: first linear row of cached tables; DISK tables are cached, too.
        first_disk_row: first linear row of DISK tables.
        cache_stride: elements between the rows of the cache; 0 if nothing is cached.
    """

    offsets: tuple[TableOffset, ...]
    num_elements: tuple[int, ...]
    num_rows: tuple[int, ...]
    total_rows: int
    first_cached_row: int
    first_disk_row: int
    cache_stride: int

    @property
    def num_cached_rows(self) -> int:
        """Return the number of rows of all cached tables."""
        return self.total_rows - self.first_cached_row


def cache_stride(max_dim: int) -> int:
    """Return the elements per row of a cache of tables with at most `max_dim` columns.

    Rows begin at multiples of 4 elements: 16 bytes in float32, 8 bytes in dtypes of 16 bits.
    """
    return -(-max_dim // 4) * 4


def lay_out(tables: Sequence[TableSpec]) -> TableLayout:
    """Lay out all tables: one after the other in each tier, linear rows numbered by placement."""
    num_elements, num_rows = [0] * len(STORED_TIERS), [0] * len(STORED_TIERS)
    stride = cache_stride(max((spec.dim for spec in tables if spec.placement.cached), default=0))
    start_of_table: dict[int, tuple[int, int]] = {}
    for t, spec in enumerate(tables):
        tier = _TIER_OF[spec.placement]
        start_of_table[t] = num_elements[tier], num_rows[tier]
        num_elements[tier] += spec.rows * spec.dim
        num_rows[tier] += spec.rows
    offsets: dict[int, TableOffset] = {}
    row_base = 0
    first_row_of_order: dict[int, int] = {}  # by placement order
    for t in sorted(start_of_table, key=lambda t: _PLACEMENT_ORDER[tables[t].placement]):
        spec = tables[t]
        order = _PLACEMENT_ORDER[spec.placement]
        first_row_of_order.setdefault(order, row_base)
        weight_offset, state_base = start_of_table[t]
        offsets[t] = TableOffset(
            weight_offset=weight_offset,
            row_base=row_base,
            rows=spec.rows,
            dim=spec.dim,
            tier=int(_TIER_OF[spec.placement]),
            state_base=state_base,
            cache_stride=stride if spec.placement.cached else 0,
        )
        row_base += spec.rows
    first_disk_row = first_row_of_order.get(_PLACEMENT_ORDER[Placement.DISK], row_base)
    return TableLayout(
        offsets=tuple(offsets[t] for t in range(len(tables))),
        num_elements=tuple(num_elements),
        num_rows=tuple(num_rows),
        total_rows=row_base,
        first_cached_row=first_row_of_order.get(
            _PLACEMENT_ORDER[Placement.MANAGED_CACHING], first_disk_row
        ),
        first_disk_row=first_disk_row,
        cache_stride=stride,
    )


_NOT_ON_CUDA = {
    Placement.HOST: "a GPU does not read ordinary host memory; use MANAGED, which is pinned, or "
    "MANAGED_CACHING",
    Placement.DISK: "a GPU cannot read files in place; use MANAGED_CACHING",
}


class Memory:
    """Weights and optimizer states of the tables of a module, in all tiers.

    The module owns the tensors of the device tier and passes them to methods. This object owns the
    host tier and the store of the disk tier, which closes with it. The weights of a tier are flat,
    in `precision.weights`. A state is flat in `precision.states`, or float32 `[rows of the tier]`
    if it has one number per row.

    Args:
        tables: rows, dim and placement of each table.
        optimizer: optimizer whose states the rows have.
        precision: dtypes of weights and states.
        cache: options of the cache, which have the directory of DISK tables.
        device: device of the module.

    Attributes:
        layout: location of each table.

    Raises:
        ValueError: `device` does not have the placement of a table, or DISK tables have no
            directory. `DiskStore` lists more errors of DISK tables.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizer: Optimizer,
        precision: Precision,
        cache: CacheConfig,
        device: torch.device,
    ) -> None:
        self.tables = tuple(tables)
        self.states = optimizer.states
        self.precision = precision
        self.layout = lay_out(tables)
        tiers_in_use = [tier for tier in STORED_TIERS if self.layout.num_rows[tier]]
        # The cache follows the disk tier in the lists that ops take, so none may be left out then.
        last_tier = Tier.DISK if self.layout.cache_stride else max(tiers_in_use, default=0)
        # Not computed in `all_tiers`: torch 2.12 does not compile arithmetic of enums.
        self._tiers_after_device = range(Tier.DEVICE + 1, last_tier + 1)
        self.check_device(device)
        # On the CPU, pinned once a GPU uses it; on meta until the module has left it once.
        self._host_tensors: list[Tensor] | None = None
        self._mapped_tensors: list[Tensor] | None = None  # the same memory as tensors on a GPU
        self._disk: DiskStore | None = None
        self._stored_hyperparams: list[float] | None = None
        if self.layout.num_rows[Tier.HOST]:
            self._host_tensors = self._allocate_host(device)
        if self.layout.num_rows[Tier.DISK]:
            if cache.directory is None:
                raise ValueError(
                    "DISK tables need a directory to live in: pass cache=CacheConfig(directory=...)"
                )
            disk_tables = [spec for spec in tables if spec.placement is Placement.DISK]
            self._disk = DiskStore(
                cache.directory,
                disk_tables,
                precision.weights,
                self.states,
                precision.states,
                cache.verify,
            )
            if not self._disk.is_new:
                self._stored_hyperparams = list(self._disk.committed_numbers)

    def check_device(self, device: torch.device) -> None:
        """Raise ValueError if a table cannot be in its tier with the module on `device`."""
        for spec in self.tables:
            if device.type == "cuda" and spec.placement in _NOT_ON_CUDA:
                raise ValueError(
                    f"placement {spec.placement.value} is for modules on the CPU: "
                    f"{_NOT_ON_CUDA[spec.placement]}"
                )
            if device.type == "meta" and spec.placement is Placement.DISK:
                raise ValueError(
                    "DISK tables are files; a module on meta cannot have them: make it on the CPU, "
                    "or, to shard it, with another placement, and name DISK in the storage of the "
                    "plan (docs/placement.md)"
                )

    def _allocate(self, tier: int, device: torch.device, *, pinned: bool = False) -> list[Tensor]:
        """Allocate weights, then the optimizer states of a tier; their contents are undefined."""
        allocate = partial(torch.empty, pin_memory=True) if pinned else ops.empty_table
        num_elements, num_rows = self.layout.num_elements[tier], self.layout.num_rows[tier]
        tensors = [allocate((num_elements,), dtype=self.precision.weights, device=device)]
        for state in self.states:
            length = num_rows if state.per_row else num_elements
            dtype = torch.float32 if state.per_row else self.precision.states
            tensors.append(allocate((length,), dtype=dtype, device=device))
        return tensors

    def _allocate_host(self, device: torch.device) -> list[Tensor]:
        """Allocate the host tier of a module on `device`: pinned for a GPU, on meta for meta."""
        host = device if device.type == "meta" else torch.device("cpu")
        return self._allocate(Tier.HOST, host, pinned=device.type == "cuda")

    def allocate_device(self, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Allocate weights and states of the device tier."""
        weights, *states = self._allocate(Tier.DEVICE, device)
        return weights, states

    def move_host_tier(self, device: torch.device, *, is_shared: bool = False) -> None:
        """Make the host tier usable on `device`: pinned and mapped for a GPU.

        If another GPU has used it, the host waits for that GPU. `is_shared` moves it to memory that
        processes share; for a GPU it does nothing.
        """
        if self._host_tensors is None:
            return
        if self._mapped_tensors is not None and self._mapped_tensors[0].device != device:
            # Kernels may still use the memory.
            torch.cuda.synchronize(self._mapped_tensors[0].device)
            self._mapped_tensors = None
        for tensor in self._tensors_of_host_tier(device):
            if is_shared:
                tensor.share_memory_()

    def _tensors_of_host_tier(self, device: torch.device) -> list[Tensor]:
        """Return the tensors of the host tier for a module on `device`; pin and map for a GPU."""
        assert self._host_tensors is not None
        if self._host_tensors[0].is_meta and device.type != "meta":
            self._host_tensors = self._allocate_host(device)
        if device.type != "cuda":
            return self._host_tensors
        if self._mapped_tensors is None:
            self._host_tensors = [
                tensor if tensor.is_pinned() else tensor.pin_memory()
                for tensor in self._host_tensors
            ]
            self._mapped_tensors = [map_pinned(tensor, device) for tensor in self._host_tensors]
        return self._mapped_tensors

    def all_tiers(self, weights: Tensor, states: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return weights and states of all tiers but the cache, tier after tier.

        `weights` and `states` are the tensors of the device tier. Unused tiers have empty tensors;
        unused tiers at the end are omitted, unless the module has a cache.
        """
        all_weights, all_states = [weights.view(-1)], list(states)
        for tier in self._tiers_after_device:
            tensors = self._tensors_of_tier(tier, weights.device)
            all_weights.append(tensors[0])
            all_states.extend(tensors[1:])
        return all_weights, all_states

    def _tensors_of_tier(self, tier: int, device: torch.device) -> list[Tensor]:
        """Return weights and states of a tier for a module on `device`."""
        if tier == Tier.HOST and self._host_tensors is not None:
            return self._tensors_of_host_tier(device)
        if tier == Tier.DISK and self._disk is not None:
            return [self._disk.weights, *self._disk.states]
        return self._allocate_empty()

    def _allocate_empty(self) -> list[Tensor]:
        """Return weights and states without elements, with their dtypes, on the CPU."""
        state_dtypes = (
            torch.float32 if state.per_row else self.precision.states for state in self.states
        )
        dtypes = (self.precision.weights, *state_dtypes)
        return [torch.empty(0, dtype=dtype, device="cpu") for dtype in dtypes]

    def views(self, weights: Tensor, states: list[Tensor]) -> list[dict[str, Tensor]]:
        """Return the `view` of each table."""
        return [self.view(t, weights, states) for t in range(len(self.tables))]

    def view(self, table: int, weights: Tensor, states: list[Tensor]) -> dict[str, Tensor]:
        """Return `weight` `[R, D]` of a table and its states by name, `[R, D]` or `[R]`, as views.

        `weights` and `states` are the tensors of the device tier.
        """
        offset = self.layout.offsets[table]
        if offset.tier == Tier.DISK and self._disk is not None:
            tensors = self._disk.user_tensors
        elif offset.tier == Tier.DEVICE:
            tensors = [weights.view(-1), *states]
        else:
            tensors = self._tensors_of_tier(offset.tier, weights.device)
        shape = (offset.rows, offset.dim)
        elements = slice(offset.weight_offset, offset.weight_offset + offset.rows * offset.dim)
        rows = slice(offset.state_base, offset.state_base + offset.rows)
        views = {"weight": tensors[0][elements].view(shape)}
        for state, tensor in zip(self.states, tensors[1:], strict=True):
            views[state.name] = tensor[rows] if state.per_row else tensor[elements].view(shape)
        return views

    def verify(self) -> None:
        """Verify all pages on the disk, see `DiskStore.verify_all`; without a disk, do nothing."""
        if self._disk is not None:
            self._disk.verify_all()

    @property
    def disk(self) -> DiskStore | None:
        """Return the store of the DISK tables; None if there are none."""
        return self._disk

    def take_stored_hyperparams(self) -> list[float] | None:
        """Return the hyperparameters that a disk store had when it was opened, at the first call.

        None at later calls, without a disk store, and if the store had no commit.
        """
        hyperparams, self._stored_hyperparams = self._stored_hyperparams, None
        return hyperparams

    @contextlib.contextmanager
    def writing_everything(self, hyper: Tensor) -> Iterator[None]:
        """Allow overwriting whole tables in this context; commit the disk tier at its end.

        The commit stores `hyper`, the module's `hyperparams` (float64 `[n]`, see
        `emblib.columns.Hyper`) at that time, so that opening also restores learning rate and step.
        If the context raises, nothing is committed. Errors are those of `DiskStore.commit`.
        """
        if self._disk is None:
            yield
            return
        with self._disk.writing_everything():
            yield
        self._disk.commit(hyper.tolist())

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights` and of `optimizer_state` in the host and disk tiers."""
        disk_tensors = [] if self._disk is None else [self._disk.weights, *self._disk.states]
        tensors_of_tiers = [tensors for tensors in (self._host_tensors, disk_tensors) if tensors]
        return {
            "weights": sum(tensors[0].nbytes for tensors in tensors_of_tiers),
            "optimizer_state": sum(
                state.nbytes for tensors in tensors_of_tiers for state in tensors[1:]
            ),
        }

    def __deepcopy__(self, memo: dict[int, object]) -> "Memory":
        if self._disk is not None:
            raise RuntimeError(
                "a module with DISK tables cannot be copied: its files have one owner; save its "
                "state_dict and load it into a module with another directory"
            )
        copied = object.__new__(Memory)
        copied.__dict__ = dict(self.__dict__)
        if self._mapped_tensors is not None:
            copied._host_tensors = [
                torch.empty_like(tensor, device="cpu", pin_memory=True)
                for tensor in self._mapped_tensors
            ]
            copied._mapped_tensors = None
            copies = copied._tensors_of_host_tier(self._mapped_tensors[0].device)
            for copy, tensor in zip(copies, self._mapped_tensors, strict=True):
                copy.copy_(tensor)
        elif self._host_tensors is not None:
            copied._host_tensors = [tensor.clone() for tensor in self._host_tensors]
        return copied

    def __getstate__(self) -> dict[str, object]:
        if self._disk is not None:
            raise RuntimeError(
                "a module with DISK tables cannot be pickled: its files are its saved form; save "
                "its state_dict instead, or open the directory in the other process"
            )
        if self._mapped_tensors is not None:
            # Kernels may still write the rows.
            torch.cuda.synchronize(self._mapped_tensors[0].device)
        return {**self.__dict__, "_mapped_tensors": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self._host_tensors is not None:  # torch.load(map_location=...) moves every tensor
            self._host_tensors = [
                tensor if tensor.is_meta else tensor.cpu() for tensor in self._host_tensors
            ]


_HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of ARM with pages of 4 KiB
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # mmap's MAP_NORESERVE, of Linux


def reserve(
    numel: int, dtype: torch.dtype, device: torch.device, used_share: float = 0.0
) -> Tensor:
    """Return zeros `[numel]`; on the CPU, 2 MiB and more take memory only as they are written.

    Args:
        numel: number of elements.
        dtype: dtype of the tensor.
        device: device of the tensor.
        used_share: share of the elements that is used from the start. From 0.5 on, huge pages are
            requested for the whole tensor on the CPU: each table in it may be smaller than one.

    Raises:
        MemoryError: the system has no address space for such a tensor.
    """
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < _HUGE_PAGE_BYTES:
        return torch.zeros(numel, dtype=dtype, device=device)
    reserved_bytes = -(-nbytes // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        memory = mmap.mmap(-1, reserved_bytes + _HUGE_PAGE_BYTES, flags=flags)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"the system has no {nbytes} bytes of address space for a table: {error}; choose a "
            "smaller capacity"
        ) from error
    # Huge pages begin at multiples of their size.
    begin = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE_PAGE_BYTES
    if used_share >= 0.5:
        pages = torch.frombuffer(memory, dtype=torch.uint8, count=reserved_bytes, offset=begin)
        torch.ops.emblib.advise_huge_pages_(pages)
    return torch.frombuffer(memory, dtype=dtype, count=numel, offset=begin)


def advise_growth(tensor: Tensor, first_element: int, used_before: int, used_now: int) -> None:
    """Request huge pages for the part of a table that came into use, on the CPU.

    Nothing is requested while the table is smaller than a huge page, so that small tables stay
    small. Other devices are ignored.

    Args:
        tensor: result of `reserve`.
        first_element: first element of the table.
        used_before: number of elements of the table that were in use before.
        used_now: number of elements that are in use now.
    """
    if tensor.device.type != "cpu" or used_now <= used_before:
        return
    itemsize = tensor.element_size()
    begin_address = tensor.data_ptr() + first_element * itemsize
    used_end = begin_address + used_now * itemsize
    if (
        used_end // _HUGE_PAGE_BYTES == (begin_address + used_before * itemsize) // _HUGE_PAGE_BYTES
        or used_now * itemsize < _HUGE_PAGE_BYTES
    ):
        return
    # The page that the last row begins to fill is included.
    advised_end = min(
        -(-used_end // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, tensor.data_ptr() + tensor.nbytes
    )
    torch.ops.emblib.advise_huge_pages_(
        tensor[first_element : first_element + (advised_end - begin_address) // itemsize]
    )
