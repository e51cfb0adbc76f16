// The kernels of `cache_move_` and `cache_flush_` on the CPU, and how they are reached.
#pragma once

#include "cache/move.h"

namespace emb {

struct CacheMoveTable {
  // Rows [begin, end) of the batch: what gives way is written back, then they are fetched.
  void (*move)(const CacheMemory&, const CacheMoves&, int64_t begin, int64_t end);
  // Slots [begin, end): the rows that `tags` says are there are written back.
  void (*flush)(const CacheMemory&, const int64_t* tags, int64_t begin, int64_t end);
};

}  // namespace emb
