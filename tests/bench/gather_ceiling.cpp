// The machine's own ceiling for random row reads: every row is loaded once into registers, nothing
// is written, rows are fetched `distance` ahead. The best distance of a few is the ceiling. A
// program of its own rather than a call into emblib, so that it cannot share emblib's mistakes.
#include <immintrin.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

// Reads 64-byte lines; returns something that depends on all of them.
__attribute__((noinline)) int64_t gather(const char* table, const int64_t* rows, int64_t begin,
                                         int64_t end, int64_t row_bytes, int64_t distance) {
  __m256i sum = _mm256_setzero_si256();
  for (int64_t i = begin; i < end; ++i) {
    const char* next = table + rows[std::min(i + distance, end - 1)] * row_bytes;
    for (int64_t b = 0; b < row_bytes; b += 64) __builtin_prefetch(next + b, 0, 3);
    const char* row = table + rows[i] * row_bytes;
    for (int64_t b = 0; b < row_bytes; b += 64) {
      sum = _mm256_add_epi64(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + b)));
      sum =
          _mm256_add_epi64(sum, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row + b + 32)));
    }
  }
  return _mm256_extract_epi64(sum, 0) + _mm256_extract_epi64(sum, 2);
}

struct Table {
  char* data;
  explicit Table(int64_t bytes, bool huge) {
    const int64_t align = int64_t{2} << 20;
    data = static_cast<char*>(std::aligned_alloc(align, (bytes + align - 1) / align * align));
    madvise(data, bytes, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    for (int64_t i = 0; i < bytes; i += 4096) data[i] = static_cast<char>(i >> 12);
  }
};

}  // namespace

extern "C" {

// Memory for `bytes` of rows, touched; huge pages or none.
void* ceiling_table(int64_t bytes, int huge) { return Table(bytes, huge != 0).data; }

void ceiling_free(void* table) { std::free(table); }

// Seconds to read `count` rows once on `threads` threads with the given prefetch distance.
double ceiling_seconds(const void* table, const int64_t* rows, int64_t count, int64_t row_bytes,
                       int threads, int64_t distance) {
  volatile int64_t sink = 0;
  std::vector<std::thread> workers;
  const auto start = std::chrono::steady_clock::now();
  for (int t = 1; t < threads; ++t) {
    workers.emplace_back([&, t] {
      sink = gather(static_cast<const char*>(table), rows, count * t / threads,
                    count * (t + 1) / threads, row_bytes, distance);
    });
  }
  sink = gather(static_cast<const char*>(table), rows, 0, count / threads, row_bytes, distance);
  for (std::thread& worker : workers) worker.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}
}
