"""What the report of sharded collections says: steps beside TorchRec's, over ranks, predicted."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd

from experiments.config.schema import Scaling
from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.data import Run
from experiments.report.tables import Table, Value
from experiments.sharding import numbers

NOTES = (
    numbers.FORMULA,
    "Ratios are TorchRec's time ÷ that of emblib's counterpart in the same processes, paired in "
    "each round: 2× means that emblib's step takes half the time. Both work on the same batches in "
    "the same processes; a rank's gradients are divided by the number of ranks. On CPUs "
    "both exchange over gloo.",
    "Every contender's first output and first update are checked against plain PyTorch, on all "
    "ranks together, before anything is timed.",
    "Predictions are those of the planner's cost model, from constants that the same ranks "
    "measured before anything else. Where there are more ranks than were measured they are "
    "predictions and nothing else: nobody ran them. They take every rank to have a core of its "
    "own and every link to be as those between the ranks that were measured; machines that are not "
    "one host have a network that this was not checked on.",
)


def rows_of(run: Run) -> pd.DataFrame:
    """Every arm's step, over all modes."""
    return numbers.steps(numbers.frame(run.records))


def answer(run: Run) -> list[str]:
    """Against TorchRec where it was there; how the subject scales; how good predictions are."""
    rows = rows_of(run)
    if not len(rows):
        return ["No answer: no contender has a result."]
    said = [*_against(run, rows), *_scaling(run, rows), *_predicted(run)]
    return said or [_fastest(rows)]


def _against(run: Run, rows: pd.DataFrame) -> list[str]:
    """The ratios of the headline, each with its times; then the range over all cells."""
    judged = numbers.beside_torchrec(rows)
    if not len(judged):
        return []
    section = run.headline if (judged["section"] == run.headline).any() else judged.iloc[0].section
    first = judged[judged["section"] == section]
    first = first[first["world_size"] == first["world_size"].max()]
    first = first[first["cell"] == first["cell"].iloc[0]]
    ours = {(r["cell"], r["arm"]): r["median_s"] for _, r in rows.iterrows()}
    parts = [
        f"{row['type']} {text.times(row['ratio'])} "
        f"{text.interval(row['ratio_lo'], row['ratio_hi'])} "
        f"({text.seconds(row['median_s'])} against "
        f"{text.seconds(ours[row['cell'], numbers.counterpart(row['arm'])])})"
        for _, row in first.iterrows()
    ]
    title = _cell_title(run, str(first["cell"].iloc[0]))
    sentences = [
        f"On this machine a step of TorchRec takes, as a multiple of emblib's on {title}: "
        f"{', '.join(parts)}."
    ]
    if judged["cell"].nunique() > 1:
        low, high = judged.loc[judged["ratio"].idxmin()], judged.loc[judged["ratio"].idxmax()]
        sentences.append(
            f"Over all cells the multiple runs from {text.times(low['ratio'])} ({low['label']} on "
            f"{_cell_title(run, low['cell'])}) to {text.times(high['ratio'])} ({high['label']} on "
            f"{_cell_title(run, high['cell'])})."
        )
    return sentences


def _scaling(run: Run, rows: pd.DataFrame) -> list[str]:
    """The subject and the best type, at the largest world, both ways of scaling."""
    ours = rows[rows["contender"].str.startswith(numbers.OURS) & rows["base_s"].notna()]
    largest = ours["world_size"].max() if len(ours) else 1
    if not largest > 1 or not ours["compute_s"].notna().any():
        return []
    found = []
    for scaling in Scaling:
        last = ours[(ours["world_size"] == largest) & (ours["scaling"] == scaling.value)]
        if not len(last):
            continue
        headline = last[last["section"] == run.headline]
        last = headline if len(headline) else last
        last = last[last["cell"] == last["cell"].iloc[0]]
        best = last.loc[last["median_s"].idxmin()]
        own = last[last["contender"] == run.subject.contender]
        told = [best] if best["contender"] == run.subject.contender else [best, *_rows(own)]
        words = " and ".join(_efficiency(row) for row in told)
        found.append(
            f"{scaling.value.capitalize()} scaling to {largest:.0f} ranks: {words}{_cores(run)}."
        )
    return found


def _rows(rows: pd.DataFrame) -> list[pd.Series]:
    return [row for _, row in rows.iterrows()]


def _efficiency(row: pd.Series) -> str:
    share = text.digits(100 * row["communication_s"] / row["median_s"], 2)
    return (
        f"{row['type']} takes {text.seconds(row['median_s'])} a step, an efficiency of "
        f"{text.digits(100 * row['efficiency'], 2)} %, {share} % of it communication"
    )


def _cores(run: Run) -> str:
    """That ranks had to share cores, where they had to."""
    cores = (run.environment.get("cpu") or {}).get("usable_cores")
    most = max(r["world_size"] for r in run.records)
    return f" (on {cores} cores, which they share)" if cores and cores < most else ""


def _predicted(run: Run) -> list[str]:
    """How well the cost model told the measured steps, and what it says of the largest world."""
    rows = numbers.predictions(run.records)
    correlation, factor, points = numbers.agreement(rows)
    if math.isnan(correlation):
        return []
    return [
        f"The cost model's predictions of the {points} measured steps have a rank correlation of "
        f"{text.digits(correlation, 2)} with them and are off by a factor of "
        f"{text.digits(factor)} in the middle."
    ]


def _fastest(rows: pd.DataFrame) -> str:
    row = rows.loc[rows["median_s"].idxmin()]
    return f"The fastest step is that of {row['label']}: {text.seconds(row['median_s'])}."


def _cell_title(run: Run, cell: str) -> str:
    return next(str(r["title"]) for r in run.records if r["cell"] == cell)


def tables(run: Run) -> Sequence[tuple[str, str, Table]]:
    """A table of each section: a row per arm and world; then the predictions."""
    rows, every = rows_of(run), numbers.frame(run.records)
    found = []
    for section in run.sections():
        own = every[every["section"] == section]
        for cell in dict.fromkeys(own["cell"]):
            title = _cell_title(run, str(cell))
            case = run.config.cases.get(section)
            note = f" {case.note}" if case is not None and case.note else ""
            line = f"{_sizes(run, str(cell))}.{note}"
            table = _table(every[every["cell"] == cell], rows[rows["cell"] == cell])
            found.append((title[:1].upper() + title[1:], line, table))
    told = numbers.predictions(run.records)
    if len(told):
        words = "Of worlds that were not measured these are predictions, and nothing else."
        found.append(("Predicted steps", words, _predictions(told)))
    return found


def _sizes(run: Run, cell: str) -> str:
    record = next(r for r in run.records if r["cell"] == cell)
    base = run.sizes(record["section"]) if record["section"] != SWEEP else ""
    p = record["params"]
    each = (
        f"{record['features']} tables, {record['rows']:,} rows, D={p['D']}, B={p['B']:,} a rank, "
        f"{record['lookups']:,} lookups a rank and batch"
    )
    return base if base and record["world_size"] == 1 else each


def _table(every: pd.DataFrame, steps: pd.DataFrame) -> Table:
    parts = [name for name in numbers.PARTS if (every["phase"] == name).any()]
    compared = bool(steps["ratio"].notna().any()) if len(steps) else False
    heads = ["contender", "forward", "step"]
    heads += ["step ÷ emblib's [95\u00a0%]"] if compared else []
    heads += ["efficiency", "compute", "communication"] if parts else ["efficiency"]
    heads += [numbers.PARTS[name] for name in parts] + ["tables", "processes"]
    lines = []
    modes = every["mode"].nunique() > 1
    for (arm, mode), own in every.groupby(["arm", "mode"], sort=False):
        name = f"{own['label'].iloc[0]}{f', {mode}' * modes}"
        times = {r["phase"]: r["median_s"] for _, r in own.iterrows()}
        step = steps[(steps["arm"] == arm) & (steps["mode"] == mode)]
        if not len(step):
            line = [Value(name), Value(str(own["status"].iloc[0]))]
            lines.append(line + [Value(text.NONE)] * (len(heads) - len(line)))
            continue
        row = step.iloc[0]
        line = [Value(name), _time(times.get("forward")), _time(row["median_s"])]
        line += [_ratio(row)] if compared else []
        line += [_percent(row["efficiency"])]
        line += [_time(row["compute_s"]), _time(row["communication_s"])] if parts else []
        line += [_time(times.get(part)) for part in parts]
        line += [Value(text.size(row["weights_bytes"]), float(row["weights_bytes"] or math.nan))]
        lines.append([*line, Value(f"{row['processes']}", float(row["processes"]))])
    return Table(heads, lines)


def _time(value: float | None) -> Value:
    if value is None or text.missing(value):
        return Value(text.NONE)
    return Value(text.seconds(value), value)


def _percent(value: float) -> Value:
    return Value(text.NONE) if text.missing(value) else Value(f"{100 * value:.0f} %", float(value))


def _ratio(row: pd.Series) -> Value:
    if text.missing(row["ratio"]):
        return Value(text.NONE)
    shown = f"{text.times(row['ratio'])} {text.interval(row['ratio_lo'], row['ratio_hi'])}"
    return Value(shown, float(row["ratio"]))


def _predictions(rows: pd.DataFrame) -> Table:
    heads = ["contender", "batch a rank", "ranks", "scaling", "predicted step", "measured step"]
    heads += ["predicted ÷ measured"]
    rows = rows.sort_values(["section", "contender", "scaling", "world_size"])
    lines = []
    for _, row in rows.iterrows():
        ratio = row["predicted_s"] / row["median_s"]
        measured = Value("a prediction") if row["beyond"] else _time(row["median_s"])
        lines.append(
            [
                Value(str(row["label"])),
                Value(f"{row['batch']:,}", float(row["batch"])),
                Value(f"{row['world_size']}", float(row["world_size"])),
                Value(str(row["scaling"])),
                _time(row["predicted_s"]),
                measured,
                Value(text.times(ratio), ratio if not math.isnan(ratio) else math.nan),
            ]
        )
    return Table(heads, lines)
