"""FBTT's names: results against dense expansion, its examples, its page, and clear errors."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import pickle
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from emblib.compat import fbtt
from emblib.compat.fbtt import (
    DISTRIBUTIONS,
    OptimType,
    TableBatchedTTEmbeddingBag,
    TTEmbeddingBag,
    suggested_tt_shapes,
    tt_matrix_to_full,
)
from scripts.docs import fbtt_option_list

PAGE = Path(__file__).parents[2] / "docs/fbtt.md"


def batch(tables: int, rows: int, size: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 6, (tables * size,), generator=draw)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return torch.randint(rows, (int(offsets[-1]),), generator=draw), offsets


def pooled(table: Tensor, ids: Tensor, offsets: Tensor) -> Tensor:
    return nn.functional.embedding_bag(ids, table, offsets, mode="sum", include_last_offset=True)


def dense_of(cores: list[Tensor], module: TableBatchedTTEmbeddingBag, table: int) -> Tensor:
    """All rows of a table, by einsum."""
    p, q, r = module.tt_p_shapes, module.tt_q_shapes, module.tt_ranks
    chain = torch.ones(1, 1, 1)
    for k, core in enumerate(cores):
        own = core[table].view(p[k], r[k], q[k], r[k + 1])
        chain = torch.einsum("ndr,prqs->npdqs", chain, own)
        chain = chain.reshape(-1, chain.shape[2] * q[k], r[k + 1])
    return chain.squeeze(2)


def expanded(
    cores: list[Tensor], module: TableBatchedTTEmbeddingBag, ids: Tensor, offsets: Tensor
) -> Tensor:
    """Return what `module` returns for five bags per table, from dense rows of `cores`."""
    pooled_rows = []
    for t in range(offsets.numel() // 5):
        bounds = offsets[5 * t : 5 * t + 6]
        table_ids = ids[bounds[0] : bounds[-1]]
        pooled_rows.append(pooled(dense_of(cores, module, t), table_ids, bounds - bounds[0]))
    return torch.stack(pooled_rows)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("tables", [1, 3])
def test_lookups_and_updates_against_dense_expansion(tables: int, use_cache: bool) -> None:
    torch.manual_seed(1)
    module = TableBatchedTTEmbeddingBag(
        tables, 60, 12, [4, 3], learning_rate=0.5, use_cache=use_cache, weight_dist="normal"
    )
    cores = [core.detach().clone().requires_grad_() for core in module.tt_cores]
    for step in range(3):
        ids, offsets = batch(tables, 60, seed=step)
        out = module(ids, offsets)
        assert out.shape == (tables, 5, 12)
        expected = expanded(cores, module, ids, offsets)
        torch.testing.assert_close(out, expected)
        weight = torch.randn(out.shape)
        (out * weight).sum().backward()
        grads = torch.autograd.grad((expected * weight).sum(), cores)
        with torch.no_grad():
            for core, grad in zip(cores, grads, strict=True):
                core -= 0.5 * grad
        for ours, core in zip(module.tt_cores, cores, strict=True):
            torch.testing.assert_close(ours.detach(), core.detach(), rtol=1e-4, atol=1e-5)


def test_dense_gradients_where_sparse_is_false() -> None:
    module = TTEmbeddingBag(50, 8, [3, 3], sparse=False, use_cache=False)
    optimizer = torch.optim.SGD(module.get_params(), lr=0.1)
    before = [core.detach().clone() for core in module.tt_cores]
    ids, offsets = batch(1, 50)
    module(ids, offsets).sum().backward()
    assert all(p.grad is not None for p in module.parameters() if p.requires_grad)
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, module.tt_cores, strict=True))


@pytest.mark.parametrize("optimizer", list(OptimType))
def test_every_optimizer_trains_all_rows_that_took_part(optimizer: OptimType) -> None:
    """FBTT skips rows of a core that has more rows than columns."""
    torch.manual_seed(0)
    shapes = {"tt_p_shapes": [40, 1, 3], "tt_q_shapes": [1, 2, 2]}
    module = TTEmbeddingBag(120, 4, [2, 2], optimizer=optimizer, use_cache=False, **shapes)
    before = [core.detach().clone() for core in module.tt_cores]
    ids = torch.arange(120)
    module(ids, torch.arange(121)).square().sum().backward()
    for old, new in zip(before, module.tt_cores, strict=True):
        assert ((old - new).abs().sum(2) > 0).all(), "a row of a core did not learn"
    if optimizer not in (OptimType.SGD, OptimType.EXACT_SGD):
        assert module.optimizer_state
    else:
        assert module.optimizer_state == []


def test_the_example_of_fbtts_readme() -> None:
    """Its second example, with dimensions that multiply (there 10 x 3 is given for 3 columns)."""
    module = TTEmbeddingBag(
        num_embeddings=10,
        embedding_dim=4,
        tt_p_shapes=None,
        tt_q_shapes=None,
        tt_ranks=[2, 2],
        sparse=True,
        use_cache=True,
        cache_size=2,
        hashtbl_size=4,
    )
    ids, offsets = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9]), torch.tensor([0, 4, 8])
    full = module.full_weight()[:10]
    torch.testing.assert_close(module(ids, offsets), pooled(full, ids, offsets))
    module(ids, offsets).sum().backward()
    module.cache_populate()
    assert module.cache_weight.shape == (2, 4)
    assert sorted(module.bags.cached_ids(0).tolist()) == [2, 4]
    module(ids, offsets).sum().backward()
    full = module.full_weight()[:10]
    torch.testing.assert_close(module(ids, offsets), pooled(full, ids, offsets))
    learned = full.clone()
    module.cache_populate()
    torch.testing.assert_close(module.full_weight()[:10], learned)
    module.reset_cache()
    assert len(module.bags.cached_ids(0)) == 0


@pytest.mark.parametrize(
    ("n", "d", "factors"),
    [
        (10_131_227, 3, [200, 220, 250]),
        (11_000_000, 3, [200, 220, 250]),
        (40_000_000, 3, [250, 400, 400]),
        (1_048_576, 3, [125, 125, 128]),
        (7_046_547, 3, [200, 200, 200]),
        (10, 3, [1, 2, 5]),
    ],
)
def test_factors_that_fbtt_was_seen_to_suggest(n: int, d: int, factors: list[int]) -> None:
    assert suggested_tt_shapes(n, d) == factors


@pytest.mark.parametrize(("n", "d"), [(0, 3), (7, 0)])
def test_no_rows_or_cores_have_no_factors(n: int, d: int) -> None:
    with pytest.raises(ValueError, match=f"positive number of factors, got {n} and {d}"):
        suggested_tt_shapes(n, d)


def test_suggested_factors_cover_the_rows() -> None:
    for n, d in itertools.product((1, 7, 97, 1009, 65_537, 999_983), (2, 3, 4)):
        exact = suggested_tt_shapes(n, d, allow_round_up=False)
        assert math.prod(exact) == n
        assert len(exact) == d
        rounded = suggested_tt_shapes(n, d)
        assert n <= math.prod(rounded) < 10 ** len(str(n)) + n


def test_all_rows_of_cores_in_any_order_of_axes() -> None:
    p, q, r = [3, 4, 2], [2, 1, 3], [1, 5, 2, 1]
    cores = [torch.randn(p[k], r[k] * q[k] * r[k + 1]) for k in range(3)]
    module = TTEmbeddingBag(24, 6, [5, 2], p, q, use_cache=False)
    expected = dense_of([core[None] for core in cores], module, 0)
    torch.testing.assert_close(tt_matrix_to_full(p, q, r, cores), expected)
    torch.testing.assert_close(tt_matrix_to_full(p, q, r[1:3], cores, [1, 0, 2, 3]), expected)
    turned = [
        core.view(p[k], r[k], q[k], r[k + 1]).permute(1, 0, 2, 3) for k, core in enumerate(cores)
    ]
    torch.testing.assert_close(tt_matrix_to_full(p, q, r, turned, [0, 1, 2, 3]), expected)
    with pytest.raises(ValueError, match="3 row factors need"):
        tt_matrix_to_full(p, q, r, cores[:2])


@pytest.mark.parametrize("weight_dist", DISTRIBUTIONS)
def test_initial_values(weight_dist: str) -> None:
    torch.manual_seed(0)
    module = TTEmbeddingBag(8000, 16, [8, 8], weight_dist=weight_dist, use_cache=False)
    rows = module.full_weight()[:8000]
    target = 1 / math.sqrt(3 * 8000)
    if weight_dist in ("uniform", "naive-uniform"):
        # The formulas of FBTT's source.
        deviation = math.sqrt(2 / (8000 + 16)) ** (1 / 3) * 64 ** (-1 / 6)
        top = 1 / math.sqrt(8000) if weight_dist == "naive-uniform" else deviation
        for core in module.tt_cores:
            assert float(core.min()) >= 0
            assert 0.9 * top < float(core.max()) <= top
    else:
        assert float(rows.std()) == pytest.approx(target, rel=0.25)
        assert abs(float(rows.mean())) < 0.1 * target


README = {"tt_p_shapes": [12, 9, 11], "tt_q_shapes": [4, 4, 4], "tt_ranks": [12, 14]}
"""The factors and ranks of FBTT's README, with fewer rows."""


def of_readme(tables: int = 1, **options: Any) -> TableBatchedTTEmbeddingBag:
    return TableBatchedTTEmbeddingBag(tables, 1000, 64, **{**README, **options})


def saved_by_fbtt(module: TableBatchedTTEmbeddingBag, **changes: Any) -> dict[str, Any]:
    """The state dict that FBTT's module of these sizes has."""
    p = module.tt_p_shapes
    return {
        "L": torch.tensor([p[1] * p[2], p[2], 1]),
        **{f"tt_cores.{k}": torch.randn(core.shape) for k, core in enumerate(module.tt_cores)},
        **{f"optimizer_state.optimizer_state{k}": torch.zeros(0) for k in range(3)},
        "hashtbl": torch.empty(0, dtype=torch.int64),
        "cache_state": torch.empty(0, dtype=torch.int32),
        **changes,
    }


def copied(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {key: value.clone() for key, value in state_dict.items()}


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("tables", [1, 3])
def test_state_dicts_of_fbtt_and_our_own(tables: int, use_cache: bool) -> None:
    one = of_readme(tables, use_cache=use_cache, cache_size=7)
    saved = saved_by_fbtt(one)
    one.load_state_dict(saved)
    ids, offsets = batch(tables, 1000)
    one(ids, offsets).sum().backward()
    if use_cache:
        one.cache_populate()
        one(ids, offsets).sum().backward()
    other = of_readme(tables, use_cache=use_cache, cache_size=7)
    other.load_state_dict(copied(one.state_dict()))
    assert torch.equal(other(ids, offsets), one(ids, offsets))
    assert {"tt_cores.0", "tt_cores.1", "tt_cores.2"} <= one.state_dict().keys()
    one.load_state_dict(saved, strict=True)
    for k, core in enumerate(one.tt_cores):
        assert torch.equal(core.detach(), saved[f"tt_cores.{k}"])
    fresh = of_readme(tables, use_cache=False)
    fresh.load_state_dict({k: v for k, v in saved.items() if "tt_cores" in k}, strict=False)
    assert torch.equal(fresh(ids, offsets), one(ids, offsets)), "rows of before are in the cache"


def test_state_dicts_of_one_core_per_table() -> None:
    """Earlier versions had the cores of a table one by one, below `bags`."""
    module = of_readme(2, optimizer=OptimType.EXACT_ADAGRAD)
    ids, offsets = batch(2, 1000)
    module(ids, offsets).sum().backward()
    before, state = copied(module.state_dict()), module.state_dict()
    for t, k in itertools.product(range(2), range(3)):
        state[f"bags.cores.{3 * t + k}"] = before[f"tt_cores.{k}"][t]
        state[f"bags.state_sum_{3 * t + k}"] = before[f"bags.state_sum_{k}"][t]
    state = {k: v.clone() for k, v in state.items() if not k.startswith("tt_cores")}
    module(ids, offsets).sum().backward()
    module.load_state_dict(state)
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), key


def test_states_of_fbtts_optimizers() -> None:
    adagrad = of_readme(2, optimizer=OptimType.EXACT_ADAGRAD)
    sums = {
        f"optimizer_state.optimizer_state{k}": torch.rand(core.shape)
        for k, core in enumerate(adagrad.tt_cores)
    }
    saved = saved_by_fbtt(adagrad, **sums)
    adagrad.load_state_dict(saved)
    for mine, theirs in zip(adagrad.optimizer_state, sums.values(), strict=True):
        assert torch.equal(mine, theirs)
    for optimizer in (OptimType.ADAM, OptimType.SGD):
        other = of_readme(2, optimizer=optimizer)
        before = copied(other.state_dict())
        with pytest.raises(RuntimeError, match=r"construct it with OptimType\.EXACT_ADAGRAD"):
            other.load_state_dict(copied(saved))
        for key, value in other.state_dict().items():
            assert torch.equal(value, before[key]), f"{key} was written"


def test_rows_of_fbtts_cache_are_taken_over() -> None:
    """Ids 5, 990, 8, 3 and 6 were counted; 5 and 990 are stored, and 3 and 6 share a slot."""
    module = of_readme(use_cache=True, cache_size=4, hashtbl_size=6)
    rows = torch.randn(4, 64)
    cache = {
        "hashtbl": torch.tensor([5, -1, 990, 8, 6, 3]),
        "cache_freq": torch.tensor([7, 0, 9, 4, 1, 5]),
        "cache_state": torch.tensor([2, 3, 0, -1, 1, 1], dtype=torch.int32),
        "cache_weight": rows,
    }
    saved = saved_by_fbtt(module, **cache)
    module.load_state_dict(saved)
    assert sorted(module.bags.cached_ids(0).tolist()) == [5, 990]
    found = module(torch.tensor([5, 990]), torch.arange(3))
    assert torch.equal(found.squeeze(0), rows[[2, 0]])
    module.cache_populate()
    assert sorted(module.bags.cached_ids(0).tolist()) == [3, 5, 8, 990]
    assert torch.equal(module.full_weight()[[5, 990]], rows[[2, 0]])
    with pytest.raises(RuntimeError, match="construct the module with use_cache=True"):
        of_readme(use_cache=False).load_state_dict(copied(saved))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"L": torch.tensor([88, 11, 1])}, r"L: the cores are of other row factors"),
        ({"tt_cores.1": torch.zeros(2, 9, 4 * 12 * 13)}, r"tt_cores\.1: it must be \[2, 9, 672\]"),
        ({"tt_cores.2": torch.zeros(3, 11, 56)}, r"tt_cores\.2: it must be \[2, 11, 56\]"),
        ({"tt_cores.0": torch.zeros(12, 48)}, r"tt_cores\.0: it must be \[2, 12, 48\]"),
    ],
)
def test_state_dicts_that_do_not_fit_write_nothing(changes: Any, message: str) -> None:
    module = of_readme(2)
    before = copied(module.state_dict())
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(saved_by_fbtt(module, **changes))
    for key, value in module.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was written"


def test_cores_of_another_tensor_train_with_equal_shapes() -> None:
    """Ranks (4, 4) and dim factors (4, 4, 4) give the shapes of (2, 8) and (8, 4, 2)."""
    one = TTEmbeddingBag(60, 64, [4, 4], [4, 4, 4], [4, 4, 4], use_cache=False)
    other = TTEmbeddingBag(60, 64, [2, 8], [4, 4, 4], [8, 4, 2], use_cache=False)
    before = copied(other.state_dict())
    with pytest.raises(RuntimeError, match="tt_layout: the cores are of another tensor train"):
        other.load_state_dict(copied(one.state_dict()))
    for key, value in other.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} was written"


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("tables", [1, 3])
def test_cores_are_parameters_that_lookups_read(tables: int, use_cache: bool) -> None:
    module = of_readme(tables, sparse=False, use_cache=use_cache)
    assert [name for name, _ in module.named_parameters()][:3] == [
        f"tt_cores.{k}" for k in range(3)
    ]
    values = [torch.randn(core.shape) for core in module.tt_cores]
    for core, value in zip(module.tt_cores, values, strict=True):
        assert isinstance(core, nn.Parameter)
        for t in range(tables):
            core.detach()[t].copy_(value[t])
    leaves = [value.clone().requires_grad_() for value in values]
    ids, offsets = batch(tables, 1000)
    expected = expanded(leaves, module, ids, offsets)
    out = module(ids, offsets)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-3)
    weight = torch.randn(out.shape)
    (out * weight).sum().backward()
    (expected * weight).sum().backward()
    for core, leaf in zip(module.tt_cores, leaves, strict=True):
        torch.testing.assert_close(core.grad, leaf.grad, rtol=1e-4, atol=1e-2)
    optimizer = torch.optim.SGD(module.get_params(), lr=0.1)
    optimizer.step()
    for core, value in zip(module.tt_cores, values, strict=True):
        torch.testing.assert_close(core.detach(), value - 0.1 * core.grad)


def test_cores_stay_those_of_lookups() -> None:
    """In copies, after pickling, and after their memory was exchanged."""
    module = of_readme(2, optimizer=OptimType.EXACT_ADAGRAD)
    ids, offsets = batch(2, 1000)
    made = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to("cpu")]
    for other in made:
        assert torch.equal(other(ids, offsets), module(ids, offsets))
        with torch.no_grad():
            other.tt_cores[1].mul_(2)
            other.tt_cores[2].data = other.tt_cores[2].detach() * 2
        for state in other.optimizer_state:
            state.fill_(1e30)
        out = other(ids, offsets)
        out.sum().backward()
        assert torch.equal(other(ids, offsets), out), "Adagrad's state was not the one written"
        torch.testing.assert_close(out, 4 * made[0](ids, offsets) if other is not made[0] else out)
        with torch.no_grad():
            other.tt_cores[1].div_(2)
            other.tt_cores[2].div_(2)
    module.tt_cores.requires_grad_(False)
    before = [core.clone() for core in module.tt_cores]
    assert not module(ids, offsets).requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, module.tt_cores, strict=True))


def test_stored_rows_are_a_parameter_where_gradients_are_left() -> None:
    module = of_readme(sparse=False, use_cache=True, cache_size=4)
    ids, offsets = torch.tensor([3, 3, 8]), torch.tensor([0, 2, 3])
    module(ids, offsets).sum().backward()
    module.cache_populate()
    module(ids, offsets).sum().backward()
    assert isinstance(module.cache_weight, nn.Parameter)
    grad = module.cache_weight.grad
    grad = grad.to_dense() if grad.is_sparse else grad
    stored = {int(i): n for n, i in enumerate(module.bags.key_of_row)}
    assert torch.equal(grad[stored[3]], torch.full((64,), 2.0))
    module.full_weight()[[1, 8]].sum().backward()
    assert all(core.grad is not None for core in module.tt_cores)


def test_ranks_that_no_table_of_these_sizes_has() -> None:
    """FBTT takes them, and the cores of its state dict have them."""
    torch.manual_seed(0)
    module = TTEmbeddingBag(10, 3, [2, 5], sparse=False, use_cache=False, weight_dist="normal")
    assert module.tt_ranks == [1, 2, 5, 1]
    assert [core.shape for core in module.tt_cores] == [(1, 1, 2), (1, 2, 10), (1, 5, 15)]
    ids, offsets = batch(1, 10)
    full = dense_of([core.detach() for core in module.tt_cores], module, 0)
    torch.testing.assert_close(module(ids, offsets), pooled(full, ids, offsets))
    module(ids, offsets).sum().backward()
    assert all(core.grad is not None for core in module.tt_cores)


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_without_their_end_and_bags_of_equal_length(
    dtype: torch.dtype, use_cache: bool
) -> None:
    """FBTT's README has two bags of four ids, with the offsets 0 and 4."""
    module = TTEmbeddingBag(10, 4, tt_ranks=[2, 2], use_cache=use_cache)
    ids = torch.tensor([1, 2, 4, 5, 4, 3, 2, 9], dtype=dtype)
    expected = module(ids, torch.tensor([0, 4, 8], dtype=dtype))
    assert expected.shape == (2, 4)
    assert torch.equal(module(ids, torch.tensor([0, 4], dtype=dtype)), expected)
    assert torch.equal(module(ids.view(2, 4)), expected)
    assert torch.equal(module(ids.view(1, 2, 4)), expected)
    assert module(ids[:0], torch.tensor([0], dtype=dtype)).shape == (0, 4)
    assert module(ids[:0], torch.tensor([0, 0], dtype=dtype)).shape == (1, 4)
    with pytest.raises(ValueError, match="need offsets"):
        module(ids)
    with pytest.raises(ValueError, match="take no offsets"):
        module(ids.view(2, 4), torch.tensor([0, 4, 8]))
    both = TableBatchedTTEmbeddingBag(2, 10, 4, tt_ranks=[2, 2], use_cache=use_cache)
    expected = both(ids, torch.tensor([0, 1, 4, 6, 8], dtype=dtype))
    assert torch.equal(both(ids, torch.tensor([0, 1, 4, 6], dtype=dtype)), expected)
    expected = both(ids, torch.arange(5, dtype=dtype) * 2)
    assert torch.equal(both(ids.view(4, 2)), expected)
    assert torch.equal(both(ids.view(2, 2, 2)), expected)


def test_counting_without_a_lookup() -> None:
    module = TTEmbeddingBag(50, 8, [3, 3], cache_size=2)
    module.update_cache(torch.tensor([7, 7, 9, 4, 9, -1, 50], dtype=torch.int32))
    module.cache_populate()
    assert sorted(module.bags.cached_ids(0).tolist()) == [7, 9]
    TTEmbeddingBag(50, 8, [3, 3], use_cache=False).update_cache(torch.tensor([7]))


def test_drawing_from_another_distribution() -> None:
    module = TTEmbeddingBag(500, 8, [3, 3], weight_dist="normal", use_cache=False)
    module.reset_parameters("uniform")
    assert all((core >= 0).all() for core in module.tt_cores)
    with pytest.raises(ValueError, match="weight_dist must be one of"):
        module.reset_parameters("gauss")
    module.reset_parameters()
    assert all((core >= 0).all() for core in module.tt_cores)


def test_learning_rates_can_be_set() -> None:
    module = TTEmbeddingBag(50, 8, [3, 3], use_cache=True, cache_size=4)
    module.set_learning_rate(0.0)
    before = module.full_weight()
    ids, offsets = batch(1, 50)
    module(ids, offsets).sum().backward()
    assert torch.equal(module.full_weight(), before)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="weight_dist must be one of uniform, naive-uniform"):
        TTEmbeddingBag(50, 8, [3, 3], weight_dist="gauss")
    with pytest.raises(ValueError, match="hashtbl_size must be at least cache_size"):
        TTEmbeddingBag(50, 8, [3, 3], cache_size=20, hashtbl_size=10)
    with pytest.raises(ValueError, match="use_cache=True"):
        TTEmbeddingBag(50, 8, [3, 3], use_cache=False).cache_populate()
    with pytest.raises(ValueError, match="of one table"):
        TableBatchedTTEmbeddingBag(2, 50, 8, [3, 3]).full_weight()
    with pytest.raises(ValueError, match="multiply to 27 < rows 50"):
        TTEmbeddingBag(50, 8, [3, 3], tt_p_shapes=[3, 3, 3])


def test_the_page_is_up_to_date_and_explains_every_name() -> None:
    assert PAGE.read_text() == fbtt_option_list.page(), (
        "write it again: python -m scripts.docs.fbtt_option_list docs/fbtt.md"
    )
    explained = fbtt_option_list.names()
    arguments = set(inspect.signature(TableBatchedTTEmbeddingBag).parameters)
    assert arguments <= explained
    module = TTEmbeddingBag(50, 8, [3, 3])
    inherited = set(dir(nn.Module()))
    public = {n for n in dir(module) if not n.startswith("_")} - inherited
    own = {"bags", "spec", "weight_dist", "learning_rate", "eps", "optimizer", "num_tables"}
    assert public - own <= explained
    functions = {n for n in ("OptimType", "suggested_tt_shapes", "tt_matrix_to_full")}
    assert functions <= explained
    for name in explained:
        assert name in arguments or hasattr(module, name) or hasattr(fbtt, name), name


def test_factors_may_be_an_array() -> None:
    bag = TTEmbeddingBag(60, 8, [4, 4], numpy.array([3, 4, 5]), numpy.array([2, 2, 2]))
    assert (bag.tt_p_shapes, bag.tt_q_shapes) == ([3, 4, 5], [2, 2, 2])
    assert bag(torch.tensor([59]), torch.tensor([0, 1])).shape == (1, 8)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_size": 10}, {"sparse": False}])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_cores_keep_their_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    bags = TTEmbeddingBag(100, 8, [4, 4], **options)
    ids, offsets = torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])
    with torch.no_grad():
        expected = bags(ids, offsets)
    with pytest.warns(UserWarning, match="tables keep their dtypes"):
        bags.to(dtype)
    output = bags(ids, offsets)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert {core.dtype for core in bags.tt_cores} == {torch.float32}
