// The CUDA emulation behind core/simt.cuh, for host compilers: the scheduler that runs the threads
// of a block (Machine), the launcher that tests use (HostLauncher), and CUDA's names. Everything is
// inline and runs on one system thread.
//
// The threads of a block are fibers. A fiber runs until it must wait for others, at a barrier or a
// warp collective; then the next runnable one continues. If none is runnable, the kernel is
// deadlocked, and the launch ends with a report of where each thread waits.
// EMBLIB_SIMT_ORDER=reverse in the environment, read at the first launch of the process, runs
// blocks, warps and lanes in the opposite order, which exposes kernels that rely on an order that
// CUDA does not guarantee.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <source_location>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/fiber.h"

namespace emb::simt {

// CUDA's dim3.
struct Dim3 {
  unsigned x = 1, y = 1, z = 1;

  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned volume() const { return x * y * z; }
};

// The value that each lane passed to a collective; unspecified for lanes outside its mask.
struct WarpValues {
  uint64_t word[32];
};

// The scheduler. Blocks run one after another, but the blocks of a cluster run together: all their
// threads are fibers of one schedule, numbered block by block in whole warps. Each block has its
// own dynamic shared memory, which the others may access between two cluster barriers. Before a
// block writes it, and after the block has left the kernel, all its bits are set: floats are NaN.
// Static __shared__ memory keeps the values of the previous block, and the blocks of a cluster
// share it: core/simt.cuh forbids it there.
//
// The host calls `run`, always on one system thread and not from a kernel. The fiber of the current
// thread of the kernel calls the other functions. `where` is the source line of the call in the
// kernel: threads meet only at the same line. `run` throws std::runtime_error if the launch has a
// wrong size, if there is no memory for stacks, or if the emulation detects a violation of
// core/simt.cuh; after a violation it drops the stacks of the threads without running destructors.
// Reads of dynamic shared memory too early or too late are not detected, except that `map_shared`
// refuses another block's memory before the first cluster barrier.
class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // Run `kernel`, the kernel with its arguments, in every thread of a grid. Its blocks form
  // clusters of `cluster_blocks` neighbours in x and have `shared_bytes` of dynamic shared memory
  // each.
  void run(Dim3 grid, Dim3 block, size_t shared_bytes, const std::function<void()>& kernel,
           unsigned cluster_blocks = 1) {
    if (block.volume() == 0 || block.volume() > kMaxThreads || grid.volume() == 0) {
      throw std::runtime_error(
          "simt: a launch needs at least one block, of 1 to 1024 threads, got " +
          std::to_string(block.volume()) + " threads and " + std::to_string(grid.volume()) +
          " blocks");
    }
    if (cluster_blocks == 0 || cluster_blocks > kMaxClusterBlocks || grid.x % cluster_blocks != 0) {
      throw std::runtime_error("simt: clusters of 1 to 8 blocks must divide the grid, got " +
                               std::to_string(cluster_blocks) + " of " + std::to_string(grid.x));
    }
    kernel_ = &kernel;
    block_dim_ = block;
    threads_per_block_ = block.volume();
    warps_per_block_ = (threads_per_block_ + 31) / 32;
    blocks_.resize(cluster_blocks);
    set_grid(grid, block);
    const unsigned num_clusters = grid.volume() / cluster_blocks;
    for (unsigned i = 0; i < num_clusters; ++i) {
      const unsigned first = (is_reversed_ ? num_clusters - 1 - i : i) * cluster_blocks;
      for (unsigned rank = 0; rank < cluster_blocks; ++rank) {
        const unsigned b = first + rank;
        Block& next_block = blocks_[rank];
        next_block.index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        next_block.shared.assign(shared_bytes / sizeof(Chunk) + 1, kUnwritten);
      }
      run_cluster();
    }
  }

  // Return the lane of the current thread in its warp, and the dynamic shared memory of its block.
  unsigned lane() const { return current_thread_ % 32; }
  void* dynamic_shared() { return blocks_[block_rank()].shared.data(); }

  // Return the rank of the current block in its cluster, and the number of blocks of a cluster.
  unsigned block_rank() const {
    return blocks_.size() == 1 ? 0 : current_thread_ / (warps_per_block_ * 32);
  }
  unsigned num_cluster_blocks() const { return static_cast<unsigned>(blocks_.size()); }

  // Return the address in the dynamic shared memory of block `rank` of the cluster that corresponds
  // to `address` in that of this block.
  void* map_shared(const void* address, unsigned rank, std::source_location where) {
    if (rank >= num_cluster_blocks()) {
      fail_at(where, "address_in_block names block " + std::to_string(rank) + " of a cluster of " +
                         std::to_string(num_cluster_blocks()));
    }
    const auto& shared = blocks_[block_rank()].shared;
    const auto offset =
        reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(shared.data());
    if (offset >= shared.size() * sizeof(Chunk)) {
      fail_at(where, "address_in_block of an address outside the dynamic shared memory");
    }
    if (rank != block_rank() && !cluster_has_met_) {
      fail_at(where,
              "address_in_block before the first cluster_sync: the other block may not run yet");
    }
    return reinterpret_cast<char*>(blocks_[rank].shared.data()) + offset;
  }

  // Wait for all threads of the block.
  void meet_block(std::source_location where) {
    Thread& self = threads_[current_thread_];
    const unsigned rank = block_rank();
    Block& block = blocks_[rank];
    if (block.num_exited > 0)
      fail_at(where, "__syncthreads after other threads have left the kernel");
    if (block.num_at_barrier > 0 && !is_same(where, block.barrier)) {
      fail_at(where, "threads meet at different __syncthreads; others wait at " +
                         location_text(block.barrier));
    }
    block.barrier = where;
    self.meeting_name = "__syncthreads";
    self.where = where;
    if (++block.num_at_barrier == threads_per_block_) {
      block.num_at_barrier = 0;
      const unsigned first = rank * warps_per_block_;
      for (unsigned w = first; w < first + warps_per_block_; ++w) runnable_lanes_[w] = all_lanes(w);
      return;
    }
    suspend();
  }

  // Wait for all threads of the cluster.
  void meet_cluster(std::source_location where) {
    Thread& self = threads_[current_thread_];
    if (num_exited_ > 0) fail_at(where, "cluster_sync after other threads have left the kernel");
    if (num_at_cluster_barrier_ > 0 && !is_same(where, cluster_barrier_)) {
      fail_at(where, "threads meet at different cluster_syncs; others wait at " +
                         location_text(cluster_barrier_));
    }
    cluster_barrier_ = where;
    self.meeting_name = "cluster_sync";
    self.where = where;
    if (++num_at_cluster_barrier_ == threads_per_block_ * num_cluster_blocks()) {
      num_at_cluster_barrier_ = 0;
      cluster_has_met_ = true;
      for (unsigned w = 0; w < num_warps(); ++w) runnable_lanes_[w] = all_lanes(w);
      return;
    }
    suspend();
  }

  // Wait for the lanes in `mask` at the collective `name`; return what every lane passed as
  // `value`. The result is valid until this thread meets others again.
  const WarpValues& meet_warp(const char* name, unsigned mask, uint64_t value,
                              std::source_location where) {
    Thread& self = threads_[current_thread_];
    const unsigned warp = current_thread_ / 32, bit = 1u << lane();
    if ((mask & bit) == 0)
      fail_at(where, std::string(name) + " by a lane that its mask leaves out");
    if ((mask & ~all_lanes(warp)) != 0) {
      fail_at(where, std::string(name) + " names lanes beyond the end of the block");
    }
    if ((mask & exited_lanes_[warp]) != 0) {
      fail_at(where, std::string(name) + " names lanes that have left the kernel");
    }
    self.meeting_name = name;
    self.where = where;
    self.mask = mask;
    self.value = value;
    waiting_lanes_[warp] |= bit;
    if ((waiting_lanes_[warp] & mask) == mask) {
      complete_collective(warp, mask);
    } else {
      suspend();
    }
    Exchange& exchange = exchanges_[warp][self.exchange];
    exchange.unread_lanes &= ~bit;
    return exchange.values;
  }

  // Start a copy of `num_words` words of 4 bytes. Without `reads_global`, zeros are copied, and
  // `from` is not read. The copy is made when this thread waits for the group of the copy; until
  // then all bits of the target are set (NaN). Without such a wait it is never made.
  void start_copy(uint32_t* to, const uint32_t* from, unsigned num_words, bool reads_global) {
    std::fill_n(to, num_words, 0xffffffffu);
    Thread& self = threads_[current_thread_];
    self.copies.push_back({to, from, num_words, reads_global, self.num_copy_groups});
  }

  // Put the copies that this thread started since its last commit into one group.
  void commit_copies() { ++threads_[current_thread_].num_copy_groups; }

  // Complete the committed groups of copies of this thread except the latest `groups_in_flight`.
  void wait_for_copies(unsigned groups_in_flight) {
    Thread& self = threads_[current_thread_];
    std::vector<Copy> in_flight;
    for (const Copy& copy : self.copies) {
      if (copy.group + groups_in_flight >= self.num_copy_groups) {
        in_flight.push_back(copy);
        continue;
      }
      for (unsigned i = 0; i < copy.num_words; ++i)
        copy.to[i] = copy.reads_global ? copy.from[i] : 0;
    }
    self.copies.swap(in_flight);
  }

  [[noreturn]] void fail_at(std::source_location where, const std::string& message) {
    fail(location_text(where) + ": " + message);
  }

  // End the launch from inside a kernel: `run` throws an error with this message.
  [[noreturn]] void fail(const std::string& message) {
    failure_message_ = "simt: block (" + block_name() + "), thread " +
                       std::to_string(thread_in_block()) + ": " + message;
    fibers_[current_thread_]->switch_to(main_fiber_);
    std::abort();
  }

 private:
  static constexpr unsigned kMaxThreads = 1024;
  static constexpr unsigned kMaxClusterBlocks = 8;  // the portable maximum of CUDA
  static constexpr unsigned kMaxWarps = kMaxClusterBlocks * kMaxThreads / 32;

  // The unit in which dynamic shared memory is allocated and aligned.
  struct Chunk {
    alignas(16) uint32_t words[4];
  };
  static constexpr Chunk kUnwritten{{0xffffffffu, 0xffffffffu, 0xffffffffu, 0xffffffffu}};

  // A block of the running cluster.
  struct Block {
    Dim3 index;                    // blockIdx
    unsigned num_exited = 0;       // threads that have left the kernel
    unsigned num_at_barrier = 0;   // threads that wait at `barrier`
    std::source_location barrier;  // the last __syncthreads that a thread reached
    std::vector<Chunk> shared;     // dynamic shared memory
  };

  // An asynchronous copy that its thread has not waited for.
  struct Copy {
    uint32_t* to;
    const uint32_t* from;
    unsigned num_words;  // of 4 bytes
    bool reads_global;   // else zeros are copied
    unsigned group;      // number of its group of copies in the thread
  };

  struct Thread {
    const char* meeting_name = nullptr;  // name of the last barrier or collective, null at first
    std::source_location where;          // its source line
    unsigned mask = 0;                   // its mask, for a collective
    uint64_t value = 0;                  // the value passed to it
    unsigned exchange = 0;               // the last exchange of its warp that it took part in
    std::vector<Copy> copies;            // copies to shared memory that it has not waited for
    unsigned num_copy_groups = 0;        // closed groups of copies
  };

  // The values of a completed collective. It is in use until all lanes of the mask have read them.
  struct Exchange {
    WarpValues values;
    unsigned unread_lanes = 0;  // lanes that have not read them yet, a bit each
  };
  // The exchanges of a warp. Each of the 32 lanes has at most one unread, so one is always free.
  using Exchanges = std::array<Exchange, 33>;

  Machine() {
    const char* order = std::getenv("EMBLIB_SIMT_ORDER");
    is_reversed_ = order != nullptr && std::string(order) == "reverse";
  }

  static bool is_same(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && is_same(a.file_name(), b.file_name());
  }

  static bool is_same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

  static std::string location_text(const std::source_location& where) {
    const std::string file = where.file_name();
    const size_t slash = file.rfind("csrc/");
    return (slash == std::string::npos ? file : file.substr(slash)) + ":" +
           std::to_string(where.line());
  }

  // Return the number of warps of the cluster. A warp has 32 thread numbers, even if the last warp
  // of a block has fewer threads.
  unsigned num_warps() const { return warps_per_block_ * num_cluster_blocks(); }
  // Return the bit mask of the threads of a warp, which are fewer in the last warp of a block.
  unsigned all_lanes(unsigned warp) const {
    const unsigned lanes = threads_per_block_ - warp % warps_per_block_ * 32;
    return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
  }
  // Return the number of the current thread in its block.
  unsigned thread_in_block() const { return current_thread_ % (warps_per_block_ * 32); }

  void run_cluster() {
    num_exited_ = num_at_cluster_barrier_ = 0;
    cluster_has_met_ = false;
    for (Block& block : blocks_) block.num_exited = block.num_at_barrier = 0;
    if (threads_.size() < num_warps() * 32) {
      threads_.resize(num_warps() * 32);
      fibers_.resize(num_warps() * 32);
      exchanges_.resize(num_warps());
    }
    for (unsigned w = 0; w < num_warps(); ++w) {
      runnable_lanes_[w] = all_lanes(w);
      waiting_lanes_[w] = exited_lanes_[w] = 0;
      for (Exchange& exchange : exchanges_[w]) exchange.unread_lanes = 0;
    }
    for (unsigned t = 0; t < num_warps() * 32; ++t) {
      threads_[t].copies.clear();
      threads_[t].num_copy_groups = 0;
      if (fibers_[t] == nullptr) {
        auto fiber = std::make_unique<Fiber>();
        fiber->start(&Machine::fiber_main);
        fibers_[t] = std::move(fiber);
      }
    }
    // next_thread begins with the warp of the current thread.
    current_thread_ = is_reversed_ ? num_warps() * 32 - 1 : 0;
    switch_to_thread(main_fiber_, next_thread());
    if (!failure_message_.empty()) {
      // The other fibers stopped in the middle of the kernel: restart their stacks.
      const std::string message = failure_message_;
      failure_message_.clear();
      for (auto& fiber : fibers_) {
        if (fiber != nullptr) fiber->start(&Machine::fiber_main);
      }
      throw std::runtime_error(message);
    }
  }

  static void fiber_main() {
    Machine& machine = get();
    machine.fibers_[machine.current_thread_]->finish_switch();
    for (;;) {
      (*machine.kernel_)();
      machine.finish_thread();
    }
  }

  // Handle the return of the current thread from the kernel.
  void finish_thread() {
    const unsigned self = current_thread_, warp = self / 32;
    Block& block = blocks_[block_rank()];
    if (block.num_at_barrier > 0) {
      fail("a thread leaves the kernel while others wait at the __syncthreads of " +
           location_text(block.barrier));
    }
    if (num_at_cluster_barrier_ > 0) {
      fail("a thread leaves the kernel while others wait at the cluster_sync of " +
           location_text(cluster_barrier_));
    }
    runnable_lanes_[warp] &= ~(1u << lane());
    exited_lanes_[warp] |= 1u << lane();
    if (++block.num_exited == threads_per_block_)
      std::fill(block.shared.begin(), block.shared.end(), kUnwritten);
    if (++num_exited_ == threads_per_block_ * num_cluster_blocks()) {
      fibers_[self]->switch_to(main_fiber_);
    } else {
      switch_to_thread(*fibers_[self], next_thread());
    }
  }

  // Suspend the current thread. Return when another thread has made it runnable and it is its turn.
  void suspend() {
    runnable_lanes_[current_thread_ / 32] &= ~(1u << lane());
    switch_to_thread(*fibers_[current_thread_], next_thread());
  }

  // Continue `thread`, a number in the cluster, on its fiber; `from` is the running fiber. Return
  // when a fiber switches back to `from`.
  void switch_to_thread(Fiber& from, unsigned thread) {
    current_thread_ = thread;
    set_thread();
    from.switch_to(*fibers_[thread]);
  }

  // Return the next thread to run. Lanes of the current warp come first, because a collective may
  // wait for them.
  unsigned next_thread() {
    const unsigned first = current_thread_ / 32;
    for (unsigned i = 0; i < num_warps(); ++i) {
      const unsigned warp = (first + (is_reversed_ ? num_warps() - i : i)) % num_warps();
      if (const unsigned lanes = runnable_lanes_[warp]; lanes != 0) {
        const int lane = is_reversed_ ? 31 - std::countl_zero(lanes) : std::countr_zero(lanes);
        return warp * 32 + static_cast<unsigned>(lane);
      }
    }
    fail("deadlock, no thread can go on:" + waiting_report());
  }

  // Complete a collective when the last lane of its mask has arrived: store the values of these
  // lanes in a free exchange, and make the lanes runnable.
  void complete_collective(unsigned warp, unsigned mask) {
    unsigned free_index = 0;
    while (exchanges_[warp][free_index].unread_lanes != 0) ++free_index;
    Exchange& exchange = exchanges_[warp][free_index];
    const Thread& self = threads_[current_thread_];
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1u) == 0) continue;
      Thread& other = threads_[warp * 32 + i];
      if (other.mask != mask || !is_same(other.meeting_name, self.meeting_name) ||
          !is_same(other.where, self.where)) {
        fail_at(self.where, std::string(self.meeting_name) + " meets lane " + std::to_string(i) +
                                " in another collective:" + waiting_report());
      }
      exchange.values.word[i] = other.value;
      other.exchange = free_index;
    }
    exchange.unread_lanes = mask;
    waiting_lanes_[warp] &= ~mask;
    runnable_lanes_[warp] |= mask;
  }

  // Return a text that states where threads wait, and how many.
  std::string waiting_report() const {
    std::map<std::string, unsigned> num_threads_at;
    for (unsigned t = 0; t < num_warps() * 32; ++t) {
      if ((exited_lanes_[t / 32] >> (t % 32) & 1u) || threads_[t].meeting_name == nullptr) continue;
      const bool is_in_collective = (waiting_lanes_[t / 32] >> (t % 32) & 1u) != 0;
      if (!is_in_collective && (runnable_lanes_[t / 32] >> (t % 32) & 1u)) continue;
      ++num_threads_at["warp " + std::to_string(t / 32) + " in " + threads_[t].meeting_name +
                       " at " + location_text(threads_[t].where)];
    }
    std::string report;
    for (const auto& [where, count] : num_threads_at) {
      report += "\n  " + std::to_string(count) + " threads of " + where;
    }
    return report;
  }

  std::string block_name() const {
    const Dim3& index = blocks_[block_rank()].index;
    return std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
           std::to_string(index.z);
  }

  void set_thread();
  void set_grid(Dim3 grid, Dim3 block);

  const std::function<void()>* kernel_ = nullptr;
  Dim3 block_dim_;
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Exchanges> exchanges_;  // exchanges of each warp
  std::vector<Block> blocks_;         // blocks of the cluster that runs
  Fiber main_fiber_;
  std::string failure_message_;
  std::source_location cluster_barrier_;
  unsigned current_thread_ = 0;  // the running thread, numbered in the cluster
  unsigned threads_per_block_ = 0, warps_per_block_ = 0;
  unsigned num_exited_ = 0, num_at_cluster_barrier_ = 0;  // threads of the cluster
  bool cluster_has_met_ = false;                          // at a first cluster_sync
  // The lanes of each warp that can run, wait at a collective, or have left the kernel.
  unsigned runnable_lanes_[kMaxWarps] = {};
  unsigned waiting_lanes_[kMaxWarps] = {}, exited_lanes_[kMaxWarps] = {};
  bool is_reversed_ = false;
};

// End the launch from inside a kernel with an error.
[[noreturn]] inline void fail(const std::string& message) { Machine::get().fail(message); }

}  // namespace emb::simt

// CUDA's names.

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __shared__ static
#define __launch_bounds__(...)
#define __grid_constant__

inline emb::simt::Dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emb::simt {

using Where = std::source_location;

inline void Machine::set_thread() {
  blockIdx = blocks_[block_rank()].index;
  const unsigned thread = thread_in_block();
  if (thread < block_dim_.x) {
    threadIdx = {thread, 0, 0};
  } else {
    threadIdx = {thread % block_dim_.x, thread / block_dim_.x % block_dim_.y,
                 thread / block_dim_.x / block_dim_.y};
  }
}

inline void Machine::set_grid(Dim3 grid, Dim3 block) {
  gridDim = grid;
  blockDim = block;
}

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8, "a warp collective moves at most 8 bytes");
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof(T));
  return word;
}

template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof(T));
  return value;
}

// Exchange `value` with all lanes in `mask`; return pick(lane, values), where `lane` is this lane
// and `values` are those of all lanes.
template <class Pick>
auto collective(const char* name, unsigned mask, uint64_t value, Where where, const Pick& pick) {
  Machine& machine = Machine::get();
  const WarpValues& values = machine.meet_warp(name, mask, value, where);
  return pick(machine.lane(), values);
}

// Return the value that lane `source_of_lane` passed. Fails unless that lane, in [0, 32), is in
// `mask`.
template <class T>
T shuffle(const char* name, unsigned mask, T value, Where where, int source_of_lane) {
  return collective(name, mask, to_word(value), where, [&](unsigned, const WarpValues& values) {
    const auto source = static_cast<unsigned>(source_of_lane);
    if ((mask >> source & 1u) == 0) {
      Machine::get().fail_at(where, std::string(name) + " reads lane " + std::to_string(source) +
                                        ", which is not in its mask");
    }
    return from_word<T>(values.word[source]);
  });
}

// Return the values of all lanes in `mask`, combined by `combine(total, value)`. Each lane begins
// with its own value, so sums of floats, which CUDA does not offer, can differ between lanes.
template <class T, class Reduce>
T reduce(const char* name, unsigned mask, T value, Where where, const Reduce& combine) {
  return collective(name, mask, to_word(value), where,
                    [&](unsigned lane, const WarpValues& values) {
                      T total = from_word<T>(values.word[lane]);
                      for (unsigned other = 0; other < 32; ++other) {
                        if (other != lane && (mask >> other & 1u)) {
                          total = combine(total, from_word<T>(values.word[other]));
                        }
                      }
                      return total;
                    });
}

// Starts kernels in the emulation. It has all functions of CudaLauncher (core/launch.h) except
// `stream`. A launch returns when the kernel has run, and throws std::runtime_error as Machine::run
// does. Pointers are addresses of the host.
struct HostLauncher {
  unsigned device_max_cluster_blocks = 8;  // 1 for a device without clusters

  // Return 3, so that grid-stride loops iterate more than once on small inputs.
  int64_t max_grid_blocks(int) const { return 3; }

  template <class Kernel>
  unsigned max_cluster_blocks(Kernel*) const {
    return device_max_cluster_blocks;
  }

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), Dim3 grid, Dim3 block,
                  const Arguments&... arguments) const {
    Machine::get().run(grid, block, 0, [&] { kernel(arguments...); });
  }
  template <class... Parameters, class... Arguments>
  void launch_with_shared(void (*kernel)(Parameters...), Dim3 grid, Dim3 block, size_t shared_bytes,
                          const Arguments&... arguments) const {
    Machine::get().run(grid, block, shared_bytes, [&] { kernel(arguments...); });
  }
  void zero(void* data, size_t bytes) const { std::memset(data, 0, bytes); }

  template <class... Parameters, class... Arguments>
  void launch_cluster(void (*kernel)(Parameters...), unsigned num_blocks, Dim3 block,
                      size_t shared_bytes, const Arguments&... arguments) const {
    Machine::get().run(num_blocks, block, shared_bytes, [&] { kernel(arguments...); }, num_blocks);
  }
};

}  // namespace emb::simt

inline void __syncthreads(emb::simt::Where where = emb::simt::Where::current()) {
  emb::simt::Machine::get().meet_block(where);
}

inline void __syncwarp(unsigned mask = 0xffffffffu,
                       emb::simt::Where where = emb::simt::Where::current()) {
  emb::simt::Machine::get().meet_warp("__syncwarp", mask, 0, where);
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32,
              emb::simt::Where where = emb::simt::Where::current()) {
  const int lane = static_cast<int>(emb::simt::Machine::get().lane());
  const int from = (lane & ~(width - 1)) | (source & (width - 1));
  return emb::simt::shuffle("__shfl_sync", mask, value, where, from);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32,
                 emb::simt::Where where = emb::simt::Where::current()) {
  const int lane = static_cast<int>(emb::simt::Machine::get().lane());
  const int from = lane - static_cast<int>(delta);
  return emb::simt::shuffle("__shfl_up_sync", mask, value, where,
                            from < (lane & ~(width - 1)) ? lane : from);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32,
                   emb::simt::Where where = emb::simt::Where::current()) {
  const int lane = static_cast<int>(emb::simt::Machine::get().lane());
  const int from = lane + static_cast<int>(delta);
  return emb::simt::shuffle("__shfl_down_sync", mask, value, where,
                            from > (lane | (width - 1)) ? lane : from);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32,
                  emb::simt::Where where = emb::simt::Where::current()) {
  const int lane = static_cast<int>(emb::simt::Machine::get().lane());
  const int from = lane ^ bits;
  return emb::simt::shuffle("__shfl_xor_sync", mask, value, where,
                            from > (lane | (width - 1)) ? lane : from);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              emb::simt::Where where = emb::simt::Where::current()) {
  return emb::simt::collective("__ballot_sync", mask, predicate != 0, where,
                               [mask](unsigned, const emb::simt::WarpValues& values) {
                                 unsigned bits = 0;
                                 for (unsigned i = 0; i < 32; ++i) {
                                   if (mask >> i & 1u) bits |= unsigned(values.word[i]) << i;
                                 }
                                 return bits;
                               });
}

inline int __any_sync(unsigned mask, int predicate,
                      emb::simt::Where where = emb::simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) != 0;
}

inline int __all_sync(unsigned mask, int predicate,
                      emb::simt::Where where = emb::simt::Where::current()) {
  return __ballot_sync(mask, predicate, where) == mask;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T value,
                          emb::simt::Where where = emb::simt::Where::current()) {
  return emb::simt::collective("__match_any_sync", mask, emb::simt::to_word(value), where,
                               [mask](unsigned lane, const emb::simt::WarpValues& values) {
                                 unsigned bits = 0;
                                 for (unsigned i = 0; i < 32; ++i) {
                                   const bool same = values.word[i] == values.word[lane];
                                   if ((mask >> i & 1u) && same) bits |= 1u << i;
                                 }
                                 return bits;
                               });
}

template <class T>
T __reduce_add_sync(unsigned mask, T value, emb::simt::Where where = emb::simt::Where::current()) {
  return emb::simt::reduce("__reduce_add_sync", mask, value, where,
                           [](T a, T b) { return static_cast<T>(a + b); });
}

template <class T>
T __reduce_min_sync(unsigned mask, T value, emb::simt::Where where = emb::simt::Where::current()) {
  return emb::simt::reduce("__reduce_min_sync", mask, value, where,
                           [](T a, T b) { return b < a ? b : a; });
}

template <class T>
T __reduce_max_sync(unsigned mask, T value, emb::simt::Where where = emb::simt::Where::current()) {
  return emb::simt::reduce("__reduce_max_sync", mask, value, where,
                           [](T a, T b) { return a < b ? b : a; });
}

// A thread runs until it waits, so a plain read-modify-write is atomic.
template <class T>
T atomicAdd(T* address, T value) {
  const T before = *address;
  *address = before + value;
  return before;
}

template <class T>
T atomicMax(T* address, T value) {
  const T before = *address;
  if (before < value) *address = value;
  return before;
}

template <class T>
T atomicMin(T* address, T value) {
  const T before = *address;
  if (value < before) *address = value;
  return before;
}

template <class T>
T atomicExch(T* address, T value) {
  const T before = *address;
  *address = value;
  return before;
}

template <class T>
T atomicCAS(T* address, T expected, T value) {
  const T before = *address;
  if (before == expected) *address = value;
  return before;
}

inline void __threadfence() {}
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
// Compare the bytes of two words: 0xff for equal bytes, else 0.
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  unsigned equal = 0;
  for (unsigned byte = 0xffu; byte != 0; byte <<= 8) {
    if (((a ^ b) & byte) == 0) equal |= byte;
  }
  return equal;
}
