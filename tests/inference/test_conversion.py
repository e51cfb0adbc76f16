"""Every kind of trained table becomes a read-only one, with an error that is reported."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from emblib import (
    BackingStore,
    BoundsCheck,
    CachedTTEmbeddingBags,
    DynamicEmbeddingBags,
    DynamicSpec,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    HostRows,
    KeyedJaggedTensor,
    Pooling,
    Precision,
    QuantizedEmbeddingBags,
    RowFormat,
    TableBatchedEmbeddingBags,
    TableBatchedTTEmbeddingBags,
    TableSpec,
    TTCache,
    TTSpec,
    optim,
)
from emblib.inference import InferenceEmbeddingBags, for_inference, quantization_errors
from emblib.storage import QuotientRemainder

IDS, OFFSETS = torch.tensor([3, 9, -(2**60), 5, 3, 40]), torch.tensor([0, 2, 3, 3, 6])


def dynamic(**changes: Any) -> DynamicEmbeddingBags:
    specs = [
        DynamicSpec(64, 12, name="item", default_value=0.5),
        DynamicSpec(64, 5, name="user"),
    ]
    return DynamicEmbeddingBags(specs, optim.Adagrad(0.1), **changes)


def trained(bags: Any, batch: tuple[Tensor, Tensor] = (IDS, OFFSETS)) -> Any:
    device = bags.hyperparams.device
    for _ in range(2):
        bags(*(tensor.to(device) for tensor in batch)).square().sum().backward()
    return bags.eval()


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_tables_read_as_before(
    pooling: Pooling, dtype: torch.dtype, device: torch.device
) -> None:
    bags = trained(dynamic(pooling=pooling, device=device, precision=Precision(dtype)))
    served = for_inference(bags)
    assert isinstance(served, InferenceEmbeddingBags)
    ids = torch.cat([IDS, torch.tensor([10**12, 0, -1])]).to(device)  # and keys without rows
    offsets = torch.tensor([0, 2, 3, 5, 9], device=device)
    with torch.no_grad():
        assert torch.equal(served(ids, offsets), bags(ids, offsets))
    none = for_inference(DynamicEmbeddingBags([DynamicSpec(32, 4)], device=device))
    assert not none(ids, torch.tensor([0, 9], device=device)).any()


def test_rows_in_a_backing_store_are_converted() -> None:
    store = BackingStore(HostRows(256))
    bags = DynamicEmbeddingBags([DynamicSpec(32, 4)], optim.SGD(0.1), backing=store)
    for first in (0, 20, 40):
        bags(torch.arange(first, first + 20), torch.tensor([0, 20])).sum().backward()
    ids = torch.arange(60)
    served = for_inference(bags)
    with torch.no_grad():
        assert torch.equal(served(ids, torch.arange(61)), bags.eval()(ids, torch.arange(61)))


@pytest.mark.parametrize("format", [None, "int8", "int2", "float8_e5m2"])
def test_plain_and_tensor_train_tables(format: str | None) -> None:
    torch.manual_seed(0)
    ids, offsets = torch.tensor([1, 29, 4]), torch.tensor([0, 2, 3])
    plain = TableBatchedEmbeddingBags([TableSpec(30, 8)], precision=Precision(torch.float16))
    train = TableBatchedTTEmbeddingBags([TTSpec(30, 8, ranks=(4,))])
    for source in (plain, train, nn.EmbeddingBag(30, 8, mode="mean", include_last_offset=True)):
        served = for_inference(source, format)
        (error,) = quantization_errors(source, served)
        with torch.no_grad():
            assert_close(
                served(ids, offsets),
                source(ids, offsets),
                rtol=0,
                atol=2.001 * error.largest + 1e-6,
            )
        kept = RowFormat.FP16 if source is plain else RowFormat.FP32
        assert error.format is (kept if format is None else RowFormat(format))
        assert (error.largest == 0) == (format is None)


def test_rows_that_decay_without_lookups_are_converted_as_they_are_read() -> None:
    decay = optim.GlobalDecay(rate=1.0)
    optimizer = optim.RowwiseAdagrad(0.1, global_decay=decay)
    ids, offsets = torch.arange(20), torch.arange(0, 21, 2)
    bags = TableBatchedEmbeddingBags([TableSpec(20, 4, "item")], optimizer)
    configs = [
        EmbeddingBagConfig(20, 8, "dense", ["dense"]),
        EmbeddingBagConfig(20, 8, "composed", ["composed"], storage=QuotientRemainder(7, "add")),
    ]
    collection = EmbeddingBagCollection(configs, optimizer=optimizer)
    features = ["dense", "composed"]
    batch = KeyedJaggedTensor(features, ids.repeat(2), lengths=torch.full((20,), 2))
    for num_ids in (20, 4, 4, 4):  # the others decay
        bags(ids[:num_ids], offsets[: num_ids // 2 + 1]).square().sum().backward()
        lengths = torch.full((num_ids,), 2)
        part = KeyedJaggedTensor(features, ids[:num_ids].repeat(2), lengths=lengths)
        collection(part).values().square().sum().backward()
    with torch.no_grad():
        assert_close(for_inference(bags)(ids, offsets), bags(ids, offsets))
        expected = collection(batch).values()
        assert_close(for_inference(collection)(batch).values(), expected)
        assert_close(collection.quantized(8)(batch).values(), expected, atol=0.01, rtol=0.01)


def test_invalid_ids_are_handled_as_before() -> None:
    fatal = BoundsCheck.FATAL
    spec = TTSpec(30, 8, ranks=(4,))
    for source in (
        TableBatchedEmbeddingBags([TableSpec(30, 8)], bounds_check=fatal),
        TableBatchedTTEmbeddingBags([spec], bounds_check=fatal),
        CachedTTEmbeddingBags([spec], TTCache(rows=32), bounds_check=fatal),
    ):
        served = for_inference(source)
        assert served.bounds_check is fatal
        with pytest.raises(RuntimeError, match="bounds_check"):
            served(torch.tensor([30]), torch.tensor([0, 1]))


@pytest.mark.parametrize("formats", [8, torch.float16, {"item": "int4"}])
def test_wrong_formats_are_named(formats: Any) -> None:
    collection = EmbeddingBagCollection([EmbeddingBagConfig(30, 8, "item")])
    for source in (nn.EmbeddingBag(30, 8, mode="sum"), collection):
        with pytest.raises(TypeError, match="must be a RowFormat or its name"):
            for_inference(source, formats)
    with pytest.raises(TypeError, match="of a model convert each module of tables"):
        for_inference(nn.Sequential(collection))


def test_rows_of_a_dtype_without_a_format_become_float32() -> None:
    source = nn.Embedding(30, 8, dtype=torch.float64)
    served = for_inference(source)
    assert served.formats == (RowFormat.FP32,)
    assert torch.equal(served.to_dense(0), source.weight.detach().float())


def test_stored_rows_of_a_cached_train_are_converted() -> None:
    torch.manual_seed(0)
    cache = TTCache(4)
    source = CachedTTEmbeddingBags([TTSpec(30, 8, ranks=(4,))], cache, optim.SGD(0.1))
    ids, offsets = torch.tensor([1, 29, 4, 1]), torch.tensor([0, 2, 4])
    source(ids, offsets).sum().backward()
    source.populate()
    source(ids, offsets).square().sum().backward()  # moves stored rows away from the cores
    assert source.cached_ids(0).numel() > 0
    served = for_inference(source)
    assert served.formats == (RowFormat.FP32,)
    with torch.no_grad():
        assert_close(served(ids, offsets), source.eval()(ids, offsets))
    (error,) = quantization_errors(source, for_inference(source, "int8"))
    assert 0 < error.largest < 0.01
    assert error.rows == 30


def test_errors_are_those_of_the_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {
        "a": torch.randn(70_000, 3, generator=generator),
        "b": torch.randn(100, 40, generator=generator),
    }
    served = for_inference(weights, ["int8", "int2"])
    for table, (name, error) in enumerate(
        zip(weights, quantization_errors(weights, served), strict=True)
    ):
        assert isinstance(served, QuantizedEmbeddingBags)
        differences = (served.to_dense(table) - weights[name]).double()
        assert (error.table, error.rows) == (name, weights[name].size(0))
        assert_close(error.largest, float(differences.abs().max()))
        assert_close(error.rms, float(differences.square().mean().sqrt()))
        rms = float(weights[name].square().mean().sqrt())
        assert_close(error.relative, error.rms / rms, rtol=0.2, atol=0)
    assert error.nbytes == 100 * 16
    bags = trained(dynamic())
    errors = quantization_errors(bags, for_inference(bags, "int4"))
    assert [error.rows for error in errors] == [3, 3]
    assert all(0 < error.largest < 0.1 for error in errors)
    exact = quantization_errors(bags, for_inference(bags))
    assert [(error.largest, error.rms, error.relative) for error in exact] == [(0, 0, 0)] * 2


def test_rows_that_are_not_finite_have_no_error_where_they_are_equal() -> None:
    weights = torch.ones(4, 2)
    weights[1], weights[2, 0] = float("inf"), float("nan")
    (exact,) = quantization_errors(weights, for_inference(weights))
    assert (exact.largest, exact.rms) == (0.0, 0.0)
    weights[3, 1] = 3.4e38  # is infinity in bfloat16
    (error,) = quantization_errors(weights, for_inference(weights, "bfloat16"), bag=1)
    assert (error.largest, error.rms) == (float("inf"), float("inf"))
    assert math.isnan(error.relative)


def test_wrong_use_is_refused() -> None:
    served = for_inference(torch.ones(4, 2))
    with pytest.raises(TypeError, match="read-only already"):
        for_inference(served)
    with pytest.raises(TypeError, match="source must be TableBatchedEmbeddingBags"):
        for_inference(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="within"):
        for_inference(torch.full((2, 2), 1e6), "int8")
    with pytest.raises(TypeError, match="served must be a result of for_inference, got NoneType"):
        quantization_errors(torch.ones(4, 2), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="fewer rows than the source"):
        quantization_errors(torch.ones(5, 2), served)
    with pytest.raises(ValueError, match="more rows than the source"):
        quantization_errors(torch.ones(3, 2), served)
    with pytest.raises(ValueError, match="has dim 2, in the source 3"):
        quantization_errors(torch.ones(4, 3), served)
    with pytest.raises(ValueError, match="source has 2 tables, served are 1"):
        quantization_errors({"a": torch.ones(4, 2), "b": torch.ones(4, 2)}, served)
    with pytest.raises(ValueError, match="bag must be >= 1, got 0"):
        quantization_errors(torch.ones(4, 2), served, bag=0)
