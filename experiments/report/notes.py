"""Sentences of a report: how its numbers are measured, and what limits the trust in them."""

from __future__ import annotations

from collections import Counter

from experiments.config.schema import PHASES, Mode
from experiments.kinds.base import Comparability
from experiments.machine.ceilings import MeasuredCeilings
from experiments.machine.flags import MINOR, explain
from experiments.report import text
from experiments.report.data import Run
from experiments.results.metrics import GPU_BUSY, MARGIN, PROCESSES_FOR_A_VERDICT

NOISY_SPREAD = 0.3  # `Run.median_spread` above which a notice calls the run noisy

MODE_NOTES = {
    Mode.hot.value: "Hot: executions follow each other, so that caches hold what the one before "
    "left there.",
    Mode.cold.value: "Cold: before each sample, and outside of its time, a buffer of twice the "
    "last-level cache is written, so that tables come from memory as in a large model.",
    Mode.graph.value: "Graph: a step is captured once as a CUDA graph and replayed, so that "
    "launches cost nothing.",
    Mode.wall.value: "Wall: the host's clock from call to completion, launches and Python too.",
}
HOW_TO_READ = (
    "Every contender of a cell sees the same batches in the same process. After warming up over "
    "the whole pool of distinct batches, each round runs every contender's phases in a new random "
    "order and then in reverse. CPU threads wait passively (OMP_WAIT_POLICY) unless the "
    "environment says otherwise.",
    "Times are medians over all samples; bars and bands are quartiles.",
    "emblib asks the system for huge pages for its tables; other contenders have what their "
    "allocator gives them. That is part of what is compared.",
    "'forward' is a lookup without gradients. 'step' is forward, backward and the optimizer's "
    "update. Nothing is dropped: raw samples are in points.jsonl.",
    "Before it is timed, each contender's first output and first update are checked against "
    "plain PyTorch; one that differs is listed as wrong instead.",
    "'parameters' counts weights; 'compression' divides the same tables as plain float32 by "
    "them; 'scratch' is the high-water mark of one step above what was allocated before it.",
)
HOST_NOTE = (
    "'host' is the median time that a step's call takes on the host, while a spinning kernel keeps "
    f"the GPU busy. 'bound by' says host where the GPU works for less than {100 * GPU_BUSY:.0f} % "
    "of that time (in mode wall: where the call takes more than that share of the time to "
    "completion)."
)
SYNTHETIC_NOTE = (
    "Row ids are synthetic: uniform, or P(rank) ~ (rank + q)^-s sampled exactly, with ids "
    "shuffled by a seeded bijection unless the workload says 'ranked'."
)
PRODUCTION_NOTE = (
    "'Production-like' ids are drawn from a distribution fitted to the published locality "
    "histograms of a 2022 production trace (docs/traces.md): how popular rows are is like it, "
    "nothing else is."
)
TRACE_NOTE = (
    "Of a trace, every process sees the first batches of the file, in its order; points.jsonl has "
    "the file's sha256."
)
ONE_PROCESS_NOTE = (
    "A ratio is taken within each round, between each side's faster sample, so that what slows "
    "the machine for a moment does not count or slows both sides; shown is the median over the "
    "rounds. Processes differ by more than the rounds within one do, so one process gives neither "
    "an interval nor a verdict: timing.replicates=3 gives both."
)
PROCESSES_NOTE = (
    "A ratio is taken within each round, between each side's faster sample, so that what slows "
    "the machine for a moment does not count or slows both sides; a process's ratio is the median "
    "over its rounds. Shown are the mean over the processes (of logarithms) and its 95 % Student-t "
    "interval: processes differ by more than the rounds within one do. Two processes take the "
    "spread between processes from all cells of the run, or their own if that is larger; one "
    "process has no interval."
)
VERDICTS_NOTE = (
    f"Verdicts need {PROCESSES_FOR_A_VERDICT} processes. 'slower' and 'faster': the interval "
    f"excludes 1 and the effect is beyond {100 * MARGIN:g} %. 'same': the whole interval is "
    f"within {100 * MARGIN:g} %. 'unsure': neither; 'smallest effect shown' is the smallest "
    "one that would have been called slower or faster. Another day or another machine can "
    "differ by more."
)


def how_to_read(run: Run) -> list[str]:
    """Return the notes that apply to this run; of packages only if its kind has no rounds."""
    if run.kind.reporting.comparability < Comparability.ROUNDS:
        return _package_notes(run)
    notes = [HOW_TO_READ[0], *(MODE_NOTES[mode] for mode in run.modes if mode in MODE_NOTES)]
    has_intervals = max(run.processes_per_cell().values(), default=0) > 1
    notes += [PROCESSES_NOTE] if has_intervals else [ONE_PROCESS_NOTE]
    notes += [VERDICTS_NOTE] if has_intervals and len(run.table) else []
    notes += HOW_TO_READ[1:]
    distributions = {record["params"].get("distribution") for record in run.records}
    notes += [SYNTHETIC_NOTE] if distributions & {"uniform", "zipf"} else []
    notes += [PRODUCTION_NOTE] if "production" in distributions else []
    notes += [TRACE_NOTE] if "trace" in distributions else []
    measured_ceilings = MeasuredCeilings.from_environment(run.environment)
    if measured_ceilings.gather_gb_s:
        notes.append(f"'of gather' divides by {measured_ceilings.gather_method}.")
    notes += [HOST_NOTE] if any(record.get("wall_samples") for record in run.records) else []
    return notes + _package_notes(run)


def _package_notes(run: Run) -> list[str]:
    packages = {pair for record in run.records for pair in record.get("packages", {}).items()}
    versions = ", ".join(f"{package} {version}" for package, version in sorted(packages))
    return [f"Contenders from other packages are those of {versions}."] if versions else []


def notices(run: Run) -> list[str]:
    """Return sentences that a reader must know before trusting a number."""
    sentences = []
    if run.is_smoke:
        sentences.append(
            "Tables, batches and rounds are capped to see whether everything works (timing=smoke)."
        )
    else:
        sentences += _scaled_sentences(run)
        if (spread := run.median_spread()) > NOISY_SPREAD:
            sentences.append(
                f"Noisy run: half of the medians have quartiles more than {100 * spread:.0f} "
                "% apart. Something else used the machine; believe the intervals, not the third "
                "digit."
            )
    sentences += _unfinished_sentences(run)
    if note := run.environment.get("note"):  # the user's own entry in environment.json
        sentences.append(f"Note: {note}")
    sentences += host_bound_sentences(run)
    disturbed = [
        (explain(flag), count) for flag, count in flag_counts(run).items() if flag not in MINOR
    ]
    if disturbed:
        total = len(run.table) // len(PHASES)
        disturbances = "; ".join(f"{flag} ({count} of {total} rows)" for flag, count in disturbed)
        sentences.append(f"While this was measured: {disturbances}.")
    folded_records = {
        record["section"]: record for record in run.records if record.get("pool_folded")
    }
    for section, record in folded_records.items():
        share = record["pool_folded"] / (record["lookups"] * record["pool_batches"])
        sentences.append(
            f"Trace: {100 * share:.3g} % of the lookups of {run.title(section)} are outside their "
            "tables and were folded into them (ids modulo rows), so that rows collide."
        )
    return sentences


def host_bound_sentences(run: Run) -> list[str]:
    """Describe the steps that are bound by the host (`metrics.is_host_bound`); [] on a CPU."""
    if not len(run.table) or "host_bound" not in run.table:
        return []
    steps = run.table[(run.table["phase"] == "step") & run.table["host_s"].notna()]
    bound_steps = steps[steps["host_bound"]]
    if not len(steps):
        return []
    if not len(bound_steps):
        return [f"Host-bound: none of {text.count(len(steps), 'measured step')}."]
    worst = bound_steps.loc[(bound_steps["host_s"] / bound_steps["median_s"]).idxmax()]
    return [
        f"Host-bound: {len(bound_steps)} of {text.count(len(steps), 'measured step')}. The host "
        "takes longer to launch them than the GPU to do them, so that steps in a row take the "
        "column 'host', not 'step', unless they are captured as CUDA graphs; ratios of such steps "
        f"compare kernels, not training loops. The widest gap: {worst['label']}, "
        f"{worst['cell']}, mode {worst['mode']}: {text.seconds(worst['host_s'])} of host for "
        f"{text.seconds(worst['median_s'])}."
    ]


def _scaled_sentences(run: Run) -> list[str]:
    """Describe the sections whose tables did not fit into memory."""
    if not len(run.table):
        return []
    scales = run.table.groupby("section", sort=False)["rows_scale"].min()
    return [
        f"Memory: the tables of {run.title(str(section))} were scaled to "
        f"{text.digits(100 * scale)} % of the rows to fit "
        f"{100 * float(run.config.device.memory_share):.0f} % of the free memory."
        for section, scale in scales.items()
        if scale < 1
    ]


def _unfinished_sentences(run: Run) -> list[str]:
    """Describe what was planned and not measured: cells, processes of cells, values of axes."""
    sentences, processes = [], run.processes_per_cell()
    if (status := run.status) != "finished":
        num_cells = len({record["cell"] for record in run.records})
        planned_cells = run.info.get("cells")
        progress = f"{num_cells} of " * (planned_cells is not None)
        progress += text.count(num_cells if planned_cells is None else planned_cells, "cell")
        ending = "Interrupted" if status == "interrupted" else f"Ended early ({status})"
        sentences.append(f"{ending} after {progress}; the same command continues.")
    counts_below_plan = [count for count in processes.values() if count < run.planned_processes]
    if counts_below_plan:
        planned = text.count(run.planned_processes, "process", "processes")
        sentences.append(
            f"{len(counts_below_plan)} of {text.count(len(processes), 'cell')} were measured in "
            f"fewer than the planned {planned} (fewest: {min(counts_below_plan)}). "
            "One process gives no interval; two take the spread of the run's other cells."
        )
    if values := run.info.get("values_left_out"):
        sentences.append(f"Not in this run, for timing.max_cells: {', '.join(values)}.")
    num_left_out = int(run.info.get("cells_left_out", 0))
    if num_left_out:
        sentences.append(
            f"{num_left_out} of {text.count(run.info['cells'], 'cell')} were not measured: the "
            "time of the run (timing.total_seconds) was used up. The same command continues "
            "with them."
        )
    return sentences


def flag_counts(run: Run) -> dict[str, int]:
    """Return the number of rows of steps by flag, the most frequent first."""
    if "flags" not in run.table:
        return {}
    flags = run.table[run.table["phase"] == "step"]["flags"]
    counts = Counter(flag for row_flags in flags for flag in row_flags.split("; ") if flag)
    return dict(counts.most_common())
