// Moves rows and their optimizer states between the cache and the tiers of their tables on the GPU,
// one warp per row. A lane owns the same columns of the row that leaves a slot and of the row that
// enters it: it reads a column of the slot before it overwrites it, and no lane waits for another.
#pragma once

#include "cache/args.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kMoveThreads = 256;
inline constexpr int kMoveColumns = 4;

// Round columns [column, column + valid) of a row that is written back.
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

// Move this lane's columns of one tensor: write back the contents of the slot to row `out`, then
// fetch row `in`. Either may be missing (dim 0).
EMB_DEVICE void move_tensor(const CacheMemory& memory, int tensor, const TierRow& out,
                            const TierRow& in, int64_t slot, const Rounding& rounding) {
  const bool by_row = memory.is_by_row(tensor);
  const int64_t out_dim = by_row && out.dim > 0 ? 1 : out.dim;
  const int64_t in_dim = by_row && in.dim > 0 ? 1 : in.dim;
  const int64_t dim = out_dim > in_dim ? out_dim : in_dim;
  const TierTensor cache = memory.tensors[tensor][kCacheTier];
  const TierTensor out_tensor = memory.tensors[tensor][out.location.tier];
  const TierTensor in_tensor = memory.tensors[tensor][in.location.tier];
  const int64_t stride = out.dim > 0 ? out.stride : in.stride;
  const int64_t start = by_row ? slot : slot * stride;
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  for (int64_t c = lane * kMoveColumns; c < dim; c += simt::kWarp * kMoveColumns) {
    const int out_valid = static_cast<int>(out_dim - c), in_valid = static_cast<int>(in_dim - c);
    float out_values[kMoveColumns], in_values[kMoveColumns];
    if (out_valid > 0) read_columns(cache.data, cache.type, start + c, out_valid, out_values);
    if (in_valid > 0) {
      read_columns(in_tensor.data, in_tensor.type, entry(memory, tensor, in.location) + c, in_valid,
                   in_values);
    }
    if (out_valid > 0) {
      if (rounding.stochastic && out_tensor.type != cache.type) {
        round_columns(out_tensor.type, rounding, out.row, c, tensor, out_values);
      }
      write_columns(out_tensor.data, out_tensor.type, entry(memory, tensor, out.location) + c,
                    out_valid, out_values);
    }
    if (in_valid > 0) write_columns(cache.data, cache.type, start + c, in_valid, in_values);
  }
}

EMB_DEVICE void move_row(const CacheMemory& memory, const TierRow& out, const TierRow& in,
                         int64_t slot, const Rounding& rounding) {
  for (int k = 0; k < memory.num_tensors; ++k) move_tensor(memory, k, out, in, slot, rounding);
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    move_kernel(CacheMemory memory, CacheMoves moves, const int32_t* num_rows) {
  const Rounding rounding(memory.hyper);
  const int64_t count = *num_rows;
  for (int64_t u = simt::global_warp(); u < count; u += simt::warps_in_grid()) {
    const int64_t evicted = moves.evicted[u], slot = moves.row_slots[u];
    if (evicted == kNoMove) continue;
    const TierRow in = find_tier_row(memory, moves.rows[u]), out = find_tier_row(memory, evicted);
    if (fits(memory, in, slot)) move_row(memory, out, in, slot, rounding);
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    flush_kernel(CacheMemory memory, const int64_t* tags, int64_t num_slots) {
  const Rounding rounding(memory.hyper);
  for (int64_t slot = simt::global_warp(); slot < num_slots; slot += simt::warps_in_grid()) {
    const TierRow out = find_tier_row(memory, tags[slot]), none = find_tier_row(memory, kNoRow);
    if (fits(memory, out, slot)) move_row(memory, out, none, slot, rounding);
  }
}

template <class Launcher>
void launch_move(const Launcher& launcher, const CacheMemory& memory, const CacheMoves& moves,
                 const int32_t* count, int64_t n) {
  if (n == 0) return;
  launcher(move_kernel, blocks_for(n, kMoveThreads / simt::kWarp, launcher.blocks(32)),
           kMoveThreads, memory, moves, count);
}

template <class Launcher>
void launch_flush(const Launcher& launcher, const CacheMemory& memory, const int64_t* tags,
                  int64_t num_slots) {
  if (num_slots == 0) return;
  launcher(flush_kernel, blocks_for(num_slots, kMoveThreads / simt::kWarp, launcher.blocks(32)),
           kMoveThreads, memory, tags, num_slots);
}

}  // namespace emb::cuda
