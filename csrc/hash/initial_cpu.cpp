// `hash_initial_rows_` on the CPU: checks the arguments, then writes the initial rows of new keys
// in parallel.
#include <torch/csrc/stable/library.h>

#include "core/isa.h"
#include "core/parallel.h"
#include "hash/check.h"
#include "hash/initial.h"

namespace emb {

EMB_SELECT_KERNELS(InitialTable, kInitialTable, initial_table)

namespace {

constexpr int64_t kElementsPerTask = 4096;  // approximate minimum number of elements per thread

// A row buffer; the tensor owns the memory.
struct Buffer {
  char* data;
  Dtype type;
  int64_t numel;
};

// Check that the rows in `layout` lie inside their row buffers, that `offsets` ascend, and that
// `first` are positions in `ids`. Slots need no check: those without a row are ignored.
void check_contents(const char* op, const InitialInputs& in, const std::vector<Buffer>& buffers) {
  const auto* layout = static_cast<const InitialLayout*>(in.layout.const_data_ptr());
  for (int64_t i = 0; i < in.layout.size(0) * in.num_buffers(); ++i) {
    const InitialLayout& x = layout[i];
    const int64_t numel = buffers[i % in.num_buffers()].numel;
    STD_TORCH_CHECK(x.offset >= 0 && x.rows >= 0 && x.dim >= 0 && x.stride >= x.dim &&
                        x.stride <= kMaxLookups && x.offset <= numel &&
                        (x.rows == 0 || x.stride == 0 ||
                         (x.rows - 1 <= (numel - x.offset) / x.stride &&
                          (x.rows - 1) * x.stride + x.dim <= numel - x.offset)),
                    op, ": layout must place the rows of table ", i / in.num_buffers(),
                    " inside row buffer ", i % in.num_buffers(), ", which has ", numel,
                    " elements");
  }
  const auto* offsets = in.offsets.const_data_ptr<int64_t>();
  bool ascending = offsets[0] >= 0 && offsets[in.num_tables()] <= in.first.numel();
  for (int64_t t = 0; t < in.num_tables(); ++t)
    ascending = ascending && offsets[t] <= offsets[t + 1];
  STD_TORCH_CHECK(ascending, op, ": offsets must ascend and lie in [0, ", in.first.numel(),
                  "], as hash_touch_ returns them");
  const auto* first = in.first.const_data_ptr<int64_t>();
  for (int64_t i = offsets[0]; i < offsets[in.num_tables()]; ++i) {
    STD_TORCH_CHECK(first[i] >= 0 && first[i] < in.ids.numel(), op,
                    ": first must hold positions of ids, in [0, ", in.ids.numel(), "), got ",
                    first[i]);
  }
}

// Write row slots[i] of each row buffer for every miss i, unless the slot is -1. See InitialInputs
// for the tensors; `seed` selects the random numbers.
void hash_initial_rows_(std::vector<Tensor> row_buffers, const Tensor& layout, const Tensor& rules,
                        const Tensor& ids, const Tensor& first, const Tensor& offsets,
                        const Tensor& slots, int64_t seed) {
  const char* op = "hash_initial_rows_";
  const InitialInputs in{row_buffers, layout, rules, ids, first, offsets, slots};
  in.check(op);
  std::vector<Buffer> memory;
  for (const Tensor& buffer : row_buffers) {
    memory.push_back({static_cast<char*>(buffer.mutable_data_ptr()),
                      float_dtype(op, "each row buffer", buffer.scalar_type()), buffer.numel()});
  }
  check_contents(op, in, memory);
  const auto* row_layout = static_cast<const InitialLayout*>(layout.const_data_ptr());
  const auto* rule = static_cast<const InitialRule*>(rules.const_data_ptr());
  const auto *key = ids.const_data_ptr<int64_t>(), *position = first.const_data_ptr<int64_t>(),
             *slot = slots.const_data_ptr<int64_t>(), *end = offsets.const_data_ptr<int64_t>();
  const InitialTable& table = initial_table();
  const int64_t num_buffers = in.num_buffers();
  for (int64_t t = 0; t < in.num_tables(); ++t) {
    int64_t elements = 1;
    for (int64_t p = 0; p < num_buffers; ++p) elements += row_layout[t * num_buffers + p].dim;
    parallel_balanced(
        end[t + 1] - end[t], kElementsPerTask, [&](int64_t i) { return i * elements; },
        [&](int64_t begin, int64_t stop) {
          for (int64_t i = end[t] + begin; i < end[t] + stop; ++i) {
            for (int64_t p = t * num_buffers; p < (t + 1) * num_buffers; ++p) {
              const InitialLayout& x = row_layout[p];
              if (slot[i] < 0 || slot[i] >= x.rows) continue;
              const Buffer& buffer = memory[p % num_buffers];
              const int64_t size = size_of(buffer.type);
              table.at[static_cast<int>(buffer.type)](
                  {buffer.data + (x.offset + slot[i] * x.stride) * size, x.dim, key[position[i]],
                   x.stream, static_cast<uint64_t>(seed)},
                  rule[p]);
            }
          }
        });
  }
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, hash_initial_rows_); }
