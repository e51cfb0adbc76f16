"""Values as `torch.load` returns them after `torch.save`."""

import io
from typing import Any

import torch


def saved_and_loaded(value: Any, **options: Any) -> Any:
    """Save a value to memory and load it; `options` are those of `torch.load`."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)
