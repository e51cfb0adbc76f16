// Memory of the pretend devices. Every allocation has its own pages between pages that nothing may
// touch, under the protection key of its device. Freed addresses are never used again.
#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "state.h"

namespace pretend {

namespace {

constexpr size_t kGranule = 16;  // kernels load up to 16 bytes, so allocations begin at multiples

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// The block that contains `address`, or null.
Block* find_block(const void* address) {
  auto* p = const_cast<char*>(static_cast<const char*>(address));
  const auto after = state().blocks.upper_bound(p);
  if (after == state().blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return p < block->data + round_up(block->size, kGranule) ? block : nullptr;
}

// The bytes of its pages that do not belong to a block still have the poison of its allocation.
void check_margins(const Block& block) {
  const auto is_poison = [&](const char* from, const char* to) {
    for (; from < to; ++from) {
      if (static_cast<unsigned char>(*from) != static_cast<unsigned char>(state().poison)) {
        return false;
      }
    }
    return true;
  };
  if (is_poison(block.begin, block.data) &&
      is_poison(block.data + block.size, block.begin + block.pages)) {
    return;
  }
  throw std::runtime_error("bytes outside allocation #" + std::to_string(block.number) + " of " +
                           std::to_string(block.size) + " bytes, made at " + block.owner +
                           ", were written");
}

// Give the pages of a freed block back; its addresses stay reserved.
void unmap(Block* block) {
  check_margins(*block);
  block->is_freed = true;
  // A new mapping merges with its neighbours. Mappings with changed protection do not, and a
  // process can have 65,530 of them.
  mmap(block->begin, block->pages, PROT_NONE,
       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

Block* map_block(int device, size_t bytes) {
  State& s = state();
  const size_t pages = round_up(bytes, kPage);
  if (s.arena_used[device] + pages + 2 * kPage > kArenaBytes) {
    throw std::runtime_error("CUDA out of memory: the pretend device has no addresses left");
  }
  char* begin = s.arenas[device] + s.arena_used[device] + kPage;
  const int key = s.protection_keys[device];
  const int failed = key >= 0 ? pkey_mprotect(begin, pages, PROT_READ | PROT_WRITE, key)
                              : mprotect(begin, pages, PROT_READ | PROT_WRITE);
  if (failed != 0) {
    throw std::runtime_error("CUDA out of memory: the system has no mapping left for " +
                             std::to_string(bytes) + " bytes of the pretend device");
  }
  s.arena_used[device] += pages + kPage;
  auto* block = new Block{};
  block->begin = begin;
  block->pages = pages;
  block->data = s.aligned_to_end ? begin + pages - round_up(bytes, kGranule) : begin;
  block->size = bytes;
  block->device = device;
  block->number = s.num_allocations++;
  return block;
}

}  // namespace

Block* allocate(int device, int64_t stream, size_t bytes) {
  const char* owner = python_line();
  State& s = state();
  const Lock lock(s.mutex);
  Block* block = map_block(device, bytes);
  block->stream = stream;
  block->owner = owner;
  block->in_graph_pool = find_stream(device, stream).capture != nullptr;
  {
    const Access access;
    std::memset(block->begin, s.poison, block->pages);
  }
  s.blocks[block->data] = block;
  s.live_bytes[device] += bytes;
  return block;
}

void* address(Block* block) { return block->data; }

void use_on(const void* address, int64_t stream) {
  const Lock lock(state().mutex);
  if (Block* block = find_block(address)) block->used_on.insert(stream);
}

void release(Block* block) {
  State& s = state();
  const Lock lock(s.mutex);
  s.live_bytes[block->device] -= block->size;
  Stream& own = find_stream(block->device, block->stream);
  if (block->in_graph_pool) {
    // A graph keeps its memory. What it frees itself may be reused in each of its replays.
    if (own.capture != nullptr) {
      const int poison = s.poison;
      push(own, {"reuse of a graph's memory", block->owner,
                 [block, poison] { std::memset(block->data, poison, block->size); }, nullptr});
    }
    return;
  }
  if (own.capture != nullptr) return;  // freed when the process ends: the graph may have read it
  for (const int64_t id : block->used_on) {
    if (id == block->stream) continue;
    const Stream& stream = find_stream(block->device, id);
    const Event event{block->device, id, stream.enqueued};
    push(own, {"wait before a free", block->owner, nullptr, std::make_shared<Event>(event)});
  }
  push(own, {"free", block->owner, [block] { unmap(block); }, nullptr});
}

int device_of(const void* address) {
  const auto* p = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const char* arena = state().arenas[device];
    if (p >= arena && p < arena + kArenaBytes) return device;
  }
  return -1;
}

void* allocate_pinned(size_t bytes) {
  const Lock lock(state().mutex);
  const size_t pages = round_up(bytes, kPage);
  void* p = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::runtime_error("CUDA error: no pinned memory left");
  std::memset(p, state().poison, pages);
  state().pinned[static_cast<char*>(p)] = pages;
  return p;
}

// torch's allocator keeps pinned memory until the copies of `non_blocking` that it started are
// over, so the copies run first. It does not know of kernels that read the memory in place: the
// pages disappear, and such a kernel faults.
void release_pinned(void* address) {
  const Lock lock(state().mutex);
  const auto found = state().pinned.find(static_cast<char*>(address));
  if (found == state().pinned.end()) return;
  run_copies_of(found->first, found->second);
  munmap(found->first, found->second);
  state().pinned.erase(found);
}

bool is_pinned(const void* address) {
  const Lock lock(state().mutex);
  auto* p = const_cast<char*>(static_cast<const char*>(address));
  const auto after = state().pinned.upper_bound(p);
  if (after == state().pinned.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  return p < begin + bytes;
}

}  // namespace pretend
