"""The typed shape of a run's configuration; conf/*.yaml may set these keys and no others."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

# Apart from their code, so that a typo is reported before torch is imported.
CONTENDERS = (
    *("tbe", "tt", "torch", "reference_tbe", "reference_tt", "managed"),
    *("cached_lru", "cached_lfu", "disk_lru", "disk_lfu"),
)
CACHED = ("cached_lru", "cached_lfu", "disk_lru", "disk_lfu")  # a variant per size of the cache
# Sweepable workload fields; `rank` is the contenders' axis.
AXES = ("T", "E", "D", "B", "L", "s", "q")


class Kind(Enum):
    """What a point of the sweep is: contenders timed together, or a trace run through caches."""

    time = "time"
    cache = "cache"


class Tables(Enum):
    """Which tables a workload has."""

    equal = "equal"
    criteo_kaggle = "criteo_kaggle"


class Law(Enum):
    """How often each row is looked up."""

    uniform = "uniform"
    zipf = "zipf"


class Order(Enum):
    """Whether a row's id tells its popularity (ranked) or is shuffled (permuted)."""

    permuted = "permuted"
    ranked = "ranked"


class Design(Enum):
    """How axes combine: each varied alone around the base point, or all with all."""

    one_at_a_time = "one_at_a_time"
    grid = "grid"


class DeviceKind(Enum):
    """Where the tables live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Optimizer(Enum):
    """Update rule of the step."""

    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"


@dataclass
class WorkloadConfig:
    """T tables of E rows and D columns; B bags per batch, L lookups per bag, drawn by `law`."""

    tables: Tables = Tables.equal
    law: Law = Law.zipf
    order: Order = Order.permuted
    T: int = 1
    E: int = 1_000_000
    D: int = 64
    B: int = 1024
    L: int = 20
    s: float = 1.05  # P(rank) ~ (rank + q)^-s, rank = 1..E
    q: float = 0.0


@dataclass
class TTConfig:
    """Tensor-train contender: a variant per rank; only the `tables` largest are compressed."""

    ranks: list[int] = field(default_factory=lambda: [16])
    tables: int = 7
    row_factors: list[int] = field(default_factory=list)  # empty: emblib chooses
    dim_factors: list[int] = field(default_factory=list)


@dataclass
class CacheConfig:
    """Contenders with a cache: a variant per size; and how long a trace through one is."""

    fractions: list[float] = field(default_factory=lambda: [0.2])  # of all rows
    warm_batches: int = 60  # of a trace: they fill the cache and are not counted
    batches: int = 60  # of a trace: they are counted
    pool: int = 64  # distinct batches of a timed cell; a few would soon be in the cache altogether
    directory: str = ""  # where disk tables live while they are measured; empty: a temporary one


@dataclass
class PublishedConfig:
    """A number somebody else measured elsewhere; printed with its source, never divided by ours."""

    label: str = ""
    value: float = 0.0
    unit: str = ""
    source: str = ""


@dataclass
class CaseConfig:
    """One fixed workload with a name, measured beside the sweep."""

    title: str = ""
    note: str = ""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    contenders: list[str] = field(default_factory=lambda: ["tbe", "tt"])
    tt: TTConfig = field(default_factory=TTConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    published: list[PublishedConfig] = field(default_factory=list)


@dataclass
class SweepConfig:
    """Values of each axis; an empty list leaves the axis at the base workload's value."""

    T: list[int] = field(default_factory=list)
    E: list[int] = field(default_factory=list)
    D: list[int] = field(default_factory=list)
    B: list[int] = field(default_factory=list)
    L: list[int] = field(default_factory=list)
    s: list[float] = field(default_factory=list)
    q: list[float] = field(default_factory=list)
    rank: list[int] = field(default_factory=list)


@dataclass
class TimingConfig:
    """How long to measure. The caps (0 = none) shrink a run for tests; the report then says so."""

    preset: str = "standard"
    pool: int = 8  # distinct batches, cycled
    warmup: int = 1  # passes over the pool before the first sample
    warmup_seconds: float = 0.5  # slow contenders get fewer batches to warm up
    min_rounds: int = 6  # the fewest that give a 95 % interval
    max_rounds: int = 50  # of two samples per phase
    cell_seconds: float = 2.5  # for all contenders of one cell together
    total_seconds: float = 75.0  # on a busy machine cells get shorter to keep to this; 0: never
    precision: float = 0.01  # stop early: half-width of the median's 95 % interval, relative
    max_rows: int = 0
    max_batch: int = 0
    max_cells: int = 0


@dataclass
class DeviceConfig:
    """Where to run, on how many CPU threads (0: torch's default), in how much of free memory."""

    kind: DeviceKind = DeviceKind.auto
    threads: int = 0
    memory_share: float = 0.6


@dataclass
class ReportConfig:
    """What the report argues: `subject` against `baseline`, answered on the case `headline`."""

    headline: str = ""  # a key of `cases`, or empty for the sweep's base point
    subject: str = "tt"
    subject_rank: int = 16
    subject_cache: float = 0.01  # of a subject with a cache: its size as a fraction of all rows
    baseline: str = "tbe"
    figures: bool = True
    folder: str = "reports/runs"  # relative to the repository


@dataclass
class Config:
    """A whole run."""

    name: str = ""
    kind: Kind = Kind.time
    seed: int = 1
    optimizer: Optimizer = Optimizer.sgd
    lr: float = 0.01
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    contenders: list[str] = field(default_factory=lambda: ["tbe", "tt", "torch"])
    tt: TTConfig = field(default_factory=TTConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    design: Design = Design.one_at_a_time
    where: list[str] = field(default_factory=list)
    cases: dict[str, CaseConfig] = field(default_factory=dict)
    timing: TimingConfig = field(default_factory=TimingConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
