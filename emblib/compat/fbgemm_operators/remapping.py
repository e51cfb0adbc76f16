"""Operators that remap ids: zero-collision hashing, and the pruning of tables during training.

Zero-collision hashing has a buffer of one id per slot; -1 marks a free slot. The search for an id
begins at the slot of its hash, and looks at `max_probe` slots; slot 0 follows the last slot. The
search ends at the first slot that has the id.

Pruning maps the ids of a table to fewer rows. Ids without a row of their own share row 0. The uses
of each id are counted. `prune_embedding_tables` takes rows from rarely used ids and gives them to
frequently used ids that have none. A sample of the ids determines the threshold between both.
"""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.compat.fbgemm_operators.checks import check, check_ids, check_one_per, check_same_length
from emblib.compat.fbgemm_operators.registry import operator

_FREE = -1  # value of a free slot, and of its metadata
_INT32_MODULUS = 2**31 - 1  # an int32 buffer stores ids modulo this number
_SAMPLE_STEP = 23  # as in FBGEMM: a sample has every 23rd id
_DECAY = 0.98  # as in FBGEMM: factor of the counts of uses at each pruning


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
    """Return free slots `[size, 1]` and, with `support_evict`, their metadata `[size, 1]`.

    Slots are int64 with `long_type`, else int32; metadata are int32. `device` None is torch's
    default device.
    """
    dtype = torch.int64 if long_type else torch.int32
    slots = torch.full((size, 1), _FREE, dtype=dtype, device=device)
    metadata = torch.full((size, 1), _FREE, dtype=torch.int32, device=device)
    return slots, metadata if support_evict else None


def _signed(constant: int) -> int:
    return constant - 2**64 if constant >= 2**63 else constant


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift int64 to the right, with zeros from the left; `>>` repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _rotate(bits: Tensor, count: int) -> Tensor:
    return (bits << count) | _shift_right(bits, 64 - count)


def mix(bits: Tensor) -> Tensor:
    """Return MurmurHash3's final mix of 64 bits, for int64 of any shape."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        bits = (bits ^ _shift_right(bits, 33)) * _signed(factor)
    return bits ^ _shift_right(bits, 33)


def hash_ids(ids: Tensor, second: int = 0, seed: int = 0) -> Tensor:
    """Return MurmurHash3 of the 128 bits `(id, second)`, folded to an int64, for each of `ids`."""
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
    """Return `hash_ids` of one id, `[1]`, as a scalar tensor; other sizes raise RuntimeError."""
    check_one_per("input", input, "hash", 1)
    return hash_ids(input, y, seed).view(())


def unsigned_modulo(bits: Tensor, divisor: Tensor | int) -> Tensor:
    """Return `bits`, int64 that are read as unsigned, modulo a positive `divisor`."""
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
    """Look ids up in a buffer; return the slot of each id, `[N]`, and None for evictions.

    An id that is in no slot gets -1 with `disable_fallback`. Otherwise it gets the slot of its
    hash, among the reserved slots if there are any.

    Args:
        input: ids `[N]`, int32 or int64.
        identities: slots `[S, 1]`.
        max_probe: maximum number of slots to look at.
        circular_probe: flag that must be True.
        _modulo_identity_DPRECATED: flag that must be False.
        exp_hours: number that must be -1.
        readonly: flag that must be True: FBGEMM's CPU build does not insert either.
        local_sizes: number of slots that each id may be in, `[N]`; None for all slots.
        offsets: first slot that each id may be in, `[N]`; None for slot 0.
        metadata: argument that must be None.
        output_on_uvm: ignored: the result is on the device of `input`.
        disable_fallback: whether an id without a slot gets -1.
        input_metadata: argument that must be None.
        eviction_threshold: number that must be -1.
        eviction_policy: number that must be 0.
        opt_in_prob: -1 without reserved slots, any other number with them.
        num_reserved_slots: number of slots, the last ones, that are reserved for ids without a
            slot; -1 for none.
        opt_in_rands: ignored, as it is for insertions.
        runtime_meta: ignored.

    Raises:
        NotImplementedError: the arguments ask for insertions or evictions.
        RuntimeError: tensors do not fit each other, or arguments contradict each other.
    """
    has_eviction = exp_hours != -1 or eviction_threshold != -1 or eviction_policy != 0
    if not readonly or has_eviction or metadata is not None or input_metadata is not None:
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
    num_slots: Tensor | int = identities.size(0) if local_sizes is None else local_sizes
    num_probed_slots = num_slots if opt_in_prob == -1 else num_slots - num_reserved_slots
    first_slots = torch.zeros_like(input, dtype=torch.int64) if offsets is None else offsets
    hashes = hash_ids(input)
    stored_form = input if identities.dtype == input.dtype else input.fmod(_INT32_MODULUS)
    positions = unsigned_modulo(hashes, num_probed_slots)
    if disable_fallback:
        slots = torch.full_like(positions, -1)
    elif opt_in_prob == -1:
        slots = positions + first_slots
    else:
        slots = num_probed_slots + unsigned_modulo(hashes, num_reserved_slots) + first_slots
    pending = torch.arange(len(input), device=input.device)  # ids that are not found yet
    id_of_slot = identities.flatten()
    for _ in range(max_probe):
        if not len(pending):
            break
        probed_positions = positions[pending]
        probed_slots = probed_positions + first_slots[pending]
        is_found = id_of_slot[probed_slots] == stored_form[pending]
        slots[pending[is_found]] = probed_slots[is_found]
        modulus = (
            num_probed_slots[pending] if isinstance(num_probed_slots, Tensor) else num_probed_slots
        )
        positions[pending] = (probed_positions + 1) % modulus
        pending = pending[~is_found]
    return slots, None


# Pruning


def _slices_of_tables(offsets: Tensor) -> list[slice]:
    """Return the slice of each table in a tensor of all ids. Waits for a GPU.

    `offsets` are the first entry of each table, and the end, `[T + 1]`.
    """
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets.tolist())]


@operator("init_address_lookup")
def init_address_lookup(address_lookups: Tensor, buffer_offsets: Tensor, emb_sizes: Tensor) -> None:
    """Give the first ids of each table rows of their own; map all others to row 0. Waits for a GPU.

    Args:
        address_lookups: row of each id of all tables; written.
        buffer_offsets: first entry of each table in it, and the end, `[T + 1]`.
        emb_sizes: number of rows of each table, `[T]`.

    Raises:
        RuntimeError: `buffer_offsets` does not have one entry more than `emb_sizes`.
    """
    check_same_length(emb_sizes=emb_sizes, **{"buffer_offsets[1:]": buffer_offsets[1:]})
    for table_slice, num_rows in zip(
        _slices_of_tables(buffer_offsets), emb_sizes.tolist(), strict=True
    ):
        row_of_id = address_lookups[table_slice]
        ids = torch.arange(len(row_of_id), device=row_of_id.device)
        row_of_id.copy_(torch.where(ids < num_rows, ids, 0))


def _use_threshold(uses: Tensor, num_rows: Tensor, iteration: int) -> Tensor:
    """Estimate the number of uses above which an id has a row, from a sample of the ids."""
    pruned_share = (1.0 - (num_rows.float() / len(uses)).double()).float()
    num_samples = len(uses) // _SAMPLE_STEP
    if num_samples:  # of a table with fewer ids, all are used
        positions = torch.arange(num_samples, device=uses.device) * _SAMPLE_STEP
        uses = uses[(positions + iteration % _SAMPLE_STEP).clamp(max=len(uses) - 1)]
    positions = (pruned_share * len(uses)).floor().long().clamp(max=len(uses) - 1)
    return uses.sort().values[positions]


def _move_rows(row_of_id: Tensor, uses: Tensor, threshold: Tensor) -> Tensor:
    """Move rows from ids with few uses to ids with many uses and no row; return the moved rows.

    `row_of_id` is written. Many are more than `threshold`.
    """
    is_much_used, has_row = uses > threshold, row_of_id != 0
    receivers = (is_much_used & ~has_row).nonzero()[:, 0]
    donors = (~is_much_used & has_row).nonzero()[:, 0]
    num_moved_rows = min(len(receivers), len(donors))
    rows = row_of_id[donors[:num_moved_rows]]
    row_of_id[receivers[:num_moved_rows]] = rows
    row_of_id[donors[:num_moved_rows]] = 0
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
    """Move the rows of each table to its most used ids, and decay the counts of use.

    Args:
        iter: number of the training step. The sample of ids depends on it; counts do not decay in
            the first `pruning_interval` steps.
        pruning_interval: steps between prunings.
        address_lookups: row of each id of all tables, int64; written.
        row_utils: number of uses of each id of all tables, float32; written.
        buffer_offsets: first id of each table, and the end, `[T + 1]`.
        emb_sizes: number of rows of each table, `[T]`.

    Returns:
        the moved rows table by table (the single entry 0 if there are none), their offsets per
        table `[T + 1]`, and their number.

    Raises:
        RuntimeError: `buffer_offsets` does not have one entry more than `emb_sizes`; nothing is
            written.
    """
    check_same_length(emb_sizes=emb_sizes, **{"buffer_offsets[1:]": buffer_offsets[1:]})
    if iter > pruning_interval:
        row_utils.mul_(_DECAY)
    moved_rows = []
    for table_slice, num_rows in zip(_slices_of_tables(buffer_offsets), emb_sizes, strict=True):
        threshold = _use_threshold(row_utils[table_slice], num_rows, iter)
        moved_rows.append(
            _move_rows(address_lookups[table_slice], row_utils[table_slice], threshold)
        )
    num_moved_rows = torch.tensor([0, *map(len, moved_rows)], device=buffer_offsets.device)
    total_moved_rows = sum(map(len, moved_rows))
    rows = (
        torch.cat(moved_rows)
        if total_moved_rows
        else torch.zeros(1, dtype=torch.int64, device=num_moved_rows.device)
    )
    return rows, num_moved_rows.cumsum(0), total_moved_rows


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
    """Return the row of each id of some features, and count the uses of the ids.

    Args:
        iter: number of the training step.
        buffer_idx: table of each feature, `[F]`, on the CPU.
        feature_lengths: number of ids of each feature, `[F]`, on the CPU.
        feature_offsets: first entry of each feature in `values`, `[F]`, on the CPU.
        values: ids of all features; not written.
        address_lookup: row of each id of all tables, int64.
        row_util: number of uses of each id of all tables, float32; written.
        buffer_offsets: first id of each table, and the end, `[T + 1]`.
        full_values_list: ids of each feature to count, for `values` without repeated ids; None
            counts `values`.
        update_util: whether to count. None counts in the steps that FBGEMM counts in: the first 10,
            every 19th up to 100, and every 39th.

    Raises:
        RuntimeError: the arguments of features differ in length; nothing is written.
    """
    check_same_length(
        buffer_idx=buffer_idx,
        feature_lengths=feature_lengths,
        feature_offsets=feature_offsets,
        full_values_list=buffer_idx if full_values_list is None else full_values_list,
    )
    if update_util is None:
        update_util = iter < 10 or (iter < 100 and (iter + 1) % 19 == 0) or (iter + 1) % 39 == 0
    rows = values.clone()
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
        rows[start : start + length] = address_lookup[ids].to(values.dtype)
    return rows
