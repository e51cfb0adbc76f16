"""The schema of a run's configuration, `Config`; other keys are refused, except below `options`.

A *cell* is one workload on which contenders are measured side by side. An *arm* of a cell is a
contender with its variant: its rank, size of cache, or load. Types are checked when a configuration
is composed, and the rules of values in `experiments.configure.check_values`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

AXES = ("T", "E", "D", "B", "L", "s", "q")  # workload fields to sweep; `rank` is the arms' axis
PHASES = ("forward", "step")  # timed calls of a contender that looks up bags
# Timed calls of a hash table, with the names of HierarchicalKV.
OPERATIONS = {
    "find": "find",
    "find_slots": "find*",
    "find_or_insert": "find_or_insert",
    "find_or_insert_slots": "find_or_insert*",
    "insert_or_assign": "insert_or_assign",
    "insert_and_evict": "insert_and_evict",
}
GROWTH_PHASE = "insert"  # timed call of a hash table that grows


class UsageError(Exception):
    """A request of the user is wrong or impossible; the message says why."""


def require(rule: str, value: object, *, holds: bool) -> None:
    """Raise UsageError with a rule, such as "lr must be > 0", and `value`, unless `holds`."""
    if not holds:
        raise UsageError(f"{rule}, got {value}")


# Maximum number of threads or processes that work at once. It is more than any host has cores, and
# far below the thousands at which starting them fails, OpenMP with a crash.
MAX_WORKERS = 1024
MULTIRUN = "multirun"  # name of the folder of launches, next to folders of runs
_FOLDER = re.compile(r"\w[\w.-]{0,99}", re.ASCII)  # file systems limit names in bytes


def folder_name(name: object) -> str:
    """Return `name` as text; raise UsageError if it cannot name the folder of a run."""
    if not _FOLDER.fullmatch(str(name)) or name == MULTIRUN:
        raise UsageError(
            f"name={str(name)!r} cannot name the folder of a run: use up to 100 letters of ASCII, "
            f"digits, '_', '-' and '.', the first a letter, digit or '_', and not {MULTIRUN}; "
            "report.folder moves the results"
        )
    return str(name)


class Tables(Enum):
    """Sizes of a workload's tables: T tables of E rows, or the tables of Criteo-Kaggle."""

    equal = "equal"
    criteo_kaggle = "criteo_kaggle"


class Distribution(Enum):
    """Distribution of ids; `trace` reads the lookups from a file."""

    uniform = "uniform"
    zipf = "zipf"
    production = "production"
    trace = "trace"


class Order(Enum):
    """Order of ids: by popularity (ranked) or shuffled (permuted)."""

    permuted = "permuted"
    ranked = "ranked"


class Format(Enum):
    """Layout of a trace file; `auto` derives it from the name, and for .pt from the content."""

    auto = "auto"
    dlrm = "dlrm"
    criteo = "criteo"
    parquet = "parquet"
    csv = "csv"
    emblib = "emblib"


class Ids(Enum):
    """Ids of a trace file: row numbers that are checked (exact), or ids modulo the rows (fold)."""

    exact = "exact"
    fold = "fold"


class Design(Enum):
    """Combination of axes: one varies at a time, all values with all, or value by value.

    With one_at_a_time the ranks vary at the base point only, otherwise at every point.
    """

    one_at_a_time = "one_at_a_time"
    grid = "grid"
    zip = "zip"


class Scaling(Enum):
    """Batch size over ranks: B bags per rank (weak), or B bags of all ranks together (strong)."""

    weak = "weak"
    strong = "strong"


class Mode(Enum):
    """Conditions of a sample: hot or cold caches, a CUDA graph, or wall time with launches."""

    hot = "hot"
    cold = "cold"
    graph = "graph"
    wall = "wall"


class Rerun(Enum):
    """Cells to measure again although an earlier run has them."""

    none = "none"
    failed = "failed"
    all = "all"


class DeviceKind(Enum):
    """Device of the tables; `auto` is cuda if torch finds a GPU."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


def device_kind(kind: DeviceKind) -> str:
    """Return "cpu" or "cuda"; torch is imported only for `auto`."""
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
    """T tables of E rows and D columns; B bags per batch and table, L lookups per bag.

    For a trace file, T = 0 means all its tables and E = 0 the rows that the file states; L is
    replaced by the rounded mean length of its bags.
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
    file: str = ""  # path of the trace for distribution=trace
    format: Format = Format.auto
    columns: list[str] = field(default_factory=list)  # tables of the trace, by name; empty: all
    ids: Ids = Ids.exact
    sha256: str = ""  # checksum of the trace; if set, another file is refused. Runs record it


@dataclass
class TTConfig:
    """Tensor trains: an arm per rank; only the `tables` largest tables are compressed."""

    ranks: list[int] = field(default_factory=lambda: [16])
    tables: int = 7
    row_factors: list[int] = field(default_factory=list)  # empty: emblib chooses
    dim_factors: list[int] = field(default_factory=list)  # empty: emblib chooses


@dataclass
class CacheConfig:
    """Caches: an arm per size, and the length of a trace through them."""

    fractions: list[float] = field(default_factory=lambda: [0.2])  # cached rows ÷ all rows
    warm_batches: int = 60  # first batches of a trace, which fill the cache and are not counted
    batches: int = 60  # batches of a trace that are counted
    pool: int = 64  # distinct batches of a timed cell with a cache, instead of timing.pool
    directory: str = ""  # folder of tables on disk; empty: a temporary one


@dataclass
class KeysConfig:
    """Hash tables: workload.E slots, workload.D columns, calls with B × L keys.

    A case with `loads` and without a kind is of the kind keys.
    """

    loads: list[float] = field(default_factory=list)  # present keys ÷ slots, an arm per value
    hits: float = 0.6  # share of present keys in a call
    operations: list[str] = field(
        default_factory=lambda: [
            "find",
            "find_slots",
            "find_or_insert",
            "insert_or_assign",
            "insert_and_evict",
        ]
    )
    first: float = 0.01  # initial slots ÷ final slots of a table that grows


@dataclass
class ShardingConfig:
    """Collections over ranks (kinds sharding, calibration): a cell per world and scaling."""

    worlds: list[int] = field(default_factory=lambda: [1, 2])  # ranks, at most MAX_WORKERS each
    scaling: list[Scaling] = field(default_factory=lambda: [Scaling.weak])
    beyond: list[int] = field(default_factory=list)  # larger worlds, whose steps are predicted only


@dataclass
class PublishedConfig:
    """A published number, printed with its source next to the case's results."""

    label: str = ""
    value: float = 0.0
    unit: str = ""
    source: str = ""


@dataclass
class CaseConfig:
    """A fixed workload with a name, measured in addition to the sweep."""

    title: str = ""
    note: str = ""
    # A name in experiments/kinds; empty: keys with `keys.loads`, else what the run's kind says.
    kind: str = ""
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    contenders: list[str] = field(default_factory=lambda: ["tbe", "tt"])
    tt: TTConfig = field(default_factory=TTConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    keys: KeysConfig = field(default_factory=KeysConfig)
    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    published: list[PublishedConfig] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # options that its kind defines


@dataclass
class SweepConfig:
    """Values per axis; an axis without values keeps the value of the base workload."""

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
    """Amount of measuring. 0 is no cap for `max_rows`, `max_batch`, `max_cells`, `max_ranks`."""

    preset: str = "standard"
    replicates: int = 3  # fresh processes per cell; a verdict needs 3
    modes: list[Mode] = field(default_factory=lambda: [Mode.hot])
    pool: int = 8  # distinct batches, used in turns
    warmup: int = 3  # minimum number of passes over the pool before the first sample
    warmup_seconds: float = 0.2  # minimum warm-up time; it ends when passes take equal time
    warmup_cap: float = 1.0  # maximum warm-up time; slow contenders then see fewer batches
    min_seconds: float = 0.2  # sum of the samples of a phase before it may count as precise
    min_rounds: int = 6  # 6 is the minimum that gives a 95 % interval
    max_rounds: int = 50  # maximum number of rounds, each with two samples per phase
    # An experiment's own budgets are for the preset `standard`; the other presets scale them.
    cell_seconds: float = 2.5  # timing budget of a cell, all contenders together
    total_seconds: float = 75.0  # budget of the run, which shortens and drops cells; 0: none
    precision: float = 0.01  # relative half-width of the median's 95 % interval that ends timing
    limit_seconds: float = 120.0  # silence after which a contender's process is ended; 0: never
    max_rows: int = 0  # cap of the rows of a table; set in smoke runs only
    max_batch: int = 0  # cap of B
    max_cells: int = 0  # cap of the cells of the sweep
    max_ranks: int = 0  # cap of the ranks of a world


@dataclass
class DeviceConfig:
    """Device, and the share of the machine that a run uses."""

    kind: DeviceKind = DeviceKind.auto
    threads: int = 0  # CPU threads, at most MAX_WORKERS; 0: torch's default
    memory_share: float = 0.6  # tables ÷ free memory beyond which tables are shrunk
    ranks: int = 1  # processes (up to MAX_WORKERS) that measure a cell, each with its own batches
    strict: bool = False  # end with an error (status 2) on a machine that is unfit to measure on


@dataclass
class GatePoint:
    """A case and a phase that the gate compares: one point per contender of the case."""

    case: str = ""  # a key of `cases`, whose kind is `time`
    phase: str = "step"  # one of PHASES
    optimizer: Optimizer = Optimizer.sgd


@dataclass
class GateConfig:
    """Two revisions of emblib side by side (kinds gate, noise, power)."""

    base: str = ""  # a git revision; empty: origin/main, else HEAD; a smoke run: head
    head: str = "WORKTREE"  # the working tree, or a git revision
    points: list[GatePoint] = field(default_factory=list)
    max_pairs: int = 9  # maximum pairs of processes of a point unsure after timing.replicates
    min_effect: float = 0.05  # smaller effects do not count
    max_margin: float = 0.1  # points that could only detect effects larger than this are not gated
    strict: bool = False  # end with exit status 4 if a point is unsure or too noisy to gate
    instructions: bool = True  # count instructions with callgrind, on the CPU with one thread
    noise: str = "reports/noise"  # folder of the noise floors, one file per machine
    floor_pairs: int = 24  # pairs of processes of a noise floor
    trials: int = 200  # kind power: gates of a revision against itself
    slowed_trials: int = 40  # kind power: gates with every point of head slowed by `inject`
    inject: float = 1.0  # head is slowed by this factor


@dataclass
class ReportConfig:
    """The question of the report: `subject` against `baseline`, answered at `headline`."""

    headline: str = ""  # a key of `cases`, or empty for the sweep's base point
    subject: str = "tt"
    subject_rank: int = 16
    subject_cache: float = 0.01  # cached rows ÷ all rows of a subject with a cache, in (0, 1]
    baseline: str = "tbe"
    figures: bool = True
    folder: str = "reports/runs"  # absolute, or relative to the repository


@dataclass
class Config:
    """The configuration of a whole run."""

    name: str = ""
    kind: str = "time"  # a name in experiments/kinds
    seed: int = 1
    rerun: Rerun = Rerun.none
    dry_run: bool = False  # print the cells with their memory and time, measure nothing
    strict: bool = False  # end with exit status 5 if a cell ran out of memory, as if it had failed
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
    where: list[str] = field(default_factory=list)  # rules that every cell of the sweep must meet
    exclude: list[str] = field(default_factory=list)  # rules of which such a cell must meet none
    cases: dict[str, CaseConfig] = field(default_factory=dict)
    timing: TimingConfig = field(default_factory=TimingConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    options: dict[str, Any] = field(default_factory=dict)  # options that the kind defines
