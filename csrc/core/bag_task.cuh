// The work of a lane, or of a group of lanes, in a lookup on the GPU: an *item*. With pooling an
// item is a bag; without pooling it is a single lookup. Lookups in tables of any format use it.
// Kernels pass their arguments as `Args`, which must have these members:
//   features, num_features  [num_features] Feature in device memory; at least one
//   bags                    Bags: the lookups of every bag
//   map                     BagMap: the feature and the output row of every bag
//   output_dim              with pooling in a variable batch, the number of elements of the whole
//                           output; otherwise the number of columns of an output row
//   pooling                 Pooling
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"

namespace emb::cuda {

// The lookups and the output columns of an item. An item beyond the last one has no lookups and no
// columns. Members that inner loops need are in registers; kernels read the other members of the
// feature from memory where they use them. Every lane constructs its task alone.
struct BagTask {
  const Feature* feature;  // the item's feature; features[0] for an item that belongs to none
  int begin = 0;           // first lookup
  int length = 0;          // number of lookups
  int dim = 0;             // number of output columns

  // Read the task of bag number `bag`, which may be beyond the last one. With pooling only.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, uint32_t bag) : feature(args.features) {
    if (bag < args.bags.num_bags) set_bag(args, bag);
  }

  // Read the task of item `item`, which may be `num_items`, the number of items, or more. Without
  // pooling, offsets must not decrease: otherwise a lookup may get the feature of another bag. A
  // lookup before the first bag, or of a batch without bags, belongs to no feature; its task has no
  // lookups, but all columns of the output row, so that the kernel writes zeros.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, int64_t item, int64_t num_items) : feature(args.features) {
    if (item >= num_items) return;
    if (args.pooling != Pooling::kNone) {
      set_bag(args, static_cast<uint32_t>(item));
      return;
    }
    begin = static_cast<int>(item);
    dim = static_cast<int>(args.output_dim);
    if (args.bags.num_bags == 0 || item < args.bags.begin(0)) return;
    feature += feature_of_lookup(args.map, args.bags, args.num_features, item);
    length = 1;
  }

  // Return the first output element of `bag`, the bag of this task; 0 if it has no columns. With
  // pooling only.
  template <class Args>
  EMB_DEVICE int64_t bag_output_element(const Args& args, uint32_t bag) const {
    return dim > 0 ? args.map.output_element(bag, feature->column) : 0;
  }

  // Return the first output element of `item`, the item of this task.
  template <class Args>
  EMB_DEVICE int64_t output_element(const Args& args, int64_t item) const {
    if (args.pooling == Pooling::kNone) return item * args.output_dim;
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

// Return the mean number of output columns of an item, rounded up; args.output_dim for a variable
// batch without bags. The host sizes grids by it, since only the device knows the dim of each
// feature.
template <class Args>
int64_t mean_output_columns(const Args& args) {
  // With pooling, output_dim is a sum over the features of a fixed batch, or over the bags of a
  // variable batch.
  const int64_t num_terms = args.map.layout != nullptr ? args.bags.num_bags : args.num_features;
  if (args.pooling == Pooling::kNone || num_terms == 0) return args.output_dim;
  return (args.output_dim + num_terms - 1) / num_terms;
}

}  // namespace emb::cuda
