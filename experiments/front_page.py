"""Tables of speed, peers' times ÷ emblib's: one for README.md, two for docs/benchmarks.md.

- The table of README.md (`speed_table`) has the median, worst and best ratio over all measured
  shapes, per pass and peer, on the CPU and on each GPU whose matrix is stored.
- The table of three large workloads (`peers_table`) is from tests/bench/cpu_peers.py, which
  measures FBGEMM and emblib in one process, in alternating rounds. A cell is the median over the
  rounds; ties and losses are marked.
- The table of the CPU's matrix (`matrix_table`) is from tests/bench/cpu_matrix.py. A cell
  summarises all shapes; the shapes where emblib is slower are listed below the table.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.evidence import StoredEvidence, describe_load
from experiments.paths import REFERENCE
from experiments.report import text
from experiments.report.tables import markdown_table
from experiments.timing.statistics import Summary, summarise

SPEED = "<!-- speed:start -->", "<!-- speed:end -->"  # in README.md
PEERS = "<!-- peers:start -->", "<!-- peers:end -->"  # this and the next in docs/benchmarks.md
MATRIX = "<!-- matrix:start -->", "<!-- matrix:end -->"
DEVICE = "amd-epyc-2-threads"
SHAPES = {
    "A": "1 table × 1,000,000 rows × 128 columns, 2,048 bags of 20 ids, uniform",
    "B": "26 tables × 100,000 rows × 64 columns, 2,048 bags of 1 id per table, uniform",
    "C": "10 tables × 1,000,000 rows × 64 columns, 512 bags of 20 ids per table, Zipf 1.15",
}
THREADS = (1, 2)
# (phase, variant, optimizer) of cpu_peers -> the row's title.
TITLE_OF_WORK = {
    ("forward", "fp32", "sgd"): "forward, fp32",
    ("step", "fp32", "sgd"): "step, fp32, SGD",
    ("step", "fp32", "rowwise_adagrad"): "step, fp32, row-wise Adagrad",
    ("forward", "fp16", "sgd"): "forward, fp16",
    ("step", "fp16", "sgd"): "step, fp16, SGD",
    ("forward", "sequence", "sgd"): "forward, fp32, no pooling",
    ("step", "sequence", "sgd"): "step, fp32, SGD, no pooling",
}
Key = tuple[str, str, str, str, int]  # phase, variant, optimizer, shape, threads


def peer_ratios() -> dict[Key, Summary]:
    """Return FBGEMM's time ÷ emblib's of each measured point of the `cpu_peers` reference.

    Ratios are paired by round: a `Summary` has their median and its 95 % interval.
    """
    ratio_by_key = {}
    for row in _reference_rows("cpu_peers"):
        if row["peer"] == "fbgemm":
            pairs = zip(row["samples"]["peer"], row["samples"]["emblib"], strict=True)
            key = row["phase"], row["variant"], row["optimizer"], row["case"], row["threads"]
            ratio_by_key[key] = summarise([peer / emblib for peer, emblib in pairs])
    return ratio_by_key


def _reference_rows(program: str) -> list[dict[str, Any]]:
    """Return the rows of the stored result of a program of tests.bench on DEVICE."""
    path = REFERENCE / DEVICE / program / f"{program}.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return list(content["rows"])


def format_ratio(ratio: Summary) -> str:
    """Format one ratio; mark ties (the interval contains 1) and losses."""
    remark = " (tie)" if ratio.lo <= 1 <= ratio.hi else " (slower)" if ratio.median < 1 else ""
    return f"{ratio.median:.2f}×{remark}"


def peers_table(measured: Mapping[Key, Summary]) -> str:
    """Return the Markdown table of the three large workloads, with a line about each below it.

    `measured` must have every combination of TITLE_OF_WORK, SHAPES and THREADS.
    """
    columns = {
        f"{shape}, {text.count(threads, 'thread')}": (shape, threads)
        for shape in SHAPES
        for threads in THREADS
    }
    rows = [
        [title, *(format_ratio(measured[(*work, *column)]) for column in columns.values())]
        for work, title in TITLE_OF_WORK.items()
    ]
    table = markdown_table(["FBGEMM's time ÷ emblib's", *columns], rows)
    return "\n".join([table, "", *(f"- {shape}: {words}." for shape, words in SHAPES.items())])


# (pass, dtype) of cpu_matrix -> the row's title.
TITLE_OF_MATRIX_WORK = {
    (work, dtype): f"{title}, {dtype}"
    for dtype in ("fp32", "fp16")
    for work, title in {
        "forward": "forward",
        "sgd": "step, SGD",
        "rowwise_adagrad": "step, row-wise Adagrad",
        "adam": "step, Adam",
    }.items()
}
# (peer, threads) -> the column's title.
MATRIX_COLUMNS = {
    (peer, threads): f"{name}, {text.count(threads, 'thread')}"
    for peer, name in (("fbgemm", "FBGEMM"), ("torch", "nn.EmbeddingBag"))
    for threads in THREADS
}


def matrix_rows() -> list[dict[str, Any]]:
    """Return the rows of the `cpu_matrix` reference, one per point and peer.

    Entries: pass, dtype, peer, threads, shape (a text), and ratios: the peer's time ÷ emblib's,
    one per process.
    """
    return _reference_rows("cpu_matrix")


def matrix_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the Markdown table of the matrix, and the shapes where emblib's median is slower."""
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        work, column = (row["pass"], row["dtype"]), (row["peer"], row["threads"])
        cells.setdefault((work, column), []).append(row)
    measured_columns = {column for _, column in cells}
    columns = {
        column: head for column, head in MATRIX_COLUMNS.items() if column in measured_columns
    }
    table = [
        [title, *(_matrix_cell(cells.get((work, column), [])) for column in columns)]
        for work, title in TITLE_OF_MATRIX_WORK.items()
    ]
    slower = []
    for work, title in TITLE_OF_MATRIX_WORK.items():
        for column, head in columns.items():
            slower_rows = [row for row in cells.get((work, column), []) if _median(row) < 1]
            listed_shapes = ", ".join(f"{row['shape']} {_median(row):.2f}×" for row in slower_rows)
            slower += [f"- {title}; {head}: {listed_shapes}"] * bool(slower_rows)
    return "\n".join(
        [
            markdown_table(["peer's time ÷ emblib's", *columns.values()], table),
            "",
            "Where emblib is slower (peer's time ÷ emblib's):",
            "",
            *(slower or ["- nowhere"]),
        ]
    )


def _matrix_cell(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "–"
    values = sorted(_median(row) for row in rows)
    num_faster = sum(value >= 1 for value in values)
    median = statistics.median(values)
    return f"**{median:.2f}×** ({values[0]:.2f}–{values[-1]:.2f}), {num_faster} of {len(values)}"


def _median(row: Mapping[str, Any]) -> float:
    return statistics.median(row["ratios"])


# (peer, pass, dtype) of cpu_matrix -> the row's title in the README.
SPEED_ROWS = {
    ("torch", "forward", "fp32"): "`nn.EmbeddingBag`, lookup",
    ("torch", "sgd", "fp32"): "`nn.EmbeddingBag`, training step, SGD",
    ("torch", "adam", "fp32"): "`nn.EmbeddingBag`, training step, Adam",
    ("fbgemm", "forward", "fp32"): "FBGEMM, lookup",
    ("fbgemm", "sgd", "fp32"): "FBGEMM, training step, SGD",
    ("fbgemm", "rowwise_adagrad", "fp32"): "FBGEMM, training step, row-wise Adagrad",
    ("fbgemm", "forward", "fp16"): "FBGEMM, lookup, fp16 rows",
    ("fbgemm", "sgd", "fp16"): "FBGEMM, training step, SGD, fp16 rows",
}
# Times of a GPU's matrix whose ratios a page has, see tests/bench/gpu/matrix.py.
DEVICE_TIME, CALL_TIME = "device_ratio", "elapsed_ratio"
Work = tuple[str, str, str]  # peer, pass, dtype
GpuRatios = dict[Work, list[float]]  # one per shape


def gpu_ratios(folder: Path = REFERENCE, time: str = DEVICE_TIME) -> dict[str, GpuRatios]:
    """Return the peers' times ÷ emblib's of eager calls, one per shape, by GPU and work.

    `time` is DEVICE_TIME or CALL_TIME; shapes without that time are left out.
    """
    by_device: dict[str, GpuRatios] = {}
    for path in gpu_matrices(folder):
        content = json.loads(path.read_text())
        ratios_of_work = by_device.setdefault(str(content["device"]), {})
        for row in content["rows"]:
            if row.get("mode") == "eager" and row.get(time):
                key = row["contender"], row["work"], row["dtype"]
                ratios_of_work.setdefault(key, []).append(row[time])
    return by_device


def gpu_matrices(folder: Path = REFERENCE) -> list[Path]:
    """Return the stored results of the matrix on GPUs."""
    return sorted(folder.glob("nvidia-*/matrix/matrix.json"))


def speed_table(
    rows: Sequence[Mapping[str, Any]],
    gpus: Mapping[str, Mapping[tuple[str, str, str], list[float]]],
) -> str:
    """Return the Markdown table of the README: median, worst and best per pass and machine.

    Args:
        rows: result of `matrix_rows`.
        gpus: result of `gpu_ratios`.
    """
    table = []
    for (peer, work, dtype), title in SPEED_ROWS.items():
        cells = []
        for threads in THREADS:
            conditions = {"pass": work, "dtype": dtype, "peer": peer, "threads": threads}
            cells.append(
                _speed_cell([_median(row) for row in rows if conditions.items() <= row.items()])
            )
        cells += [_speed_cell(gpu.get((peer, work, dtype), [])) for gpu in gpus.values()]
        table.append([title, *cells])
    heads = [*(f"CPU, {text.count(num_threads, 'thread')}" for num_threads in THREADS), *gpus]
    return markdown_table(["the peer's time ÷ emblib's", *heads], table)


def _speed_cell(shapes: Sequence[float]) -> str:
    if not shapes:
        return "–"
    median = f"**{statistics.median(shapes):.2f}×**"
    return median if len(shapes) == 1 else f"{median} ({min(shapes):.2f}–{max(shapes):.2f})"


def front_page(readme: str) -> str:
    """Return the text of README.md, `readme`, with its table of speed and its sources replaced.

    Raises:
        ValueError: `readme` lacks the markers SPEED, or the stored matrix of a GPU is not whole.
    """
    rows = matrix_rows()
    block = "\n".join([speed_table(rows, gpu_ratios()), "", *speed_sources(rows)])
    return replace_block(readme, SPEED, block)


def speed_sources(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line per machine of the table of README.md: its measurements and their commits.

    Raises:
        ValueError: the stored matrix of a GPU is not whole.
    """
    lines = [f"- CPU: {matrix_source(rows)}."]
    calls = gpu_ratios(time=CALL_TIME)
    for path in gpu_matrices():
        content = json.loads(path.read_text())
        if content["notes"]:
            raise ValueError(f"{path} is not whole: {content['notes'][0]}")
        shapes = len({row["shape"] for row in content["rows"] if row.get(DEVICE_TIME)})
        line = f"- {content['device']}: times on the device, {shapes} shapes, "
        line += f"{StoredEvidence.read(path.parent).age()}."
        medians = [
            f"{statistics.median(ratios):.2f}× ({name})"
            for work, name in (("forward", "lookup"), ("sgd", "step with SGD"))
            if (ratios := calls[content["device"]].get(("fbgemm", work, "fp32")))
        ]
        if medians:
            line += " Of eager calls with their launches FBGEMM's time ÷ emblib's is "
            line += f"{text.listed(medians)}."
        lines.append(line)
    return lines


def matrix_source(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a text about the matrix: shapes, fewest processes of a row, commit, and load."""
    matrix = StoredEvidence.read(REFERENCE / DEVICE / "cpu_matrix")
    shapes = len({row["shape"] for row in rows})
    processes = min(len(row["ratios"]) for row in rows)
    return (
        f"{shapes} shapes, each in {processes} processes, {matrix.age()}; "
        f"{describe_load(matrix.state)}"
    )


def benchmarks(page: str) -> str:
    """Return the text of docs/benchmarks.md, `page`, with the two tables of this module replaced.

    Raises:
        ValueError: `page` lacks the markers PEERS or MATRIX.
    """
    peers = StoredEvidence.read(REFERENCE / DEVICE / "cpu_peers")
    source = f"- {text.capitalise(peers.age())}; {describe_load(peers.state)}."
    page = replace_block(page, PEERS, f"{peers_table(peer_ratios())}\n{source}")
    rows = matrix_rows()
    source = text.capitalise(f"{matrix_source(rows)}.")
    return replace_block(page, MATRIX, f"{source}\n\n{matrix_table(rows)}")


def replace_block(page: str, markers: tuple[str, str], block: str) -> str:
    """Return a page with the text between two markers replaced.

    Raises:
        ValueError: a marker is absent, or occurs more than once.
    """
    start, end = markers
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"the page must contain {start} and {end} once each")
    text_before, text_after = page.split(start)
    return f"{text_before}{start}\n{block}\n{end}{text_after.split(end)[1]}"
