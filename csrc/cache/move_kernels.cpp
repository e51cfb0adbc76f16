// Moves rows and their optimizer states between the cache and the tiers of their tables, on one CPU
// thread: the functions of CacheMoveKernels (cache/args.h). If a tensor has one dtype in both
// tiers, the row is copied, otherwise it is converted. Rows are processed in blocks: all cache
// lines of a block are prefetched before its first row is copied.
#include "cache/args.h"
#include "core/random_block.h"

namespace emb::EMB_ISA {
namespace {

// Functions that are called for every tensor of a row are EMB_HD because that forces inlining; they
// do not run on a device.

constexpr int kBlockRows = 8;  // rows per block

// Return the address of the row at `location` in tensor number `tensor` of CacheMemory.
EMB_HD char* row_address(const CacheMemory& memory, int tensor, const RowLocation& location) {
  const TierTensor& tensor_of_tier = memory.tensors[tensor][location.tier];
  return static_cast<char*>(tensor_of_tier.data) +
         first_entry(memory, tensor, location) * element_bytes(tensor_of_tier.type);
}

// Return the number of entries of a row in tensor number `tensor`: 1 or dim.
EMB_HD int64_t num_row_entries(const CacheMemory& memory, int tensor, const TierRow& row) {
  return memory.has_entry_per_row(tensor) ? 1 : row.dim;
}

// Call `visit(pointer)` with `data` as a pointer to elements of dtype `type`.
template <class Visitor>
EMB_HD void visit_dtype(Dtype type, void* data, const Visitor& visit) {
  static_assert(kNumDtypes == 3, "visit the new dtype");
  if (type == Dtype::kFloat) return visit(static_cast<float*>(data));
  if (type == Dtype::kHalf) return visit(static_cast<half16*>(data));
  visit(static_cast<bfloat16*>(data));
}

// Copy a row with all its states from one location to another. Where the tiers have different
// dtypes, values are rounded stochastically by `rounding`, or to nearest if `rounding` is null.
void copy_row(const CacheMemory& memory, const TierRow& row, const RowLocation& from,
              const RowLocation& to, const Rounding* rounding) {
  for (int k = 0; k < memory.num_tensors; ++k) {
    char *source = row_address(memory, k, from), *target = row_address(memory, k, to);
    const Dtype source_type = memory.tensors[k][from.tier].type;
    const Dtype target_type = memory.tensors[k][to.tier].type;
    const int64_t n = num_row_entries(memory, k, row);
    if (source_type == target_type) {
      __builtin_memcpy(target, source, n * element_bytes(source_type));
      continue;
    }
    visit_dtype(target_type, target, [&](auto* out) {
      visit_dtype(source_type, source, [&](const auto* in) {
        if (rounding != nullptr) {
          round_row_randomly(in, n, *rounding, row.row, write_back_stream(k), out);
        } else {
          convert_row(in, n, out);
        }
      });
    });
  }
}

// Prefetch a row with all its states at a location, for writing if kWrites, else for reading.
template <bool kWrites>
EMB_HD void prefetch_location(const CacheMemory& memory, const TierRow& row,
                              const RowLocation& location) {
  for (int k = 0; k < memory.num_tensors; ++k) {
    const int64_t row_bytes =
        num_row_entries(memory, k, row) * element_bytes(memory.tensors[k][location.tier].type);
    prefetch_row<kWrites>(row_address(memory, k, location), row_bytes);
  }
}

// The moves of one slot: the row in it, to be written back, and then a row to be fetched into it. A
// dim of 0 means no row.
struct RowMove {
  TierRow fetch, write_back;
  int64_t slot;
};

// Return `rounding` for the write-back of rows; null to round to nearest.
const Rounding* write_back_rounding(const Rounding& rounding) {
  return rounding.is_stochastic ? &rounding : nullptr;
}

// CacheMoveKernels::move. Rows that do not exist, or whose slot does not exist, are skipped, as on
// a GPU: no caller checks the plan, and such moves would be outside the tensors. `evicted` rows
// that are not cacheable are not written back.
void move(const CacheMemory& memory, const CacheMoves& moves, int64_t begin, int64_t end) {
  const Rounding rounding(memory.hyper);
  for (int64_t u = begin; u < end;) {
    RowMove block[kBlockRows];
    int num_moves = 0;
    for (; u < end && num_moves < kBlockRows; ++u) {
      if (moves.evicted[u] == kNoMove || moves.row_slots[u] < 0) continue;
      RowMove& new_move = block[num_moves];
      new_move = {find_tier_row(memory, moves.rows[u]), find_tier_row(memory, moves.evicted[u]),
                  moves.row_slots[u]};
      if (!can_cache(memory, new_move.fetch, new_move.slot)) continue;
      prefetch_location<false>(memory, new_move.fetch, new_move.fetch.location);
      prefetch_location<true>(memory, new_move.fetch, slot_location(new_move.fetch, new_move.slot));
      if (new_move.write_back.dim > 0)
        prefetch_location<true>(memory, new_move.write_back, new_move.write_back.location);
      ++num_moves;
    }
    for (int i = 0; i < num_moves; ++i) {
      const RowMove& row_move = block[i];
      const RowLocation slot = slot_location(row_move.fetch, row_move.slot);
      if (row_move.write_back.dim > 0)
        copy_row(memory, row_move.write_back, slot, row_move.write_back.location,
                 write_back_rounding(rounding));
      copy_row(memory, row_move.fetch, row_move.fetch.location, slot, nullptr);
    }
  }
}

// CacheMoveKernels::flush.
void flush(const CacheMemory& memory, const int64_t* tags, int64_t begin, int64_t end) {
  const Rounding rounding(memory.hyper);
  for (int64_t slot = begin; slot < end;) {
    RowMove block[kBlockRows];
    int num_moves = 0;
    for (; slot < end && num_moves < kBlockRows; ++slot) {
      block[num_moves] = {{}, find_tier_row(memory, tags[slot]), slot};
      if (!can_cache(memory, block[num_moves].write_back, slot)) continue;
      prefetch_location<true>(memory, block[num_moves].write_back,
                              block[num_moves].write_back.location);
      ++num_moves;
    }
    for (int i = 0; i < num_moves; ++i) {
      const TierRow& row = block[i].write_back;
      copy_row(memory, row, slot_location(row, block[i].slot), row.location,
               write_back_rounding(rounding));
    }
  }
}

}  // namespace

extern const CacheMoveKernels kCacheMoveKernels;
const CacheMoveKernels kCacheMoveKernels = {move, flush};

}  // namespace emb::EMB_ISA
