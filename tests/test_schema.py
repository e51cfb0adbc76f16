"""Every op of csrc/schema.cpp is complete: shape, CPU and CUDA kernel, reference, opcheck case."""

import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from emblib.ops import codes
from emblib.reference import cache as row_cache
from emblib.reference import hash, pages, quant, random, route, tbe, tiers, tt
from emblib.reference import hash as key_table

ROOT = Path(__file__).resolve().parents[1]

# What each op computes, in plain PyTorch; or why it has no meaning of its own to define.
REFERENCES: dict[str, Callable[..., object] | str] = {
    "group": tbe.group,
    "group_inverse": "the inverse of the permutation of `group`, which the tests state in one line",
    "bounds_check": tbe.repair_offsets,
    "tbe_lookup": tbe.lookup,
    "tbe_group": tbe.group,
    "tbe_row_grads": "autograd of reference.tbe.lookup",
    "tbe_update_": tbe.update_,
    "tbe_sample_weight_grad": tbe.sample_weight_grad,
    "hash_find": key_table.HashModel.find,
    "hash_find_batch": "hash_find, whose reference it has",
    "hash_touch_": "HashModel.touch, then HashModel.misses of reference.hash",
    "hash_touch_batch_": "hash_touch_, whose reference it has",
    "hash_grow_": key_table.HashModel.grow,
    "hash_insert_": key_table.HashModel.insert,
    "hash_insert_batch_": "hash_touch_, hash_insert_, hash_initial_rows_ and tbe_group, whose "
    "references it has",
    "hash_find_rows": "HashModel.find, then read_rows of reference.hash",
    "hash_read_rows": key_table.read_rows,
    "hash_start_rows_": key_table.start_rows_,
    "hash_write_rows_": key_table.write_rows_,
    "hash_add_rows_": key_table.add_rows_,
    "hash_evicted_rows": key_table.evicted_rows,
    "hash_erase_": key_table.HashModel.erase,
    "hash_expire_": key_table.HashModel.expire,
    "hash_initial_rows_": hash.initial_rows_,
    "hash_count_": hash.HashModel.count,
    "sketch_count_": hash.sketch_count_,
    "tier_insert_batch_": "hash_insert_batch_, hash_find and tier_swap_, whose references it has",
    "tier_find_batch_": "hash_find and tier_read, whose references it has",
    "tier_put_": "hash_touch_, hash_insert_, tier_read and tier_write_, whose references it has",
    "tier_swap_": tiers.swap_,
    "tier_read": tiers.read,
    "tier_write_": tiers.write_,
    "page_crc32": pages.page_crc32,
    "pages_without_mark": pages.pages_without_mark,
    "mark_pages_": pages.mark_pages_,
    "file_slots": pages.file_slots,
    "fetch_pages": "changes no value: it reads pages into memory",
    "tt_keys": tt.keys,
    "tt_stored": tt.split_stored,
    "tt_count_": tt.count_lookups_,
    "tt_plan": "which halves the rows share: only how tt_rows saves work, checked by its result",
    "tt_rows": tt.rows,
    "tt_core_grads": tt.core_grads,
    "tt_update_": "calls tt_core_grads and update_rows_, whose references it has",
    "cache_plan_": row_cache.CacheModel.plan,
    "cache_evictions": row_cache.CacheModel.plan,
    "cache_locate": row_cache.CacheModel.locate,
    "cache_lookup_slots": "the slot of the row of each lookup, which the tests state in one line",
    "cache_move_": row_cache.move,
    "cache_flush_": row_cache.flush,
    "cache_prefetch_": "calls bounds_check_, tbe_group, cache_plan_, cache_move_ and "
    "cache_lookup_slots, whose references it has",
    "gather_segments": route.gather_segments,
    "route_lengths": route.route_lengths,
    "route_ids": route.route_ids,
    "combine": route.combine,
    "combine_backward": route.combine_backward,
    "combine_backward_": route.combine_backward,
    "quantize_rows_": quant.quantize_rows,
    "quant_lookup": quant.lookup,
    "quant_lookup_checked_": "calls bounds_check_ and quant_lookup, whose references it has",
    "map_ids": quant.map_ids,
    "update_rows_": tt.update_rows_,
    "advise_huge_pages_": "changes no value",
    "bounds_check_": "calls bounds_check, whose reference it has",
    "tbe_lookup_checked_": "calls bounds_check and tbe_lookup, whose references it has",
    "tbe_backward_": "calls tbe_group and tbe_update_, whose references it has",
    "tt_lookup_checked_": "calls tt_keys, tbe_group, tt_plan, tt_rows, tbe_lookup: see those",
    "tt_backward_": "calls tbe_row_grads and tt_update_, whose references it has",
    "fill_uniform_": random.uniform,
}

# Ops without a CUDA kernel, and why.
CPU_ONLY = {
    "advise_huge_pages_": "the memory of a GPU has no page size to ask for",
    "hash_find_batch": "like hash_insert_batch_",
    "hash_touch_batch_": "like hash_insert_batch_",
    "hash_insert_batch_": "a GPU must not wait for the host, which chooses between it and others",
    "hash_count_": "on a GPU several ops count, because the host must not wait for growth",
    "sketch_count_": "on a GPU ops of torch count, of which every shape is known to the host",
    "cache_evictions": "rows are journaled for tables in files, which a GPU cannot have",
    "tier_swap_": "on a GPU rows are packed by several ops, since the host waits for them anyway",
    "tier_insert_batch_": "like hash_insert_batch_, and its stores are in host memory",
    "tier_find_batch_": "like tier_insert_batch_",
    "tier_put_": "a store of rows is in host memory",
    "tier_read": "a store of rows is in host memory",
    "tier_write_": "a store of rows is in host memory",
    **dict.fromkeys(
        ("page_crc32", "pages_without_mark", "mark_pages_", "file_slots", "fetch_pages"),
        "files are mapped into host memory",
    ),
}


@cache
def schemas() -> dict[str, str]:
    """Op name -> schema, as csrc/schema.cpp has them."""
    source = (ROOT / "csrc" / "schema.cpp").read_text()
    found = {}
    for definition in re.findall(r"m\.def\(((?:\s*\"[^\"]*\")+)\s*\)", source):
        text = "".join(re.findall(r'"([^"]*)"', definition))
        found[text.partition("(")[0]] = text
    assert len(found) == source.count("m.def("), "a definition that this test does not understand"
    return found


def _registered_in(pattern: str, dispatch_key: str) -> set[str]:
    """Ops that the sources matching `pattern` register a kernel for."""
    names: set[str] = set()
    for path in (ROOT / "csrc").glob(pattern):
        block = rf"STABLE_TORCH_LIBRARY_IMPL\(emblib, {dispatch_key}, m\) \{{(.*?)\n?\}}\n"
        for body in re.findall(block, path.read_text(), re.DOTALL):
            names.update(re.findall(r"EMB_IMPL\(m, [\w:]+, (\w+)\)", body))
    return names


@cache
def _opchecked() -> set[str]:
    """Ops named as the subject of a `torch.library.opcheck` or in a table of cases for it."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if "torch.library.opcheck(" in text:
            found.update(re.findall(r"opcheck\(\s*(?:torch\.ops\.emblib\.|ops\.)?(\w+)", text))
            found.update(re.findall(r'^\s+"(\w+)": \(', text, re.MULTILINE))
    return found


def test_the_sources_and_the_library_have_the_same_ops() -> None:
    names = [n.partition("::") for n in torch._C._dispatch_get_all_op_names()]
    loaded = {name.partition(".")[0] for namespace, _, name in names if namespace == "emblib"}
    assert loaded == set(schemas()), "rebuild the native library: make native"


@pytest.mark.parametrize("op", sorted(schemas()))
def test_schema_is_the_one_loaded(op: str) -> None:
    loaded = getattr(torch.ops.emblib, op).default._schema
    assert str(torch._C.parse_schema("emblib::" + schemas()[op])) == str(loaded)


@pytest.mark.parametrize("op", sorted(schemas()))
def test_takes_no_strings(op: str) -> None:
    # torch's stable headers leak 48 bytes for each: choices are numbers, see emblib/ops/codes.py.
    arguments = getattr(torch.ops.emblib, op).default._schema.arguments
    assert not [a.name for a in arguments if "str" in str(a.type)]


@pytest.mark.parametrize("op", sorted(schemas()))
def test_takes_no_optional_argument_that_it_writes(op: str) -> None:
    # Inductor fails to compile a call that leaves one out: "getitem is not an OpOverload".
    arguments = getattr(torch.ops.emblib, op).default._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    assert not [a.name for a in written if "Optional" in str(a.type) or a.has_default_value()]


def _snake(word: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", word).lower()


def test_python_and_csrc_number_choices_alike() -> None:
    source = (ROOT / "csrc" / "core" / "codes.h").read_text()
    lists = re.findall(r"char\* k(\w+)\[\] = \{(.*?)\};", source, re.DOTALL)
    named = {name: re.findall(r'"(\w+)"', body) for name, body in lists}
    enums = {
        name: [_snake(word) for word in re.findall(r"\bk([A-Z]\w*)", body)]
        for name, body in re.findall(r"enum class (\w+) : int \{(.*?)\};", source, re.DOTALL)
    }
    assert [*named.values()] == [*enums.values()]
    # Those of the optimizers are compared with the library itself, in test_optim.py.
    assert {name: {word: i for i, word in enumerate(words)} for name, words in named.items()} == {
        "Poolings": codes.POOLING,
        "BoundsModes": codes.BOUNDS_CHECK,
        "CachePolicies": codes.CACHE_POLICY,
        "HashOrders": codes.HASH_ORDER,
        "InsertPolicies": codes.INSERT_POLICY,
        "MatmulPrecisions": codes.MATMUL_PRECISION,
    }


@pytest.mark.parametrize("op", sorted(schemas()))
def test_name_says_whether_it_mutates(op: str) -> None:
    assert op.endswith("_") == ("!)" in schemas()[op])


@pytest.mark.parametrize("op", sorted(schemas()))
def test_has_a_shape(op: str) -> None:
    entry = torch._library.simple_registry.singleton.find(f"emblib::{op}")
    assert entry.fake_impl.kernel is not None, "register_fake it in emblib/ops"


@pytest.mark.parametrize("op", sorted(schemas()))
def test_has_a_cpu_kernel(op: str) -> None:
    assert op in _registered_in("*/*_cpu.cpp", "CPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"emblib::{op}", "CPU")


@pytest.mark.parametrize("op", sorted(schemas()))
def test_returns_tensors_alone(op: str) -> None:
    """`torch.jit.trace` refuses operators that return numbers."""
    results = schemas()[op].partition("-> ")[2]
    kinds = re.findall(r"(\w+(?:\(\w!\))?(?:\[\])?)(?: \w+)?(?:[,)]|$)", results)
    assert set(kinds) <= {"Tensor", "Tensor(a!)", "Tensor[]"}, results


@pytest.mark.parametrize("op", sorted(schemas()))
def test_has_a_cuda_kernel(op: str) -> None:
    assert (op in _registered_in("*/*_cuda.cu", "CUDA")) != (op in CPU_ONLY)


def test_every_op_has_a_reference_or_a_reason() -> None:
    assert set(REFERENCES) == set(schemas())
    for reference in REFERENCES.values():
        assert isinstance(reference, str) or inspect.getdoc(reference)


@pytest.mark.parametrize("op", sorted(schemas()))
def test_has_an_opcheck_case(op: str) -> None:
    assert op in _opchecked(), "add a call of it to a test_opcheck in tests/ops"
