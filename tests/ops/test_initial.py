"""First values of new rows: against the reference, as distributions, as functions of the key."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from emblib.init import Constant, Initializer, KeyModulo, Normal, TruncatedNormal, Uniform
from emblib.ops.hash import initial_rows_, rule_of
from emblib.ops.primitives import fill_uniform_
from emblib.reference import hash
from emblib.specs import DynamicSpec

ROOT = Path(__file__).resolve().parents[2]
INITIALIZERS = [
    Uniform(),
    Uniform(0.5, 2.0),
    Normal(1.0, 3.0),
    TruncatedNormal(0.0, 0.1),
    TruncatedNormal(1.0, 2.0, 0.9, 5.0),
    Constant(2.5),
    KeyModulo(),
]
KEYS = [0, 1, -1, -4, 2**63 - 1, -(2**63), 12345678901, 99_999, 100_000]
SEED = 0x123456789ABCDE


def _call(
    row_buffers: list[Tensor], places: Any, initializers: list[Initializer], slots: list[int]
) -> tuple[Any, ...]:
    """The arguments for `KEYS`, dealt out to the tables, as `misses` would have them."""
    tables = len(initializers)
    rules = [[rule_of(x, DynamicSpec(100, 8))] * len(row_buffers) for x in initializers]
    offsets = [len(KEYS) * t // tables for t in range(tables + 1)]
    device = row_buffers[0].device
    return (
        row_buffers,
        torch.tensor(places, device=device),
        torch.tensor(rules, dtype=torch.float64, device=device),
        torch.tensor(KEYS[::-1], device=device),
        torch.arange(len(KEYS)).flip(0).to(device),
        torch.tensor(offsets, device=device),
        torch.tensor(slots, device=device),
        SEED,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=repr)
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 130])
def test_matches_reference(
    device: torch.device, initializer: Initializer, dtype: torch.dtype, dim: int
) -> None:
    stride, rows = dim + 1, len(KEYS)
    slots = [3, 1, -1, 0, 8, 2, 7, -1, 5]
    plane = torch.full((2 + rows * stride,), 9.0, dtype=dtype, device=device)
    want = plane.cpu().clone()
    call = _call([plane], [[[2, stride, rows, dim, 77]]], [initializer], slots)
    initial_rows_(*call)
    hash.initial_rows_([want], *(x.cpu() for x in call[1:-1]), SEED)
    assert_close(plane.cpu(), want, rtol=1e-5 if dtype is torch.float32 else 0.01, atol=1e-6)
    untouched = want == 9.0
    assert torch.equal(plane.cpu()[untouched], want[untouched]), "-1 and gaps are left alone"


def test_uniform_and_debug_are_exact(device: torch.device) -> None:
    for initializer in (Uniform(-0.25, 1.0), KeyModulo(), Constant(0.1)):
        plane = torch.zeros(len(KEYS) * 8, device=device)
        want = plane.cpu().clone()
        call = _call([plane], [[[0, 8, 9, 8, 3]]], [initializer], list(range(9)))
        initial_rows_(*call)
        hash.initial_rows_([want], *(x.cpu() for x in call[1:-1]), SEED)
        assert torch.equal(plane.cpu(), want)


def test_row_buffers_and_tables(device: torch.device) -> None:
    """Weights of two tables of unequal dims, and a state of one number per row."""
    weights = torch.zeros(9 * 4 + 9 * 6, device=device)
    state = torch.zeros(18, dtype=torch.bfloat16, device=device)
    places = [[[0, 4, 9, 4, 1], [0, 1, 9, 1, 1]], [[36, 6, 9, 6, 2], [9, 1, 9, 1, 2]]]
    call = _call(
        [weights, state], places, [Constant(1.0), Constant(2.0)], [0, 1, 2, 3, 0, 1, 2, 3, 4]
    )
    initial_rows_(*call)
    assert weights.tolist() == [1.0] * 16 + [0.0] * 20 + [2.0] * 30 + [0.0] * 24
    assert state.tolist() == [1.0] * 4 + [0.0] * 5 + [2.0] * 5 + [0.0] * 4


def _rows_of(keys: Tensor, initializer: Initializer, stream: int = 0, dim: int = 64) -> Tensor:
    n = keys.numel()
    plane = torch.zeros(n * dim)
    initial_rows_(
        [plane],
        torch.tensor([[[0, dim, n, dim, stream]]]),
        torch.tensor([[rule_of(initializer, DynamicSpec(100, 8))]], dtype=torch.float64),
        keys,
        torch.arange(n),
        torch.tensor([0, n]),
        torch.arange(n),
        SEED,
    )
    return plane.view(n, dim)


def test_a_row_depends_on_its_key_alone() -> None:
    keys = torch.tensor(KEYS)
    rows = _rows_of(keys, Normal())
    assert torch.equal(_rows_of(keys.flip(0), Normal()).flip(0), rows)
    assert not torch.equal(_rows_of(keys, Normal(), stream=1), rows)
    assert rows.unique(dim=0).size(0) == len(KEYS)
    assert torch.equal(_rows_of(keys, Normal(), dim=16), rows[:, :16])


@pytest.mark.parametrize("initializer", INITIALIZERS[:5], ids=repr)
def test_distribution(initializer: Initializer) -> None:
    """The share of values below each decile of the distribution, within five deviations."""
    x = _rows_of(torch.arange(4000), initializer).flatten().double()
    if isinstance(initializer, Uniform):
        low, high = (-0.1, 0.1) if initializer.low is None else (initializer.low, initializer.high)
        share = (x - low) / (high - low)
    else:
        share = torch.special.ndtr((x - initializer.mean) / initializer.std)
        if isinstance(initializer, TruncatedNormal):
            first, last = initializer.probabilities
            share = (share - first) / (last - first)
            low, high = torch.tensor(initializer.bounds).tolist()  # as float32 has them
            assert low <= float(x.min())
            assert float(x.max()) <= high
    for decile in range(1, 10):
        p = decile / 10
        assert abs(float((share < p).double().mean()) - p) < 5 * math.sqrt(p * (1 - p) / x.numel())


def test_same_bits_on_any_number_of_threads(thread_counts: list[int]) -> None:
    keys, results = torch.arange(3000) * 7919, []
    for threads in thread_counts:
        torch.set_num_threads(threads)
        results.append(_rows_of(keys, Normal()))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_opcheck(device: torch.device) -> None:
    plane = torch.zeros(len(KEYS) * 8, device=device)
    call = _call([plane], [[[0, 8, 9, 8, 3]]], [Normal()], list(range(9)))
    torch.library.opcheck(torch.ops.emblib.hash_initial_rows_.default, call)


def test_wrong_input_is_refused() -> None:
    plane = torch.zeros(72)
    good = list(_call([plane], [[[0, 8, 9, 8, 3]]], [Normal()], list(range(9))))
    for at, value, message in (
        (1, torch.tensor([[[1, 8, 9, 8, 3]]]), "inside row buffer 0"),
        (1, torch.tensor([[[0, 8, 2**62, 8, 3]]]), "inside row buffer 0"),
        (1, torch.tensor([[0, 8, 9, 8, 3]]), r"\[tables, row_buffers, 5\]"),
        (2, torch.zeros(1, 1, 6, dtype=torch.float64), r"\[tables, row_buffers, 7\]"),
        (4, torch.full((9,), 9), "positions of ids"),
        (5, torch.tensor([0, 10]), "offsets must ascend"),
        (6, torch.arange(8), "one entry per missing key"),
        (0, [plane.double()], "float32, float16 or bfloat16"),
    ):
        call = [*good[:at], value, *good[at + 1 :]]
        with pytest.raises(RuntimeError, match=message):
            initial_rows_(*call)
    assert not plane.any()


_BITS = """
import sys, torch
from tests.ops.test_initial import INITIALIZERS, _rows_of, _uniform_values
rows = [_rows_of(torch.arange(100) * 7919, x) for x in INITIALIZERS]
torch.save([*rows, *_uniform_values()], sys.argv[1])
"""


def _uniform_values() -> list[torch.Tensor]:
    """Values of `fill_uniform_` whose last bit shows whether sums of products are rounded once."""
    values = [torch.empty(4096, dtype=d) for d in (torch.float32, torch.float16, torch.bfloat16)]
    for tensor in values:
        fill_uniform_(tensor, -0.1, 0.3, 7)
    return values


def test_same_bits_on_older_machines(tmp_path: Path) -> None:
    """With the kernels of any x86-64 as with those of this machine."""
    path = tmp_path / "rows.pt"
    environment = {**os.environ, "EMBLIB_ISA": "baseline", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", _BITS, str(path)], env=environment, check=True)
    saved = torch.load(path)
    for initializer, rows in zip(INITIALIZERS, saved, strict=False):
        assert torch.equal(rows, _rows_of(torch.arange(100) * 7919, initializer)), initializer
    for values, expected in zip(saved[len(INITIALIZERS) :], _uniform_values(), strict=True):
        assert torch.equal(values, expected)
