"""Jagged tensors as people read them: one list a bag, long ones cut short."""

from torch import Tensor

_MOST_BAGS = 16
_MOST_VALUES = 16


def bags_text(values: Tensor, weights: Tensor | None, lengths: Tensor) -> str:
    """`[[1, 2], [], [3]]`; with weights both, by name."""
    text = _nested(values, lengths)
    return text if weights is None else f"values: {text}, weights: {_nested(weights, lengths)}"


def keyed_text(name: str, entries: dict[str, str]) -> str:
    """One line a key."""
    lines = "".join(f'    "{key}": {text},\n' for key, text in entries.items())
    return f"{name}({{\n{lines}}})"


def _nested(values: Tensor, lengths: Tensor) -> str:
    shown = lengths[:_MOST_BAGS].tolist()
    bags, start = [], 0
    for length in shown:
        entries = [_entry(v) for v in values[start : start + min(length, _MOST_VALUES)].tolist()]
        more = [f"... ({length} in all)"] if length > _MOST_VALUES else []
        bags.append(f"[{', '.join(entries + more)}]")
        start += length
    if lengths.numel() > len(shown):
        bags.append(f"... ({lengths.numel()} bags in all)")
    return f"[{', '.join(bags)}]"


def _entry(value: float | list[float]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_entry(v) for v in value)}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
