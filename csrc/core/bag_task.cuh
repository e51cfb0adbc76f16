// What a lane or a group of lanes of a lookup on the GPU takes: a bag, or without pooling a lookup.
// For tables of any format: `Args` has the members features, num_features, bags, map, columns and
// pooling of a lookup.
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"

namespace emb::cuda {

// Only what inner loops need stays in registers: the rest of the feature is read again, from the
// cache, where it is used. A number behind the last bag gives a bag of no lookups and no columns.
struct BagTask {
  const Feature* feature;
  int begin = 0, length = 0, dim = 0;

  // The task of a bag, with pooling.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, uint32_t bag) : feature(args.features) {
    if (bag < args.bags.count) set_bag(args, bag);
  }

  // The task of item `item` of `items`: bags, or lookups without pooling. Lookups before the first
  // bag have no feature, and zeros as output.
  template <class Args>
  EMB_DEVICE BagTask(const Args& args, int64_t item, int64_t items) : feature(args.features) {
    if (item >= items) return;
    if (args.pooling != Pooling::kNone) {
      set_bag(args, static_cast<uint32_t>(item));
      return;
    }
    begin = static_cast<int>(item);
    dim = static_cast<int>(args.columns);
    if (args.bags.count == 0 || item < args.bags.begin(0)) return;
    feature += feature_of_lookup(args.map, args.bags, args.num_features, item);
    length = 1;
  }

  // Return the first element of the output of a bag, with pooling.
  template <class Args>
  EMB_DEVICE int64_t bag_element(const Args& args, uint32_t bag) const {
    return dim > 0 ? args.map.element(bag, feature->column) : 0;
  }

  // Return the first element of the output of an item.
  template <class Args>
  EMB_DEVICE int64_t element(const Args& args, int64_t item) const {
    if (args.pooling == Pooling::kNone) return item * args.columns;
    return bag_element(args, static_cast<uint32_t>(item));
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

// Return the mean columns per row of the output; the width of each feature is known on the device
// only.
template <class Args>
int64_t mean_width(const Args& args) {
  const int64_t rows = args.map.layout != nullptr ? args.bags.count : args.num_features;
  if (args.pooling == Pooling::kNone || rows == 0) return args.columns;
  return (args.columns + rows - 1) / rows;
}

}  // namespace emb::cuda
