"""FBTT-Embedding, implemented by emblib's tensor trains, with the same names and arguments.

Change the import and keep the code:

    from emblib.compat.fbtt import OptimType, TableBatchedTTEmbeddingBag, TTEmbeddingBag
    from emblib.compat.fbtt import suggested_tt_shapes, tt_matrix_to_full

`docs/fbtt.md` says what each argument and attribute is here. These differ: the modules also run on
a CPU; every optimizer is the one of its name; updates reach all rows of the cores; indices are
checked; and rows that leave the cache are projected onto the cores, approximately.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from emblib import RowEviction, TTCache, TTSpec, optim
from emblib.compat.checks import check_flags
from emblib.compat.fbtt_tables import StackedCachedTTBags, StackedTTBags, StateDictReader
from emblib.reference import tt as reference


class OptimType(enum.Enum):
    """Optimizers by FBTT's names; FBTT itself runs SGD or Adagrad for all of them."""

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
_CLASSES_WITHOUT_EPS = (optim.SGD, optim.LARS)

DISTRIBUTIONS = {
    "uniform": "positive_uniform",
    "naive-uniform": "unscaled_uniform",  # has FBTT's scale, for which users choose it
    "normal": "gaussian",
    "approx-uniform": "approx_uniform",
    "approx-normal": "sampled_gaussian",
}
"""emblib's `init` for each `weight_dist` of FBTT."""


def _initializer(weight_dist: str) -> str:
    """Return emblib's `init` for FBTT's name of a distribution; ValueError for another name."""
    if weight_dist not in DISTRIBUTIONS:
        raise ValueError(
            f"weight_dist must be one of {', '.join(DISTRIBUTIONS)}, got {weight_dist!r}"
        )
    return DISTRIBUTIONS[weight_dist]


def suggested_tt_shapes(n: int, d: int = 3, allow_round_up: bool = True) -> list[int]:
    """Return d factors of n, or of n rounded up, that are close to each other.

    The candidates are n and, with `allow_round_up`, n rounded up to multiples of 10, 100, and so
    on. The result has the factors of the candidate whose factors have the greatest entropy, the
    first one of equals. Factors of the smaller half and of the larger half alternate, each half in
    ascending order.

    Raises:
        ValueError: `n` or `d` is below 1.

    Example:
        >>> from emblib.compat.fbtt import suggested_tt_shapes
        >>> suggested_tt_shapes(11_000_000, 3)
        [200, 220, 250]
    """
    check_flags(allow_round_up=allow_round_up)
    if n < 1 or d < 1:
        raise ValueError(f"a positive number has a positive number of factors, got {n} and {d}")
    num_candidates = len(str(n)) if allow_round_up else 1
    candidates = [-(-n // 10**k) * 10**k for k in range(num_candidates)]
    best = max((_most_even_factors(value, d) for value in candidates), key=_entropy)
    smaller_half, larger_half = best[: d // 2], best[d // 2 :]
    pairs = itertools.zip_longest(smaller_half, larger_half)
    return [factor for pair in pairs for factor in pair if factor is not None]


def _most_even_factors(value: int, num_factors: int) -> tuple[int, ...]:
    """Return the `num_factors` factors of `value` that have the greatest entropy, ascending."""
    return max(_factorisations(value, num_factors, 1), key=_entropy)


def _factorisations(value: int, num_factors: int, min_factor: int) -> list[tuple[int, ...]]:
    """Return all ascending tuples of `num_factors` factors >= `min_factor` of `value`."""
    if num_factors == 1:
        return [(value,)] if value >= min_factor else []
    return [
        (factor, *other_factors)
        for factor in range(min_factor, math.isqrt(value) + 1)
        if value % factor == 0 and factor**num_factors <= value
        for other_factors in _factorisations(value // factor, num_factors - 1, factor)
    ]


def _entropy(factors: Sequence[int]) -> float:
    total = sum(factors)
    shares = [factor / total for factor in factors]
    return -sum(share * math.log(share) for share in shares)


def tt_matrix_to_full(
    tt_p_shapes: Sequence[int],
    tt_q_shapes: Sequence[int],
    tt_ranks: Sequence[int],
    tt_cores: Sequence[Tensor],
    tt_permute: Sequence[int] | None = None,
) -> Tensor:
    """Return the whole table of a tensor train, `[prod p, prod q]`.

    Args:
        tt_p_shapes: row factor of each core.
        tt_q_shapes: factor of the dimension of each core.
        tt_ranks: ranks of the train, with or without the 1 at both ends.
        tt_cores: cores, core k `[p_k, R_k * q_k * R_{k+1}]`, or in the order of `tt_permute`.
        tt_permute: order in which a core stores its axes, numbered (R_k, p_k, q_k, R_{k+1}); None
            is [1, 0, 2, 3], the order of the modules here.

    Raises:
        RuntimeError: a core has another size than the factors and ranks say.
        ValueError: the numbers of factors, ranks and cores do not fit each other.
    """
    num_cores = len(tt_p_shapes)
    full_ranks = [1, *tt_ranks, 1] if len(tt_ranks) == num_cores - 1 else list(tt_ranks)
    if (
        len(full_ranks) != num_cores + 1
        or len(tt_cores) != num_cores
        or len(tt_q_shapes) != num_cores
    ):
        raise ValueError(
            f"{num_cores} row factors need as many factors of the dimension and cores, and "
            f"{num_cores - 1} ranks, got {len(tt_q_shapes)}, {len(tt_cores)} and {len(tt_ranks)}"
        )
    axes = list(tt_permute or (1, 0, 2, 3))
    emblib_cores = []
    for k, core in enumerate(tt_cores):
        sizes = (full_ranks[k], tt_p_shapes[k], tt_q_shapes[k], full_ranks[k + 1])
        stored_core = core.reshape([sizes[axis] for axis in axes])
        emblib_axes = [axes.index(axis) for axis in (1, 0, 2, 3)]
        emblib_cores.append(stored_core.permute(emblib_axes).reshape(tt_p_shapes[k], -1))
    return reference.to_dense(emblib_cores, math.prod(tt_p_shapes), tt_p_shapes, tt_q_shapes)


class TableBatchedTTEmbeddingBag(nn.Module):
    """Tensor-train tables of equal sizes that are looked up together, with FBTT's arguments.

    `docs/fbtt.md` says what each argument does here. `enforce_embedding_dim` is ignored: FBTT
    rounds the dimension up without it, and emblib never does.

    Attributes:
        tt_cores: parameters; core k of all T tables is `[T, p_k, R_k * q_k * R_{k+1}]`.
        optimizer_state: first state of each core, in the shape of the core, or `[T, p_k]` for a
            state of one number per row; empty for SGD and with `sparse=False`.
        cache_weight: rows of the first table in the cache, `[cache_size, D]`; None without a cache.
            With `sparse=False` and one table it is a parameter.

    Raises:
        ValueError: the distribution is unknown, the optimizer is unknown and `sparse` is set, there
            is a cache and `hashtbl_size` is below `cache_size`, or sizes, factors and ranks do not
            fit each other.
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
        check_flags(sparse=sparse, use_cache=use_cache)
        initializer = _initializer(weight_dist)
        num_cores = len(tt_ranks) + 1
        row_factors, dim_factors = tt_p_shapes, tt_q_shapes
        if row_factors is None:
            row_factors = suggested_tt_shapes(num_embeddings, num_cores)
        if dim_factors is None:
            dim_factors = suggested_tt_shapes(embedding_dim, num_cores, allow_round_up=False)
        spec = TTSpec(
            num_embeddings,
            embedding_dim,
            tuple(tt_ranks),
            tuple(row_factors),
            tuple(dim_factors),
        )
        self.spec = spec
        self.num_tables, self.num_embeddings = num_tables, num_embeddings
        self.embedding_dim, self.sparse, self.use_cache = embedding_dim, sparse, use_cache
        self.tt_p_shapes, self.tt_q_shapes = list(spec.row_factors), list(spec.dim_factors)
        self.tt_ranks, self.tt_ndim = list(self.spec.full_ranks), num_cores
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        self.cache_size = cache_size or max(1, int(0.1 * num_embeddings))
        self.hashtbl_size = hashtbl_size or num_embeddings
        if use_cache and self.hashtbl_size < self.cache_size:
            raise ValueError(
                f"hashtbl_size must be at least cache_size, got {self.hashtbl_size} and "
                f"{self.cache_size}"
            )
        # Whether the offsets of the first batch on a GPU lacked the last entry; None before it.
        self._first_lacks_last_offset: bool | None = None
        specs = [self.spec] * num_tables
        fused_optimizer = self._fused_optimizer()
        bags: StackedTTBags | StackedCachedTTBags
        if use_cache:
            num_counted_ids = num_tables * self.hashtbl_size
            cache = TTCache(self.cache_size, RowEviction.PROJECT, num_counted_ids)
            bags = StackedCachedTTBags(
                specs, cache, fused_optimizer, init=initializer, device=device
            )
        else:
            bags = StackedTTBags(specs, fused_optimizer, init=initializer, device=device)
        self.weight_dist = weight_dist
        trains: Any = bags.trains if isinstance(bags, StackedCachedTTBags) else bags
        # Registered before `bags`: `to()` moves children in this order, and `bags` reads the cores.
        self.tt_cores = trains.stacked
        self.bags = bags

    def _fused_optimizer(self) -> optim.Optimizer:
        """Return the optimizer that backward runs; with `sparse=False` that of dense gradients."""
        if not self.sparse:
            return optim.External(gradient=optim.Gradient.DENSE)
        optimizer_class = _OPTIMIZERS[OptimType(self.optimizer)]
        options = {} if optimizer_class in _CLASSES_WITHOUT_EPS else {"eps": self.eps}
        optimizer: optim.Optimizer = optimizer_class(self.learning_rate, **options)
        return optimizer

    @property
    def _trains(self) -> StackedTTBags:
        trains: Any = self.bags.trains if isinstance(self.bags, StackedCachedTTBags) else self.bags
        return trains

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, warmup: bool = True
    ) -> Tensor:
        """Return the sums of bags, `[T, B, D]`.

        Args:
            indices: int32 or int64 `[L]`, those of all bags of table 0, then of table 1, and so on;
                or `[T * B, N]` or `[T, B, N]` for bags of N lookups.
            offsets: `[T * B + 1]`, or `[T * B]` without the last entry; None for bags of N lookups.
                With one table, offsets that end with the number of indices count as complete; on a
                GPU the first batch decides for all batches.
            warmup: ignored, as in FBTT.

        Raises:
            RuntimeError: the number of offsets or bags does not fit the tables.
            ValueError: offsets are missing, or passed for bags of N lookups.
        """
        if indices.dim() > 1:
            if offsets is not None:
                raise ValueError(
                    f"indices {list(indices.shape)} are bags of {indices.size(-1)} lookups and "
                    "take no offsets: flatten them, or leave offsets out"
                )
            num_bags, length = math.prod(indices.shape[:-1]), indices.size(-1)
            offsets = (
                torch.arange(num_bags + 1, device=indices.device, dtype=indices.dtype) * length
            )
            indices = indices.reshape(-1)
        elif offsets is None:
            raise ValueError("1-dimensional indices need offsets: where each bag begins")
        elif self._lacks_last_offset(indices, offsets):
            end = offsets.new_full((1,), indices.numel())
            offsets = torch.cat([offsets, end])
        out: Tensor = self.bags(indices, offsets)
        return out.view(-1, self.num_tables, self.embedding_dim).transpose(0, 1)

    def _lacks_last_offset(self, indices: Tensor, offsets: Tensor) -> bool:
        """Return whether offsets lack their last entry, the number of indices.

        With several tables, the number of offsets tells. With one table, the last offset is read:
        on a CPU for each batch, on a GPU for the first one only, as the host must wait for it.
        """
        num_offsets = offsets.numel()
        if self.num_tables > 1 or not num_offsets:
            return num_offsets % self.num_tables == 0 and num_offsets > 0
        if offsets.device.type == "cpu":
            return int(offsets[-1]) < indices.numel()
        if self._first_lacks_last_offset is None:
            self._first_lacks_last_offset = int(offsets[-1]) < indices.numel()
        return self._first_lacks_last_offset

    def reset_parameters(self, weight_dist: str | None = None) -> None:
        """Draw new initial values for the cores, and empty the cache.

        `weight_dist` is the distribution from now on; None keeps the current one. An unknown one
        raises ValueError.
        """
        if weight_dist is not None:
            self._trains.init = _initializer(weight_dist)
            self.weight_dist = weight_dist
        self.bags.reset_parameters()

    @property
    def optimizer_state(self) -> list[Tensor]:
        """First optimizer state of each core, of all tables; empty if the optimizer has none."""
        return [states[0] for states in self._trains.stacked_states() if states]

    @property
    def cache_weight(self) -> Tensor | None:
        """Rows of the first table in the cache, `[cache_size, D]`; None without a cache."""
        if not isinstance(self.bags, StackedCachedTTBags):
            return None
        rows = self.bags.rows
        if rows.optimizer.leaves_gradient is not None and self.num_tables == 1:
            return rows.weights
        return rows.table_weights()[0]

    def get_params(self) -> list[nn.Parameter]:
        """Return all parameters of the module, in a list."""
        return list(self.parameters())

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of the next and later updates.

        Raises:
            RuntimeError: `sparse` is False: the caller's optimizer has the learning rate.
        """
        self.bags.set_learning_rate(lr)
        self.learning_rate = lr

    def full_weight(self) -> Tensor:
        """Return all rows of the only table, `[prod p, D]`.

        Rows in the cache are those of the cache; FBTT computes them from the cores. With
        `sparse=False` gradients of the other rows reach the cores.

        Raises:
            ValueError: there are several tables.
        """
        if self.num_tables != 1:
            raise ValueError(f"full_weight is of one table, there are {self.num_tables}")
        cores = self._trains.cores.as_list()
        rows = tt_matrix_to_full(self.tt_p_shapes, self.tt_q_shapes, self.tt_ranks, cores)
        if not isinstance(self.bags, StackedCachedTTBags):
            return rows
        ids = self.bags.cached_ids(0)
        return rows.index_copy(0, ids, self.bags.to_dense(0)[ids]) if len(ids) else rows

    def cache_populate(self) -> None:
        """Fill the cache with the rows that were used most so far; they stay until the next call.

        Raises:
            ValueError: the module has no cache.
        """
        self._require_cache().populate()

    def update_cache(self, indices: Tensor) -> None:
        """Count one use of each of `indices` in the first table, without a lookup.

        The shape is any. Training lookups count their ids themselves. Ids outside the table are
        skipped. Without a cache this does nothing, as in FBTT.
        """
        if isinstance(self.bags, StackedCachedTTBags):
            ids = indices.flatten().long()
            self.bags.counts.find_or_insert_slots(
                torch.where((ids >= 0) & (ids < self.num_embeddings), ids, -1)
            )

    def reset_cache(self) -> None:
        """Project the rows in the cache onto the cores, empty the cache, and reset all counts.

        Raises:
            ValueError: the module has no cache.
        """
        self._require_cache().empty_cache()

    def _require_cache(self) -> StackedCachedTTBags:
        if not isinstance(self.bags, StackedCachedTTBags):
            raise ValueError("the module has no cache: construct it with use_cache=True")
        return self.bags

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *arguments: Any
    ) -> None:
        """Load FBTT's state dicts, too, and those of emblib's versions with one core per table."""
        StateDictReader(self.bags, state_dict, prefix, arguments[-1]).convert()
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class TTEmbeddingBag(TableBatchedTTEmbeddingBag):
    """One tensor-train table, by default with a cache, with FBTT's arguments.

    Attributes and errors are those of `TableBatchedTTEmbeddingBag`.
    """

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
        arguments = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        super().__init__(1, **arguments)

    def forward(
        self, indices: Tensor, offsets: Tensor | None = None, warmup: bool = True
    ) -> Tensor:
        """Return the sums of bags, `[B, D]`; arguments are as for several tables, with T = 1."""
        return super().forward(indices, offsets, warmup)[0]
