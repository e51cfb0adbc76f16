"""What programs use of torch outside emblib works on a GPU: generators, sparse tensors, others."""

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from emblib import TableBatchedEmbeddingBags, TableSpec, optim

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs or the pretend GPU"),
]


def test_generators_belong_to_devices() -> None:
    generator = torch.Generator("cuda:1").manual_seed(5)
    assert generator.device == torch.device("cuda:1")
    first = torch.rand(3, device="cuda:1", generator=generator)
    generator.manual_seed(5)
    assert torch.equal(first, torch.rand(3, device="cuda:1", generator=generator))
    assert not torch.equal(first, torch.rand(3, device="cuda:1", generator=generator))


def test_numbers_of_a_device_leave_the_generator_of_the_host_alone() -> None:
    torch.manual_seed(3)
    want = torch.rand(3)
    torch.manual_seed(3)
    torch.rand(7, device="cuda")
    assert torch.equal(torch.rand(3), want)


def test_operations_refuse_tensors_of_several_devices() -> None:
    on_host, x, y = torch.ones(3), torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    calls = [
        lambda: torch.equal(on_host, x),
        lambda: x + on_host,
        lambda: x + y,
        lambda: torch.where(x > 0, x, on_host),
        lambda: torch.nn.functional.embedding(torch.tensor([0]), x.view(3, 1)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="same device"):
            call()
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    assert x[torch.tensor([0, 2])].tolist() == [1, 1]
    assert y.copy_(x).device == y.device


def test_states_of_generators_are_restored() -> None:
    state = torch.cuda.get_rng_state()
    first = torch.randn(4, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.randn(4, device="cuda"), first)
    torch.manual_seed(4)
    want = [torch.randn(2, device=f"cuda:{i}") for i in range(2)]
    torch.manual_seed(4)
    assert all(torch.equal(w, torch.randn(2, device=w.device)) for w in want)


def coordinates(device: str = "cuda") -> Tensor:
    """A sparse tensor with two entries for row 2."""
    rows = torch.tensor([[0, 2, 2]], device=device)
    return torch.sparse_coo_tensor(rows, torch.ones(3, 2, device=device), (4, 2))


def test_sparse_tensors_are_summed_and_moved() -> None:
    sparse = coordinates("cuda:1")
    want = torch.tensor([[1.0, 1], [0, 0], [2, 2], [0, 0]])
    assert torch.equal(sparse.to_dense().cpu(), want)
    assert torch.equal(sparse.cpu().to_dense(), want)
    assert sparse.to("cuda:0").device == torch.device("cuda:0")
    assert sparse.coalesce().indices().tolist() == [[0, 2]]
    dense = torch.ones(4, 2, device="cuda:1")
    assert torch.equal(dense.add_(sparse, alpha=2).cpu(), 1 + 2 * want)
    assert torch.equal((sparse + sparse).to_dense().cpu(), 2 * want)
    assert torch.equal(sparse.clone().mul_(3).to_dense().cpu(), 3 * want)
    assert torch.equal(sparse.to_dense().cpu(), want)


def test_sparse_gradients_train_as_on_the_cpu() -> None:
    on_cpu = nn.EmbeddingBag(10, 4, sparse=True, mode="sum")
    on_device = copy.deepcopy(on_cpu).to("cuda")
    for module, device in ((on_cpu, "cpu"), (on_device, "cuda")):
        optimizer = torch.optim.SparseAdam(module.parameters(), 0.1)
        ids, offsets = (torch.tensor(t, device=device) for t in ([1, 1, 4], [0, 2]))
        for _ in range(2):
            optimizer.zero_grad()
            module(ids, offsets).sum().backward()
            optimizer.step()
    torch.testing.assert_close(on_device.weight.cpu(), on_cpu.weight)


def test_a_compiled_table_trains_as_an_eager_one() -> None:
    device = "cuda:1"  # not the current one
    eager = TableBatchedEmbeddingBags([TableSpec(50, 16)], optim.SGD(0.1), device=device)
    module = copy.deepcopy(eager)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    ids, offsets = (torch.tensor(t, device=device) for t in ([1, 2, 3], [0, 1, 3]))
    for _ in range(2):
        outputs = [compiled(ids, offsets), eager(ids, offsets)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.sum().backward()
    assert torch.equal(module.table_weights()[0], eager.table_weights()[0])


def test_tensors_are_pickled_with_their_device() -> None:
    x = torch.arange(3, device="cuda:1")
    loaded = pickle.loads(pickle.dumps(x))
    assert loaded.device == x.device
    assert torch.equal(loaded, x)
    file = io.BytesIO()
    torch.save(x, file)
    for where in ("cuda:0", "cuda:1", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=where)
        assert loaded.device == torch.device(where)
        assert loaded.tolist() == [0, 1, 2]


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_of_a_loader_are_pinned(workers: int) -> None:
    dataset = TensorDataset(torch.arange(10.0))
    loader = DataLoader(dataset, batch_size=3, pin_memory=True, num_workers=workers)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    on_device = [batch.to("cuda", non_blocking=True) for batch in batches]
    assert torch.cat(on_device).tolist() == list(range(10))
