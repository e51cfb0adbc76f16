// The pretend devices as torch's side and the CUDA runtime use them: memory that host code may not
// touch, and streams whose work runs as late or as early as the schedule says. See
// docs/pretend_gpu.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace pretend {

struct Event;
struct Block;

inline constexpr int kDevices = 2;

int current_device();
void set_device(int device);

// Streams have a number per device; 0 is the default stream.
int64_t new_stream(int device);
int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
void* stream_handle(int device, int64_t stream);

std::shared_ptr<Event> record(int device, int64_t stream);
void wait(int device, int64_t stream, const std::shared_ptr<Event>& event);
bool is_done(const std::shared_ptr<Event>& event);
bool is_idle(int device, int64_t stream);

// Run what precedes an event, or all work of a stream or device, and raise errors of that work.
// `what` names the wait in the counts. A capturing stream refuses.
void finish_event(const char* what, const std::shared_ptr<Event>& event);
void finish_stream(const char* what, int device, int64_t stream);
void finish_device(const char* what, int device);

// Run the work of a stream without a wait of the host, e.g. before a copy between devices.
void drain_stream(int device, int64_t stream);

enum class Reach { kOneDevice, kAllDevices };

// Append work to a stream; `name` outlives the process. `pinned` is the host memory of a copy.
void enqueue_on(int device, int64_t stream, const char* name, std::function<void()> work,
                Reach reach = Reach::kOneDevice, const void* pinned = nullptr);

// While one lives, waits of this thread are not reported: they belong to one that was.
class QuietWaits {
 public:
  QuietWaits();
  ~QuietWaits();
};

// Refuse `what` while a graph is captured.
void refuse_while_capturing(const char* what);
bool is_capturing(int device, int64_t stream);

Block* allocate(int device, int64_t stream, size_t bytes);
void* address(Block* block);
void use_on(const void* address, int64_t stream);  // record_stream
void release(Block* block);                        // in stream order
int device_of(const void* address);                // -1 for host memory

void* allocate_pinned(size_t bytes);
void release_pinned(void* address);
bool is_pinned(const void* address);
bool share_pinned(const void* address);  // with kernels, from now on

// Tell the race detector what the running operation accesses.
void note_read(const void* p, size_t bytes);
void note_write(const void* p, size_t bytes);

// While one lives, the thread may touch the memory of `device`, or of all devices if it is -1.
class Access {
 public:
  explicit Access(int device = -1);
  ~Access();

 private:
  unsigned before_;
};

// Set by torch's side: return a function that restores torch's state of this thread. A fault
// leaves an operation without running its destructors.
void set_thread_snapshot(std::function<std::function<void()>()> snapshot);

// Raise the error of earlier work or of a forbidden access by the host, once.
void check();

// Return a copy of `text` that outlives the process, the same for equal texts.
const char* interned(const std::string& text);

}  // namespace pretend
