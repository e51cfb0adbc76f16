"""Ways to make the large tables of a model small, each within a share of their bytes.

A method is a module that gives the rows of K fields, `[B, K] -> [B, K, dim]`, and trains itself. A
new one is a class here and a line in `METHODS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import emblib
from experiments.contenders.registry import Unsupported

FLOAT = 4  # bytes
QUANTISED = 8  # bytes of a quantised row's scale and offset
NETWORK_RATE = 1e-3  # of Adam, for what is no table


@dataclass(frozen=True)
class Task:
    """What a method makes small, and how it is trained.

    Attributes:
        rows: of each table.
        dim: of a row.
        share: bytes allowed, as a share of those of the plain tables; of each table alike.
        rate: learning rate of Adagrad.
        counts: how often each id occurs in the training samples, table by table.
        trained: returns the rows of the plain tables after training.
    """

    rows: tuple[int, ...]
    dim: int
    share: float
    rate: float
    counts: Sequence[Tensor] = ()
    trained: Callable[[], Sequence[Tensor]] | None = None

    @property
    def fewer(self) -> list[int]:
        """Return the rows of each table that fit."""
        return [max(1, int(self.share * rows)) for rows in self.rows]

    def nbytes(self, table: int) -> int:
        """Return the bytes allowed for a table."""
        return int(self.share * self.rows[table] * self.dim * FLOAT)

    def scaled(self, share: float) -> Task:
        """Return the task with `share` of these bytes."""
        return Task(self.rows, self.dim, share * self.share, self.rate, self.counts, self.trained)

    def optimizer(self) -> emblib.optim.Adagrad:
        """Return the optimizer of tables."""
        return emblib.optim.Adagrad(self.rate)


class Rows(nn.Module):
    """Base of the methods: gives the rows of K fields.

    Attributes:
        optimizers: of what backward does not update by itself.
        trained_bytes: of the parameters, optimizer states apart.
        served_bytes: of the parameters with dense rows quantised to 8 bits, as emblib serves them.
        precision: of plain tables.
    """

    precision: ClassVar[emblib.Precision] = emblib.Precision()

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.optimizers: list[torch.optim.Optimizer] = []
        self.trained_bytes = 0
        self.served_bytes = 0

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows `[B, K, dim]` of ids `[B, K]`."""
        raise NotImplementedError

    def tables(self, rows: Sequence[int], dim: int) -> emblib.TableBatchedEmbeddingBags:
        """Return plain tables, and count their bytes."""
        total = sum(rows)
        self.trained_bytes += total * dim * self.precision.weights.itemsize
        self.served_bytes += total * (dim + QUANTISED)
        specs = [emblib.TableSpec(n, dim) for n in rows]
        return emblib.TableBatchedEmbeddingBags(
            specs, self.task.optimizer(), precision=self.precision
        )

    def count(self, nbytes: int) -> None:
        """Count bytes that are served as they are trained."""
        self.trained_bytes += nbytes
        self.served_bytes += nbytes


def look_up(tables: nn.Module, ids: Tensor) -> Tensor:
    """Return the rows of ids `[B, K]`, one per sample and table; id -1 gives zeros."""
    batch, fields = ids.shape
    flat = ids.t().reshape(-1)
    found: Tensor = tables(flat, torch.arange(len(flat) + 1, device=ids.device))
    return found.view(batch, fields, -1)


class Plain(Rows):
    """Every row is stored."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.bags = self.tables(task.rows, task.dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up."""
        return look_up(self.bags, ids)

    def weights(self) -> list[Tensor]:
        """Return the rows of each table."""
        return [weight.detach() for weight in self.bags.table_weights()]


class HalfPrecision(Plain):
    """Every row is stored in bfloat16, updates are rounded at random."""

    precision: ClassVar[emblib.Precision] = emblib.Precision(
        weights=torch.bfloat16, stochastic_rounding=emblib.StochasticRounding(seed=1)
    )

    def __init__(self, task: Task) -> None:
        if task.share < 0.5:
            raise Unsupported("16-bit rows are half of the bytes")
        super().__init__(task)


class Narrow(Rows):
    """Shorter rows: the missing columns are zeros."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.width = int(task.share * task.dim)
        if not self.width:
            raise Unsupported(f"{task.share:g} of {task.dim} columns is less than one")
        self.bags = self.tables(task.rows, self.width)

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up."""
        return nn.functional.pad(look_up(self.bags, ids), (0, self.task.dim - self.width))


class Projected(Narrow):
    """Mixed dimensions: shorter rows, and a matrix per table that makes them `dim` long."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        shape = (len(task.rows), self.width, task.dim)
        self.matrices = nn.Parameter(torch.randn(shape) / math.sqrt(self.width))
        self.count(self.matrices.numel() * FLOAT)
        self.optimizers = [torch.optim.Adam([self.matrices], NETWORK_RATE)]

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up, and project them."""
        return torch.einsum("bkw,kwd->bkd", look_up(self.bags, ids), self.matrices)


class Hashed(Rows):
    """Ids share fewer rows, by a hash."""

    functions = 1
    sizes: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.bags = self.tables(task.fewer, task.dim)
        self.register_buffer("sizes", torch.tensor(task.fewer))

    def forward(self, ids: Tensor) -> Tensor:
        """Look the hashes of the ids up; with several functions, add the rows."""
        return sum(
            (look_up(self.bags, self.places(ids, n)) for n in range(1, self.functions)),
            look_up(self.bags, self.places(ids, 0)),
        )

    def places(self, ids: Tensor, number: int) -> Tensor:
        """Return the rows that ids have by one function; -1 stays -1."""
        return torch.where(ids < 0, -1, mixed(ids, number) % self.sizes)


class Modulo(Hashed):
    """Ids share fewer rows, by their remainder: in order of frequency, hot ids share none."""

    def places(self, ids: Tensor, number: int) -> Tensor:
        """Return the remainders."""
        return torch.where(ids < 0, -1, ids % self.sizes)


class HashedTwice(Hashed):
    """A row is the sum of two rows of a smaller table, by two hashes."""

    functions = 2


class QRSum(Rows):
    """A row is the sum of one by the quotient and one by the remainder of its id."""

    divisors: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        divisors = [_divisor(rows, task.share) for rows in task.rows]
        self.register_buffer("divisors", torch.tensor(divisors))
        quotients = [-(-rows // m) for rows, m in zip(task.rows, divisors, strict=True)]
        self.quotients = self.tables(quotients, task.dim)
        self.remainders = self.tables(divisors, task.dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Look both parts up."""
        quotients = look_up(self.quotients, ids // self.divisors)
        return self.joined(quotients, look_up(self.remainders, ids % self.divisors))

    def joined(self, quotients: Tensor, remainders: Tensor) -> Tensor:
        """Return the rows that two parts make."""
        return quotients + remainders


class QRProduct(QRSum):
    """A row is the product of one by the quotient, with 1 added, and one by the remainder.

    Without the 1, both factors start near zero and neither has a gradient.
    """

    def joined(self, quotients: Tensor, remainders: Tensor) -> Tensor:
        """Multiply the parts."""
        return (1 + quotients) * remainders


def _divisor(rows: int, share: float) -> int:
    """Return the larger m for which ceil(rows / m) + m is about `share * rows`."""
    half = share * rows / 2
    if half**2 < rows:
        raise Unsupported(f"{rows:,} ids need {2 * math.isqrt(rows):,} rows in two parts")
    return max(1, int(half + math.sqrt(half**2 - rows)))


class TensorTrain(Rows):
    """Tensor trains, their ids in an order that means nothing."""

    order: ClassVar[dict[str, Any]] = {"ids": "permuted"}

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        specs = [self.spec(t) for t in range(len(task.rows))]
        self.count(sum(spec.nbytes for spec in specs))
        self.ranks = [spec.ranks[0] for spec in specs]
        self.bags = emblib.TableBatchedTTEmbeddingBags(specs, task.optimizer())

    def spec(self, table: int) -> emblib.TTSpec:
        """Return the table of the largest ranks that fit."""
        task = self.task
        like = emblib.TTSpec(task.rows[table], task.dim, (1, 1), seed=table, **self.order)
        try:
            return emblib.TTSpec.for_bytes(
                task.rows[table], task.dim, task.nbytes(table), like=like
            )
        except ValueError as error:
            raise Unsupported(str(error)) from error

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up."""
        return look_up(self.bags, ids)


class TensorTrainAsGiven(TensorTrain):
    """Tensor trains, their ids in the order of the data."""

    order: ClassVar[dict[str, Any]] = {"ids": "as_given"}


class TensorTrainFromPlain(TensorTrain):
    """Tensor trains made from the trained plain tables, then trained further."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.trained is None:
            raise Unsupported("the plain tables were not trained: contenders needs plain")
        for t, weight in enumerate(task.trained()):
            made = emblib.TTEmbeddingBag.from_dense(
                weight, spec=self.bags.tables[t], counts=task.counts[t].clamp(min=1)
            )
            with torch.no_grad():
                for core, value in zip(self.bags.table_cores(t), made.cores, strict=True):
                    core.copy_(value)


class Hot(Rows):
    """The most frequent ids have rows of their own, which take half of the bytes."""

    rest: ClassVar[type[Rows]]
    places: Tensor
    starts: Tensor

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        half = task.scaled(0.5)
        self.bags = self.tables(half.fewer, task.dim)
        self.others = self.rest(half)
        self.count(self.others.trained_bytes)
        self.served_bytes += self.others.served_bytes - self.others.trained_bytes
        starts, places, first = [], [], 0
        for rows, hot, count in zip(task.rows, half.fewer, task.counts, strict=True):
            place = torch.full((rows,), -1)
            place[count.argsort(descending=True, stable=True)[:hot]] = torch.arange(hot)
            starts.append(first)
            places.append(place)
            first += rows
        self.register_buffer("places", torch.cat(places))
        self.register_buffer("starts", torch.tensor(starts))

    def forward(self, ids: Tensor) -> Tensor:
        """Look every id up where it is; -1 gives zeros in the other."""
        place = self.places[ids + self.starts]
        cold = torch.where(place < 0, ids, -1)
        return look_up(self.bags, place) + self.others(cold)


class CachedTensorTrain(Rows):
    """Tensor trains with the most used rows stored, half of the bytes, chosen now and then."""

    eviction = emblib.RowEviction.PROJECT
    every = 50  # training lookups between choices

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        half = task.scaled(0.5)
        specs = TensorTrain(half).bags.tables
        cache = emblib.TTCache(half.fewer, self.eviction, every=self.every)
        self.bags = emblib.CachedTTEmbeddingBags(specs, cache, task.optimizer())
        sizes = self.bags.nbytes()
        self.count(sizes["weights"] + sizes["cache"])

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up; training counts them."""
        return look_up(self.bags, ids)


class DroppingTensorTrain(CachedTensorTrain):
    """The same, but rows that leave the cache forget what they learned, as in FBTT."""

    eviction = emblib.RowEviction.DROP


class HotTensorTrain(Hot):
    """Own rows for the most frequent ids, tensor trains for the rest."""

    rest = TensorTrain


class HotHashed(Hot):
    """Own rows for the most frequent ids, hashing for the rest."""

    rest = Hashed


class Dynamic(Rows):
    """Hash tables by id: the ids that were used least lose their rows to others."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        specs = [
            emblib.DynamicSpec(rows, task.dim, name=f"t{t}", eviction=emblib.Eviction.LFU)
            for t, rows in enumerate(task.fewer)
        ]
        self.bags = emblib.DynamicEmbeddingBags(specs, task.optimizer())
        sizes = self.bags.nbytes()
        self.count(sizes["weights"] + sizes["index"])

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up; in training new ids take rows."""
        return look_up(self.bags, ids)


class Planned(Rows):
    """Each table by the method that `emblib.plan_memory` chooses, all within the bytes of all."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        names = [f"t{t}" for t in range(len(task.rows))]
        tables = [
            emblib.EmbeddingBagConfig(rows, task.dim, name)
            for rows, name in zip(task.rows, names, strict=True)
        ]
        plain = sum(task.rows) * task.dim * FLOAT
        try:
            plan = emblib.plan_memory(
                tables,
                max(1, int(task.share * plain)),
                trace=_trace(names, task.counts),
                optimizer=emblib.optim.SGD(task.rate),  # bytes are counted without states
            )
        except emblib.BudgetError as error:
            raise Unsupported(str(error)) from error
        self.bags = emblib.EmbeddingBagCollection(plan.configs, optimizer=task.optimizer())
        self.names = names
        self.chosen = [choice.method for choice in plan.choices]
        self.count(plan.nbytes)

    def forward(self, ids: Tensor) -> Tensor:
        """Look the ids up."""
        flat = ids.t().reshape(-1)
        batch = emblib.KeyedJaggedTensor(self.names, flat, lengths=torch.ones_like(flat))
        rows: Tensor = self.bags(batch).values()
        return rows.view(len(ids), len(self.names), -1)


def _trace(names: Sequence[str], counts: Sequence[Tensor]) -> emblib.LookupTrace | None:
    """Return lookups in which ids occur as often as in the training samples."""
    if not counts:
        return None
    ids = [torch.arange(len(count)).repeat_interleave(count) for count in counts]
    features = [
        emblib.TracedFeature(name, name, len(count))
        for name, count in zip(names, counts, strict=True)
    ]
    return emblib.LookupTrace(
        tuple(features), tuple(ids), tuple(torch.ones(len(i), dtype=torch.int64) for i in ids)
    )


class Robe(Rows):
    """ROBE-Z: a row is a run of numbers, at a hash of its id, in one array for all tables."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        size = max(task.dim, int(task.share * sum(task.rows) * task.dim))
        bound = 1 / math.sqrt(sum(task.rows) / len(task.rows))
        self.array = nn.Parameter(torch.empty(size).uniform_(-bound, bound))
        self.count(size * FLOAT)
        self.optimizers = [torch.optim.Adagrad([self.array], task.rate)]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the runs."""
        table = torch.arange(ids.shape[1], device=ids.device)
        start = mixed(ids * len(table) + table, 0) % len(self.array)
        run = torch.arange(self.task.dim, device=ids.device)
        return self.array[(start[..., None] + run) % len(self.array)]


class Dhe(Rows):
    """Deep hash embeddings: a network per table makes a row from 32 hashes of its id."""

    hashes = 32

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.networks = nn.ModuleList(self._network(t) for t in range(len(task.rows)))
        self.count(sum(p.numel() for p in self.networks.parameters()) * FLOAT)
        self.optimizers = [torch.optim.Adam(self.networks.parameters(), task.rate / 20)]

    def _network(self, table: int) -> nn.Module:
        """Return the widest network that fits."""
        size = self.task.nbytes(table) / FLOAT
        line = self.hashes + self.task.dim + 2
        width = int((math.sqrt(line**2 + 4 * (size - self.task.dim)) - line) / 2)
        if width < 1:
            raise Unsupported(f"a network does not fit into {size:.0f} numbers")
        return nn.Sequential(
            nn.Linear(self.hashes, width),
            nn.Mish(),
            nn.Linear(width, width),
            nn.Mish(),
            nn.Linear(width, self.task.dim),
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Return what the networks make of the hashes."""
        many = torch.stack([mixed(ids, n) for n in range(self.hashes)], -1)
        numbers = (many % (1 << 20)).float() / (1 << 19) - 1
        rows = [net(numbers[:, t]) for t, net in enumerate(self.networks)]
        return torch.stack(rows, 1)


_MULTIPLIERS = (-7046029254386353131, -4658895280553007687, -7723592293110705685)


def mixed(ids: Tensor, number: int) -> Tensor:
    """Return hashes of ids in [0, 2^62), a function for each number (splitmix64's finaliser)."""
    first, second, third = _MULTIPLIERS
    z = ids + torch.tensor(first).mul(2 * number + 1)  # modulo 2^64, as all here
    z = (z ^ _shifted(z, 30)) * second
    z = (z ^ _shifted(z, 27)) * third
    return _shifted(z ^ _shifted(z, 31), 2)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Return z shifted right without its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


METHODS: dict[str, type[Rows]] = {
    "plain": Plain,
    "bf16": HalfPrecision,
    "narrow": Narrow,
    "projected": Projected,
    "hashed": Hashed,
    "modulo": Modulo,
    "hashed_twice": HashedTwice,
    "qr_sum": QRSum,
    "qr_product": QRProduct,
    "tt_permuted": TensorTrain,
    "tt_as_given": TensorTrainAsGiven,
    "tt_from_plain": TensorTrainFromPlain,
    "tt_hot": HotTensorTrain,
    "tt_cached": CachedTensorTrain,
    "tt_cached_drop": DroppingTensorTrain,
    "hashed_hot": HotHashed,
    "evicting": Dynamic,
    "planned": Planned,
    "robe": Robe,
    "dhe": Dhe,
}
