// Moves rows and their optimizer states between the cache and the tiers of their tables on the GPU.
// An optimizer state is moved like the weights: all are tensors of CacheMemory.
//
// A warp moves 32 rows of the batch at a time, in two phases:
//   (1) Lane i computes whether row i moves, where its source is, and where the row that it evicts
//       is written (RowMove).
//   (2) For each tensor, groups of 4 to 32 lanes, depending on the width of a row, move the rows.
//       If all rows of the warp are aligned 16-byte packs of the cache's dtype, a group moves
//       kMoveRows rows at a time (copy_packs). It reads all of these rows before it writes the
//       first, so that up to 2 KB per warp and direction are on the bus at once, and both
//       directions are busy. Otherwise a group converts one row at a time (convert_columns). In a
//       state with one entry per row, the lane of the row moves the entry (move_entry).
// A lane moves the same columns of the row that leaves a slot and of the row that enters it. It
// reads a column of the slot before it overwrites the column, so no lane waits for another.
#pragma once

#include "cache/args.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kMoveThreads = 256;
inline constexpr int kMoveColumns = 4;  // columns per lane and access, where dtypes are converted
inline constexpr int kMoveRows = 4;     // rows in flight per group of lanes
// The grid is small, because a prefetch on a side stream must leave the multiprocessors to the
// training step. A bus of 55 GB/s with a latency of 2 us is full with some 100 KB in flight.
inline constexpr int kMaxMoveBlocks = 16;  // 128 warps with 256 KB in flight per direction

// Round `values`, columns [column, column + kMoveColumns) of linear row `row`, which is written
// back, stochastically to dtype `type`; for float32 do nothing. `tensor`, the row and the columns
// select the random numbers. `column` must be a multiple of kMoveColumns.
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

// The moves of one slot: the row in it, to be written back, and then a row to be fetched into it. A
// dim of 0 means no row.
struct RowMove {
  TierRow write_back{kNoRow, 0, 0, {0, 0, 0}}, fetch{kNoRow, 0, 0, {0, 0, 0}};
  int64_t slot = 0;

  EMB_DEVICE bool has_row() const { return write_back.dim > 0 || fetch.dim > 0; }
  // Return the number of elements between rows of the cache.
  EMB_DEVICE int64_t cache_stride() const {
    return write_back.dim > 0 ? write_back.cache_stride : fetch.cache_stride;
  }
};

// Move the entries of the rows of this lane in tensor number `tensor`, which has one entry per row.
EMB_DEVICE void move_entry(const CacheMemory& memory, int tensor, const RowMove& move,
                           const Rounding& rounding) {
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const TierTensor write_back_tensor = memory.tensors[tensor][move.write_back.location.tier];
  const TierTensor fetch_tensor = memory.tensors[tensor][move.fetch.location.tier];
  float write_back_value[kMoveColumns] = {}, fetch_value[kMoveColumns] = {};
  if (move.fetch.dim > 0)
    read_columns(fetch_tensor.data, fetch_tensor.type, move.fetch.location.state_row, 1,
                 fetch_value);
  if (move.write_back.dim > 0) {
    read_columns(cache.data, cache.type, move.slot, 1, write_back_value);
    if (rounding.is_stochastic && write_back_tensor.type != cache.type) {
      round_columns(write_back_tensor.type, rounding, move.write_back.row, 0, tensor,
                    write_back_value);
    }
    write_columns(write_back_tensor.data, write_back_tensor.type,
                  move.write_back.location.state_row, 1, write_back_value);
  }
  if (move.fetch.dim > 0) write_columns(cache.data, cache.type, move.slot, 1, fetch_value);
}

// A copy, for the lanes of a group, of the move of lane `source_lane`. All 32 lanes must call the
// constructor, each with its own move. If `source_lane` is -1, both dims are 0.
struct GroupMove {
  int64_t write_back_element, fetch_element;  // first elements of the rows in their tiers
  int64_t slot_element;                       // first element of the slot in the cache
  int write_back_dim, fetch_dim;              // columns, 0 for no row
  int write_back_tier, fetch_tier;            // the tiers of the rows' tables

  GroupMove() = default;
  EMB_DEVICE GroupMove(const RowMove& move, int source_lane) {
    constexpr unsigned kAll = simt::kFullMask;
    const int from = source_lane < 0 ? 0 : source_lane;
    // One shuffle for both tiers.
    const int tiers = move.write_back.location.tier | (move.fetch.location.tier << 8);
    const int shared_tiers = __shfl_sync(kAll, tiers, from);
    write_back_tier = shared_tiers & 255;
    fetch_tier = shared_tiers >> 8;
    write_back_element = __shfl_sync(kAll, move.write_back.location.element, from);
    fetch_element = __shfl_sync(kAll, move.fetch.location.element, from);
    slot_element = __shfl_sync(kAll, move.slot * move.cache_stride(), from);
    write_back_dim = __shfl_sync(kAll, static_cast<int>(move.write_back.dim), from);
    fetch_dim = __shfl_sync(kAll, static_cast<int>(move.fetch.dim), from);
    if (source_lane < 0) write_back_dim = fetch_dim = 0;
  }
};

// Assign up to R rows to each group. `pending_lanes` is the mask of the lanes whose rows have not
// been assigned, the same in all lanes; remove the lanes of the assigned rows from it. Write the
// lanes of this group's rows to `source_lanes`, -1 for none.
template <int R>
EMB_DEVICE void assign_rows(unsigned* pending_lanes, const LaneGroup& lane,
                            int (&source_lanes)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) {
    source_lanes[r] = -1;
    for (int g = 0; g < lane.groups_in_warp(); ++g) {
      const int next_lane = __ffs(static_cast<int>(*pending_lanes)) - 1;
      *pending_lanes &= *pending_lanes - 1;
      if (g == lane.group) source_lanes[r] = next_lane;
    }
  }
}

// Return the address of pack number `pack`, 16 bytes, of the row that begins at `element`.
EMB_DEVICE simt::Pack16* pack_at(const TierTensor& tensor, int64_t element, int64_t pack) {
  char* row = static_cast<char*>(tensor.data) + element * element_bytes(tensor.type);
  return reinterpret_cast<simt::Pack16*>(row) + pack;
}

// Move the rows of `pending_lanes`, a mask that is not 0, in tensor number `tensor`, which is
// element-wise. has_aligned_packs must be true for these rows, which have at most `max_packs` packs
// each. All 32 lanes must call this.
EMB_DEVICE void copy_packs(const CacheMemory& memory, int tensor, const RowMove& lane_move,
                           unsigned pending_lanes, int max_packs) {
  constexpr int R = kMoveRows;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const int size = static_cast<int>(element_bytes(cache.type));
  const LaneGroup lane(lanes_per_row(max_packs, 1));
  while (pending_lanes != 0) {
    int source_lanes[R];
    assign_rows(&pending_lanes, lane, source_lanes);
    const simt::Pack16* fetch_row[R];
    simt::Pack16 *write_back_row[R], *slot[R];
    int num_fetch_packs[R], num_write_back_packs[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const GroupMove move(lane_move, source_lanes[r]);
      fetch_row[r] =
          pack_at(memory.tensors[tensor][move.fetch_tier], move.fetch_element, lane.rank);
      write_back_row[r] =
          pack_at(memory.tensors[tensor][move.write_back_tier], move.write_back_element, lane.rank);
      slot[r] = pack_at(cache, move.slot_element, lane.rank);
      num_fetch_packs[r] = move.fetch_dim * size / 16 - lane.rank;
      num_write_back_packs[r] = move.write_back_dim * size / 16 - lane.rank;
    }
    for (int p = 0; p < max_packs; p += lane.lanes) {
      simt::Pack16 fetch_pack[R], write_back_pack[R];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < num_fetch_packs[r]) fetch_pack[r] = fetch_row[r][p];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < num_write_back_packs[r]) write_back_pack[r] = slot[r][p];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < num_write_back_packs[r]) write_back_row[r][p] = write_back_pack[r];
      }
#pragma unroll
      for (int r = 0; r < R; ++r) {
        if (p < num_fetch_packs[r]) slot[r][p] = fetch_pack[r];
      }
    }
  }
}

// Do what copy_packs does, for any alignment and dtypes: a row per group at a time. The rows have
// at most `max_dim` columns.
EMB_DEVICE void convert_columns(const CacheMemory& memory, int tensor, const RowMove& lane_move,
                                unsigned pending_lanes, int max_dim, const Rounding& rounding) {
  constexpr int N = kMoveColumns;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const LaneGroup lane(lanes_per_row(max_dim, N));
  while (pending_lanes != 0) {
    int source_lanes[1];
    assign_rows(&pending_lanes, lane, source_lanes);
    const GroupMove move(lane_move, source_lanes[0]);
    const int64_t write_back_row = __shfl_sync(simt::kFullMask, lane_move.write_back.row,
                                               source_lanes[0] < 0 ? 0 : source_lanes[0]);
    const TierTensor write_back_tensor = memory.tensors[tensor][move.write_back_tier];
    const TierTensor fetch_tensor = memory.tensors[tensor][move.fetch_tier];
    for (int c = lane.rank * N; c < max_dim; c += lane.lanes * N) {
      const int num_write_back_columns = move.write_back_dim - c,
                num_fetch_columns = move.fetch_dim - c;
      float write_back_values[N], fetch_values[N];
      if (num_fetch_columns > 0) {
        read_columns(fetch_tensor.data, fetch_tensor.type, move.fetch_element + c,
                     num_fetch_columns, fetch_values);
      }
      if (num_write_back_columns > 0) {
        read_columns(cache.data, cache.type, move.slot_element + c, num_write_back_columns,
                     write_back_values);
        if (rounding.is_stochastic && write_back_tensor.type != cache.type) {
          round_columns(write_back_tensor.type, rounding, write_back_row, c, tensor,
                        write_back_values);
        }
        write_columns(write_back_tensor.data, write_back_tensor.type, move.write_back_element + c,
                      num_write_back_columns, write_back_values);
      }
      if (num_fetch_columns > 0)
        write_columns(cache.data, cache.type, move.slot_element + c, num_fetch_columns,
                      fetch_values);
    }
  }
}

// Return whether a row can be copied in 16-byte packs between a tensor of its tier and the slot of
// the cache that begins at slot_element: both tensors have one dtype, and the row consists of
// aligned packs in both. Return true if there is no row (dim 0).
EMB_DEVICE bool has_aligned_packs(const CacheMemory& memory, int tensor, const TierRow& row,
                                  int64_t slot_element) {
  if (row.dim == 0) return true;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const TierTensor tier = memory.tensors[tensor][row.location.tier];
  return cache.type == tier.type && row.dim * element_bytes(cache.type) % 16 == 0 &&
         is_aligned(pack_at(tier, row.location.element, 0), 16) &&
         is_aligned(pack_at(cache, slot_element, 0), 16);
}

// Move the rows of a warp, one RowMove per lane, in all tensors. All 32 lanes must call this.
EMB_DEVICE void move_rows(const CacheMemory& memory, const RowMove& lane_move,
                          const Rounding& rounding) {
  const unsigned moving_lanes = __ballot_sync(simt::kFullMask, lane_move.has_row());
  if (moving_lanes == 0) return;
  const int64_t slot_element = lane_move.slot * lane_move.cache_stride();
  const int64_t fetch_dim = lane_move.fetch.dim, write_back_dim = lane_move.write_back.dim;
  const int dim = static_cast<int>(fetch_dim > write_back_dim ? fetch_dim : write_back_dim);
  const int max_dim = __reduce_max_sync(simt::kFullMask, dim);
  for (int k = 0; k < memory.num_tensors; ++k) {
    if (memory.has_entry_per_row(k)) {
      if (lane_move.has_row()) move_entry(memory, k, lane_move, rounding);
      continue;
    }
    const bool has_packs = has_aligned_packs(memory, k, lane_move.fetch, slot_element) &&
                           has_aligned_packs(memory, k, lane_move.write_back, slot_element);
    if (__all_sync(simt::kFullMask, has_packs)) {
      const int64_t size = element_bytes(memory.tensors[k][kCacheTier].type);
      copy_packs(memory, k, lane_move, moving_lanes, static_cast<int>(max_dim * size / 16));
    } else {
      convert_columns(memory, k, lane_move, moving_lanes, max_dim, rounding);
    }
  }
}

// If `is_postponed`, list this lane's fetch in `fetches` and remove it from `move`, which keeps the
// write-back. fetches.count must not be null. All 32 lanes must call this.
EMB_DEVICE void postpone(const PostponedFetches& fetches, RowMove* move, bool is_postponed) {
  const unsigned postponing_lanes = __ballot_sync(simt::kFullMask, is_postponed);
  if (postponing_lanes == 0) return;
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int leader = __ffs(static_cast<int>(postponing_lanes)) - 1;
  int first = 0;
  if (lane == leader) first = atomicAdd(fetches.count, __popc(postponing_lanes));
  first = __shfl_sync(simt::kFullMask, first, leader);
  if (!is_postponed) return;
  const int position = first + __popc(postponing_lanes & ((1u << lane) - 1));
  fetches.rows[position] = move->fetch.row;
  fetches.slots[position] = static_cast<int32_t>(move->slot);
  move->fetch.dim = 0;
}

// Do the first *num_rows moves of a batch, 32 per warp in a grid-stride loop. Fetches that must be
// postponed are listed in `postponed` instead. Rows that got no way are recorded in
// postponed.conflicts unless it is null. A row that does not exist, or whose slot does not exist,
// is skipped.
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
        const TierRow fetch = find_tier_row(memory, row);
        if (can_cache(memory, fetch, move.slot)) {
          move.fetch = fetch;
          move.write_back = find_tier_row(memory, evicted);
          is_postponed = postponed.may_be_updated(move.slot);
        }
      } else if (move.slot < 0 && postponed.conflicts != nullptr) {
        if (find_tier_row(memory, row).dim > 0) postponed.record_conflict(row);
      }
    }
    if (postponed.count != nullptr) postpone(postponed, &move, is_postponed);
    move_rows(memory, move, rounding);
  }
}

// Write back the cacheable rows of `tags`, [num_slots]; they stay in the cache. memory.hyper must
// not be null.
[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    flush_kernel(CacheMemory memory, const int64_t* tags, int64_t num_slots) {
  const Rounding rounding(memory.hyper);
  for (int64_t first = simt::global_warp() * simt::kWarpLanes; first < num_slots;
       first += simt::warps_in_grid() * simt::kWarpLanes) {
    RowMove move;
    move.slot = first + threadIdx.x % simt::kWarpLanes;
    if (move.slot < num_slots) {
      const TierRow row = find_tier_row(memory, tags[move.slot]);
      if (can_cache(memory, row, move.slot)) move.write_back = row;
    }
    move_rows(memory, move, rounding);
  }
}

// Launch move_kernel for the first *num_rows rows of a batch, a number on the device; `n` is the
// length of moves.rows. Here and below `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher, and the functions do not wait for the device.
template <class Launcher>
void launch_move(const Launcher& launcher, const CacheMemory& memory, const CacheMoves& moves,
                 const PostponedFetches& postponed, const int32_t* num_rows, int64_t n) {
  if (n == 0) return;
  launcher(move_kernel, blocks_for(n, kMoveThreads, kMaxMoveBlocks), kMoveThreads, memory, moves,
           postponed, num_rows);
}

// Launch flush_kernel.
template <class Launcher>
void launch_flush(const Launcher& launcher, const CacheMemory& memory, const int64_t* tags,
                  int64_t num_slots) {
  if (num_slots == 0) return;
  launcher(flush_kernel, blocks_for(num_slots, kMoveThreads, kMaxMoveBlocks), kMoveThreads, memory,
           tags, num_slots);
}

}  // namespace emb::cuda
