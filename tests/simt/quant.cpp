// Emulated kernels of quantised tables.
#include "quant/quant.cuh"

#include "driver.h"
#include "quant/index.cuh"

using namespace emb::cuda;

// weights, dtype, packed, rows, dim, format
extern "C" const char* simt_quantize_rows(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    QuantizeKernelArgs args{};
    args.weights = words.pointer<const void>();
    const emb::Dtype type = words.dtype();
    args.packed = words.pointer<uint8_t>();
    args.num_rows = words.number();
    args.dim = words.number();
    args.format = static_cast<int>(words.number());
    launch_quantize(launcher, args, type);
  });
}

// packed, features, F, indices, is_int64, offsets, is_int64, L, bags, bag_layout, bags of a
// fixed batch, columns, pooling, sample weights, output, dtype, is_mixed, mask of formats
extern "C" const char* simt_quant_lookup(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    QuantArgs args{};
    args.packed = words.pointer<const uint8_t>();
    args.features = words.pointer<const emb::Feature>();
    args.num_features = static_cast<int>(words.number());
    args.indices = words.indices();
    args.bags.offsets = words.indices();
    args.bags.num_lookups = words.number();
    args.bags.num_bags = words.number();
    args.map.layout = words.pointer<const emb::BagLayout>();
    args.map.batch_size = static_cast<uint32_t>(words.number());
    args.map.stride = args.output_dim = words.number();
    args.pooling = static_cast<emb::Pooling>(words.number());
    args.sample_weights = words.pointer<const float>();
    args.output = words.pointer<void>();
    args.output_type = words.dtype();
    args.is_mixed = words.number() != 0;
    launch_quant_lookup(launcher, args, static_cast<uint64_t>(words.number()));
  });
}

// index, tables, F, indices, is_int64, offsets, is_int64, L, bags, bags of a feature, rows
extern "C" const char* simt_map_ids(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    emb::IndexArgs args{};
    args.index = words.pointer<const int64_t>();
    args.tables = words.pointer<const emb::IndexTable>();
    args.num_features = static_cast<int>(words.number());
    args.ids = words.indices();
    args.bags.offsets = words.indices();
    args.bags.num_lookups = words.number();
    args.bags.num_bags = words.number();
    args.map.batch_size = static_cast<uint32_t>(words.number());
    args.rows = words.pointer<int64_t>();
    launch_map_ids(launcher, args);
  });
}
