// Forward of table-batched embeddings on the GPU.
//
// pool_kernel is the general kernel. A group of 4 to 32 lanes pools a bag. Each lane owns 16 bytes
// of the row, so that a warp requests 512 bytes at a time, and four rows of each bag are in flight
// before the first is used. Each lane reads the index of one lookup, a tile of lookups ahead of its
// use, and passes the address of its row to the group by shuffles. The groups of a warp run in
// lockstep for as many steps as the longest bag needs, so that collectives name the full warp. A
// bag's rows are added in float, in the order of its lookups.
//
// There are four variants: short_bags_kernel (several bags per group), long_bags_kernel (several
// groups per bag), sequence_kernel (no pooling) and mixed_lookup_kernel (a cache of another dtype).
// launch_lookup selects the kernel.
//
// In this file *group* means a group of lanes (LaneGroup). W is the dtype of the rows, N the number
// of columns that a lane holds, and kVector says that rows are read in aligned vectors of N
// columns.
#pragma once

#include "core/bag_task.cuh"
#include "core/dtype.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kLookupThreads = 256;  // threads per block, except for short bags
// Minimum numbers of blocks per multiprocessor, which bound the registers of a thread: 4 blocks
// leave 64, which the rows in flight need; 3 leave 80.
inline constexpr int kLookupBlocksPerSm = 4, kLongBagBlocksPerSm = 3;
// A grid has at most this many times kResidentBlocksPerSm blocks per multiprocessor and stripe.
// Bags differ in length, so new blocks replace those that end early.
inline constexpr int kLookupWaves = 8;

// The arguments of the lookup kernels. All pointers are to memory that the device can read (tables
// may be in pinned host memory), and that must live until the kernel has run. The entry has checked
// shapes and dtypes; nothing has checked the contents of device tensors, so kernels repair indices,
// offsets and slots as they read them. `features` and `map` are trusted.
struct DeviceLookupArgs {
  // The lowest address of the tiers, and the offset of each tier from it in elements of
  // weight_type: element e of tier t is element tier_offset[t] + e of `weights`. The offset is 0
  // for an unused tier. That of a cache of another dtype is not used.
  const void* weights;
  int64_t tier_offset[kTiers];
  Dtype weight_type;
  void* output;  // [B, output_dim], [output_dim] in a variable batch, or [L, output_dim] for NONE
  Dtype output_type;
  const Feature* features;  // [num_features]
  int num_features;
  IndexArray indices;  // [L]
  Bags bags;
  BagMap map;
  int64_t output_dim;  // last dimension of `output`
  Pooling pooling;
  const float* sample_weights;  // [L]; null if all are 1
  const int32_t* slots;         // [L] cache slot of each row, -1 for none; null if no row is cached
  const void* cache;            // of cache_type; null if there is no cache
  int64_t num_cache_elements;   // 0 if there is no cache
  Dtype cache_type;
};

// Set `weights`, `tier_offset`, `cache` and `num_cache_elements` of `args`, whose dtypes must be
// set before. Tier t has elements[t] elements at the address data[t], which the device can read.
// mixed_lookup_kernel reads the rows of a cache of another dtype.
inline void set_tiers(const void* const (&data)[kTiers], const int64_t (&elements)[kTiers],
                      DeviceLookupArgs* args) {
  const int64_t size = element_bytes(args->weight_type);
  const bool has_one_dtype = args->cache_type == args->weight_type;
  uintptr_t lowest_address = 0;
  for (int tier = 0; tier < kTiers; ++tier) {
    const auto address = reinterpret_cast<uintptr_t>(data[tier]);
    const bool is_used = elements[tier] > 0 && (tier != kCacheTier || has_one_dtype);
    if (is_used && (lowest_address == 0 || address < lowest_address)) lowest_address = address;
  }
  args->weights = reinterpret_cast<const void*>(lowest_address);
  for (int tier = 0; tier < kTiers; ++tier) {
    const uintptr_t bytes = reinterpret_cast<uintptr_t>(data[tier]) - lowest_address;
    args->tier_offset[tier] = elements[tier] > 0 ? static_cast<int64_t>(bytes) / size : 0;
  }
  args->cache = data[kCacheTier];
  args->num_cache_elements = elements[kCacheTier];
}

// Return `slot`, or -1 if it is not a slot of the cache. For a feature without a cache
// (cache_stride 0) the result is meaningless; locate_row ignores it.
EMB_DEVICE int64_t valid_slot(const DeviceLookupArgs& args, const Feature& feature, int64_t slot) {
  return slot >= 0 && (slot + 1) * feature.cache_stride <= args.num_cache_elements ? slot : -1;
}

// The index and the cache slot of a lookup, which are read before its row. The default is a lookup
// to skip.
struct IndexAndSlot {
  int64_t index = -1;
  int32_t slot = -1;

  IndexAndSlot() = default;
  EMB_DEVICE IndexAndSlot(const DeviceLookupArgs& args, int64_t i) : index(args.indices[i]) {
    if (args.slots != nullptr) slot = args.slots[i];
  }
};

// Return the offset of the row of a lookup from args.weights, in elements; -1 for a lookup to skip.
// A cache must have the tables' dtype.
EMB_DEVICE int64_t row_offset(const DeviceLookupArgs& args, const Feature& feature,
                              const IndexAndSlot& lookup) {
  const int64_t row = repair_index(lookup.index, feature.rows);
  if (row < 0 || row >= feature.rows) return -1;
  const RowLocation location = locate_row(feature, row, valid_slot(args, feature, lookup.slot));
  return args.tier_offset[location.tier] + location.element;
}

// Return whether all rows of a feature, in its table and in the cache, begin at multiples of 16
// bytes and consist of whole 16-byte vectors.
template <class W>
EMB_DEVICE bool has_whole_vectors(const DeviceLookupArgs& args, const Feature& feature) {
  constexpr int N = 16 / sizeof(W);
  const W* base = static_cast<const W*>(args.weights);
  const W* table = base + args.tier_offset[feature.tier] + feature.weight_offset;
  bool has_vectors = feature.dim % N == 0 && is_aligned(table, 16);
  if (args.slots != nullptr && feature.cache_stride > 0) {
    has_vectors = has_vectors && feature.cache_stride % N == 0 && is_aligned(args.cache, 16);
  }
  return has_vectors;
}

// Add columns [column, column + N) of the rows of a bag, times their sample weights, to `sum`. The
// lanes of a group pass one bag. `max_length`, the same in all lanes, is at least the length of
// every bag in the warp. With kVector has_whole_vectors must be true for the features of all lanes.
// All lanes of a warp must call this.
template <class W, int N, bool kVector>
EMB_DEVICE void sum_bag(const DeviceLookupArgs& args, const BagTask& task, const LaneGroup& lane,
                        int column, int max_length, float (&sum)[N]) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const auto lookup_at = [&](int i) {
    return i < task.length ? IndexAndSlot(args, task.begin + i) : IndexAndSlot();
  };
  IndexAndSlot lookup = lookup_at(lane.rank);
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t offset = row_offset(args, *task.feature, lookup);
    lookup = lookup_at(i + lane.lanes);
    float weight = 0.0f;
    if (offset >= 0) weight = args.sample_weights ? args.sample_weights[task.begin + i] : 1.0f;
    const int num_steps = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    add_rows<W, N, kVector>(weights, offset, weight, task.dim - column, lane.lanes, num_steps, sum);
  }
}

// Write columns [column, column + N) of the output of a bag; columns beyond the row are not
// written. For MEAN, first multiply `sum` by 1 / length of the bag.
template <int N>
EMB_DEVICE void write_bag(const DeviceLookupArgs& args, const BagTask& task, uint32_t bag,
                          int column, float (&sum)[N]) {
  if (column >= task.dim) return;
  if (args.pooling == Pooling::kMean && task.length > 0) {
    const float scale = 1.0f / static_cast<float>(task.length);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] *= scale;
  }
  const int64_t element = args.map.output_element(bag, task.feature->column);
  stream_columns(args.output, args.output_type, element + column, task.dim - column, sum);
}

// Pooled lookup of bags of any length, grid-stride over bags; `lanes` is the number of lanes per
// bag. Here and in the kernels below, the grid's second dimension divides the columns of rows that
// are wider than a group reads at once.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, kLookupBlocksPerSm)
    pool_kernel(DeviceLookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const auto bags = static_cast<uint32_t>(args.bags.num_bags);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
       first < bags; first += stride) {
    const BagTask task(args, first + lane.group);
    const int max_length = __reduce_max_sync(simt::kFullMask, task.length);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool uses_vectors =
        __all_sync(simt::kFullMask, has_whole_vectors<W>(args, *task.feature));
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < max_dim;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      if (uses_vectors) {
        sum_bag<W, N, true>(args, task, lane, column, max_length, sum);
      } else {
        sum_bag<W, N, false>(args, task, lane, column, max_length, sum);
      }
      write_bag(args, task, first + lane.group, column, sum);
    }
  }
}

// Copy columns [column, column + N) of the rows of the warp's 32 lookups, which begin with lookup
// `first`, to the output, four per group at a time. Each lane passes the row_offset of its lookup,
// -1 for zeros. All lanes of a warp must call this.
template <class W, int N, bool kVector>
EMB_DEVICE void copy_rows(const DeviceLookupArgs& args, const LaneGroup& lane, int64_t offset,
                          int64_t first, int column) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const int columns_left = static_cast<int>(args.output_dim) - column;
  for (int k = 0; k < lane.lanes; k += kRowsInFlight) {
    RowSlice<W, N> slice[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int source = (k + u) * lane.groups_in_warp() + lane.group;
      const int64_t row = __shfl_sync(simt::kFullMask, offset, source);
      if (row >= 0 && columns_left > 0)
        slice[u].template load<kVector>(weights + row, columns_left);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t i = first + (k + u) * lane.groups_in_warp() + lane.group;
      if (i >= args.bags.num_lookups || columns_left <= 0) continue;
      float values[N];
#pragma unroll
      for (int e = 0; e < N; ++e) values[e] = slice[u][e];
      stream_columns(args.output, args.output_type, i * args.output_dim + column, columns_left,
                     values);
    }
  }
}

// Lookup without pooling (NONE): every lookup is a row of the output; skipped lookups are zeros.
// All features must have args.output_dim columns; not checked. A warp copies the rows of 32 lookups
// at a time; each lane locates the row of one of them.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, kLookupBlocksPerSm)
    sequence_kernel(DeviceLookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const int num_columns = static_cast<int>(args.output_dim);
  for (int64_t first = simt::global_warp() * simt::kWarpLanes; first < args.bags.num_lookups;
       first += simt::warps_in_grid() * simt::kWarpLanes) {
    const int64_t i = first + threadIdx.x % simt::kWarpLanes;
    int64_t offset = -1;
    if (i < args.bags.num_lookups && args.bags.num_bags > 0 && i >= args.bags.begin(0)) {
      const int64_t f = feature_of_lookup(args.map, args.bags, args.num_features, i);
      const Feature& feature = args.features[f];
      offset = row_offset(args, feature, IndexAndSlot(args, i));
    }
    const bool uses_vectors =
        __all_sync(simt::kFullMask, num_columns % N == 0 && (offset < 0 || offset % N == 0)) &&
        is_aligned(args.weights, 16);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < num_columns;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      if (uses_vectors) {
        copy_rows<W, N, true>(args, lane, offset, first, base + lane.rank * N);
      } else {
        copy_rows<W, N, false>(args, lane, offset, first, base + lane.rank * N);
      }
    }
  }
}

// Pooled lookup of short bags (one lookup or a few each, as in click logs). The rows of one bag
// cannot saturate the memory system, so a group of lanes sums four bags at once and has a row of
// each in flight. A warp sums as many bags as fit its groups. Each of its first lanes locates the
// rows of one of these bags, and passes their addresses by shuffles to the group that sums the bag.
// A bag's rows are still added in order.

inline constexpr int kBagsInFlight = 4;  // bags that a group of lanes sums at once
inline constexpr int kShortBagThreads = 128;
// Minimum number of blocks per multiprocessor: 7 leave 72 registers per thread for float, where a
// lane sums 4 x 4 columns; 5 leave 96 for 16 bits, where it sums 4 x 8.
template <class W>
inline constexpr int kShortBagBlocksPerSm = sizeof(W) == 4 ? 7 : 5;

// The row of lookup `step` of a lane's bag: its row_offset, -1 if there is none, and its sample
// weight.
struct StepRow {
  int64_t offset = -1;
  float weight = 0.0f;

  EMB_DEVICE StepRow(const DeviceLookupArgs& args, const BagTask& task, const IndexAndSlot& lookup,
                     int step) {
    if (step >= task.length) return;
    offset = row_offset(args, *task.feature, lookup);
    if (offset < 0) return;
    weight = args.sample_weights ? args.sample_weights[task.begin + step] : 1.0f;
  }
};

// Add this lane's columns, from `column` on, of the four bags of its group to `sum`. Bag s of group
// g is located by lane s * groups_in_warp() + g of the warp. `task` is the bag that this lane
// locates, `max_length` the maximum length of a bag in the warp. With kVector has_whole_vectors
// must be true for the features of all lanes. All lanes of a warp must call this.
template <class W, int N, bool kVector>
EMB_DEVICE void sum_short_bags(const DeviceLookupArgs& args, const BagTask& task,
                               const LaneGroup& lane, int column, int max_length,
                               float (&sum)[kBagsInFlight][N]) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const auto lookup_at = [&](int i) {
    return i < task.length ? IndexAndSlot(args, task.begin + i) : IndexAndSlot();
  };
  IndexAndSlot lookup = lookup_at(0);
  for (int step = 0; step < max_length; ++step) {
    const StepRow located_row(args, task, lookup, step);
    lookup = lookup_at(step + 1);
    RowSlice<W, N> slice[kBagsInFlight];
#pragma unroll
    for (int s = 0; s < kBagsInFlight; ++s) {
      const int locating_lane = s * lane.groups_in_warp() + lane.group;
      const int64_t row = __shfl_sync(simt::kFullMask, located_row.offset, locating_lane);
      const int columns_left = __shfl_sync(simt::kFullMask, task.dim, locating_lane) - column;
      if (row >= 0 && columns_left > 0)
        slice[s].template load<kVector>(weights + row, columns_left);
    }
#pragma unroll
    for (int s = 0; s < kBagsInFlight; ++s) {
      const int locating_lane = s * lane.groups_in_warp() + lane.group;
      const float weight = __shfl_sync(simt::kFullMask, located_row.weight, locating_lane);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[s][e] += weight * slice[s][e];
    }
  }
}

// Write this lane's columns of the outputs of the four bags of its group: `sum`, for MEAN times
// 1 / length. `bag` is the number of the bag that this lane locates, and `task` the bag. All lanes
// of a warp must call this.
template <int N>
EMB_DEVICE void write_short_bags(const DeviceLookupArgs& args, const BagTask& task,
                                 const LaneGroup& lane, uint32_t bag, int column,
                                 float (&sum)[kBagsInFlight][N]) {
  const int64_t element = task.bag_output_element(args, bag);
  const float scale = mean_factor(args.pooling, task.length);
#pragma unroll
  for (int s = 0; s < kBagsInFlight; ++s) {
    const int locating_lane = s * lane.groups_in_warp() + lane.group;
    const int64_t out = __shfl_sync(simt::kFullMask, element, locating_lane) + column;
    const int columns_left = __shfl_sync(simt::kFullMask, task.dim, locating_lane) - column;
    const float factor = __shfl_sync(simt::kFullMask, scale, locating_lane);
    if (columns_left <= 0) continue;
#pragma unroll
    for (int e = 0; e < N; ++e) sum[s][e] *= factor;
    stream_columns(args.output, args.output_type, out, columns_left, sum[s]);
  }
}

// Pooled lookup of short bags, grid-stride; `lanes` is the number of lanes per group.
template <class W>
__global__ void __launch_bounds__(kShortBagThreads, kShortBagBlocksPerSm<W>)
    short_bags_kernel(DeviceLookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const auto bags = static_cast<uint32_t>(args.bags.num_bags);
  const auto bags_per_warp = static_cast<uint32_t>(kBagsInFlight * lane.groups_in_warp());
  const uint32_t stride = static_cast<uint32_t>(simt::warps_in_grid()) * bags_per_warp;
  const uint32_t lane_index = threadIdx.x % simt::kWarpLanes;
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * bags_per_warp; first < bags;
       first += stride) {
    const uint32_t bag = lane_index < bags_per_warp ? first + lane_index : bags;
    const BagTask task(args, bag);
    const int max_length = __reduce_max_sync(simt::kFullMask, task.length);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool uses_vectors =
        __all_sync(simt::kFullMask, has_whole_vectors<W>(args, *task.feature));
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < max_dim;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[kBagsInFlight][N] = {};
      if (uses_vectors) {
        sum_short_bags<W, N, true>(args, task, lane, column, max_length, sum);
      } else {
        sum_short_bags<W, N, false>(args, task, lane, column, max_length, sum);
      }
      write_short_bags(args, task, lane, bag, column, sum);
    }
  }
}

// Return whether bags have at most four lookups on average, so that short_bags_kernel is used. The
// bound is not measured.
inline bool has_short_bags(const DeviceLookupArgs& args) {
  constexpr int64_t kMaxShortBag = 4;  // lookups
  return args.bags.num_lookups <= kMaxShortBag * args.bags.num_bags;
}

// Pooled lookup of few, long bags. One group of lanes per bag would leave most of the GPU idle, so
// a block pools a bag. Each group of the block sums a stretch of the lookups. Then the sums of the
// stretches are added in order.

// Return stretch number `stretch` of a bag. Stretches have `stretch_length` lookups each; the last
// ones may have fewer or none.
EMB_DEVICE BagTask stretch_of(const BagTask& bag, int stretch, int stretch_length) {
  BagTask result = bag;
  const int remaining = bag.length - stretch * stretch_length;
  result.begin += stretch * stretch_length;
  result.length = remaining < 0 ? 0 : (remaining < stretch_length ? remaining : stretch_length);
  return result;
}

// Pooled lookup of long bags: a block pools a bag, in a grid-stride loop. `lanes` is the number of
// lanes per stretch.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, kLongBagBlocksPerSm)
    long_bags_kernel(DeviceLookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  __shared__ float stretch_sum[kLookupThreads][N];
  const LaneGroup lane(lanes);
  const int num_stretches = kLookupThreads / lanes;
  const auto bags = static_cast<uint32_t>(args.bags.num_bags);
  for (uint32_t bag = blockIdx.x; bag < bags; bag += gridDim.x) {
    const BagTask task(args, bag);
    const int stretch_length = (task.length + num_stretches - 1) / num_stretches;
    const BagTask stretch = stretch_of(task, static_cast<int>(threadIdx.x) / lanes, stretch_length);
    const bool uses_vectors = has_whole_vectors<W>(args, *task.feature);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < task.dim;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      if (uses_vectors) {
        sum_bag<W, N, true>(args, stretch, lane, column, stretch_length, sum);
      } else {
        sum_bag<W, N, false>(args, stretch, lane, column, stretch_length, sum);
      }
#pragma unroll
      for (int e = 0; e < N; ++e) stretch_sum[threadIdx.x][e] = sum[e];
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < lanes) {
        for (int s = 1; s < num_stretches; ++s) {
#pragma unroll
          for (int e = 0; e < N; ++e) sum[e] += stretch_sum[s * lanes + threadIdx.x][e];
        }
        write_bag(args, task, bag, column, sum);
      }
      __syncthreads();
    }
  }
}

// Return whether each bag should be pooled by a whole block: bags are long, and too few to occupy a
// GPU with a group of lanes each. The choice does not depend on the device, so that a result has
// the same bits on every GPU. The bounds are not measured.
inline bool has_long_bags(const DeviceLookupArgs& args, int lanes) {
  constexpr int64_t kMinLongBag = 64;           // lookups
  constexpr int64_t kOccupyingLanes = 1 << 17;  // about 1,000 per multiprocessor of an H100
  return args.bags.num_lookups >= kMinLongBag * args.bags.num_bags &&
         args.bags.num_bags * lanes < kOccupyingLanes;
}

// Lookups with a cache of another dtype than the tables, for every pair of dtypes, with or without
// pooling. A group of lanes processes a bag, or a lookup, as in pool_kernel. Each lane locates one
// row, and four rows are in flight in their storage formats.

// Return whether the cache has another dtype than the tables.
inline bool has_mixed_rows(const DeviceLookupArgs& args) {
  return args.slots != nullptr && args.cache_type != args.weight_type;
}

inline constexpr int kMixedColumns = 4;  // columns per lane

// Four columns of a row of any dtype, as they are stored. The caller sets `type` before it loads.
struct MixedSlice {
  uint32_t word[kMixedColumns] = {};
  Dtype type = Dtype::kFloat;

  template <class T, bool kVector>
  EMB_DEVICE void load_as(const void* row, int column, int columns_left) {
    RowSlice<T, kMixedColumns> slice;
    slice.template load<kVector>(static_cast<const T*>(row) + column, columns_left);
#pragma unroll
    for (int i = 0; i < slice.kWords; ++i) word[i] = slice.word[i];
  }

  template <bool kVector>
  EMB_DEVICE void load(const void* row, int column, int columns_left) {
    if (type == Dtype::kFloat) {
      load_as<float, kVector>(row, column, columns_left);
    } else {
      load_as<half16, kVector>(row, column, columns_left);  // the bits of either 16-bit dtype
    }
  }

  EMB_DEVICE float operator[](int k) const {
    if (type == Dtype::kFloat) return float_from_bits(word[k]);
    const auto bits = static_cast<uint16_t>(word[k / 2] >> ((k % 2) * 16));
    return type == Dtype::kHalf ? to_float(half16{bits}) : to_float(bfloat16{bits});
  }
};

// Return the address of the row of lookup i as an integer, which lanes can pass by a shuffle; 0 for
// a lookup to skip. Bit 0 is set if the row is in the cache. This bit is free, because addresses of
// rows are even. args.slots must not be null.
EMB_DEVICE int64_t mixed_address(const DeviceLookupArgs& args, const Feature& feature, int64_t i) {
  const int64_t row = repair_index(args.indices[i], feature.rows);
  if (row < 0 || row >= feature.rows) return 0;
  const RowLocation location = locate_row(feature, row, valid_slot(args, feature, args.slots[i]));
  if (location.tier == kCacheTier) {
    const int64_t bytes = location.element * element_bytes(args.cache_type);
    return (reinterpret_cast<int64_t>(args.cache) + bytes) | 1;
  }
  const int64_t element = args.tier_offset[location.tier] + location.element;
  return reinterpret_cast<int64_t>(args.weights) + element * element_bytes(args.weight_type);
}

// Return whether a row of `dim` columns at `address`, a result of mixed_address, can be read in
// whole vectors.
EMB_DEVICE bool has_mixed_vectors(const DeviceLookupArgs& args, int dim, int64_t address) {
  const int64_t size = element_bytes((address & 1) != 0 ? args.cache_type : args.weight_type);
  // Bits that are 0 in a multiple of a vector's size; bit 0 is the mark of the cache.
  const int64_t low_bits = (kMixedColumns * size - 1) & ~int64_t{1};
  return address == 0 || (dim % kMixedColumns == 0 && (address & low_bits) == 0);
}

// For the first `num_steps` lanes k of a group in turn, call `use(k, slice)`. The slice has columns
// [column, column + 4) of the row whose `address`, a result of mixed_address, lane k passes, or
// zeros for address 0. `columns_left` is the number of columns from `column` to the end of the row.
// `num_steps` is rounded up to a multiple of kRowsInFlight. All lanes of the warp must call this
// with equal `num_steps`; `use` may contain collectives.
template <bool kVector, class Use>
EMB_DEVICE void read_mixed_rows(const DeviceLookupArgs& args, int64_t address, int column,
                                int columns_left, int lanes, int num_steps, const Use& use) {
  for (int k = 0; k < num_steps; k += kRowsInFlight) {
    MixedSlice slice[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row = __shfl_sync(simt::kFullMask, address, k + u, lanes);
      slice[u].type = (row & 1) != 0 ? args.cache_type : args.weight_type;
      if (row != 0 && columns_left > 0) {
        const int64_t data = row & ~int64_t{1};
        slice[u].template load<kVector>(reinterpret_cast<const void*>(data), column, columns_left);
      }
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) use(k + u, slice[u]);
  }
}

// Do the same, and read in vectors if all rows of the warp allow it. The rows of a group have `dim`
// columns.
template <class Use>
EMB_DEVICE void read_mixed_rows(const DeviceLookupArgs& args, int64_t address, int dim, int column,
                                int lanes, int num_steps, const Use& use) {
  if (__all_sync(simt::kFullMask, has_mixed_vectors(args, dim, address))) {
    read_mixed_rows<true>(args, address, column, dim - column, lanes, num_steps, use);
  } else {
    read_mixed_rows<false>(args, address, column, dim - column, lanes, num_steps, use);
  }
}

// Add columns [column, column + 4) of the rows of an item, times their sample weights, to `sum`.
// `max_length` is the maximum length in the warp, all lanes of which must call this.
EMB_DEVICE void add_mixed_rows(const DeviceLookupArgs& args, const BagTask& task,
                               const LaneGroup& lane, int column, int max_length,
                               float (&sum)[kMixedColumns]) {
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    int64_t address = 0;
    float weight = 0.0f;
    if (tile + lane.rank < task.length) {
      const int64_t i = static_cast<int64_t>(task.begin) + tile + lane.rank;
      address = mixed_address(args, *task.feature, i);
      if (address != 0) weight = args.sample_weights ? args.sample_weights[i] : 1.0f;
    }
    const int num_steps = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    const auto add = [&](int k, const MixedSlice& columns) {
      const float scale = __shfl_sync(simt::kFullMask, weight, k, lane.lanes);
#pragma unroll
      for (int e = 0; e < kMixedColumns; ++e) sum[e] += scale * columns[e];
    };
    read_mixed_rows(args, address, task.dim, column, lane.lanes, num_steps, add);
  }
}

// Lookup with a cache of another dtype, grid-stride over items: bags, or lookups without pooling.
// `lanes` is the number of lanes per item. One-dimensional grid.
[[maybe_unused]] static __global__ void __launch_bounds__(kLookupThreads)
    mixed_lookup_kernel(DeviceLookupArgs args, int64_t num_items, int lanes) {
  constexpr int N = kMixedColumns;
  const LaneGroup lane(lanes);
  const int64_t stride = simt::warps_in_grid() * lane.groups_in_warp();
  for (int64_t first = simt::global_warp() * lane.groups_in_warp(); first < num_items;
       first += stride) {
    const int64_t item = first + lane.group;
    const BagTask task(args, item, num_items);
    const int max_length = __reduce_max_sync(simt::kFullMask, task.length);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const float scale = mean_factor(args.pooling, task.length);
    for (int base = 0; base < max_dim; base += lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      add_mixed_rows(args, task, lane, column, max_length, sum);
      if (column >= task.dim) continue;
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] *= scale;
      stream_columns(args.output, args.output_type, task.output_element(args, item) + column,
                     task.dim - column, sum);
    }
  }
}

// Launch mixed_lookup_kernel.
template <class Launcher>
void launch_mixed_lookup(const Launcher& launcher, const DeviceLookupArgs& args) {
  const int64_t num_items =
      args.pooling == Pooling::kNone ? args.bags.num_lookups : args.bags.num_bags;
  const int lanes = lanes_per_row(mean_output_columns(args), kMixedColumns);
  launcher(mixed_lookup_kernel,
           blocks_for(num_items, kLookupThreads / lanes,
                      launcher.max_grid_blocks(kLookupWaves * kResidentBlocksPerSm)),
           kLookupThreads, args, num_items, lanes);
}

// Select the kernel of a lookup over rows that all have dtype W, the lanes per row and the blocks
// of the grid, and launch it. The width of each feature is known on the device only, so the number
// of lanes depends on the mean width. The sums do not depend on this number, except in long bags,
// where it determines the stretches.
template <class W, class Launcher>
void launch_uniform_lookup(const Launcher& launcher, const DeviceLookupArgs& args) {
  constexpr int N = 16 / sizeof(W);
  const int64_t mean_dim = mean_output_columns(args);
  const int lanes = lanes_per_row(mean_dim, N), groups_per_warp = kWarpLanes / lanes;
  const unsigned stripes = blocks_for(mean_dim, lanes * N, kMaxStripes);
  const auto launch = [&](auto kernel, int64_t num_items, int items_per_warp, int threads) {
    const int64_t items_per_block = items_per_warp * (threads / kWarpLanes);
    const unsigned blocks = blocks_for(
        num_items, items_per_block, launcher.max_grid_blocks(kLookupWaves * kResidentBlocksPerSm));
    launcher(kernel, simt::Dim3(blocks, stripes), simt::Dim3(threads), args, lanes);
  };
  if (args.pooling == Pooling::kNone) {
    launch(sequence_kernel<W>, args.bags.num_lookups, simt::kWarpLanes, kLookupThreads);
  } else if (has_short_bags(args)) {
    launch(short_bags_kernel<W>, args.bags.num_bags, groups_per_warp * kBagsInFlight,
           kShortBagThreads);
  } else if (has_long_bags(args, lanes)) {
    const int warps_per_block = kLookupThreads / kWarpLanes;
    launch(long_bags_kernel<W>, args.bags.num_bags * warps_per_block, 1, kLookupThreads);
  } else {
    launch(pool_kernel<W>, args.bags.num_bags, groups_per_warp, kLookupThreads);
  }
}

// Write args.output: a row per bag or, without pooling, per lookup. With pooling, elements that no
// bag covers are not written. The batch must have at least one bag; not checked. `launcher` is a
// CudaLauncher or, in tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_lookup(const Launcher& launcher, const DeviceLookupArgs& args) {
  if (args.output_dim == 0) return;
  if (has_mixed_rows(args)) {
    launch_mixed_lookup(launcher, args);
  } else if (args.weight_type == Dtype::kFloat) {
    launch_uniform_lookup<float>(launcher, args);
  } else if (args.weight_type == Dtype::kHalf) {
    launch_uniform_lookup<half16>(launcher, args);
  } else {
    launch_uniform_lookup<bfloat16>(launcher, args);
  }
}

}  // namespace emb::cuda
