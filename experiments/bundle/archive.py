"""Zip files with checksums. Equal contents and an equal zlib lead to equal bytes."""

from __future__ import annotations

import hashlib
import lzma
import stat
import struct
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

SUMS = "SHA256SUMS"
EPOCH = (1980, 1, 1, 0, 0, 0)  # earliest time of a zip file
MAX_BYTES = 1 << 30  # maximum size of an unpacked bundle, far above the size of results

# Errors that zipfile raises for a damaged or unreadable file.
READ_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    NotImplementedError,
    OSError,
    RuntimeError,
    ValueError,
)

TOO_LARGE = f"it would unpack to more than {MAX_BYTES >> 30} GiB"


class BundleError(Exception):
    """A bundle cannot be packed, read or measured again; the message has the reason."""


def write(path: Path, contents: Mapping[str, bytes]) -> str:
    """Write a zip file of the contents and of SUMS; return the sha256 of SUMS.

    SUMS holds the contents' checksums in the format of `sha256sum`. A file at `path` is replaced
    once the new one is complete.

    Args:
        path: zip file to write; its folder is created.
        contents: {name: content}. Names are relative POSIX paths without "..", backslash or line
            break, and not SUMS. This function does not check them, but `read` does.

    Raises:
        BundleError: contents and checksums together are larger than MAX_BYTES.
        OSError: the file cannot be written.
    """
    lines = [f"{hashlib.sha256(content).hexdigest()}  {name}" for name, content in contents.items()]
    sums = "\n".join(sorted(lines, key=lambda line: line[66:])) + "\n"
    if sum(map(len, contents.values())) + len(sums) > MAX_BYTES:
        raise BundleError(f"{TOO_LARGE}: pack fewer runs")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_file = path.with_name(f".{path.name}.partial")
    try:
        with zipfile.ZipFile(partial_file, "w", zipfile.ZIP_DEFLATED) as file:
            for name, content in sorted({**contents, SUMS: sums.encode()}.items()):
                entry = zipfile.ZipInfo(name, EPOCH)
                entry.compress_type = zipfile.ZIP_DEFLATED
                entry.external_attr = (stat.S_IFREG | 0o644) << 16
                file.writestr(entry, content)
        partial_file.replace(path)
    finally:
        partial_file.unlink(missing_ok=True)
    return hashlib.sha256(sums.encode()).hexdigest()


def read(path: Path) -> dict[str, bytes]:
    """Return {name: content} of a bundle, SUMS included; every name and checksum is checked.

    Raises:
        BundleError: there is no such file, it cannot be read, it would unpack to more than
            MAX_BYTES, or a name or a checksum is wrong.
    """
    if not path.is_file():
        raise BundleError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
            _check_names(entries)
            contents = {entry.filename: file.read(entry) for entry in entries}
    except READ_ERRORS as error:
        raise BundleError(f"{path.name} is damaged, or no zip file: {error}") from error
    _check_sums(contents)
    return contents


def _check_names(entries: list[zipfile.ZipInfo]) -> None:
    """Raise BundleError unless names are relative and unique, and entries are plain files.

    It is also raised if the unpacked sizes, as the zip file states them, exceed MAX_BYTES.
    """
    counts = Counter(entry.filename for entry in entries)
    if repeated_names := sorted(name for name, count in counts.items() if count > 1):
        raise BundleError(f"{repeated_names[0]} is in it twice")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        kind = stat.S_IFMT(entry.external_attr >> 16)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename:
            raise BundleError(f"{entry.filename!r} would be outside the bundle")
        if entry.is_dir() or kind not in (0, stat.S_IFREG):
            raise BundleError(f"{entry.filename!r} is not a plain file")
    if sum(entry.file_size for entry in entries) > MAX_BYTES:
        raise BundleError(TOO_LARGE)


def _check_sums(contents: Mapping[str, bytes]) -> None:
    """Raise BundleError unless the contents are exactly what SUMS lists, with these sums."""
    if SUMS not in contents:
        raise BundleError(f"it has no {SUMS}: not a bundle")
    expected_sums = {}
    for line in contents[SUMS].decode(errors="replace").splitlines():
        actual_sum, _, name = line.partition("  ")
        expected_sums[name] = actual_sum
    names, expected_names = set(contents) - {SUMS}, set(expected_sums)
    problems = [
        *(f"{name} is missing" for name in sorted(expected_names - names)),
        *(f"{name} is not in {SUMS}" for name in sorted(names - expected_names)),
        *(
            f"{name} has another checksum"
            for name in sorted(names & expected_names)
            if hashlib.sha256(contents[name]).hexdigest() != expected_sums[name]
        ),
    ]
    if problems:
        more_note = f", and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise BundleError("; ".join(problems[:3]) + more_note)


def unpack(contents: Mapping[str, bytes], folder: Path) -> None:
    """Write contents that `read` returned into a folder, over files of the same names.

    Raises:
        OSError: a file cannot be written, for example because a file has the name of its folder.
        ValueError: the file system cannot represent a name.
    """
    for name, content in contents.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
