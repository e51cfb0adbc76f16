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
  int64_t n, rows;
  TtKeyMap key_of;
  int64_t* keys;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_keys_kernel(TtKeysArgs args) {
  for (int64_t i = simt::global_thread(); i < args.n; i += simt::threads_in_grid()) {
    const int64_t id = repair_index(args.ids[i], args.rows);
    args.keys[i] = id < 0 ? -1 : args.key_of(id);
  }
}

struct TtSplitArgs {
  const int64_t* keys;
  const int32_t* count;
  int64_t rights;  // ids of right halves
  SortBuffers<uint32_t> left, right;
  int32_t* rows;  // output: the number of distinct rows
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_split_kernel(TtSplitArgs args) {
  const int32_t rows = *args.count;
  if (simt::global_thread() == 0) *args.rows = rows;
  for (int64_t j = simt::global_thread(); j < args.left.n; j += simt::threads_in_grid()) {
    const int64_t key = args.keys[j], left = key / args.rights;
    args.left.keys[j] = j < rows ? static_cast<uint32_t>(left) : args.left.limit;
    args.right.keys[j] =
        j < rows ? static_cast<uint32_t>(key - left * args.rights) : args.right.limit;
    args.left.positions[j] = static_cast<int32_t>(j);
    args.right.positions[j] = static_cast<int32_t>(j);
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

}  // namespace emb::cuda
