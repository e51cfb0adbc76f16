// Moves rows and their optimizer states between the cache and the tiers of their tables on the GPU.
// An optimizer state is moved like the weights: all are tensors of CacheMemory.
//
// A warp takes 32 rows of the batch. Lane i computes once where row i comes from, where the row
// that it evicts goes to, and whether it moves at all (RowMove). Then groups of 4 to 32 lanes,
// depending on the width of a row, take the rows that move. If all rows of the warp are aligned
// packs of the cache's dtype, a group takes kMoveRows rows at a time. It reads all of these before
// it writes one of them, so that up to 2 KB per warp and direction are on the bus at once, and both
// directions are busy. Otherwise a group takes one row at a time and converts it. For states with
// one entry per row, the lane of the row moves the entry. A lane owns the same columns of the row
// that leaves a slot and of the row that enters it: it reads a column of the slot before it
// overwrites it, so no lane waits for another.
#pragma once

#include "cache/args.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kMoveThreads = 256;
inline constexpr int kMoveColumns = 4;  // columns per lane and access, where dtypes are converted
inline constexpr int kMoveRows = 4;     // rows in flight per group of lanes
// The grid is small: a bus of 55 GB/s with a latency of 2 us is full with some 100 KB in flight,
// and a prefetch on a side stream must leave the multiprocessors to the training step.
inline constexpr int kMaxMoveBlocks = 16;  // 128 warps with 256 KB in flight per direction

// Round columns [column, column + kMoveColumns) of linear row `row`, which is written back, to
// dtype `type` stochastically; float32 is left unchanged. `tensor`, the row and the columns select
// the random numbers.
EMB_DEVICE void round_columns(Dtype type, const Rounding& rounding, int64_t row, int64_t column,
                              int tensor, float (&values)[kMoveColumns]) {
  if (type == Dtype::kFloat) return;
  const Random4 random =
      rounding.words(row, static_cast<uint32_t>(column / kMoveColumns), write_back_stream(tensor));
#pragma unroll
  for (int k = 0; k < kMoveColumns; ++k) {
    values[k] = type == Dtype::kHalf
                    ? to_float(round_randomly<half16>(values[k], random.word[k]))
                    : to_float(round_randomly<bfloat16>(values[k], random.word[k]));
  }
}

// The move of one row of the batch: `out` leaves a slot and `in` enters it. dim 0 stands for no
// row, in either.
struct RowMove {
  TierRow out{kNoRow, 0, 0, {0, 0, 0}}, in{kNoRow, 0, 0, {0, 0, 0}};
  int64_t slot = 0;

  EMB_DEVICE bool moves() const { return out.dim > 0 || in.dim > 0; }
  // Return the elements between rows of the cache.
  EMB_DEVICE int64_t stride() const { return out.dim > 0 ? out.stride : in.stride; }
};

// Move the only entry of this lane's rows, the evicted and the fetched one, in a tensor with one
// entry per row.
EMB_DEVICE void move_entry(const CacheMemory& memory, int tensor, const RowMove& move,
                           const Rounding& rounding) {
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const TierTensor out = memory.tensors[tensor][move.out.location.tier];
  const TierTensor in = memory.tensors[tensor][move.in.location.tier];
  float out_value[kMoveColumns] = {}, in_value[kMoveColumns] = {};
  if (move.in.dim > 0) read_columns(in.data, in.type, move.in.location.state_row, 1, in_value);
  if (move.out.dim > 0) {
    read_columns(cache.data, cache.type, move.slot, 1, out_value);
    if (rounding.is_stochastic && out.type != cache.type) {
      round_columns(out.type, rounding, move.out.row, 0, tensor, out_value);
    }
    write_columns(out.data, out.type, move.out.location.state_row, 1, out_value);
  }
  if (move.in.dim > 0) write_columns(cache.data, cache.type, move.slot, 1, in_value);
}

// Return the number of lanes, 4 to 32, of a group that moves rows of `accesses` accesses each.
EMB_DEVICE int lanes_of_move(int accesses) {
  int lanes = 4;
  while (lanes < kWarpLanes && lanes < accesses) lanes *= 2;
  return lanes;
}

// A copy of the move of lane `source` for the lanes of a group. The whole warp calls the
// constructor, each lane with its own move. If `source` is -1, both dims are 0.
struct GroupMove {
  int64_t out_element, in_element;  // first elements of the rows in their tiers
  int64_t slot_element;             // first element of the slot in the cache
  int out_dim, in_dim, out_tier, in_tier;

  GroupMove() = default;
  EMB_DEVICE GroupMove(const RowMove& move, int source) {
    constexpr unsigned kAll = simt::kFullMask;
    const int from = source < 0 ? 0 : source;
    const int tiers =
        move.out.location.tier | (move.in.location.tier << 8);  // one shuffle for both
    const int shared_tiers = __shfl_sync(kAll, tiers, from);
    out_tier = shared_tiers & 255;
    in_tier = shared_tiers >> 8;
    out_element = __shfl_sync(kAll, move.out.location.element, from);
    in_element = __shfl_sync(kAll, move.in.location.element, from);
    slot_element = __shfl_sync(kAll, move.slot * move.stride(), from);
    out_dim = __shfl_sync(kAll, static_cast<int>(move.out.dim), from);
    in_dim = __shfl_sync(kAll, static_cast<int>(move.in.dim), from);
    if (source < 0) out_dim = in_dim = 0;
  }
};

// Assign the next R rows that move to each group: remove their lanes from `pending`, the bit mask
// of lanes whose rows have not been moved, which is the same in all lanes, and write the lanes of
// this group's rows to `source`, -1 for none.
template <int R>
EMB_DEVICE void take_rows(unsigned* pending, const LaneGroup& lane, int (&source)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    source[r] = -1;
    for (int g = 0; g < lane.groups_in_warp(); ++g) {
      const int next = __ffs(static_cast<int>(*pending)) - 1;
      *pending &= *pending - 1;
      if (g == lane.group) source[r] = next;
    }
  }
}

// Return the address of the `pack`-th 16 bytes of a row that begins at `element`.
EMB_DEVICE simt::Pack16* pack_at(const TierTensor& tensor, int64_t element, int64_t pack) {
  char* row = static_cast<char*>(tensor.data) + element * element_bytes(tensor.type);
  return reinterpret_cast<simt::Pack16*>(row) + pack;
}

// Move the rows of the lanes `pending`, a bit mask, in an element-wise tensor. All these rows must
// be aligned 16-byte packs, at most `packs` each, and the cache must have the dtype of their tiers.
EMB_DEVICE void copy_packs(const CacheMemory& memory, int tensor, const RowMove& lane_move,
                           unsigned pending, int packs) {
  constexpr int R = kMoveRows;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const int size = static_cast<int>(element_bytes(cache.type));
  const LaneGroup lane(lanes_of_move(packs));
  while (pending != 0) {
    int source[R];
    take_rows(&pending, lane, source);
    const simt::Pack16* in_row[R];
    simt::Pack16 *out_row[R], *slot[R];
    int in_packs[R], out_packs[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const GroupMove move(lane_move, source[r]);
      in_row[r] = pack_at(memory.tensors[tensor][move.in_tier], move.in_element, lane.rank);
      out_row[r] = pack_at(memory.tensors[tensor][move.out_tier], move.out_element, lane.rank);
      slot[r] = pack_at(cache, move.slot_element, lane.rank);
      in_packs[r] = move.in_dim * size / 16 - lane.rank;
      out_packs[r] = move.out_dim * size / 16 - lane.rank;
    }
    for (int p = 0; p < packs; p += lane.lanes) {
      simt::Pack16 in[R], out[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < in_packs[r]) in[r] = in_row[r][p];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < out_packs[r]) out[r] = slot[r][p];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < out_packs[r]) out_row[r][p] = out[r];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < in_packs[r]) slot[r][p] = in[r];
      }
    }
  }
}

// Move the rows of the lanes `pending` in an element-wise tensor, for any alignment and dtypes: a
// row per group at a time, of at most `widest` columns.
EMB_DEVICE void convert_columns(const CacheMemory& memory, int tensor, const RowMove& lane_move,
                                unsigned pending, int widest, const Rounding& rounding) {
  constexpr int N = kMoveColumns;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const LaneGroup lane(lanes_of_move((widest + N - 1) / N));
  while (pending != 0) {
    int source[1];
    take_rows(&pending, lane, source);
    const GroupMove move(lane_move, source[0]);
    const int64_t out_row =
        __shfl_sync(simt::kFullMask, lane_move.out.row, source[0] < 0 ? 0 : source[0]);
    const TierTensor out_tier = memory.tensors[tensor][move.out_tier];
    const TierTensor in_tier = memory.tensors[tensor][move.in_tier];
    for (int c = lane.rank * N; c < widest; c += lane.lanes * N) {
      const int out_valid = move.out_dim - c, in_valid = move.in_dim - c;
      float out[N], in[N];
      if (in_valid > 0) {
        read_columns(in_tier.data, in_tier.type, move.in_element + c, in_valid, in);
      }
      if (out_valid > 0) {
        read_columns(cache.data, cache.type, move.slot_element + c, out_valid, out);
        if (rounding.is_stochastic && out_tier.type != cache.type) {
          round_columns(out_tier.type, rounding, out_row, c, tensor, out);
        }
        write_columns(out_tier.data, out_tier.type, move.out_element + c, out_valid, out);
      }
      if (in_valid > 0) write_columns(cache.data, cache.type, move.slot_element + c, in_valid, in);
    }
  }
}

// Return whether a row consists of aligned 16-byte packs, in a tensor of its tier and in the slot
// of the cache that begins at slot_element, and both have one dtype. True if there is no row.
EMB_DEVICE bool is_in_packs(const CacheMemory& memory, int tensor, const TierRow& row,
                            int64_t slot_element) {
  if (row.dim == 0) return true;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const TierTensor tier = memory.tensors[tensor][row.location.tier];
  return cache.type == tier.type && row.dim * element_bytes(cache.type) % 16 == 0 &&
         is_aligned(pack_at(tier, row.location.element, 0), 16) &&
         is_aligned(pack_at(cache, slot_element, 0), 16);
}

// Move the rows of a warp, one per lane, in all tensors. Called by the whole warp.
EMB_DEVICE void move_rows(const CacheMemory& memory, const RowMove& lane_move,
                          const Rounding& rounding) {
  const unsigned movers = __ballot_sync(simt::kFullMask, lane_move.moves());
  if (movers == 0) return;
  const int64_t slot_element = lane_move.slot * lane_move.stride();
  const int64_t in_dim = lane_move.in.dim, out_dim = lane_move.out.dim;
  const int dim = static_cast<int>(in_dim > out_dim ? in_dim : out_dim);
  const int widest = __reduce_max_sync(simt::kFullMask, dim);
  for (int k = 0; k < memory.num_tensors; ++k) {
    if (memory.is_by_row(k)) {
      if (lane_move.moves()) move_entry(memory, k, lane_move, rounding);
      continue;
    }
    const bool are_in_packs = is_in_packs(memory, k, lane_move.in, slot_element) &&
                              is_in_packs(memory, k, lane_move.out, slot_element);
    if (__all_sync(simt::kFullMask, are_in_packs)) {
      const int64_t size = element_bytes(memory.tensors[k][kCacheTier].type);
      copy_packs(memory, k, lane_move, movers, static_cast<int>(widest * size / 16));
    } else {
      convert_columns(memory, k, lane_move, movers, widest, rounding);
    }
  }
}

// If `is_postponed`, list the fetch of this lane's row in `fetches`, and remove the fetch from
// `move`, which keeps the write-back. fetches.count must not be null. Called by the whole warp.
EMB_DEVICE void postpone(const PostponedFetches& fetches, RowMove* move, bool is_postponed) {
  const unsigned lanes = __ballot_sync(simt::kFullMask, is_postponed);  // that postpone
  if (lanes == 0) return;
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int leader = __ffs(static_cast<int>(lanes)) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(fetches.count, __popc(lanes));
  first = __shfl_sync(simt::kFullMask, first, leader);
  if (!is_postponed) return;
  const int position = first + __popc(lanes & ((1u << lane) - 1));
  fetches.rows[position] = move->in.row;
  fetches.slots[position] = static_cast<int32_t>(move->slot);
  move->in.dim = 0;
}

// Move the first *num_rows rows of a batch. Fetches that are postponed are listed in `postponed`
// instead, and rows that got no way are recorded in postponed.conflicts, unless that is null. A row
// or slot that does not exist is skipped. A warp takes 32 rows, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    move_kernel(CacheMemory memory, CacheMoves moves, PostponedFetches postponed,
                const int32_t* num_rows) {
  const Rounding rounding = memory.hyper != nullptr ? Rounding(memory.hyper) : Rounding();
  const int64_t count = *num_rows;
  for (int64_t first = simt::global_warp() * simt::kWarpLanes; first < count;
       first += simt::warps_in_grid() * simt::kWarpLanes) {
    const int64_t u = first + threadIdx.x % simt::kWarpLanes;
    RowMove move;
    bool is_postponed = false;
    if (u < count) {
      const int64_t evicted = moves.evicted != nullptr ? moves.evicted[u] : kNoRow;
      const int64_t row = moves.rows[u];
      move.slot = moves.row_slots[u];
      if (evicted != kNoMove) {
        const TierRow in = find_tier_row(memory, row);
        if (fits(memory, in, move.slot)) {
          move.in = in;
          move.out = find_tier_row(memory, evicted);
          is_postponed = postponed.may_be_updated(move.slot);
        }
      } else if (move.slot < 0 && postponed.conflicts != nullptr) {
        if (find_tier_row(memory, row).dim > 0) postponed.note_conflict(row);
      }
    }
    if (postponed.count != nullptr) postpone(postponed, &move, is_postponed);
    move_rows(memory, move, rounding);
  }
}

// Write back the cacheable rows of `tags`, [num_slots]; memory.hyper must not be null.
[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    flush_kernel(CacheMemory memory, const int64_t* tags, int64_t num_slots) {
  const Rounding rounding(memory.hyper);
  for (int64_t first = simt::global_warp() * simt::kWarpLanes; first < num_slots;
       first += simt::warps_in_grid() * simt::kWarpLanes) {
    RowMove move;
    move.slot = first + threadIdx.x % simt::kWarpLanes;
    if (move.slot < num_slots) {
      const TierRow out = find_tier_row(memory, tags[move.slot]);
      if (fits(memory, out, move.slot)) move.out = out;
    }
    move_rows(memory, move, rounding);
  }
}

// Move the first *count rows of a batch (move_kernel). `n` is the length of moves.rows.
template <class Launcher>
void launch_move(const Launcher& launcher, const CacheMemory& memory, const CacheMoves& moves,
                 const PostponedFetches& postponed, const int32_t* count, int64_t n) {
  if (n == 0) return;
  launcher(move_kernel, blocks_for(n, kMoveThreads, kMaxMoveBlocks), kMoveThreads, memory, moves,
           postponed, count);
}

// Write back the rows of `tags` (flush_kernel); memory.hyper must not be null.
template <class Launcher>
void launch_flush(const Launcher& launcher, const CacheMemory& memory, const int64_t* tags,
                  int64_t num_slots) {
  if (num_slots == 0) return;
  launcher(flush_kernel, blocks_for(num_slots, kMoveThreads, kMaxMoveBlocks), kMoveThreads, memory,
           tags, num_slots);
}

}  // namespace emb::cuda
