// Reads and writes of rows of T (float, half16 or bfloat16) by the lanes of a warp. In order:
//   * RowSlice holds N neighbouring columns of a row in the registers of one lane, in the format of
//     memory until a column is used, so that several rows in flight need few registers;
//   * read_columns, write_columns, stream_vector and stream_columns move columns as floats;
//   * LaneGroup divides a warp into groups of lanes that share a row;
//   * limits of grids;
//   * add_rows is the inner loop over the rows of a bag or of a group.
// Each lane calls these functions alone; only add_rows needs the whole warp.
//
// In this file `num_valid` is the number of columns from an address to the end of the row: columns
// from `num_valid` on are neither read nor written. It may be 0 or negative.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/half.h"
#include "core/simt.cuh"

namespace emb::cuda {

// Return the number of this lane in its warp, as a signed integer.
EMB_DEVICE int lane_in_warp() { return static_cast<int>(threadIdx.x % simt::kWarpLanes); }
// The lanes of a warp, as a signed integer.
inline constexpr int kWarpLanes = static_cast<int>(simt::kWarpLanes);

// N columns of a row in registers, initially 0: 8 or 16 bytes. slice[k] is column k as a float.
template <class T, int N>
struct RowSlice {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes == 8 || kBytes == 16);

  uint32_t word[kWords] = {};  // the bytes of the columns, as in memory

  EMB_DEVICE float operator[](int k) const {
    if constexpr (sizeof(T) == 4) {
      return float_from_bits(word[k]);
    } else {
      return to_float(T{static_cast<uint16_t>(word[k / 2] >> (k % 2 * 16))});
    }
  }

  // Load all N columns at once from `address`, which must be a multiple of kBytes. Uses the
  // read-only path: no thread of the kernel may write the memory.
  EMB_DEVICE void load_vector(const T* address) {
    if constexpr (kBytes == 16) {
      const simt::Pack16 pack = simt::load(reinterpret_cast<const simt::Pack16*>(address));
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = pack.word[i];
    } else {
      const simt::Pack8 pack = simt::load(reinterpret_cast<const simt::Pack8*>(address));
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = pack.word[i];
    }
  }

  // Load the first `num_valid` columns one by one from any address; the others become 0.
  EMB_DEVICE void load_scalar(const T* address, int num_valid) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      uint32_t bits = 0;
      if (k < num_valid) {
        if constexpr (sizeof(T) == 4) {
          bits = float_bits(address[k]);
        } else {
          bits = address[k].bits;
        }
      }
      if constexpr (sizeof(T) == 4) {
        word[k] = bits;
      } else {
        word[k / 2] = k % 2 == 0 ? bits : word[k / 2] | bits << 16;
      }
    }
  }

  // Call load_vector if kVector, which ignores `num_valid`; otherwise load_scalar.
  template <bool kVector>
  EMB_DEVICE void load(const T* address, int num_valid) {
    if constexpr (kVector) {
      load_vector(address);
    } else {
      load_scalar(address, num_valid);
    }
  }
};

// Return whether an address is a multiple of `bytes`, a power of two.
EMB_HD bool is_aligned(const void* address, int bytes) {
  return (reinterpret_cast<uintptr_t>(address) & static_cast<uintptr_t>(bytes - 1)) == 0;
}

// Read the first `num_valid` of N columns as floats; the others become 0. N columns have a power of
// two of bytes. If all are valid and the address is aligned, they are read in accesses of 16 bytes,
// or of their size if that is less; otherwise one by one. Does not use the read-only path, so a
// thread of the kernel may write the memory.
template <class T, int N>
EMB_DEVICE void read_columns(const T* address, int num_valid, float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  struct alignas(kBytes < 16 ? kBytes : 16) Block {
    T element[N];
  };
  if (num_valid >= N && is_aligned(address, alignof(Block))) {
    const Block block = *reinterpret_cast<const Block*>(address);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_float(block.element[k]);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = k < num_valid ? to_float(address[k]) : 0.0f;
  }
}

// Write the first `num_valid` of N columns, rounded to nearest, in accesses like those of
// read_columns.
template <class T, int N>
EMB_DEVICE void write_columns(T* address, int num_valid, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  struct alignas(kBytes < 16 ? kBytes : 16) Block {
    T element[N];
  };
  if (num_valid >= N && is_aligned(address, alignof(Block))) {
    Block block;
#pragma unroll
    for (int k = 0; k < N; ++k) block.element[k] = from_float<T>(values[k]);
    *reinterpret_cast<Block*>(address) = block;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < num_valid) address[k] = from_float<T>(values[k]);
    }
  }
}

// Write all N columns of an output row, rounded to nearest, with `store_streaming`: the cache may
// drop them first. The address must be a multiple of 16 bytes, or of 8 if N columns have only 8.
template <class T, int N>
EMB_DEVICE void stream_vector(T* address, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Pack = std::conditional_t<(kBytes < 16), simt::Pack8, simt::Pack16>;
  constexpr int kPacks = kBytes / static_cast<int>(sizeof(Pack));
  constexpr int kPackColumns = N / kPacks, kWords = static_cast<int>(sizeof(Pack)) / 4;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    Pack pack;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 4) {
        pack.word[w] = float_bits(values[p * kPackColumns + w]);
      } else {
        const float* pair = values + p * kPackColumns + 2 * w;
        pack.word[w] =
            from_float<T>(pair[0]).bits | static_cast<uint32_t>(from_float<T>(pair[1]).bits) << 16;
      }
    }
    simt::store_streaming(reinterpret_cast<Pack*>(address) + p, pack);
  }
}

// Write the first `num_valid` of N columns of an output row at any address, rounded to nearest:
// through stream_vector if all are valid and the address allows it, otherwise one by one.
template <class T, int N>
EMB_DEVICE void stream_columns(T* address, int num_valid, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  if (num_valid >= N && is_aligned(address, kBytes < 16 ? 8 : 16)) {
    stream_vector(address, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < num_valid) address[k] = from_float<T>(values[k]);
  }
}

// These overloads take data whose dtype `type` is known at run time only, and access the columns
// from element `element` of `data` on. The branch is the same for the whole warp, so its cost is
// not noticeable.
template <int N>
EMB_DEVICE void read_columns(const void* data, Dtype type, int64_t element, int num_valid,
                             float (&values)[N]) {
  if (type == Dtype::kFloat) {
    read_columns(static_cast<const float*>(data) + element, num_valid, values);
  } else if (type == Dtype::kHalf) {
    read_columns(static_cast<const half16*>(data) + element, num_valid, values);
  } else {
    read_columns(static_cast<const bfloat16*>(data) + element, num_valid, values);
  }
}

template <int N>
EMB_DEVICE void write_columns(void* data, Dtype type, int64_t element, int num_valid,
                              const float (&values)[N]) {
  if (type == Dtype::kFloat) {
    write_columns(static_cast<float*>(data) + element, num_valid, values);
  } else if (type == Dtype::kHalf) {
    write_columns(static_cast<half16*>(data) + element, num_valid, values);
  } else {
    write_columns(static_cast<bfloat16*>(data) + element, num_valid, values);
  }
}

template <int N>
EMB_DEVICE void stream_vector(void* data, Dtype type, int64_t element, const float (&values)[N]) {
  if (type == Dtype::kFloat) {
    stream_vector(static_cast<float*>(data) + element, values);
  } else if (type == Dtype::kHalf) {
    stream_vector(static_cast<half16*>(data) + element, values);
  } else {
    stream_vector(static_cast<bfloat16*>(data) + element, values);
  }
}

template <int N>
EMB_DEVICE void stream_columns(void* data, Dtype type, int64_t element, int num_valid,
                               const float (&values)[N]) {
  if (type == Dtype::kFloat) {
    stream_columns(static_cast<float*>(data) + element, num_valid, values);
  } else if (type == Dtype::kHalf) {
    stream_columns(static_cast<half16*>(data) + element, num_valid, values);
  } else {
    stream_columns(static_cast<bfloat16*>(data) + element, num_valid, values);
  }
}

// The position of a lane in a warp that is divided into groups of `lanes` lanes, a power of two
// from 4 to 32. The lanes of a group share a row, N columns each.
struct LaneGroup {
  int lanes;  // number of lanes per group
  int group;  // index of this lane's group in the warp
  int rank;   // index of this lane in its group

  EMB_DEVICE explicit LaneGroup(int lanes_of_group) : lanes(lanes_of_group) {
    group = lane_in_warp() / lanes;
    rank = lane_in_warp() - group * lanes;
  }
  EMB_DEVICE int groups_in_warp() const { return kWarpLanes / lanes; }
};

// Return how many lanes a LaneGroup needs to cover a row of `dim` columns with `columns_per_lane`
// columns each: a power of two from 4 to 32; 32 also for a wider row. Both arguments may count
// another unit than columns, such as packs of 16 bytes.
EMB_HD int lanes_per_row(int64_t dim, int columns_per_lane) {
  int lanes = 4;
  while (lanes < kWarpLanes && static_cast<int64_t>(lanes) * columns_per_lane < dim) lanes *= 2;
  return lanes;
}

// The maximum number of blocks in the second dimension of a grid, in kernels in which this
// dimension divides the columns of wide rows into stripes.
inline constexpr int64_t kMaxStripes = 64;

// The maximum number of blocks that a multiprocessor of an A100 or H100 holds at once; their
// threads or registers may limit it further. Many grids with grid-stride loops have at most this
// number of blocks per multiprocessor, times a factor: greater than 1 where items differ in length,
// so that new blocks replace blocks that end early; less than 1 for short kernels, whose blocks
// have little to do.
inline constexpr int kResidentBlocksPerSm = 32;
// The maximum number of threads that a multiprocessor of an A100 or H100 holds at once. A grid of
// kResidentThreadsPerSm / block size blocks per multiprocessor fills the device, and all blocks
// begin at once if registers and shared memory allow it.
inline constexpr int kResidentThreadsPerSm = 2048;

// Return the number of blocks of a grid for num_items items, `items_per_block` each; at least 1 and
// at most `max_blocks`.
inline unsigned blocks_for(int64_t num_items, int64_t items_per_block, int64_t max_blocks) {
  const int64_t blocks = (num_items + items_per_block - 1) / items_per_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : (blocks < max_blocks ? blocks : max_blocks));
}

inline constexpr int kRowsInFlight = 4;  // rows that a lane loads before it uses the first

// Add weighted rows from arbitrary addresses to `sum`: the inner loop of forward and backward. Each
// of the first `num_row_lanes` lanes of a group passes one row: `offset`, the number of elements
// from row 0 of the table to the row, negative for no row, and `weight`. The other lanes must pass
// a negative offset and the weight 0. Every lane adds its columns of these rows, in the order of
// the lanes, with kRowsInFlight rows in flight.
//
// `base` is the address of this lane's first column in row 0 of the table, and kVector requires
// that the columns of every row can be loaded by load_vector. `lanes` is the number of lanes per
// group. All 32 lanes of the warp must call this with the same `lanes` and `num_row_lanes`.
template <class T, int N, bool kVector>
EMB_DEVICE void add_rows(const T* base, int64_t offset, float weight, int num_valid, int lanes,
                         int num_row_lanes, float (&sum)[N]) {
  for (int k = 0; k < num_row_lanes; k += kRowsInFlight) {
    RowSlice<T, N> slices[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row_offset = __shfl_sync(simt::kFullMask, offset, k + u, lanes);
      if (row_offset >= 0 && num_valid > 0)
        slices[u].template load<kVector>(base + row_offset, num_valid);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const float row_weight = __shfl_sync(simt::kFullMask, weight, k + u, lanes);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += row_weight * slices[u][e];
    }
  }
}

}  // namespace emb::cuda
