"""Routing and combining refuse what contradicts itself, and say how."""

from typing import Any

import pytest
import torch
from torch import Tensor

from emblib.ops import route
from tests.route_cases import COMBININGS, Case, make, make_pieces, some_rows


def test_wrong_segments_are_refused() -> None:
    values, starts, order = torch.zeros(5), torch.tensor([0, 2, 5]), torch.tensor([1, 0])
    for arguments, message in (
        ((values, starts, order, 4), "total must be the rows of all segments of order, 5, got 4"),
        ((values, starts, torch.tensor([2]), 0), r"order must name segments in \[0, 2\), got 2"),
        ((values, starts, torch.tensor([-1]), 0), "got -1"),
        ((values, torch.tensor([0, 6]), torch.tensor([0]), 6), r"is \[0, 6\)"),
        ((values, torch.tensor([3, 1]), torch.tensor([0]), -2), "must not be negative"),
        ((values, torch.tensor([3, 1]), torch.tensor([0]), 0), r"is \[3, 1\)"),
        ((values, starts.float(), order, 5), "starts must be int32 or int64"),
        ((values, starts, order.int(), 5), "order must be int64"),
        ((torch.tensor(1.0), starts, order, 5), "must have rows"),
        ((values, torch.zeros(0, dtype=torch.int64), order, 5), "one entry more"),
    ):
        with pytest.raises(RuntimeError, match=message):
            route.gather_segments(*arguments)


def _changed(tensor: Tensor, index: Any, value: int) -> Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


def test_wrong_routing_is_refused() -> None:
    problem = make(Case(bags=(5, 5), most_blocks=3, most_copies=1, seed=0))
    ids, offsets, routing, _ = problem
    first_bags, features, blocks, copies, units = routing
    for changed, message in (
        (routing._replace(first_bags=_changed(first_bags, 1, 11)), "first_bags must ascend"),
        (routing._replace(first_bags=_changed(first_bags, 2, 11)), "must lie in"),
        (routing._replace(features=_changed(features, (0, 1), 99)), "feature 0 must name blocks"),
        (routing._replace(features=_changed(features, (0, 3), 2)), "rule 0 or 1"),
        (routing._replace(blocks=_changed(blocks, (0, 0), 1)), "must begin at row 0"),
        (routing._replace(blocks=_changed(blocks, (1, 0), 51)), "ascend to at most 50"),
        (routing._replace(blocks=_changed(blocks, (0, 2), 99)), "block 0 must name copies"),
        (routing._replace(copies=_changed(copies, 0, int(copies[1]))), "once"),
        (routing._replace(units=_changed(units, 0, 1)), "must begin at bag 0"),
        (routing._replace(units=_changed(units, 1, 6)), "must have the 5 bags"),
        (routing._replace(units=units[:-1]), "each unit is named once in copies"),
        (routing._replace(features=features.view(-1)), "contiguous matrix of 4 numbers a row"),
        (routing._replace(copies=copies.int()), "copies must be int64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            route.route_lengths(ids, offsets, *changed)
    with pytest.raises(RuntimeError, match="from 0 to the number of ids"):
        route.route_lengths(ids, offsets[:-1], *routing)
    with pytest.raises(RuntimeError, match="ascend"):
        route.route_lengths(ids, _changed(offsets, 3, ids.numel() + 1), *routing)
    with pytest.raises(RuntimeError, match="num_bags must be the bags of all units"):
        route.route_lengths(ids, offsets, *routing, num_bags=1)
    with pytest.raises(RuntimeError, match="ids must be int32 or int64"):
        route.route_lengths(ids.float(), offsets, *routing)


def test_starts_of_other_ids_are_refused() -> None:
    problem = make(Case(bags=(50, 50), most_blocks=3, most_copies=1, seed=0))
    ids, offsets, routing, weights = problem
    starts = problem.starts
    total = int(starts[-1])
    middle = starts.clone()
    middle[starts.numel() // 2] = total
    wrong = torch.cat([starts[:-1].clamp(max=1), starts[-1:]])
    for bad in (middle, wrong):
        with pytest.raises(RuntimeError, match="starts are not the sums"):
            route.route_ids(ids, offsets, *routing, starts=bad, total=total)
    for bad in (starts[1:], starts + 1, starts[:-1]):
        with pytest.raises(RuntimeError, match="run from 0 to total"):
            route.route_ids(ids, offsets, *routing, starts=bad, total=total)
    with pytest.raises(RuntimeError, match="sample_weights must be float32"):
        route.route_ids(
            ids, offsets, *routing, starts=starts, total=total, weights=weights.double()
        )


def test_rows_that_a_piece_has_not_are_refused() -> None:
    problem, rows = some_rows(make_pieces(COMBININGS["means"]))
    source, targets, pieces, lengths, numel = problem
    rest = lengths, numel, torch.float32
    for wrong, message in [
        (rows[:-1], "entries that rows does not have"),
        (None, "entries that rows does not have"),
        (rows + source.numel(), "does not lie in the"),
        (rows.long(), "rows must be int32"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            route.combine(source, targets, pieces, *rest, wrong)


def test_wrong_pieces_are_refused() -> None:
    source, targets, pieces, lengths, numel = make_pieces(COMBININGS["means"])
    last = int(targets[:, 5].max()) - 1
    for arguments, message in (
        ((source, targets, pieces, None, numel), "divides by lengths"),
        ((source[:-1], targets, pieces, lengths, numel), "does not lie in the"),
        ((source, targets, pieces, lengths, numel + 1), "must cover the output"),
        ((source, _changed(targets, (0, 0), numel), pieces, lengths, numel), "target 0"),
        ((source, _changed(targets, (0, 2), -1), pieces, lengths, numel), "target 0"),
        ((source, _changed(targets, (0, 5), 99), pieces, lengths, numel), "must name pieces"),
        ((source, targets, _changed(pieces, (last, 0), -1), lengths, numel), f"piece {last}"),
        ((source, targets, _changed(pieces, (last, 1), 0), lengths, numel), f"piece {last}"),
        ((source.double(), targets, pieces, lengths, numel), "source must be float32"),
        ((source.view(1, -1), targets, pieces, lengths, numel), "must be flat"),
        ((source, targets[:, :6], pieces, lengths, numel), "matrix of 7 numbers a row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            route.combine(*arguments, torch.float32)
    with pytest.raises(RuntimeError, match="dtype must be float32"):
        route.combine(source, targets, pieces, lengths, numel, torch.float64)
    layout = targets, pieces, lengths
    with pytest.raises(RuntimeError, match="cover the output"):
        route.spread(torch.zeros(numel + 1), *layout, source.numel(), torch.float32)
