"""The Prometheus text, read back by a strict parser; files of it, and series in CSV."""

import csv
import math
import os
import re
import resource
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from emblib import (
    BackingStore,
    CacheConfig,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    HostRows,
    KeyedJaggedTensor,
    Placement,
    SharedTables,
    TableBatchedEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
    telemetry,
)
from emblib.sharding import DistributedModelParallel
from emblib.storage import Dense, Hash

DOCS = Path(__file__).resolve().parents[1] / "docs" / "operations.md"
ODD_NAME = 'a "b" \\ c\nd'

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{(.*)\} (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(,|$)')


class Sample(NamedTuple):
    """A line of the text format."""

    name: str
    labels: tuple[tuple[str, str], ...]
    value: float


class Family(NamedTuple):
    """A metric with its samples."""

    kind: str
    help: str
    samples: list[Sample]


def unescaped(text: str) -> str:
    return re.sub(r'\\(["\\n])', lambda m: "\n" if m[1] == "n" else m[1], text)


def labels_of(text: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(text):
        found = LABEL.match(text, at)
        assert found, f"labels {text[at:]!r}"
        yield found[1], unescaped(found[2])
        at = found.end()


def parse(text: str) -> dict[str, Family]:
    """Parse the text format; fail if it is not exactly as version 0.0.4 demands."""
    assert not text or text.endswith("\n")
    families: dict[str, Family] = {}
    current = ""
    lines = iter(text.removesuffix("\n").split("\n") if text else ())
    for line in lines:
        if line.startswith("# HELP "):
            name, _, words = line.removeprefix("# HELP ").partition(" ")
            assert NAME.fullmatch(name)
            assert name not in families, "the lines of a metric are together"
            kind_line = next(lines)
            kind = kind_line.removeprefix(f"# TYPE {name} ")
            assert kind in ("counter", "gauge", "histogram"), kind_line
            assert (kind == "counter") == name.endswith("_total")
            families[name], current = Family(kind, unescaped(words), []), name
            continue
        found = SAMPLE.fullmatch(line)
        assert found, line
        suffix = found[1].removeprefix(current)
        is_histogram = families[current].kind == "histogram"
        assert suffix in (("_bucket", "_sum", "_count") if is_histogram else ("",)), line
        labels = tuple(labels_of(found[2]))
        assert len(dict(labels)) == len(labels), "a label is there twice"
        families[current].samples.append(Sample(found[1], labels, float(found[3])))
    for name, family in families.items():
        keys = [(s.name, s.labels) for s in family.samples]
        assert len(set(keys)) == len(keys) > 0, f"{name} has a sample twice, or none"
        if family.kind == "histogram":
            check_histogram(name, family.samples)
    return families


def check_histogram(name: str, samples: list[Sample]) -> None:
    """Buckets ascend, are cumulative, and end with all observations."""
    series: dict[frozenset[tuple[str, str]], dict[str, Any]] = {}
    for sample in samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        entry = series.setdefault(frozenset(labels.items()), {"buckets": []})
        if sample.name == f"{name}_bucket":
            assert bound is not None
            entry["buckets"].append((float(bound), sample.value))
        else:
            assert bound is None
            entry[sample.name] = sample.value
    for entry in series.values():
        bounds, totals = zip(*entry["buckets"], strict=True)
        assert list(bounds) == sorted(set(bounds))
        assert bounds[-1] == math.inf
        assert list(totals) == sorted(totals)
        assert totals[-1] == entry[f"{name}_count"]
        assert f"{name}_sum" in entry


def value(families: dict[str, Family], name: str, **labels: str) -> float:
    """Return the value of the one sample with these labels, among others."""
    (family,) = (f for n, f in families.items() if name in (n, f"{n}_sum", f"{n}_count"))
    wanted = labels.items()
    (sample,) = (s for s in family.samples if s.name == name and wanted <= dict(s.labels).items())
    return sample.value


class Mixed(nn.Module):
    """A model with every kind of table that counts, names that need escapes among them."""

    def __init__(self) -> None:
        super().__init__()
        specs = [DynamicSpec(32, 4, name=name) for name in (ODD_NAME, "user")]
        self.keyed = DynamicEmbeddingBags(
            specs, optim.SGD(0.1), seed=1, backing=BackingStore(HostRows(100, seed=1))
        )
        self.dense = TableBatchedEmbeddingBags(
            [TableSpec(100, 4, name="cached", placement=Placement.MANAGED_CACHING)],
            optim.SGD(0.1),
            cache=CacheConfig(load_factor=0.5),
        )
        self.trains = CachedTTEmbeddingBags(
            [TTSpec(64, 4, ranks=(2, 2), name="train")], TTCache(16), optim.SGD(0.1)
        )
        cached = Dense(placement=Placement.MANAGED_CACHING)
        configs = [
            EmbeddingBagConfig(64, 4, "user", ["id"], storage=Hash()),
            EmbeddingBagConfig(100, 4, "rows", ["id"], storage=cached),
        ]
        self.bags = EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        offsets = torch.tensor([0, ids.numel()])
        both = torch.cat([ids, ids])
        batch = KeyedJaggedTensor(["id"], ids, lengths=torch.tensor([ids.numel()]))
        outputs = [
            self.keyed(both, torch.tensor([0, ids.numel(), 2 * ids.numel()])),
            self.dense(ids % 100, offsets),
            self.trains(ids % 64, offsets),
            self.bags(batch).values(),
        ]
        return torch.cat(outputs, 1)


@pytest.fixture(scope="module")
def model() -> Mixed:
    mixed = Mixed()
    mixed.keyed.track_statistics(remember=100)
    for first in (0, 20, 40, 0):
        mixed(torch.arange(first, first + 30)).sum().backward()
    return mixed


def test_the_text_has_the_counters_of_all_tables(model: Mixed) -> None:
    families = parse(telemetry.prometheus_text(model, {"rank": "3", "host": ODD_NAME}))
    for family in families.values():
        for sample in family.samples:
            assert dict(sample.labels).keys() >= {"rank", "host", "module", "table"}
            assert dict(sample.labels)["host"] == ODD_NAME
    odd = model.keyed.statistics(ODD_NAME)
    labels = {"module": "keyed", "table": ODD_NAME}
    assert value(families, "emblib_hits_total", **labels) == odd.hits
    assert value(families, "emblib_evicted_keys_total", **labels) == odd.evicted > 0
    assert value(families, "emblib_reinserted_keys_total", **labels) == odd.reinserted
    assert value(families, "emblib_load_ratio", **labels) == odd.load
    assert odd.eviction_ages is not None
    assert value(families, "emblib_eviction_age_steps_sum", **labels) == odd.eviction_ages.total_age
    assert value(families, "emblib_eviction_age_steps_count", **labels) == odd.evicted
    no_slot = {**labels, "reason": "no_slot"}
    assert value(families, "emblib_refused_keys_total", **no_slot) == odd.refused
    assert odd.tiers is not None
    assert value(families, "emblib_tier_demoted_total", **labels) == odd.tiers.demoted > 0
    in_collection = {"module": "bags", "table": "user"}
    assert value(families, "emblib_keys", **in_collection) == model.bags.tables["user"].size()
    cached = model.dense.cache_stats().tables["cached"]
    dense = {"module": "dense", "table": "cached"}
    assert value(families, "emblib_cache_unique_total", **dense) == cached.unique > 0
    in_groups = {"module": "bags.groups", "table": "rows"}
    assert value(families, "emblib_cache_lookups_total", **in_groups) == 120
    trained = model.trains.cache_stats().tables["train"]
    trains = {"module": "trains", "table": "train"}
    assert value(families, "emblib_tt_cache_lookups_total", **trains) == trained.lookups > 0
    # A table that is not tracked has no numbers for what it does not count.
    ages = families["emblib_eviction_age_steps"].samples
    assert {dict(s.labels)["module"] for s in ages} == {"keyed"}


def test_paths_are_the_same_over_ranks() -> None:
    """Dashboards that name a module go on when the model is sharded."""
    config = EmbeddingBagConfig(64, 4, "user", ["user"], storage=Hash())
    plain = nn.ModuleDict({"bags": EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))})
    texts = [telemetry.prometheus_text(plain)]
    sharded = DistributedModelParallel(plain)
    assert list(telemetry.local_statistics(sharded)) == [("bags", "user")]
    texts.append(telemetry.prometheus_text(sharded))
    assert texts[0] == texts[1]
    assert 'module="bags",table="user"' in texts[0]


def test_the_cache_of_a_shared_table_counts_once_at_its_first_collection() -> None:
    item = EmbeddingConfig(64, 4, "item", storage=Dense(placement=Placement.MANAGED_CACHING))
    shared = SharedTables([item], optimizer=optim.SGD(0.1))
    readers = [EmbeddingCollection([shared.unpooled("item", ["x"])], shared=shared) for _ in "ab"]
    model = nn.ModuleDict(dict(zip("ab", readers, strict=True)))
    batch = KeyedJaggedTensor(["x"], torch.tensor([3, 4]), lengths=torch.tensor([2]))
    for bags in readers:
        bags(batch)
    families = parse(telemetry.prometheus_text(model))
    (sample,) = families["emblib_cache_lookups_total"].samples
    assert sample.labels == (("module", "a.groups"), ("table", "item"))
    assert sample.value == 4


def test_a_model_without_tables_has_no_metrics() -> None:
    assert telemetry.prometheus_text(nn.Linear(2, 2)) == ""


@pytest.mark.parametrize("name", ["le", "table", "module", "a-b", "__x", "", "1a"])
def test_labels_that_prometheus_does_not_accept(name: str) -> None:
    with pytest.raises(ValueError, match="a label is letters"):
        telemetry.prometheus_text(nn.Linear(2, 2), {name: "x"})


def test_labels_are_strings_or_integers(tmp_path: Path) -> None:
    bags = DynamicEmbeddingBags([DynamicSpec(32, 4, name="item")], optim.SGD(0.1))
    path = tmp_path / "series.csv"
    labels: Any = {"rank": 3, "shard": np.int64(4), "node": torch.tensor(5), "cache": "a"}
    families = parse(telemetry.prometheus_text(bags, labels))
    assert value(families, "emblib_rows", rank="3", shard="4", node="5", cache="a") == 32
    for labels, error in (({"rank": None}, TypeError), ({1: "x"}, ValueError)):
        with pytest.raises(error, match="label"):
            telemetry.prometheus_text(bags, labels)  # type: ignore[arg-type]
        with pytest.raises(error, match="label"):
            telemetry.append_csv(bags, path, labels)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="separates the labels"):
        telemetry.append_csv(bags, path, {"host": "a;b"})
    assert not path.exists()


def test_no_device_is_replaced_by_a_textfile(model: Mixed, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        with pytest.raises(OSError, match="is not a regular file"):
            telemetry.write_textfile(model, path)
    assert pipe.is_fifo()


def test_files_are_utf_8_in_any_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    bags = DynamicEmbeddingBags([DynamicSpec(32, 4, name="Schuhgröße")], optim.SGD(0.1))
    telemetry.write_textfile(bags, tmp_path / "a.prom")
    telemetry.append_csv(bags, tmp_path / "a.csv")
    for path in tmp_path.iterdir():
        assert "Schuhgröße" in path.read_bytes().decode()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of file sizes raise on Linux")
def test_a_full_disk_leaves_no_part_of_a_line(model: Mixed, tmp_path: Path) -> None:
    path = tmp_path / "series.csv"
    telemetry.append_csv(model, path)
    before = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 30, limits[1]))
        with pytest.raises(OSError, match="File too large"):
            telemetry.append_csv(model, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


def test_a_textfile_is_replaced_at_once(
    model: Mixed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "emblib.prom"
    path.write_text("old\n")

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", fail)
        with pytest.raises(OSError, match="disk full"):
            telemetry.write_textfile(model, path)
    assert path.read_text() == "old\n"
    telemetry.write_textfile(model, path, {"rank": "0"})
    assert path.read_text() == telemetry.prometheus_text(model, {"rank": "0"})
    assert list(tmp_path.iterdir()) == [path]


def test_a_series_has_a_line_per_table_and_snapshot(model: Mixed, tmp_path: Path) -> None:
    path = tmp_path / "series.csv"
    for time_s in (1.0, 2.0):
        telemetry.append_csv(model, path, {"rank": "0"}, time_s)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["time_s"]) for row in rows] == [1.0] * 3 + [2.0] * 3
    row = rows[0]
    odd = model.keyed.statistics(ODD_NAME)
    assert (row["labels"], row["module"], row["table"]) == ("rank=0", "keyed", ODD_NAME)
    assert int(row["evicted"]) == odd.evicted
    assert odd.eviction_ages is not None
    ages = [int(number) for name, number in row.items() if name.startswith("age_")]
    assert ages == list(odd.eviction_ages.counts)
    assert rows[2]["age_1"] == rows[2]["reinserted"] == ""  # not tracked
    path.write_text("a,b\n")
    with pytest.raises(ValueError, match="name another file"):
        telemetry.append_csv(model, path)


def test_the_example_of_the_page_serves_the_text() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (served,) = (block for block in blocks if "http.server" in block)
    names: dict[str, Any] = {}
    exec(served, names)
    server = names["server"]
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            families = parse(answer.read().decode())
    finally:
        server.shutdown()
        server.server_close()
    assert value(families, "emblib_keys", table="item") > 0
