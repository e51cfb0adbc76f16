"""A valid call of every native op, drawn at random, and what the references say it must do.

Used by the leak budget, which repeats the calls, and by the fuzzer, which breaks them. The inputs
are small: they are drawn by the thousand.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import (
    BOUNDS_CHECK,
    OPTIMIZER,
    POOLING,
)
from emblib.ops.quant import row_bytes
from emblib.ops.tt import TTLayout, layout_of
from emblib.reference import quant, route, tbe, tt
from emblib.reference import random as counters
from emblib.specs import Pooling, TTSpec
from tests import quant_cases, route_cases
from tests.fuzz.call import FLOATS, INTS, Arguments, Call, close, drawn_seed, same
from tests.fuzz.page_calls import PAGE_CALLS
from tests.fuzz.state_calls import STATE_CALLS
from tests.optimizer_cases import CASES as OPTIMIZER_CASES
from tests.simt.cases import Case, Data
from tests.update_problem import Problem

_ops = torch.ops.emblib


def _sizes(draw: random.Random, count: int, most: int) -> list[int]:
    return [draw.choice([0, 1, draw.randint(0, most)]) for _ in range(count)]


# Grouping


def _group(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    num_keys = draw.choice([1, 5, 300, 70_000, 2**33])
    dtype = draw.choice(INTS)
    length = draw.choice([0, 1, 7, 200, 3000])
    keys = torch.randint(-2, min(num_keys + 2, 2**31 - 1), (length,)).to(dtype)

    def check(_: Arguments, got: Any) -> None:
        valid = (keys >= 0) & (keys.long() < num_keys)
        unique, counts = keys[valid].unique(return_counts=True)
        same(got[0][: unique.numel()], unique)
        same(got[1][: unique.numel() + 1], torch.cat([counts.new_zeros(1), counts.cumsum(0)]))
        order = torch.where(valid, keys.long(), 2**40).argsort(stable=True)
        same(got[2], order)
        same(got[3], torch.tensor([unique.numel()]))

    return Call("group", (keys, num_keys), check)


def _group_inverse(draw: random.Random) -> Call:
    keys, num_keys = _group(draw).arguments
    unique, segments, permutation, count = _ops.group(keys, num_keys)

    def check(_: Arguments, got: Any) -> None:
        valid = (keys >= 0) & (keys.long() < num_keys)
        same(got >= 0, valid)
        same(unique[got[valid].long()], keys[valid])

    return Call("group_inverse", (segments, permutation, count), check)


# Table-batched embeddings


def _data(draw: random.Random, pooling: Pooling | None = None) -> Data:
    """A batch; sizes and dtypes are drawn."""
    tables = draw.randint(1, 3)
    pooling = pooling or draw.choice(list(Pooling))
    dims = [draw.choice([1, 3, 4, 8, 20, 33]) for _ in range(tables)]
    variable = draw.random() < 0.3
    case = Case(
        "drawn",
        rows=tuple(draw.choice([1, 2, 50]) for _ in range(tables)),
        dims=tuple(dims[:1] * tables if pooling is Pooling.NONE else dims),
        tables=tuple(draw.randrange(tables) for _ in range(draw.randint(1, 4))),
        batch=draw.choice([0, 1, 5, 30]),
        lengths=draw.choice(["mixed", "few", "one", "none", "hot"]),
        broken=draw.random() < 0.3,
        weighted=pooling is not Pooling.NONE and draw.random() < 0.5,
        pooling=pooling,
        index=draw.choice(INTS),
        offset=draw.choice(INTS),
        weight=draw.choice(FLOATS),
        output=draw.choice(FLOATS),
        seed=drawn_seed(draw),
    )
    if variable:
        sizes = tuple(draw.choice([0, 1, 7]) for _ in case.tables)
        case = replace(case, sizes=sizes)
    return Data(case)


def _one_dim(data: Data) -> Data:
    dims = data.case.dims[:1] * len(data.case.dims)
    return Data(replace(data.case, dims=dims))


def _bounds_check(draw: random.Random) -> Call:
    data = _data(draw)
    mode = BOUNDS_CHECK[draw.choice(["warning", "ignore"])]

    def check(_: Arguments, got: Any) -> None:
        same(got[0], tbe.repair_offsets(data.offsets, data.indices.numel()))

    call = (data.indices, data.offsets, data.features, data.bag_layout, mode)
    return Call("bounds_check", call, check)


def _bounds_check_(draw: random.Random) -> Call:
    data = _data(draw)

    def check(arguments: Arguments, got: Any) -> None:
        same(got, tbe.repair_offsets(data.offsets, data.indices.numel()))
        assert arguments[5][1] >= (got != data.offsets).sum()

    call = (data.indices, data.offsets, data.features, data.bag_layout, BOUNDS_CHECK["warning"])
    return Call("bounds_check_", (*call, torch.zeros(2, dtype=torch.int64)), check)


def _tbe_lookup(draw: random.Random) -> Call:
    data = _data(draw)
    pooling = POOLING[data.case.pooling.value]
    tiers, batch = [data.weights], (data.indices, data.repaired, None, data.bag_layout)
    rest = (data.sample_weights, pooling, data.columns, data.case.output)

    def check(_: Arguments, got: Any) -> None:
        close(got, data.lookup(data.weights.double(), data.sample_weights))

    return Call("tbe_lookup", (tiers, data.features, *batch, *rest), check)


def _looks_up(data: Data, got: list[Tensor]) -> bool:
    """Check what an op returns that checks a batch first; return whether the batch is valid."""
    rows = data.features[:, 2]
    feature = torch.arange(len(rows)).repeat_interleave(data.case.batch)
    limits = rows[feature.repeat_interleave(data.repaired.diff())]
    tail = data.indices.long()[-limits.numel() :] if limits.numel() else limits
    is_valid = torch.equal(data.repaired, data.offsets) and bool(
        ((tail >= -1) & (tail < limits)).all()
    )
    if len(got) == 2:  # a GPU repairs the offsets
        same(got[1], data.repaired)
    else:
        assert len(got) == is_valid
    return is_valid


def _tbe_lookup_checked_(draw: random.Random) -> Call:
    data = _data(draw)
    if data.bag_layout is not None:
        data = Data(replace(data.case, sizes=None))
    rest = (data.sample_weights, POOLING[data.case.pooling.value], data.columns, data.case.output)

    def check(_: Arguments, got: Any) -> None:
        if _looks_up(data, got):
            close(got[0], data.lookup(data.weights.double(), data.sample_weights))

    batch = (data.indices, data.offsets)
    counting = (BOUNDS_CHECK["warning"], torch.zeros(2, dtype=torch.int64))
    arguments = ([data.weights], data.features, *batch, *rest, *counting)
    return Call("tbe_lookup_checked_", arguments, check)


def _tbe_group(draw: random.Random) -> Call:
    data = _data(draw)
    claims_repaired = draw.random() < 0.3

    def check(_: Arguments, got: Any) -> None:
        if claims_repaired and not torch.equal(data.offsets, data.repaired):
            return
        want = tbe.group(data.features, data.indices, data.repaired, data.bag_layout)
        unique, grouped = want.rows.numel(), want.lookups.numel()
        same(got[4], torch.tensor([unique]))
        same(got[0][:unique], want.rows)
        same(got[1][: unique + 1], want.segments)
        same(got[2][:grouped], want.lookups)
        same(got[3][:grouped], want.bags)

    arguments = (data.features, *data.batch, data.total_rows, claims_repaired)
    return Call("tbe_group", arguments, check)


def _groups(data: Data) -> tuple[Tensor, ...]:
    return _ops.tbe_group(data.features, *data.batch, data.total_rows)


def _tbe_row_grads(draw: random.Random) -> Call:
    data = _one_dim(_data(draw))
    grad, groups, dim = data.gradient(), _groups(data), data.case.dims[0]
    pooling = POOLING[data.case.pooling.value]
    bags = (data.repaired, data.bag_layout, data.sample_weights)

    def check(_: Arguments, got: Any) -> None:
        rows = groups[0][: int(groups[4])]
        close(got[: rows.numel()], data.weight_grad(grad).view(-1, dim)[rows])

    return Call("tbe_row_grads", (grad, data.features, *groups, *bags, pooling, dim), check)


def _tbe_update(draw: random.Random) -> Call:
    tables = draw.randint(1, 3)
    cached = tuple(draw.random() < 0.4 for _ in range(tables))
    problem = Problem(
        OPTIMIZER_CASES[draw.choice(list(OPTIMIZER_CASES))],
        rows=tuple(draw.choice([1, 2, 40]) for _ in range(tables)),
        dims=tuple(draw.choice([1, 3, 8, 20]) for _ in range(tables)),
        tiers=tuple(draw.randrange(3) for _ in range(tables)),
        cached=cached,
        features_of=tuple(draw.randrange(tables) for _ in range(draw.randint(1, 4))),
        batch=draw.choice([1, 6]),
        longest=draw.choice([0, 5]),
        layout=draw.random() < 0.3,
        seed=drawn_seed(draw),
    )
    weights = [tensor.clone() for tensor in problem.weights]
    states = [tensor.clone() for tensor in problem.states]

    def check(arguments: Arguments, _: Any) -> None:
        for got, want in zip([*arguments[0], *arguments[1]], problem.expected(), strict=True):
            close(got, want)

    return Call("tbe_update_", problem.arguments(weights, states), check)


def _tbe_backward(draw: random.Random) -> Call:
    tables = draw.randint(1, 3)
    problem = Problem(
        OPTIMIZER_CASES[draw.choice(list(OPTIMIZER_CASES))],
        rows=tuple(draw.choice([1, 2, 40]) for _ in range(tables)),
        dims=tuple(draw.choice([1, 3, 8, 20]) for _ in range(tables)),
        tiers=tuple(draw.randrange(3) for _ in range(tables)),
        cached=(False,) * tables,
        features_of=tuple(draw.randrange(tables) for _ in range(draw.randint(1, 4))),
        batch=draw.choice([1, 6]),
        longest=draw.choice([0, 5]),
        seed=drawn_seed(draw),
    )
    weights = [tensor.clone() for tensor in problem.weights]
    states = [tensor.clone() for tensor in problem.states]
    hyper = problem.hyperparams.clone()
    hyper[1] -= 1  # which the op counts

    def check(arguments: Arguments, _: Any) -> None:
        same(arguments[2], problem.hyperparams)
        for found, want in zip([*arguments[0], *arguments[1]], problem.expected(), strict=True):
            close(found, want)

    memory = (weights, states, hyper, OPTIMIZER[problem.optimizer.name], problem.grad)
    batch = (problem.features, problem.indices, problem.offsets, None)
    rest = (POOLING["sum"], problem.total_rows)
    if draw.random() < 0.5:
        groups = _ops.tbe_group(*batch, problem.total_rows)
        slots = [torch.full_like(groups[2], -1)] if draw.random() < 0.5 else []
        rest = (*rest, False, None, [*groups, *slots])
    return Call("tbe_backward_", (*memory, *batch, *rest), check)


def _tbe_sample_weight_grad(draw: random.Random) -> Call:
    data = _data(draw, draw.choice([Pooling.SUM, Pooling.MEAN]))
    grad, batch = data.gradient(), (data.indices, data.repaired, None, data.bag_layout)

    def check(_: Arguments, got: Any) -> None:
        given = (data.weights.double(), data.features, data.indices, data.offsets)
        want = tbe.sample_weight_grad(grad.double(), *given, data.case.pooling, data.extras)
        close(got / 20, want / 20)

    call = (grad, [data.weights], data.features, *batch, POOLING[data.case.pooling.value])
    return Call("tbe_sample_weight_grad", call, check)


# Tensor-train tables


@dataclass
class _Train:
    """Cores and a batch on its way through the ops."""

    cores: list[Tensor]
    p: list[int]
    q: list[int]
    keys: Tensor
    count: Tensor
    kept: int
    indices: Tensor

    @property
    def layout(self) -> TTLayout:
        """The table as the ops take it."""
        ranks = (1,) * (len(self.p) - 1)
        return layout_of([TTSpec(math.prod(self.p), math.prod(self.q), ranks, self.p, self.q)])

    @property
    def factors(self) -> tuple[list[int], list[int], list[int]]:
        """The row and dim factors of the table, and its number of cores."""
        return self.p, self.q, [len(self.p)]

    @property
    def plan(self) -> list[Tensor]:
        tables, sizes = torch.tensor(self.layout.tables), self.layout[5:7]
        return _ops.tt_plan(self.keys, self.count, tables, *sizes)

    @property
    def ids(self) -> Tensor:
        """The distinct rows."""
        return tt.ids_of_keys(self.keys[: int(self.count)], self.p)


def _train(draw: random.Random) -> _Train:
    torch.manual_seed(drawn_seed(draw))
    size = draw.choice([2, 3, 4])
    p, q = ([draw.randint(1, most) for _ in range(size)] for most in (6, 4))
    ranks = [1, *(draw.randint(1, 5) for _ in range(size - 1)), 1]
    cores = [torch.randn(p[k], ranks[k] * q[k] * ranks[k + 1]) for k in range(size)]
    rows = math.prod(p)
    indices = torch.randint(0, rows, (draw.choice([0, 1, 40]),)).to(draw.choice(INTS))
    keys, _, _, count = _ops.group(tt.keys(indices, rows, p), rows)
    kept = draw.choice([0, 3]) if size > 2 else 0
    return _Train(cores, p, q, keys.long(), count, kept, indices)


def _tt_keys(draw: random.Random) -> Call:
    case = _train(draw)
    rows = draw.randint(1, math.prod(case.p))
    spec = TTSpec(rows, math.prod(case.q), (1,) * (len(case.p) - 1), case.p, case.q)
    tables = torch.tensor(layout_of([spec]).tables)
    offsets = torch.tensor([0, case.indices.numel()])

    def check(_: Arguments, got: Any) -> None:
        same(got, tt.keys(case.indices, rows, case.p))

    return Call("tt_keys", (case.indices, offsets, None, tables), check)


def _tt_stored(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    lookups, slots = draw.randint(0, 40), draw.randint(1, 9)
    ids, indices = torch.randint(-1, 9, (2, lookups))
    known = torch.randint(-1, slots, (lookups,)) if draw.random() < 0.7 else None
    call = (indices, ids, ids + 2, known, torch.randint(-1, 5, (slots,)))

    def check(_: Arguments, got: Any) -> None:
        for mine, want in zip(got, tt.split_stored(*call), strict=True):
            same(mine, want)

    return Call("tt_stored", call, check)


def _tt_count(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    lookups, features, tables = (draw.randint(low, high) for low, high in ((0, 40), (1, 4), (1, 3)))
    counted, rows = torch.randint(-1, 9, (2, lookups))
    starts = torch.randint(0, lookups + 1, (features + 1,)).sort().values
    rest = (rows[: draw.choice((0, lookups))], starts, torch.randint(0, tables, (features,)))
    counters = torch.zeros(tables, 4, dtype=torch.int64)

    def check(arguments: Arguments, _: Any) -> None:
        want = torch.zeros_like(counters)
        tt.count_lookups_(counted, *rest, want)
        same(arguments[4], want)

    return Call("tt_count_", (counted, *rest, counters), check)


def _tt_plan(draw: random.Random) -> Call:
    case = _train(draw)

    def check(_: Arguments, got: Any) -> None:
        rows, _ = _ops.tt_rows(case.cores, got, *case.factors, 0)
        close(rows[: int(case.count)], tt.rows(case.cores, case.ids, case.p, case.q))

    call = (case.keys, case.count, torch.tensor(case.layout.tables), *case.layout[5:7])
    return Call("tt_plan", call, check)


def _tt_rows(draw: random.Random) -> Call:
    case = _train(draw)

    def check(_: Arguments, got: Any) -> None:
        close(got[0][: int(case.count)], tt.rows(case.cores, case.ids, case.p, case.q))

    return Call("tt_rows", (case.cores, case.plan, *case.factors, case.kept), check)


def _tt_core_grads(draw: random.Random) -> Call:
    case = _train(draw)
    grads = torch.randn(case.keys.numel(), math.prod(case.q))
    _, left_values = _ops.tt_rows(case.cores, case.plan, *case.factors, case.kept)

    def check(_: Arguments, got: Any) -> None:
        given = (case.ids, grads[: int(case.count)], case.p, case.q)
        for core, want in zip(got, tt.core_grads(case.cores, *given), strict=True):
            close(core / 20, want / 20)

    return Call("tt_core_grads", (case.cores, case.plan, left_values, grads, *case.factors), check)


def _tt_update(draw: random.Random) -> Call:
    case = _train(draw)
    grads = torch.randn(case.keys.numel(), math.prod(case.q))
    _, left_values = _ops.tt_rows(case.cores, case.plan, *case.factors, case.kept)
    hyper = OPTIMIZER_CASES["adagrad"].hyperparams()
    hyper[1] = 3.0
    states, before = [torch.ones_like(c) for c in case.cores], [c.clone() for c in case.cores]

    def check(arguments: Arguments, _: Any) -> None:
        given = (case.ids, grads[: int(case.count)], case.p, case.q)
        for k, grad in enumerate(tt.core_grads(before, *given)):
            want, state = before[k].double(), torch.ones_like(before[k]).double()
            tt.update_rows_(want, [state], hyper, "adagrad", grad.double())
            close(arguments[0][k] / 20, want / 20)

    rest = (case.plan, left_values, grads, *case.factors)
    return Call("tt_update_", (case.cores, states, hyper, OPTIMIZER["adagrad"], *rest), check)


def _tt_lookup(draw: random.Random) -> Call:
    case = _train(draw)
    dim, layout = math.prod(case.q), case.layout
    features = torch.tensor([[0, 0, math.prod(case.p), dim, 0, 0, 0, 0]] * 3)
    tables, offsets = torch.tensor(layout.tables), torch.arange(case.indices.numel() + 1)
    batch = (features, case.indices, offsets, None, None, POOLING["none"], dim, torch.float32)

    def check(_: Arguments, got: Any) -> None:
        close(got[0], tt.rows(case.cores, case.indices.long(), case.p, case.q))

    rest = (case.kept, None, torch.zeros(2, dtype=torch.int64))
    call = (case.cores, tables, tables, *batch, *case.factors, *rest)
    return Call("tt_lookup_checked_", call, check)


def _tt_backward(draw: random.Random) -> Call:
    case = _train(draw)
    dim, total = math.prod(case.q), math.prod(case.p)
    features = torch.tensor([[0, 0, total, dim, 0, 0, 0, 0]] * 3)
    keys = tt.keys(case.indices, total, case.p)
    offsets = torch.arange(keys.numel() + 1)
    groups = list(_ops.tbe_group(features[:1], keys, offsets, None, total))
    case.keys, case.count = groups[0], groups[4]
    _, left_values = _ops.tt_rows(case.cores, case.plan, *case.factors, case.kept)
    hyper = OPTIMIZER_CASES["sgd"].hyperparams()
    grad, before = torch.randn(keys.numel(), dim), [core.clone() for core in case.cores]

    def check(arguments: Arguments, _: Any) -> None:
        assert arguments[2][1] == hyper[1]
        given = (case.indices.long(), grad, case.p, case.q)
        for k, want in enumerate(tt.core_grads(before, *given)):
            close(arguments[0][k] / 20, (before[k] - hyper[0] * want) / 20)

    bags = (case.indices, offsets, None, None, POOLING["none"])
    rest = ([*groups, *case.plan, left_values], *case.factors)
    call = (case.cores, [], hyper.clone(), OPTIMIZER["sgd"], grad, features, *bags, *rest)
    hyper[1] += 1  # which the op counts
    return Call("tt_backward_", call, check)


def _update_rows(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    optimizer = OPTIMIZER_CASES[draw.choice(list(OPTIMIZER_CASES))]
    rows, width = draw.choice([0, 1, 7]), draw.choice([1, 4, 9])
    hyper = optimizer.hyperparams()
    hyper[1] = 3.0
    weights, grads = torch.randn(rows, width), torch.randn(rows, width)
    grads[::3] = 0.0
    states = [
        torch.rand(rows) * (state.name != "prev_iter") if state.per_row else torch.rand(rows, width)
        for state in optimizer.states
    ]
    want = [weights.double(), *(state.double() for state in states)]

    def check(arguments: Arguments, _: Any) -> None:
        tt.update_rows_(want[0], want[1:], hyper, optimizer.name, grads.double())
        for got, tensor in zip([arguments[0], *arguments[1]], want, strict=True):
            close(got, tensor)

    return Call(
        "update_rows_", (weights, states, hyper, OPTIMIZER[optimizer.name], grads, 0), check
    )


# Routing


def _gather_segments(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    starts = torch.tensor([0, *_sizes(draw, draw.randint(0, 5), 9)]).cumsum(0)
    values = torch.randn(int(starts[-1]), *draw.choice([(), (1,), (3,), (0,)]))
    segments = starts.numel() - 1
    order = torch.randint(0, max(segments, 1), (draw.choice([0, 4]) if segments else 0,))
    total = int((starts[1:] - starts[:-1])[order].sum())

    def check(_: Arguments, got: Any) -> None:
        same(got, route.gather_segments(values, starts, order, total))

    starts = starts.to(draw.choice(INTS))
    return Call("gather_segments", (values, starts, order, total), check)


def _routed(draw: random.Random) -> route_cases.Problem:
    name = draw.choice(["plain", "int32", "broken ids", "by key", "empty tables", "no bags"])
    return route_cases.make(replace(route_cases.CASES[name], seed=drawn_seed(draw)))


def _route_lengths(draw: random.Random) -> Call:
    problem = _routed(draw)
    given = (problem.ids, problem.offsets, *problem.routing)

    def check(_: Arguments, got: Any) -> None:
        same(got, route.route_lengths(*given))

    return Call("route_lengths", (*given, int(problem.routing.units[-1])), check)


def _route_ids(draw: random.Random) -> Call:
    problem = _routed(draw)
    starts = problem.starts
    weights = problem.weights if draw.random() < 0.5 else None
    given = (problem.ids, problem.offsets, *problem.routing)

    def check(_: Arguments, got: Any) -> None:
        ids, at, *_ = route.route_ids(*given, weights=None)
        same(got[0], ids)
        same(got[1], at)
        if weights is not None:
            same(got[2], weights[at])

    return Call("route_ids", (*given, starts, int(starts[-1]), weights), check)


def _pieces(draw: random.Random) -> tuple[route_cases.Pieces, Tensor | None]:
    name = draw.choice(["sums", "copies", "means", "gaps", "own numbers of rows", "no columns"])
    problem = route_cases.make_pieces(
        replace(route_cases.COMBININGS[name], seed=drawn_seed(draw)), draw.choice(FLOATS)
    )
    return route_cases.some_rows(problem) if draw.random() < 0.5 else (problem, None)


def _combine(draw: random.Random) -> Call:
    (source, targets, pieces, lengths, numel), rows = _pieces(draw)
    dtype, scale = draw.choice(FLOATS), draw.choice([1.0, 0.5])

    def check(_: Arguments, got: Any) -> None:
        close(got, route.combine(source, targets, pieces, lengths, numel, dtype, rows, scale))

    return Call("combine", (source, targets, pieces, rows, lengths, numel, dtype, scale), check)


def _spread(draw: random.Random) -> Call:
    (source, targets, pieces, lengths, numel), rows = _pieces(draw)
    dtype, grad, size = draw.choice(FLOATS), torch.randn(numel), source.numel()

    def check(_: Arguments, got: Any) -> None:
        close(got, route.combine_backward(grad, targets, pieces, lengths, size, dtype, rows, 2.0))

    return Call("combine_backward", (grad, targets, pieces, rows, lengths, size, dtype, 2.0), check)


def _spread_in_two(draw: random.Random) -> Call:
    problem, rows = _pieces(draw)
    (source, targets, pieces, lengths, numel), dtype = problem, draw.choice(FLOATS)
    begin, end = draw.choice(list(route_cases.local_parts(problem)))
    local, grad, size = torch.zeros(end - begin, dtype=dtype), torch.randn(numel), source.numel()

    def check(arguments: Arguments, got: Any) -> None:
        want = route.combine_backward(grad, targets, pieces, lengths, size, dtype, rows, 2.0)
        close(got, route_cases.without(want, (begin, end)))
        close(arguments[7], want[begin:end])

    call = (grad, targets, pieces, rows, lengths, size, 2.0, local, begin)
    return Call("combine_backward_", call, check)


# Quantised tables, memory, random numbers


def _quantize_rows(draw: random.Random) -> Call:
    torch.manual_seed(drawn_seed(draw))
    bits, rows, dim = (
        draw.choice(quant_cases.FORMATS),
        draw.choice([0, 1, 9]),
        draw.choice([1, 5, 40]),
    )
    weights = torch.randn(rows, dim).to(draw.choice(FLOATS))
    packed = torch.zeros(rows, row_bytes(dim, bits), dtype=torch.uint8)

    def check(arguments: Arguments, _: Any) -> None:
        same(arguments[0], quant.quantize_rows(weights, bits))

    return Call("quantize_rows_", (packed, weights, bits), check)


def _quant_lookup(draw: random.Random) -> Call:
    data, bits = _data(draw), draw.choice(quant_cases.FORMATS)
    packed = quant_cases.pack(data, bits)
    batch = (data.indices, data.repaired, data.bag_layout, data.sample_weights)
    rest = (POOLING[data.case.pooling.value], bits, data.columns, data.case.output)

    def check(_: Arguments, got: Any) -> None:
        close(got, quant_cases.expected(data, packed, bits))

    return Call("quant_lookup", (*packed, *batch, *rest), check)


def _quant_lookup_checked_(draw: random.Random) -> Call:
    data, bits = _data(draw), draw.choice(quant_cases.FORMATS)
    if data.bag_layout is not None:
        data = Data(replace(data.case, sizes=None))
    packed = quant_cases.pack(data, bits)
    batch = (data.indices, data.offsets, data.sample_weights)
    rest = (POOLING[data.case.pooling.value], bits, data.columns, data.case.output)

    def check(_: Arguments, got: Any) -> None:
        if _looks_up(data, got):
            close(got[0], quant_cases.expected(data, packed, bits))

    counting = (BOUNDS_CHECK["warning"], torch.zeros(2, dtype=torch.int64))
    return Call("quant_lookup_checked_", (*packed, *batch, *rest, *counting), check)


def _map_ids(draw: random.Random) -> Call:
    kinds = draw.choice(quant_cases.KINDS_OF_INDEX)
    index, tables, ids = quant_cases.indexed(kinds, draw.choice([-1, 5]))
    features, indices, offsets = quant_cases.index_batch(kinds, ids)

    def check(_: Arguments, got: Any) -> None:
        for f, table in enumerate(tables):
            part = slice(int(offsets[3 * f]), int(offsets[3 * f + 3]))
            same(got[part], quant.map_ids(index, table, indices[part]))

    return Call("map_ids", (index, tables, features, indices, offsets, None), check)


def _advise_huge_pages(draw: random.Random) -> Call:
    tensor = torch.arange(draw.choice([0, 1, 300_000]))

    def check(arguments: Arguments, _: Any) -> None:
        assert torch.equal(arguments[0], torch.arange(tensor.numel()))

    return Call("advise_huge_pages_", (tensor,), check)


def _fill_uniform(draw: random.Random) -> Call:
    tensor, seed = (
        torch.zeros(draw.choice([0, 1, 5, 300]), dtype=draw.choice(FLOATS)),
        drawn_seed(draw),
    )

    def check(arguments: Arguments, _: Any) -> None:
        close(arguments[0], counters.uniform(tensor.numel(), -1.0, 2.0, seed))

    return Call("fill_uniform_", (tensor, -1.0, 2.0, seed), check)


CALLS: dict[str, Callable[[random.Random], Call]] = {
    **STATE_CALLS,
    **PAGE_CALLS,
    "group": _group,
    "group_inverse": _group_inverse,
    "bounds_check": _bounds_check,
    "bounds_check_": _bounds_check_,
    "tbe_lookup": _tbe_lookup,
    "tbe_lookup_checked_": _tbe_lookup_checked_,
    "tbe_group": _tbe_group,
    "tbe_row_grads": _tbe_row_grads,
    "tbe_update_": _tbe_update,
    "tbe_backward_": _tbe_backward,
    "tbe_sample_weight_grad": _tbe_sample_weight_grad,
    "tt_keys": _tt_keys,
    "tt_stored": _tt_stored,
    "tt_count_": _tt_count,
    "tt_plan": _tt_plan,
    "tt_rows": _tt_rows,
    "tt_core_grads": _tt_core_grads,
    "tt_update_": _tt_update,
    "tt_lookup_checked_": _tt_lookup,
    "tt_backward_": _tt_backward,
    "gather_segments": _gather_segments,
    "route_lengths": _route_lengths,
    "route_ids": _route_ids,
    "combine": _combine,
    "combine_backward": _spread,
    "combine_backward_": _spread_in_two,
    "quantize_rows_": _quantize_rows,
    "quant_lookup": _quant_lookup,
    "quant_lookup_checked_": _quant_lookup_checked_,
    "map_ids": _map_ids,
    "update_rows_": _update_rows,
    "advise_huge_pages_": _advise_huge_pages,
    "fill_uniform_": _fill_uniform,
}
