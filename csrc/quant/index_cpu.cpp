// `map_ids` on the CPU. The entries of a block of ids are prefetched before any of them is
// searched, so that their cache misses overlap.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>

#include "core/feature_bags.h"
#include "quant/check.h"
#include "quant/index.h"

namespace emb {
namespace {

constexpr int64_t kBlockIds = 64;     // ids whose entries are prefetched together; not measured
constexpr int64_t kMaxHashBits = 47;  // so that 2^hash_bits entries do not overflow a size

// Throws unless every search stays inside `index`, whatever the contents of `index` are. An element
// of `index` holds two rows of an array, or half an entry of a hash table.
void check_index(const char* op, const Tensor& index, const Tensor& tables) {
  const auto* all_tables = static_cast<const IndexTable*>(tables.const_data_ptr());
  for (int64_t f = 0; f < tables.size(0); ++f) {
    const IndexTable& table = all_tables[f];
    const bool is_array = table.kind == static_cast<int>(IndexKind::kArray);
    const bool is_hash = table.kind == static_cast<int>(IndexKind::kHash);
    const int64_t num_elements = index.numel() - table.begin;  // from table.begin on
    const bool fits = table.begin >= 0 && num_elements >= 0 && table.entries >= 0 &&
                      table.entries <= (is_array ? num_elements * 2 : num_elements / 2);
    const bool searches_fit = is_array ? table.num_ids >= 0 && table.num_ids <= table.entries
                                       : table.hash_bits >= 0 && table.hash_bits <= kMaxHashBits &&
                                             table.entries >= int64_t{1} << table.hash_bits;
    STD_TORCH_CHECK(table.kind == static_cast<int>(IndexKind::kNone) ||
                        ((is_array || is_hash) && fits && searches_fit),
                    op, ": feature ", f,
                    " has an index outside the memory of `index`; tables must ",
                    "come from the module that owns them");
  }
}

// Write args.rows for lookups [begin, end) of the feature of `table`.
void find_rows(const IndexArgs& args, const IndexTable& table, int64_t begin, int64_t end) {
  const void* addresses[kBlockIds];
  for (; begin < end; begin += kBlockIds) {
    const int64_t count = std::min(kBlockIds, end - begin);
    for (int64_t i = 0; i < count; ++i) {
      addresses[i] = index_address(args.index, table, args.ids[begin + i]);
      __builtin_prefetch(addresses[i], 0, 3);
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t id = args.ids[begin + i];
      args.rows[begin + i] = stored_row(args.index, table, id, addresses[i]);
    }
  }
}

// Return the row that is stored for each id in `indices`, int64 [L], as stored_row defines it; the
// id itself for lookups of no bag, which the bounds check of the rows then finds. `index` is int64
// [words], `tables` int64 [F, 6], rows of IndexTable; the other arguments are as in `tbe_lookup`.
// Throws if a table reaches outside `index`.
Tensor map_ids(const Tensor& index, const Tensor& tables, const Tensor& features,
               const Tensor& indices_in, const Tensor& offsets_in,
               std::optional<Tensor> bag_layout) {
  const char* op = "map_ids";
  const MapCall call(op, index, tables, features, indices_in, offsets_in, bag_layout);
  check_index(op, index, tables);
  Tensor rows = allocate(call.indices, {call.indices.numel()}, ScalarType::Long);
  const IndexArgs args = call.args(&rows);
  if (args.bags.num_bags == 0) return rows;
  const FeatureBags feature_bags(op, features, call.offsets, bag_layout, Pooling::kNone,
                                 kUnlimited);
  for (int64_t i = 0; i < args.bags.begin(0); ++i) args.rows[i] = args.ids[i];  // of no bag
  for_feature_bags(args.bags, feature_bags, [&](int64_t f, int64_t begin, int64_t end) {
    find_rows(args, args.tables[f], args.bags.begin(begin), args.bags.end(end - 1));
  });
  return rows;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, map_ids); }
