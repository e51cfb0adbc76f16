"""Routing ids and combining pooled rows: kernels against the reference, on every device."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from emblib.dynamic import keys as saving
from emblib.ops import route
from emblib.ops.route import Routing
from emblib.reference import route as reference
from tests.route_cases import (
    CASES,
    COMBININGS,
    Case,
    Combining,
    Problem,
    local_parts,
    make,
    make_pieces,
    some_rows,
    without,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ops = torch.ops.emblib


def _on(device: torch.device, problem: Problem) -> Problem:
    ids, offsets, routing, weights = problem
    moved = Routing(*(t.to(device) for t in routing))
    return Problem(ids.to(device), offsets.to(device), moved, weights.to(device))


def _check(problem: Problem, device: torch.device) -> None:
    ids, offsets, routing, weights = problem
    lengths = reference.route_lengths(ids, offsets, *routing)
    routed, positions, carried = reference.route_ids(ids, offsets, *routing, weights=weights)
    on = _on(device, problem)
    found = route.route_lengths(on.ids, on.offsets, *on.routing)
    assert_close(found.cpu(), lengths, rtol=0, atol=0)
    starts, total = problem.starts.to(device), routed.numel()
    for given_weights, want in ((None, None), (on.weights, carried)):
        out = route.route_ids(
            on.ids, on.offsets, *on.routing, starts=starts, total=total, weights=given_weights
        )
        assert_close(out[0].cpu(), routed, rtol=0, atol=0)
        assert_close(out[1].cpu(), positions, rtol=0, atol=0)
        if want is None:
            assert out[2] is None
        else:
            assert out[2] is not None
            assert_close(out[2].cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_routes_as_the_reference(device: torch.device, name: str) -> None:
    _check(make(CASES[name]), device)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_equal_blocks_and_a_larger_last_one(device: torch.device, dtype: torch.dtype) -> None:
    num_blocks, size, rows = 14, 2, 100
    routing = Routing(
        first_bags=torch.tensor([0, 1]),
        features=torch.tensor([[0, num_blocks, rows, 0]]),
        blocks=torch.tensor([[k * size, k, 1] for k in range(num_blocks)]),
        copies=torch.arange(num_blocks),
        units=torch.arange(num_blocks + 1),
    )
    ids = torch.arange(rows, dtype=dtype)
    _check(Problem(ids, torch.tensor([0, rows]), routing, torch.ones(rows)), device)


@settings(max_examples=60, deadline=None)
@given(
    bags=st.lists(st.integers(0, 12), max_size=5),
    most_blocks=st.integers(1, 16),
    longest=st.integers(0, 30),
    rows=st.integers(0, 40),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    rule=st.sampled_from(["by_key", "spread", "uneven"]),
    seed=st.integers(0, 1 << 30),
)
def test_any_layout(bags: list[int], dtype: torch.dtype, rule: str, **rest: Any) -> None:
    case = Case(bags=tuple(bags), id_dtype=dtype, broken=True, **{rule: True}, **rest)
    _check(make(case), torch.device("cpu"))


def test_same_ids_on_any_number_of_threads(thread_counts: list[int]) -> None:
    problem = make(Case(bags=(900, 1, 2000), longest=40, most_copies=1, seed=4, broken=True))
    for threads in thread_counts:
        torch.set_num_threads(threads)
        _check(problem, torch.device("cpu"))


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 1000])
def test_keys_go_where_checkpoints_have_them(device: torch.device, num_blocks: int) -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (500,))
    keys[:3] = torch.tensor([-(2**63), -1, 2**63 - 1])
    routing = Routing(
        first_bags=torch.tensor([0, 1]),
        features=torch.tensor([[0, num_blocks, 0, 1]]),
        blocks=torch.tensor([[0, k, 1] for k in range(num_blocks)]),
        copies=torch.arange(num_blocks),
        units=torch.arange(num_blocks + 1),
    )
    moved = Routing(*(t.to(device) for t in routing))
    offsets = torch.tensor([0, keys.numel()], device=device)
    lengths = route.route_lengths(keys.to(device), offsets, *moved)
    owners = saving.owner(keys, num_blocks)
    assert lengths.cpu().tolist() == torch.bincount(owners, minlength=num_blocks).tolist()
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    _, positions, _ = route.route_ids(
        keys.to(device), offsets, *moved, starts=starts, total=keys.numel()
    )
    assert torch.equal(owners[positions.cpu()], owners.sort().values)


def test_gradient_of_weights() -> None:
    problem = make(replace(CASES["broken ids"], seed=20))
    ids, offsets, routing, weights = problem
    leaf = weights.clone().requires_grad_()
    total = int(problem.starts[-1])
    _, positions, carried = route.route_ids(
        ids, offsets, *routing, starts=problem.starts, total=total, weights=leaf
    )
    assert carried is not None
    factors = torch.arange(1.0, total + 1)
    (carried * factors).sum().backward()
    want = torch.zeros_like(weights).index_add_(0, positions, factors)
    assert leaf.grad is not None
    assert_close(leaf.grad, want)
    assert not positions.requires_grad


# Segments


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 5)])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather_segments(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], index: torch.dtype
) -> None:
    values = torch.randint(0, 100, (40, *shape)).to(dtype)
    starts = torch.tensor([0, 7, 7, 8, 30, 40], dtype=index)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 2], [1], [], [3, 3, 3]):
        segments = torch.tensor(order, dtype=torch.int64)
        total = int((starts[1:] - starts[:-1])[segments].sum())
        want = reference.gather_segments(values, starts, segments, total)
        moved = values.to(device), starts.to(device), segments.to(device)
        assert torch.equal(route.gather_segments(*moved, total).cpu(), want)


def test_gather_segments_of_a_view_and_on_threads(thread_counts: list[int]) -> None:
    values = torch.randn(2, 90_001).t()
    starts = torch.tensor([0, 5, 70_000, 90_001])
    order = torch.tensor([2, 1, 0, 1])
    want = reference.gather_segments(values, starts, order, 90_001 + 69_995)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        assert torch.equal(route.gather_segments(values, starts, order, want.size(0)), want)


def test_gather_segments_adds_gradients_up() -> None:
    values = torch.randn(9, 2, dtype=torch.float64, requires_grad=True)
    starts, order = torch.tensor([0, 3, 4, 9]), torch.tensor([2, 0, 2])

    def gather(leaf: Tensor) -> Tensor:
        return route.gather_segments(leaf, starts, order, 13)

    assert torch.autograd.gradcheck(gather, values)


# Combining


def _moved(device: torch.device, tensors: tuple[Any, ...]) -> list[Any]:
    return [t.to(device) if isinstance(t, Tensor) else t for t in tensors]


@pytest.mark.parametrize("name", COMBININGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_combine_and_spread(
    device: torch.device, name: str, dtype: torch.dtype, out: torch.dtype
) -> None:
    problem = make_pieces(COMBININGS[name], dtype)
    source, targets, pieces, lengths, numel = problem
    on = _moved(device, problem)
    result = route.combine(*on, out)
    assert_close(result.cpu(), reference.combine(*problem, out), rtol=0, atol=0)
    grad = torch.randn(numel).to(out)
    layout = targets, pieces, lengths
    back = route.combine_backward(grad.to(device), *on[1:4], source.numel(), dtype)
    want = reference.combine_backward(grad, *layout, source.numel(), dtype)
    assert_close(back.cpu(), want, rtol=0, atol=0)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 30), min_size=1, max_size=3),
    widths=st.lists(st.integers(0, 90), max_size=6),
    most_pieces=st.integers(1, 5),
    gap=st.integers(0, 2),
    seed=st.integers(0, 1 << 30),
)
def test_any_pieces(rows: list[int], widths: list[int], **rest: int) -> None:
    case = Combining(rows=tuple(rows), widths=tuple(widths), means=True, **rest)
    problem = make_pieces(case)
    want = reference.combine(*problem, torch.float32)
    assert_close(route.combine(*problem, torch.float32), want, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(3000,), (2000, 1, 3000)])
def test_same_sums_on_any_number_of_threads(
    rows: tuple[int, ...], thread_counts: list[int]
) -> None:
    problem = make_pieces(Combining(rows=rows, widths=(33, 8, 64), means=True))
    want = reference.combine(*problem, torch.float32)
    source, *layout, numel = problem
    grad = torch.randn(numel)
    back = reference.combine_backward(grad, *layout, source.numel(), torch.float32)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        assert torch.equal(route.combine(*problem, torch.float32), want)
        assert torch.equal(
            route.combine_backward(grad, *layout, source.numel(), torch.float32), back
        )


def test_neighbours_in_order_are_one_copy() -> None:
    """Columns of one source in the order of the output: merged, and still the same."""
    targets = torch.tensor([[0, 6, 4, 2, 0, 1, -1], [2, 6, 4, 3, 1, 2, -1], [5, 6, 4, 1, 2, 3, -1]])
    pieces = torch.tensor([[1, 7, -1], [3, 7, -1], [6, 7, -1]])
    source = torch.arange(28.0)
    out = route.combine(source, targets, pieces, None, 24, torch.float32)
    assert torch.equal(out.view(4, 6), source.view(4, 7)[:, 1:])
    back = route.combine_backward(out, targets, pieces, None, 28, torch.float32)
    assert torch.equal(back.view(4, 7)[:, 1:], source.view(4, 7)[:, 1:])
    assert not back.view(4, 7)[:, 0].any()


@pytest.mark.parametrize("name", ["sums", "means", "gaps", "own numbers of rows"])
def test_each_is_the_gradient_of_the_other(name: str) -> None:
    source, targets, pieces, lengths, numel = make_pieces(COMBININGS[name])
    source.requires_grad_()
    factors = torch.randn(numel, requires_grad=True)
    out = route.combine(source, targets, pieces, lengths, numel, torch.float32)
    (grad,) = torch.autograd.grad(out, source, factors, create_graph=True)
    want = reference.combine_backward(
        factors.detach(), targets, pieces, lengths, source.numel(), torch.float32
    )
    assert torch.equal(grad.detach(), want)
    (again,) = torch.autograd.grad(grad, factors, source.detach())
    assert torch.equal(again, out.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", COMBININGS)
def test_pieces_of_some_rows(name: str, dtype: torch.dtype, device: torch.device) -> None:
    problem, rows = some_rows(make_pieces(COMBININGS[name], dtype))
    source, targets, pieces, lengths, numel = _moved(device, problem)
    layout, rows = (targets, pieces, lengths), rows.to(device)
    got = route.combine(source, *layout, numel, torch.float32, rows, 0.25)
    want = reference.combine(*problem, torch.float32, rows.cpu(), 0.25)
    assert_close(got.cpu(), want, rtol=0, atol=0)
    back = route.combine_backward(got, *layout, source.numel(), dtype, rows, 0.25)
    size = source.numel()
    layout = problem.targets, problem.pieces, problem.lengths
    want = reference.combine_backward(got.cpu(), *layout, size, dtype, rows.cpu(), 0.25)
    assert_close(back.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("has_rows", [False, True])
@pytest.mark.parametrize("name", COMBININGS)
def test_a_part_of_the_source_in_its_own_tensor(
    name: str, has_rows: bool, device: torch.device
) -> None:
    problem, rows = make_pieces(COMBININGS[name]), None
    if has_rows:
        problem, rows = some_rows(problem)
    source, numel = problem.source, problem.out_numel
    layout = problem.targets, problem.pieces, problem.lengths
    on, rows_on = _moved(device, layout), None if rows is None else rows.to(device)
    grad = torch.randn(numel)
    want = reference.combine(*problem, torch.float32, rows)
    want_back = reference.combine_backward(grad, *layout, source.numel(), torch.float32, rows)
    for part in local_parts(problem):
        local, others = source[part[0] : part[1]].clone(), without(source, part)
        at = {"local": local.to(device), "local_begin": part[0]}
        got = route.combine(others.to(device), *on, numel, torch.float32, rows_on, **at)
        assert torch.equal(got.cpu(), want)
        same = reference.combine(
            others, *layout, numel, torch.float32, rows, local=local, local_begin=part[0]
        )
        assert torch.equal(same, want)
        back = route.combine_backward_(grad.to(device), *on, source.numel(), rows_on, **at)
        assert torch.equal(back.cpu(), without(want_back, part))
        assert torch.equal(at["local"].cpu(), want_back[part[0] : part[1]])


def test_neighbours_on_both_sides_of_an_end_are_not_one_copy() -> None:
    """One row, whose columns continue in the source, but not in memory."""
    targets = torch.tensor([[0, 5, 1, 2, 0, 1, -1], [2, 5, 1, 3, 1, 2, -1]])
    pieces = torch.tensor([[0, 5, -1], [2, 5, -1]])
    source = torch.arange(5.0)
    local = source[2:].clone()
    out = route.combine(
        source[:2].clone(), targets, pieces, None, 5, torch.float32, local=local, local_begin=2
    )
    assert torch.equal(out, source)
    local.zero_()
    back = route.combine_backward_(source, targets, pieces, None, 5, local=local, local_begin=2)
    assert torch.equal(torch.cat([back, local]), source)


def test_wrong_local_parts_raise() -> None:
    problem = make_pieces(COMBININGS["sums"])
    source, *layout, numel = problem
    crossing = source[:1].clone(), source[1:].clone()
    with pytest.raises(RuntimeError, match="crosses an end of local"):
        route.combine(crossing[1], *layout, numel, torch.float32, local=crossing[0])
    for begin in (-1, source.numel() + 1):
        with pytest.raises(RuntimeError, match="local_begin must lie in"):
            route.combine(
                source, *layout, numel, torch.float32, local=source[:0], local_begin=begin
            )
    with pytest.raises(RuntimeError, match="local_begin needs local"):
        route.combine(source, *layout, numel, torch.float32, local_begin=3)
    with pytest.raises(RuntimeError, match="local must have the dtype"):
        route.combine(source, *layout, numel, torch.float32, local=source[:0].half())
    with pytest.raises(RuntimeError, match="local must be flat"):
        route.combine(source, *layout, numel, torch.float32, local=source[:0].view(0, 1))
    with pytest.raises(RuntimeError, match="local must be part of the"):
        route.combine_backward_(torch.zeros(numel), *layout, 3, local=torch.zeros(4), local_begin=0)
    with pytest.raises(RuntimeError, match="local has no derivative"):
        route.combine(
            source.requires_grad_(), *layout, numel, torch.float32, local=source[:0].detach()
        )
    grad = torch.zeros(numel, requires_grad=True)
    with pytest.raises(RuntimeError, match="local has no derivative"):
        route.combine_backward_(grad, *layout, 0, local=torch.zeros(0), local_begin=0)


def test_gradients_of_pieces_of_some_rows() -> None:
    problem, rows = some_rows(make_pieces(COMBININGS["means"]))
    source, targets, pieces, lengths, numel = problem
    source = source.double().float().requires_grad_()
    out = route.combine(source, targets, pieces, lengths, numel, torch.float32, rows, 0.5)
    grad = torch.randn(numel)
    out.backward(grad)
    layout = targets, pieces, lengths
    want = route.combine_backward(grad, *layout, source.numel(), torch.float32, rows, 0.5)
    assert source.grad is not None
    assert torch.equal(source.grad, want)


# Rules of every op


def test_opcheck(device: torch.device) -> None:
    problem = _on(device, make(CASES["plain"]))
    starts = problem.starts
    total, num_bags = int(starts[-1]), int(problem.routing.units[-1])
    some, rows = some_rows(make_pieces(COMBININGS["means"]))
    source, targets, pieces, lengths, numel = _moved(device, some)
    layout = targets, pieces, rows.to(device), lengths
    grad = torch.randn(numel, device=device)
    segments = (torch.tensor([0, 2, 5], device=device), torch.tensor([1, 0, 1], device=device))
    cases: dict[str, tuple[Any, ...]] = {
        "gather_segments": (torch.randn(5, 3, device=device), *segments, 8),
        "route_lengths": (problem.ids, problem.offsets, *problem.routing, num_bags),
        "route_ids": (*problem[:2], *problem.routing, starts, total, problem.weights),
        "combine": (source, *layout, numel, torch.float16, 0.5),
        "combine_backward": (grad, *layout, source.numel(), torch.bfloat16, 2.0),
    }
    for name, arguments in cases.items():
        torch.library.opcheck(getattr(ops, name), arguments)
    problem_of_parts = make_pieces(COMBININGS["means"])
    begin, end = local_parts(problem_of_parts)[-1]
    source, targets, pieces, lengths, numel = _moved(device, problem_of_parts)
    layout, local = (targets, pieces, None, lengths), source[begin:end].clone()
    others = without(source, (begin, end))
    cases = {
        "combine": (others, *layout, numel, torch.float32, 1.0, local, begin),
        "combine_backward_": (grad, *layout, source.numel(), 1.0, local, begin),
    }
    for name, arguments in cases.items():
        torch.library.opcheck(getattr(ops, name), arguments)


# Routing and combining refuse what contradicts itself, and say how


def test_wrong_segments_are_refused() -> None:
    values, starts, order = torch.zeros(5), torch.tensor([0, 2, 5]), torch.tensor([1, 0])
    for arguments, message in (
        ((values, starts, order, 4), "total must be the rows of all segments of order, 5, got 4"),
        ((values, starts, torch.tensor([2]), 0), r"order must name segments in \[0, 2\), got 2"),
        ((values, starts, torch.tensor([-1]), 0), "got -1"),
        ((values, torch.tensor([0, 6]), torch.tensor([0]), 6), r"is \[0, 6\)"),
        ((values, torch.tensor([3, 1]), torch.tensor([0]), -2), "must be >= 0"),
        ((values, torch.tensor([3, 1]), torch.tensor([0]), 0), r"is \[3, 1\)"),
        ((values, starts.float(), order, 5), "starts must be int32 or int64"),
        ((values, starts, order.int(), 5), "order must be int64"),
        ((torch.tensor(1.0), starts, order, 5), "must have 1 to 4 dimensions, got 0"),
        ((torch.zeros(5, 1, 1, 1, 1), starts, order, 5), "segments: values .* 4 dimensions, got 5"),
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
        (routing._replace(features=_changed(features, (0, 3), 3)), "rule 0, 1 or 2"),
        (routing._replace(blocks=_changed(blocks, (0, 0), 1)), "must begin at row 0"),
        (routing._replace(blocks=_changed(blocks, (1, 0), 51)), "ascend to at most 50"),
        (routing._replace(blocks=_changed(blocks, (0, 2), 99)), "block 0 must name copies"),
        (routing._replace(copies=_changed(copies, 0, int(copies[1]))), "once"),
        (routing._replace(units=_changed(units, 0, 1)), "must begin at bag 0"),
        (routing._replace(units=_changed(units, 1, 6)), "must have the 5 bags"),
        (routing._replace(units=units[:-1]), "each unit is named once in copies"),
        (routing._replace(features=features.view(-1)), "contiguous matrix of 4 numbers per row"),
        (routing._replace(copies=copies.view(1, -1)), "copies must be a contiguous vector$"),
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
    with pytest.raises(RuntimeError, match="ids must have 1 dimension, got 2; bags are given by"):
        route.route_lengths(ids.view(1, -1), offsets, *routing)


def test_bags_that_end_long_before_they_begin_are_refused() -> None:
    """The offsets of the bags of features descend by more than the grain of a parallel loop."""
    num_ids = 100_000
    rows = [[0, 1, num_ids, 0]], [[0, 0, 1]], [0], [0, 1]
    routing = (torch.tensor([1, 2]), *(torch.tensor(row) for row in rows))
    with pytest.raises(RuntimeError, match="offsets must ascend"):
        route.route_lengths(torch.arange(num_ids), torch.tensor([0, num_ids, 0, num_ids]), *routing)


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
        ((source, targets[:, :6], pieces, lengths, numel), "matrix of 7 numbers per row"),
    ):
        with pytest.raises(RuntimeError, match=message):
            route.combine(*arguments, torch.float32)
    with pytest.raises(RuntimeError, match="dtype must be float32"):
        route.combine(source, targets, pieces, lengths, numel, torch.float64)
    layout = targets, pieces, lengths
    with pytest.raises(RuntimeError, match="cover the output"):
        route.combine_backward(torch.zeros(numel + 1), *layout, source.numel(), torch.float32)
