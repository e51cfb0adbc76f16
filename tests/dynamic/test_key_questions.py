"""Admission, expiry, scores and the status of keys, in modules that are trained."""

import copy
import datetime
import pickle
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib import (
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    Eviction,
    ExactCounter,
    FrequencyAdmission,
    KeyedJaggedTensor,
    KeyStatus,
    Pooling,
    optim,
)
from emblib.dynamic.saving import snapshots
from emblib.init import Constant, KeyModulo
from emblib.sharding import DistributedModelParallel
from emblib.storage import Hash

PAGE = Path(__file__).resolve().parents[2] / "docs" / "dynamic_keys.md"


def module_of(
    *specs: DynamicSpec, device: torch.device | None = None, **arguments: Any
) -> DynamicEmbeddingBags:
    return DynamicEmbeddingBags(
        specs, optim.SGD(1.0), pooling=Pooling.NONE, device=device, **arguments
    )


def look_up(module: DynamicEmbeddingBags, ids: Sequence[int], **more: Any) -> Tensor:
    """Bags of one id, as many for each feature."""
    device = module.weights.device
    keys = torch.tensor(list(ids), dtype=torch.int64, device=device)
    return module(keys, torch.arange(keys.numel() + 1, device=device), **more)


def statuses(module: DynamicEmbeddingBags) -> list[str]:
    return [KeyStatus(value).name for value in module.key_status().tolist()]


def keys_of(module: DynamicEmbeddingBags, table: int = 0) -> set[int]:
    return set(module.index.export(table).keys.tolist())


COUNTERS = [ExactCounter(256), CountMinSketch(4096)]


@pytest.mark.parametrize("counter", COUNTERS, ids=type)
def test_keys_learn_once_they_are_admitted(
    counter: ExactCounter | CountMinSketch, device: torch.device
) -> None:
    """Against counting in Python; features 0 and 2 share a table, table 1 admits every key."""
    spec = DynamicSpec(
        640,
        2,
        initializer=KeyModulo(),
        admission=FrequencyAdmission(4, counter, reads=Constant(-9.0)),
    )
    module = module_of(
        spec,
        DynamicSpec(640, 2, initializer=KeyModulo()),
        feature_tables=[0, 1, 0],
        device=device,
    )
    seen: Counter[int] = Counter()
    there: set[int] = set()
    want: dict[int, float] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(12):
        ids = torch.randint(1, 40, (30,), generator=generator).tolist()
        shared = [*ids[:10], *ids[20:]]
        missing = Counter(key for key in shared if key not in there)
        seen.update(missing)
        there |= {key for key in missing if seen[key] >= 4}
        out = look_up(module, ids)
        read = [*out[:10, 0].tolist(), *out[20:, 0].tolist()]
        assert read == [want.get(k, float(k)) if k in there else -9.0 for k in shared]
        out.backward(torch.full_like(out, 0.5))
        for key in there & set(shared):
            want[key] = want.get(key, float(key)) - 0.5 * shared.count(key)
    assert keys_of(module) == there
    assert keys_of(module, 1) >= {1, 2, 3}
    assert 0 < len(there) < len(seen)


def test_counts_stand_for_uses(device: torch.device) -> None:
    module = module_of(
        DynamicSpec(32, 2, admission=FrequencyAdmission(5, COUNTERS[0])), device=device
    )
    look_up(module, [1, 2], counts=torch.tensor([5, 4], device=device))
    assert statuses(module) == ["NEW", "NOT_ADMITTED"]


def test_nothing_is_counted_in_evaluation(device: torch.device) -> None:
    module = module_of(
        DynamicSpec(32, 2, admission=FrequencyAdmission(2, COUNTERS[0])), device=device
    )
    look_up(module, [1])
    module.eval()
    look_up(module, [1])
    module.train()
    with torch.no_grad():
        look_up(module, [1])
    assert keys_of(module) == set()
    look_up(module, [1])
    assert keys_of(module) == {1}


def test_status_of_the_last_training_forward(device: torch.device) -> None:
    module = module_of(DynamicSpec(32, 2), DynamicSpec(32, 2), device=device)
    with pytest.raises(RuntimeError, match="there was none"):
        module.key_status()
    look_up(module, [5, 6, 6, 5])
    assert statuses(module) == ["NEW"] * 4
    look_up(module, [5, 7, 6, 6])
    assert statuses(module) == ["HIT", "NEW", "HIT", "HIT"]
    module.eval()
    look_up(module, [9, 9, 9, 9])
    assert statuses(module) == ["HIT", "NEW", "HIT", "HIT"]


def test_unused_keys_expire_and_begin_anew(device: torch.device) -> None:
    """A ttl of 3 steps, in one of two tables; what was learned is gone with the key."""
    module = module_of(
        DynamicSpec(64, 2, initializer=Constant(1.0), ttl=3), DynamicSpec(64, 2), device=device
    )
    look_up(module, [8, 8]).sum().backward()
    for _ in range(3):
        look_up(module, [9, 9])
        assert keys_of(module) == {8, 9}
    look_up(module, [9, 9])
    assert keys_of(module) == {9}
    assert keys_of(module, 1) == {8, 9}
    assert [table["expired"] for table in module.stats().values()] == [1, 0]
    assert look_up(module, [8, 8])[0].tolist() == [1.0, 1.0]


def test_rows_that_expire_are_not_trained(device: torch.device) -> None:
    """A backward that comes after its key has gone finds nothing to update."""
    module = module_of(DynamicSpec(32, 2, initializer=Constant(1.0), ttl=1), device=device)
    late = look_up(module, [8])
    for key in (20, 21, 22):
        look_up(module, [key])
    assert 8 not in keys_of(module)
    late.sum().backward()
    rows = module.table_rows(0)["weight"][module.find(0, torch.tensor([21, 22]))]
    assert_close(rows, torch.ones_like(rows))
    assert int(module.dropped_updates) == 1


def test_steps_are_scores(device: torch.device) -> None:
    module = module_of(DynamicSpec(32, 2, name="a", eviction=Eviction.STEP), device=device)
    assert module.eviction_score("a") == 1
    look_up(module, range(16))
    module.set_eviction_step(0, 100)
    look_up(module, range(16, 32))
    assert (module.eviction_score(0), module.num_training_steps) == (101, 2)
    module.set_eviction_step(0, -5)  # the smaller number is evicted, whatever came last
    look_up(module, [40, 41])
    look_up(module, [50, 51])
    assert keys_of(module) >= {*range(2, 32), 50, 51}
    scores = module.index.export(0).scores
    assert scores is not None
    assert set(scores.tolist()) == {1, 100, -4}


def test_steps_do_not_overflow(device: torch.device) -> None:
    module = module_of(DynamicSpec(32, 2, name="a", eviction=Eviction.STEP), device=device)
    for step in (2**62, 2**63 - 1):
        with pytest.raises(ValueError, match=r"steps must be below 2\^62"):
            module.set_eviction_step("a", step)
    module.set_eviction_step("a", 2**62 - 1)
    look_up(module, [1])
    look_up(module, [2])
    assert module.eviction_score("a") == 2**62 + 1
    module.load_state_dict(module.state_dict())
    saved = module.state_dict()
    saved["scores.values"] = torch.tensor([2**63 - 1])
    with pytest.raises(RuntimeError, match=r"scores.values: steps must be below"):
        module.load_state_dict(saved)
    assert module.eviction_score("a") == 2**62 + 1


def test_steps_go_on_from_entries_of_other_tables(tmp_path: Path) -> None:
    """Else keys of the next batches would rank below all others, and be evicted first."""
    spec = DynamicSpec(64, 2, name="a", eviction=Eviction.STEP)
    trained, copied, filled = (module_of(spec) for _ in range(3))
    trained.track_evictions()
    for key in range(4):
        look_up(trained, [key])
    trained.save(tmp_path / "whole")
    copied.load(tmp_path / "whole")
    since = trained.num_training_steps
    trained.set_eviction_step("a", 40)
    for key in range(4, 8):
        look_up(trained, [key])
    handle = trained.table_handles()["a"]
    assert handle.score() == 44
    copied.table_handles()["a"].apply_changes(handle.changes_since(since))
    assert copied.eviction_score("a") == 44
    handle.set_key_scores(torch.tensor([0]), 2**62)  # a key that is to stay
    filled.table_handles()["a"].set_entries(handle.entries())
    assert filled.eviction_score("a") == 44


def test_steps_and_scores_go_on_in_shards() -> None:
    for eviction, score in ((Eviction.STEP, 4), (Eviction.CUSTOM, 7)):
        config = EmbeddingBagConfig(64, 2, "a", ["f"], storage=Hash(eviction=eviction))
        bags = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))
        if eviction is Eviction.CUSTOM:
            bags.tables["a"].set_score(7)
        for key in range(3):
            bags(KeyedJaggedTensor(["f"], torch.tensor([key]), lengths=torch.tensor([1])))
        assert DistributedModelParallel(bags).tables["a"].score() == score


@pytest.mark.parametrize("counter", COUNTERS, ids=type)
def test_counts_of_admission_go_on_in_new_tables(counter: Any) -> None:
    for is_sharded in (False, True):
        storage = Hash(admission=FrequencyAdmission(3, counter))
        config = EmbeddingBagConfig(64, 2, "a", ["f"], storage=storage)
        bags = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))
        batches = [
            KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.tensor([len(ids)]))
            for ids in ([1, 2, 3], [1, 2], [1, 2, 3])
        ]
        for batch in batches[:2]:
            bags(batch)
        if is_sharded:
            model: Any = DistributedModelParallel(bags)
        else:
            bags.set_optimizers({"a": optim.Adam(0.1)})
            model = bags
        model(batches[2])
        present = model.tables["a"].contains(torch.tensor([1, 2, 3]))
        assert present.tolist() == [True, True, False]


def test_shards_have_the_clock_of_their_table() -> None:
    storage = Hash(ttl=datetime.timedelta(seconds=100))
    config = EmbeddingBagConfig(64, 2, "a", ["f"], storage=storage)
    bags = EmbeddingBagCollection([config], optimizer=optim.SGD(0.1))
    bags.tables["a"].set_clock(lambda: 10.0)
    for key in range(3):
        bags(KeyedJaggedTensor(["f"], torch.tensor([key]), lengths=torch.tensor([1])))
    table = DistributedModelParallel(bags).tables["a"]
    assert (table.expire_keys(), table.size()) == (0, 3)


def test_scores_are_set_by_table(device: torch.device) -> None:
    specs = [DynamicSpec(32, 2, name=name, eviction=Eviction.CUSTOM) for name in "ab"]
    module = module_of(*specs, device=device)
    with pytest.raises(RuntimeError, match=r"call set_eviction_score"):
        look_up(module, [1, 1])
    assert module.eviction_score("b") is None
    module.set_eviction_score(3)
    module.set_eviction_score({"b": 7})
    look_up(module, [1, 1])
    module.set_eviction_score({0: 4})
    look_up(module, [2, 2])
    for table, want in ((0, [3, 4]), (1, [7, 7])):
        found = module.index.export(table)
        assert found.scores is not None
        order = found.keys.argsort()
        assert found.scores[order].tolist() == want
    with pytest.raises(KeyError, match="no table 'c'"):
        module.set_eviction_score({"c": 1})
    with pytest.raises(IndexError, match=r"must be in \[0, 2\)"):
        module.eviction_score(2)
    plain = module_of(DynamicSpec(32, 2), device=device)
    assert plain.eviction_score(0) is None
    with pytest.raises(ValueError, match="no table has it"):
        plain.set_eviction_score(1)
    with pytest.raises(ValueError, match="no table has it"):
        plain.set_eviction_step(0, 1)


def _rich(device: torch.device) -> DynamicEmbeddingBags:
    """Counts of both kinds and scores, half-way."""
    module = module_of(
        *(
            DynamicSpec(32, 2, eviction=Eviction.STEP, admission=FrequencyAdmission(3, counter))
            for counter in COUNTERS
        ),
        device=device,
    )
    for ids in ([1, 2, 1, 2], [1, 3, 1, 3]):
        look_up(module, ids)
    return module


def _goes_on(module: DynamicEmbeddingBags) -> Any:
    seen = []
    for ids in ([1, 2, 1, 2], [2, 3, 2, 3], [3, 4, 3, 4]):
        look_up(module, ids)
        seen.append(statuses(module))
    return seen, module.eviction_score(0), [keys_of(module, t) for t in (0, 1)]


def test_copies_go_on_alike(device: torch.device) -> None:
    module = _rich(device)
    saved = copy.deepcopy(module.state_dict())
    snapshot = snapshots.take(module)
    others = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
    want = _goes_on(module)
    loaded, restored = _rich(device), _rich(device)
    for other in (loaded, restored):
        look_up(other, [2, 2, 2, 2])
    loaded.load_state_dict(saved)
    snapshots.restore(restored, snapshot)
    for other in (*others, loaded, restored):
        assert _goes_on(other) == want
    module.clear()
    assert (module.eviction_score(0), keys_of(module)) == (1, set())
    look_up(module, [3, 3, 3, 3])
    assert statuses(module) == ["NOT_ADMITTED"] * 4


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    printed = capsys.readouterr().out
    assert "[2, 5, 2, 2]" in printed
    assert "{'items': 1}" in printed
