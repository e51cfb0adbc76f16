// The unit of work of a lane, or of a group of lanes, in a lookup on the GPU: an *item*, which is a
// bag, or a lookup if there is no pooling. Lookups in tables of any format use it. `Args`, the
// arguments of a lookup kernel, has these members:
//   features, num_features  the features, [num_features], at least one, in device memory
//   bags                    Bags, the lookups of every bag
//   map                     BagMap, the feature and the output row of every bag
//   columns                 elements of the whole output in a variable batch with pooling; else
//                           columns of an output row
//   pooling                 Pooling
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"

namespace emb::cuda {

// The lookups and the columns of an item. Only what inner loops need is in registers; kernels read
// other members of the feature in memory where they use them. The task of an item beyond the last
// one has no lookups and no columns.
struct BagTask {
  const Feature* feature;
  int begin = 0;   // first lookup
  int length = 0;  // lookups
  int dim = 0;     // output columns

  // Set the task of bag number `bag`; only with pooling.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, uint32_t bag) : feature(args.features) {
    if (bag < args.bags.num_bags) set_bag(args, bag);
  }

  // Set the task of item `item` of `num_items`. A lookup before the first bag, or of a batch
  // without bags, belongs to no feature. Its task has no lookup, but all columns of the output row,
  // so that the kernel writes zeros. Without pooling offsets must not decrease, because otherwise a
  // lookup may get the feature of another bag.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, int64_t item, int64_t num_items) : feature(args.features) {
    if (item >= num_items) return;
    if (args.pooling != Pooling::kNone) {
      set_bag(args, static_cast<uint32_t>(item));
      return;
    }
    begin = static_cast<int>(item);
    dim = static_cast<int>(args.columns);
    if (args.bags.num_bags == 0 || item < args.bags.begin(0)) return;
    feature += feature_of_lookup(args.map, args.bags, args.num_features, item);
    length = 1;
  }

  // Return the first output element of this task's bag, with pooling.
  template <class Args>
  EMB_DEVICE int64_t bag_output_element(const Args& args, uint32_t bag) const {
    return dim > 0 ? args.map.output_element(bag, feature->column) : 0;
  }

  // Return the first output element of this task's item.
  template <class Args>
  EMB_DEVICE int64_t output_element(const Args& args, int64_t item) const {
    if (args.pooling == Pooling::kNone) return item * args.columns;
    return bag_output_element(args, static_cast<uint32_t>(item));
  }

 private:
  template <class Args>
  EMB_DEVICE void set_bag(const Args& args, uint32_t bag) {
    feature += args.map.feature(bag);
    begin = static_cast<int>(args.bags.begin(bag));
    length = static_cast<int>(args.bags.end(bag)) - begin;
    dim = static_cast<int>(feature->dim);
  }
};

// Return the mean number of output columns of an item, rounded up; args.columns for a variable
// batch without bags. The host sizes grids by it, since only the device knows the dim of each
// feature.
template <class Args>
int64_t mean_output_columns(const Args& args) {
  // With pooling `columns` is a sum over the features of a fixed batch, or the bags of a variable
  // batch.
  const int64_t num_terms = args.map.layout != nullptr ? args.bags.num_bags : args.num_features;
  if (args.pooling == Pooling::kNone || num_terms == 0) return args.columns;
  return (args.columns + num_terms - 1) / num_terms;
}

}  // namespace emb::cuda
