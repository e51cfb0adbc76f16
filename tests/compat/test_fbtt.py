"""FBTT's names: results against dense expansion, its examples, its page, and clear errors."""

from __future__ import annotations

import inspect
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from emblib.compat import fbtt, fbtt_option_list
from emblib.compat.fbtt import (
    DISTRIBUTIONS,
    OptimType,
    TableBatchedTTEmbeddingBag,
    TTEmbeddingBag,
    suggested_tt_shapes,
    tt_matrix_to_full,
)

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
        ends = [int(offsets[5 * t]) for t in range(tables + 1)]
        expected = torch.stack(
            [
                pooled(
                    dense_of(cores, module, t),
                    ids[ends[t] : ends[t + 1]],
                    offsets[5 * t : 5 * t + 6] - ends[t],
                )
                for t in range(tables)
            ]
        )
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
    if weight_dist == "naive-uniform":
        assert all((core >= 0).all() for core in module.tt_cores)
        assert max(float(core.max()) for core in module.tt_cores) <= 1 / math.sqrt(8000)
    else:
        assert float(rows.std()) == pytest.approx(target, rel=0.25)
        assert abs(float(rows.mean())) < 0.1 * target


@pytest.mark.parametrize("use_cache", [False, True])
def test_checkpoints_of_fbtt_and_of_our_own(use_cache: bool) -> None:
    one = TableBatchedTTEmbeddingBag(2, 60, 8, [3, 3], use_cache=use_cache)
    other = TableBatchedTTEmbeddingBag(2, 60, 8, [3, 3], use_cache=use_cache)
    stored = {f"tt_cores.{k}": core.detach().clone() for k, core in enumerate(one.tt_cores)}
    other.load_state_dict(stored, strict=False)
    for ours, theirs in zip(other.tt_cores, one.tt_cores, strict=True):
        assert torch.equal(ours, theirs)
    third = TableBatchedTTEmbeddingBag(2, 60, 8, [3, 3], use_cache=use_cache)
    third.load_state_dict(one.state_dict())
    ids, offsets = batch(2, 60)
    assert torch.equal(third(ids, offsets), one(ids, offsets))


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
        "write it again: python -m emblib.compat.fbtt_option_list docs/fbtt.md"
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
