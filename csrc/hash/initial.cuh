// `hash_initial_rows_` on the GPU: writes the initial rows of new keys. A warp writes up to 32 new
// rows of one table, in one row buffer after the other. A lane computes four neighbouring elements
// of a row at a time. Their random numbers are the words of one Philox counter. All pointers are to
// device memory of the caller; their contents are not checked.
#pragma once

#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "hash/initial.h"

namespace emb::cuda {

inline constexpr int kMaxInitialBuffers = 16;  // maximum number of row buffers

// A row buffer: the weights, or one state, of all tables in one array.
struct InitialBuffer {
  void* data;
  Dtype type;
};

// The arguments of the kernel, for T tables and P row buffers. InitialInputs (check.h) describes
// the tensors.
struct DeviceInitialRows {
  InitialBuffer buffers[kMaxInitialBuffers];  // [P]
  int num_buffers, num_tables;                // P, T
  const InitialLayout* layout;                // [T, P]
  const InitialRule* rules;                   // [T, P]
  const int64_t* ids;                         // by position: ids of the batch
  const int64_t* first_positions;             // by miss: a position of its key in `ids`
  const int64_t* offsets;  // [T + 1]: table t has the misses [offsets[t], offsets[t + 1])
  const int64_t* slots;    // by miss: slot of its table; outside [0, InitialLayout::rows): no row
  uint64_t seed;
};

// Write to `values` the elements [4 * block, 4 * block + 4) of the initial row of `key`.
EMB_DEVICE void initial_values(const InitialRule& rule, const InitialLayout& layout, int64_t key,
                               uint64_t seed, uint32_t block, float (&values)[4]) {
  const auto kind = static_cast<InitialKind>(static_cast<int>(rule.kind));
  if (kind == InitialKind::kConstant || kind == InitialKind::kKeyModulo) {
    const float value = value_of_row(rule, key);
    for (int w = 0; w < 4; ++w) values[w] = value;
    return;
  }
  const Random4 random = philox(seed, row_counter(layout.stream, key, block));
  if (kind == InitialKind::kUniform) {
#pragma unroll
    for (int w = 0; w < 4; ++w) values[w] = uniform_value(rule, random.word[w]);
  } else {
#pragma unroll
    for (int w = 0; w < 4; ++w) values[w] = normal_value(rule, random.word[w]);
  }
}

// Write the rows of misses [begin, begin + num_rows) of table t, at most 32, in row buffer number
// `buffer`. All 32 lanes must call this. Rows must have at most 2^28 elements, so that 32 bits can
// number the Philox counters of 32 rows; not checked.
EMB_DEVICE void write_initial_rows(const DeviceInitialRows& rows, int t, int buffer, int64_t begin,
                                   int num_rows) {
  const InitialLayout layout = rows.layout[int64_t{t} * rows.num_buffers + buffer];
  const InitialRule& rule = rows.rules[int64_t{t} * rows.num_buffers + buffer];
  const InitialBuffer& out = rows.buffers[buffer];
  const auto blocks = static_cast<uint32_t>((layout.dim + 3) / 4);
  for (uint32_t i = threadIdx.x % simt::kWarpLanes; i < blocks * num_rows; i += simt::kWarpLanes) {
    const uint32_t row = i / blocks, block = i - row * blocks;
    const int64_t slot = rows.slots[begin + row];
    if (slot < 0 || slot >= layout.rows) continue;
    const int64_t column = int64_t{4} * block, num_columns = layout.dim - column;
    float values[4];
    initial_values(rule, layout, rows.ids[rows.first_positions[begin + row]], rows.seed, block,
                   values);
    write_columns(out.data, out.type, layout.offset + slot * layout.stride + column,
                  num_columns < 4 ? static_cast<int>(num_columns) : 4, values);
  }
}

// Write the rows of all misses. A warp writes the rows of 32 neighbouring misses, table by table.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    initial_rows_kernel(DeviceInitialRows rows) {
  const auto start = [&](int t) { return rows.offsets[t]; };
  const int64_t begin = rows.offsets[0], end = rows.offsets[rows.num_tables];
  constexpr int64_t kTileMisses = simt::kWarpLanes;
  for (int64_t tile = begin + simt::global_warp() * kTileMisses; tile < end;
       tile += simt::warps_in_grid() * kTileMisses) {
    const int64_t tile_end = tile + kTileMisses < end ? tile + kTileMisses : end;
    for (int64_t miss = tile; miss < tile_end;) {
      const int t = warp_search(start, rows.num_tables, miss);
      const int64_t table_end = rows.offsets[t + 1],
                    end_of_run = table_end < tile_end ? table_end : tile_end;
      for (int buffer = 0; buffer < rows.num_buffers; ++buffer) {
        write_initial_rows(rows, t, buffer, miss, static_cast<int>(end_of_run - miss));
      }
      miss = end_of_run;
    }
  }
}

// Launch `hash_initial_rows_`. `n`, the maximum number of misses, sizes the grid, because only the
// device knows their number.
template <class Launcher>
void launch_initial_rows(const Launcher& launcher, const DeviceInitialRows& rows, int64_t n) {
  if (n == 0 || rows.num_tables == 0) return;
  launcher(
      initial_rows_kernel,
      blocks_for(n, kTileThreads, launcher.max_grid_blocks(kResidentThreadsPerSm / kTileThreads)),
      kTileThreads, rows);
}

}  // namespace emb::cuda
