// `hash_initial_rows_` on the CPU: checks the arguments, then writes the initial rows of new keys
// in parallel.
#include <torch/csrc/stable/library.h>

#include "core/isa.h"
#include "core/parallel.h"
#include "hash/entries.h"
#include "hash/initial.h"

namespace emb {

EMB_SELECT_KERNELS(InitialKernels, kInitialKernels, initial_kernels)

namespace {

constexpr int64_t kElementGrain = 4096;  // grain of parallel_balanced, in elements

// Check that `offsets` ascend in [0, misses], and that the first_positions between them are
// positions in `ids`. Slots need no check, because slots without a row are ignored.
void check_misses(const char* op, const InitialInputs& inputs) {
  const auto* offsets = inputs.offsets.const_data_ptr<int64_t>();
  bool is_ascending =
      offsets[0] >= 0 && offsets[inputs.num_tables()] <= inputs.first_positions.numel();
  for (int64_t t = 0; t < inputs.num_tables(); ++t)
    is_ascending = is_ascending && offsets[t] <= offsets[t + 1];
  STD_TORCH_CHECK(is_ascending, op, ": offsets must ascend and lie in [0, ",
                  inputs.first_positions.numel(), "], as hash_touch_ returns them");
  const auto* first_positions = inputs.first_positions.const_data_ptr<int64_t>();
  for (int64_t i = offsets[0]; i < offsets[inputs.num_tables()]; ++i) {
    STD_TORCH_CHECK(first_positions[i] >= 0 && first_positions[i] < inputs.ids.numel(), op,
                    ": first must hold positions of ids, in [0, ", inputs.ids.numel(), "), got ",
                    first_positions[i]);
  }
}

// Write the initial row of every miss i: row slots[i] of each row buffer. A row buffer that has no
// row for the slot is skipped; a miss with slot -1 has no row. InitialInputs describes the tensors.
// `seed` selects the random numbers.
void hash_initial_rows_(std::vector<Tensor> row_buffers, const Tensor& layout, const Tensor& rules,
                        const Tensor& ids, const Tensor& first_positions, const Tensor& offsets,
                        const Tensor& slots, int64_t seed) {
  const char* op = "hash_initial_rows_";
  const InitialInputs inputs{row_buffers, layout, rules, ids, first_positions, offsets, slots};
  inputs.check(op);
  const InitialRows rows(op, inputs);
  check_misses(op, inputs);
  rows.write(ids.const_data_ptr<int64_t>(), first_positions.const_data_ptr<int64_t>(),
             offsets.const_data_ptr<int64_t>(), slots.const_data_ptr<int64_t>(), seed);
}

}  // namespace

InitialRows::InitialRows(const char* op, const InitialInputs& inputs)
    : layout_(static_cast<const InitialLayout*>(inputs.layout.const_data_ptr())),
      rules_(static_cast<const InitialRule*>(inputs.rules.const_data_ptr())),
      num_tables_(inputs.num_tables()) {
  for (const Tensor& buffer : inputs.row_buffers) {
    buffers_.push_back({static_cast<char*>(buffer.mutable_data_ptr()),
                        float_dtype(op, "each row buffer", buffer.scalar_type()), buffer.numel()});
  }
  for (int64_t i = 0; i < num_tables_ * inputs.num_buffers(); ++i) {
    const InitialLayout& layout = layout_[i];
    const int64_t numel = buffers_[i % inputs.num_buffers()].numel;
    STD_TORCH_CHECK(
        layout.offset >= 0 && layout.rows >= 0 && layout.dim >= 0 && layout.stride >= layout.dim &&
            layout.stride <= INT32_MAX && layout.offset <= numel &&
            (layout.rows == 0 || layout.stride == 0 ||
             (layout.rows - 1 <= (numel - layout.offset) / layout.stride &&
              (layout.rows - 1) * layout.stride + layout.dim <= numel - layout.offset)),
        op, ": layout must place the rows of table ", i / inputs.num_buffers(),
        " inside row buffer ", i % inputs.num_buffers(), ", which has ", numel, " elements");
  }
}

std::vector<RowBytes> InitialRows::rows_of(int64_t table) const {
  const auto num_buffers = static_cast<int64_t>(buffers_.size());
  std::vector<RowBytes> rows;
  for (int64_t p = 0; p < num_buffers; ++p) {
    const InitialLayout& layout = layout_[table * num_buffers + p];
    const int64_t size = element_bytes(buffers_[p].type);
    rows.push_back({buffers_[p].data + layout.offset * size, layout.dim * size,
                    layout.stride * size, layout.rows, alignment_of(static_cast<uintptr_t>(size))});
  }
  return rows;
}

void InitialRows::write(const int64_t* ids, const int64_t* first_positions, const int64_t* offsets,
                        const int64_t* slots, int64_t seed) const {
  const InitialKernels& kernels = initial_kernels();
  const auto num_buffers = static_cast<int64_t>(buffers_.size());
  // Return the row of miss i in a row buffer, null if it has none.
  const auto row_of = [&](int64_t p, int64_t i) -> char* {
    const InitialLayout& layout = layout_[p];
    if (slots[i] < 0 || slots[i] >= layout.rows) return nullptr;
    const Buffer& buffer = buffers_[p % num_buffers];
    return buffer.data + (layout.offset + slots[i] * layout.stride) * element_bytes(buffer.type);
  };
  const auto write_row = [&](int64_t p, int64_t i) {
    char* const row = row_of(p, i);
    if (row == nullptr) return;
    const InitialLayout& layout = layout_[p];
    const Dtype type = buffers_[p % num_buffers].type;
    kernels.write_row[static_cast<int>(type)](
        {row, layout.dim, ids[first_positions[i]], layout.stream, static_cast<uint64_t>(seed)},
        rules_[p]);
  };
  // The slots of new keys are in no order, so the lines of each row are prefetched.
  const auto prefetch = [&](int64_t p, int64_t i) {
    const char* const row = row_of(p, i);
    if (row != nullptr)
      prefetch_row(row, layout_[p].dim * element_bytes(buffers_[p % num_buffers].type));
  };
  for (int64_t t = 0; t < num_tables_; ++t) {
    int64_t num_elements = 1;
    for (int64_t p = 0; p < num_buffers; ++p) num_elements += layout_[t * num_buffers + p].dim;
    parallel_balanced(
        offsets[t + 1] - offsets[t], kElementGrain, [&](int64_t i) { return i * num_elements; },
        [&](int64_t begin, int64_t end) {
          const int64_t miss_end = offsets[t] + end;
          for (int64_t i = offsets[t] + begin; i < miss_end; ++i) {
            for (int64_t p = t * num_buffers; p < (t + 1) * num_buffers; ++p) {
              if (i + kRowsAhead < miss_end) prefetch(p, i + kRowsAhead);
              write_row(p, i);
            }
          }
        });
  }
}

}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, hash_initial_rows_); }
