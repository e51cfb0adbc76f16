"""Activation checkpointing: a forward that backward repeats changes nothing a second time.

Every subject trains the same steps with and without checkpointing. Outputs, and all that the module
has afterwards, must be equal.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

import emblib
from emblib import DynamicEmbeddingBags, DynamicSpec, Eviction, init, optim
from emblib.collections.optimizers import FusedOptimizer

Call = Callable[[Tensor], Tensor]
STEPS = 6


def plain(function: Call, x: Tensor) -> Tensor:
    """Call without checkpointing."""
    return function(x)


def sequential(function: Call, x: Tensor, *, use_reentrant: bool) -> Tensor:
    """Checkpoint the first of two segments."""
    rest = nn.Identity()
    return checkpoint_sequential([function, rest], 2, x, use_reentrant=use_reentrant)


def nested(function: Call, x: Tensor, *, reentrant: str) -> Tensor:
    """Checkpoint a function with a checkpointed part; `reentrant` names those that are."""

    def run(x: Tensor) -> Tensor:
        return checkpoint(function, x, use_reentrant="inner" in reentrant) * 1.0

    return checkpoint(run, x, use_reentrant="outer" in reentrant)


def to_the_end(function: Call, x: Tensor) -> Tensor:
    """Checkpoint without early stop."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, x, use_reentrant=False)


def with_other_hooks(function: Call, x: Tensor) -> Tensor:
    """Checkpoint within other hooks of saved tensors, without a check of what is saved."""
    with torch.autograd.graph.save_on_cpu():
        return checkpoint(function, x, use_reentrant=False, determinism_check="none")


WAYS: dict[str, Callable[[Call, Tensor], Tensor]] = {
    "not reentrant": partial(checkpoint, use_reentrant=False),
    "reentrant": partial(checkpoint, use_reentrant=True),
    "sequential": partial(sequential, use_reentrant=False),
    "sequential reentrant": partial(sequential, use_reentrant=True),
    "nested": partial(nested, reentrant="none"),
    "nested reentrant": partial(nested, reentrant="outer and inner"),
    "reentrant in not": partial(nested, reentrant="inner"),
    "not in reentrant": partial(nested, reentrant="outer"),
    "no early stop": to_the_end,
    "other hooks": with_other_hooks,
}


class Subject(NamedTuple):
    """A module, its lookup of a batch of three bags, and what a forward may change."""

    module: nn.Module
    look_up: Callable[[Tensor], Tensor]
    effects: Callable[[], Any]


def ids_of(step: int) -> Tensor:
    """Return nine ids, some of them several times."""
    generator = torch.Generator().manual_seed(step)
    return (torch.rand(9, generator=generator).square() * 20).long()


OFFSETS = torch.tensor([0, 3, 6, 9])


def dynamic(capacity: int = 64, **spec: Any) -> Subject:
    """Return a dynamic table; `backing` and `optimizer` are of the module."""
    own = {name: spec.pop(name) for name in ("backing",) if name in spec}
    optimizer = spec.pop("optimizer", optim.Adam(0.1))
    spec.setdefault("initializer", init.Uniform(-0.5, 0.5))
    table = DynamicSpec(capacity, 4, name="t", **spec)
    module = DynamicEmbeddingBags([table], optimizer, seed=1, **own)
    if spec.get("eviction") is Eviction.CUSTOM:
        module.set_eviction_score(3)
    log = module.track_evictions()

    def effects() -> Any:
        own = [module.stats(), module.num_training_steps, module.key_status(), log.since(0, 0)]
        return [*own, module.tier_stats(), int(module.dropped_updates), copied(module)]

    return Subject(module, lambda ids: module(ids, OFFSETS), effects)


def admitted() -> Subject:
    """Return a table that admits late and draws what other keys read."""
    admission = emblib.FrequencyAdmission(3, emblib.ExactCounter(64), init.Uniform(-1.0, 1.0))
    return dynamic(admission=admission, default_value=0.5)


def cached(**options: Any) -> Subject:
    """Return a table behind a small cache, which is prefetched one batch ahead."""
    tables = [emblib.TableSpec(3000, 4, "t", placement=emblib.Placement.MANAGED_CACHING)]
    torch.manual_seed(0)
    config = emblib.CacheConfig(sets=1, **options)
    module = emblib.TableBatchedEmbeddingBags(tables, optim.Adam(0.1), cache=config)

    def look_up(ids: Tensor) -> Tensor:
        return module(ids, OFFSETS)

    def effects() -> Any:
        row_cache: Any = module.row_cache
        usage = {name: getattr(row_cache, name).clone() for name in ("tags", "stamps", "clock")}
        return [module.cache_stats(), usage, module.table_weights()[0].clone()]

    return Subject(module, look_up, effects)


def prefetched() -> Subject:
    """Return a cached table of which a later batch is always in flight."""
    subject = cached()
    batches = [(ids_of(step), OFFSETS.clone()) for step in range(STEPS + 1)]
    module: Any = subject.module
    step = 0
    for batch in batches[:2]:
        module.prefetch(*batch)

    def effects() -> Any:  # called after every step
        nonlocal step
        step += 1
        if step + 1 <= STEPS:
            module.prefetch(*batches[step + 1])
        return [module.cache_stats(), module.row_cache.clock.clone()]

    return Subject(module, lambda ids: module(*batches[step]), effects)


def copied(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a state dict as they are now."""
    state = module.state_dict()
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def periodic(optimizer: optim.Optimizer) -> Subject:
    """Return a table whose optimizer counts forwards."""
    torch.manual_seed(0)
    module = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(20, 4, "t")], optimizer)
    return Subject(module, lambda ids: module(ids, OFFSETS), lambda: copied(module))


def cached_train(**options: Any) -> Subject:
    """Return a tensor train with stored rows, which are chosen again every second step."""
    torch.manual_seed(0)
    spec = emblib.TTSpec(20, 4, (2,), (4, 5), (2, 2), name="t")
    cache = emblib.TTCache(3, every=2, **options)
    module = emblib.CachedTTEmbeddingBags([spec], cache, optim.SGD(0.1))

    def effects() -> Any:
        return [module.cache_stats(), copied(module)]

    return Subject(module, lambda ids: module(ids, OFFSETS), effects)


def bag_collection() -> Subject:
    """Return a collection of a hash table and a plain one."""
    torch.manual_seed(0)
    configs = [
        emblib.EmbeddingBagConfig(64, 4, "t", ("f",), storage=emblib.storage.Hash(seed=2)),
        emblib.EmbeddingBagConfig(20, 4, "u", ("f",)),
    ]
    module = emblib.EmbeddingBagCollection(configs, optimizer=optim.SGD(0.1))

    def look_up(ids: Tensor) -> Tensor:
        batch = emblib.KeyedJaggedTensor(["f"], ids, offsets=OFFSETS)
        found: Tensor = module(batch).values()
        return found

    return Subject(module, look_up, lambda: copied(module))


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "lru": dynamic,
    "lfu": partial(dynamic, eviction=Eviction.LFU),
    "lru_lfu": partial(dynamic, eviction=Eviction.LRU_LFU),
    "step": partial(dynamic, eviction=Eviction.STEP),
    "custom": partial(dynamic, eviction=Eviction.CUSTOM),
    "ttl": partial(dynamic, ttl=2),
    "default value": partial(dynamic, default_value=0.25),
    "deferred": partial(dynamic, optimizer=optim.SGD(0.1, deferred=True)),
    "growing": partial(dynamic, 256, initial_capacity=32),
    "backing": lambda: dynamic(32, backing=emblib.BackingStore(emblib.HostRows(64))),
    "admission": admitted,
    "cached": cached,
    "cached lfu": partial(cached, policy=emblib.CachePolicy.LFU),
    "prefetched": prefetched,
    "counter": lambda: periodic(
        optim.RowwiseAdagrad(0.1, counter=optim.Counter(halflife=2, start=-1))
    ),
    "ensemble": lambda: periodic(optim.EnsembleRowwiseAdagrad(0.1, average_every=2, swap_every=3)),
    "cached train": cached_train,
    "spilling train": partial(cached_train, eviction=emblib.RowEviction.SPILL),
    "collection": bag_collection,
}


def trained(subject: Subject, way: Callable[[Call, Tensor], Tensor]) -> list[Any]:
    """Train some steps; return outputs, dense gradients and effects of all."""
    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 0.5)
    results: list[Any] = []
    for step in range(STEPS):
        ids, x = ids_of(step), torch.ones(1, requires_grad=True)

        def function(x: Tensor, ids: Tensor = ids) -> Tensor:
            rows = subject.look_up(ids)
            return layer(rows[:, :4]).tanh() * x + rows[:, -4:]

        out = way(function, x)
        out.square().sum().backward()
        if (optimizer := getattr(subject.module, "optimizer", None)) and optimizer.deferred:
            stepper = FusedOptimizer.of(subject.module)
            stepper.step()
            stepper.zero_grad()
        results += [out.detach(), x.grad, layer.weight.grad, subject.effects()]
    return results


def same(found: Any, expected: Any) -> None:
    """Compare nested values, tensors bit for bit."""
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        assert found == expected


PAIRS = [
    *((name, way) for name in SUBJECTS for way in ("not reentrant", "reentrant")),
    *((name, way) for name in ("admission", "prefetched", "spilling train") for way in WAYS),
]


@pytest.mark.parametrize(("name", "way"), dict.fromkeys(PAIRS))
def test_what_a_repeated_forward_changes(name: str, way: str) -> None:
    expected, found = (trained(SUBJECTS[name](), run) for run in (plain, WAYS[way]))
    same(found, expected)


BOTH = pytest.mark.parametrize("use_reentrant", [False, True])


def table(capacity: int = 64, **more: Any) -> DynamicEmbeddingBags:
    """Return a table whose new rows are ones."""
    spec = DynamicSpec(capacity, 2, name="t", initializer=init.Constant(1.0), **more)
    return DynamicEmbeddingBags([spec], optim.SGD(0.5), seed=1)


def bag(*ids: int) -> tuple[Tensor, Tensor]:
    """Return one bag per id."""
    return torch.tensor(ids), torch.arange(len(ids) + 1)


def uses(module: DynamicEmbeddingBags) -> dict[int, int]:
    """Return the score of every key."""
    entries = module.table_handles()["t"].entries()
    assert entries.scores is not None
    return dict(sorted(zip(entries.keys.tolist(), entries.scores.tolist(), strict=True)))


@BOTH
def test_several_lookups_of_a_region_and_several_backwards(use_reentrant: bool) -> None:
    module, x = table(eviction=Eviction.LFU), torch.ones(1, requires_grad=True)

    def function(x: Tensor) -> Tensor:
        first = module(*bag(1, 2)).square().sum() * x
        with torch.no_grad():
            module.eval()(*bag(7))  # an evaluation, which inserts nothing
            module.train()
        return first + module(*bag(2, 3)).sum() * x

    out = checkpoint(function, x, use_reentrant=use_reentrant)
    assert float(out.detach()) == 8.0
    out.backward(retain_graph=True)
    out.backward()
    assert uses(module) == {1: 1, 2: 2, 3: 1}


def test_a_forward_of_an_evaluation_stays_one() -> None:
    module, x = table(), torch.ones(1)
    with torch.no_grad():
        for input_ in (x, x.clone().requires_grad_()):
            out = checkpoint(lambda x: module(*bag(1)) * x, input_, use_reentrant=True)
            assert out.sum() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: no input requires a gradient
        assert checkpoint(lambda x: module(*bag(1)) * x, x, use_reentrant=True).sum() == 0
    with torch.inference_mode():
        assert checkpoint(lambda x: module(*bag(1)) * x, x, use_reentrant=True).sum() == 0
    assert module.size(0) == 0


@BOTH
def test_rows_that_moved_before_the_repetition(use_reentrant: bool) -> None:
    module, x = table(512, initial_capacity=32), torch.ones(1, requires_grad=True)
    out = checkpoint(lambda x: module(*bag(1, 2)) * x, x, use_reentrant=use_reentrant)
    module(*bag(*range(100, 400)))
    assert module.capacity(0) > 32
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [4.0]
    assert module.eval()(*bag(1, 2)).tolist() == [[0.5, 0.5]] * 2


@BOTH
def test_rows_that_were_evicted_before_the_repetition(use_reentrant: bool) -> None:
    module, x = table(32), torch.ones(1, requires_grad=True)
    out = checkpoint(lambda x: module(*bag(1, 2)) * x, x, use_reentrant=use_reentrant)
    module(*bag(*range(100, 200)))
    with pytest.raises(RuntimeError, match="have left the table since: run backward before"):
        out.sum().backward()


@BOTH
def test_other_ids_in_the_repetition(use_reentrant: bool) -> None:
    module, x = table(), torch.ones(1, requires_grad=True)
    ids = iter([1, 2])
    out = checkpoint(lambda x: module(*bag(next(ids))) * x, x, use_reentrant=use_reentrant)
    with pytest.raises(RuntimeError, match="must look up the same ids both times"):
        out.sum().backward()


@BOTH
def test_gradients_of_sample_weights(use_reentrant: bool) -> None:
    module, weights = table(), torch.full((2,), 3.0, requires_grad=True)

    def function(weights: Tensor) -> Tensor:
        return module(*bag(1, 2), weights)

    checkpoint(function, weights, use_reentrant=use_reentrant).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [2.0, 2.0]
    assert module.eval()(*bag(1)).tolist() == [[-0.5, -0.5]]


@BOTH
def test_a_warning_is_given_once(use_reentrant: bool) -> None:
    module = emblib.TableBatchedEmbeddingBags([emblib.TableSpec(8, 2, "t")], optim.SGD(0.1))
    x = torch.ones(1, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint(lambda x: module(*bag(9)) * x, x, use_reentrant=use_reentrant).sum().backward()
    assert len([one for one in caught if "out of bounds" in str(one.message)]) == 1
    assert module.bounds_violations.tolist() == [1, 0]


@BOTH
def test_a_trace_has_a_forward_once(use_reentrant: bool) -> None:
    module, x = nn.EmbeddingBag(8, 2, mode="sum"), torch.ones(1, requires_grad=True)
    with emblib.TraceRecorder(module) as recorder:
        for _ in range(2):
            ids = torch.tensor([[1, 2], [3, 4]])
            out = checkpoint(lambda x, ids=ids: module(ids) * x, x, use_reentrant=use_reentrant)
            out.sum().backward()
    assert recorder.trace.ids[0].tolist() == [1, 2, 3, 4] * 2


@BOTH
def test_stored_rows_that_were_replaced_before_the_repetition(use_reentrant: bool) -> None:
    subject, x = cached_train(), torch.ones(1, requires_grad=True)
    module: Any = subject.module
    out = checkpoint(lambda x: subject.look_up(ids_of(0)) * x, x, use_reentrant=use_reentrant)
    module.populate()
    with pytest.raises(RuntimeError, match="rows of the cache were replaced"):
        out.sum().backward()
