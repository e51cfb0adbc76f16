"""The schema of a run's configuration; conf/*.yaml may set these keys only."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# Sweepable workload fields; `rank` is the contenders' axis.
AXES = ("T", "E", "D", "B", "L", "s", "q")
PHASES = ("forward", "step")  # what is timed of a contender
OPERATIONS = {  # what is timed of a table of keys, as HierarchicalKV calls it
    "find": "find",
    "find_slots": "find*",
    "find_or_insert": "find_or_insert",
    "find_or_insert_slots": "find_or_insert*",
    "insert_or_assign": "insert_or_assign",
    "insert_and_evict": "insert_and_evict",
}


class UsageError(Exception):
    """The command line cannot be run; the message is one line and says what to type instead."""


MULTIRUN = "multirun"  # the folder of launches, next to those of runs
_FOLDER = re.compile(r"\w[\w.-]{0,99}")


def folder_name(name: object) -> str:
    """Return the name of a run as that of its folder; raise UsageError where it is a path."""
    if not _FOLDER.fullmatch(str(name)) or name == MULTIRUN:
        raise UsageError(
            f"name={str(name)!r} cannot name the folder of a run: use up to 100 letters, digits, "
            f"'_', '-' and '.', the first a letter, digit or '_', and not {MULTIRUN}; "
            "report.folder moves the results"
        )
    return str(name)


class Tables(Enum):
    """The tables of a workload."""

    equal = "equal"
    criteo_kaggle = "criteo_kaggle"


class Distribution(Enum):
    """How often each row is looked up; `trace` reads the lookups from a file."""

    uniform = "uniform"
    zipf = "zipf"
    production = "production"
    trace = "trace"


class Order(Enum):
    """Ids by popularity (ranked) or shuffled (permuted)."""

    permuted = "permuted"
    ranked = "ranked"


class Format(Enum):
    """Layout of a trace file; auto goes by its name and first bytes."""

    auto = "auto"
    dlrm = "dlrm"
    criteo = "criteo"
    parquet = "parquet"
    csv = "csv"
    emblib = "emblib"


class Ids(Enum):
    """Ids of a trace file: rows as they are (one outside its table is an error), or modulo rows."""

    exact = "exact"
    fold = "fold"


class Design(Enum):
    """How axes combine: one at a time around the base point, all with all, or value by value."""

    one_at_a_time = "one_at_a_time"
    grid = "grid"
    zip = "zip"


class Scaling(Enum):
    """How the batch scales with ranks: B per rank (weak), or B in total (strong)."""

    weak = "weak"
    strong = "strong"


class Mode(Enum):
    """The conditions of a sample: data in caches or not, launches in a graph or by the host."""

    hot = "hot"
    cold = "cold"
    graph = "graph"
    wall = "wall"


class Rerun(Enum):
    """Which cells are measured again although an earlier run has them."""

    none = "none"
    failed = "failed"
    all = "all"


class DeviceKind(Enum):
    """Where the tables live."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def device_kind(kind: DeviceKind) -> str:
    """Return 'cpu' or 'cuda'; torch is imported only when the answer depends on it."""
    if kind is not DeviceKind.auto:
        return kind.value
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class Optimizer(Enum):
    """Update rule of the step."""

    sgd = "sgd"
    adagrad = "adagrad"
    rowwise_adagrad = "rowwise_adagrad"


@dataclass
class WorkloadConfig:
    """T tables of E rows and D columns; B bags per batch, L lookups per bag.

    Of a trace file, T and E may be 0: all its tables, with the rows that the file says they have. L
    is then what its bags have on average.
    """

    tables: Tables = Tables.equal
    distribution: Distribution = Distribution.zipf
    order: Order = Order.permuted
    T: int = 1
    E: int = 1_000_000
    D: int = 64
    B: int = 1024
    L: int = 20
    s: float = 1.05  # P(rank) ~ (rank + q)^-s, rank = 1..E
    q: float = 0.0
    sizes: list[int] = field(default_factory=list)  # rows of each table, instead of T and E
    file: str = ""  # of distribution=trace
    format: Format = Format.auto
    columns: list[str] = field(default_factory=list)  # of the file, one per table; empty: all
    ids: Ids = Ids.exact
    sha256: str = ""  # of the file: recorded; if set, a run refuses any other file


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
    pool: int = 64  # distinct batches of a timed cell; a few would soon fit in the cache
    directory: str = ""  # where disk tables live while they are measured; empty: a temporary one


@dataclass
class KeysConfig:
    """Tables of keys: one of workload.E slots and workload.D columns, calls of B × L keys.

    A case with `loads` is of kind keys, whatever the kind of its experiment.
    """

    loads: list[float] = field(default_factory=list)  # keys present ÷ slots, an arm for each
    hits: float = 0.6  # share of a call's keys that are present
    operations: list[str] = field(
        default_factory=lambda: [
            "find",
            "find_slots",
            "find_or_insert",
            "insert_or_assign",
            "insert_and_evict",
        ]
    )
    first: float = 0.01  # share of the slots that a growing table begins with


@dataclass
class ShardingConfig:
    """Collections over ranks (kinds sharding, calibration): a cell for each world and scaling."""

    worlds: list[int] = field(default_factory=lambda: [1, 2])
    scaling: list[Scaling] = field(default_factory=lambda: [Scaling.weak])
    beyond: list[int] = field(default_factory=list)  # worlds whose steps are only predicted


@dataclass
class PublishedConfig:
    """A published number; printed with its source, never divided by a measured one."""

    label: str = ""
    value: float = 0.0
    unit: str = ""
    source: str = ""


@dataclass
class CaseConfig:
    """One fixed workload with a name, measured in addition to the sweep."""

    title: str = ""
    note: str = ""
    kind: str = ""  # a name in experiments/kinds; empty: that of the experiment, or keys
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    contenders: list[str] = field(default_factory=lambda: ["tbe", "tt"])
    tt: TTConfig = field(default_factory=TTConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    published: list[PublishedConfig] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # of its kind, if that has any


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
    replicates: int = 3  # fresh processes per cell; a verdict needs three
    modes: list[Mode] = field(default_factory=lambda: [Mode.hot])
    pool: int = 8  # distinct batches, cycled
    warmup: int = 3  # passes over the pool before the first sample, at least
    warmup_seconds: float = 0.2  # of warming up, at least; then until two passes are alike
    warmup_cap: float = 1.0  # at most: slow contenders get fewer batches to warm up
    min_seconds: float = 0.2  # of samples, before a phase may count as precise
    min_rounds: int = 6  # the fewest that give a 95 % interval
    max_rounds: int = 50  # of two samples per phase
    cell_seconds: float = 2.5  # for all contenders of one cell together
    total_seconds: float = 75.0  # on a busy machine cells get shorter to keep to this; 0: never
    precision: float = 0.01  # stop early: half-width of the median's 95 % interval, relative
    energy_seconds: float = 0.0  # of steps alone, for their energy; 0: not measured
    limit_seconds: float = 120.0  # a contender without a message for so long is ended; 0: never
    max_rows: int = 0
    max_batch: int = 0
    max_cells: int = 0
    max_ranks: int = 0


@dataclass
class DeviceConfig:
    """Where to run, on how many CPU threads (0: torch's default), in how much of free memory."""

    kind: DeviceKind = DeviceKind.auto
    threads: int = 0
    memory_share: float = 0.6
    ranks: int = 1  # processes, each with its own batches
    strict: bool = False  # refuse to measure on a machine that is not fit for it


@dataclass
class GatePoint:
    """One thing the gate checks: a phase of the first contender of a case."""

    case: str = ""
    phase: str = "step"
    optimizer: Optimizer = Optimizer.sgd


@dataclass
class GateConfig:
    """Two revisions of emblib side by side (kinds gate, noise, power)."""

    base: str = ""  # a git revision; empty: origin/main, else HEAD; a smoke run: head
    head: str = "WORKTREE"  # or a git revision
    points: list[GatePoint] = field(default_factory=list)
    max_pairs: int = 9  # pairs of processes at most, for a point unsure after timing.replicates
    min_effect: float = 0.05  # smaller effects do not count
    max_margin: float = 0.1  # a point whose noise asks for more is not gated
    strict: bool = False  # unsure, or too noisy to gate, is exit status 4
    instructions: bool = True  # count them with callgrind, on the CPU with one thread
    noise: str = "reports/noise"  # folder of the noise floors, one file per machine
    floor_pairs: int = 24  # pairs of processes of a noise floor
    trials: int = 200  # kind power: gates of a revision against itself
    slowed_trials: int = 40  # kind power: the same with every point of head slowed by `inject`
    inject: float = 1.0  # head is slowed by this factor


@dataclass
class ReportConfig:
    """The question of the report: `subject` against `baseline`, answered on the case `headline`."""

    headline: str = ""  # a key of `cases`, or empty for the sweep's base point
    subject: str = "tt"
    subject_rank: int = 16
    subject_cache: float = 0.01  # of a subject with a cache: its size as a fraction of all rows
    baseline: str = "tbe"
    figures: bool = True
    folder: str = "reports/runs"  # relative to the repository


@dataclass
class Config:
    """The configuration of a whole run."""

    name: str = ""
    kind: str = "time"  # a name in experiments/kinds
    seed: int = 1
    rerun: Rerun = Rerun.none
    dry_run: bool = False  # print the cells with their memory and time, measure nothing
    strict: bool = False  # running out of memory is a failure too, not a result
    optimizer: Optimizer = Optimizer.sgd
    lr: float = 0.01
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    contenders: list[str] = field(default_factory=lambda: ["tbe", "tt", "torch"])
    tt: TTConfig = field(default_factory=TTConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    design: Design = Design.one_at_a_time
    where: list[str] = field(default_factory=list)  # what does not meet all of these is left out
    exclude: list[str] = field(default_factory=list)  # what meets any of these is left out
    cases: dict[str, CaseConfig] = field(default_factory=dict)
    timing: TimingConfig = field(default_factory=TimingConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    options: dict[str, Any] = field(default_factory=dict)  # of the kind, if it has any of its own
