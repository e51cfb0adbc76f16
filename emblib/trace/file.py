"""Traces: recorded ids and bag lengths of features, and the file that stores them.

The file is an archive of `torch.save` with a dict: format, version, features, ids, lengths and
samples. Where all bags of a feature have one length, only this length and the number of samples are
stored (`_StoredLengths`).
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.tables.durable_files import check_archive, save_archive, saving

FORMAT, VERSION = "emblib.trace", 1
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)  # of ids; narrowest first


@dataclass(frozen=True)
class TracedFeature:
    """A feature of a trace.

    Attributes:
        name: name of the feature, unique in its trace.
        table: name of the table that it reads.
        rows: number of rows of the table; 0 if unknown.
        dim: elements per row of the table; 0 if unknown.

    Example:
        >>> emblib.TracedFeature("seen", table="item", rows=1_000)
        TracedFeature(name='seen', table='item', rows=1000, dim=0)
    """

    name: str
    table: str
    rows: int = 0
    dim: int = 0


@dataclass(frozen=True)
class LookupTrace:
    """Lookups of F features: sample n of feature f looked up the next `lengths[f][n]` of `ids[f]`.

    Features may differ in their number of samples, if modules are not called equally often. The
    constructor checks nothing. `load` checks dtypes and numbers of ids, but not names and ids.

    Attributes:
        features: the features, F; their names must differ.
        ids: ids of each feature, `[F][L_f]`, of uint8, int16, int32 or int64; `TraceRecorder`
            uses the narrowest dtype that holds them.
        lengths: number of ids of each sample, `[F][samples]`, of one of the same dtypes.

    Example:
        >>> trace = emblib.LookupTrace(  # one feature of two samples
        ...     (emblib.TracedFeature("seen", "item", 1_000),),
        ...     ids=(torch.tensor([3, 1, 4]),),
        ...     lengths=(torch.tensor([2, 1]),),
        ... )
        >>> digest = trace.save("lookups.pt")
        >>> emblib.LookupTrace.load("lookups.pt").ids[0][:]
        tensor([3, 1, 4])
    """

    features: tuple[TracedFeature, ...]
    ids: tuple[Tensor, ...]
    lengths: tuple[Tensor, ...]

    def save(self, path: str | Path) -> str:
        """Write the file atomically; return its SHA-256 as 64 hexadecimal digits.

        The trace is not checked: `load` refuses a file with inconsistent parts.

        Raises:
            OSError: the file could not be written, see `durable_files.saving`.
        """
        features = [asdict(feature) for feature in self.features]
        stored_lengths = [_StoredLengths.from_lengths(lengths) for lengths in self.lengths]
        content = {
            "format": FORMAT,
            "version": VERSION,
            "features": features,
            "ids": list(map(_without_rest, self.ids)),
            "lengths": [_without_rest(lengths.values) for lengths in stored_lengths],
            "samples": [lengths.num_samples for lengths in stored_lengths],
        }
        with saving(path) as file:  # given a path, torch would put its name into the bytes
            save_archive(content, file)
        return sha256(path)

    @classmethod
    def load(cls, path: str | Path) -> LookupTrace:
        """Read a file that `save` wrote. Its checksums are compared, which reads all of it.

        Ids are mapped from the file: the system reads them again when they are used, and the file
        must not be written meanwhile.

        Raises:
            OSError: there is no such file, `path` is a directory, or it may not be read.
            ValueError: the file is of another kind or version, is damaged, or has inconsistent
                parts.
        """
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError):
            raise
        except Exception as error:  # damaged bytes make torch's reader raise any class of error
            message = str(error).partition("\n")[0]
            raise ValueError(f"{path} is not a trace that emblib wrote ({message})") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{path} is not a trace that emblib wrote")
        if content.get("version") != VERSION:
            raise ValueError(
                f"{path} is a trace of version {content.get('version')}; this emblib reads version "
                f"{VERSION}: record it again"
            )
        try:
            check_archive(path)
        except ValueError as error:
            raise ValueError(f"{path} is damaged: {error}; record or copy it again") from error
        try:
            trace = cls._from_content(content)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path} is damaged: it lacks parts of a trace ({error!r})") from error
        if problem := trace._problem():  # noqa: SLF001 (of this class)
            raise ValueError(f"{path} is damaged: {problem}")
        return trace

    @classmethod
    def _from_content(cls, content: dict[str, Any]) -> LookupTrace:
        """Return the trace with the content of a file, which `save` made."""
        lengths = [
            _StoredLengths(values, num_samples).expand()
            for values, num_samples in zip(content["lengths"], content["samples"], strict=True)
        ]
        features = tuple(TracedFeature(**feature) for feature in content["features"])
        return cls(features, tuple(content["ids"]), tuple(lengths))

    def _problem(self) -> str:
        """Describe the first inconsistent part; return "" if there is none. Reads no ids."""
        if not len(self.features) == len(self.ids) == len(self.lengths):
            return (
                f"{len(self.features)} features, {len(self.ids)} ids, {len(self.lengths)} lengths"
            )
        for feature, ids, lengths in zip(self.features, self.ids, self.lengths, strict=True):
            if not {ids.dtype, lengths.dtype} <= set(INTEGERS):
                return f"{feature.name} has ids of {ids.dtype} and lengths of {lengths.dtype}"
            if ids.dim() != 1 or lengths.dim() != 1:
                shapes = f"ids {tuple(ids.shape)} and lengths {tuple(lengths.shape)}"
                return f"{feature.name} has {shapes}, not one dimension each"
            if lengths.numel() and int(lengths.min()) < 0:
                return f"{feature.name} has a negative length"
            if (expected := int(lengths.sum())) != ids.numel():
                return f"{feature.name} has {ids.numel()} ids and lengths for {expected}"
        return ""


class _StoredLengths(NamedTuple):
    """The lengths of a feature as the file has them.

    Attributes:
        values: lengths `[num_samples]`; `[1]` if all are equal.
        num_samples: number of samples.
    """

    values: Tensor
    num_samples: int

    @classmethod
    def from_lengths(cls, lengths: Tensor) -> _StoredLengths:
        """Store lengths, `[samples]`."""
        are_equal = lengths.numel() > 0 and bool((lengths == lengths[0]).all())
        return cls(lengths[:1] if are_equal else lengths, lengths.numel())

    def expand(self) -> Tensor:
        """Return the lengths, `[samples]`."""
        return self.values.expand(self.num_samples) if self.values.numel() == 1 else self.values


def _without_rest(tensor: Tensor) -> Tensor:
    """Return a tensor whose memory has no other values, which `torch.save` would write too."""
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def sha256(path: str | Path) -> str:
    """Return the SHA-256 of a file's bytes, 64 hexadecimal digits.

    Example:
        >>> _ = open("lookups.pt", "wb").write(b"")
        >>> emblib.trace.sha256("lookups.pt")[:12]
        'e3b0c44298fc'
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
