// `hash_initial_rows_` on the GPU: a warp takes up to 32 new rows of a table, and a lane four
// elements of a row at a time, the words of one Philox counter.
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

// Write the rows of misses [begin, begin + count) of table t in one array. Rows have far fewer than
// 2^29 elements, so 32 bits can number the counters of 32 rows.
EMB_DEVICE void write_initial(const InitialRows& rows, int t, int buffer, int64_t begin,
                              int count) {
  const InitialLayout layout = rows.layout[int64_t{t} * rows.num_buffers + buffer];
  const InitialRule& rule = rows.rules[int64_t{t} * rows.num_buffers + buffer];
  const InitialBuffer& out = rows.buffers[buffer];
  const auto blocks = static_cast<uint32_t>((layout.dim + 3) / 4);
  for (uint32_t i = threadIdx.x % simt::kWarp; i < blocks * count; i += simt::kWarp) {
    const uint32_t row = i / blocks, block = i - row * blocks;
    const int64_t slot = rows.slots[begin + row];
    if (slot < 0 || slot >= layout.rows) continue;
    const int64_t column = int64_t{4} * block, left = layout.dim - column;
    float values[4];
    initial_values(rule, layout, rows.ids[rows.first[begin + row]], rows.seed, block, values);
    write_columns(out.data, out.type, layout.offset + slot * layout.stride + column,
                  left < 4 ? static_cast<int>(left) : 4, values);
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
      for (int buffer = 0; buffer < rows.num_buffers; ++buffer) {
        write_initial(rows, t, buffer, miss, static_cast<int>(stop - miss));
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
