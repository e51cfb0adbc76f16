"""FBTT-Embedding over emblib's tensor trains: the same names, arguments and defaults.

Change the import and keep the code:

    from emblib.compat.fbtt import OptimType, TableBatchedTTEmbeddingBag, TTEmbeddingBag
    from emblib.compat.fbtt import suggested_tt_shapes, tt_matrix_to_full

`docs/fbtt.md` says what each argument and attribute is here. What differs: it runs on a CPU; every
optimizer is the one of its name; updates reach all rows of the cores; indices are checked; and rows
that leave the cache return what they learned to the cores, as far as these can take it on.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib import (
    CachedTTEmbeddingBags,
    RowEviction,
    TableBatchedTTEmbeddingBags,
    TTCache,
    TTSpec,
    optim,
)
from emblib.reference import tt as reference


class OptimType(enum.Enum):
    """Optimizers by FBTT's names; each is the one of its name (there: SGD, or Adagrad)."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    LAMB = "lamb"
    ADAM = "adam"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    LARS_SGD = "lars_sgd"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    PARTIAL_ROWWISE_LAMB = "partial_row_wise_lamb"

    def __str__(self) -> str:
        return self.value


_OPTIMIZERS: dict[OptimType, type[Any]] = {
    OptimType.SGD: optim.SGD,
    OptimType.EXACT_SGD: optim.SGD,
    OptimType.LAMB: optim.LAMB,
    OptimType.ADAM: optim.Adam,
    OptimType.EXACT_ADAGRAD: optim.Adagrad,
    OptimType.EXACT_ROWWISE_ADAGRAD: optim.RowwiseAdagrad,
    OptimType.LARS_SGD: optim.LARS,
    OptimType.PARTIAL_ROWWISE_ADAM: optim.PartialRowwiseAdam,
    OptimType.PARTIAL_ROWWISE_LAMB: optim.PartialRowwiseLAMB,
}
_WITHOUT_EPS = (optim.SGD, optim.LARS)

DISTRIBUTIONS = {
    "uniform": "uniform",
    "naive-uniform": "fbtt:naive-uniform",  # its scale is its point
    "normal": "gaussian",
    "approx-uniform": "approx_uniform",
    "approx-normal": "sampled_gaussian",
}
"""FBTT's `weight_dist`, and the `init` of emblib that is drawn."""


def suggested_tt_shapes(n: int, d: int = 3, allow_round_up: bool = True) -> list[int]:
    """Return d factors of n, or of n rounded up, that are close to each other.

    Of n and n rounded up to multiples of 10, 100, ... the number whose factors have the greatest
    entropy is taken, the first of equal ones. Factors are ascending, then small and large ones take
    turns.

    Example:
        >>> suggested_tt_shapes(11_000_000, 3)
        [200, 220, 250]
    """
    digits = len(str(n)) if allow_round_up else 1
    rounded = [-(-n // 10**k) * 10**k for k in range(digits)]
    best = max((_most_even(value, d) for value in rounded), key=_entropy)
    low, high = best[: d // 2], best[d // 2 :]
    pairs = itertools.zip_longest(low, high)
    return [factor for pair in pairs for factor in pair if factor is not None]


def _most_even(value: int, parts: int) -> tuple[int, ...]:
    """Return the factors of greatest entropy."""
    return max(_factorisations(value, parts, 1), key=_entropy)


def _factorisations(value: int, parts: int, least: int) -> list[tuple[int, ...]]:
    """Return all ascending tuples of factors >= least."""
    if parts == 1:
        return [(value,)] if value >= least else []
    divisors = (f for f in range(least, math.isqrt(value) + 1) if value % f == 0)
    return [
        (factor, *rest)
        for factor in divisors
        if factor**parts <= value
        for rest in _factorisations(value // factor, parts - 1, factor)
    ]


def _entropy(factors: Sequence[int]) -> float:
    total = sum(factors)
    return -sum(f / total * math.log(f / total) for f in factors)


def tt_matrix_to_full(
    tt_p_shapes: Sequence[int],
    tt_q_shapes: Sequence[int],
    tt_ranks: Sequence[int],
    tt_cores: Sequence[Tensor],
    tt_permute: Sequence[int] | None = None,
) -> Tensor:
    """Return all rows that cores make, `[prod p, prod q]`.

    Args:
        tt_p_shapes: row factors.
        tt_q_shapes: factors of the dimension.
        tt_ranks: with the 1 at both ends, or without.
        tt_cores: core k `[p_k, R_k * q_k * R_{k+1}]`, or laid out as `tt_permute` says.
        tt_permute: axes of a stored core in the order (R_k, p_k, q_k, R_{k+1}); [1, 0, 2, 3], also
            if left out, is how the modules here store them.

    Raises:
        ValueError: another number of ranks or cores.
    """
    cores = len(tt_p_shapes)
    full = [1, *tt_ranks, 1] if len(tt_ranks) == cores - 1 else list(tt_ranks)
    if len(full) != cores + 1 or len(tt_cores) != cores or len(tt_q_shapes) != cores:
        raise ValueError(
            f"{cores} row factors need as many factors of the dimension and cores, and "
            f"{cores - 1} ranks, got {len(tt_q_shapes)}, {len(tt_cores)} and {len(tt_ranks)}"
        )
    axes = list(tt_permute or (1, 0, 2, 3))
    laid_out = []
    for k, core in enumerate(tt_cores):
        sizes = (full[k], tt_p_shapes[k], tt_q_shapes[k], full[k + 1])
        stored = core.reshape([sizes[axis] for axis in axes])
        back = [axes.index(axis) for axis in (1, 0, 2, 3)]
        laid_out.append(stored.permute(back).reshape(tt_p_shapes[k], -1))
    return reference.to_dense(laid_out, math.prod(tt_p_shapes), tt_p_shapes, tt_q_shapes)


class TableBatchedTTEmbeddingBag(nn.Module):
    """Tensor-train tables of equal sizes, looked up at once (FBTT's name and arguments).

    Attributes:
        tt_cores: core k of all tables, `[T, p_k, R_k * q_k * R_{k+1}]`; of one table a view.
        optimizer_state: the first state of each core, laid out like it; empty for SGD.
        cache_weight: `[cache_size, D]`, the stored rows of the first table; None without a cache.
    """

    def __init__(
        self,
        num_tables: int,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: Sequence[int],
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        optimizer: OptimType = OptimType.SGD,
        learning_rate: float = 0.1,
        eps: float = 1.0e-10,
        sparse: bool = True,
        use_cache: bool = False,
        cache_size: int = 0,
        hashtbl_size: int = 0,
        weight_dist: str = "approx-normal",
        enforce_embedding_dim: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if weight_dist not in DISTRIBUTIONS:
            raise ValueError(
                f"weight_dist must be one of {', '.join(DISTRIBUTIONS)}, got {weight_dist!r}"
            )
        cores = len(tt_ranks) + 1
        rows = tt_p_shapes or suggested_tt_shapes(num_embeddings, cores)
        dims = tt_q_shapes or suggested_tt_shapes(embedding_dim, cores, allow_round_up=False)
        spec = TTSpec(num_embeddings, embedding_dim, tuple(tt_ranks), tuple(rows), tuple(dims))
        self.spec = spec.usable()
        self.num_tables, self.num_embeddings = num_tables, num_embeddings
        self.embedding_dim, self.sparse, self.use_cache = embedding_dim, sparse, use_cache
        self.tt_p_shapes, self.tt_q_shapes = list(spec.row_factors), list(spec.dim_factors)
        self.tt_ranks, self.tt_ndim = list(self.spec.full_ranks), cores
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        self.cache_size = cache_size or max(1, int(0.1 * num_embeddings))
        self.hashtbl_size = hashtbl_size or num_embeddings
        if use_cache and self.hashtbl_size < self.cache_size:
            raise ValueError(
                f"hashtbl_size must be at least cache_size, got {self.hashtbl_size} and "
                f"{self.cache_size}"
            )
        specs = [self.spec] * num_tables
        rule, init = self._rule(), DISTRIBUTIONS[weight_dist]
        self.bags: TableBatchedTTEmbeddingBags | CachedTTEmbeddingBags
        if use_cache:
            counted = num_tables * self.hashtbl_size
            cache = TTCache(self.cache_size, RowEviction.PROJECT, counted)
            self.bags = CachedTTEmbeddingBags(specs, cache, rule, init=init, device=device)
        else:
            self.bags = TableBatchedTTEmbeddingBags(specs, rule, init=init, device=device)
        self.weight_dist = weight_dist

    def _rule(self) -> optim.Optimizer:
        """Return the optimizer; `sparse=False` leaves dense gradients on the parameters."""
        if not self.sparse:
            return optim.External(gradient=optim.Gradient.DENSE)
        kind = _OPTIMIZERS[OptimType(self.optimizer)]
        options = {} if kind in _WITHOUT_EPS else {"eps": self.eps}
        made: optim.Optimizer = kind(self.learning_rate, **options)
        return made

    @property
    def _trains(self) -> TableBatchedTTEmbeddingBags:
        bags = self.bags
        return bags.trains if isinstance(bags, CachedTTEmbeddingBags) else bags

    def forward(self, indices: Tensor, offsets: Tensor, warmup: bool = True) -> Tensor:
        """Return the sums of bags, `[T, B, D]`.

        Args:
            indices: int32 or int64, of all bags of table 0, then of table 1, ...
            offsets: `[T * B + 1]`, the last entry included.
            warmup: has no effect, as in FBTT.
        """
        out: Tensor = self.bags(indices, offsets)
        return out.view(-1, self.num_tables, self.embedding_dim).transpose(0, 1)

    def reset_parameters(self) -> None:
        """Draw the cores again, and empty the cache."""
        self.bags.reset_parameters()

    @property
    def tt_cores(self) -> list[Tensor]:
        """Return core k of all tables, `[T, p_k, R_k * q_k * R_{k+1}]`; of one table a view."""
        tables = [self._trains.table_cores(t) for t in range(self.num_tables)]
        return [
            of_tables[0].unsqueeze(0) if len(of_tables) == 1 else torch.stack(of_tables)
            for of_tables in zip(*tables, strict=True)
        ]

    @property
    def optimizer_state(self) -> list[Tensor]:
        """Return the first state of each core of all tables; empty where the optimizer has none."""
        tables = [self._trains.core_optimizer_states(t) for t in range(self.num_tables)]
        firsts = [[next(iter(states.values()), None) for states in table] for table in tables]
        found = [list(of_tables) for of_tables in zip(*firsts, strict=True)]
        return [torch.stack([s for s in of if s is not None]) for of in found if of[0] is not None]

    @property
    def cache_weight(self) -> Tensor | None:
        """Return the stored rows of the first table."""
        if not isinstance(self.bags, CachedTTEmbeddingBags):
            return None
        return self.bags.rows.table_weights()[0]

    def get_params(self) -> list[nn.Parameter]:
        """Return the parameters."""
        return list(self.parameters())

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, from the next backward on."""
        self.learning_rate = lr
        self.bags.set_learning_rate(lr)

    def full_weight(self) -> Tensor:
        """Return the rows of one table, `[prod p, D]`, stored ones included (there: without them).

        Raises:
            ValueError: several tables.
        """
        if self.num_tables != 1:
            raise ValueError(f"full_weight is of one table, there are {self.num_tables}")
        cores = [core.detach().squeeze(0) for core in self.tt_cores]
        full = tt_matrix_to_full(self.tt_p_shapes, self.tt_q_shapes, self.tt_ranks, cores)
        full[: self.num_embeddings] = self.bags.to_dense(0)
        return full

    def cache_populate(self) -> None:
        """Store the most used rows from now on.

        Raises:
            ValueError: the module has no cache.
        """
        self._cached().populate()

    def reset_cache(self) -> None:
        """Return what stored rows learned to the cores, and forget all counts."""
        self._cached().empty_cache()

    def _cached(self) -> CachedTTEmbeddingBags:
        if not isinstance(self.bags, CachedTTEmbeddingBags):
            raise ValueError("the module has no cache: construct it with use_cache=True")
        return self.bags

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        """Accept the cores of FBTT's checkpoints, `tt_cores.0`, ..., for all tables stacked."""
        inner = "bags.trains." if isinstance(self.bags, CachedTTEmbeddingBags) else "bags."
        for k in range(self.tt_ndim):
            stacked = state_dict.pop(f"{prefix}tt_cores.{k}", None)
            if stacked is not None:
                for t, core in enumerate(stacked.unbind(0)):
                    state_dict[f"{prefix}{inner}cores.{t * self.tt_ndim + k}"] = core
        super()._load_from_state_dict(state_dict, prefix, *rest)


class TTEmbeddingBag(TableBatchedTTEmbeddingBag):
    """One tensor-train table, by default with a cache (FBTT's name and arguments)."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        tt_ranks: Sequence[int],
        tt_p_shapes: Sequence[int] | None = None,
        tt_q_shapes: Sequence[int] | None = None,
        optimizer: OptimType = OptimType.SGD,
        learning_rate: float = 0.1,
        eps: float = 1.0e-10,
        sparse: bool = True,
        use_cache: bool = True,
        cache_size: int = 0,
        hashtbl_size: int = 0,
        weight_dist: str = "approx-normal",
        enforce_embedding_dim: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(1, **given)

    def forward(self, indices: Tensor, offsets: Tensor, warmup: bool = True) -> Tensor:
        """Return the sums of bags, `[B, D]`; `offsets` `[B + 1]` includes the last entry."""
        return super().forward(indices, offsets, warmup)[0]
