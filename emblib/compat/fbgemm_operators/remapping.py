"""Operators that remap ids: zero-collision hashing, and the pruning of tables during training.

Zero-collision hashing has a buffer of one id per slot, -1 where a slot is free. An id's slot is the
first of `max_probe` slots that has it, counted from a hash of the id and around the end.

Pruning maps the ids of a table to fewer rows; ids without a row of their own share row 0. At times
rows move from ids of little use to ids of much use that have none: uses are counted per id, the
threshold is estimated from a sample, and freed rows are handed out in their order.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check, check_ids, check_one_per
from emblib.compat.fbgemm_operators.registry import operator

_FREE = -1
_INT32_MODULUS = 2**31 - 1  # int32 buffers have ids modulo this
_SAMPLE_STEP = 23  # FBGEMM's: thresholds are estimated from every 23rd id
_DECAY = 0.98  # FBGEMM's: factor of the counts of use per pruning


@operator(
    "create_zch_buffer(int size, bool support_evict=False, Device? device=None, "
    "bool long_type=False) -> (Tensor, Tensor)"
)
def create_zch_buffer(
    size: int,
    support_evict: bool = False,
    device: torch.device | None = None,
    long_type: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return free slots `[size, 1]` and, with `support_evict`, their metadata `[size, 1]`."""
    dtype = torch.int64 if long_type else torch.int32
    slots = torch.full((size, 1), _FREE, dtype=dtype, device=device)
    metadata = torch.full((size, 1), _FREE, dtype=torch.int32, device=device)
    return slots, metadata if support_evict else None


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift in zeros, which `>>` of a negative int64 does not."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _rotate(bits: Tensor, count: int) -> Tensor:
    return (bits << count) | _shift_right(bits, 64 - count)


def mix(bits: Tensor) -> Tensor:
    """Return MurmurHash3's final mix of 64 bits."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ _shift_right(bits, 33)) * _signed(factor)
    return bits ^ _shift_right(bits, 33)


def hash_ids(ids: Tensor, second: int = 0, seed: int = 0) -> Tensor:
    """Return MurmurHash3 of pairs of 64 bits, `(id, second)`, folded to 64 bits of an int64."""
    factors = _signed(0x87C37B91114253D5), _signed(0x4CF5AD432745937F)
    first_word = _rotate(ids.long() * factors[0], 31) * factors[1]
    upper = (_rotate(first_word ^ _signed(seed), 27) + _signed(seed)) * 5 + 0x52DCE729
    second_word = torch.full_like(first_word, _signed(second % 2**64))
    second_word = _rotate(second_word * factors[1], 33) * factors[0]
    lower = (_rotate(second_word ^ _signed(seed), 31) + upper) * 5 + 0x38495AB5
    upper, lower = upper ^ 16, lower ^ 16
    upper = upper + lower
    lower = mix(lower + upper)
    upper = mix(upper) + lower
    return upper ^ (lower + upper)


@operator("murmur_hash3")
def murmur_hash3(input: Tensor, y: int, seed: int) -> Tensor:
    """Return the hash of one id, `[1]`, as a scalar."""
    check_one_per("input", input, "hash", 1)
    return hash_ids(input, y, seed).view(())


def unsigned_modulo(bits: Tensor, divisor: Tensor | int) -> Tensor:
    """Return int64 `bits`, read as unsigned, modulo `divisor`."""
    half = _shift_right(bits, 1) % divisor
    return (2 * half + (bits & 1)) % divisor


@operator(
    "zero_collision_hash(Tensor input, Tensor identities, int max_probe, "
    "bool circular_probe=False, int exp_hours=-1, bool readonly=False, Tensor? local_sizes=None, "
    "Tensor? offsets=None, Tensor? metadata=None, bool output_on_uvm=False, "
    "bool disable_fallback=False, bool _modulo_identity_DPRECATED=False, "
    "Tensor? input_metadata=None, int eviction_threshold=-1, int eviction_policy=0, "
    "int opt_in_prob=-1, int num_reserved_slots=-1, Tensor? opt_in_rands=None, "
    "Tensor? runtime_meta=None) -> (Tensor, Tensor)"
)
def zero_collision_hash(
    input: Tensor,
    identities: Tensor,
    max_probe: int,
    circular_probe: bool = False,
    exp_hours: int = -1,
    readonly: bool = False,
    local_sizes: Tensor | None = None,
    offsets: Tensor | None = None,
    metadata: Tensor | None = None,
    output_on_uvm: bool = False,
    disable_fallback: bool = False,
    _modulo_identity_DPRECATED: bool = False,
    input_metadata: Tensor | None = None,
    eviction_threshold: int = -1,
    eviction_policy: int = 0,
    opt_in_prob: int = -1,
    num_reserved_slots: int = -1,
    opt_in_rands: Tensor | None = None,
    runtime_meta: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the slot of each id, `[N]`, and no evictions.

    An id without a slot gets -1 with `disable_fallback`, else the slot of its hash: among the last
    `num_reserved_slots`, if there are any.

    Args:
        input: ids `[N]`, int32 or int64.
        identities: slots `[S, 1]`.
        max_probe: number of slots to look at.
        circular_probe: flag that must be True.
        _modulo_identity_DPRECATED: flag that must be False.
        exp_hours: number that must be -1.
        readonly: flag that must be True: FBGEMM's CPU build does not insert either.
        local_sizes: slots of the part of each id, `[N]`; without it, all.
        offsets: first slot of the part of each id, `[N]`.
        metadata: argument that must be None.
        output_on_uvm: ignored: the result is on the device of `input`.
        disable_fallback: whether an id without a slot gets -1.
        input_metadata: argument that must be None.
        eviction_threshold: number that must be -1.
        eviction_policy: number that must be 0.
        opt_in_prob: -1, or with `num_reserved_slots` any number.
        num_reserved_slots: last slots of each part, for ids without a slot; -1 for none.
        opt_in_rands: ignored: it decides on insertions.
        runtime_meta: ignored.

    Raises:
        NotImplementedError: arguments that insert or evict.
        RuntimeError: tensors that do not fit each other, or arguments that contradict each other.
    """
    evicts = exp_hours != -1 or eviction_threshold != -1 or eviction_policy != 0
    if not readonly or evicts or any(t is not None for t in (metadata, input_metadata)):
        raise NotImplementedError(
            "torch.ops.fbgemm.zero_collision_hash only looks ids up: pass readonly=True, and no "
            "eviction (in TorchRec, put the module into eval mode). To train on arbitrary ids, use "
            "a table with storage=emblib.storage.Hash(): docs/dynamic.md"
        )
    check(circular_probe, "circular_probe must be True")
    check(not _modulo_identity_DPRECATED, "_modulo_identity_DPRECATED must be False")
    check_ids("input", input)
    check_one_per("local_sizes", local_sizes, "id", len(input))
    check_one_per("offsets", offsets, "id", len(input))
    check((local_sizes is None) == (offsets is None), "pass local_sizes and offsets, or neither")
    check((opt_in_prob == -1) == (num_reserved_slots == -1), "reserve slots with opt_in_prob only")
    check(num_reserved_slots == -1 or num_reserved_slots > 0, "num_reserved_slots must be positive")
    size: Tensor | int = identities.size(0) if local_sizes is None else local_sizes
    num_probed_slots = size if opt_in_prob == -1 else size - num_reserved_slots
    shift = torch.zeros_like(input, dtype=torch.int64) if offsets is None else offsets
    bits = hash_ids(input)
    identity_of_id = input if identities.dtype == input.dtype else input.fmod(_INT32_MODULUS)
    position = unsigned_modulo(bits, num_probed_slots)
    if disable_fallback:
        slots = torch.full_like(position, -1)
    elif opt_in_prob == -1:
        slots = position + shift
    else:
        slots = num_probed_slots + unsigned_modulo(bits, num_reserved_slots) + shift
    # Only ids that are not found yet are looked at again.
    open_ids = torch.arange(len(input), device=input.device)
    flat = identities.flatten()
    for _ in range(max_probe):
        if not len(open_ids):
            break
        open_positions = position[open_ids]
        slot = open_positions + shift[open_ids]
        is_found = flat[slot] == identity_of_id[open_ids]
        slots[open_ids[is_found]] = slot[is_found]
        limit = (
            num_probed_slots[open_ids] if isinstance(num_probed_slots, Tensor) else num_probed_slots
        )
        position[open_ids] = (open_positions + 1) % limit
        open_ids = open_ids[~is_found]
    return slots, None


# Pruning


def _slices_of_tables(offsets: Tensor) -> list[slice]:
    """Return the ids of each table, given the first id of each and the end; waits for a GPU."""
    ends = offsets.tolist()
    return [slice(first, last) for first, last in itertools.pairwise(ends)]


@operator("init_address_lookup")
def init_address_lookup(address_lookups: Tensor, buffer_offsets: Tensor, emb_sizes: Tensor) -> None:
    """Map the first `emb_sizes[t]` ids of table t to their own rows, and all others to row 0.

    `address_lookups`, the rows of the ids of all tables, is written; table t has those from
    `buffer_offsets[t]` on.
    """
    for part, rows in zip(_slices_of_tables(buffer_offsets), emb_sizes.tolist(), strict=True):
        lookup = address_lookups[part]
        ids = torch.arange(len(lookup), device=lookup.device)
        lookup.copy_(torch.where(ids < rows, ids, 0))


def _threshold(use: Tensor, rows: Tensor, iteration: int) -> Tensor:
    """Return the use that ids with a row of their own exceed, by a sample of every 23rd id."""
    pruned = (1.0 - (rows.float() / len(use)).double()).float()
    count = len(use) // _SAMPLE_STEP
    if count:  # a smaller table is its own sample
        position = torch.arange(count, device=use.device) * _SAMPLE_STEP
        use = use[(position + iteration % _SAMPLE_STEP).clamp(max=len(use) - 1)]
    position = (pruned * len(use)).floor().long().clamp(max=len(use) - 1)
    return use.sort().values[position]


def _prune(lookup: Tensor, use: Tensor, threshold: Tensor) -> Tensor:
    """Move the rows of ids of little use to ids without a row, and return these rows."""
    is_used, has_row = use > threshold, lookup != 0
    without_row = (is_used & ~has_row).nonzero()[:, 0]
    unused = (~is_used & has_row).nonzero()[:, 0]
    count = min(len(without_row), len(unused))
    rows = lookup[unused[:count]]
    lookup[without_row[:count]] = rows
    lookup[unused[:count]] = 0
    return rows


@operator("prune_embedding_tables")
def prune_embedding_tables(
    iter: int,
    pruning_interval: int,
    address_lookups: Tensor,
    row_utils: Tensor,
    buffer_offsets: Tensor,
    emb_sizes: Tensor,
) -> tuple[Tensor, Tensor, int]:
    """Let the ids of most use have the rows of each table, and decay the counts of use.

    Args:
        iter: number of the training step; it selects the sample and, after the first
            `pruning_interval` steps, the decay.
        pruning_interval: steps between prunings.
        address_lookups: rows of the ids of all tables, int64; written.
        row_utils: uses of the ids of all tables, float32; written.
        buffer_offsets: first id of each table, and the end.
        emb_sizes: rows of each table.

    Returns:
        rows that changed hands (`[0]` if there are none), their offsets per table, their number.
    """
    if iter > pruning_interval:
        row_utils.mul_(_DECAY)
    moved_rows = []
    for part, rows in zip(_slices_of_tables(buffer_offsets), emb_sizes, strict=True):
        threshold = _threshold(row_utils[part], rows, iter)
        moved_rows.append(_prune(address_lookups[part], row_utils[part], threshold))
    counts = torch.tensor([0, *map(len, moved_rows)], device=buffer_offsets.device)
    total = sum(map(len, moved_rows))
    rows = torch.cat(moved_rows) if total else torch.zeros(1, dtype=torch.int64).to(counts.device)
    return rows, counts.cumsum(0), total


@operator("remap_indices_update_utils", writes="row_util")
def remap_indices_update_utils(
    iter: int,
    buffer_idx: Tensor,
    feature_lengths: Tensor,
    feature_offsets: Tensor,
    values: Tensor,
    address_lookup: Tensor,
    row_util: Tensor,
    buffer_offsets: Tensor,
    full_values_list: Sequence[Tensor] | None = None,
    update_util: bool | None = None,
) -> Tensor:
    """Return the rows of the ids of some features, and count the uses of these ids.

    Args:
        iter: number of the training step, which decides whether to count if `update_util` is None.
        buffer_idx: table of each feature, on the CPU.
        feature_lengths: ids of each feature, on the CPU.
        feature_offsets: first id of each feature, on the CPU.
        values: ids; the caller's stay as they are.
        address_lookup: rows of the ids of all tables, int64.
        row_util: uses of the ids of all tables, float32; written.
        buffer_offsets: first id of each table, and the end.
        full_values_list: ids to count per feature, if `values` has each once.
        update_util: whether to count; None counts in some steps only, as FBGEMM does: in the first
            10, every 19th until 100, then every 39th.
    """
    if update_util is None:
        update_util = iter < 10 or (iter < 100 and (iter + 1) % 19 == 0) or (iter + 1) % 39 == 0
    remapped = values.clone()
    features = zip(buffer_idx, feature_offsets.tolist(), feature_lengths.tolist(), strict=True)
    for feature, (table, start, length) in enumerate(features):
        if not length or len(buffer_offsets) < 2:
            continue
        table_start = buffer_offsets[table]
        ids = table_start + values[start : start + length]
        if update_util:
            counted_ids = (
                ids if full_values_list is None else table_start + full_values_list[feature]
            )
            row_util.add_(torch.bincount(counted_ids, minlength=len(row_util)))
        remapped[start : start + length] = address_lookup[ids].to(values.dtype)
    return remapped
