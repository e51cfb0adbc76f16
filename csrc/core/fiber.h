// Fibers: threads of execution with a stack each that take turns on one system thread, for the CUDA
// emulation. A fiber is a stack and a saved state: on x86-64 the stack pointer, with which a switch
// takes a few nanoseconds; on other processors a ucontext. In a build with AddressSanitizer every
// switch is announced to it, so that it knows the current stack.
//
// All fibers of a process must run on one system thread; not checked. No exception may leave the
// `entry` of a fiber. On x86-64 a switch saves the callee-saved registers, but not the modes of the
// floating-point unit, which no kernel changes.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace emb::simt {

inline constexpr size_t kStackBytes = 256 * 1024;
inline constexpr size_t kGuardBytes = 4096;  // page below the stack: an overflow faults there

#if defined(__x86_64__)

// Save the callee-saved registers on this stack and its pointer in `*old_pointer`, then continue on
// the stack with the pointer `new_pointer`. Weak, so that the sources that include this header
// share one copy: `inline` would contradict `noinline`, without which `naked` code breaks. The
// definition leaves its arguments in their registers, so only the declaration names them.
__attribute__((naked, noinline, weak)) void swap_stacks(void** old_pointer, void* new_pointer);
__attribute__((naked, noinline, weak)) void swap_stacks(void**, void*) {
  asm volatile(
      "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n ret\n");
}

// A saved state of execution. `start` prepares one that runs `entry` on the stack of `bytes` bytes
// that begins at `stack`; address and size are multiples of 16. `swap` saves the current state in
// this object and continues with `to`.
class Context {
 public:
  void start(char* stack, size_t bytes, void (*entry)()) {
    // `entry` expects the stack as it is after a call: 8 bytes below a multiple of 16, with a
    // return address; 0 ends backtraces. Below it are six registers for swap_stacks to pop.
    auto* top = reinterpret_cast<uint64_t*>(stack + bytes);
    top[-1] = 0;
    top[-2] = reinterpret_cast<uint64_t>(entry);
    for (int i = 3; i <= 8; ++i) top[-i] = 0;
    pointer_ = top - 8;
  }
  void swap(Context& to) { swap_stacks(&pointer_, to.pointer_); }

 private:
  void* pointer_ = nullptr;
};

#else

class Context {
 public:
  void start(char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = bytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
  }
  void swap(Context& to) { swapcontext(&context_, &to.context_); }

 private:
  ucontext_t context_;
};

#endif

// A fiber that owns its stack. A fiber that was never started represents the stack of the system
// thread that switches away from it.
class Fiber {
 public:
  Fiber() = default;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (memory_ != nullptr) munmap(memory_, kGuardBytes + kStackBytes);
  }

  // Prepare the fiber to run `entry` when it is switched to next. `entry` must call `finish_switch`
  // first and never return. A fiber may be started again, but not while it runs; what was on its
  // stack is lost without destructors. Throws std::runtime_error without memory for the stack.
  void start(void (*entry)()) {
    if (memory_ == nullptr) {
      void* memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED) throw std::runtime_error("simt: no memory for a fiber's stack");
      memory_ = static_cast<char*>(memory);
      mprotect(memory_, kGuardBytes, PROT_NONE);  // if it fails, overflows are not detected
    }
    fake_stack_ = nullptr;
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(memory_ + kGuardBytes, kStackBytes);
#endif
    context_.start(memory_ + kGuardBytes, kStackBytes, entry);
  }

  // Switch from this fiber, which must be the running one, to another one, `to`, which must be
  // started or have been left by a switch; return when a fiber switches back.
  void switch_to(Fiber& to) {
#if defined(__SANITIZE_ADDRESS__)
    // A fiber that was never started owns no stack; it was left on the one at stack_bottom_.
    __sanitizer_start_switch_fiber(&fake_stack_, to.stack_bottom_ ? to.stack_bottom_ : to.stack(),
                                   to.stack_bottom_ ? to.stack_bytes_ : kStackBytes);
    left_fiber() = this;
    context_.swap(to.context_);
    finish_switch();
#else
    context_.swap(to.context_);
#endif
  }

  // Announce to AddressSanitizer that the switch to this fiber has happened. `entry` calls it
  // first.
  void finish_switch() {
#if defined(__SANITIZE_ADDRESS__)
    // This call also returns the stack of the fiber that was left. The stack of the main fiber,
    // which was never started, is known only from here.
    Fiber* from = left_fiber();
    __sanitizer_finish_switch_fiber(fake_stack_, &from->stack_bottom_, &from->stack_bytes_);
#endif
  }

 private:
  const void* stack() const { return memory_ + kGuardBytes; }
  // Return the fiber that the switch in progress leaves, as a reference.
  static Fiber*& left_fiber() {
    static Fiber* from = nullptr;
    return from;
  }

  Context context_;
  char* memory_ = nullptr;  // guard page and stack; null before `start`
  // The values that AddressSanitizer reports when the fiber is left: its fake stack, and lowest
  // address and size of its stack.
  void* fake_stack_ = nullptr;
  const void* stack_bottom_ = nullptr;
  size_t stack_bytes_ = 0;
};

}  // namespace emb::simt
