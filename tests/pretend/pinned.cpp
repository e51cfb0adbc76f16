// Pinned memory: the host and kernels use it in place. If races are detected, an allocation is
// closed to the host by a protection key while operations that may use it are not waited for. The
// host's accesses then fault; each is noted and runs alone, and the allocation is closed again.
#include <sys/mman.h>
#include <ucontext.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "state.h"

namespace pretend {

namespace {

constexpr long kStep = 0x100;      // the processor's flag to stop after one instruction
constexpr long kWriteFault = 0x2;  // of a fault's code

struct sigaction previous_trap;
thread_local char* opened[4];  // pages that one instruction of this thread may access
thread_local int num_opened = 0;
thread_local uint64_t noted_uses = 0;
thread_local const char* noted_line = "";
thread_local char* noted_allocation = nullptr;

char* page_of(char* p) {
  return reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{kPage - 1});
}

std::pair<char* const, Pinned>* find_pinned(const void* address) {
  auto* p = const_cast<char*>(static_cast<const char*>(address));
  auto& all = state().pinned;
  const auto after = all.upper_bound(p);
  if (after == all.begin()) return nullptr;
  auto& found = *std::prev(after);
  return p < found.first + found.second.pages ? &found : nullptr;
}

void set_closed(char* begin, Pinned& pinned, bool is_closed) {
  if (pinned.is_closed == is_closed || state().pinned_key < 0) return;
  pinned.is_closed = is_closed;
  pkey_mprotect(begin, pinned.pages, PROT_READ | PROT_WRITE, is_closed ? state().pinned_key : 0);
}

void note_use(char* begin, Pinned& pinned, const races::Stamp& stamp) {
  pinned.uses.raise(stamp.actor, stamp.tick);
  set_closed(begin, pinned, true);
}

// After the instruction: close the pages again.
void on_step(int signal, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  if (num_opened > 0) {
    const Lock lock(state().mutex);
    for (; num_opened > 0; --num_opened) {
      char* page = opened[num_opened - 1];
      const auto* found = find_pinned(page);
      if (found == nullptr || !found->second.is_closed) continue;
      pkey_mprotect(page, kPage, PROT_READ | PROT_WRITE, state().pinned_key);
    }
    static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_EFL] &= ~kStep;
    return;
  }
#endif
  if ((previous_trap.sa_flags & SA_SIGINFO) != 0) {
    previous_trap.sa_sigaction(signal, info, context);
  } else if (previous_trap.sa_handler == SIG_DFL) {
    sigaction(SIGTRAP, &previous_trap, nullptr);
    raise(SIGTRAP);
  } else if (previous_trap.sa_handler != SIG_IGN) {
    previous_trap.sa_handler(signal);
  }
}

}  // namespace

void* allocate_pinned(size_t bytes) {
  const char* owner = python_line();
  State& s = state();
  const Lock lock(s.mutex);
  const size_t pages = (bytes + kPage - 1) / kPage * kPage;
  char* p = s.pinned_arena + s.pinned_used + kPage;
  if (s.pinned_used + pages + 2 * kPage > kArenaBytes ||
      mprotect(p, pages, PROT_READ | PROT_WRITE) != 0) {
    throw std::runtime_error("CUDA error: no pinned memory left");
  }
  s.pinned_used += pages + kPage;
  std::memset(p, s.poison, pages);
  s.pinned[p] = Pinned{pages, owner};
  return p;
}

// torch's allocator keeps pinned memory until the copies of `non_blocking` that it started are
// over, so the copies run first. It does not know of kernels that read the memory in place: the
// pages disappear, and such a kernel faults.
void release_pinned(void* address) {
  State& s = state();
  const char* caller = races::enabled() ? python_line() : "";
  const Lock lock(s.mutex);
  const auto found = s.pinned.find(static_cast<char*>(address));
  if (found == s.pinned.end()) return;
  char* begin = found->first;
  const size_t pages = found->second.pages;
  run_copies_of(begin, pages);
  races::on_pinned_release(begin, pages, caller);
  if (races::enabled() && !races::host_is_after(found->second.uses)) {
    // A kernel that runs later races with the host and needs no fault to show it.
    s.freed_pinned.push_back(found->first);
    return;
  }
  unmap_pinned(begin);
}

void unmap_pinned(char* begin) {
  const auto found = state().pinned.find(begin);
  if (found == state().pinned.end()) return;
  const size_t pages = found->second.pages;
  races::on_unmap(begin, pages);
  mmap(begin, pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  state().pinned.erase(found);
}

bool is_pinned(const void* address) {
  const Lock lock(state().mutex);
  return find_pinned(address) != nullptr;
}

bool share_pinned(const void* address) {
  const Lock lock(state().mutex);
  auto* found = find_pinned(address);
  if (found != nullptr) found->second.in_place = true;
  return found != nullptr;
}

void note_pinned_use(const Operation& operation) {
  if (!operation.work) return;
  if (operation.pinned != nullptr) {
    auto* found = find_pinned(operation.pinned);
    if (found != nullptr) note_use(found->first, found->second, operation.stamp);
  }
  // Which kernel uses what was given to kernels is not known before it runs.
  for (auto& [begin, pinned] : state().pinned) {
    if (pinned.in_place) note_use(begin, pinned, operation.stamp);
  }
}

void open_pinned() {
  for (auto& [begin, pinned] : state().pinned) {
    if (!races::host_is_after(pinned.uses)) continue;
    pinned.uses.clear();
    set_closed(begin, pinned, false);
  }
}

bool on_host_fault(char* p, void* context) {
  State& s = state();
  if (p < s.pinned_arena || p >= s.pinned_arena + kArenaBytes) return false;
  bool is_write = true;
#if defined(__x86_64__)
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  is_write = (registers[REG_ERR] & kWriteFault) != 0;
#endif
  const char* line = num_opened > 0 ? noted_line : nullptr;
  {
    const Lock lock(s.mutex);
    const auto* found = find_pinned(p);
    if (found == nullptr) return false;
    const uint64_t uses = races::host_calls();
    // The same line until the host calls the runtime: asking Python for each byte takes long.
    if (noted_allocation == found->first && noted_uses == uses) line = noted_line;
    noted_allocation = found->first;
    noted_uses = uses;
  }
  noted_line = line != nullptr ? line : python_line();
  const Lock lock(s.mutex);
  races::on_host_access(p, 1, is_write, noted_line);
  pkey_mprotect(page_of(p), kPage, PROT_READ | PROT_WRITE, 0);
#if defined(__x86_64__)
  if (num_opened < 4) {
    opened[num_opened++] = page_of(p);
    registers[REG_EFL] |= kStep;
  }
#endif
  return true;
}

void install_step_handler() {
  struct sigaction action{};
  action.sa_sigaction = on_step;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGTRAP, &action, &previous_trap);
}

bool describe_pinned(const char* p, char* out, size_t room) {
  const auto* found = find_pinned(p);
  if (found == nullptr) return false;
  std::snprintf(out, room, "byte %ld of pinned memory (%s)", static_cast<long>(p - found->first),
                found->second.owner);
  return true;
}

}  // namespace pretend

// Pinned memory that a tensor of a device is made over, without a call of the runtime.
extern "C" void pretend_share_pinned(const void* address) { pretend::share_pinned(address); }
