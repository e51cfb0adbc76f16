"""Emulated routing kernels against the reference."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib.reference import route
from tests.route_cases import (
    CASES,
    COMBININGS,
    Case,
    local_parts,
    make,
    make_pieces,
    some_rows,
    without,
)
from tests.simt import emulated_route as emulated

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LARGEST = 2**63 - 1


@pytest.mark.parametrize("name", CASES)
def test_route(name: str) -> None:
    problem = make(CASES[name])
    ids, offsets, routing, weights = problem
    want = route.route_lengths(ids, offsets, *routing)
    lengths = emulated.route_lengths(ids, offsets, *routing, num_bags=want.numel())
    assert torch.equal(lengths, want)
    routed, positions, carried = route.route_ids(ids, offsets, *routing, weights=weights)
    starts, total = problem.starts, routed.numel()
    found = emulated.route_ids(ids, offsets, *routing, starts=starts, total=total, weights=weights)
    assert carried is not None
    for mine, theirs in zip(found, (routed, positions, carried), strict=True):
        assert torch.equal(mine, theirs)
    without = emulated.route_ids(ids, offsets, *routing, starts=starts, total=total, weights=None)
    assert torch.equal(without[0], routed)


def _changed(tensor: Tensor, value: int) -> list[Tensor]:
    """The tensor with each of its entries in turn replaced."""
    out = []
    for i in range(tensor.numel()):
        copy = tensor.clone()
        copy.view(-1)[i] = value
        out.append(copy)
    return out


@pytest.mark.parametrize("value", [-3, 1 << 40, LARGEST])
def test_wrong_routing_touches_nothing_else(value: int) -> None:
    """A GPU does not check the contents of layouts; the sanitized run sees every access."""
    problem = make(Case(bags=(3, 2), most_blocks=3, most_copies=2, seed=2))
    ids, offsets, routing, weights = problem
    starts = problem.starts
    total, num_bags = int(starts[-1]), starts.numel() - 1
    for field, tensor in routing._asdict().items():
        for broken in _changed(tensor, value):
            wrong = routing._replace(**{field: broken})
            emulated.route_lengths(ids, offsets, *wrong, num_bags=num_bags)
            emulated.route_ids(ids, offsets, *wrong, starts=starts, total=total, weights=weights)
    for broken in _changed(starts, value):
        emulated.route_ids(ids, offsets, *routing, starts=broken, total=total, weights=weights)
    for broken in _changed(offsets, value):
        emulated.route_ids(ids, broken, *routing, starts=starts, total=total, weights=weights)


def test_features_of_negative_rows_are_skipped() -> None:
    ids, offsets, routing, _ = make(Case(bags=(3,), most_copies=1, spread=True, broken=True))
    routing.features[0, 2] = -3
    lengths = emulated.route_lengths(ids, offsets, *routing, num_bags=int(routing.units[-1]))
    assert (lengths == 0).all()


def test_a_wrong_start_moves_no_other_ids() -> None:
    problem = make(Case(bags=(3, 2), most_blocks=1, most_copies=1, longest=20, seed=2))
    ids, offsets, routing, weights = problem
    starts = problem.starts
    bag = 1 + int(starts.diff()[1:].argmax())
    begin, end = starts[bag : bag + 2].tolist()
    total = int(starts[-1])
    right = emulated.route_ids(ids, offsets, *routing, starts=starts, total=total, weights=weights)
    starts[bag] = LARGEST
    wrong = emulated.route_ids(ids, offsets, *routing, starts=starts, total=total, weights=weights)
    for mine, wanted in zip(wrong, right, strict=True):
        assert torch.equal(mine[end:], wanted[end:])
        assert torch.equal(mine[:begin], wanted[:begin])
    assert begin > 0
    assert end - begin > 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.float16, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 8)])
def test_gather_segments(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    values = torch.randint(0, 100, (40, *shape)).to(dtype)
    starts = torch.tensor([0, 7, 7, 8, 30, 40], dtype=torch.int32)
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 2], [1], [], [3, 3, 3]):
        segments = torch.tensor(order, dtype=torch.int64)
        total = int((starts[1:] - starts[:-1])[segments].sum())
        want = route.gather_segments(values, starts, segments, total)
        assert torch.equal(emulated.gather_segments(values, starts, segments, total), want)


def test_gather_many_segments() -> None:
    """More segments than one tile of the scan, and than one round of the scan over tiles."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 3, (400,), generator=generator)
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    for count in (256, 257, 66_000):
        order = torch.randint(0, 400, (count,), generator=generator)
        values = torch.arange(int(starts[-1]), dtype=torch.int32)
        total = int(sizes[order].sum())
        want = route.gather_segments(values, starts, order, total)
        assert torch.equal(emulated.gather_segments(values, starts, order, total), want)


def test_wrong_segments_touch_nothing_else() -> None:
    values, starts = torch.arange(1, 6), torch.tensor([0, 2, 5])
    order = torch.tensor([1, 0])
    assert emulated.gather_segments(values, starts, order, 7).tolist() == [3, 4, 5, 1, 2, 0, 0]
    assert emulated.gather_segments(values, starts, order, 4).tolist() == [3, 4, 5, 1]
    assert emulated.gather_segments(values, starts, torch.tensor([9, -1]), 2).tolist() == [0, 0]
    for value in (-4, 1 << 40):
        for broken in _changed(starts, value):
            emulated.gather_segments(values, broken, order, 5)


@pytest.mark.parametrize("name", COMBININGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", DTYPES)
def test_combine_and_spread(name: str, dtype: torch.dtype, out: torch.dtype) -> None:
    problem = make_pieces(COMBININGS[name], dtype)
    source, targets, pieces, lengths, numel = problem
    layout = targets, pieces, lengths
    result = emulated.combine(*problem, out)
    assert_close(result, route.combine(*problem, out), rtol=0, atol=0)
    grad = torch.randn(numel).to(out)
    back = emulated.combine_backward(grad, *layout, source.numel(), dtype)
    assert_close(back, route.combine_backward(grad, *layout, source.numel(), dtype), rtol=0, atol=0)


@pytest.mark.parametrize("name", COMBININGS)
def test_pieces_of_some_rows(name: str) -> None:
    problem, rows = some_rows(make_pieces(COMBININGS[name]))
    source, *layout, _ = problem
    result = emulated.combine(*problem, torch.float32, rows, 0.25)
    want = route.combine(*problem, torch.float32, rows, 0.25)
    assert_close(result, want, rtol=0, atol=0)
    size = source.numel()
    back = emulated.combine_backward(result, *layout, size, torch.float32, rows, 0.25)
    want = route.combine_backward(result, *layout, size, torch.float32, rows, 0.25)
    assert_close(back, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", COMBININGS)
def test_a_part_of_the_source_in_its_own_tensor(name: str) -> None:
    problem = make_pieces(COMBININGS[name])
    source, *layout, numel = problem
    want = route.combine(*problem, torch.float32)
    grad = torch.randn(numel)
    want_back = route.combine_backward(grad, *layout, source.numel(), torch.float32)
    for part in local_parts(problem):
        local = source[part[0] : part[1]].clone()
        others = without(source, part)
        at = {"local": local, "local_begin": part[0]}
        result = emulated.combine(others, *layout, numel, torch.float32, **at)
        assert torch.equal(result, want)
        back = emulated.combine_backward(grad, *layout, source.numel(), torch.float32, **at)
        assert torch.equal(back, without(want_back, part))
        assert torch.equal(local, want_back[part[0] : part[1]])


def test_wrong_pieces_touch_nothing_else() -> None:
    source, targets, pieces, lengths, numel = make_pieces(COMBININGS["means"])
    for value in (-3, 1 << 40):
        for broken in _changed(targets[:2], value):
            emulated.combine(source, broken, pieces, lengths, numel, torch.float32)
            emulated.combine_backward(
                torch.ones(numel), broken, pieces, lengths, source.numel(), torch.float32
            )
        for broken in _changed(pieces[:3], value):
            emulated.combine(source, targets, broken, lengths, numel, torch.float32)


def test_lengths_and_rows_from_the_largest_number_on_are_missing() -> None:
    source, targets, pieces, lengths, numel = make_pieces(COMBININGS["means"])
    without_lengths = targets.clone()
    without_lengths[:, 6] = -1
    want = emulated.combine(source, without_lengths, pieces, lengths, numel, torch.float32)
    targets[:, 6] = LARGEST
    assert torch.equal(
        emulated.combine(source, targets, pieces, lengths, numel, torch.float32), want
    )
    problem, rows = some_rows(make_pieces(COMBININGS["means"]))
    problem.pieces[:, 2] = LARGEST
    assert (emulated.combine(*problem, torch.float32, rows, 0.25) == 0).all()
