// What the files of the pretend GPU share: the devices, their streams and their memory.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "device.h"
#include "races.h"

namespace pretend {

constexpr size_t kPage = 4096;
constexpr size_t kArenaBytes = size_t{1} << 38;  // addresses of one device

struct Graph;

struct Event {
  int device;
  int64_t stream;
  uint64_t position;  // operations of the stream, or of its part of the graph, before the event
  Graph* graph = nullptr;
  races::Past past;  // what has happened when it has
};

enum class Kind { kKernel, kOther };

struct Operation {
  const char* name;
  const char* caller;  // the line of Python that enqueued it
  std::function<void()> work;
  std::shared_ptr<Event> waits_for;
  Reach reach = Reach::kOneDevice;
  Kind kind = Kind::kOther;
  const void* pinned = nullptr;  // host memory of a copy that torch knows of
  races::Stamp stamp;
};

struct Stream;

struct Graph {
  std::vector<Operation> operations;
  Stream* origin = nullptr;
  races::Branches branches;
};

// A block that torch has freed and its next allocation on the stream may use again.
struct Freed {
  Block* block;
  std::vector<std::shared_ptr<Event>> uses;  // of other streams, by record_stream
};

struct Stream {
  int device;
  int64_t id;
  std::deque<Operation> operations;
  uint64_t enqueued = 0, executed = 0;
  Graph* capture = nullptr;
  uint64_t captured = 0, joined = 0;  // operations in the graph, and those that others waited for
  bool held_back = false;             // by the random schedule
  races::Timeline timeline, branch;   // of the stream, and of its part of a graph
  std::vector<Freed> freed;           // if races are detected
};

struct Block {
  char* begin;   // of its pages
  size_t pages;  // in bytes
  char* data;
  size_t size;
  int device;
  int64_t stream;
  uint64_t number;
  const char* owner;  // the line of Python that allocated it
  std::set<int64_t> used_on;
  bool in_graph_pool = false;
  bool is_freed = false;
  uint64_t released = 0;  // when the host freed it, if races are detected
  const char* released_at = "";
};

struct Pinned {
  size_t pages;
  const char* owner;
  bool in_place = false;   // kernels have got its address
  bool is_closed = false;  // to the host, whose accesses are checked
  races::Clock uses;       // by operations, until the host has waited for them
};

enum class Schedule { kEager, kLazy, kSidesLate, kSidesEarly, kRandom };

struct State {
  std::recursive_mutex mutex;
  // Memory
  char* arenas[kDevices];
  char* pinned_arena;
  size_t pinned_used = 0;
  size_t arena_used[kDevices] = {};
  size_t live_bytes[kDevices] = {};
  int protection_keys[kDevices] = {-1, -1};
  std::map<char*, Block*> blocks;  // by first byte, freed ones too: a fault names them
  std::map<char*, Pinned> pinned;
  std::vector<char*> freed_pinned;  // by the host while operations may use it
  int pinned_key = -1;
  std::deque<Block*> reused;  // still mapped, so that late accesses are races and no faults
  uint64_t num_allocations = 0;
  bool aligned_to_end = true;
  int poison = 0xff;
  // Streams
  std::map<int64_t, std::unique_ptr<Stream>> streams[kDevices];
  int64_t next_stream = 1;
  Schedule schedule = Schedule::kEager;
  std::mt19937 random{1};
  std::vector<std::unique_ptr<Graph>> graphs;
  int num_captures = 0;
  // Execution
  const Operation* running = nullptr;
  std::string error;  // of an operation or of the host, until it is raised
  std::map<std::string, int64_t> counts;
  std::map<std::string, int64_t> entries;
  int multiprocessors = 4;
  int capability = 9;  // major
};

State& state();

using Lock = std::lock_guard<std::recursive_mutex>;

// Append to a stream, or to the graph that it captures. The lock is held.
void push(Stream& stream, Operation operation);
Stream& find_stream(int device, int64_t id);

// Run the streams with copies of this pinned memory, up to the last such copy. The lock is held.
void run_copies_of(const char* begin, size_t bytes);

// The block that contains `address`, also a freed one, or null.
Block* find_block(const void* address);
// Free what is kept for the race detector. Everything has run.
void free_reused();

// Pinned memory and the race detector (pinned.cpp). The lock is held, except for `on_host_fault`,
// which handles an access of the host to a closed allocation; false if `p` is no such access.
void note_pinned_use(const Operation& operation);
void unmap_pinned(char* begin);
void open_pinned();  // what the host has waited for
bool on_host_fault(char* p, void* context);
void install_step_handler();
bool describe_pinned(const char* p, char* out, size_t room);

// Return the line of Python that runs in this thread, "" for none. Takes Python's lock, so the
// caller must not hold the runtime's.
const char* python_line();

// Whether waits of this thread belong to one that was reported.
bool waits_are_quiet();

// Tell Python of a wait of the host; throw if a test forbids waits. The lock is not held.
void report_wait(const char* what);

// Say where an address is.
void describe_place(const char* p, char* out, size_t room);

// Keep the first error until someone asks for it.
void set_error(const std::string& text);

// Run work that touches device memory; throw std::runtime_error where it faults.
void run_guarded(const Operation& operation);

// Let faults of device memory become errors; again after another library took the signal.
void install_fault_handler();

// Whether this thread executes an operation.
bool on_device();

}  // namespace pretend
