// The CUDA emulation behind core/simt.cuh: the scheduler that runs the threads of a block, the
// launcher that tests use, and CUDA's names. Everything is inline and single-threaded.
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
#include <vector>

#include "core/fiber.h"

namespace emb::simt {

// The scheduler. The threads of a block are fibers of one system thread: a fiber runs until it must
// wait for others at a barrier or a warp collective, and then the next runnable one takes over.
// When none is runnable, the block is deadlocked: the launch ends with a report of where each
// thread waits. EMBLIB_SIMT_ORDER=reverse runs blocks, warps and lanes in the opposite order, which
// exposes kernels that rely on an order they did not ask for.
//
// The blocks of a cluster run together: all their threads are fibers of one schedule, numbered
// block by block in whole warps. Each block has its own dynamic shared memory, which the others
// reach between two cluster barriers; a block that has left reads as NaN.

struct Dim3 {
  unsigned x = 1, y = 1, z = 1;

  constexpr Dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  unsigned volume() const { return x * y * z; }
};

// The value that each lane passed to a collective.
struct WarpValues {
  uint64_t word[32];
};

class Machine {
 public:
  static Machine& get() {
    static Machine machine;
    return machine;
  }

  // Run a grid whose blocks form clusters of `cluster` neighbours in x; throw std::runtime_error
  // where a kernel breaks the rules of core/simt.cuh.
  void run(Dim3 grid, Dim3 block, size_t shared_bytes, const std::function<void()>& kernel,
           unsigned cluster = 1) {
    if (block.volume() == 0 || block.volume() > kMaxThreads || grid.volume() == 0) {
      throw std::runtime_error("simt: a launch needs 1 to 1024 threads a block and a block, got " +
                               std::to_string(block.volume()) + " and " +
                               std::to_string(grid.volume()));
    }
    if (cluster == 0 || cluster > kMaxCluster || grid.x % cluster != 0) {
      throw std::runtime_error("simt: clusters of 1 to 8 blocks must divide the grid, got " +
                               std::to_string(cluster) + " of " + std::to_string(grid.x));
    }
    kernel_ = &kernel;
    block_ = block;
    live_ = block.volume();
    block_warps_ = (live_ + 31) / 32;
    blocks_.resize(cluster);
    set_grid(grid, block);
    const unsigned clusters = grid.volume() / cluster;
    for (unsigned i = 0; i < clusters; ++i) {
      const unsigned first = (reverse_ ? clusters - 1 - i : i) * cluster;
      for (unsigned rank = 0; rank < cluster; ++rank) {
        const unsigned b = first + rank;
        Block& of = blocks_[rank];
        of.index = {b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y};
        // Bytes that no kernel has written read as NaN.
        of.shared.assign(shared_bytes / sizeof(Chunk) + 1, kUnwritten);
      }
      run_cluster();
    }
  }

  unsigned lane() const { return current_ % 32; }
  void* dynamic_shared() { return blocks_[rank()].shared.data(); }

  // The position of the current block in its cluster, and the number of blocks of a cluster.
  unsigned rank() const { return blocks_.size() == 1 ? 0 : current_ / (block_warps_ * 32); }
  unsigned cluster_size() const { return static_cast<unsigned>(blocks_.size()); }

  // Return where the block `rank` of the cluster has what is at `address` in the dynamic shared
  // memory of this block.
  void* map_shared(const void* address, unsigned rank, std::source_location where) {
    if (rank >= cluster_size()) {
      fail_at(where, "of_block names block " + std::to_string(rank) + " of a cluster of " +
                         std::to_string(cluster_size()));
    }
    const auto& own = blocks_[this->rank()].shared;
    const auto offset =
        reinterpret_cast<uintptr_t>(address) - reinterpret_cast<uintptr_t>(own.data());
    if (offset >= own.size() * sizeof(Chunk)) {
      fail_at(where, "of_block of an address outside the dynamic shared memory");
    }
    if (rank != this->rank() && !cluster_has_met_) {
      fail_at(where, "of_block before the first cluster_sync: the other block may not run yet");
    }
    return reinterpret_cast<char*>(blocks_[rank].shared.data()) + offset;
  }

  void meet_block(std::source_location where) {
    Thread& self = threads_[current_];
    const unsigned rank = this->rank();
    Block& block = blocks_[rank];
    if (block.exited > 0) fail_at(where, "__syncthreads after other threads have left the kernel");
    if (block.at_barrier > 0 && !same(where, block.barrier)) {
      fail_at(where,
              "threads meet at different __syncthreads; others wait at " + show(block.barrier));
    }
    block.barrier = where;
    self.waits_for = "__syncthreads";
    self.where = where;
    if (++block.at_barrier == live_) {
      block.at_barrier = 0;
      const unsigned first = rank * block_warps_;
      for (unsigned w = first; w < first + block_warps_; ++w) runnable_[w] = all_lanes(w);
      return;
    }
    wait();
  }

  void meet_cluster(std::source_location where) {
    Thread& self = threads_[current_];
    if (exited_ > 0) fail_at(where, "cluster_sync after other threads have left the kernel");
    if (at_cluster_barrier_ > 0 && !same(where, cluster_barrier_)) {
      fail_at(where,
              "threads meet at different cluster_syncs; others wait at " + show(cluster_barrier_));
    }
    cluster_barrier_ = where;
    self.waits_for = "cluster_sync";
    self.where = where;
    if (++at_cluster_barrier_ == live_ * cluster_size()) {
      at_cluster_barrier_ = 0;
      cluster_has_met_ = true;
      for (unsigned w = 0; w < warps(); ++w) runnable_[w] = all_lanes(w);
      return;
    }
    wait();
  }

  // The values are valid until this thread meets others again.
  const WarpValues& meet_warp(const char* name, unsigned mask, uint64_t value,
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
    Exchange& exchange = exchanges_[warp][self.exchange];
    exchange.readers &= ~bit;
    return exchange.values;
  }

  // A copy happens when its thread waits for it; until then its target reads as NaN.
  void start_copy(uint32_t* to, const uint32_t* from, unsigned words, bool inside) {
    std::fill_n(to, words, 0xffffffffu);
    Thread& self = threads_[current_];
    self.copies.push_back({to, from, words, inside, self.copy_groups});
  }

  void commit_copies() { ++threads_[current_].copy_groups; }

  void wait_for_copies(unsigned groups_in_flight) {
    Thread& self = threads_[current_];
    std::vector<Copy> in_flight;
    for (const Copy& copy : self.copies) {
      if (copy.group + groups_in_flight >= self.copy_groups) {
        in_flight.push_back(copy);
        continue;
      }
      for (unsigned i = 0; i < copy.words; ++i) copy.to[i] = copy.inside ? copy.from[i] : 0;
    }
    self.copies.swap(in_flight);
  }

  [[noreturn]] void fail_at(std::source_location where, const std::string& message) {
    stop(show(where) + ": " + message);
  }

  // End the launch from inside a kernel.
  [[noreturn]] void stop(const std::string& message) {
    failure_ =
        "simt: block (" + block_name() + "), thread " + std::to_string(thread()) + ": " + message;
    fibers_[current_]->switch_to(main_);
    std::abort();
  }

 private:
  static constexpr unsigned kMaxThreads = 1024;
  static constexpr unsigned kMaxCluster = 8;  // more is not portable
  static constexpr unsigned kMaxWarps = kMaxCluster * kMaxThreads / 32;

  struct Chunk {
    alignas(16) uint32_t words[2];
  };
  static constexpr Chunk kUnwritten{{0xffffffffu, 0xffffffffu}};

  // A block of the cluster that runs.
  struct Block {
    Dim3 index;
    unsigned exited = 0, at_barrier = 0;  // threads
    std::source_location barrier;
    std::vector<Chunk> shared;
  };

  struct Copy {
    uint32_t* to;
    const uint32_t* from;
    unsigned words;
    bool inside;
    unsigned group;
  };

  struct Thread {
    const char* waits_for = nullptr;
    std::source_location where;
    unsigned mask = 0;
    uint64_t value = 0;
    unsigned exchange = 0;     // the last exchange of its warp that it took part in
    std::vector<Copy> copies;  // copies to shared memory that are not yet waited for
    unsigned copy_groups = 0;  // closed groups of copies
  };

  // The values of a collective, as long as lanes have not read them.
  struct Exchange {
    WarpValues values;
    unsigned readers = 0;
  };
  // Each lane leaves at most one unread, so that one of these is free.
  using Exchanges = std::array<Exchange, 33>;

  Machine() {
    const char* order = std::getenv("EMBLIB_SIMT_ORDER");
    reverse_ = order != nullptr && std::string(order) == "reverse";
  }

  static bool same(const std::source_location& a, const std::source_location& b) {
    return a.line() == b.line() && same(a.file_name(), b.file_name());
  }

  static bool same(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

  static std::string show(const std::source_location& where) {
    const std::string file = where.file_name();
    const size_t slash = file.rfind("csrc/");
    return (slash == std::string::npos ? file : file.substr(slash)) + ":" +
           std::to_string(where.line());
  }

  unsigned warps() const { return block_warps_ * cluster_size(); }
  unsigned all_lanes(unsigned warp) const {
    const unsigned lanes = live_ - warp % block_warps_ * 32;
    return lanes >= 32 ? 0xffffffffu : (1u << lanes) - 1;
  }
  unsigned thread() const { return current_ % (block_warps_ * 32); }

  void run_cluster() {
    exited_ = at_cluster_barrier_ = 0;
    cluster_has_met_ = false;
    for (Block& block : blocks_) block.exited = block.at_barrier = 0;
    if (threads_.size() < warps() * 32) {
      threads_.resize(warps() * 32);
      fibers_.resize(warps() * 32);
      exchanges_.resize(warps());
    }
    for (unsigned w = 0; w < warps(); ++w) {
      runnable_[w] = all_lanes(w);
      waiting_[w] = done_[w] = 0;
      for (Exchange& exchange : exchanges_[w]) exchange.readers = 0;
    }
    for (unsigned t = 0; t < warps() * 32; ++t) {
      threads_[t].copies.clear();
      threads_[t].copy_groups = 0;
      if (fibers_[t] == nullptr) {
        fibers_[t] = std::make_unique<Fiber>();
        fibers_[t]->start(&Machine::fiber_main);
      }
    }
    current_ = 0;
    enter(main_, next());
    if (!failure_.empty()) {
      // The other fibers stopped in the middle of the kernel: restart their stacks.
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

  // Handle the return of the current thread from the kernel.
  void leave() {
    const unsigned self = current_, warp = self / 32;
    Block& block = blocks_[rank()];
    if (block.at_barrier > 0) {
      stop("a thread leaves the kernel while others wait at the __syncthreads of " +
           show(block.barrier));
    }
    if (at_cluster_barrier_ > 0) {
      stop("a thread leaves the kernel while others wait at the cluster_sync of " +
           show(cluster_barrier_));
    }
    runnable_[warp] &= ~(1u << lane());
    done_[warp] |= 1u << lane();
    if (++block.exited == live_) std::fill(block.shared.begin(), block.shared.end(), kUnwritten);
    if (++exited_ == live_ * cluster_size()) {
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
    set_thread();
    from.switch_to(*fibers_[thread]);
  }

  // Return the next thread to run. Lanes of the same warp come first: a collective waits for them.
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

  // Complete a collective: the last lane has arrived, so every lane gets all values and may
  // continue.
  void complete(unsigned warp, unsigned mask) {
    unsigned free = 0;
    while (exchanges_[warp][free].readers != 0) ++free;
    Exchange& exchange = exchanges_[warp][free];
    const Thread& self = threads_[current_];
    for (unsigned i = 0; i < 32; ++i) {
      if ((mask >> i & 1u) == 0) continue;
      Thread& other = threads_[warp * 32 + i];
      if (other.mask != mask || !same(other.waits_for, self.waits_for) ||
          !same(other.where, self.where)) {
        fail_at(self.where, std::string(self.waits_for) + " meets lane " + std::to_string(i) +
                                " in another collective:" + waiting_report());
      }
      exchange.values.word[i] = other.value;
      other.exchange = free;
    }
    exchange.readers = mask;
    waiting_[warp] &= ~mask;
    runnable_[warp] |= mask;
  }

  std::string waiting_report() const {
    std::map<std::string, unsigned> groups;
    for (unsigned t = 0; t < warps() * 32; ++t) {
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
    const Dim3& index = blocks_[rank()].index;
    return std::to_string(index.x) + ", " + std::to_string(index.y) + ", " +
           std::to_string(index.z);
  }

  void set_thread();
  void set_grid(Dim3 grid, Dim3 block);

  const std::function<void()>* kernel_ = nullptr;
  Dim3 block_;
  std::vector<Thread> threads_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Exchanges> exchanges_;  // exchanges of each warp
  std::vector<Block> blocks_;         // blocks of the cluster that runs
  Fiber main_;
  std::string failure_;
  std::source_location cluster_barrier_;
  unsigned current_ = 0, live_ = 0, block_warps_ = 0;  // live: threads per block
  unsigned exited_ = 0, at_cluster_barrier_ = 0;       // threads of the cluster
  bool cluster_has_met_ = false;
  unsigned runnable_[kMaxWarps] = {}, waiting_[kMaxWarps] = {}, done_[kMaxWarps] = {};
  bool reverse_ = false;
};

// End the launch from inside a kernel with an error.
[[noreturn]] inline void fail(const std::string& message) { Machine::get().stop(message); }

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
  blockIdx = blocks_[rank()].index;
  const unsigned thread = this->thread();
  if (thread < block_.x) {
    threadIdx = {thread, 0, 0};
  } else {
    threadIdx = {thread % block_.x, thread / block_.x % block_.y, thread / block_.x / block_.y};
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

// Exchange the values of all lanes of `mask`; return `pick(lane, values)` for this lane.
template <class Pick>
auto collective(const char* name, unsigned mask, uint64_t value, Where where, const Pick& pick) {
  Machine& machine = Machine::get();
  const WarpValues& values = machine.meet_warp(name, mask, value, where);
  return pick(machine.lane(), values);
}

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

// Starts kernels on the emulated machine; the counterpart of CudaLauncher.
struct HostLauncher {
  unsigned max_cluster_size = 8;  // 1 for a device without clusters

  // Few blocks, so that grid-stride loops iterate more than once.
  int64_t blocks(int) const { return 3; }

  // Return the largest cluster that `kernel` may be started in.
  template <class Kernel>
  unsigned max_cluster(Kernel*) const {
    return max_cluster_size;
  }

  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), Dim3 grid, Dim3 block,
                  const Arguments&... arguments) const {
    Machine::get().run(grid, block, 0, [&] { kernel(arguments...); });
  }
  template <class... Parameters, class... Arguments>
  void with_shared(void (*kernel)(Parameters...), Dim3 grid, Dim3 block, size_t shared_bytes,
                   const Arguments&... arguments) const {
    Machine::get().run(grid, block, shared_bytes, [&] { kernel(arguments...); });
  }
  void zero(void* data, size_t bytes) const { std::memset(data, 0, bytes); }

  template <class... Parameters, class... Arguments>
  void cluster(void (*kernel)(Parameters...), unsigned blocks, Dim3 block, size_t shared_bytes,
               const Arguments&... arguments) const {
    Machine::get().run(blocks, block, shared_bytes, [&] { kernel(arguments...); }, blocks);
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

// Threads take turns, so a plain read-modify-write is atomic.
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
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
// Compare byte by byte: 0xff where equal, else 0.
inline unsigned __vcmpeq4(unsigned a, unsigned b) {
  unsigned equal = 0;
  for (unsigned byte = 0xffu; byte != 0; byte <<= 8) {
    if (((a ^ b) & byte) == 0) equal |= byte;
  }
  return equal;
}
