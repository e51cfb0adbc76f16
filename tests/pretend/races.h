// The race detector of the pretend GPUs (races.cpp): vector clocks of streams, graphs and the host,
// and for every byte of device and pinned memory who wrote it and who has read it since.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace pretend {

struct Block;
struct Event;
struct Graph;
struct Operation;
struct Stream;

namespace races {

// How many operations of each actor have happened before. Actors are the host, streams and the
// branches of graphs.
class Clock {
 public:
  uint64_t get(uint32_t actor) const;
  void raise(uint32_t actor, uint64_t tick);
  void join(const Clock& other);
  const std::vector<std::pair<uint32_t, uint64_t>>& ticks() const { return ticks_; }
  void clear() { ticks_.clear(); }

 private:
  std::vector<std::pair<uint32_t, uint64_t>> ticks_;  // by actor
};

using Past = std::shared_ptr<const Clock>;

inline constexpr uint32_t kHost = 0;

// When an operation happens: as number `tick` of its actor, after its past and after what the host
// did before its call number `host`.
struct Stamp {
  uint32_t actor = kHost;
  uint64_t tick = 0, host = 0;
  Past past;
};

// The actor that a stream, or its branch of a graph, is, and what its next operation comes after.
struct Timeline {
  uint32_t actor = kHost;
  uint64_t tick = 0;
  Clock past;
  Past shared;  // the same, for stamps; null if it has changed
  uint64_t host_version = 0;
};

// How a graph's branches become actors in its replays.
struct Branches {
  std::vector<uint64_t> lengths;
  std::vector<uint32_t> actors;
  std::vector<uint64_t> ends;  // ticks after the last replay
};

// Called while the lock is held. All do nothing if the detector is off.
bool enabled();
void enable();
void start(Timeline& timeline);
Stamp next(Timeline& timeline);
Past snapshot(Timeline& timeline);  // for an event
void join(Timeline& timeline, const Past& past);
void host_joins(const Past& past);
uint64_t host_calls();  // of the runtime, so far
void forget();          // everything so far happened before everything later

// Graphs
void start_branch(Timeline& branch, Graph& graph);
Stamp next_of_branch(Timeline& branch);
Past snapshot_of_branch(const Timeline& branch);
void end_branch(const Timeline& branch, Graph& graph);
// Set the stamps of a replay's operations; the stream goes on after all of them.
void stamp_replay(Graph& graph, Timeline& timeline, std::vector<Operation>& operations);

// Memory
void on_allocate(const Block& block, const Timeline& timeline);
void on_release(Block& block, const char* caller);
void on_reuse(const Block& block, const Operation& by);
void on_unmap(const void* begin, size_t bytes);
// Check an access of the host, `caller` its line of Python; false if an operation conflicts.
bool on_host_access(const char* p, size_t bytes, bool is_write, const char* caller);
void on_pinned_release(const char* begin, size_t bytes, const char* caller);
// Whether the host has waited for all of these.
bool host_is_after(const Clock& uses);

// The accesses of an operation while it runs, checked at its end.
class Recording {
 public:
  explicit Recording(const Operation& operation);
  ~Recording();
  void check();

 private:
  const Operation& operation_;
};

// What an operation accessed (accesses.cpp).
struct Range {
  uintptr_t begin, end;
};
struct Accesses {
  std::vector<Range> reads, writes;  // each sorted and disjoint
};
void prepare_accesses(void* base, size_t bytes);
void begin_accesses();
Accesses end_accesses();

}  // namespace races
}  // namespace pretend
