// The scheduler of the CUDA emulation. The threads of a block are fibers of one system thread; a
// fiber runs until it must wait for others at a barrier or a warp collective, and then the next one
// that can run takes over. When none can, the block is stuck: the launch ends with a report of who
// waits where. EMBLIB_SIMT_ORDER=reverse runs blocks, warps and lanes in the opposite order, which
// brings out kernels that rely on an order they did not ask for.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/simt_fiber.h"

namespace emb::simt {

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;

  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned volume() const { return x * y * z; }
};

// What each lane brought to a collective.
struct WarpValues {
  uint64_t word[32];
};

class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // Runs a grid; throws std::runtime_error where a kernel breaks the rules of core/simt.cuh.
  void run(Dim3 grid, Dim3 block, size_t shared_bytes, const std::function<void()>& kernel) {
    if (block.volume() == 0 || block.volume() > kMaxThreads || grid.volume() == 0) {
      throw std::runtime_error("simt: a launch needs 1 to 1024 threads a block and a block, got " +
                               std::to_string(block.volume()) + " and " +
                               std::to_string(grid.volume()));
    }
    kernel_ = &kernel;
    block_ = block;
    const unsigned blocks = grid.volume();
    for (unsigned i = 0; i < blocks; ++i) {
      const unsigned b = reverse_ ? blocks - 1 - i : i;
      set_block(grid, block, {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y});
      // Bytes no kernel wrote read as NaN.
      shared_.assign(shared_bytes / sizeof(Chunk) + 1, Chunk{{0xffffffffu, 0xffffffffu}});
      run_block();
    }
  }

  unsigned lane() const { return current_ % 32; }
  void* dynamic_shared() { return shared_.data(); }

  void meet_block(std::source_location where) {
    Thread& self = threads_[current_];
    if (exited_ > 0) fail_at(where, "__syncthreads after other threads have left the kernel");
    if (at_barrier_ > 0 && !same(where, barrier_)) {
      fail_at(where, "threads meet at different __syncthreads; others wait at " + show(barrier_));
    }
    barrier_ = where;
    self.waits_for = "__syncthreads";
    self.where = where;
    if (++at_barrier_ == live_) {
      at_barrier_ = 0;
      for (unsigned w = 0; w < warps(); ++w) runnable_[w] = all_lanes(w);
      return;
    }
    wait();
  }

  WarpValues meet_warp(const char* name, unsigned mask, uint64_t value,
                       std::source_location where) {
    Thread& self = threads_[current_];
    const unsigned warp = current_ / 32, bit = 1u << lane();
    if ((mask & bit) == 0)
      fail_at(where, std::string(name) + " by a lane that its mask leaves out");
    if ((mask & ~all_lanes(warp)) != 0) {
      fail_at(where, std::string(name) + " names lanes beyond the end of the block");
    }
    if ((mask & done_[warp]) != 0) {
      fail_at(where, std::string(name) + " names lanes that have left the kernel");
    }
    self.waits_for = name;
    self.where = where;
    self.mask = mask;
    self.value = value;
    waiting_[warp] |= bit;
    if ((waiting_[warp] & mask) == mask) {
      complete(warp, mask);
    } else {
      wait();
    }
    return self.values;
  }

  [[noreturn]] void fail_at(std::source_location where, const std::string& message) {
    stop(show(where) + ": " + message);
  }

  // Ends the launch from inside a kernel.
  [[noreturn]] void stop(const std::string& message) {
    failure_ =
        "simt: block (" + block_name() + "), thread " + std::to_string(current_) + ": " + message;
    fibers_[current_]->switch_to(main_);
    std::abort();
  }

 private:
  static constexpr unsigned kMaxThreads = 1024;

  struct Chunk {
    alignas(16) uint32_t words[2];
  };

  struct Thread {
    const char* waits_for = nullptr;
    std::source_location where;
    unsigned mask = 0;
    uint64_t value = 0;
    WarpValues values;
  };

  Machine() : threads_(kMaxThreads), fibers_(kMaxThreads) {
    const char* order = std::getenv("EMBLIB_SIMT_ORDER");
    reverse_ = order != nullptr && std::string(order) == "reverse";
  }

  static bool same(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && std::strcmp(a.file_name(), b.file_name()) == 0;
  }

  static std::string show(const std::source_location& where) {
    const std::string file = where.file_name();
    const size_t slash = file.rfind("csrc/");
    return (slash == std::string::npos ? file : file.substr(slash)) + ":" +
           std::to_string(where.line());
  }

  unsigned warps() const { return (live_ + 31) / 32; }
  unsigned all_lanes(unsigned warp) const {
    const unsigned lanes = live_ - warp * 32;
    return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
  }

  void run_block() {
    live_ = block_.volume();
    exited_ = at_barrier_ = 0;
    for (unsigned w = 0; w < warps(); ++w) {
      runnable_[w] = all_lanes(w);
      waiting_[w] = done_[w] = 0;
    }
    for (unsigned t = 0; t < live_; ++t) {
      if (fibers_[t] == nullptr) {
        fibers_[t] = std::make_unique<Fiber>();
        fibers_[t]->start(&Machine::fiber_main);
      }
    }
    current_ = 0;
    enter(main_, next());
    if (!failure_.empty()) {
      // The other fibers stopped in the middle of the kernel: their stacks start over.
      const std::string message = failure_;
      failure_.clear();
      for (auto& fiber : fibers_) {
        if (fiber != nullptr) fiber->start(&Machine::fiber_main);
      }
      throw std::runtime_error(message);
    }
  }

  static void fiber_main() {
    Machine& machine = get();
    machine.fibers_[machine.current_]->arrive();
    for (;;) {
      (*machine.kernel_)();
      machine.leave();
    }
  }

  // The current thread has returned from the kernel.
  void leave() {
    const unsigned self = current_, warp = self / 32;
    if (at_barrier_ > 0) {
      stop("a thread leaves the kernel while others wait at the __syncthreads of " +
           show(barrier_));
    }
    runnable_[warp] &= ~(1u << lane());
    done_[warp] |= 1u << lane();
    if (++exited_ == live_) {
      fibers_[self]->switch_to(main_);
    } else {
      enter(*fibers_[self], next());
    }
  }

  void wait() {
    runnable_[current_ / 32] &= ~(1u << lane());
    enter(*fibers_[current_], next());
  }

  void enter(Fiber& from, unsigned thread) {
    current_ = thread;
    set_thread(thread);
    from.switch_to(*fibers_[thread]);
  }

  // Lanes of the same warp first: they are the ones a collective waits for.
  unsigned next() {
    const unsigned first = current_ / 32;
    for (unsigned i = 0; i < warps(); ++i) {
      const unsigned warp = (first + (reverse_ ? warps() - i : i)) % warps();
      if (const unsigned lanes = runnable_[warp]; lanes != 0) {
        const int lane = reverse_ ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes);
        return warp * 32 + static_cast<unsigned>(lane);
      }
    }
    stop("deadlock, no thread can go on:" + waiting_report());
  }

  // The last lane of a collective has arrived: every lane gets all values and may go on.
  void complete(unsigned warp, unsigned mask) {
    WarpValues values{};
    const Thread& self = threads_[current_];
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1u) == 0) continue;
      const Thread& other = threads_[warp * 32 + i];
      if (other.mask != mask || std::strcmp(other.waits_for, self.waits_for) != 0 ||
          !same(other.where, self.where)) {
        fail_at(self.where, std::string(self.waits_for) + " meets lane " + std::to_string(i) +
                                " in another collective:" + waiting_report());
      }
      values.word[i] = other.value;
    }
    for (unsigned i = 0; i < 32; ++i) {
      if (mask >> i & 1u) threads_[warp * 32 + i].values = values;
    }
    waiting_[warp] &= ~mask;
    runnable_[warp] |= mask;
  }

  std::string waiting_report() const {
    std::map<std::string, unsigned> groups;
    for (unsigned t = 0; t < live_; ++t) {
      if ((done_[t / 32] >> (t % 32) & 1u) || threads_[t].waits_for == nullptr) continue;
      const bool in_warp = (waiting_[t / 32] >> (t % 32) & 1u) != 0;
      if (!in_warp && (runnable_[t / 32] >> (t % 32) & 1u)) continue;
      ++groups["warp " + std::to_string(t / 32) + " in " + threads_[t].waits_for + " at " +
               show(threads_[t].where)];
    }
    std::string report;
    for (const auto& [where, count] : groups) {
      report += "\n  " + std::to_string(count) + " threads of " + where;
    }
    return report;
  }

  std::string block_name() const {
    return std::to_string(block_index_.x) + ", " + std::to_string(block_index_.y) + ", " +
           std::to_string(block_index_.z);
  }

  void set_thread(unsigned thread);
  void set_block(Dim3 grid, Dim3 block, Dim3 index);

  const std::function<void()>* kernel_ = nullptr;
  Dim3 block_, block_index_;
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Chunk> shared_;
  Fiber main_;
  std::string failure_;
  std::source_location barrier_;
  unsigned current_ = 0, live_ = 0, exited_ = 0, at_barrier_ = 0;
  unsigned runnable_[32] = {}, waiting_[32] = {}, done_[32] = {};
  bool reverse_ = false;
};

// Ends the launch from inside a kernel with an error.
[[noreturn]] inline void fail(const std::string& message) { Machine::get().stop(message); }

}  // namespace emb::simt
