// What an operation reads and writes. Entries are compiled with -fsanitize=thread, so that every
// load and store of a kernel calls one of the functions below, in the place of libtsan. A bit per
// byte collects them; ranges that are known as a whole come through note_read and note_write.
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>

#include "device.h"
#include "races.h"

namespace pretend {
namespace {

using races::Range;

constexpr uintptr_t kChunk = 4096;  // bytes that one bit of `touched` stands for
enum { kRead, kWrite };

bool is_recording = false;
uintptr_t base = 0, span = 0;
uint8_t* bits[2];  // of the bytes read and written
uint8_t* is_touched;
std::vector<uintptr_t> touched;  // chunks
std::vector<Range> ranges[2];

uint8_t* reserve(size_t bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("pretend: no addresses for the race detector");
  return static_cast<uint8_t*>(p);
}

void touch(uintptr_t chunk) {
  if (is_touched[chunk] != 0) return;
  is_touched[chunk] = 1;
  touched.push_back(chunk);
}

// Note an access of at most 16 bytes.
inline void note(const void* p, unsigned n, int kind) {
  if (!is_recording) return;
  const uintptr_t at = reinterpret_cast<uintptr_t>(p) - base;
  if (at >= span) return;
  touch(at / kChunk);
  if (at % kChunk + n > kChunk) touch(at / kChunk + 1);
  uint32_t word;
  uint8_t* const place = bits[kind] + at / 8;
  std::memcpy(&word, place, sizeof(word));
  word |= ((1u << n) - 1) << at % 8;
  std::memcpy(place, &word, sizeof(word));
}

void note_range(const void* p, size_t bytes, int kind) {
  const auto begin = reinterpret_cast<uintptr_t>(p);
  if (!is_recording || bytes == 0 || begin - base >= span) return;
  if (!ranges[kind].empty() && ranges[kind].back().end == begin) {
    ranges[kind].back().end += bytes;
  } else {
    ranges[kind].push_back({begin, begin + bytes});
  }
}

void append(std::vector<Range>& to, uintptr_t begin, uintptr_t end) {
  if (!to.empty() && to.back().end == begin) {
    to.back().end = end;
  } else {
    to.push_back({begin, end});
  }
}

// Append the runs of one bits in 64 bytes of memory.
void append_runs(std::vector<Range>& to, uint64_t word, uintptr_t address) {
  unsigned at = 0;
  while (word != 0) {
    const auto zeros = static_cast<unsigned>(std::countr_zero(word));
    word >>= zeros;
    const auto ones = static_cast<unsigned>(std::countr_one(word));
    at += zeros;
    append(to, address + at, address + at + ones);
    at += ones;
    word = ones == 64 ? 0 : word >> ones;
  }
}

void append_chunk(races::Accesses& to, uintptr_t chunk) {
  constexpr size_t kBytes = kChunk / 8;
  uint8_t* const places[2] = {bits[kRead] + chunk * kBytes, bits[kWrite] + chunk * kBytes};
  for (size_t i = 0; i < kBytes; i += 8) {
    uint64_t read, written;
    std::memcpy(&read, places[kRead] + i, 8);
    std::memcpy(&written, places[kWrite] + i, 8);
    const uintptr_t address = base + chunk * kChunk + i * 8;
    // A write conflicts with all that a read conflicts with.
    append_runs(to.reads, read & ~written, address);
    append_runs(to.writes, written, address);
  }
  std::memset(places[kRead], 0, kBytes);
  std::memset(places[kWrite], 0, kBytes);
}

void merge(std::vector<Range>& into, std::vector<Range>& more) {
  if (more.empty()) return;
  into.insert(into.end(), more.begin(), more.end());
  more.clear();
  std::sort(into.begin(), into.end(), [](Range a, Range b) { return a.begin < b.begin; });
  size_t n = 0;
  for (const Range& range : into) {
    if (n > 0 && range.begin <= into[n - 1].end) {
      into[n - 1].end = std::max(into[n - 1].end, range.end);
    } else {
      into[n++] = range;
    }
  }
  into.resize(n);
}

}  // namespace

void note_read(const void* p, size_t bytes) { note_range(p, bytes, kRead); }
void note_write(const void* p, size_t bytes) { note_range(p, bytes, kWrite); }

namespace races {

void prepare_accesses(void* begin, size_t bytes) {
  base = reinterpret_cast<uintptr_t>(begin);
  bits[kRead] = reserve(bytes / 8 + 8);
  bits[kWrite] = reserve(bytes / 8 + 8);
  is_touched = reserve(bytes / kChunk + 1);
  span = bytes;
}

void begin_accesses() { is_recording = span > 0; }

Accesses end_accesses() {
  is_recording = false;
  Accesses accesses;
  std::sort(touched.begin(), touched.end());
  for (const uintptr_t chunk : touched) {
    append_chunk(accesses, chunk);
    is_touched[chunk] = 0;
  }
  touched.clear();
  merge(accesses.reads, ranges[kRead]);
  merge(accesses.writes, ranges[kWrite]);
  return accesses;
}

}  // namespace races
}  // namespace pretend

// What -fsanitize=thread calls.

#define PRETEND_ACCESSES(n)                                                                \
  void __tsan_read##n(void* p) { pretend::note(p, n, pretend::kRead); }                    \
  void __tsan_write##n(void* p) { pretend::note(p, n, pretend::kWrite); }                  \
  void __tsan_unaligned_read##n(void* p) { pretend::note(p, n, pretend::kRead); }          \
  void __tsan_unaligned_write##n(void* p) { pretend::note(p, n, pretend::kWrite); }        \
  void __tsan_volatile_read##n(void* p) { pretend::note(p, n, pretend::kRead); }           \
  void __tsan_volatile_write##n(void* p) { pretend::note(p, n, pretend::kWrite); }         \
  void __tsan_unaligned_volatile_read##n(void* p) { pretend::note(p, n, pretend::kRead); } \
  void __tsan_unaligned_volatile_write##n(void* p) { pretend::note(p, n, pretend::kWrite); }

// Atomic operations of the host's code; the kernels of the emulation have none.
#define PRETEND_ATOMICS(bits, type)                                                            \
  type __tsan_atomic##bits##_load(const type* p, int) {                                        \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                                               \
  }                                                                                            \
  void __tsan_atomic##bits##_store(type* p, type x, int) {                                     \
    __atomic_store_n(p, x, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                            \
  type __tsan_atomic##bits##_exchange(type* p, type x, int) {                                  \
    return __atomic_exchange_n(p, x, __ATOMIC_SEQ_CST);                                        \
  }                                                                                            \
  type __tsan_atomic##bits##_fetch_add(type* p, type x, int) {                                 \
    return __atomic_fetch_add(p, x, __ATOMIC_SEQ_CST);                                         \
  }                                                                                            \
  type __tsan_atomic##bits##_fetch_sub(type* p, type x, int) {                                 \
    return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST);                                         \
  }                                                                                            \
  int __tsan_atomic##bits##_compare_exchange_strong(type* p, type* want, type x, int, int) {   \
    return __atomic_compare_exchange_n(p, want, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
  }

extern "C" {
PRETEND_ACCESSES(1)
PRETEND_ACCESSES(2)
PRETEND_ACCESSES(4)
PRETEND_ACCESSES(8)
PRETEND_ACCESSES(16)
PRETEND_ATOMICS(8, uint8_t)
PRETEND_ATOMICS(32, uint32_t)
PRETEND_ATOMICS(64, uint64_t)
void __tsan_read_range(void* p, size_t n) { pretend::note_read(p, n); }
void __tsan_write_range(void* p, size_t n) { pretend::note_write(p, n); }
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}
void __tsan_init() {}
}
