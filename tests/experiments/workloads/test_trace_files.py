"""Trace files: each format reads back what was written, and what cannot be used says why."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import emblib
from experiments import configure
from experiments.config.schema import Config, Distribution, Format, Ids, UsageError, WorkloadConfig
from experiments.kinds import expand
from experiments.workloads import trace_files, workload
from experiments.workloads.trace_files import TraceError
from experiments.workloads.trace_formats import READERS, converting_read_errors

# Three samples of two tables: the lookups every file here has, whatever its format.
SAMPLES = [([1, 2], [7]), ([], [7]), ([3], [5])]


def dlrm(path: Path) -> Path:
    lengths = torch.tensor([[len(s[t]) for s in SAMPLES] for t in range(2)])
    indices = torch.tensor([i for t in range(2) for s in SAMPLES for i in s[t]])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)])
    torch.save((indices, offsets, lengths), path / "fbgemm_t2_bs3.pt")
    return path / "fbgemm_t2_bs3.pt"


def dlrm_packed(path: Path) -> Path:
    packed = path / "fbgemm_t2_bs3.pt.gz"
    packed.write_bytes(gzip.compress(dlrm(path).read_bytes()))
    return packed


def dlrm_old(path: Path) -> Path:
    """As torch wrote before its files were archives."""
    content = torch.load(dlrm(path))
    torch.save(content, path / "old.pt", _use_new_zipfile_serialization=False)
    return path / "old.pt"


def text(path: Path) -> Path:
    lines = ["first,second", '"[1, 2]",7', ",7", "3,5"]
    (path / "lists.csv").write_text("\n".join(lines) + "\n")
    return path / "lists.csv"


def text_packed(path: Path) -> Path:
    packed = path / "lists.csv.gz"
    packed.write_bytes(gzip.compress(b"first,second\n1 2,7\n,7\n3,5"))
    return packed


def parquet(path: Path) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table(
        {
            "first": [s[0] or None for s in SAMPLES],
            "price": [0.5, 1.5, 2.5],
            "second": [s[1][0] for s in SAMPLES],
        }
    )
    parquet.write_table(table, path / "rows.parquet", row_group_size=2)
    return path / "rows.parquet"


def recorded(path: Path) -> Path:
    first, second = nn.EmbeddingBag(10, 4, include_last_offset=True), nn.Embedding(8, 4)
    with emblib.TraceRecorder(first, second) as recorder:
        for a, b in SAMPLES:
            first(torch.tensor(a, dtype=torch.int64), torch.tensor([0, len(a)]))
            second(torch.tensor(b))
    recorder.save(path / "lookups.pt")
    return path / "lookups.pt"


Write = Callable[[Path], Path]
WRITERS = (dlrm, dlrm_packed, dlrm_old, text, text_packed, parquet, recorded)


def of(path: Path, **changes: Any) -> WorkloadConfig:
    plain = WorkloadConfig(distribution=Distribution.trace, file=str(path), T=0, E=10, B=2, D=4)
    return dataclasses.replace(plain, **changes)


def read(work: WorkloadConfig, count: int = 9) -> list[list[list[list[int]]]]:
    """[batches][tables][samples] lists of ids."""
    solved = trace_files.resolve(work, sized=True)
    found = trace_files.batches(solved, workload.table_rows(solved), count)
    return [
        [[p.tolist() for p in np.split(part.ids, np.cumsum(part.lengths)[:-1])] for part in batch]
        for batch in found
    ]


@pytest.mark.parametrize("write", WRITERS)
def test_every_format_reads_the_same(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read(of(path)) == [[[[1, 2], []], [[7], [7]]]]  # the third sample is not a batch of two
    assert read(of(path, B=1)) == [[[a], [b]] for a, b in SAMPLES]
    assert read(of(path, B=3)) == [[[a for a, _ in SAMPLES], [b for _, b in SAMPLES]]]


@pytest.mark.parametrize("write", WRITERS)
def test_resolved_says_what_the_file_says(write: Write, tmp_path: Path) -> None:
    path = write(tmp_path)
    solved = trace_files.resolve(of(path), sized=True)
    assert (solved.T, solved.E, solved.sizes, solved.L) == (2, 10, [10, 10], 1)
    assert len(solved.columns) == 2
    assert solved.sha256 == emblib.trace.sha256(path)
    assert trace_files.resolve(solved, sized=True) == solved


def test_criteo(tmp_path: Path) -> None:
    fields = [*"1234567890123", *(f"{c:08x}" for c in range(26))]
    missing = [*fields[:13], *[""] * 26]
    (tmp_path / "train.txt").write_text("\t".join(["1", *fields]) + "\n" + "\t".join(missing))
    batch = read(of(tmp_path / "train.txt", E=2**32))[0]
    assert batch == [[[c], []] for c in range(26)]
    chosen = read(of(tmp_path / "train.txt", E=99, columns=["C3", "C1"]))[0]
    assert chosen == [[[2], []], [[0], []]]
    assert len(read(of(tmp_path / "train.txt", T=5, E=99))[0]) == 5


def test_recorded_tables_know_their_rows(tmp_path: Path) -> None:
    solved = trace_files.resolve(of(recorded(tmp_path), E=0), sized=True)
    assert solved.sizes == [10, 8]
    assert workload.table_shapes(solved) == (
        workload.TableShape(10, 4),
        workload.TableShape(8, 4),
    )


def test_a_file_without_sizes_asks_for_them_where_tables_are_made(tmp_path: Path) -> None:
    path = dlrm(tmp_path)
    with pytest.raises(TraceError, match=r"does not say how many rows table t0 has.*workload.E=N"):
        trace_files.resolve(of(path, E=0), sized=True)
    assert trace_files.resolve(of(path, E=0), sized=False).sizes == [0, 0]


@pytest.mark.parametrize("write", [dlrm, text, parquet, recorded])
def test_an_id_outside_its_table_is_an_error_unless_folding_is_asked_for(
    write: Write, tmp_path: Path
) -> None:
    path = write(tmp_path)
    with pytest.raises(TraceError, match=r"has 4 rows and the trace looks up id 7.*workload.ids"):
        read(of(path, E=4))
    assert read(of(path, E=4, ids=Ids.fold)) == [[[[1, 2], []], [[3], [3]]]]
    pool = workload.make_pool(
        trace_files.resolve(of(path, E=4, ids=Ids.fold), sized=True),
        (workload.TableShape(4, 4),) * 2,
        5,
        1,
    )
    assert (pool.num_folded, len(pool.batches), pool.lookups_per_batch) == (2, 1, 4)


def test_hashed_ids_of_64_bits_and_negative_ones_fold(tmp_path: Path) -> None:
    (tmp_path / "hashed.csv").write_text(f"a\n{2**64 - 1}\n{2**63}\n3\n5\n")
    assert read(of(tmp_path / "hashed.csv", E=10, B=4, ids=Ids.fold)) == [[[[5], [8], [3], [5]]]]
    (tmp_path / "signed.csv").write_text("a\n-1\n-13\n")
    assert read(of(tmp_path / "signed.csv", E=10, ids=Ids.fold)) == [[[[9], [7]]]]
    with pytest.raises(TraceError, match="looks up id -1"):
        read(of(tmp_path / "signed.csv"))


def test_a_trace_that_is_only_looked_at_keeps_its_ids_where_sizes_are_unknown(
    tmp_path: Path,
) -> None:
    work = trace_files.resolve(of(dlrm(tmp_path), E=0, B=3), sized=False)
    pool = workload.make_pool(work, workload.table_shapes(work, scale=0.5), 1, seed=1)
    assert pool.batches[0].indices.tolist() == [1, 2, 3, 7, 7, 5]
    assert pool.num_folded == 0
    config = Config(kind="trace", workload=of(dlrm(tmp_path), E=0, T=0))
    config.timing.max_rows = 100
    assert [cell.rows_scale for cell in expand(config)] == [1.0]


def test_spreadsheets_marks_and_empty_lines_in_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbfx,y\r\n1,2\r\n\r\n3,4\r\n\r\n")
    assert read(of(tmp_path / "a.csv", columns=["x"])) == [[[[1], [3]]]]


def look_through(path: Path) -> None:
    work = trace_files.resolve(of(path, E=0), sized=False)
    assert list(trace_files.batches(work, [0] * len(work.sizes), 5000))


def damaged(name: str, kind: str) -> tuple[str, bytes]:
    packed = gzip.compress(b"a\n" + b"".join(b"%d\n" % i for i in range(5000)))
    return {
        "cut": (f"{name}.csv.gz", packed[:-100]),
        "not packed": (f"{name}.csv.gz", b"a\n1\n2\n"),
        "not text": (f"{name}.csv", bytes(range(256))),
        "twice": (f"{name}.csv", b"a,a\n1,2\n3,4\n"),
        "tabs": (f"{name}.csv", b"a\tb\n1\t2\n"),
        "too large": (f"{name}.csv", b"a\n%d\n5\n" % 10**30),
        "mixed": (f"{name}.csv", b"a\n%d -1\n5\n" % (2**64 - 1)),
        "sign": (f"{name}.tsv", b"\t".join([b"0"] * 14 + [b"-5"] * 26) + b"\n"),
        "pickle": (f"{name}.pt", b"\x80\x02cos\nsystem\n."),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("cut", "is damaged"),
        ("not packed", "is damaged"),
        ("not text", "is damaged"),
        ("twice", "two tables named 'a'"),
        ("tabs", "separated by commas"),
        ("too large", "64 bits"),
        ("mixed", "64 bits"),
        ("sign", "must be hexadecimal"),
        ("pickle", "not a file of torch.save"),
    ],
)
def test_damaged_files_say_so(kind: str, message: str, tmp_path: Path) -> None:
    name, content = damaged("x", kind)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=message):
        look_through(tmp_path / name)


@pytest.mark.parametrize("kind", READERS)
def test_readers_say_that_a_file_is_missing(kind: Format, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"there is no file .*no\.csv"):
        READERS[kind](tmp_path / "no.csv")


def test_a_file_that_vanishes_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a\n1\n")
    reader = READERS[Format.csv](path)
    path.unlink()
    with (
        pytest.raises(TraceError, match=r"a\.csv cannot be read \(No such file"),
        converting_read_errors(path),
    ):
        reader.tables()


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        (0, [1.0, 2.0, 3.0, 7.0, 7.0, 5.0], "must have integers"),
        (1, [0, 2, 2, 3, 4, 5, 9], "from 0 to the number of indices"),
        (1, [1, 2, 2, 3, 4, 5, 6], "from 0 to the number of indices"),
        (1, [0, 3, 2, 3, 4, 5, 6], "offsets and lengths disagree"),
        (2, [[2, 1, 1], [1, 1, 1]], "offsets and lengths disagree"),
    ],
)
def test_tensors_that_do_not_fit_together(
    part: int, values: list[Any], message: str, tmp_path: Path
) -> None:
    content = list(torch.load(dlrm(tmp_path)))
    content[part] = torch.tensor(values)
    torch.save(tuple(content), tmp_path / "other.pt")
    with pytest.raises(TraceError, match=message):
        read(of(tmp_path / "other.pt"))


def test_a_parquet_list_that_misses_an_id(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet_files = pytest.importorskip("pyarrow.parquet")
    pairs = pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int32(), 2))
    table = pyarrow.table({"a": [[1, None], [2]], "b": pairs})
    parquet_files.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(TraceError, match="a list in column a has a null"):
        read(of(tmp_path / "x.parquet", columns=["a"]))
    assert read(of(tmp_path / "x.parquet", columns=["b"])) == [[[[1, 2], [3, 4]]]]


def test_batches_are_the_pool(tmp_path: Path) -> None:
    work = trace_files.resolve(of(text(tmp_path), B=3), sized=True)
    shapes = workload.table_shapes(work)
    pool = workload.make_pool(work, shapes, 4, seed=1)
    (batch,) = pool.batches
    assert batch.indices.tolist() == [1, 2, 3, 7, 7, 5]
    assert batch.offsets.tolist() == [0, 2, 2, 3, 4, 5, 6]
    assert batch.gradient.shape == (3, 8)
    assert pool.unique_rows_per_batch == 5
    assert pool.fingerprint == workload.make_pool(work, shapes, 4, seed=2).fingerprint


def test_other_bags_are_another_fingerprint(tmp_path: Path) -> None:
    prints = set()
    for name, lines in (("a", "1 2\n3\n"), ("b", "1\n2 3\n")):
        (tmp_path / f"{name}.csv").write_text("x\n" + lines)
        work = trace_files.resolve(of(tmp_path / f"{name}.csv"), sized=True)
        pool = workload.make_pool(work, workload.table_shapes(work), 1, 1)
        prints.add(pool.fingerprint)
    assert len(prints) == 2


def test_tables_that_are_made_smaller_fold(tmp_path: Path) -> None:
    work = trace_files.resolve(of(dlrm(tmp_path)), sized=True)
    pool = workload.make_pool(work, workload.table_shapes(work, scale=0.4), 1, 1)
    assert pool.batches[0].indices.tolist() == [1, 2, 3, 3]
    assert pool.num_folded == 2


def test_too_short_a_trace_says_so(tmp_path: Path) -> None:
    work = trace_files.resolve(of(text(tmp_path), B=50), sized=True)
    with pytest.raises(TraceError, match=r"fewer than 50 samples.*lower workload.B"):
        workload.make_pool(work, workload.table_shapes(work), 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"file": "missing.pt"}, "there is no file 'missing.pt'"),
        ({"columns": ["secnd"]}, "no table 'secnd'. Did you mean 'second'"),
        ({"T": 3}, "workload.T must be at most 2"),
        ({"sizes": [1, 2, 3]}, "one entry per table: lists.csv has 2, got 3"),
        ({"sha256": "00"}, "another file: its sha256 is"),
        ({"format": Format.dlrm}, "not a file of torch.save"),
        ({"format": Format.parquet}, "not a parquet file|pip install pyarrow"),
        ({"format": Format.emblib}, "not a trace that emblib wrote"),
    ],
)
def test_what_does_not_fit_the_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=message):
        trace_files.resolve(of(text(tmp_path), **changes), sized=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "1,2\n3,4\n", "first line must name the columns"),
        ("a.csv", "x,y\n1,2,3\n", "there are 2 columns, got 3 fields; lists with commas"),
        ("a.csv", "x\n1\nfive\n", "line 3: ids must be integers"),
        ("a.csv", "x\n1\n1_2\n", r"line 3: ids must be integers \(an underscore"),
        ("a.csv", "x\n", "has no samples"),
        ("a.txt", "1\t2\t3\n", r"line 1: a line of Criteo's has 40 fields.*got 3"),
        ("a.txt", "\t".join(["0"] * 39 + ["xyz"]), "line 1: a category must be hexadecimal"),
        ("a.dat", "x", "does not tell its format; give one of dlrm, criteo"),
    ],
)
def test_what_is_wrong_in_a_file(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TraceError, match=message):
        read(of(tmp_path / name))


def test_torch_files_of_another_shape(tmp_path: Path) -> None:
    torch.save([torch.zeros(3), "x"], tmp_path / "a.pt")
    with pytest.raises(TraceError, match=r"layout of dlrm_datasets.*got 2 entries \[\[3\], \"str"):
        read(of(tmp_path / "a.pt"))
    zeros = [torch.zeros(shape, dtype=torch.int64) for shape in ((3,), (3,), (2, 3))]
    torch.save(tuple(zeros), tmp_path / "b.pt")
    with pytest.raises(TraceError, match=r"T\*B \+ 1 = 7 entries \(lengths is 2 × 3\), got 3"):
        read(of(tmp_path / "b.pt"))


def test_a_damaged_parquet_file_is_an_error_of_the_trace(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "x.parquet"
    table = pyarrow.table({"a": [[n % 9] * (n % 4) for n in range(400)]})
    parquet.write_table(table, path, compression="none", use_dictionary=False)
    content = path.read_bytes()
    path.write_bytes(content[:170] + bytes(8) + content[178:])  # among the lengths of the lists
    with pytest.raises(TraceError, match=r"x\.parquet is damaged"):
        read(of(path), 400)


def test_parquet_without_ids(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"price": [0.5]}), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match=r"no column has integers.*price: double"):
        read(of(tmp_path / "a.parquet"))


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """The start of a long file does not need its end, which here could not be read."""
    path = tmp_path / "long.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["x"], *([i % 7] for i in range(5000)), ["broken!"]])
    assert len(read(of(path, B=100), count=3)) == 3
    with pytest.raises(TraceError, match="line 5002"):
        read(of(path, B=100), count=99)


def test_cells_of_a_trace_have_its_tables(tmp_path: Path) -> None:
    config = Config(workload=of(recorded(tmp_path), E=0), contenders=["tbe"])
    (cell,) = expand(config)
    assert cell.workload.sizes == [10, 8]
    assert cell.title == "2 tables of the trace lookups.pt (D=4, B=2, L≈1)"
    with pytest.raises(UsageError, match="does not say how many rows"):
        expand(Config(workload=of(text(tmp_path), E=0), contenders=["tbe"]))
    (cell,) = expand(Config(kind="trace", workload=of(text(tmp_path), E=0)))
    assert [arm.key for arm in cell.arms] == ["lookups"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workload=trace"], "workload.distribution=trace needs a file: workload.file=PATH"),
        (["workload.file=x.csv"], "workload.file is read by workload=trace only"),
        (["workload.E=0"], "workload.E must be in [1, 2**63), got 0"),
        (["workload=trace", "workload.file=x", "workload.B=0"], "workload.B must be in [1, 2**63)"),
        (["workload.sizes=[3,0]"], "workload.sizes must be in [1, 2**63)"),
        (["workload.format=parket"], "Did you mean 'workload.format=parquet'"),
    ],
)
def test_words_that_do_not_fit_together(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        configure.load(["+experiment=tbe_vs_torch", *words])


def test_sizes_make_tables_of_different_size() -> None:
    work = WorkloadConfig(sizes=[3, 500], T=9, D=4, B=8, L=2)
    shapes = workload.table_shapes(work)
    assert [s.rows for s in shapes] == [3, 500]
    pool = workload.make_pool(work, shapes, 1, 1)
    assert int(pool.batches[0].feature(0)[0].max()) < 3
    assert pool.lookups_per_batch == 32
