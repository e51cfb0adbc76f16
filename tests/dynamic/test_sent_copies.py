"""Tables with keys that are sent to another process are copies, and are not shared."""

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

import emblib
from emblib import (
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HashTable,
    KeyedJaggedTensor,
    TTCache,
    TTSpec,
    optim,
    storage,
)

IDS = torch.arange(40) % 23
STORAGES = {
    "user": storage.Hash(seed=1),
    "query": storage.TensorTrain((2, 2), cache=TTCache(8, every=2)),
}


def _collection() -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(64, 8, name, storage=kind) for name, kind in STORAGES.items()]
    return EmbeddingBagCollection(tables, optimizer=optim.Adam(0.1))


def _dynamic() -> DynamicEmbeddingBags:
    admission = emblib.FrequencyAdmission(1, emblib.CountMinSketch(1_000))
    return DynamicEmbeddingBags([DynamicSpec(64, 8, admission=admission)], optim.Adam(0.1))


def _cached() -> CachedTTEmbeddingBags:
    return CachedTTEmbeddingBags([TTSpec(64, 8, (2, 2))], TTCache(8, every=2), optim.Adam(0.1))


MODULES = {"collection": _collection, "dynamic": _dynamic, "cached train": _cached}


def _train(module: Any) -> dict[str, Tensor]:
    """Train on three batches; return the state dict."""
    for _ in range(3):
        if isinstance(module, EmbeddingBagCollection):
            lengths = torch.full((4,), 10)
            out = module(KeyedJaggedTensor(list(STORAGES), IDS, lengths=lengths)).values()
        else:
            out = module(IDS, torch.tensor([0, 20, 40]))
        out.square().sum().backward()
    return _state(module)


def _state(module: nn.Module) -> dict[str, Tensor]:
    tensors = {k: v for k, v in module.state_dict().items() if isinstance(v, Tensor)}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert list(one) == list(two)
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]), name


@pytest.mark.parametrize("name", MODULES)
def test_training_a_sent_module_leaves_the_sender(name: str) -> None:
    module = MODULES[name]()
    _train(module)
    twin, before = copy.deepcopy(module), pickle.dumps(_state(module))
    sent = pickle.loads(ForkingPickler.dumps(module))  # as torch.multiprocessing sends it
    _same(_train(sent), _train(twin))
    _same(_state(module), pickle.loads(before))
    for mine, theirs in zip(module.buffers(), sent.buffers(), strict=True):
        assert not mine.numel() or mine.data_ptr() != theirs.data_ptr()


def _train_in_child(modules: list[nn.Module], answers: Any) -> None:
    answers.put([{k: v.numpy() for k, v in _train(module).items()} for module in modules])


def test_a_spawned_process_trains_a_copy() -> None:
    """The tensors that are made for the pickle need not outlive it."""
    modules = [make() for make in MODULES.values()]
    for module in modules:
        _train(module)
    twins, before = copy.deepcopy(modules), [_state(module) for module in modules]
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_train_in_child, args=(modules, answers))
    process.start()
    trained = answers.get()
    process.join()
    assert process.exitcode == 0
    for module, twin, old, new in zip(modules, twins, before, trained, strict=True):
        _same({k: torch.from_numpy(v) for k, v in new.items()}, _train(twin))
        _same(_state(module), old)


@pytest.mark.parametrize("name", [*MODULES, "table"])
def test_sharing_memory_raises(name: str) -> None:
    module: nn.Module = HashTable(DynamicSpec(64, 2)) if name == "table" else MODULES[name]()
    with pytest.raises(RuntimeError, match="cannot be shared between processes"):
        module.share_memory()
