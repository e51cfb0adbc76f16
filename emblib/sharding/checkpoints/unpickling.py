"""Read the metadata of a checkpoint, a pickle, without running code of it.

Only the names of the classes and functions that metadata needs are admitted. The pickle gets
placeholder classes for them, because its opcodes may set attributes of any object that they reach,
also of classes and functions. Real metadata is then built from the placeholders, field by field.
"""

import copyreg
import io
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from emblib.sharding.checkpoints.state_trees import CheckpointError

T = TypeVar("T")

_CHECKPOINT = "torch.distributed.checkpoint"
_ADMITTED = {
    "builtins": {"getattr"},  # e.g. Python 3.11.2 pickles members of enums with it
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
_MAX_COUNT = (1 << 63) - 1
_PATH_MODULES = {"pathlib", "pathlib._local"}
_DAMAGE_ERRORS = (  # what unpickling and parsing raise for damaged bytes
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    RuntimeError,
    TypeError,
    ValueError,
)


def read_metadata(data: bytes, path: Path) -> Metadata:
    """Return the metadata of torch.distributed.checkpoint in `data`, read from the file `path`.

    Raises:
        CheckpointError: the pickle names a class or function that metadata does not need, or is not
            metadata.
    """
    try:
        copyreg.clear_extension_cache()  # its entries would be used without `find_class`
        return _parse_metadata(_MetadataUnpickler(data, path).load())
    except CheckpointError:
        raise
    except _DAMAGE_ERRORS as error:
        raise CheckpointError(
            f"{path} is damaged: it cannot be read ({type(error).__name__}: {error}); load another "
            "checkpoint, e.g. an older one"
        ) from error


class _Placeholder:
    """Stands for an instance of a class, or the result of a function, that metadata names.

    Each load creates a subclass per name.

    Attributes:
        name: name of the class or function.
        arguments: arguments of the call in the pickle.
        state: state that the pickle sets; {} without.
    """

    __slots__ = ("arguments", "state")
    name: ClassVar[str]
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "_Placeholder":
        """Create a placeholder that has the arguments."""
        placeholder = super().__new__(cls)
        placeholder.arguments, placeholder.state = arguments, {}
        return placeholder

    def __setstate__(self, *states: Any) -> None:
        """Store the state.

        Raises:
            UnpicklingError: the pickle sets the state of the class itself.
        """
        if len(states) != 1:
            raise pickle.UnpicklingError("it sets attributes of a class")
        (self.state,) = states


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles metadata of torch.distributed.checkpoint with placeholders for its classes.

    Only data types of torch are not replaced; they have no attributes that can be set.
    """

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(data))
        self._path = path
        self._classes: dict[str, type[_Placeholder]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Return a placeholder for a name of metadata, or a data type of torch.

        Raises:
            CheckpointError: the name is another one.
        """
        if name in _ADMITTED.get(module, ()) or (module in _PATH_MODULES and name.endswith("Path")):
            if name not in self._classes:
                self._classes[name] = type(name, (_Placeholder,), {"__slots__": (), "name": name})
            return self._classes[name]
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise CheckpointError(
            f"{self._path} names {module}.{name}, which metadata of a checkpoint does not need and "
            "which may run code, so it is not loaded: load only checkpoints of those you trust; "
            "torch.distributed.checkpoint.load loads it with all that it names"
        )


# From placeholders to metadata. Fields that this version of torch does not know, and those on which
# loading does not depend, are left out.


def _parse_metadata(value: Any) -> Metadata:
    """Convert the placeholder of the metadata of a checkpoint, checking every value."""
    fields = _fields(value, "Metadata")
    storage = {
        _parse_index(key): _parse_storage_info(info)
        for key, info in _check_type(dict, fields["storage_data"], "storage_data").items()
    }
    entries_by_name = _check_type(dict, fields["state_dict_metadata"], "state_dict_metadata")
    entries = {
        _check_type(str, name, "the name of an entry"): _parse_entry(name, entry, storage)
        for name, entry in entries_by_name.items()
    }
    # Planners of other libraries store arbitrary data there.
    planner_data = fields.get("planner_data")
    paths = {
        name: steps
        for name, steps in (planner_data.items() if type(planner_data) is dict else ())
        if type(name) is str and type(steps) is tuple
        if all(type(step) in (int, str) for step in steps)
    }
    return Metadata(entries, paths, storage)


def _parse_entry(
    name: str, value: Any, storage: Mapping[MetadataIndex, _StorageInfo]
) -> BytesStorageMetadata | TensorStorageMetadata:
    """Convert the metadata of one entry; its chunks must lie in their tensor and their files."""
    if getattr(type(value), "name", None) == "BytesStorageMetadata":
        if MetadataIndex(name) not in storage:
            raise ValueError(f"it does not say where {name} is")
        return BytesStorageMetadata()
    fields = _fields(value, "TensorStorageMetadata")
    properties = getattr(
        _check_placeholder(fields["properties"], "TensorProperties"), "state", None
    )
    dtype = properties["dtype"] if type(properties) is dict else properties[0]  # type: ignore[index]
    dtype = _check_type(torch.dtype, dtype, "the dtype of a tensor")
    size = _parse_size(fields["size"])
    chunks = [_parse_chunk(chunk) for chunk in _check_type(list, fields["chunks"], "chunks")]
    for chunk in chunks:
        if not len(size) == len(chunk.offsets) == len(chunk.sizes) or any(
            offset + length > size_of_axis
            for offset, length, size_of_axis in zip(chunk.offsets, chunk.sizes, size, strict=True)
        ):
            raise ValueError(f"{name} of {tuple(size)} has the chunk {chunk}")
        info = storage.get(MetadataIndex(name, chunk.offsets))
        if info is None:
            raise ValueError(f"it does not say where the chunk {chunk} of {name} is")
        nbytes = math.prod(chunk.sizes) * dtype.itemsize
        if not info.transform_descriptors and nbytes > info.length:
            raise ValueError(f"{name} has {nbytes} bytes in {info.length} bytes of a file")
    return TensorStorageMetadata(TensorProperties(dtype), size, chunks)


def _parse_chunk(value: Any) -> ChunkStorageMetadata:
    """Convert offsets and sizes of a chunk of a tensor."""
    fields = _fields(value, "ChunkStorageMetadata")
    return ChunkStorageMetadata(_parse_size(fields["offsets"]), _parse_size(fields["sizes"]))


def _parse_index(value: Any) -> MetadataIndex:
    """Convert the name of an entry, with the offset of a chunk if it has one."""
    fields = _fields(value, "MetadataIndex")
    offset = fields.get("offset")
    name = _check_type(str, fields["fqn"], "the name of an entry")
    return MetadataIndex(name, None if offset is None else _parse_size(offset))


def _parse_storage_info(value: Any) -> _StorageInfo:
    """Convert the location of a chunk; its file must be in the checkpoint's directory."""
    fields = _fields(value, "_StorageInfo")
    name = _check_type(str, fields["relative_path"], "the name of a file")
    if "/" in name or "\\" in name or name in ("", ".", ".."):
        raise ValueError(
            f"it names the file {name!r}, but all files of a checkpoint are in its directory: load "
            "only checkpoints of those you trust"
        )
    transforms = fields.get("transform_descriptors") or ()
    if type(transforms) not in (list, tuple) or any(type(item) is not str for item in transforms):
        raise ValueError(f"transform_descriptors of {name} are not names")
    file_range = (
        _check_count(fields["offset"], "the offset"),
        _check_count(fields["length"], "the length"),
    )
    return _StorageInfo(name, *file_range, tuple(transforms) or None)


def _parse_size(value: Any) -> torch.Size:
    """Convert a `torch.Size`, whose numbers must be counts."""
    arguments = _check_placeholder(value, "Size").arguments
    numbers = _check_type(tuple, arguments[0] if arguments else (), "a size")
    for number in numbers:
        _check_count(number, "a size")
    return torch.Size(numbers)


def _check_count(value: Any, subject: str) -> int:
    """Return a value; raise ValueError unless it is an int in `[0, _MAX_COUNT]`."""
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{subject} is {value!r}")
    return value


def _check_placeholder(value: Any, name: str) -> _Placeholder:
    """Return a value; raise TypeError unless it stands for an object of class `name`."""
    if not isinstance(value, _Placeholder) or value.name != name:
        raise TypeError(f"it has a {type(value).__name__} instead of a {name}")
    return value


def _fields(value: Any, name: str) -> dict[str, Any]:
    return _check_type(dict, _check_placeholder(value, name).state, name)


def _check_type(kind: type[T], value: Any, subject: str) -> T:
    """Return a value; raise TypeError unless its class is exactly `kind`."""
    if type(value) is not kind:
        raise TypeError(f"{subject} must be a {kind.__name__}, got a {type(value).__name__}")
    return value


def has_all_elements(entry: Any) -> bool:
    """Return whether `entry` of metadata is a tensor whose chunks have as many elements as it has.

    Overlaps of chunks are not looked for.
    """
    return isinstance(entry, TensorStorageMetadata) and (
        sum(math.prod(chunk.sizes) for chunk in entry.chunks) == math.prod(entry.size)
    )
