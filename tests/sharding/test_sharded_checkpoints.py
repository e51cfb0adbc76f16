"""Checkpoints of sharded collections: any plan to any, and training goes on as if never saved."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from emblib import EmbeddingBagCollection, EmbeddingBagConfig, optim
from emblib.collections.optimizers import FusedOptimizer
from emblib.jagged import KeyedJaggedTensor
from emblib.sharding import (
    ShardedEmbeddingBagCollection,
    checkpoints,
    column_wise,
    row_wise,
    table_wise,
)
from emblib.sharding.checkpoints import CheckpointError
from emblib.sharding.checkpoints.sharded_table import gather_state
from emblib.sharding.ranks import RankGroup
from emblib.specs import Pooling
from emblib.storage import Hash
from tests import nightly
from tests.sharding import checkpoint_models as models
from tests.sharding import worlds
from tests.sharding.sharded_cases import Case, make_sharded, make_source, tables

ALONE = RankGroup.single()
MIXED = {
    "plain": ("rows", [3, 1, 0]),
    "moments": ("copies", None),
    "partial": ("columns", [2, 0]),
    "cores": ("rows", [1, 2, 3]),
    "keyed": ("rows", None),
    "counted": ("rows", [2, 3]),
    "sketched": ("rows", [0, 1, 2]),
    "hashed": ("columns", [1, 3]),
    "multiplied": ("table", 2),
    "narrow": ("copies", None),
}
DYNAMIC = ("keyed", "counted", "sketched")
COMPOSED = ("hashed", "multiplied", "narrow")  # no rule cuts their rows, nor columns of the last


def of_kinds(
    plain: tuple[str, Any], dynamic: tuple[str, Any], composed: tuple[str, Any] = ("table", 3)
) -> dict[str, tuple[str, Any]]:
    """A plan with one rule for dynamic tables, one for composed ones and one for the others."""
    rules = dict.fromkeys(MIXED, plain)
    return rules | dict.fromkeys(DYNAMIC, dynamic) | dict.fromkeys(COMPOSED, composed)


PLANS: dict[str, dict[str, tuple[str, Any]]] = {
    "tables": {name: ("table", i) for i, name in enumerate(MIXED)},
    "rows": of_kinds(("rows", None), ("rows", None)),
    "columns": of_kinds(("columns", None), ("table", 1), ("columns", None))
    | {"narrow": ("table", 0)},
    "copies": of_kinds(("copies", None), ("rows", [1, 0]), ("copies", None)),
    "grid": of_kinds(("grid", None), ("table", 2)),
}
CUT = {"columns", "grid"}  # by columns: states of one number per row are one number per shard


def assert_same(one: dict[str, Any], other: dict[str, Any], tolerance: float = 0.0) -> None:
    one, other = models.flat(one), models.flat(other)
    assert one.keys() == other.keys()
    for name in one:
        a, b = one[name], other[name]
        if not isinstance(a, torch.Tensor):
            assert a == b, name
            continue
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def without_sketches(tree: dict[str, Any]) -> dict[str, Any]:
    """Without the table whose parts count in one sketch after a load: it may admit keys earlier."""
    return {name: value for name, value in models.flat(tree).items() if "sketched" not in name}


@pytest.mark.parametrize("size", [1, 2, 4])
def test_goes_on_as_if_never_saved(size: int, tmp_path: Path) -> None:
    (saved, after), *_ = worlds.run(size, models.train_and_save, MIXED, tmp_path)
    (loaded, end), *_ = worlds.run(size, models.load_and_train, MIXED, tmp_path)
    assert_same(saved, loaded)
    assert_same(without_sketches(after), without_sketches(end))


def followers(plan: str, count: int) -> list[str]:
    """Return the plans that follow one in `PLANS`, itself last."""
    plans = list(PLANS)
    first = plans.index(plan) + 1
    return [plans[(first + n) % len(plans)] for n in range(count)]


@pytest.mark.parametrize("start", PLANS)
def test_any_plan_to_any(start: str, tmp_path: Path) -> None:
    """At 4 ranks, loaded at 1, 2 and 3, and from one of these back.

    Each plan is loaded from two others, at night from all.
    """
    ends = followers(start, nightly.number(2, len(PLANS)))
    (saved, after), *_ = worlds.run(4, models.train_and_save, PLANS[start], tmp_path / "start")
    for end in ends:
        world = 1 + list(PLANS).index(end) % 3
        path = tmp_path / "back" if end == ends[1] else None
        # States by column shard become means, which are rounded: training goes on otherwise.
        is_rounded = bool(CUT & {start, end})
        rounding = 1e-6 if is_rounded else 0.0
        load = models.load_again if is_rounded else models.load_and_train
        found, *_ = worlds.run(world, load, PLANS[end], tmp_path / "start", path)
        assert_same(saved, found if is_rounded else found[0], rounding)
        if path is not None:
            back, *_ = worlds.run(4, models.load_again, PLANS[start], path)
            assert_same(saved, back, rounding)
        if not is_rounded:
            assert_same(without_sketches(after), without_sketches(found[1]), 1e-5)


@pytest.mark.parametrize("plan", PLANS)
def test_with_collections_that_are_not_sharded(plan: str, tmp_path: Path) -> None:
    """What one process saved is loaded by ranks, and the other way round."""
    start = models.source(PLANS[plan])
    models.train(start, PLANS[plan], range(3), ALONE)
    checkpoints.save(models.state_of(start), tmp_path / "one", ALONE)
    saved = copy.deepcopy(models.state_of(start)["model"].state_dict())
    states = copy.deepcopy(FusedOptimizer.of(start).state_dict())
    loaded, *_ = worlds.run(3, models.load_again, PLANS[plan], tmp_path / "one", tmp_path / "three")
    rounding = 1e-6 if plan in CUT else 0.0
    assert_same({"model": saved, "optimizer": states}, loaded, rounding)
    end = models.source(PLANS[plan], seed=1)
    checkpoints.load(models.state_of(end), tmp_path / "three", ALONE)
    assert_same(saved, end.state_dict())
    assert_same(states, FusedOptimizer.of(end).state_dict(), rounding)


def test_sketches_of_older_checkpoints_go_on_with_hash_key_0(tmp_path: Path) -> None:
    """Their counters were hashed without a hash key, and no hash key is saved with them."""
    name = "admission.sketches.hash_keys"
    saved, other = (models.source({"sketched": ("table", 0)}, seed) for seed in (0, 1))
    tree = {k: v for k, v in saved.state_dict().items() if not k.endswith(name)}
    checkpoints.save({"model": tree}, tmp_path, ALONE)
    (own,) = (v for k, v in other.state_dict().items() if k.endswith(name))
    checkpoints.load({"model": other}, tmp_path, ALONE)
    (loaded,) = (v for k, v in other.state_dict().items() if k.endswith(name))
    assert own.tolist() != [0]
    assert loaded.tolist() == [0]


@pytest.mark.parametrize("plan", PLANS)
def test_one_file(plan: str, tmp_path: Path) -> None:
    """Whole tables for `torch.load`, and from there into one process and into other ranks."""
    path = tmp_path / "model.pt"
    saved, *_ = worlds.run(4, models.save_export, PLANS[plan], path)
    found = torch.load(path)
    assert_same(found, saved)
    other = models.source(PLANS[plan], seed=1)
    other.load_state_dict(found["model"])
    assert_same(other.state_dict(), found["model"])
    FusedOptimizer.of(other).load_state_dict(found["optimizer"])
    # The file has whole tables, whatever the plan: each plan is loaded once, from another.
    (end,) = followers(plan, 1)
    loaded, *_ = worlds.run(3, models.load_export, PLANS[end], path)
    assert_same(loaded, saved)


@pytest.mark.parametrize("rule", ["rows", "columns", "grid"])
def test_cores_for_more_rows_than_there_are(rule: str, tmp_path: Path) -> None:
    """The last slice of the first core has what no row of the table needs."""
    plans = {"spare": ("table", 0)}, {"spare": (rule, None)}
    saved: dict[str, Any] = {}
    for number, (world, plan) in enumerate(((1, plans[0]), (4, plans[1]), (3, plans[0]))):
        path, before = tmp_path / str(number), tmp_path / str(number - 1)
        if number:
            found, *_ = worlds.run(world, models.load_again, plan, before, path)
        else:
            (found, _), *_ = worlds.run(world, models.train_and_save, plan, path)
        saved = saved or found
        assert_same(saved, found)


@pytest.mark.parametrize("rule", ["rows", "columns", "copies"])
def test_sequences(rule: str, tmp_path: Path) -> None:
    start = models.sequences(None, rule)
    batch = KeyedJaggedTensor(
        ["f0", "f1"], torch.arange(12), lengths=torch.tensor([3, 0, 2, 3, 4, 0])
    )
    sum(out.values().pow(2).sum() for out in start(batch).values()).backward()
    checkpoints.save(models.state_of(start), tmp_path / "one", ALONE)
    names = (rule, tmp_path / "one", tmp_path / "three")
    loaded, *_ = worlds.run(3, models.load_sequences, *names)
    saved = {"model": start.state_dict(), "optimizer": FusedOptimizer.of(start).state_dict()}
    assert_same(saved, loaded)
    end = models.sequences(None, rule)
    checkpoints.load(models.state_of(end), tmp_path / "three", ALONE)
    assert_same(start.state_dict(), end.state_dict())


EMPTY = {"keyed": ("rows", None), "counted": ("table", 1), "plain": ("rows", None)}


def load_empty(ranks: RankGroup, path: Path) -> dict[str, Any]:
    """Load a checkpoint into tables that have keys."""
    model = models.make(ranks, EMPTY, seed=1)
    models.train(model, EMPTY, range(3), ranks)
    checkpoints.load(models.state_of(model), path, ranks)
    return models.whole(model)


def save_empty(ranks: RankGroup, path: Path) -> dict[str, Any]:
    """Save tables before their first step, and load them as they are."""
    model = models.make(ranks, EMPTY)
    checkpoints.save(models.state_of(model), path, ranks)
    checkpoints.load(models.state_of(model), path, ranks)
    return models.whole(model)


def test_dynamic_tables_without_keys(tmp_path: Path) -> None:
    """From ranks to ranks and to one process, and from there."""
    saved, *_ = worlds.run(2, save_empty, tmp_path / "ranks")
    alone = models.source(EMPTY)
    state = {"model": alone, "optimizer": FusedOptimizer.of(alone)}
    checkpoints.save(state, tmp_path / "one", ALONE)
    for path in (tmp_path / "ranks", tmp_path / "one"):
        checkpoints.load(state, path, ALONE)
        for world in (1, 2, 3):
            loaded, *_ = worlds.run(world, load_empty, path)
            assert_same(saved, loaded)
    names = [name for name in models.flat(saved) if name.endswith("keyed.keys")]
    assert [models.flat(saved)[name].shape for name in names] == [(0,)]


def states_after_refusals(ranks: RankGroup) -> None:
    """Load states of which one table's are incomplete, of another size, or impossible.

    One rank has no shard of the third table, and must refuse its states too.
    """
    case = Case(tables(Pooling.SUM), ("dp", "rw", "tw", "dp"), optimizer=optim.Adagrad(0.1))
    source = make_source(case)
    saved = source.optimizer_state()
    model = make_sharded(case, ranks, source)
    for states in saved.values():
        for value in states.values():
            value.fill_(2.0)
    for table in list(saved)[2:]:
        states = saved[table]
        for damaged, error in (
            ({}, KeyError),
            ({"sum": states["sum"]}, KeyError),
            ({**states, "sum": torch.zeros(1)}, ValueError),
            ({**states, "sum": 1.0}, ValueError),
            ({**states, "sum": states["sum"].to("meta")}, ValueError),
            ({**states, "hyper": torch.zeros(1, dtype=torch.float64)}, ValueError),
            ({**states, "hyper": torch.full_like(states["hyper"], -1.0)}, ValueError),
        ):
            before = copy.deepcopy(model.optimizer_state())
            with pytest.raises(error):
                model.load_optimizer_state({**saved, table: damaged})
            for name, states_after in model.optimizer_state().items():
                assert_parts_same(states_after, before[name])
    before = copy.deepcopy(model.state_dict())
    weights = {name: torch.ones_like(value) for name, value in source.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"embedding_bags\.t2\.weight must be of shape"):
        model.load_state_dict({**weights, "embedding_bags.t2.weight": torch.zeros(1, 1)})
    with pytest.raises(RuntimeError, match=r"embedding_bags\.t2\.weight: must be a tensor"):
        model.load_state_dict({**weights, "embedding_bags.t2.weight": None})
    assert_parts_same(model.state_dict(), before)


def assert_parts_same(state: dict[str, Any], before: dict[str, Any]) -> None:
    """Compare the shards of this rank bit by bit."""
    for key, value in state.items():
        parts, parts_before = (
            getattr(tensor, "parts", {0: tensor}) for tensor in (value, before[key])
        )
        for number, part in parts.items():
            torch.testing.assert_close(part, parts_before[number], rtol=0, atol=0)


def test_refused_optimizer_states_change_no_table() -> None:
    worlds.run(2, states_after_refusals)


def test_row_states_of_other_columns_are_refused() -> None:
    """Their shards count the intervals between cuts, so they look alike."""
    config = EmbeddingBagConfig(8, 8, "t")
    optimizer = optim.RowwiseAdagrad(0.1)
    first, same, other = (
        ShardedEmbeddingBagCollection(
            EmbeddingBagCollection([config], optimizer=optimizer),
            {"t": column_wise(ranks=[0, 0], sizes=[column, 8 - column])},
            ALONE,
        )
        for column in (4, 4, 2)
    )
    first.load_optimizer_state(same.optimizer_state())
    with pytest.raises(ValueError, match=r"t\.sum is RowStates.* columns cut at \[0, 4, 8\]"):
        first.load_optimizer_state(other.optimizer_state())


def test_refused_rows_of_a_dynamic_table_change_no_table() -> None:
    case = Case(tables(Pooling.SUM, storage=Hash()), ("tw",) * 4)
    source = make_source(case)
    lengths = torch.ones(8, dtype=torch.int64)
    source(KeyedJaggedTensor(["f0", "f1", "f2", "f3"], lengths, lengths=lengths))
    model = make_sharded(case, ALONE, source)
    before, saved = copy.deepcopy(model.state_dict()), source.state_dict()
    saved["embedding_bags.t0.weight"].fill_(7.0)
    narrow = saved["embedding_bags.t2.weight"][:, :3]
    with pytest.raises(RuntimeError, match=r"embedding_bags\.t2\.weight: size mismatch"):
        model.load_state_dict({**saved, "embedding_bags.t2.weight": narrow})
    assert_parts_same(model.state_dict(), before)


def trained_tables(names: str, ranks: RankGroup, steps: int) -> dict[str, Any]:
    """The `state` of tables that made some steps; the first one is on the last rank."""
    configs = [EmbeddingBagConfig(8, 4, name, [name]) for name in names]
    plan = {name: table_wise(ranks.size - 1 if name == names[0] else 0) for name in names}
    torch.manual_seed(steps)
    source = EmbeddingBagCollection(configs, optimizer=optim.Adam(0.1 * steps))
    model = ShardedEmbeddingBagCollection(source, plan, ranks)
    for _ in range(steps):
        ids = torch.arange(3).repeat(len(names))
        batch = KeyedJaggedTensor(list(names), ids, lengths=torch.ones_like(ids))
        model(batch).values().sum().backward()
    return {"model": model, "tables": model.fused_optimizer}


def whole_tensors(state: dict[str, Any], ranks: RankGroup) -> dict[str, Any]:
    """Copies of the rows and moments of all tables, by name."""
    trees = {key: state[key].state_dict() for key in ("model", "tables")}
    flat = models.flat(copy.deepcopy(gather_state(trees)))
    names = (name for name in flat if name.endswith(("weight", "exp_avg", "exp_avg_sq")))
    return {name.removeprefix("."): flat[name] for name in names}


def load_into_other_tables(ranks: RankGroup, path: Path, names: str) -> None:
    """Load tables a, b and c, saved after three steps, into other ones that have made two.

    Strictly if all of them are known.
    """
    saved_state = trained_tables("abc", ranks, 3)
    checkpoints.save(saved_state, path, ranks)
    saved = whole_tensors(saved_state, ranks)
    state = trained_tables(names, ranks, 2)
    before = whole_tensors(state, ranks)
    missing_names = checkpoints.load(state, path, ranks, strict=set(names) <= set("abc"))
    for name, value in whole_tensors(state, ranks).items():
        assert torch.equal(value, saved.get(name, before[name])), name
        assert (name in missing_names) is (name not in saved)
    has_known = bool(set("abc").intersection(names))
    steps = {m.step for table in state["model"].fused_tables() for m in table.modules}
    assert steps <= {3 if has_known else 2}
    rate = state["tables"].param_groups[0]["lr"]
    assert rate == pytest.approx(0.3 if has_known else 0.2)


@pytest.mark.parametrize("names", ["abcd", "dabc", "cb", "db", "xy"])
@pytest.mark.parametrize("size", [1, 2])
def test_more_or_fewer_tables(size: int, names: str, tmp_path: Path) -> None:
    """Known tables are loaded, new ones keep rows and states, and all count the same steps."""
    worlds.run(size, load_into_other_tables, tmp_path, names)


@pytest.mark.parametrize("strict", [True, False])
def test_an_optimizer_that_refuses_its_groups_changes_nothing(strict: bool, tmp_path: Path) -> None:
    """Numbered parameters are counted, and numbers are checked, before rows are read."""
    weights = [torch.nn.Parameter(torch.ones(1)) for _ in range(3)]
    saved = {**trained_tables("ab", ALONE, 3), "dense": torch.optim.SGD(weights[:2], 0.1)}
    checkpoints.save(saved, tmp_path, ALONE)
    state = {**trained_tables("ab", ALONE, 2), "dense": torch.optim.SGD(weights, 0.1)}
    before = whole_tensors(state, ALONE)
    with pytest.raises(CheckpointError, match=r"dense has groups of \[3\] parameters"):
        checkpoints.load(state, tmp_path, ALONE, strict=strict)
    assert_same(before, whole_tensors(state, ALONE))


def test_numbers_that_an_optimizer_refuses_change_nothing(tmp_path: Path) -> None:
    saved = {key: value.state_dict() for key, value in trained_tables("ab", ALONE, 3).items()}
    saved["tables"]["state"]["embedding_bags.b.weight"]["hyper"].parts[0][0] = -1.0
    checkpoints.save(saved, tmp_path, ALONE)
    state = trained_tables("ab", ALONE, 2)
    before = whole_tensors(state, ALONE)
    with pytest.raises(ValueError, match="learning rate"):
        checkpoints.load(state, tmp_path, ALONE)
    assert_same(before, whole_tensors(state, ALONE))


SERVED = Case(tables(Pooling.SUM), ("dp", "rw", "tw", "rw"), optimizer=None)


def keys_and_states_of_partial_load(ranks: RankGroup, path: Path) -> dict[str, Any]:
    """Load a hash table saved without states into one that has as many other keys, with states."""
    plan = {"keyed": row_wise()}
    models_by_optimizer = []
    for number, optimizer in enumerate((optim.SGD(0.1), optim.Adam(0.1))):
        config = EmbeddingBagConfig(64, 4, "keyed", ["f"], storage=Hash(), optimizer=optimizer)
        model = ShardedEmbeddingBagCollection(EmbeddingBagCollection([config]), plan, ranks)
        ids = torch.arange(8) + 100 * number
        model(KeyedJaggedTensor(["f"], ids, lengths=ids.new_ones(8))).values().sum().backward()
        models_by_optimizer.append(model)
    saved, model = models_by_optimizer
    checkpoints.save({"model": saved}, path, ranks)
    with pytest.raises(CheckpointError, match=r"does not have .*\.exp_avg"):
        checkpoints.load({"model": model}, path, ranks)
    state = {"model": model.state_dict()}
    checkpoints.load(state, path, ranks, strict=False)
    assert "embedding_bags.keyed.exp_avg" not in state["model"]
    checkpoints.load({"model": model}, path, ranks, strict=False)
    return {
        name.rpartition(".")[2]: value for name, value in gather_state(model.state_dict()).items()
    }


@pytest.mark.parametrize("size", [1, 2])
def test_dynamic_tables_with_saved_keys_and_without_states(size: int, tmp_path: Path) -> None:
    found = worlds.run(size, keys_and_states_of_partial_load, tmp_path)[0]
    assert sorted(found["keys"].tolist()) == list(range(8))
    assert not found["exp_avg"].any()
    assert not found["exp_avg_sq"].any()


def served(bits: int, seed: int) -> Any:
    """A quantised collection in one process."""
    torch.manual_seed(seed)
    return make_source(SERVED).quantized(bits)


def save_served(ranks: RankGroup, bits: int, path: Path) -> None:
    """Save a quantised collection of seed 0."""
    checkpoints.save({"model": make_sharded(SERVED, ranks, served(bits, 0))}, path, ranks)


def load_served(ranks: RankGroup, bits: int, path: Path) -> dict[str, Any]:
    """Load it into one of another seed."""
    model = make_sharded(SERVED, ranks, served(bits, 1))
    checkpoints.load({"model": model}, path, ranks)
    return models.whole(model)


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_tables(bits: int, tmp_path: Path) -> None:
    """From two ranks to one process and to three ranks."""
    worlds.run(2, save_served, bits, tmp_path)
    want = served(bits, 0).state_dict()
    one = served(bits, 1)
    checkpoints.load({"model": one}, tmp_path, ALONE)
    assert_same(want, one.state_dict())
    loaded, *_ = worlds.run(3, load_served, bits, tmp_path)
    assert_same(want, loaded["model"])


def test_quantised_tables_from_before_0_1_0_are_refused(tmp_path: Path) -> None:
    model = served(8, 0)
    former = {
        key.replace("packed", entry): torch.zeros(len(value), 2)
        for key, value in model.state_dict().items()
        for entry in ("values", "scales")
    }
    checkpoints.save({"model": former}, tmp_path, ALONE)
    before = copy.deepcopy(model.state_dict())
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"bags\.t0, .* before 0\.1\.0.* quantise"):
            checkpoints.load({"model": model}, tmp_path, ALONE, strict=strict)
    assert_same(before, model.state_dict())


def error_of_load(ranks: RankGroup, path: Path) -> str:
    """Return the error of loading dynamic tables where only rank 0 sees the directory."""
    model = models.make(ranks, {"keyed": ("rows", None)})
    checkpoints.save({"model": model}, path, ranks)
    with pytest.raises(CheckpointError) as error:
        checkpoints.load({"model": model}, path if ranks.rank == 0 else path / "absent", ranks)
    return str(error.value)


def test_all_ranks_raise_if_one_does_not_see_the_directory(tmp_path: Path) -> None:
    errors = worlds.run(2, error_of_load, tmp_path / "saved")
    assert errors[0].startswith("rank 1: ")
    assert all(error.endswith("there is no such directory") for error in errors)


def latest_of_rank_0(ranks: RankGroup, path: Path) -> Path | None:
    return checkpoints.latest(path if ranks.rank == 0 else "\0", ranks)


def test_rank_0_alone_looks_for_the_latest(tmp_path: Path) -> None:
    checkpoints.save({"step": 1}, tmp_path / "step_1")
    assert worlds.run(2, latest_of_rank_0, tmp_path) == [tmp_path / "step_1"] * 2
