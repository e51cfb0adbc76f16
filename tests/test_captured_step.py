"""Captured steps: the bits of an uncaptured, unpadded loop, whatever the number of ids.

On the CPU steps are padded and run as they are; graphs need a GPU or the pretend GPU.
"""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from emblib import (
    CachedTTEmbeddingBags,
    CapturedStep,
    CountMinSketch,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Eviction,
    FrequencyAdmission,
    JaggedTensor,
    KeyedJaggedTensor,
    Placement,
    Pooling,
    QuantizedEmbeddingBags,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
)
from emblib.collections import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedProcessor,
)
from emblib.inference import for_inference
from tests.captured_cases import (
    BATCH,
    BOUNDS,
    NEEDS_A_GPU,
    SIZES,
    Problem,
    Training,
    check_loop,
    check_same,
    random_bags,
    twins,
)
from tests.interrupts import each_line

PROBLEMS = {
    "sgd": Problem(),
    "adam": Problem(optim.Adam(0.05)),
    "rowwise_adagrad": Problem(optim.RowwiseAdagrad(0.1)),
    "weighted": Problem(optim.Adam(0.05), weighted=True),
    "mean": Problem(optim.RowwiseAdagrad(0.1), Pooling.MEAN),
    "mean_weighted": Problem(pooling=Pooling.MEAN, weighted=True, dtype=torch.int32),
    "managed": Problem(optim.Adam(0.05), placement=Placement.MANAGED),
    "cached": Problem(optim.Adam(0.05), placement=Placement.MANAGED_CACHING),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_bits_of_a_plain_loop(name: str, device: torch.device) -> None:
    problem = PROBLEMS[name]
    batches = [(problem.batch(size, device), problem.batch(size)) for size in SIZES]
    step = check_loop(*twins(problem, device), batches)
    if device.type == "cuda":
        assert step.captured_bounds == list(BOUNDS)


def test_batches_on_the_device_or_partly(device: torch.device) -> None:
    problem = PROBLEMS["weighted"]
    batches = []
    for k, size in enumerate(SIZES):
        batch = problem.batch(size, device)
        mixed = {"bags": problem.batch(size, (device, "cpu")[k % 2])["bags"]}
        mixed["labels"] = problem.batch(size, ("cpu", device)[k // 2 % 2])["labels"]
        batches.append((batch, mixed))
    check_loop(*twins(problem, device), batches)


class Trains(Problem):
    """Tensor-train tables."""

    def tables(self, device: torch.device) -> nn.Module:
        """Return the module of tables."""
        specs = [TTSpec(rows, 8, (2,)) for rows in self.rows]
        return TableBatchedTTEmbeddingBags(specs, self.optimizer, device=device)


def test_tensor_trains(device: torch.device) -> None:
    problem = Trains(optim.Adam(0.05), rows=(60, 24))
    batches = [(problem.batch(size, device), problem.batch(size)) for size in SIZES]
    check_loop(*twins(problem, device), batches)


class Dynamic(Problem):
    """Dynamic tables, of which -1 is a key like any other."""

    kind: str = "lru"

    def tables(self, device: torch.device) -> nn.Module:
        """Return the module of tables."""
        specs = [DynamicSpec(32, 8, **DYNAMIC[self.kind]) for _ in self.rows]
        return DynamicEmbeddingBags(specs, self.optimizer, pooling=self.pooling, device=device)

    def batch(self, size: int, device: torch.device | str = "cpu") -> dict[str, Any]:
        """Return a batch of `size` keys, one of which may be -1."""
        batch = super().batch(size, device)
        batch["bags"].values().sub_(1)
        return batch


DYNAMIC: dict[str, dict[str, Any]] = {
    "lru": {},
    "lfu": {"eviction": Eviction.LFU},
    "step": {"eviction": Eviction.STEP},
    "admission": {"admission": FrequencyAdmission(2, CountMinSketch(width=64))},
    "fallback": {
        "admission": FrequencyAdmission(2, CountMinSketch(width=64)),
        "fallback_rows": 4,
    },
}


@pytest.mark.parametrize("kind", DYNAMIC)
def test_dynamic_tables(kind: str, device: torch.device) -> None:
    """Rows, and what the tables count: uses, lookups, hits, evictions, candidates."""
    problem = Dynamic(optim.Adam(0.05), weighted=True, dtype=torch.int64, rows=(200, 60))
    object.__setattr__(problem, "kind", kind)
    batches = [(problem.batch(size, device), problem.batch(size)) for size in SIZES]
    eager, captured = twins(problem, device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*output with one or more elements was resized")
        check_loop(eager, captured, batches)
    one, other = eager.model["tables"], captured.model["tables"]
    assert torch.equal(one.index.counters, other.index.counters)
    assert one.num_training_steps == other.num_training_steps
    assert other.bounds_violations.tolist() == [0, 0]


def test_vectors_of_keys_come_last(device: torch.device) -> None:
    table = DynamicEmbeddingBags([DynamicSpec(32, 8)], pooling=Pooling.NONE, device=device).eval()
    step = CapturedStep(lambda batch: table(batch.values(), batch.offsets()), [8], device=device)
    vectors = step(JaggedTensor(torch.tensor([3, 1]), lengths=torch.tensor([2])))
    assert vectors.shape == (8, 8)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_keys_that_expire_are_refused() -> None:
    device = torch.device("cuda")
    table = DynamicEmbeddingBags([DynamicSpec(32, 8, ttl=3)], optim.SGD(0.1), device=device)
    step = CapturedStep(
        lambda bags: table(bags.values(), bags.offsets()).sum().backward(), [8], device=device
    )
    batch = JaggedTensor(torch.tensor([3, 1]), lengths=torch.tensor([2]))
    for _ in range(3):
        step(batch)
    with pytest.raises(RuntimeError, match=r"cannot be captured.*(item|capturing)"):
        step(batch)


def cached_trains(every: int | None, device: torch.device) -> Training:
    """Return a model of tensor trains with stored rows."""
    torch.manual_seed(0)
    specs = [TTSpec(60, 8, (2,)), TTSpec(24, 8, (2,))]
    cache, optimizer = TTCache(4, every=every), optim.Adam(0.05)
    table = CachedTTEmbeddingBags(specs, cache, optimizer, device=device)
    return Training(nn.ModuleDict({"tables": table, "top": nn.Linear(16, 1).to(device)}))


@pytest.mark.parametrize("stores_rows", [False, True])
def test_cached_tensor_trains(stores_rows: bool, device: torch.device) -> None:
    """Padding is not a key: it is neither counted nor among the ids whose uses are kept."""
    problem = Problem(rows=(60, 24))
    one, other = (cached_trains(None, device) for _ in range(2))
    for training in (one, other) if stores_rows else ():
        training.step(problem.batch(8, device))
        training.model["tables"].populate()
    batches = [(problem.batch(size, device), problem.batch(size)) for size in SIZES]
    check_loop(one, other, batches)


def test_cached_trains_that_choose_rows() -> None:
    """In Python, so on a CPU, where nothing is captured."""
    one, other = (cached_trains(4, torch.device("cpu")) for _ in range(2))
    batches = [(Problem(rows=(60, 24)).batch(size),) * 2 for size in SIZES]
    check_loop(one, other, batches)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_cached_trains_that_choose_rows_are_refused() -> None:
    problem = Problem(rows=(60, 24))
    step = CapturedStep(cached_trains(4, torch.device("cuda")).step, [8], device="cuda", warmup=1)
    step(problem.batch(8))
    with pytest.raises(RuntimeError, match="every=4 chooses its rows in Python"):
        step(problem.batch(8))


def test_quantised_tables(device: torch.device) -> None:
    tables = Problem().tables(device)
    quantised = QuantizedEmbeddingBags.from_float(tables)
    step = CapturedStep(
        lambda batch: quantised(batch["bags"].values(), batch["bags"].offsets()),
        BOUNDS,
        device=device,
    )
    for size in SIZES:
        batch = Problem().batch(size, device)
        want = quantised(batch["bags"].values(), batch["bags"].offsets())
        assert torch.equal(step(Problem().batch(size)), want)


def test_vectors_of_ids_come_last(device: torch.device) -> None:
    table = TableBatchedEmbeddingBags(
        [TableSpec(50, 8)], optim.SGD(0.1), pooling=Pooling.NONE, device=device
    )
    step = CapturedStep(lambda batch: table(batch.values(), batch.offsets()), [8], device=device)
    ids = torch.tensor([3, 1, 4])
    for _ in range(5):
        vectors = step(JaggedTensor(ids, lengths=torch.tensor([2, 1])))
        assert torch.equal(vectors[5:], table.table_weights()[0][ids.to(device)])
        assert not vectors[:5].any()


def test_the_loop_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "captured_steps.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(program, "docs/captured_steps.md", "exec"), {})
    assert re.fullmatch(r"mean loss 0\.\d+\n", capsys.readouterr().out)


# Collections


class Collection(Training):
    """A collection whose tables are in several kernels, with features in another order."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        adam = optim.Adam(0.05)
        configs = [
            EmbeddingBagConfig(50, 8, "a", ["f", "g"]),
            EmbeddingBagConfig(20, 4, "b", ["h"], optimizer=adam, pooling=Pooling.MEAN),
            EmbeddingBagConfig(30, 8, "c", ["f"]),
            EmbeddingBagConfig(10, 4, "d", ["i"], optimizer=adam),
        ]
        bags = EmbeddingBagCollection(
            configs, device=device, optimizer=optim.RowwiseAdagrad(0.1), is_weighted=True
        )
        top = nn.Linear(32, 1).to(device)
        super().__init__(nn.ModuleDict({"bags": bags, "top": top}))

    def step(self, batch: tuple[KeyedJaggedTensor, Tensor]) -> Tensor:
        """Train on a batch and return the loss."""
        self.optimizer.zero_grad()
        rows = self.model["bags"](batch[0]).values()
        loss = nn.functional.mse_loss(self.model["top"](rows), batch[1])
        loss.backward()
        self.optimizer.step()
        return loss

    def values(self) -> dict[str, Tensor]:
        """Return copies of all that a step changes, optimizer states of tables too."""
        found = super().values()
        for name, states in self.model["bags"].optimizer_state().items():
            found |= {f"{name}.{key}": t.cpu().clone() for key, t in states.items()}
        return found


def keyed_batch(size: int, device: torch.device | str) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(size)
    keys = ["i", "unused", "f", "h", "g"]
    lengths = random_bags(len(keys) * BATCH, size, size).diff()
    batch = KeyedJaggedTensor(
        keys,
        torch.randint(10, (size,), generator=generator).to(device),
        torch.rand(size, generator=generator).to(device),
        lengths=lengths.to(device),
    )
    return batch, torch.rand(BATCH, 1, generator=generator).to(device)


def test_a_collection_of_several_kernels(device: torch.device) -> None:
    batches = [(keyed_batch(size, device), keyed_batch(size, "cpu")) for size in SIZES]
    step = check_loop(Collection(device), Collection(device), batches)
    if device.type == "cuda":
        assert step.captured_bounds == list(BOUNDS)


# Padding


def test_a_step_gets_padding_first(device: torch.device) -> None:
    seen: list[Any] = []
    step = CapturedStep(seen.append, [6], device=device)
    step({"ids": JaggedTensor(torch.tensor([3, 1]), torch.ones(2), torch.tensor([0, 2])), "n": 7})
    batch = seen[0]
    assert batch["n"] == 7
    assert batch["ids"].values().tolist() == [-1] * 4 + [3, 1]
    assert batch["ids"].weights().tolist() == [0] * 4 + [1, 1]
    assert batch["ids"].offsets().tolist() == [4, 4, 6]
    assert batch["ids"].lengths().tolist() == [0, 2]
    assert batch["ids"].values().device.type == device.type


def _padded_results(model: Callable[[Any], Any], batch: Any) -> tuple[Any, Any]:
    """Return the result of a model, and that in a captured step on the CPU."""
    return model(batch), CapturedStep(model, [9], device="cpu")(batch)


KEYED = KeyedJaggedTensor(
    ["user", "item"],
    torch.tensor([7, 8, 9, 4]),
    torch.tensor([1.0, 2.0, 3.0, 4.0]),
    lengths=torch.tensor([2, 1, 0, 1]),
)


@pytest.mark.parametrize("keys", [["user", "item"], ["item", "user"]])
@pytest.mark.parametrize("same_module", [True, False])
def test_a_collection_of_vectors_leaves_out_padding(keys: list[str], same_module: bool) -> None:
    batch = KeyedJaggedTensor(keys, KEYED.values(), lengths=KEYED.lengths())
    dtype = torch.float32 if same_module else torch.float16
    tables = [EmbeddingConfig(10, 4, "user"), EmbeddingConfig(10, 4, "item", data_type=dtype)]
    history = EmbeddingCollection(tables, need_indices=True)
    for model in (history, for_inference(history)):
        expected, result = _padded_results(model, batch)
        for key, vectors in expected.items():
            assert torch.equal(result[key].values(), vectors.values())
            assert torch.equal(result[key].weights(), vectors.weights())
            assert torch.equal(result[key].lengths(), vectors.lengths())


@pytest.mark.parametrize("by_feature", [True, False])
def test_weights_by_position_leave_out_padding(by_feature: bool) -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "user")], is_weighted=True)
    kind: Any = PositionWeightedModule if by_feature else PositionWeightedProcessor
    positions = kind({"user": 3})
    positions.position_weights["user"].data.copy_(torch.tensor([1.0, 2.0, 3.0]))
    processors = {"user": positions} if by_feature else positions
    model = FeatureProcessedEmbeddingBagCollection(bags, processors)
    expected, result = _padded_results(lambda batch: model(batch).values(), KEYED)
    assert torch.equal(result, expected)


def test_jagged_tensors_of_a_padded_batch_have_the_same_bags() -> None:
    bags = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, name) for name in ("user", "item")])
    one = JaggedTensor(torch.tensor([3, 1, 4]), torch.ones(3), torch.tensor([2, 1]))
    models: list[Callable[[Any], Any]] = [
        lambda batch: bags(pytree.tree_map(torch.clone, batch)).values(),
        lambda batch: bags(KeyedJaggedTensor.from_jt_dict(batch.to_dict())).values(),
        lambda batch: KeyedJaggedTensor.concat([batch, batch]).values(),
        lambda batch: KeyedJaggedTensor.concat([batch, batch]).weights(),
        lambda batch: [str(batch), str(batch["user"]), str(batch.to_nested()["item"].values())],
    ]
    for model in models:
        expected, result = _padded_results(model, KEYED)
        assert result == expected if isinstance(result, list) else torch.equal(result, expected)
    jagged_models: list[Callable[[Any], Any]] = [
        lambda jagged: [bag.tolist() for bag in jagged.to_dense()],
        lambda jagged: [bag.tolist() for bag in jagged.to_dense_weights()],
        lambda jagged: str(jagged),
        lambda jagged: str(JaggedTensor.adopt(jagged)),
        lambda jagged: [bag.tolist() for bag in jagged.to_nested().unbind()],
        lambda jagged: str(KeyedJaggedTensor.from_jt_dict({"a": jagged, "b": jagged})),
    ]
    for model in jagged_models:
        expected, result = _padded_results(model, one)
        assert result == expected


def test_a_padded_result_keeps_its_offsets() -> None:
    _, result = _padded_results(lambda batch: batch, KEYED)
    assert result.offsets().tolist() == [5, 7, 8, 8, 9]


# Refusals


@pytest.mark.parametrize("bounds", [[], [0], [8, 4], [4, 4], 8, [2.5], [2**31], [True, 8]])
def test_bounds_must_be_ascending_numbers(bounds: Any) -> None:
    with pytest.raises(ValueError, match="bounds must be ascending ints"):
        CapturedStep(print, bounds)


def test_warmup_must_be_a_number() -> None:
    with pytest.raises(ValueError, match="warmup must be an int >= 1"):
        CapturedStep(print, [8], warmup=0)


def _with(batch: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**batch, **changes}


IDS = torch.tensor([1, 2])
ODD_BATCHES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "labels": lambda batch: _with(batch, labels=torch.rand(BATCH - 1, 1)),
    "dtype": lambda batch: _with(batch, labels=batch["labels"].double()),
    "samples": lambda batch: _with(batch, bags=JaggedTensor(IDS, lengths=torch.tensor([2]))),
    "weights": lambda batch: _with(
        batch, bags=JaggedTensor(IDS, torch.ones(2), offsets=batch["bags"].offsets())
    ),
    "another entry": lambda batch: _with(batch, more=torch.ones(1)),
    "keys": lambda batch: _with(batch, bags=KeyedJaggedTensor(["f"], IDS, lengths=IDS)),
    "tuple": lambda batch: tuple(batch.values()),
}


@pytest.mark.parametrize("name", ODD_BATCHES)
def test_a_batch_of_another_structure_is_refused(name: str, device: torch.device) -> None:
    training = Training(Problem().model(device))
    step = CapturedStep(training.step, BOUNDS, device=device)
    for size in (3, 5, 2, 4):
        step(Problem().batch(size))
    before = training.values()
    with pytest.raises(ValueError, match="must differ from the first one in the number of ids"):
        step(ODD_BATCHES[name](Problem().batch(3)))
    for key, value in training.values().items():
        assert torch.equal(value, before[key])


def test_leaves_that_a_graph_would_not_see_are_refused() -> None:
    step = CapturedStep(print, [8])
    with pytest.raises(TypeError, match=r"leaf 0 of a batch must be a tensor.* got Problem"):
        step([Problem()])
    with pytest.raises(ValueError, match="requires a gradient"):
        step([torch.ones(2, requires_grad=True)])
    with pytest.raises(ValueError, match="must be a dense tensor"):
        step([torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match="features differ in their bags"):
        step(KeyedJaggedTensor(["f"], IDS, lengths=IDS, stride_per_key_per_rank=[[2]]))
    with pytest.raises(ValueError, match="must have a tensor"):
        step([1, 2])


def test_weights_that_require_a_gradient_are_refused() -> None:
    weights = torch.ones(2, requires_grad=True)
    step = CapturedStep(lambda batch: batch.weights().sum(), [8], device="cpu")
    with pytest.raises(ValueError, match="leaf 0 of a batch requires a gradient"):
        step(JaggedTensor(torch.tensor([1, 2]), weights, torch.tensor([2])))


def test_a_refused_batch_sets_no_layout() -> None:
    step = CapturedStep(lambda batch: batch[0] + 1, [8], device="cpu")
    with pytest.raises(ValueError, match="a batch must be on the host or on cpu"):
        step([torch.ones(3, device="meta")])
    assert step([torch.ones(2)]).tolist() == [2.0, 2.0]


def test_a_first_batch_whose_step_fails_sets_no_layout(device: torch.device) -> None:
    def step_of_pairs(batch: Tensor) -> Tensor:
        if batch.numel() != 2:
            raise ValueError("pairs, please")
        return batch + 1

    step = CapturedStep(step_of_pairs, [8])
    with pytest.raises(ValueError, match="pairs, please"):
        step(torch.ones(3, dtype=torch.int32, device="cpu"))
    assert step.device is None
    for _ in range(2):
        assert step(torch.ones(2, device=device)).tolist() == [2.0, 2.0]
    assert step.device == torch.empty(0, device=device).device
    with pytest.raises(ValueError, match="must differ from the first one"):
        step(torch.ones(3, device=device))


def test_an_odd_batch_runs_eagerly(device: torch.device) -> None:
    one, other = twins(Problem(), device)
    step = CapturedStep(other.step, BOUNDS, device=device)
    for size in (3, 3, 3, 3, 5):
        one.step(Problem().batch(size, device))
        step(Problem().batch(size))
        odd = Problem().batch(size)
        odd["labels"] = odd["labels"].float().expand(BATCH, 1).clone()
        assert torch.equal(
            one.step({k: v.to(device) for k, v in odd.items()}), step.run_eagerly(odd)
        )
    check_same(one, other)


def test_bound_of() -> None:
    step = CapturedStep(print, BOUNDS)
    assert [step.bound_of(Problem().batch(size)) for size in (0, 8, 9, 24, 25)] == [
        8,
        8,
        24,
        24,
        None,
    ]


# Graphs


@NEEDS_A_GPU
@pytest.mark.cuda
def test_a_loop_waits_for_nothing(
    no_host_waits: Callable[[], AbstractContextManager[None]],
) -> None:
    device = torch.device("cuda")
    training = Training(Problem(optim.Adam(0.05)).model(device))
    step = CapturedStep(training.step, BOUNDS, device=device)
    batches = [Problem().batch(size) for size in SIZES if size <= BOUNDS[-1]]
    for batch in batches:
        step(batch)
    torch.cuda.synchronize()
    with no_host_waits():
        for batch in batches[:8]:  # of which each class has fewer than staging blocks
            step(batch)


@NEEDS_A_GPU
@pytest.mark.cuda
def test_results_are_static_per_class() -> None:
    training = Training(Problem().model(torch.device("cuda")))
    step = CapturedStep(training.step, BOUNDS, device="cuda")
    losses = [step(Problem().batch(size)) for size in (3, 3, 3, 3, 5, 20, 20, 21)]
    assert losses[3] is losses[4]
    assert losses[6] is losses[7]
    assert losses[4] is not losses[6]


@NEEDS_A_GPU
@pytest.mark.cuda
def test_a_step_that_waits_is_refused() -> None:
    training = Training(Problem().model(torch.device("cuda")))

    def step_that_reads(batch: Any) -> float:
        return training.step(batch).item()  # the culprit

    step = CapturedStep(step_that_reads, [8], device="cuda", warmup=1)
    step(Problem().batch(3))
    before = training.values()
    line = step_that_reads.__code__.co_firstlineno + 1
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot be captured.*(item|capturing)") as refusal:
            step(Problem().batch(3))
        assert f"{__file__}:{line}" in str(refusal.value)
        assert "run_eagerly" in str(refusal.value)
        for key, value in training.values().items():
            assert torch.equal(value, before[key])
    one, other = twins(Problem(), torch.device("cuda"))
    training.model.load_state_dict(one.model.state_dict())
    assert torch.equal(
        torch.tensor(step.run_eagerly(Problem().batch(3))),
        other.step(Problem().batch(3, "cuda")).cpu().detach(),
    )


@NEEDS_A_GPU
@pytest.mark.cuda
def test_an_optimizer_that_counts_forwards_is_refused() -> None:
    problem = Problem(optim.EnsembleRowwiseAdagrad(0.1))
    training = Training(problem.model(torch.device("cuda")))
    step = CapturedStep(training.step, [8], device="cuda", warmup=1)
    step(problem.batch(3))
    with pytest.raises(RuntimeError, match="counts forwards in Python"):
        step(problem.batch(3))


@NEEDS_A_GPU
@pytest.mark.cuda
def test_an_interrupted_step_is_made_or_not() -> None:
    """Interrupts at lines of emblib in a captured step: the next step trains as if alone."""
    problem, device = Problem(optim.Adam(0.05)), torch.device("cuda")
    one, other = twins(problem, device)
    step = CapturedStep(other.step, [8], device=device, warmup=1)
    for run in (one.step, step):
        for _ in range(3):
            run(problem.batch(5, device))
    tensors = [*other.model.state_dict().values()]
    for state in other.optimizer.state.values():
        tensors += state.values()
    saved = [tensor.clone() for tensor in tensors]
    before = one.values()
    one.step(problem.batch(5, device))
    after = one.values()
    for attempt in each_line(step=3):
        with attempt:
            step(problem.batch(5))
        # The interrupt may have come before the caller's stream waited for that of the step.
        torch.cuda.synchronize()
        now = other.values()
        assert any(all(torch.equal(now[key], want[key]) for key in now) for want in (before, after))
        with torch.no_grad():
            for tensor, value in zip(tensors, saved, strict=True):
                tensor.copy_(value)
        torch.cuda.synchronize()  # the interrupt may have left another stream current
