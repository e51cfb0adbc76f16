// `route_lengths` and `route_ids` on the CPU: check the arguments, allocate the outputs, and divide
// the bags into ranges of equal cost, which the threads process with route_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <tuple>

#include "core/isa.h"
#include "core/parallel.h"
#include "route/args.h"
#include "route/check.h"

namespace emb {

EMB_SELECT_KERNELS(RouteTable, kRouteTable, route_table)

namespace {

constexpr int64_t kRouteGrain = 8192;  // grain of parallel_balanced, in ids plus bags

// Call `kernel` for the bags of all features, in parallel, and return whether all calls returned
// true. Each range of bags gets scratch memory of its own; throws if there is none.
bool run_kernel(const RouteArgs& args, RouteFn kernel) {
  const Routing& routing = args.routing;
  if (routing.num_features == 0) return true;
  int64_t max_blocks = 1;
  for (int64_t f = 0; f < routing.num_features; ++f) {
    max_blocks = std::max(max_blocks, routing.features[f].num_blocks);
  }
  const int64_t first_bag = routing.first_bags[0],
                end_bag = routing.first_bags[routing.num_features];
  const int64_t first_id = args.bags.offsets[first_bag];
  std::atomic<bool> is_consistent{true};
  const auto cost = [&](int64_t i) { return args.bags.offsets[first_bag + i] - first_id + i; };
  parallel_balanced(
      end_bag - first_bag, kRouteGrain, cost, [&](int64_t range_begin, int64_t range_end) {
        const int64_t range_first_bag = first_bag + range_begin,
                      range_end_bag = first_bag + range_end;
        RouteArgs args_of_range = args;
        const std::unique_ptr<int64_t[]> scratch(new int64_t[kRouteScratchPerBlock * max_blocks]);
        args_of_range.scratch = scratch.get();
        const int64_t* next_feature = std::upper_bound(
            routing.first_bags, routing.first_bags + routing.num_features + 1, range_first_bag);
        for (int64_t f = next_feature - routing.first_bags - 1;
             f < routing.num_features && routing.first_bags[f] < range_end_bag; ++f) {
          const int64_t begin = std::max(range_first_bag, routing.first_bags[f]);
          const int64_t end = std::min(range_end_bag, routing.first_bags[f + 1]);
          if (begin < end && !kernel(args_of_range, f, begin, end)) is_consistent = false;
        }
      });
  return is_consistent;
}

// Return the arguments that both ops share; the outputs are set afterwards.
RouteArgs route_args(const RouteInputs& in) {
  RouteArgs args{};
  args.routing = in.routing;
  args.ids = in.ids.const_data_ptr();
  args.bags = in.bags();
  return args;
}

// Return the number of ids in each output bag, [num_bags] of the dtype of `ids`. `ids` is int32 or
// int64 [L], `offsets` int32 or int64 [bags + 1]; the next five tensors are the Routing. num_bags
// must be the number of output bags, the last entry of `units`.
Tensor route_lengths(const Tensor& ids, const Tensor& offsets, const Tensor& first_bags,
                     const Tensor& features, const Tensor& blocks, const Tensor& copies,
                     const Tensor& units, int64_t num_bags) {
  const char* op = "route_lengths";
  const RouteInputs in(op, ids, offsets, first_bags, features, blocks, copies, units);
  check_routing(op, in);
  const int64_t num_output_bags = in.routing.units[in.routing.num_units];
  STD_TORCH_CHECK(num_bags == num_output_bags, op, ": num_bags must be the bags of all units, ",
                  num_output_bags, ", got ", num_bags);
  Tensor out = allocate(in.ids, {num_bags});
  RouteArgs args = route_args(in);
  args.out = out.mutable_data_ptr();
  STD_TORCH_CHECK(run_kernel(args, route_table().count[in.id_array().is_int64]), op,
                  ": offsets must ascend from 0 to the number of ids, ", in.ids.numel());
  return out;
}

// Return the ids of all units, unit by unit and bag by bag: (ids [total], positions int64 [total],
// weights float32 [total]). Output i is the id at position positions[i] of `ids`, in the numbering
// of its rank. The argument `weights` is float32 [L] or null; if it is null, the returned weights
// are empty. `starts`, int32 or int64 [output bags + 1], are the sums of the lengths that
// route_lengths returned, and `total` is the last of them. Throws if the starts do not fit the ids
// at the ends of the ranges of bags into which the work is divided; the others are not read.
std::tuple<Tensor, Tensor, Tensor> route_ids(const Tensor& ids, const Tensor& offsets,
                                             const Tensor& first_bags, const Tensor& features,
                                             const Tensor& blocks, const Tensor& copies,
                                             const Tensor& units, const Tensor& starts,
                                             int64_t total, std::optional<Tensor> weights) {
  const char* op = "route_ids";
  const RouteInputs in(op, ids, offsets, first_bags, features, blocks, copies, units);
  check_routing(op, in);
  const Tensor start_tensor = as_contiguous(starts);
  const RouteWeights route_weights(op, in, start_tensor, total, weights);
  const IndexArray start_array = index_array(start_tensor);
  const int64_t num_output_bags = in.routing.units[in.routing.num_units];
  STD_TORCH_CHECK(start_tensor.numel() == num_output_bags + 1 && start_array[0] == 0 &&
                      start_array[num_output_bags] == total,
                  op, ": starts must have ", num_output_bags + 1,
                  " entries that run from 0 to total = ", total,
                  ": the sums of what route_lengths returns");
  Tensor out = allocate(in.ids, {total});
  Tensor positions = allocate(in.ids, {total}, ScalarType::Long);
  Tensor out_weights =
      allocate(in.ids, {route_weights.data != nullptr ? total : 0}, ScalarType::Float);
  RouteArgs args = route_args(in);
  args.out = out.mutable_data_ptr();
  args.starts = start_array;
  args.num_output_ids = total;
  args.positions = positions.mutable_data_ptr<int64_t>();
  args.weights = route_weights.data;
  args.out_weights = out_weights.mutable_data_ptr<float>();
  STD_TORCH_CHECK(run_kernel(args, route_table().move[in.id_array().is_int64]), op,
                  ": starts are not the sums of what route_lengths returns for these ids");
  return {out, positions, out_weights};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, route_lengths);
  EMB_IMPL(m, emb, route_ids);
}
