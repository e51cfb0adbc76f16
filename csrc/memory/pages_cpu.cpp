// Pages of files that are mapped into memory: checksums, marks by page, and reads ahead of use.
// emblib/ops/pages.py describes the arguments and results.
//
// A store has vectors of marks with a byte per page, for example whether the page has been changed.
// `pages_without_mark` and `mark_pages_` take row numbers; a row may be on several pages.
//
// `fetch_pages` reads the pages of rows that are about to be used. If a copy of the rows read them
// by page faults, it would wait for the disk at every page. Instead the op has two steps. The first
// advises the system that all these pages are needed: the system starts to read them and does not
// wait, so the disk always has a queue of reads. The second maps the pages and waits for each. It
// reports a page that cannot be read, for which a page fault would raise the signal SIGBUS. One
// thread keeps the queue full, so the number of torch's threads does not matter. If all of a few
// probed rows are in memory, as usual, nothing is read. In a measurement (reports/LOG.md, "A batch
// and its store in two native calls") this read about 4.5 times as many rows per second as the page
// faults of one thread, and io_uring read 15 % more than this.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "memory/crc32.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace emb {
namespace {

constexpr int64_t kCrcGrain = 1 << 17;  // bytes of checksums per grain of parallel_balanced

// Check that the argument `name` is a contiguous uint8 vector, and return its data.
unsigned char* byte_array(const char* op, const char* name, const Tensor& tensor) {
  check_dtype(op, name, tensor, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
                  " must be a contiguous vector");
  return static_cast<unsigned char*>(tensor.mutable_data_ptr());
}

// Check that the argument `name` is a contiguous int64 vector, and return its data.
const int64_t* int64_array(const char* op, const char* name, const Tensor& tensor) {
  check_dtype(op, name, tensor, ScalarType::Long, "int64");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
                  " must be a contiguous vector");
  return tensor.const_data_ptr<int64_t>();
}

// Return an int64 tensor of `numbers` on the device of `like`.
Tensor to_tensor(const Tensor& like, const std::vector<int64_t>& numbers) {
  Tensor tensor = allocate(like, {static_cast<int64_t>(numbers.size())}, ScalarType::Long);
  std::copy(numbers.begin(), numbers.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

// A function that returns the CRC-32 of `size` bytes.
using Crc32Fn = uint32_t (*)(const unsigned char* data, int64_t size);

// Return the fastest of crc32.h's functions that the processor and EMBLIB_ISA (core/isa.h) allow.
Crc32Fn select_crc32() {
#if defined(EMB_X86)
  if (cpu_isa() != Isa::kBaseline && __builtin_cpu_supports("pclmul")) return crc32_by_folding;
#endif
  return crc32_by_tables;
}

// Return the CRC-32 of page pages[i] of `data` for each i: uint8 [n, 4], in the byte order of the
// machine. `data` is uint8 and `pages` int64 [n]. The last page of `data` may be short. Throws if a
// page does not exist.
Tensor page_crc32(const Tensor& data_in, const Tensor& pages_in, int64_t page_bytes) {
  const char* op = "page_crc32";
  const unsigned char* data = byte_array(op, "data", data_in);
  const int64_t* pages = int64_array(op, "pages", pages_in);
  STD_TORCH_CHECK(page_bytes > 0, op, ": page_bytes must be positive, got ", page_bytes);
  const int64_t size = data_in.numel(), n = pages_in.numel();
  const int64_t num_pages = size / page_bytes + (size % page_bytes != 0);
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(pages[i] >= 0 && pages[i] < num_pages, op, ": pages must be in [0, ", num_pages,
                    "), got ", pages[i]);
  }
  constexpr int64_t kCrcBytes = sizeof(uint32_t);
  Tensor checksums = allocate(data_in, {n, kCrcBytes});
  auto* out = static_cast<char*>(checksums.mutable_data_ptr());
  static const Crc32Fn crc32 = select_crc32();
  const auto cost = [&](int64_t i) { return std::min(page_bytes, size) * i; };
  parallel_balanced(n, kCrcGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = pages[i] * page_bytes;
      const uint32_t crc = crc32(data + first, std::min(page_bytes, size - first));
      std::memcpy(out + kCrcBytes * i, &crc, kCrcBytes);
    }
  });
  return checksums;
}

// Rows of one size, and their pages: row r has the `row_bytes` bytes from byte first_byte + r *
// row_bytes on. `has_bytes` and the functions after it take i, a position in `rows`.
struct RowPages {
  const int64_t* rows;  // [n] row numbers, negative for no row
  int64_t n;
  int64_t row_bytes;   // bytes per row
  int64_t first_byte;  // byte at which row 0 begins
  int64_t page_bytes;  // bytes per page

  RowPages(const char* op, const Tensor& rows_in, int64_t row_bytes_in, int64_t first_byte_in,
           int64_t page_bytes_in)
      : rows(int64_array(op, "rows", rows_in)),
        n(rows_in.numel()),
        row_bytes(row_bytes_in),
        first_byte(first_byte_in),
        page_bytes(page_bytes_in) {
    STD_TORCH_CHECK(row_bytes >= 0 && first_byte >= 0 && page_bytes > 0, op,
                    ": row_bytes and first_byte must not be negative and page_bytes positive, "
                    "got ",
                    row_bytes, ", ", first_byte, " and ", page_bytes);
    STD_TORCH_CHECK(row_bytes <= kUnlimited / 4 && first_byte <= kUnlimited / 4, op,
                    ": row_bytes and first_byte must be at most 2^60, got ", row_bytes, " and ",
                    first_byte);
    const int64_t max_row = row_bytes == 0 ? kUnlimited : kUnlimited / 4 / row_bytes;
    for (int64_t i = 0; i < n; ++i) {
      STD_TORCH_CHECK(rows[i] <= max_row, op,
                      ": rows must begin at most 2^60 bytes after row 0, got row ", rows[i], " of ",
                      row_bytes, " bytes");
    }
  }

  // Return whether rows[i] is a row with bytes; the functions below require it.
  bool has_bytes(int64_t i) const { return rows[i] >= 0 && row_bytes > 0; }
  // Return the first byte, the first page and the last page of rows[i].
  int64_t begin(int64_t i) const { return first_byte + rows[i] * row_bytes; }
  int64_t first_page(int64_t i) const { return begin(i) / page_bytes; }
  int64_t last_page(int64_t i) const { return (begin(i) + row_bytes - 1) / page_bytes; }
};

// Return the pages of `rows` whose mark is 0, int64 [m], in the order of `rows`. A page of several
// rows may repeat. Pages beyond the end of `marks`, uint8 by page, are omitted, and negative rows
// have no pages.
Tensor pages_without_mark(const Tensor& marks_in, const Tensor& rows_in, int64_t row_bytes,
                          int64_t first_byte, int64_t page_bytes) {
  const char* op = "pages_without_mark";
  const unsigned char* marks = byte_array(op, "marks", marks_in);
  const RowPages rows(op, rows_in, row_bytes, first_byte, page_bytes);
  const int64_t num_pages = marks_in.numel();
  std::vector<int64_t> unmarked;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (!rows.has_bytes(i)) continue;
    const int64_t last_page = std::min(rows.last_page(i), num_pages - 1);
    for (int64_t page = rows.first_page(i); page <= last_page; ++page) {
      if (marks[page] == 0 && (unmarked.empty() || unmarked.back() != page)) {
        unmarked.push_back(page);
      }
    }
  }
  return to_tensor(rows_in, unmarked);
}

// Set the marks of the pages of `rows` to 1 in every vector of `marks`, uint8 by page; negative
// rows have no pages. Throws, before anything is written, if a page is beyond the end of one of the
// vectors.
void mark_pages_(std::vector<Tensor> marks_in, const Tensor& rows_in, int64_t row_bytes,
                 int64_t first_byte, int64_t page_bytes) {
  const char* op = "mark_pages_";
  const RowPages rows(op, rows_in, row_bytes, first_byte, page_bytes);
  if (marks_in.empty()) return;
  std::vector<unsigned char*> marks;
  int64_t num_pages = kUnlimited;
  for (const Tensor& tensor : marks_in) {
    marks.push_back(byte_array(op, "marks", tensor));
    num_pages = std::min(num_pages, tensor.numel());
  }
  for (int64_t i = 0; i < rows.n; ++i) {
    STD_TORCH_CHECK(!rows.has_bytes(i) || rows.last_page(i) < num_pages, op,
                    ": rows must be on the first ", num_pages, " pages, got row ", rows.rows[i]);
  }
  for (int64_t i = 0; i < rows.n; ++i) {
    if (!rows.has_bytes(i)) continue;
    for (int64_t page = rows.first_page(i); page <= rows.last_page(i); ++page) {
      for (unsigned char* mark : marks) mark[page] = 1;
    }
  }
}

// Return the file slot file_slots[slot], -1 for none, of each slot in `slots`, int64 [n]. The
// result is -1 for slot -1, and for file slots that are hidden: those for which `is_hidden`, uint8
// by file slot, is not 0. Without `is_hidden` none is hidden. Throws for other slots outside
// `file_slots`, and for a file slot beyond the end of `is_hidden`.
Tensor file_slots(const Tensor& slots_in, const Tensor& file_slots_in,
                  const std::optional<Tensor>& is_hidden) {
  const char* op = "file_slots";
  const int64_t* slots = int64_array(op, "slots", slots_in);
  const int64_t* file_slot_of = int64_array(op, "file_slots", file_slots_in);
  const unsigned char* hidden_marks = is_hidden ? byte_array(op, "is_hidden", *is_hidden) : nullptr;
  const int64_t n = slots_in.numel(), num_slots = file_slots_in.numel();
  const int64_t num_marks = is_hidden ? is_hidden->numel() : 0;
  Tensor result = allocate(slots_in, {n});
  int64_t* out = result.mutable_data_ptr<int64_t>();
  constexpr int64_t kPrefetchDistance = 16;  // slots between a prefetch and its use
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(slots[i] >= -1 && slots[i] < num_slots, op, ": slots must be in [-1, ",
                    num_slots, "), got ", slots[i]);
    if (i + kPrefetchDistance < n)
      __builtin_prefetch(file_slot_of + std::max<int64_t>(slots[i + kPrefetchDistance], 0));
    out[i] = slots[i] < 0 ? -1 : file_slot_of[slots[i]];
  }
  if (!is_hidden) return result;
  for (int64_t i = 0; i < n; ++i) {
    STD_TORCH_CHECK(out[i] < num_marks, op, ": is_hidden must have an entry per file slot, got ",
                    num_marks, " for slot ", out[i]);
    if (out[i] >= 0 && hidden_marks[out[i]] != 0) out[i] = -1;
  }
  return result;
}

#if defined(__linux__)

#if !defined(MADV_POPULATE_READ)
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

// The system reads at most the device's read-ahead per call of madvise, 128 KiB by default.
constexpr int64_t kBytesPerAdvice = 1 << 17;
constexpr int64_t kMaxProbes = 16;  // maximum number of probed rows, at equal distances in `rows`

// A range of whole pages of memory.
struct PageRange {
  char *begin, *end;
};

// Return whether a page is in memory; true if the system does not say.
bool is_resident(char* page, int64_t page_bytes) {
  unsigned char residency = 0;
  return mincore(page, page_bytes, &residency) != 0 || (residency & 1) != 0;
}

// Map pages for reading, and wait until they are read. Return false if a page cannot be read, and
// true if the system cannot map pages in this way (before Linux 5.14) or lacks memory.
bool map_pages(const PageRange& range) {
  if (madvise(range.begin, range.end - range.begin, MADV_POPULATE_READ) == 0) return true;
  return errno != EFAULT && errno != EHWPOISON;
}

// Read the pages of the ranges. Return the first unreadable page of each range that has one.
std::vector<char*> fetch_ranges(const std::vector<PageRange>& ranges, int64_t page_bytes) {
  std::vector<char*> unreadable;
  for (const PageRange& range : ranges) {
    for (char* begin = range.begin; begin < range.end; begin += kBytesPerAdvice) {
      madvise(begin, std::min<int64_t>(range.end - begin, kBytesPerAdvice), MADV_WILLNEED);
    }
  }
  for (const PageRange& range : ranges) {
    if (map_pages(range)) continue;
    for (char* page = range.begin; page < range.end; page += page_bytes) {
      if (map_pages({page, page + page_bytes})) continue;
      unreadable.push_back(page);
      break;
    }
  }
  return unreadable;
}

#endif

// Read those pages of `rows` of the mapped file `data`, uint8, that are not in memory, and wait
// until they are read. Throws if a row begins beyond `data`. A row extends the range of the rows
// before it in `rows` if it begins on a page of that range or on the page after it; otherwise it
// begins a range. Return two int64 tensors:
//   [m]  for each range with unreadable pages, the byte of `data` at which the first of them begins
//   [1]  the number of ranges: 0 if all probed pages are in memory, and on systems other than Linux
std::tuple<Tensor, Tensor> fetch_pages(const Tensor& data_in, const Tensor& rows_in,
                                       int64_t row_bytes, int64_t first_byte) {
  const char* op = "fetch_pages";
  auto* data = reinterpret_cast<char*>(byte_array(op, "data", data_in));
  const RowPages rows(op, rows_in, row_bytes, first_byte, 1);
  const int64_t size = data_in.numel();
  std::vector<int64_t> unreadable;
  int64_t num_ranges = 0;
  for (int64_t i = 0; i < rows.n; ++i) {
    STD_TORCH_CHECK(!rows.has_bytes(i) || rows.begin(i) < size, op, ": rows must begin in data of ",
                    size, " bytes, got row ", rows.rows[i]);
  }
#if defined(__linux__)
  static const int64_t page_bytes = sysconf(_SC_PAGESIZE);
  const auto floor_page = [&](int64_t byte) {
    return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(data + byte) / page_bytes *
                                   page_bytes);
  };
  const auto first_page = [&](int64_t i) { return floor_page(rows.begin(i)); };
  const auto last_page = [&](int64_t i) {
    return floor_page(std::min(rows.begin(i) + row_bytes, size) - 1);
  };
  int64_t num_rows = 0;  // rows that have bytes
  for (int64_t i = 0; i < rows.n; ++i) num_rows += rows.has_bytes(i);
  const int64_t probe_step = (num_rows + kMaxProbes - 1) / kMaxProbes;
  bool are_resident = true;
  for (int64_t i = 0, row_number = 0; i < rows.n && are_resident; ++i) {
    if (!rows.has_bytes(i) || row_number++ % probe_step != 0) continue;
    are_resident = is_resident(first_page(i), page_bytes) && is_resident(last_page(i), page_bytes);
  }
  if (are_resident) return {to_tensor(rows_in, unreadable), to_tensor(rows_in, {num_ranges})};
  std::vector<PageRange> ranges;
  for (int64_t i = 0; i < rows.n; ++i) {
    if (!rows.has_bytes(i)) continue;
    char* begin = first_page(i);
    char* end = last_page(i) + page_bytes;
    if (!ranges.empty() && begin >= ranges.back().begin && begin <= ranges.back().end) {
      ranges.back().end = std::max(ranges.back().end, end);
    } else {
      ranges.push_back({begin, end});
    }
  }
  num_ranges = static_cast<int64_t>(ranges.size());
  for (char* page : fetch_ranges(ranges, page_bytes)) {
    unreadable.push_back(std::max<int64_t>(page - data, 0));
  }
#endif
  return {to_tensor(rows_in, unreadable), to_tensor(rows_in, {num_ranges})};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, page_crc32);
  EMB_IMPL(m, emb, pages_without_mark);
  EMB_IMPL(m, emb, mark_pages_);
  EMB_IMPL(m, emb, file_slots);
  EMB_IMPL(m, emb, fetch_pages);
}
