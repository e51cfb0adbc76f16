// Rows and their optimizer states on their way between the cache and the tier of their table, on
// the GPU, a warp a row. A lane owns the same columns of the row that leaves and of the one that
// comes, so it has read a column of the slot before it overwrites it and no lane waits for another.
#pragma once

#include "cache/args.h"
#include "core/row_piece.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kMoveThreads = 256;
inline constexpr int kMoveColumns = 4;

// Columns [column, column + valid) of a row, on their way out of the cache.
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

// This lane's share of one tensor: what is in the slot goes to the place of row `out`, and then row
// `in` comes. Either may be missing (dim 0).
EMB_DEVICE void move_tensor(const CacheMemory& memory, int tensor, const HomeRow& out,
                            const HomeRow& in, int64_t slot, const Rounding& rounding) {
  const bool by_row = memory.is_by_row(tensor);
  const int64_t out_dim = by_row && out.dim > 0 ? 1 : out.dim;
  const int64_t in_dim = by_row && in.dim > 0 ? 1 : in.dim;
  const int64_t dim = out_dim > in_dim ? out_dim : in_dim;
  const Stored cache = memory.tensors[tensor][kCacheTier];
  const Stored out_home = memory.tensors[tensor][out.place.tier];
  const Stored in_home = memory.tensors[tensor][in.place.tier];
  const int64_t stride = out.dim > 0 ? out.stride : in.stride;
  const int64_t start = by_row ? slot : slot * stride;
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  for (int64_t c = lane * kMoveColumns; c < dim; c += simt::kWarp * kMoveColumns) {
    const int leaving = static_cast<int>(out_dim - c), coming = static_cast<int>(in_dim - c);
    float old[kMoveColumns], fresh[kMoveColumns];
    if (leaving > 0) read_columns(cache.data, cache.type, start + c, leaving, old);
    if (coming > 0) {
      read_columns(in_home.data, in_home.type, entry(memory, tensor, in.place) + c, coming, fresh);
    }
    if (leaving > 0) {
      if (rounding.stochastic && out_home.type != cache.type) {
        round_columns(out_home.type, rounding, out.row, c, tensor, old);
      }
      write_columns(out_home.data, out_home.type, entry(memory, tensor, out.place) + c, leaving,
                    old);
    }
    if (coming > 0) write_columns(cache.data, cache.type, start + c, coming, fresh);
  }
}

EMB_DEVICE void move_row(const CacheMemory& memory, const HomeRow& out, const HomeRow& in,
                         int64_t slot, const Rounding& rounding) {
  for (int k = 0; k < memory.num_tensors; ++k) move_tensor(memory, k, out, in, slot, rounding);
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    move_kernel(CacheMemory memory, CacheMoves moves, const int32_t* num_rows) {
  const Rounding rounding(memory.hyper);
  const int64_t count = *num_rows;
  for (int64_t u = simt::global_warp(); u < count; u += simt::warps_in_grid()) {
    const int64_t evicted = moves.evicted[u], slot = moves.row_slots[u];
    if (evicted == kNothingMoves) continue;
    const HomeRow in = find_home(memory, moves.rows[u]), out = find_home(memory, evicted);
    if (fits(memory, in, slot)) move_row(memory, out, in, slot, rounding);
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMoveThreads)
    flush_kernel(CacheMemory memory, const int64_t* tags, int64_t num_slots) {
  const Rounding rounding(memory.hyper);
  for (int64_t slot = simt::global_warp(); slot < num_slots; slot += simt::warps_in_grid()) {
    const HomeRow out = find_home(memory, tags[slot]), none = find_home(memory, kNoRow);
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
