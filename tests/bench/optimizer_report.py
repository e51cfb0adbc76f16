"""Rows of `optimizer_steps` as a Markdown table and a figure."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

FIELDS = (
    *("case", "threads", "option", "contender", "status", "rounds", "median_s", "q25_s", "q75_s"),
    *("ratio_to", "ratio", "ratio_q25", "ratio_q75", "ratio_lo", "ratio_hi"),
)
NAMES = {"fbgemm": "FBGEMM", "torch": "nn.EmbeddingBag", "emblib": "emblib"}
COLOURS = {"fbgemm": "#d55e00", "torch": "#009e73", "emblib": "#0072b2"}
MARKERS = {"fbgemm": "o", "torch": "^", "emblib": "s"}
SHAPES = {
    "A": "A: T=1 R=1,000,000 D=128 B=2048 L=20, uniform",
    "B": "B: T=26 R=100,000 D=64 B=2048 L=1, uniform",
    "C": "C: T=10 R=1,000,000 D=64 B=512 L=20, zipf 1.15",
}


def groups(rows: Sequence[Row]) -> dict[tuple[str, int, str], dict[str, Row]]:
    """(case, threads, option) -> contender -> row."""
    found: dict[tuple[str, int, str], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["case"], row["threads"], row["option"]), {})[row["contender"]] = row
    return found


def markdown(rows: Sequence[Row]) -> str:
    """One table a case and number of threads."""
    parts = ["# Step time of optimizers and options on the CPU", ""]
    parts += [
        "Step: forward, backward and update. A ratio is the median of the ratios within rounds, "
        "with its 95 % interval; above 1 the peer is slower. Raw samples: optimizer_steps.json.",
        "",
    ]
    every = groups(rows)
    for case, threads in dict.fromkeys(key[:2] for key in every):
        parts += [f"## {SHAPES[case]}; {threads} thread{'s' * (threads > 1)}", ""]
        parts += [
            "| option | emblib | ÷ our SGD | FBGEMM ÷ emblib | nn.EmbeddingBag ÷ emblib |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for key, found in every.items():
            if key[:2] == (case, threads):
                cells = [_ratio(found.get(who)) for who in ("emblib", "fbgemm", "torch")]
                parts.append(f"| {key[2]} | {_time(found.get('emblib'))} | {' | '.join(cells)} |")
        parts.append("")
    return "\n".join(parts)


def _time(row: Row | None) -> str:
    if row is None or row["status"] != "ok":
        return "–" if row is None else row["status"]
    return f"{1e3 * row['median_s']:.2f} ms [{1e3 * row['q25_s']:.2f}, {1e3 * row['q75_s']:.2f}]"


def _ratio(row: Row | None) -> str:
    if row is None:
        return "–"
    if row["status"] != "ok":
        return row["status"]
    if "ratio" not in row:
        return "–"
    interval = (
        "" if math.isnan(row["ratio_lo"]) else (f" [{row['ratio_lo']:.2f}, {row['ratio_hi']:.2f}]")
    )
    return f"{row['ratio']:.2f}{interval}"


def figure(rows: Sequence[Row], path: Path) -> None:
    """Plot the peers' time ÷ emblib's, and emblib's time ÷ its SGD, to `path`.png."""
    import matplotlib.pyplot as plt

    from experiments.report.style import theme

    every = groups(rows)
    kinds = list(dict.fromkeys(key[:2] for key in every))
    options = list(dict.fromkeys(key[2] for key in every))
    with theme():
        cases = list(dict.fromkeys(case for case, _ in kinds))
        threads = list(dict.fromkeys(count for _, count in kinds))
        canvas, grid = plt.subplots(
            len(cases),
            2,
            squeeze=False,
            layout="constrained",
            sharey="row",
            sharex="col",
            figsize=(11, (0.22 * len(options) + 1.0) * len(cases) + 1.0),
        )
        for number, case in enumerate(cases):
            _draw(grid[number][0], every, options, case, threads, ["fbgemm", "torch"])
            _draw(grid[number][1], every, options, case, threads, ["emblib"])
            grid[number][0].set_title(SHAPES[case])
            grid[number][1].set_title("")
        handles = {}
        for axes in grid.flat:
            handles |= dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
        canvas.legend(
            handles.values(), handles.keys(), loc="outside upper center", ncols=3, fontsize=9
        )
        grid[-1][0].set_xlabel("time of the peer ÷ time of emblib (above 1 emblib is faster)")
        grid[-1][1].set_xlabel("time of the option ÷ SGD, both emblib")
        canvas.savefig(path.with_suffix(".png"), dpi=150)
        plt.close(canvas)


def _points(axes: Any, found: Sequence[tuple[int, Row]], shift: float, **look: Any) -> None:
    if not found:
        return
    x = [row["ratio"] for _, row in found]
    spread = [
        [max(0.0, row["ratio"] - row["ratio_lo"]) for _, row in found],
        [max(0.0, row["ratio_hi"] - row["ratio"]) for _, row in found],
    ]
    y = [place + shift for place, _ in found]
    axes.errorbar(x, y, xerr=spread, ls="none", capsize=2, ms=5, lw=1.1, **look)


def _draw(
    axes: Any,
    every: dict[tuple[str, int, str], dict[str, Row]],
    options: Sequence[str],
    case: str,
    threads: Sequence[int],
    contenders: Sequence[str],
) -> None:
    """Draw the points of contenders, each for all numbers of threads."""
    for who in contenders:
        for count in threads:
            found = [
                (place, every[case, count, option][who])
                for place, option in enumerate(options)
                if "ratio" in every.get((case, count, option), {}).get(who, {})
            ]
            hollow = (
                {"markerfacecolor": "white"} if count == threads[0] and len(threads) > 1 else {}
            )
            _points(
                axes,
                found,
                0.22 * (threads.index(count) - (len(threads) - 1) / 2),
                color=COLOURS[who],
                marker=MARKERS[who],
                **hollow,
                label=f"{NAMES[who]}, {count} thread{'s' * (count > 1)}",
            )
    _finish(axes, options)


def _finish(axes: Any, options: Sequence[str]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    axes.axvline(1.0, color="#1b1f24", lw=1.0)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.minorticks_off()
    axes.set_yticks(range(len(options)), options, fontsize=8)
    axes.set_ylim(len(options) - 0.5, -0.5)
