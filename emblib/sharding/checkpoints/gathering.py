"""Whole tensors from the parts of all ranks, box after box, in pieces of bounded size."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from emblib.sharding.checkpoints import row_states
from emblib.sharding.checkpoints.sharded_table import (
    PIECE_BYTES,
    RowStates,
    ShardedTable,
    pieces_of,
)
from emblib.sharding.groups_of_ranks import Ranks


def gathered(table: ShardedTable, rank: int | None = None) -> Tensor:
    """The whole on the CPU, on `rank` or everywhere; the others get an empty tensor."""
    ranks = table.ranks
    target = 0 if rank is None else rank
    whole = torch.empty(table.size() if ranks.rank == target else (0,), dtype=table.dtype)
    for i, box in enumerate(table.boxes):
        if ranks.rank not in (target, box.rank):
            continue
        for offsets, sizes in pieces_of(box, table.dim(), table.element_size()):
            region = tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))
            if box.rank == ranks.rank:
                first = offsets[0] - box.rows[0]
                piece = table.parts[i][first : first + sizes[0]]
                if ranks.rank == target:
                    whole[region] = piece.cpu()
                else:
                    _send(piece, target, ranks)
            else:
                whole[region] = _received(sizes, table.dtype, box.rank, ranks)
    if rank is None and ranks.size > 1:
        return _told_to_all(whole, table, ranks)
    return whole


def whole_state(state: Any, ranks: Ranks, rank: int | None = 0) -> Any:
    """`state` with whole tensors, on the CPU, in place of those spread over ranks; a collective.

    States of one number a row are those of a table that is not cut by columns: see `row_states`.
    Ranks other than `rank` get what is not spread, and empty tensors.
    """
    if isinstance(state, ShardedTable):
        whole = state.full_tensor(rank)
        if isinstance(state, RowStates) and whole.numel():
            return row_states.averaged(whole, state.cuts, (0, state.cuts[-1]))
        return whole
    if isinstance(state, Mapping):
        return {key: whole_state(value, ranks, rank) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(whole_state(value, ranks, rank) for value in state)
    if not isinstance(state, Tensor):
        return state
    whole_of = getattr(state, "full_tensor", None)  # of a DTensor
    return (state if whole_of is None else whole_of()).detach().to("cpu", copy=True)


def _send(piece: Tensor, target: int, ranks: Ranks) -> None:
    dist.send(_as_bytes(piece.to(ranks.device)), ranks.global_rank(target), group=ranks.group)


def _received(sizes: tuple[int, ...], dtype: torch.dtype, source: int, ranks: Ranks) -> Tensor:
    piece = torch.empty(sizes, dtype=dtype, device=ranks.device)
    dist.recv(_as_bytes(piece), ranks.global_rank(source), group=ranks.group)
    return piece.cpu()


def _told_to_all(whole: Tensor, table: ShardedTable, ranks: Ranks) -> Tensor:
    if ranks.rank:
        whole = torch.empty(table.size(), dtype=table.dtype)
    step = max(PIECE_BYTES // max(whole[:1].numel() * whole.element_size(), 1), 1)
    for rows in whole.split(step):
        piece = rows.to(ranks.device)
        dist.broadcast(_as_bytes(piece), ranks.global_rank(0), group=ranks.group)
        rows.copy_(piece)
    return whole


def _as_bytes(tensor: Tensor) -> Tensor:
    """A view that every backend can send, whatever the dtype."""
    return tensor.contiguous().view(-1).view(torch.uint8)
