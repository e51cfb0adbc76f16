// Slices of a row: a lane owns N neighbouring columns and moves them in one access of N * sizeof(T)
// bytes where the alignment of the row allows, otherwise element by element. In registers a slice
// stays in storage format until it is used, so that several rows in flight need few registers.
#pragma once

#include <type_traits>

#include "core/dtype.h"
#include "core/half.h"
#include "core/simt.cuh"

namespace emb::cuda {

template <class T, int N>
struct RowSlice {
  static constexpr int kBytes = N * static_cast<int>(sizeof(T));
  static constexpr int kWords = kBytes / 4;
  static_assert(kBytes == 8 || kBytes == 16);

  uint32_t word[kWords] = {};

  EMB_DEVICE float operator[](int k) const {
    if constexpr (sizeof(T) == 4) {
      return bits_float(word[k]);
    } else {
      return to_float(T{static_cast<uint16_t>(word[k / 2] >> (k % 2 * 16))});
    }
  }

  // Load columns [0, N) from `address`, which must be a multiple of kBytes.
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

  // Load the first `valid` columns from any address; the others become 0.
  EMB_DEVICE void load_scalar(const T* address, int valid) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      uint32_t bits = 0;
      if (k < valid) {
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

  template <bool kVector>
  EMB_DEVICE void load(const T* address, int valid) {
    if constexpr (kVector) {
      load_vector(address);
    } else {
      load_scalar(address, valid);
    }
  }
};

EMB_HD bool is_aligned(const void* address, int bytes) {
  return (reinterpret_cast<uintptr_t>(address) & static_cast<uintptr_t>(bytes - 1)) == 0;
}

// Read the first `valid` of N columns as floats, in one access if aligned. Unlike RowSlice::load it
// does not use the read-only path: the same kernel may write the memory.
template <class T, int N>
EMB_DEVICE void read_columns(const T* address, int valid, float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  struct alignas(kBytes < 16 ? kBytes : 16) Block {
    T element[N];
  };
  if (valid >= N && is_aligned(address, alignof(Block))) {
    const Block block = *reinterpret_cast<const Block*>(address);
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = to_float(block.element[k]);
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) values[k] = k < valid ? to_float(address[k]) : 0.0f;
  }
}

template <class T, int N>
EMB_DEVICE void write_columns(T* address, int valid, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  struct alignas(kBytes < 16 ? kBytes : 16) Block {
    T element[N];
  };
  if (valid >= N && is_aligned(address, alignof(Block))) {
    Block block;
#pragma unroll
    for (int k = 0; k < N; ++k) block.element[k] = from_float<T>(values[k]);
    *reinterpret_cast<Block*>(address) = block;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < valid) address[k] = from_float<T>(values[k]);
    }
  }
}

// Write N columns of an output, aligned to 16 bytes or to all of them, with `store_streaming`.
template <class T, int N>
EMB_DEVICE void stream_vector(T* address, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  using Pack = std::conditional_t < kBytes<16, simt::Pack8, simt::Pack16>;
  constexpr int kPacks = kBytes / static_cast<int>(sizeof(Pack));
  constexpr int kEach = N / kPacks, kWords = static_cast<int>(sizeof(Pack)) / 4;
#pragma unroll
  for (int p = 0; p < kPacks; ++p) {
    Pack pack;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if constexpr (sizeof(T) == 4) {
        pack.word[w] = float_bits(values[p * kEach + w]);
      } else {
        const float* pair = values + p * kEach + 2 * w;
        pack.word[w] =
            from_float<T>(pair[0]).bits | static_cast<uint32_t>(from_float<T>(pair[1]).bits) << 16;
      }
    }
    simt::store_streaming(reinterpret_cast<Pack*>(address) + p, pack);
  }
}

// The same for the first `valid` columns and any alignment.
template <class T, int N>
EMB_DEVICE void stream_columns(T* address, int valid, const float (&values)[N]) {
  constexpr int kBytes = N * static_cast<int>(sizeof(T));
  if (valid >= N && is_aligned(address, kBytes < 16 ? 8 : 16)) {
    stream_vector(address, values);
    return;
  }
#pragma unroll
  for (int k = 0; k < N; ++k) {
    if (k < valid) address[k] = from_float<T>(values[k]);
  }
}

// The same for a dtype that is known at run time only: one uniform branch per row costs nothing.
template <int N>
EMB_DEVICE void read_columns(const void* data, Dtype type, int64_t element, int valid,
                             float (&values)[N]) {
  if (type == Dtype::kFloat) {
    read_columns(static_cast<const float*>(data) + element, valid, values);
  } else if (type == Dtype::kHalf) {
    read_columns(static_cast<const half16*>(data) + element, valid, values);
  } else {
    read_columns(static_cast<const bfloat16*>(data) + element, valid, values);
  }
}

template <int N>
EMB_DEVICE void write_columns(void* data, Dtype type, int64_t element, int valid,
                              const float (&values)[N]) {
  if (type == Dtype::kFloat) {
    write_columns(static_cast<float*>(data) + element, valid, values);
  } else if (type == Dtype::kHalf) {
    write_columns(static_cast<half16*>(data) + element, valid, values);
  } else {
    write_columns(static_cast<bfloat16*>(data) + element, valid, values);
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
EMB_DEVICE void stream_columns(void* data, Dtype type, int64_t element, int valid,
                               const float (&values)[N]) {
  if (type == Dtype::kFloat) {
    stream_columns(static_cast<float*>(data) + element, valid, values);
  } else if (type == Dtype::kHalf) {
    stream_columns(static_cast<half16*>(data) + element, valid, values);
  } else {
    stream_columns(static_cast<bfloat16*>(data) + element, valid, values);
  }
}

// A warp is divided into groups that share a row: `lanes` lanes (4 to 32) of N columns each.
struct LaneGroup {
  int lanes;  // lanes of a group
  int group;  // this lane's group within the warp
  int rank;   // this lane within its group

  EMB_DEVICE explicit LaneGroup(int lanes_of_group) : lanes(lanes_of_group) {
    const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
    group = lane / lanes;
    rank = lane - group * lanes;
  }
  EMB_DEVICE int groups_in_warp() const { return static_cast<int>(simt::kWarp) / lanes; }
};

// Return the smallest group whose lanes cover a row of `dim` columns at once, N per lane.
inline int lanes_for(int64_t dim, int columns_of_lane) {
  int lanes = 4;
  while (lanes < 32 && static_cast<int64_t>(lanes) * columns_of_lane < dim) lanes *= 2;
  return lanes;
}

inline unsigned blocks_for(int64_t work, int64_t work_of_block, int64_t limit) {
  const int64_t blocks = (work + work_of_block - 1) / work_of_block;
  return static_cast<unsigned>(blocks < 1 ? 1 : blocks < limit ? blocks : limit);
}

inline constexpr int kRowsInFlight = 4;

// The inner loop of forward and backward: a group of lanes adds up rows from arbitrary addresses,
// four in flight, in the order of the lanes.
//
// Add `weight` times the row at `offset` (elements from `base`; negative: none) for the first
// `steps` lanes of a group, each of which holds the offset and the weight of one row. `base` points
// at this lane's first column; `valid` is the number of columns from there to the end of the row.
// All lanes of the warp call it with equal `steps`.
template <class T, int N, bool kVector>
EMB_DEVICE void add_rows(const T* base, int64_t offset, float weight, int valid, int lanes,
                         int steps, float (&sum)[N]) {
  for (int k = 0; k < steps; k += kRowsInFlight) {
    RowSlice<T, N> slice[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row = __shfl_sync(simt::kFullMask, offset, k + u, lanes);
      if (row >= 0 && valid > 0) slice[u].template load<kVector>(base + row, valid);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const float scale = __shfl_sync(simt::kFullMask, weight, k + u, lanes);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += scale * slice[u][e];
    }
  }
}

}  // namespace emb::cuda
