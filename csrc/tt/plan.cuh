// The keys and halves of a batch on the GPU. Distinct rows are in key order; the sort of `group`
// groups their left and right ids, so the kernels here only make the keys of those sorts.
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"
#include "group/segments.cuh"
#include "tt/args.h"

namespace emb::cuda {

struct TtKeysArgs {
  IndexArray ids;
  int64_t n;
  const TtTableIds* tables;  // by feature
  int num_features;
  Bags bags;
  BagMap map;
  int64_t* keys;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_keys_kernel(TtKeysArgs args) {
  for (int64_t i = simt::global_thread(); i < args.n; i += simt::threads_in_grid()) {
    const int64_t feature = feature_of_lookup(args.map, args.bags, args.num_features, i);
    args.keys[i] = tt_key(args.tables[feature], args.ids[i]);
  }
}

// Return the first of n ascending values that is >= x.
template <class T>
EMB_DEVICE int32_t first_at_least(const T* values, int32_t n, int64_t x) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (values[middle] < x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

struct TtSplitArgs {
  const int64_t* keys;
  const int32_t* count;
  const TtTableIds* tables;
  int num_tables;
  SortBuffers<uint32_t> left, right;
  int32_t* starts;  // [3, T + 1]; the last entry of the first row is an output
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_split_kernel(TtSplitArgs args) {
  const int32_t rows = *args.count;
  if (simt::global_thread() == 0) args.starts[args.num_tables] = rows;
  for (int64_t j = simt::global_thread(); j < args.left.n; j += simt::threads_in_grid()) {
    uint32_t left = args.left.limit, right = args.right.limit;
    if (j < rows) {
      int low = 0, high = args.num_tables - 1;  // the last table whose first key is <= the key
      while (low < high) {
        const int middle = low + (high - low + 1) / 2;
        if (args.tables[middle].first_key <= args.keys[j]) {
          low = middle;
        } else {
          high = middle - 1;
        }
      }
      const TtTableIds& table = args.tables[low];
      const int64_t key = args.keys[j] - table.first_key, half = key / table.rights;
      left = static_cast<uint32_t>(table.first_left + half);
      right = static_cast<uint32_t>(table.first_right + key - half * table.rights);
    }
    args.left.keys[j] = left;
    args.right.keys[j] = right;
    args.left.positions[j] = static_cast<int32_t>(j);
    args.right.positions[j] = static_cast<int32_t>(j);
  }
}

// Where the rows and halves of each table begin; the ends of all are in `starts` already.
struct TtStartsArgs {
  const int64_t* keys;
  const int32_t *lefts, *rights;
  const TtTableIds* tables;
  int num_tables;
  int32_t* starts;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_starts_kernel(TtStartsArgs args) {
  const int64_t work = int64_t{3} * args.num_tables;
  for (int64_t i = simt::global_thread(); i < work; i += simt::threads_in_grid()) {
    const int kind = static_cast<int>(i / args.num_tables),
              t = static_cast<int>(i % args.num_tables);
    int32_t* starts = args.starts + kind * (args.num_tables + 1);
    const int32_t end = starts[args.num_tables];
    const TtTableIds& table = args.tables[t];
    starts[t] = kind == 0   ? first_at_least(args.keys, end, table.first_key)
                : kind == 1 ? first_at_least(args.lefts, end, table.first_left)
                            : first_at_least(args.rights, end, table.first_right);
  }
}

template <class Launcher>
void launch_tt_keys(const Launcher& launcher, const TtKeysArgs& args) {
  if (args.n == 0) return;
  launcher(tt_keys_kernel, blocks_for(args.n, kTileSize, launcher.blocks(32)), kTileThreads, args);
}

template <class Launcher>
void launch_tt_split(const Launcher& launcher, const TtSplitArgs& args) {
  launcher(tt_split_kernel, blocks_for(args.left.n, kTileSize, launcher.blocks(32)), kTileThreads,
           args);
}

template <class Launcher>
void launch_tt_starts(const Launcher& launcher, const TtStartsArgs& args) {
  launcher(tt_starts_kernel, blocks_for(int64_t{3} * args.num_tables, kTileThreads, 64),
           kTileThreads, args);
}

}  // namespace emb::cuda
