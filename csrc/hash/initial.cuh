// `hash_initial_rows_` on the GPU: a warp takes up to 32 new rows of a table, of which each lane
// loads one slot and key. Then a lane takes four elements of a row at a time, the words of one
// Philox counter, and gets slot and key of that row by shuffles.
#pragma once

#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "hash/initial.h"

namespace emb::cuda {

inline constexpr int kMaxInitialBuffers = 16;

struct InitialBuffer {
  void* data;
  Dtype type;
};

struct InitialRows {
  InitialBuffer buffers[kMaxInitialBuffers];
  int num_buffers, num_tables;
  const InitialLayout* layout;  // [T, P]
  const InitialRule* rules;     // [T, P]
  const int64_t *ids, *first, *offsets, *slots;
  uint64_t seed;
};

EMB_DEVICE void initial_values(const InitialRule& rule, const InitialLayout& layout, int64_t key,
                               uint64_t seed, uint32_t block, float (&values)[4]) {
  const auto kind = static_cast<InitialKind>(static_cast<int>(rule.kind));
  if (kind == InitialKind::kConstant || kind == InitialKind::kKeyModulo) {
    const float value = plain_value(rule, key);
    for (int w = 0; w < 4; ++w) values[w] = value;
    return;
  }
  const Random4 random = row_words(seed, layout.stream, key, block);
  if (kind == InitialKind::kUniform) {
#pragma unroll
    for (int w = 0; w < 4; ++w) values[w] = uniform_value(rule, random.word[w]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) values[w] = normal_value(rule, random.word[w]);
  }
}

// Write one array of the rows of a warp's misses, whose slot and key each lane has: slot -1 for
// none. Rows have far fewer than 2^29 elements, so 32 bits can number the counters of 32 rows.
EMB_DEVICE void write_initial(const InitialRows& rows, int t, int buffer, int count, int64_t slot,
                              int64_t key) {
  const InitialLayout layout = rows.layout[int64_t{t} * rows.num_buffers + buffer];
  const InitialRule& rule = rows.rules[int64_t{t} * rows.num_buffers + buffer];
  const InitialBuffer& out = rows.buffers[buffer];
  const auto blocks = static_cast<uint32_t>((layout.dim + 3) / 4), total = blocks * count;
  const uint32_t lane = threadIdx.x % simt::kWarp;
  if (blocks == 0) return;
  uint32_t row = lane / blocks, block = lane - row * blocks;
  for (uint32_t begin = 0; begin < total; begin += simt::kWarp) {
    const int source = static_cast<int>(row % simt::kWarp);
    const int64_t slot_of_row = __shfl_sync(simt::kFullMask, slot, source);
    const int64_t key_of_row = __shfl_sync(simt::kFullMask, key, source);
    if (begin + lane < total && slot_of_row >= 0 && slot_of_row < layout.rows) {
      const int64_t column = int64_t{4} * block, left = layout.dim - column;
      float values[4];
      initial_values(rule, layout, key_of_row, rows.seed, block, values);
      write_columns(out.data, out.type, layout.offset + slot_of_row * layout.stride + column,
                    left < 4 ? static_cast<int>(left) : 4, values);
    }
    block += simt::kWarp;
    if (block >= blocks) {
      row += block / blocks;
      block %= blocks;
    }
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    initial_rows_kernel(InitialRows rows) {
  const auto start = [&](int t) { return rows.offsets[t]; };
  const int64_t begin = rows.offsets[0], end = rows.offsets[rows.num_tables];
  constexpr int64_t kRows = simt::kWarp;
  for (int64_t tile = begin + simt::global_warp() * kRows; tile < end;
       tile += simt::warps_in_grid() * kRows) {
    const int64_t tile_end = tile + kRows < end ? tile + kRows : end;
    for (int64_t miss = tile; miss < tile_end;) {
      const int t = warp_search(start, rows.num_tables, miss);
      const int64_t next = rows.offsets[t + 1], stop = next < tile_end ? next : tile_end;
      const int64_t mine = miss + threadIdx.x % simt::kWarp;
      const int64_t slot = mine < stop ? rows.slots[mine] : -1;
      const int64_t key = slot >= 0 ? rows.ids[rows.first[mine]] : 0;
      if (__any_sync(simt::kFullMask, slot >= 0)) {
        for (int buffer = 0; buffer < rows.num_buffers; ++buffer) {
          write_initial(rows, t, buffer, static_cast<int>(stop - miss), slot, key);
        }
      }
      miss = stop;
    }
  }
}

// `n` is the maximum number of new rows.
template <class Launcher>
void launch_initial_rows(const Launcher& launcher, const InitialRows& rows, int64_t n) {
  if (n == 0 || rows.num_tables == 0) return;
  launcher(initial_rows_kernel, blocks_for(n, kTileThreads, launcher.blocks(8)), kTileThreads,
           rows);
}

}  // namespace emb::cuda
