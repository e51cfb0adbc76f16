"""Build pages that list another library's options: Markdown tables, and names as code."""

from collections.abc import Iterable, Mapping, Sequence


def code(names: str) -> str:
    """Format names, separated by commas, as code; keep a dash."""
    return ", ".join(name if name == "–" else f"`{name}`" for name in names.split(", "))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def groups(heads: Sequence[str], options: Mapping[str, Sequence[tuple[str, ...]]]) -> list[str]:
    """Return one section per group of options; the first column holds names."""
    return [
        f"## {title}\n\n{table(heads, [(code(name), *cells) for name, *cells in group_rows])}"
        for title, group_rows in options.items()
    ]
