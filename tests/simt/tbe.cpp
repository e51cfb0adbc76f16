// Emulated forward of table-batched embeddings: lookup, bounds check, gradient of sample weights.
#include "driver.h"
#include "tbe/bounds.cuh"
#include "tbe/check_batch.cuh"
#include "tbe/lookup.cuh"
#include "tbe/sample_weights.cuh"

namespace emb::cuda {
namespace {

// bag_layout, bags of a fixed batch, columns
BagMap read_map(Words* words) {
  BagMap map{};
  map.layout = words->pointer<const BagLayout>();
  map.batch_size = static_cast<uint32_t>(words->number());
  map.stride = words->number();
  return map;
}

// address and length of each tier, dtype of the tables, of the cache, slots, features, F, indices,
// is_int64, offsets, is_int64, L, bags, read_map's, pooling, sample weights
DeviceLookupArgs read_lookup(Words* words) {
  DeviceLookupArgs args{};
  const void* data[kTiers];
  int64_t elements[kTiers];
  for (int tier = 0; tier < kTiers; ++tier) {
    data[tier] = words->pointer<const void>();
    elements[tier] = words->number();
  }
  args.weight_type = words->dtype();
  args.cache_type = words->dtype();
  set_tiers(data, elements, &args);
  args.slots = words->pointer<const int32_t>();
  args.features = words->pointer<const emb::Feature>();
  args.num_features = static_cast<int>(words->number());
  args.indices = words->indices();
  args.bags.offsets = words->indices();
  args.bags.num_lookups = words->number();
  args.bags.num_bags = words->number();
  args.map = read_map(words);
  args.output_dim = args.map.stride;
  args.pooling = static_cast<emb::Pooling>(words->number());
  args.sample_weights = words->pointer<const float>();
  return args;
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// read_lookup's, output, dtype
extern "C" const char* simt_lookup(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    DeviceLookupArgs args = read_lookup(&words);
    args.output = words.pointer<void>();
    args.output_type = words.dtype();
    launch_lookup(launcher, args);
  });
}

// read_lookup's, grad, dtype, out
extern "C" const char* simt_sample_weight_grad(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    DeviceSampleWeightArgs args{};
    args.lookup = read_lookup(&words);
    args.grad = words.pointer<const void>();
    args.grad_type = words.dtype();
    args.out = words.pointer<float>();
    launch_sample_weights(launcher, args);
  });
}

template <class Check>
const char* check_bounds(const int64_t* call, const Check& check) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    BoundsArgs args{};
    args.indices = words.indices();
    args.offsets = words.indices();
    args.features = words.pointer<const emb::Feature>();
    args.num_lookups = words.number();
    args.num_bags = words.number();
    args.map = read_map(&words);
    args.is_fatal = words.number() != 0;
    args.repaired_offsets = words.pointer<int32_t>();
    args.violations = words.pointer<unsigned long long>();
    unsigned long long progress[2];
    args.progress = progress;
    check(launcher, args);
  });
}

// indices, is_int64, offsets, is_int64, features, L, bags, read_map's, is fatal, repaired,
// violations
extern "C" const char* simt_bounds_check(const int64_t* call) {
  return check_bounds(call, [](const auto& launcher, const BoundsArgs& args) {
    launch_bounds_check(launcher, args);
  });
}

// The same
extern "C" const char* simt_check_batch(const int64_t* call) {
  return check_bounds(call, [](const auto& launcher, const BoundsArgs& args) {
    launch_check_batch(launcher, args);
  });
}

// divisor, numbers, their count, quotients, remainders
extern "C" const char* simt_divide(const int64_t* call) {
  return return_errors([&](const auto&) {
    Words words(call);
    const emb::Divisor divisor(static_cast<uint32_t>(words.number()));
    const auto* numbers = words.pointer<const int64_t>();
    const int64_t count = words.number();
    auto* quotients = words.pointer<int64_t>();
    auto* remainders = words.pointer<int64_t>();
    for (int64_t i = 0; i < count; ++i) {
      quotients[i] = divisor.quotient(static_cast<uint32_t>(numbers[i]));
      remainders[i] = divisor.remainder(static_cast<uint32_t>(numbers[i]));
    }
  });
}
