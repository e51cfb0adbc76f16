"""DynamicEmb's helpers: names, files, sizes of states, tables of a model, own admission rules."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import emblib.compat.dynamicemb as ours
from emblib.compat.dynamicemb import (
    AdmissionStrategy,
    EmbOptimType,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from emblib.dynamic.keys import owner
from emblib.dynamic.saving.dumps import DumpError
from tests.compat.dynamicemb_cases import keys_of, look_up, one_table, rows_of


def test_modules_have_their_names_and_raise_for_what_there_is_not() -> None:
    with pytest.raises(NotImplementedError, match=r"a storage is an emblib\.RowStore"):
        ours.types.Storage()
    with pytest.raises(NotImplementedError, match="OptimizerArgs of DynamicEmb"):
        ours.optimizer.OptimizerArgs(learning_rate=0.1)
    assert ours.shard.embedding.DynamicEmbeddingCollectionSharder is (
        ours.DynamicEmbeddingCollectionSharder
    )
    assert ours.types.DEMB_TABLE_ALIGN_SIZE == ours.BUCKET_ALIGNMENT


def test_types_have_two_names() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint64):
        assert ours.dyn_emb_to_torch(ours.torch_to_dyn_emb(dtype)) is dtype
        assert ours.dtype_to_bytes(dtype) == torch.empty(1, dtype=dtype).element_size()
    with pytest.raises(ValueError, match="complex64"):
        ours.torch_to_dyn_emb(torch.complex64)
    assert ours.string_to_evict_strategy("KLfu") is ours.DynamicEmbEvictStrategy.LFU
    assert ours.string_to_evict_strategy("KEpochLru") is ours.DynamicEmbEvictStrategy.EPOCH_LRU
    with pytest.raises(ValueError, match="an eviction strategy is one of"):
        ours.string_to_evict_strategy("lru")


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (EmbOptimType.SGD, 0),
        (EmbOptimType.ADAM, 16),
        (EmbOptimType.EXACT_ADAGRAD, 8),
        (EmbOptimType.EXACT_ROWWISE_ADAGRAD, 1),
    ],
)
def test_states_of_a_dump_have_the_stated_size(
    kind: EmbOptimType, numbers: int, tmp_path: Path
) -> None:
    module = one_table(dim=8, optimizer=kind)
    look_up(module, [3, 5]).sum().backward()
    module.dump(str(tmp_path), optim=True)
    files, ranks = ours.find_files(str(tmp_path), "t0", "opt_values")
    assert ours.get_optimizer_ckpt_state_dim(kind, 8) == numbers
    assert ranks == bool(numbers)
    assert sum(Path(file).stat().st_size for file in files) == 2 * numbers * 4


def test_files_of_a_dump_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = one_table()
    look_up(module, [3, 5])
    module.dump(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    path_from_home = f"~/{tmp_path.name}"
    assert ours.find_files(path_from_home, "t0", "emb_keys") == (
        [ours.encode_checkpoint_file_path(path_from_home, "t0", 0, 1, "keys")],
        1,
    )
    path = ours.encode_checkpoint_file_path(str(tmp_path), "t0", 0, 1, "keys")
    assert ours.find_files(str(tmp_path), "t0", "emb_keys") == ([path], 1)
    assert torch.from_file(path, size=2, dtype=torch.int64).sort().values.tolist() == [3, 5]
    assert Path(ours.encode_meta_json_file_path(str(tmp_path), "t0")).exists()
    assert ours.find_files(str(tmp_path), "t0", "counter_keys") == ([], 0)
    with pytest.raises(ValueError, match="a dump has no 'emb_rows'"):
        ours.encode_checkpoint_file_path(str(tmp_path), "t0", 0, 1, "rows")
    Path(path).rename(ours.encode_checkpoint_file_path(str(tmp_path), "t0", 1, 2, "keys"))
    with pytest.raises(DumpError, match="not whole"):
        ours.find_files(str(tmp_path), "t0", "emb_keys")


def test_tables_of_a_model_are_found() -> None:
    first, second = one_table(), one_table()
    model = nn.ModuleDict({"a": first, "b": nn.Sequential(second, nn.Linear(4, 1))})
    assert ours.get_dynamic_emb_module(model) == [first, second]
    listed: list[object] = []
    ours.check_emb_collection_modules(model, listed, set())
    assert listed == [first, second]
    assert ours.find_sharded_modules(model) == []
    assert first.tables["t0"].size() == 0
    assert not isinstance(model, ours.ShardedDynamicEmbeddingCollection)


class EvenKeys(AdmissionStrategy):
    """Admit even keys from their second use on."""

    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        return (keys % 2 == 0) & (frequencies >= 2)


class FrequentEvenKeys(FrequencyAdmissionStrategy):
    """The same, derived from the strategy that admits by frequency."""

    def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
        return super().admit(keys, frequencies) & (keys % 2 == 0)


@pytest.mark.parametrize("strategy", [EvenKeys(), FrequentEvenKeys(2)])
def test_an_own_admission_strategy_decides(strategy: AdmissionStrategy) -> None:
    module = one_table(admit_strategy=strategy, admission_counter=KVCounter(64))
    look_up(module, [2, 3])
    assert keys_of(module) == []
    look_up(module, [2, 3, 4, 4])
    assert keys_of(module) == [2, 4]
    assert rows_of(module, [2, 3])[:, 0].tolist() == [2.0, 0.0]


def test_an_answer_of_another_size_raises_and_inserts_nothing() -> None:
    class Wrong(AdmissionStrategy):
        def admit(self, keys: Tensor, frequencies: Tensor) -> Tensor:
            return torch.ones(keys.numel() + 1, dtype=torch.bool)

    module = one_table(admit_strategy=Wrong(), admission_counter=KVCounter(64))
    with pytest.raises(ValueError, match=r"rule of table 't0' must return bool \[2\], got .*\[3\]"):
        look_up(module, [2, 3])
    assert keys_of(module) == []


def test_a_cache_counts_the_hits_of_the_last_forward() -> None:
    module = one_table(max_capacity=128, local_hbm_for_values=32 * 16, caching=True)
    assert one_table().cache is None
    assert module.cache is not None
    module.enable_prefetch = True
    module.set_record_cache_metrics(True)
    look_up(module, range(20))
    assert module.cache.cache_metrics.tolist() == [20, 0]
    look_up(module, range(10, 30))
    assert module.cache.cache_metrics.tolist() == [20, 10]
    module.set_record_cache_metrics(False)
    look_up(module, range(10, 30))
    assert module.cache.cache_metrics.tolist() == [20, 10]


def test_a_rank_of_many_is_filled_with_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    module = one_table(max_capacity=64)
    monkeypatch.setattr(module, "owns", lambda keys: owner(keys, 1024) == 5)
    module.fill_tables(0.5)
    keys, _ = module.export_keys_values("t0", "cpu")
    assert keys.numel() == 32
    assert module.owns(keys).all()


def test_exported_rows_are_float32_whatever_the_default_is() -> None:
    module = one_table()
    look_up(module, [3, 5])
    torch.set_default_dtype(torch.float64)
    try:
        keys, rows = module.export_keys_values("t0", "cpu", batch_size=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert rows.dtype is torch.float32
    assert rows[:, 0].tolist() == keys.tolist()
    assert one_table().export_keys_values("t0", "cpu")[1].shape == (0, 4)


def test_tables_that_are_full_enough_stay_as_they_are() -> None:
    module = one_table(max_capacity=64)
    look_up(module, range(30))
    module.fill_tables(0.5, tolerance=0.1)
    assert module.tables["t0"].size() == 30
    module.fill_tables(0.5)
    assert module.tables["t0"].size() == 32
    for tolerance in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="tolerance must be at least 0"):
            module.fill_tables(0.9, tolerance=tolerance)
    unread = ours.BatchedDynamicEmbeddingTablesV2(
        [ours.DynamicEmbTableOptions(dim=4, max_capacity=64) for _ in range(2)],
        feature_table_map=[0],
    )
    with pytest.raises(ValueError, match="'t1' cannot be filled, as no feature reads it"):
        unread.fill_tables(0.5)
