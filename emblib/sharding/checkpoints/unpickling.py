"""Reading the pickles of a checkpoint without running what they name.

The metadata of torch.distributed.checkpoint is a pickle, and so is every value that is no tensor.
Only the classes that these need are admitted; a file that names anything else is refused.
"""

import io
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

from emblib.sharding.checkpoints.state_trees import CheckpointError, leaves

_CHECKPOINT = "torch.distributed.checkpoint"
_ADMITTED = {
    f"{_CHECKPOINT}.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    f"{_CHECKPOINT}.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
}
_PATHS = {"pathlib", "pathlib._local"}
_PLAIN = {bool, float, int, str, type(None)}
_DAMAGE = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip


def read_metadata(data: bytes, path: Path) -> Any:
    """Return the metadata of torch.distributed.checkpoint that `data`, of the file `path`, holds.

    Raises:
        CheckpointError: the pickle names a class or function that metadata does not need, or is no
            metadata.
    """
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        Metadata,
        TensorStorageMetadata,
    )

    try:
        metadata = _MetadataUnpickler(data, path).load()
    except CheckpointError:
        raise
    except _DAMAGE as error:
        raise CheckpointError(
            f"{path} is damaged: it cannot be read ({type(error).__name__}: {error}); load another "
            "checkpoint, e.g. an older one"
        ) from error
    kinds = (BytesStorageMetadata, TensorStorageMetadata)
    if not (
        isinstance(metadata, Metadata)
        and all(isinstance(value, kinds) for value in metadata.state_dict_metadata.values())
        and all(isinstance(value, _StorageInfo) for value in metadata.storage_data.values())
    ):
        raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
    for info in metadata.storage_data.values():
        if PurePath(info.relative_path).name != info.relative_path:
            raise CheckpointError(
                f"{path} names the file {info.relative_path!r}; all files of a checkpoint are in "
                "its directory: load only checkpoints of those you trust"
            )
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Admits what metadata of torch.distributed.checkpoint is made of, and nothing else."""

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module in _PATHS and name.endswith("Path"):
            return _joined_path  # where the checkpoint was saved, of which nothing depends
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which metadata of a checkpoint does not need and "
            "which may run code, so it is not loaded: load only checkpoints of those you trust; "
            "torch.distributed.checkpoint.load loads it with all that it names"
        )


def _joined_path(*parts: str) -> str:
    return str(PurePath(*parts))


def read_value(data: io.BytesIO, name: str, path: Path) -> Any:
    """Return the value called `name` that is no tensor, of the checkpoint `path`.

    Raises:
        CheckpointError: it needs a class that `torch.load` does not admit by itself.
    """
    try:
        return torch.load(data, weights_only=True)
    except Exception as error:  # whatever the reader of torch comes across
        if unsafe := _unsafe(data):
            raise CheckpointError(
                f"{path}: {name} is not loaded: it names {unsafe}, which may run code; if you "
                "trust the checkpoint, call torch.serialization.add_safe_globals first"
            ) from error
        said = str(error).partition("\n")[0]
        raise CheckpointError(f"{path}: {name} is damaged: {said}") from error


def check_values(state: Mapping[str, Any]) -> None:
    """Raise TypeError for a value that could be saved, and then not be loaded."""
    for leaf in leaves(dict(state)):
        if isinstance(leaf.value, Tensor) or type(leaf.value) in _PLAIN:
            continue
        data = io.BytesIO()
        torch.save(leaf.value, data)
        try:
            torch.load(io.BytesIO(data.getvalue()), weights_only=True)
        except pickle.UnpicklingError as error:
            raise TypeError(
                f"values of a checkpoint must be tensors, numbers, text, or lists and dicts of "
                f"these, since loading others may run code; {leaf.name} is a "
                f"{type(leaf.value).__name__} and needs {_unsafe(data) or 'more than that'}: save "
                "what it is made of, or call torch.serialization.add_safe_globals before saving "
                "and loading"
            ) from error


def _unsafe(data: io.BytesIO) -> str:
    """Return the classes and functions of a saved value that `torch.load` does not admit."""
    find: Callable[..., list[str]] = torch.serialization.get_unsafe_globals_in_checkpoint
    try:
        return ", ".join(sorted(find(io.BytesIO(data.getvalue()))))
    except Exception:  # it is damaged beyond that
        return ""
