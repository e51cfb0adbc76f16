// Emulated routing: lengths, ids, segments, `combine` and `combine_backward`.
#include "route/route.cuh"

#include "driver.h"
#include "route/combine.cuh"
#include "route/segments.cuh"

namespace emb::cuda {
namespace {

// ids, offsets, number of ids, of bags, first_bags, features, blocks, copies, units, number of
// features, of blocks, of copies, of units; then out and bags of all units
DeviceRoute read_route(Words* words, bool* is_int64) {
  DeviceRoute route{};
  const IndexArray ids = words->indices();
  *is_int64 = ids.is_int64;
  route.ids = ids.data;
  route.bags.offsets = words->indices();
  route.bags.num_lookups = words->number();
  route.bags.num_bags = words->number();
  Routing& routing = route.routing;
  routing.first_bags = words->pointer<const int64_t>();
  routing.features = words->pointer<const RouteFeature>();
  routing.blocks = words->pointer<const RouteBlock>();
  routing.copies = words->pointer<const int64_t>();
  routing.units = words->pointer<const int64_t>();
  routing.num_features = words->number();
  routing.num_blocks = words->number();
  routing.num_copies = words->number();
  routing.num_units = words->number();
  route.out = words->pointer<void>();
  route.num_output_bags = words->number();
  return route;
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

extern "C" const char* simt_route_lengths(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    bool is_int64;
    const DeviceRoute route = read_route(&words, &is_int64);
    launch_route_count(launcher, route, is_int64);
  });
}

// the route, starts, total, positions, weights, out_weights, used
extern "C" const char* simt_route_ids(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    bool is_int64;
    DeviceRoute route = read_route(&words, &is_int64);
    route.starts = words.indices();
    route.num_output_ids = words.number();
    route.positions = words.pointer<int64_t>();
    route.weights = words.pointer<const float>();
    route.out_weights = words.pointer<float>();
    route.moved_counts = words.pointer<int32_t>();
    launch_route_move(launcher, route, is_int64);
  });
}

// starts, order, number of segments, number of output segments, rows, sums, tiles, values, out,
// total, bytes
extern "C" const char* simt_gather_segments(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    Segments segments{};
    segments.starts = words.indices();
    segments.order = words.pointer<const int64_t>();
    segments.num_segments = words.number();
    segments.num_output_segments = words.number();
    segments.num_rows = words.number();
    segments.sums_in_tile = words.pointer<int64_t>();
    segments.rows_before_tile = words.pointer<int64_t>();
    const auto* values = words.pointer<const void>();
    auto* out = words.pointer<void>();
    const int64_t total = words.number();
    launch_gather_segments(launcher, segments, values, out, total, words.number());
  });
}

// forward, targets, pieces, number of targets, of pieces, lengths, number of lengths, rows and
// their number, 1024 times the scale, in and its dtype, out and its dtype, local, its begin and
// end, elements of the source, of the output
extern "C" const char* simt_combine(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const bool forward = words.number() != 0;
    DeviceCombine work{};
    work.targets = words.pointer<const emb::Target>();
    work.pieces = words.pointer<const emb::SourcePiece>();
    work.num_targets = words.number();
    work.num_pieces = words.number();
    work.lengths = words.indices();
    work.num_lengths = words.number();
    work.rows = words.pointer<const int32_t>();
    work.num_rows = words.number();
    work.scale = static_cast<float>(words.number()) / 1024.0f;
    work.in = words.pointer<const void>();
    const emb::Dtype from = words.dtype();
    work.out = words.pointer<void>();
    const emb::Dtype to = words.dtype();
    work.local.data = words.pointer<void>();
    work.local.begin = words.number();
    work.local.end = words.number();
    work.source_numel = words.number();
    work.out_numel = words.number();
    if (forward) {
      launch_combine<CombineDirection::kForward>(launcher, work, from, to);
    } else {
      launch_combine<CombineDirection::kBackward>(launcher, work, from, to);
    }
  });
}
