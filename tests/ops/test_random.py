"""Counter-based random numbers: known answers, statistics, independence of threads."""

import pytest
import torch

from emblib.ops.primitives import fill_uniform_, new_seed
from emblib.reference import random


def test_philox_known_answers() -> None:
    # From the known-answer file of Random123, the authors' own implementation.
    zeros = random.philox(0, torch.tensor([0]))[0].tolist()
    assert zeros == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("numel", [0, 1, 3, 64, 65, 1000, 70_001])
def test_matches_reference(device: torch.device, dtype: torch.dtype, numel: int) -> None:
    seed = 0x123456789ABCDEF + numel
    for low, high in ((-0.5, 1.5), (-0.1, 0.2)):  # the latter are not numbers of float32
        out = torch.empty(numel, dtype=dtype, device=device)
        fill_uniform_(out, low, high, seed)
        assert torch.equal(out.cpu(), random.uniform(numel, low, high, seed).float().to(dtype))


def test_is_uniform(device: torch.device) -> None:
    out = torch.empty(1_000_000, device=device)
    fill_uniform_(out, 0.0, 1.0, 7)
    counts = torch.histc(out.cpu(), bins=100, min=0.0, max=1.0)
    chi_square = float(((counts - 10_000) ** 2 / 10_000).sum())
    assert 54 < chi_square < 160, "99 degrees of freedom: outside with probability 1e-4"
    assert float(out.min()) >= 0.0
    assert float(out.max()) < 1.0
    neighbours = torch.corrcoef(torch.stack([out[:-1], out[1:]]).cpu())[0, 1]
    assert abs(float(neighbours)) < 0.005


def test_same_bits_on_any_number_of_threads(thread_counts: list[int]) -> None:
    results = []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(torch.empty(300_001))
        fill_uniform_(results[-1], -1.0, 1.0, 99)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_seeds_follow_torch() -> None:
    torch.manual_seed(3)
    first = new_seed()
    assert first != new_seed()
    torch.manual_seed(3)
    assert new_seed() == first


def test_opcheck(device: torch.device) -> None:
    torch.library.opcheck(fill_uniform_, (torch.empty(10, device=device), 0.0, 1.0, 5))


def test_wrong_input_is_refused() -> None:
    tensor = torch.zeros(4, 4)
    for arguments, message in (
        ((tensor.t()[:2], 0.0, 1.0, 0), "must be contiguous"),
        ((tensor, 1.0, 0.0, 0), "low <= high"),
        ((tensor, float("nan"), 1.0, 0), "finite"),
        ((tensor, -3e38, 3e38, 0), "high - low finite in float32"),
        ((tensor, 0.0, 1e39, 0), "finite in float32"),
        ((tensor.half(), 0.0, 65_505.0, 0), "finite in float16"),
        ((tensor.bfloat16(), 0.0, 3.4e38, 0), "finite in bfloat16"),
        ((tensor.double(), 0.0, 1.0, 0), "float32, float16 or bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            fill_uniform_(*arguments)
    assert not tensor.any()
