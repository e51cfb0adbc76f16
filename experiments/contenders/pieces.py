"""Tables in pieces on several ranks: what a check of them must gather, and what they weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.contenders.base import State, Task, fill_, touched
from experiments.work.workload import Batch


@dataclass(frozen=True)
class Piece:
    """Rows and columns of a table that this rank holds; `weights` is a view of its memory."""

    table: int
    first_row: int
    first_column: int
    weights: Tensor  # [rows, columns]
    copy: bool = False  # every rank holds the same: one of them speaks for all


def world() -> tuple[int, int]:
    """This rank, and how many there are."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def fill_pieces(pieces: Sequence[Piece]) -> None:
    """Noise; copies of a table get the same."""
    for piece in pieces:
        fill_(piece.weights, piece.table)


def touched_rows(batch: Batch, task: Task, pieces: Sequence[Piece]) -> State:
    """Copies of the rows of each table that `batch` touches, whole on every rank; a collective."""
    rank, size = world()
    rows = []
    for number, (ids, shape) in enumerate(zip(touched(batch, task), task.shapes, strict=True)):
        whole = torch.zeros(len(ids), shape.dim)
        for piece in (p for p in pieces if p.table == number):
            if piece.copy and rank:
                continue
            local = ids - piece.first_row
            here = (local >= 0) & (local < piece.weights.size(0))
            columns = slice(piece.first_column, piece.first_column + piece.weights.size(1))
            found = piece.weights.detach()[local[here].to(piece.weights.device)]
            whole[here, columns] = found.float().cpu()
        if size > 1:
            dist.all_reduce(whole)
        rows.append(whole)
    return rows


def over_ranks(nbytes: Mapping[str, int]) -> dict[str, int]:
    """The sum of what all ranks hold; a collective."""
    _, size = world()
    if size == 1:
        return dict(nbytes)
    total = torch.tensor(list(nbytes.values()), dtype=torch.int64)
    dist.all_reduce(total)
    return dict(zip(nbytes, total.tolist(), strict=True))
