"""Checkpoints of tensor trains go into the same ranks and factors only, also of equal shapes."""

import copy
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from emblib import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    TTEmbeddingBag,
    TTSpec,
    optim,
)
from emblib.sharding import checkpoints
from emblib.sharding.checkpoints import CheckpointError
from emblib.sharding.ranks import RankGroup
from emblib.sharding.shard import construct_module_plan
from emblib.sharding.sharded_bags import ShardedEmbeddingBagCollection
from emblib.sharding.sharding_types import World, row_wise
from emblib.storage import TensorTrain
from emblib.tt import layout_entry
from emblib.tt.shapes import check_ranks
from tests.sharding import worlds

ONE = TTSpec(1000, 64, (2, 8), (10, 10, 10), (8, 4, 2))
OTHER = TTSpec(1000, 64, (4, 4), (10, 10, 10), (4, 4, 4))  # its cores have the same shapes
FEWER_ROWS = TTSpec(999, 64, (2, 8), (10, 10, 10), (8, 4, 2))
TWO_CORES = TTSpec(60, 8, (3,), (10, 6), (4, 2))  # the shapes of two cores leave no choice
ALONE = RankGroup.single()
DIFFERENCES = [
    (ONE, OTHER, r"differs in dim_factors, ranks: saved are .*ranks=\(2, 8\), here are .*\(4, 4\)"),
    (ONE, FEWER_ROWS, r"differs in rows: saved are rows=1000.*here are rows=999"),
    (TWO_CORES, ONE, r"differs in rows, dim, row_factors, dim_factors, ranks"),
]
Model = TTEmbeddingBag | EmbeddingBagCollection


def module(spec: TTSpec) -> TTEmbeddingBag:
    return TTEmbeddingBag(spec, optim.Adagrad(0.1))


def collection(spec: TTSpec) -> EmbeddingBagCollection:
    kind = TensorTrain(spec.ranks, spec.row_factors, spec.dim_factors)
    configs = [
        EmbeddingBagConfig(20, 4, "plain", ["p"]),
        EmbeddingBagConfig(spec.rows, spec.dim, "t", ["f"], storage=kind),
    ]
    return EmbeddingBagCollection(configs, optimizer=optim.Adagrad(0.1))


def load_by_file(model: Any, state: dict[str, Any], path: Path) -> None:
    checkpoints.save({"model": state}, path, ALONE)
    checkpoints.load({"model": model}, path, ALONE)


def load_at_once(model: Any, state: dict[str, Any], path: Path) -> None:
    model.load_state_dict(state)


WAYS = [(module, load_at_once), (collection, load_at_once), (collection, load_by_file)]
Make = Callable[[TTSpec], Any]
Load = Callable[[Any, dict[str, Any], Path], None]


def old(model: Any) -> dict[str, Any]:
    """A state dict as it was before it had layouts."""
    return {k: v for k, v in model.state_dict().items() if not k.endswith(layout_entry.NAME)}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(("make", "load"), WAYS)
@pytest.mark.parametrize(("saved", "here", "message"), DIFFERENCES)
def test_other_tensor_trains_are_refused(
    make: Make, load: Load, saved: TTSpec, here: TTSpec, message: str, tmp_path: Path
) -> None:
    model = make(here)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=f"cores: the cores are of another.*{message}"):
        load(model, make(saved).state_dict(), tmp_path)
    now = model.state_dict()
    for key in before:
        # Other tables of the same state dict may have been loaded, but nothing of this one.
        assert torch.equal(now[key], before[key]) or (load is load_at_once and "plain" in key), key


@pytest.mark.parametrize(("make", "load"), WAYS)
@pytest.mark.parametrize("spec", [ONE, TWO_CORES])
def test_the_same_are_loaded(make: Make, load: Load, spec: TTSpec, tmp_path: Path) -> None:
    saved, model = make(spec).state_dict(), make(spec)
    load(model, saved, tmp_path)
    assert_same(model.state_dict(), saved)


@pytest.mark.parametrize(("make", "load"), WAYS)
def test_older_state_dicts(make: Make, load: Load, tmp_path: Path) -> None:
    """Without a layout they are loaded where the shapes leave no choice, or refused."""
    first, model = make(TWO_CORES), make(TWO_CORES)
    load(model, old(first), tmp_path / "two")
    assert_same(model.state_dict(), first.state_dict())
    first, model = make(ONE), make(ONE)
    before = copy.deepcopy(model.state_dict())
    message = r"there is no tt_layout, .* fit other tensor trains than .*ranks=\(2, 8\), e\.g\. .*"
    with pytest.raises(RuntimeError, match=message):
        load(model, old(first), tmp_path / "three")
    cores = [key for key in before if "cores" in key]
    assert all(torch.equal(before[key], model.state_dict()[key]) for key in cores)
    added = {key: value for key, value in before.items() if key.endswith(layout_entry.NAME)}
    load(model, {**old(first), **added}, tmp_path / "added")
    assert_same(model.state_dict(), first.state_dict())


@pytest.mark.parametrize("make", [module, collection])
def test_older_state_dicts_of_other_shapes(make: Make) -> None:
    """No core is written, also of those whose shapes are equal."""
    spec = TTSpec(60, 8, (3,), (10, 6), (4, 2))
    other = TTSpec(50, 8, (3,), (10, 5), (4, 2))
    model = make(spec)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"cores\.1: size mismatch: it has shape \(5, 6\)"):
        model.load_state_dict(old(make(other)))
    now = model.state_dict()
    assert all(torch.equal(before[key], now[key]) for key in before if "cores" in key)


def test_strict_tells_what_is_missing() -> None:
    model = collection(ONE)
    state = {k: v for k, v in model.state_dict().items() if "cores" not in k}
    with pytest.raises(RuntimeError, match=r"Missing key.*embedding_bags\.t\.cores\.0"):
        model.load_state_dict(state)
    state = {k: v for k, v in module(ONE).state_dict().items() if "cores" not in k}
    with pytest.raises(RuntimeError, match=r"missing are \['cores\.0'"):
        module(ONE).load_state_dict(state)


def test_names_of_torch_distributed() -> None:
    one, two = collection(ONE), collection(ONE)
    state = get_model_state_dict(one)
    assert "embedding_bags.t.tt_layout" in state
    set_model_state_dict(two, state)
    assert_same(one.state_dict(), two.state_dict())


def test_whether_shapes_leave_a_choice() -> None:
    """Against all ranks and factors of some tensor trains, by their shapes."""
    by_shapes: dict[Any, list[TTSpec]] = {}
    factors = [f for f in itertools.product((1, 2, 4, 8), repeat=3) if math.prod(f) == 8]
    for dims, ranks in itertools.product(factors, itertools.product(range(1, 17), repeat=2)):
        try:
            check_ranks(ranks, (2, 2, 2), dims)
        except ValueError:
            continue
        spec = TTSpec(8, 8, ranks, (2, 2, 2), dims)
        full = spec.full_ranks
        shapes = tuple(full[k] * dims[k] * full[k + 1] for k in range(3))
        by_shapes.setdefault(shapes, []).append(spec)
    assert {1, 2} <= {len(specs) for specs in by_shapes.values()}
    for specs in by_shapes.values():
        for spec in specs:
            is_refused = bool(layout_entry.describe_difference(None, layout_entry.from_spec(spec)))
            assert is_refused == (len(specs) > 1), spec


# Over ranks


def sharded(spec: TTSpec, ranks: RankGroup) -> ShardedEmbeddingBagCollection:
    whole = collection(spec)
    rules = {"plain": row_wise(), "t": row_wise()}
    plan = construct_module_plan(whole, rules, World(ranks.size, ranks.size))
    return ShardedEmbeddingBagCollection(whole, plan, ranks)


def refuse_over_ranks(ranks: RankGroup, path: Path) -> list[str]:
    """What loads of other tensor trains say: of a checkpoint, an export, and a state dict."""
    saved, model = sharded(ONE, ranks), sharded(OTHER, ranks)
    checkpoints.save({"model": saved}, path / "dcp", ranks)
    checkpoints.export({"model": saved}, path / "whole.pt", ranks)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    told = []
    whole = checkpoints.load_export(path / "whole.pt")["model"]
    for load in (
        lambda: checkpoints.load({"model": model}, path / "dcp", ranks),
        lambda: model.load_state_dict(whole),
        lambda: model.load_state_dict(saved.state_dict()),
    ):
        try:
            load()
        except (CheckpointError, RuntimeError) as error:
            told.append(str(error))
        for key, value in model.state_dict().items():
            parts = getattr(value, "parts", {0: value})
            known = getattr(before[key], "parts", {0: before[key]})
            assert all(torch.equal(parts[i], known[i]) for i in parts), key
    same = sharded(ONE, ranks)
    checkpoints.load({"model": same}, path / "dcp", ranks)
    same.load_state_dict(whole)
    features = KeyedJaggedTensor(["p", "f"], torch.tensor([1, 999]), lengths=torch.tensor([1, 1]))
    assert torch.equal(same(features).values(), saved(features).values())
    old_layout = {k: v for k, v in whole.items() if not k.endswith(layout_entry.NAME)}
    try:
        same.load_state_dict(old_layout)
    except RuntimeError as error:
        told.append(str(error))
    return told


def test_over_ranks(tmp_path: Path) -> None:
    for told in worlds.run(2, refuse_over_ranks, tmp_path):
        assert len(told) == 4, told
        assert all("differs in dim_factors, ranks" in text for text in told[:3]), told
        assert "there is no tt_layout" in told[3]
    whole = collection(ONE)
    whole.load_state_dict(checkpoints.load_export(tmp_path / "whole.pt")["model"])
    checkpoints.load({"model": whole}, tmp_path / "dcp", ALONE)
