// Emulated `group`, `group_inverse` and `tbe_group`.
#include "driver.h"
#include "host_sort.h"
#include "tbe/keys.cuh"

namespace emb::cuda {
namespace {

// Group a small batch in one launch and return true; false if it has to be sorted on the host.
// `max_cluster_blocks` is that of the device, 0 to sort on the host in any case.
template <class Source>
bool group_small(const Source& source, int64_t n, int64_t max_cluster_blocks,
                 const SmallGroupArgs& args) {
  const simt::HostLauncher launcher{static_cast<unsigned>(max_cluster_blocks)};
  if (max_cluster_blocks == 0) return false;
  const auto plan = plan_small_group(n, max_small_cluster_blocks<Source>(launcher));
  if (plan.items_per_thread == 0) return false;
  launch_small_group(launcher, plan, source, args);
  return true;
}

template <class Key, class MakeKeys>
void group_with(const simt::HostLauncher& launcher, int64_t n, int64_t no_group_key,
                int32_t* permutation, const DeviceGroupOutput& out, const MakeKeys& make_keys) {
  HostSort<Key> sort(n, static_cast<uint64_t>(no_group_key), permutation);
  make_keys(sort.buffers);
  sort.run();
  launch_groups(launcher, sort.buffers, out);
}

// Find the intervals of the elements [begin, begin + blockDim.x) among kMaxLookups intervals, of
// which interval i starts at i.
__global__ void search_kernel(int64_t begin, int32_t* intervals) {
  __shared__ int range[2];
  const auto start = [](int i) { return int64_t{i}; };
  const TileSearch search(start, static_cast<int>(kMaxLookups), begin, begin + blockDim.x, range);
  intervals[threadIdx.x] = search.find(start, begin + threadIdx.x);
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// keys, is_int64, n, num_keys, wide, max_cluster_blocks, unique, segments, permutation, count
extern "C" const char* simt_group(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const emb::IndexArray keys = words.indices();
    const int64_t n = words.number(), num_keys = words.number(), wide = words.number();
    const int64_t max_cluster_blocks = words.number();
    DeviceGroupOutput out{};
    out.unique = words.pointer<void>();
    out.unique_is_int64 = keys.is_int64;
    out.segments = words.pointer<int32_t>();
    auto* permutation = words.pointer<int32_t>();
    out.num_groups = words.pointer<int32_t>();
    if (wide == 0) {
      const auto args = small_group_args(n, static_cast<uint32_t>(num_keys), permutation, out);
      if (group_small(KeyArray{keys}, n, max_cluster_blocks, args)) return;
    }
    const auto make = [&](const auto& sort) {
      if (n > 0) launch_keys(launcher, keys, sort);
    };
    if (wide != 0) {
      group_with<uint64_t>(launcher, n, num_keys, permutation, out, make);
    } else {
      group_with<uint32_t>(launcher, n, num_keys, permutation, out, make);
    }
  });
}

// features, indices, is_int64, offsets, is_int64, bag_layout, batch, bags, n, total_rows, wide,
// max_cluster_blocks, repaired, copies, violations, rows, segments, lookups, sorted bags, count,
// scratch for bags, sorted rows
extern "C" const char* simt_tbe_group(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    KeySource in{};
    in.features = words.pointer<const emb::Feature>();
    in.indices = words.indices();
    in.bags.offsets = words.indices();
    in.map.layout = words.pointer<const emb::BagLayout>();
    in.map.batch_size = static_cast<uint32_t>(words.number());
    in.bags.num_bags = words.number();
    in.bags.num_lookups = words.number();
    const int64_t total_rows = words.number(), wide = words.number();
    const int64_t max_cluster_blocks = words.number();
    BatchCheck check{};
    check.repaired_offsets = words.pointer<int32_t>();
    check.copies_valid_offsets = words.number() != 0;
    check.violations = words.pointer<unsigned long long>();
    unsigned long long progress[2];
    check.progress = progress;
    DeviceGroupOutput out{};
    out.unique = words.pointer<void>();
    out.unique_is_int64 = true;
    out.segments = words.pointer<int32_t>();
    auto* lookups = words.pointer<int32_t>();
    out.sorted_bags = words.pointer<int32_t>();
    out.num_groups = words.pointer<int32_t>();
    in.bag_of = words.pointer<int32_t>();
    out.bag_of = in.bag_of;
    const int64_t n = in.bags.num_lookups;
    if (wide == 0) {
      auto args = small_group_args(n, static_cast<uint32_t>(total_rows), lookups, out);
      args.sorted_keys = words.pointer<uint32_t>();
      if (group_small(SmallLookups{in, check}, n, max_cluster_blocks, args)) return;
    }
    const auto make = [&](const auto& sort) { launch_lookup_keys(launcher, in, check, sort); };
    if (wide != 0) {
      group_with<uint64_t>(launcher, n, total_rows, lookups, out, make);
    } else {
      group_with<uint32_t>(launcher, n, total_rows, lookups, out, make);
    }
  });
}

// segments, permutation, count, n, inverse
extern "C" const char* simt_group_inverse(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* segments = words.pointer<const int32_t>();
    const auto* permutation = words.pointer<const int32_t>();
    const auto* count = words.pointer<const int32_t>();
    const int64_t n = words.number();
    launch_inverse(launcher, {segments, permutation, count, n, words.pointer<int32_t>()});
  });
}

// begin, intervals, their number
extern "C" const char* simt_search(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const int64_t begin = words.number();
    auto* intervals = words.pointer<int32_t>();
    launcher(search_kernel, 1, static_cast<unsigned>(words.number()), begin, intervals);
  });
}
