// Moves rows and their optimizer states between the cache and the tiers of their tables on one CPU
// thread, see CacheMoveTable (cache/args.h): a copy if both have one dtype, otherwise a conversion.
// Rows are processed in blocks, of which all lines are prefetched before the first row is copied.
#include "cache/args.h"
#include "core/random_block.h"

namespace emb::EMB_ISA {
namespace {

// Functions that are called for every tensor of a row are EMB_HD here because EMB_HD forces
// inlining; they do not run on a device.

constexpr int kBlock = 8;  // rows whose lines are prefetched before the first of them is copied

// Return the address of the row at a location in a tensor.
EMB_HD char* address(const CacheMemory& memory, int tensor, const RowLocation& location) {
  const TierTensor& tensor_of_tier = memory.tensors[tensor][location.tier];
  return static_cast<char*>(tensor_of_tier.data) +
         first_entry(memory, tensor, location) * element_bytes(tensor_of_tier.type);
}

// Return the number of entries that a row has in a tensor.
EMB_HD int64_t length(const CacheMemory& memory, int tensor, const TierRow& row) {
  return memory.is_by_row(tensor) ? 1 : row.dim;
}

// Copy n values, rounded stochastically; the linear row id `row` and the `stream` of the tensor
// select the random numbers.
template <class To, class From>
void convert_randomly(To* to, const From* from, int64_t n, const Rounding& rounding, int64_t row,
                      uint32_t stream) {
  round_row(from, n, rounding, row, stream, to);
}

// Call `visit(pointer)`, where `pointer` is `data` as a pointer to elements of dtype `type`.
template <class Visitor>
EMB_HD void visit_dtype(Dtype type, void* data, const Visitor& visit) {
  static_assert(kNumDtypes == 3, "visit the new dtype");
  if (type == Dtype::kFloat) return visit(static_cast<float*>(data));
  if (type == Dtype::kHalf) return visit(static_cast<half16*>(data));
  visit(static_cast<bfloat16*>(data));
}

// Copy a row with all its states from one location to another. Tensors whose dtype differs between
// the two are rounded: stochastically if `rounding` is not null, else to nearest.
void copy_row(const CacheMemory& memory, const TierRow& row, const RowLocation& from,
              const RowLocation& to, const Rounding* rounding) {
  for (int k = 0; k < memory.num_tensors; ++k) {
    char *source = address(memory, k, from), *target = address(memory, k, to);
    const Dtype source_type = memory.tensors[k][from.tier].type;
    const Dtype target_type = memory.tensors[k][to.tier].type;
    const int64_t n = length(memory, k, row);
    if (source_type == target_type) {
      __builtin_memcpy(target, source, n * element_bytes(source_type));
      continue;
    }
    visit_dtype(target_type, target, [&](auto* out) {
      visit_dtype(source_type, source, [&](const auto* in) {
        if (rounding != nullptr) {
          convert_randomly(out, in, n, *rounding, row.row, write_back_stream(k));
        } else {
          convert_row(in, n, out);
        }
      });
    });
  }
}

// Prefetch a row with all its states at a location, for writing or reading.
template <bool write>
EMB_HD void prefetch_location(const CacheMemory& memory, const TierRow& row,
                              const RowLocation& location) {
  for (int k = 0; k < memory.num_tensors; ++k) {
    const int64_t bytes =
        length(memory, k, row) * element_bytes(memory.tensors[k][location.tier].type);
    prefetch_row<write>(address(memory, k, location), bytes);
  }
}

// A row to fetch into `slot`, and the row in this slot to write back, with dim 0 for none.
struct Move {
  TierRow fetched, written_back;
  int64_t slot;
};

// CacheMoveTable::move: write back evicted[u], if that is a cacheable row, then fetch rows[u].
// Entries whose row or slot does not exist are skipped, as on a GPU, because no caller checks the
// contents: such accesses would be outside the tensors.
void move(const CacheMemory& memory, const CacheMoves& moves, int64_t begin, int64_t end) {
  const Rounding rounding(memory.hyper);
  const Rounding* stochastic_rounding =
      rounding.is_stochastic ? &rounding : nullptr;  // null: nearest
  for (int64_t u = begin; u < end;) {
    Move block[kBlock];
    int count = 0;
    for (; u < end && count < kBlock; ++u) {
      if (moves.evicted[u] == kNoMove || moves.row_slots[u] < 0) continue;
      Move& next = block[count];
      next = {find_tier_row(memory, moves.rows[u]), find_tier_row(memory, moves.evicted[u]),
              moves.row_slots[u]};
      if (!fits(memory, next.fetched, next.slot)) continue;
      prefetch_location<false>(memory, next.fetched, next.fetched.location);
      prefetch_location<true>(memory, next.fetched, slot_location(next.fetched, next.slot));
      if (next.written_back.dim > 0)
        prefetch_location<true>(memory, next.written_back, next.written_back.location);
      ++count;
    }
    for (int i = 0; i < count; ++i) {
      const Move& current = block[i];
      const RowLocation slot = slot_location(current.fetched, current.slot);
      if (current.written_back.dim > 0)
        copy_row(memory, current.written_back, slot, current.written_back.location,
                 stochastic_rounding);
      copy_row(memory, current.fetched, current.fetched.location, slot, nullptr);
    }
  }
}

// CacheMoveTable::flush: write back the rows in slots [begin, end), but skip empty slots and tags
// that are no cacheable row.
void flush(const CacheMemory& memory, const int64_t* tags, int64_t begin, int64_t end) {
  const Rounding rounding(memory.hyper);
  const Rounding* stochastic_rounding =
      rounding.is_stochastic ? &rounding : nullptr;  // null: nearest
  for (int64_t slot = begin; slot < end;) {
    Move block[kBlock];
    int count = 0;
    for (; slot < end && count < kBlock; ++slot) {
      block[count] = {{}, find_tier_row(memory, tags[slot]), slot};
      if (!fits(memory, block[count].written_back, slot)) continue;
      prefetch_location<true>(memory, block[count].written_back,
                              block[count].written_back.location);
      ++count;
    }
    for (int i = 0; i < count; ++i) {
      const TierRow& row = block[i].written_back;
      copy_row(memory, row, slot_location(row, block[i].slot), row.location, stochastic_rounding);
    }
  }
}

}  // namespace

extern const CacheMoveTable kCacheMoveTable;
const CacheMoveTable kCacheMoveTable = {move, flush};

}  // namespace emb::EMB_ISA
