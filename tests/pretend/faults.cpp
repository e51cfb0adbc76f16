// Accesses to device memory that a GPU or its host would not survive become errors that name the
// allocation, its owner, the operation and the thread; the process goes on.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#include <csetjmp>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>

#include "core/simt_host.h"
#include "state.h"

namespace pretend {

namespace {

constexpr long kNear = 1 << 20;  // bytes from an allocation that a fault is attributed to

struct sigaction previous_action;
char fault_text[1000];
thread_local sigjmp_buf* way_out = nullptr;
thread_local int access_depth = 0;
thread_local unsigned allowed = 0;
std::function<std::function<void()>()> thread_snapshot;

// The devices whose memory this thread may touch, as a bit each.
void allow(unsigned devices) {
  allowed = devices;
  for (int device = 0; device < kDevices; ++device) {
    const int key = state().protection_keys[device];
    if (key >= 0) pkey_set(key, (devices >> device & 1u) != 0 ? 0 : PKEY_DISABLE_ACCESS);
  }
  const int pinned = state().pinned_key;
  if (pinned >= 0) pkey_set(pinned, devices != 0 ? 0 : PKEY_DISABLE_ACCESS);
}

}  // namespace

void describe_place(const char* p, char* out, size_t room) {
  if (describe_pinned(p, out, room)) return;
  auto& blocks = state().blocks;
  const auto after = blocks.upper_bound(const_cast<char*>(p));
  const Block* next = after == blocks.end() ? nullptr : after->second;
  const Block* block = after == blocks.begin() ? nullptr : std::prev(after)->second;
  const auto name = [&](const Block& b, const char* where, long bytes) {
    std::snprintf(out, room, "%s %ld of allocation #%lu (%zu bytes on cuda:%d, stream %ld, %s, %s)",
                  where, bytes, b.number, b.size, b.device, b.stream,
                  b.is_freed || b.released != 0 ? "FREED" : "in use", b.owner);
  };
  if (block != nullptr && p < block->data + block->size) {
    name(*block, "byte", p - block->data);
  } else if (block != nullptr && p - block->data - static_cast<long>(block->size) < kNear) {
    name(*block, "past the end, at byte", p - block->data);
  } else if (next != nullptr && next->data - p < kNear) {
    name(*next, "before the begin, at byte", p - next->data);
  } else {
    std::snprintf(out, room, "%p, which is near no allocation", static_cast<const void*>(p));
  }
}

namespace {

void describe(const char* p) {
  char place[500];
  describe_place(p, place, sizeof(place));
  const Operation* running = state().running;
  if (on_device() && running != nullptr) {
    std::snprintf(fault_text, sizeof(fault_text), "illegal memory access: %s", place);
  } else {
    std::snprintf(fault_text, sizeof(fault_text),
                  "host code (thread %ld) touches device memory: %s", syscall(SYS_gettid), place);
  }
}

[[noreturn]] void leave_kernel() { emb::simt::fail(fault_text); }

// Continue the interrupted thread in leave_kernel, as if the kernel had called it.
void return_into_leave_kernel(void* context) {
#if defined(__x86_64__)
  auto* registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  constexpr greg_t kRedZone = 512;
  registers[REG_RSP] = ((registers[REG_RSP] - kRedZone) & ~greg_t{15}) - 8;
  registers[REG_RIP] = reinterpret_cast<greg_t>(&leave_kernel);
#else
  (void)context;
  leave_kernel();
#endif
}

// The host goes on with this page open, and its next call of the runtime raises.
void forgive_host(char* p) {
  set_error(fault_text);
  raise(SIGUSR2);  // the plugin prints the stack of Python
  char* page = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(p) & ~uintptr_t{kPage - 1});
  if (state().protection_keys[0] >= 0) {
    pkey_mprotect(page, kPage, PROT_READ | PROT_WRITE, 0);
  } else {
    mprotect(page, kPage, PROT_READ | PROT_WRITE);
  }
}

void on_fault(int, siginfo_t* info, void* context) {
  auto* p = static_cast<char*>(info->si_addr);
  const bool in_device = device_of(p) >= 0;
  const Operation* running = state().running;
  const bool in_operation = on_device() && running != nullptr;
  if (!on_device() && on_host_fault(p, context)) return;
  if (in_device) describe(p);
  if (!in_device && in_operation) {
    std::snprintf(fault_text, sizeof(fault_text),
                  "illegal memory access: %p is not device memory, nor pinned",
                  static_cast<void*>(p));
  }
  if (in_operation && running->kind == Kind::kKernel) return return_into_leave_kernel(context);
  if (in_operation && way_out != nullptr) siglongjmp(*way_out, 1);
  if (in_device) return forgive_host(p);
  sigaction(SIGSEGV, &previous_action, nullptr);  // the fault repeats, for the handler before
}

}  // namespace

bool on_device() { return access_depth > 0; }

Access::Access(int device) : before_(allowed) {
  ++access_depth;
  allow(device < 0 ? ~0u : 1u << device);
}

Access::~Access() {
  --access_depth;
  allow(before_);
}

void set_thread_snapshot(std::function<std::function<void()>()> snapshot) {
  thread_snapshot = std::move(snapshot);
}

void run_guarded(const Operation& operation) {
  sigjmp_buf here;
  sigjmp_buf* const outer = way_out;
  const std::function<void()> restore = thread_snapshot ? thread_snapshot() : [] {};
  const unsigned allowed_before = allowed;
  const int depth_before = access_depth;
  if (sigsetjmp(here, 1) == 0) {
    way_out = &here;
    try {
      operation.work();
    } catch (...) {
      way_out = outer;
      throw;
    }
    way_out = outer;
    return;
  }
  way_out = outer;
  access_depth = depth_before;
  allow(allowed_before);
  restore();
  throw std::runtime_error(fault_text);
}

void install_fault_handler() {
  struct sigaction action{};
  struct sigaction current{};
  sigaction(SIGSEGV, nullptr, &current);
  if (current.sa_sigaction == on_fault) return;
  previous_action = current;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigaction(SIGSEGV, &action, nullptr);
}

}  // namespace pretend
