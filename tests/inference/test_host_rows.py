"""Tables in host memory with stored rows on a device read as the tables themselves."""

from typing import Any

import pytest
import torch

from emblib import BoundsCheck, Pooling, QuantizedEmbeddingBags, TableSpec
from emblib.inference import HostEmbeddingBags, top_rows

MASKS = {
    "item": torch.arange(40) % 3 == 0,
    "user": torch.arange(9) < 4,
}


def tables(**options: Any) -> QuantizedEmbeddingBags:
    generator = torch.Generator().manual_seed(0)
    bags = QuantizedEmbeddingBags(
        [TableSpec(40, 8, "item"), TableSpec(9, 8, "user")],
        feature_tables=[0, 1, 0],
        formats=["int8", "float16"],
        device="cpu",
        **options,
    )
    for table, spec in enumerate(bags.tables):
        bags.write_rows(table, torch.randn(spec.rows, spec.dim, generator=generator))
    return bags


def batch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.tensor([0, 1, 39, -1, 3, 3, 8, 3, 5, 1, 0, 2, 38])
    offsets = torch.tensor([0, 3, 6, 6, 9, 10, 13])
    return ids.to(device), offsets.to(device), torch.linspace(0.5, 2, 13, device=device)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN, Pooling.NONE])
def test_rows_of_both_memories_are_added(pooling: Pooling, device: torch.device) -> None:
    source = tables(pooling=pooling)
    served = HostEmbeddingBags(source, MASKS, device)
    ids, offsets, weights = batch(device)
    want = source(ids.cpu(), offsets.cpu())
    torch.testing.assert_close(served(ids, offsets).cpu(), want)
    if pooling is Pooling.NONE:
        assert torch.equal(served(ids.int(), offsets).cpu(), want)  # no sums, so the same bits
    else:
        want = source(ids.cpu(), offsets.cpu(), weights.cpu())
        torch.testing.assert_close(served(ids, offsets, weights).cpu(), want)
    sizes = [[3], [1], [2]]
    varied = source(ids.cpu(), offsets.cpu(), batch_sizes=sizes)
    torch.testing.assert_close(served(ids, offsets, batch_sizes=sizes).cpu(), varied)
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    assert served(empty, torch.zeros(7, dtype=torch.int64, device=device)).sum() == 0


def test_bytes_dtype_and_where_rows_are(device: torch.device) -> None:
    source = tables(output_dtype=torch.float16)
    served = HostEmbeddingBags(source, MASKS, device)
    assert served(*batch(device)[:2]).dtype == torch.float16
    sizes = served.nbytes()
    assert sizes["host"] == source.packed.nbytes
    assert 0 < sizes["weights"] < sizes["host"]
    assert served.to(device) is served
    with pytest.raises(RuntimeError, match="make another HostEmbeddingBags"):
        served.to("meta")
    if device.type == "cpu":
        assert served.rows.packed is source.packed  # the rows, not a copy


def test_invalid_ids_are_reported() -> None:
    """On a GPU by the kernel of the lookup, as of any table."""
    served = HostEmbeddingBags(tables(bounds_check=BoundsCheck.FATAL), MASKS, "cpu")
    ids, offsets, _ = batch(torch.device("cpu"))
    ids[0] = 40
    with pytest.raises(RuntimeError, match=r"must be in \[0, 40\)"):
        served(ids, offsets)


def test_wrong_use_is_refused() -> None:
    with pytest.warns(UserWarning, match="tables keep their dtypes"):
        HostEmbeddingBags(tables(), MASKS, "cpu").half()
    with pytest.raises(ValueError, match=r"\['user'\] have none"):
        HostEmbeddingBags(tables(), {"item": top_rows(torch.rand(40), 0.1)}, "cpu")
    with pytest.raises(ValueError, match="must be bool"):
        HostEmbeddingBags(tables(), {**MASKS, "user": torch.ones(8, dtype=torch.bool)}, "cpu")
    with pytest.raises(TypeError, match="must be QuantizedEmbeddingBags, got Linear"):
        HostEmbeddingBags(torch.nn.Linear(2, 2), {}, "cpu")
    on_meta = QuantizedEmbeddingBags([TableSpec(4, 8)], device="meta")
    with pytest.raises(ValueError, match="must be on the CPU"):
        HostEmbeddingBags(on_meta, {}, "cpu")
