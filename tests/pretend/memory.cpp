// Memory of the pretend devices. Every allocation has its own pages between pages that nothing may
// touch, under the protection key of its device. Freed addresses are never used again.
#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "state.h"

namespace pretend {

namespace {

constexpr size_t kGranule = 16;  // kernels load up to 16 bytes, so allocations begin at multiples

constexpr size_t kMaxReused = 64;  // blocks that stay mapped for the race detector

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

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
  races::on_unmap(block->begin, block->pages);
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

// A GPU may use memory again that the stream has freed, as soon as the stream is here.
void reuse_freed(Stream& stream) {
  for (const Freed& freed : std::exchange(stream.freed, {})) {
    Block* block = freed.block;
    races::Timeline after = stream.timeline;  // record_stream delays the reuse, not the stream
    for (const auto& use : freed.uses) {
      push(stream, {"wait before a reuse", block->released_at, nullptr, use});
      races::join(after, use->past);
    }
    Operation operation{"reuse of freed memory", block->released_at, nullptr, nullptr};
    operation.stamp = races::next(after);
    stream.timeline.tick = after.tick;
    operation.work = [block] {
      races::on_reuse(*block, *state().running);
      state().reused.push_back(block);
      if (state().reused.size() <= kMaxReused) return;
      Block* oldest = state().reused.front();
      state().reused.pop_front();
      unmap(oldest);
    };
    push(stream, std::move(operation));
  }
}

}  // namespace

Block* find_block(const void* address) {
  auto* p = const_cast<char*>(static_cast<const char*>(address));
  const auto after = state().blocks.upper_bound(p);
  if (after == state().blocks.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  return p < block->data + round_up(block->size, kGranule) ? block : nullptr;
}

Block* allocate(int device, int64_t stream, size_t bytes) {
  const char* owner = python_line();
  State& s = state();
  const Lock lock(s.mutex);
  Stream& on = find_stream(device, stream);
  Block* block = map_block(device, bytes);
  block->stream = stream;
  block->owner = owner;
  block->in_graph_pool = on.capture != nullptr;
  if (!block->in_graph_pool) {
    reuse_freed(on);
    races::on_allocate(*block, on.timeline);
  }
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
  const char* caller = races::enabled() ? python_line() : "";
  const Lock lock(s.mutex);
  s.live_bytes[block->device] -= block->size;
  Stream& own = find_stream(block->device, block->stream);
  if (block->in_graph_pool) {
    // A graph keeps its memory. What it frees itself may be reused in each of its replays.
    if (own.capture != nullptr) {
      const int poison = s.poison;
      push(own, {"reuse of a graph's memory", block->owner,
                 [block, poison] {
                   note_write(block->data, block->size);
                   std::memset(block->data, poison, block->size);
                 },
                 nullptr});
    }
    return;
  }
  if (own.capture != nullptr) return;  // freed when the process ends: the graph may have read it
  std::vector<std::shared_ptr<Event>> uses;
  for (const int64_t id : block->used_on) {
    if (id != block->stream) uses.push_back(record(block->device, id));
  }
  if (races::enabled()) {
    races::on_release(*block, caller);
    own.freed.push_back({block, std::move(uses)});
    return;
  }
  for (auto& use : uses) push(own, {"wait before a free", block->owner, nullptr, use});
  push(own, {"free", block->owner, [block] { unmap(block); }, nullptr});
}

void free_reused() {
  if (!races::enabled()) return;
  State& s = state();
  std::vector<Block*> blocks(s.reused.begin(), s.reused.end());
  s.reused.clear();
  for (auto& streams : s.streams) {
    for (auto& [id, stream] : streams) {
      for (const Freed& freed : std::exchange(stream->freed, {})) blocks.push_back(freed.block);
      stream->timeline.past.clear();
      stream->timeline.shared.reset();
    }
  }
  const Access access;
  try {
    for (Block* block : blocks) unmap(block);
  } catch (const std::exception& e) {
    set_error(e.what());
  }
  races::forget();
  for (char* pinned : std::exchange(s.freed_pinned, {})) unmap_pinned(pinned);
  for (auto& [p, pinned] : s.pinned) pinned.uses.clear();
  open_pinned();
}

int device_of(const void* address) {
  const auto* p = static_cast<const char*>(address);
  for (int device = 0; device < kDevices; ++device) {
    const char* arena = state().arenas[device];
    if (p >= arena && p < arena + kArenaBytes) return device;
  }
  return -1;
}

}  // namespace pretend
