// `gather_segments` on the CPU: copy segments of rows as bytes. Threads copy ranges of the output
// of equal size, which may begin within a segment.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "core/parallel.h"
#include "route/check.h"

namespace emb {
namespace {

constexpr int64_t kSegmentGrain = 64 * 1024;  // grain of parallel_balanced, in bytes

// Copy bytes. Copies of 4 and 8 bytes are inlined, because a call costs more than the copy.
inline void copy_bytes(char* out, const char* in, int64_t nbytes) {
  if (nbytes == 8) {
    std::memcpy(out, in, 8);
  } else if (nbytes == 4) {
    std::memcpy(out, in, 4);
  } else {
    std::memcpy(out, in, nbytes);
  }
}

// Write the first output row of each output segment to `first_rows`, [num_output_segments + 1], and
// to its last entry the number of output rows. `order`, [num_output_segments], names the segments.
// Throws unless they exist, lie in the `num_rows` rows of the values, and have no negative length.
void write_first_rows(const char* op, IndexArray starts, int64_t num_segments, const int64_t* order,
                      int64_t num_output_segments, int64_t num_rows, int64_t* first_rows) {
  int64_t num_rows_before = 0;
  for (int64_t m = 0; m < num_output_segments; ++m) {
    const int64_t s = order[m];
    STD_TORCH_CHECK(s >= 0 && s < num_segments, op, ": order must name segments in [0, ",
                    num_segments, "), got ", s);
    const int64_t begin = starts[s], end = starts[s + 1];
    STD_TORCH_CHECK(begin >= 0 && begin <= end && end <= num_rows, op, ": segment ", s,
                    " must lie in the ", num_rows, " rows of values, but is [", begin, ", ", end,
                    ")");
    first_rows[m] = num_rows_before;
    num_rows_before += end - begin;
  }
  first_rows[num_output_segments] = num_rows_before;
}

// Return the segments values[starts[s]:starts[s + 1]] for s in `order`, one after the other:
// [total, ..] of the dtype of `values`, which may be any. SegmentInputs has the shapes. Throws
// unless the segments exist, and `total` is the number of their rows.
Tensor gather_segments(const Tensor& values, const Tensor& starts, const Tensor& order,
                       int64_t total) {
  const char* op = "gather_segments";
  const SegmentInputs in(op, values, starts, order, total);
  const IndexArray start_array = index_array(in.starts);
  const int64_t* output_segments = in.order.const_data_ptr<int64_t>();
  const int64_t num_output_segments = in.order.numel();
  const std::unique_ptr<int64_t[]> first_rows(new int64_t[num_output_segments + 1]);
  write_first_rows(op, start_array, in.starts.numel() - 1, output_segments, num_output_segments,
                   in.values.size(0), first_rows.get());
  STD_TORCH_CHECK(first_rows[num_output_segments] == total, op,
                  ": total must be the rows of all segments of order, ",
                  first_rows[num_output_segments], ", got ", total);
  Tensor out = in.new_output(total);
  const char* source = static_cast<const char*>(in.values.const_data_ptr());
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = in.row_bytes;
  const auto copy_rows = [&](int64_t begin, int64_t end) {
    int64_t m =
        std::upper_bound(first_rows.get(), first_rows.get() + num_output_segments + 1, begin) -
        first_rows.get() - 1;
    for (int64_t row = begin; row < end; ++m) {
      const int64_t num_skipped = row - first_rows[m], n = std::min(end, first_rows[m + 1]) - row;
      copy_bytes(target + row * row_bytes,
                 source + (start_array[output_segments[m]] + num_skipped) * row_bytes,
                 n * row_bytes);
      row += n;
    }
  };
  if (row_bytes > 0) {
    parallel_balanced(
        total, kSegmentGrain, [&](int64_t row) { return row * row_bytes; }, copy_rows);
  }
  return out;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, gather_segments); }
