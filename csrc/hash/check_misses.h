// The missing keys of a batch, and the arrays of values that move with their entries, checked.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "hash/check_index.h"

namespace emb {

// Misses [ends[t], ends[t + 1]) are those of table t, as hash_misses returns them.
class Misses {
 public:
  Misses(const char* op, const HashIndex& index, const Tensor& ids, const Tensor& ends,
         const std::optional<Tensor>& admitted)
      : n_(ids.numel()),
        tables_(index.num_tables),
        ends_(optional_longs(op, "ends", ends, index.num_tables + 1, ids)) {
    if (!admitted) return;
    check_dtype(op, "admitted", *admitted, ScalarType::Bool, "bool");
    check_same_device(op, "admitted", *admitted, ids);
    STD_TORCH_CHECK(admitted->is_contiguous() && admitted->numel() == n_, op,
                    ": admitted must be contiguous with one entry an id = ", n_, ", got ",
                    admitted->numel());
    admitted_ = static_cast<const bool*>(admitted->const_data_ptr());
  }

  // On the CPU.
  void check_ends(const char* op) const {
    int64_t previous = 0;
    for (int64_t t = 0; t <= tables_; ++t) {
      STD_TORCH_CHECK(ends_[t] >= previous && ends_[t] <= n_ && (t > 0 || ends_[t] == 0), op,
                      ": ends must ascend from 0 to at most the number of ids, ", n_, ", got ",
                      ends_[t], " after ", previous);
      previous = ends_[t];
    }
  }

  const int64_t* ends() const { return ends_; }
  const bool* admitted() const { return admitted_; }

  int64_t begin(int64_t table) const { return ends_[table]; }
  int64_t end(int64_t table) const { return ends_[table + 1]; }
  int64_t count() const { return ends_[tables_]; }
  bool is_admitted(int64_t miss) const { return admitted_ == nullptr || admitted_[miss]; }
  int64_t admitted_of(int64_t table) const {
    int64_t sum = 0;
    for (int64_t i = begin(table); i < end(table); ++i) sum += is_admitted(i);
    return sum;
  }

 private:
  int64_t n_, tables_;
  const int64_t* ends_;
  const bool* admitted_ = nullptr;
};

// What hash_misses returns, not yet written.
struct MissTensors {
  Tensor first, groups, totals, ends;

  MissTensors(const Tensor& ids, int64_t num_tables)
      : first(allocate(ids, {ids.numel()})),
        groups(allocate(ids, {ids.numel()}, ScalarType::Int)),
        totals(allocate(ids, {ids.numel()})),
        ends(allocate(ids, {num_tables + 1})) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor> all() const { return {first, groups, totals, ends}; }
};

// Value planes: row_layout int64 [T, P, 2] holds, of each table and plane, the byte at which its
// row 0 begins and the bytes of a row.
struct RowPlanes {
  int count;
  std::vector<RowPlane> planes;  // [T, P], on the CPU

  RowPlanes(const char* op, const HashIndex& index, const std::vector<Tensor>& rows,
            const Tensor& row_layout)
      : count(static_cast<int>(rows.size())) {
    check_form(op, index, rows, row_layout);
    const int64_t* layout = row_layout.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < index.num_tables; ++t) {
      for (int p = 0; p < count; ++p, layout += 2) {
        const int64_t most = index.field(t, kMostBuckets) * kSlots;
        const int64_t nbytes = rows[p].numel() * rows[p].element_size();
        STD_TORCH_CHECK(layout[0] >= 0 && layout[1] >= 0 && layout[0] <= nbytes &&
                            (layout[1] == 0 || most <= (nbytes - layout[0]) / layout[1]),
                        op, ": the rows of table ", t, " lie outside rows[", p, "]");
        planes.push_back(
            {static_cast<uint8_t*>(rows[p].mutable_data_ptr()) + layout[0], layout[1]});
      }
    }
  }

  static void check_form(const char* op, const HashIndex& index, const std::vector<Tensor>& rows,
                         const Tensor& row_layout) {
    check_dtype(op, "row_layout", row_layout, ScalarType::Long, "int64");
    const auto planes = static_cast<int64_t>(rows.size());
    STD_TORCH_CHECK(row_layout.dim() == 3 && row_layout.size(0) == index.num_tables &&
                        row_layout.size(1) == planes && row_layout.size(2) == 2 &&
                        row_layout.is_contiguous(),
                    op, ": row_layout must be a contiguous [T, P, 2] for ", planes, " rows");
    for (const Tensor& plane : rows) {
      STD_TORCH_CHECK(plane.is_contiguous(), op, ": rows must be contiguous");
    }
  }

  const RowPlane* of(int64_t table) const { return planes.data() + table * count; }
};

}  // namespace emb
