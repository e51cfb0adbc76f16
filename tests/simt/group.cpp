// Emulated `group`, `group_inverse` and `tbe_group`.
#include "driver.h"
#include "host_sort.h"
#include "tbe/keys.cuh"

namespace emb::cuda {
namespace {

template <class Key, class MakeKeys>
void group_with(const simt::HostLauncher& launcher, int64_t n, int64_t limit, int32_t* permutation,
                const GroupOutput& out, const MakeKeys& make_keys) {
  HostSort<Key> sort(n, static_cast<uint64_t>(limit), permutation);
  if (n > 0) {
    make_keys(sort.buffers);
    sort.run();
  }
  launch_groups(launcher, sort.buffers, out);
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// keys, is_int64, n, num_keys, wide, unique, segments, permutation, count
extern "C" const char* simt_group(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const emb::IndexArray keys = words.indices();
    const int64_t n = words.number(), num_keys = words.number(), wide = words.number();
    GroupOutput out{};
    out.unique = words.pointer<void>();
    out.unique_is_int64 = keys.is_int64;
    out.segments = words.pointer<int32_t>();
    auto* permutation = words.pointer<int32_t>();
    out.count = words.pointer<int32_t>();
    const auto make = [&](const auto& sort) { launch_keys(launcher, keys, sort); };
    if (wide != 0) {
      group_with<uint64_t>(launcher, n, num_keys, permutation, out, make);
    } else {
      group_with<uint32_t>(launcher, n, num_keys, permutation, out, make);
    }
  });
}

// features, indices, is_int64, offsets, is_int64, bag_layout, batch, bags, n, total_rows, wide,
// rows, segments, lookups, sorted bags, count, scratch for bags
extern "C" const char* simt_tbe_group(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    LookupKeys in{};
    in.features = words.pointer<const emb::Feature>();
    in.indices = words.indices();
    in.bags.offsets = words.indices();
    in.map.layout = words.pointer<const emb::BagLayout>();
    in.map.batch = static_cast<uint32_t>(words.number());
    in.bags.count = words.number();
    in.bags.num_lookups = words.number();
    const int64_t total_rows = words.number(), wide = words.number();
    GroupOutput out{};
    out.unique = words.pointer<void>();
    out.unique_is_int64 = true;
    out.segments = words.pointer<int32_t>();
    auto* lookups = words.pointer<int32_t>();
    out.bags = words.pointer<int32_t>();
    out.count = words.pointer<int32_t>();
    in.bag_of = words.pointer<int32_t>();
    out.bag_of = in.bag_of;
    const int64_t n = in.bags.num_lookups;
    const auto make = [&](const auto& sort) { launch_lookup_keys(launcher, in, sort); };
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
    launch_inverse(launcher, segments, permutation, count, n, words.pointer<int32_t>());
  });
}
