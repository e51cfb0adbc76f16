"""Malformed state dicts: modules of any kind load an entry rightly, or raise and load nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from emblib import (
    BackingStore,
    CacheConfig,
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    HostRows,
    Placement,
    TTCache,
    optim,
)
from emblib.sharding import RankGroup, shard, table_wise
from emblib.storage import Dense, Hash, Hashed, Quantized, Storage, TensorTrain
from tests.contracts.subjects import DIM, IDS, KINDS, ROWS, Kind, Subject


def _dynamic(optimizer: optim.Optimizer, *, store: Any = None, **options: Any) -> nn.Module:
    module = DynamicEmbeddingBags(
        [DynamicSpec(64, DIM, name="t", **options)], optimizer, seed=1, backing=store
    )
    module(IDS, torch.arange(ROWS + 1))  # the keys are inserted or counted
    return module


def _counted(counter: Any) -> Kind:
    admission = FrequencyAdmission(2, counter)
    return Kind(lambda o: _dynamic(o, admission=admission, eviction=Eviction.LFU))


def _two_tables(optimizer: optim.Optimizer, storage: Storage) -> EmbeddingBagCollection:
    """Return a collection whose second table is checked before the first one is written."""
    configs = [
        EmbeddingBagConfig(ROWS, DIM, "t", ("f",)),
        EmbeddingBagConfig(ROWS, DIM, "u", ("f",), storage=storage),
    ]
    return EmbeddingBagCollection(configs, optimizer=optimizer)


def _storage(storage: Storage, *, is_sharded: bool = False) -> Kind:
    def make(optimizer: optim.Optimizer) -> nn.Module:
        made = _two_tables(optimizer, storage)
        plan = {"": {name: table_wise(0) for name in ("t", "u")}}
        return shard(made, plan, RankGroup.single()) if is_sharded else made

    return Kind(make, is_collection=True)


_CACHE = CacheConfig(sets=1)
KINDS_HERE: dict[str, Kind] = {
    **KINDS,
    "exact admission": _counted(ExactCounter(64)),
    "sketched admission": _counted(CountMinSketch(64)),
    "scores by step": Kind(lambda o: _dynamic(o, eviction=Eviction.STEP)),
    "tiers": Kind(lambda o: _dynamic(o, store=BackingStore(HostRows(64)))),
    "with cached rows": _storage(Dense(Placement.MANAGED_CACHING, _CACHE)),
    "with hashed rows": _storage(Hashed(7)),
    "with a hash table": _storage(Hash()),
    "with a train": _storage(TensorTrain((2,), (6, 8), (2, 2))),
    "with a cached train": _storage(TensorTrain((2,), (6, 8), (2, 2), cache=TTCache(8))),
    "with quantised rows": _storage(Quantized()),
    "sharded, with a hash table": _storage(Hash(), is_sharded=True),
    "sharded, with a train": _storage(TensorTrain((2,), (6, 8), (2, 2)), is_sharded=True),
}
COUNTS = re.compile(r"(counters|changes|since|tick|clock|stamps|scores|counts|batches|hyper)$")
ROW_IDS = re.compile(r"(key_of_row|cache\.keys)$")


def values_like(value: Tensor) -> Iterator[tuple[str, Any]]:
    """Yield what an entry may be replaced by: another shape, type, dtype or device."""
    if value.dim() and value.numel():
        yield "no row", value[:0].clone()
        yield "one row", value[:1].clone() if len(value) > 1 else value[0]
        yield "a row more", torch.cat([value, value[-1:]])
        yield "one number", value.flatten()[0].clone()
        yield "one dimension more", value.unsqueeze(0)
    if value.dim() > 1:
        yield "one column", value[..., :1].clone()
    yield "None", None
    yield "a list", value.tolist()
    yield "on meta", value.to("meta")
    yield "complex", torch.complex(value.float(), torch.ones_like(value, dtype=torch.float32))
    if value.numel() > 1:
        yield "sparse", value.to_sparse()
    if not value.is_floating_point() and value.numel():
        yield "halves", value.double() + 0.5
        yield "NaN", torch.full_like(value, float("nan"), dtype=torch.float64)


def wrong_numbers(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield values of the right shape and dtype that no table has."""

    def with_first(number: float) -> Tensor:
        changed = value.clone()
        changed.view(-1)[0] = number
        return changed

    if not value.numel() or value.dtype not in (torch.int64, torch.float64):
        return
    if COUNTS.search(name) and not name.startswith("index."):
        yield "-7", with_first(-7)
        if value.is_floating_point():
            yield "NaN", with_first(float("nan"))
            yield "infinity", with_first(float("inf"))
    if ROW_IDS.search(name):
        yield "a negative key", with_first(-7)
        yield "a key of no row", with_first(ROWS)
        if value[1] >= 0:
            yield "a key twice", torch.cat([value[1:2], value[1:]])
    if name.endswith("hyper"):
        yield "half a step", torch.cat([value[:1], value[1:2] + 0.5, value[2:]])
        yield "NaN as the seed", torch.cat([value[:4], torch.full_like(value[:1], nan), value[5:]])


def entries(subject: Subject) -> dict[str, Any]:
    """Return copies of the entries of a state dict; those of sharded tables as a whole."""
    return {
        key: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()
        for key, value in subject.module.state_dict().items()
    }


def state_of(subject: Subject) -> dict[str, Any]:
    """Return the entries and what lookups read."""
    subject.module.eval()  # which counts no lookups
    rows = subject.rows()
    subject.module.train()
    return {**entries(subject), "(rows)": rows}


def same(a: Tensor, b: Any) -> bool:
    """Return whether a tensor has the values of another, in its own shape."""
    if not isinstance(b, Tensor) or b.is_meta or b.is_complex() or a.numel() != b.numel():
        return False
    return torch.equal(a.double().flatten(), b.to_dense().double().flatten())


def trained(name: str, steps: int) -> Subject:
    """Return a subject with other values for each number of steps."""
    subject = Subject(name, optim.Adam(0.5), KINDS_HERE[name])
    for _ in range(steps * subject.kind.is_trained):
        subject.step()
    return subject


class Attacked:
    """A subject that loads malformed state dicts, and what it was before."""

    def __init__(self, name: str, *, assign: bool) -> None:
        self.name, self.assign, self.good = name, assign, entries(trained(name, 2))
        self.wrong: list[str] = []
        self._start()

    def _start(self) -> None:
        self.subject = trained(self.name, 1)
        self.before = state_of(self.subject)

    def load(self, key: str, what: str, value: Any, *, must_raise: bool) -> None:
        """Load the good entries with one of them replaced."""
        try:
            self.subject.module.load_state_dict({**self.good, key: value}, assign=self.assign)
        except Exception:
            return
        loaded = state_of(self.subject).get(key)
        if must_raise or loaded is None or not same(loaded, value):
            self.wrong.append(f"{key}: {what} is accepted")
        self._start()

    def check_unchanged(self, key: str) -> None:
        """Compare everything with what it was before the loads that raised."""
        now = state_of(self.subject)
        changed = [k for k, v in self.before.items() if k not in now or not torch.equal(v, now[k])]
        if changed or now.keys() != self.before.keys():
            self.wrong.append(f"{key}: refused, but {changed} changed")
            self._start()


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("name", KINDS_HERE)
def test_an_entry_is_loaded_rightly_or_nothing_is(name: str, assign: bool) -> None:
    attacked = Attacked(name, assign=assign)
    for key, value in attacked.good.items():
        for what, changed in values_like(value):
            attacked.load(key, what, changed, must_raise=False)
        is_free = name == "scores by step" and key == "t.scores"  # any number
        for what, changed in () if is_free else wrong_numbers(key, value):
            attacked.load(key, what, changed, must_raise=True)
        attacked.check_unchanged(key)
    assert not attacked.wrong, "\n".join(attacked.wrong)
    if attacked.subject.kind.is_trained:
        attacked.subject.step()


@pytest.mark.parametrize("name", KINDS_HERE)
def test_names_of_no_entry_are_unexpected(name: str) -> None:
    good = entries(trained(name, 2))
    parents = {"", *(f"{key}." for key in good)}
    parents |= {f"{key.rpartition('.')[0]}." for key in good if "." in key}
    bogus = {f"{parent}bogus": torch.zeros(3) for parent in parents}
    loaded, expected = trained(name, 1), trained(name, 1)
    for key, value in bogus.items():
        with pytest.raises(RuntimeError, match=re.escape(key)):
            loaded.module.load_state_dict({**good, key: value})
    result = loaded.module.load_state_dict({**good, **bogus}, strict=False)
    expected.module.load_state_dict(good)
    assert not result.missing_keys
    assert sorted(result.unexpected_keys) == sorted(bogus)
    states = state_of(loaded), state_of(expected)
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS_HERE)
def test_a_missing_entry_is_an_error(name: str) -> None:
    subject = trained(name, 1)
    good = entries(subject)
    for key in good:
        if not key.endswith(("hash_keys", "layout")):  # earlier versions lack them
            with pytest.raises(RuntimeError):
                subject.module.load_state_dict({k: good[k] for k in good if k != key})


@pytest.mark.parametrize("name", ["index", "scores", "admission", "hyper", "clock"])
def test_a_table_may_be_called_like_another_part_of_its_module(name: str) -> None:
    def make() -> DynamicEmbeddingBags:
        admission = FrequencyAdmission(1, ExactCounter(64))
        spec = DynamicSpec(64, DIM, name=name, eviction=Eviction.STEP, admission=admission)
        return DynamicEmbeddingBags([spec], optim.SGD(0.5), seed=1)

    module, other = make(), make()
    module(IDS, torch.arange(ROWS + 1)).sum().backward()
    other.load_state_dict(module.state_dict())
    assert torch.equal(*(m.eval()(IDS, torch.arange(ROWS + 1)) for m in (module, other)))
