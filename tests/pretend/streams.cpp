// Streams, events and graphs of the pretend devices. A stream is a queue of operations; a schedule
// says when they run. Every schedule is one that a GPU may show.
#include <stdexcept>

#include "state.h"

namespace pretend {

namespace {

// However late a stream is, memory that waits to be freed has a limited number of mappings.
constexpr size_t kMaxPending = 1000;

thread_local int device_now = 0;
thread_local int64_t stream_now[kDevices] = {};

void run(const Operation& operation, int device) {
  State& s = state();
  if (!s.error.empty() || !operation.work) return;
  const Operation* before = std::exchange(s.running, &operation);
  const int device_before = device_now;
  try {
    const Access access(operation.reach == Reach::kAllDevices ? -1 : device);
    races::Recording recording(operation);
    run_guarded(operation);
    recording.check();
  } catch (const std::exception& e) {
    set_error(std::string(operation.name) + ", enqueued at " + operation.caller + ": " + e.what());
  }
  device_now = device_before;
  s.running = before;
}

// Run the operations of a stream before `position`, and first those of others that they wait for.
void drain(Stream& stream, uint64_t position) {
  while (stream.executed < position && !stream.operations.empty()) {
    const Operation operation = std::move(stream.operations.front());
    stream.operations.pop_front();
    if (operation.waits_for) {
      Stream& other = find_stream(operation.waits_for->device, operation.waits_for->stream);
      if (&other != &stream) drain(other, operation.waits_for->position);
    }
    run(operation, stream.device);
    ++stream.executed;
  }
}

// Each stream runs some of its operations; now and then other streams are held back completely.
void run_random_part() {
  State& s = state();
  const bool new_choice = s.random() % 64 == 0;
  for (auto& streams : s.streams) {
    for (auto& [id, stream] : streams) {
      if (new_choice) stream->held_back = s.random() % 3 == 0;
      if (stream->operations.empty() || stream->held_back || s.random() % 2 == 0) continue;
      drain(*stream, stream->executed + 1 + s.random() % stream->operations.size());
    }
  }
}

void make_progress(Stream& stream) {
  const bool is_side = stream.id != 0;
  switch (state().schedule) {
    case Schedule::kEager:
      return drain(stream, stream.enqueued);
    case Schedule::kLazy:
      return;
    case Schedule::kSidesLate:
      if (!is_side) drain(stream, stream.enqueued);
      return;
    case Schedule::kSidesEarly:
      if (is_side) drain(stream, stream.enqueued);
      return;
    case Schedule::kRandom:
      return run_random_part();
  }
}

std::runtime_error capture_error(const std::string& what) {
  return std::runtime_error("CUDA error: operation not permitted when stream is capturing: " +
                            what);
}

// The host has waited. A wait inside an operation that only the pretend GPU runs at once orders
// nothing.
void join_host(const races::Past& past) {
  if (past == nullptr || waits_are_quiet()) return;
  races::host_joins(past);
  open_pinned();
}

}  // namespace

int current_device() { return device_now; }

void set_device(int device) {
  if (device >= 0 && device < kDevices) device_now = device;
}

int64_t new_stream(int device) {
  const Lock lock(state().mutex);
  auto stream = std::make_unique<Stream>();
  stream->device = device;
  stream->id = state().next_stream++;
  races::start(stream->timeline);
  const int64_t id = stream->id;
  state().streams[device][id] = std::move(stream);
  return id;
}

int64_t current_stream(int device) { return stream_now[device]; }

int64_t exchange_stream(int device, int64_t stream) {
  return std::exchange(stream_now[device], stream);
}

void* stream_handle(int device, int64_t stream) {
  const Lock lock(state().mutex);
  return stream == 0 && device == device_now ? nullptr : &find_stream(device, stream);
}

Stream& find_stream(int device, int64_t id) {
  auto& streams = state().streams[device];
  const auto found = streams.find(id);
  if (found == streams.end()) throw std::runtime_error("pretend: no such stream");
  return *found->second;
}

void push(Stream& stream, Operation operation) {
  if (stream.capture != nullptr) {
    operation.stamp = races::next_of_branch(stream.branch);
    stream.capture->operations.push_back(std::move(operation));
    ++stream.captured;
    return;
  }
  if (operation.work && operation.stamp.actor == races::kHost) {
    operation.stamp = races::next(stream.timeline);
  }
  if (races::enabled()) note_pinned_use(operation);
  stream.operations.push_back(std::move(operation));
  ++stream.enqueued;
  if (stream.operations.size() > kMaxPending) drain(stream, stream.enqueued - kMaxPending / 2);
  make_progress(stream);
}

void enqueue_on(int device, int64_t id, const char* name, std::function<void()> work, Reach reach,
                const void* pinned) {
  const char* caller = python_line();
  const Lock lock(state().mutex);
  ++state().counts[std::string("operation ") + name];
  push(find_stream(device, id),
       {name, caller, std::move(work), nullptr, reach, Kind::kOther, pinned});
}

void run_copies_of(const char* begin, size_t bytes) {
  for (auto& streams : state().streams) {
    for (auto& [id, stream] : streams) {
      uint64_t last = 0, position = stream->executed;
      for (const Operation& operation : stream->operations) {
        ++position;
        const auto* p = static_cast<const char*>(operation.pinned);
        if (p >= begin && p < begin + bytes) last = position;
      }
      drain(*stream, last);
    }
  }
}

std::shared_ptr<Event> record(int device, int64_t id) {
  const Lock lock(state().mutex);
  Stream& stream = find_stream(device, id);
  const uint64_t position = stream.capture != nullptr ? stream.captured : stream.enqueued;
  const races::Past past = stream.capture != nullptr ? races::snapshot_of_branch(stream.branch)
                                                     : races::snapshot(stream.timeline);
  return std::make_shared<Event>(Event{device, id, position, stream.capture, past});
}

void wait(int device, int64_t id, const std::shared_ptr<Event>& event) {
  const char* caller = python_line();
  const Lock lock(state().mutex);
  Stream& stream = find_stream(device, id);
  Graph* graph = event->graph;
  if (graph == nullptr && stream.capture == nullptr) {
    push(stream, {"wait", caller, nullptr, event});
    races::join(stream.timeline, event->past);
    return;
  }
  if (graph == nullptr || (stream.capture != nullptr && stream.capture != graph)) {
    throw capture_error("stream " + std::to_string(id) +
                        " of a graph waits for an event of stream " +
                        std::to_string(event->stream) + ", recorded outside the graph");
  }
  Stream& other = find_stream(event->device, event->stream);
  if (other.capture != graph) {
    throw capture_error("the event was recorded in a graph whose capture has ended");
  }
  // A graph runs in the order of its capture, which keeps to its events.
  if (stream.capture == nullptr) races::start_branch(stream.branch, *graph);
  stream.capture = graph;
  races::join(stream.branch, event->past);
  if (other.joined < event->position) other.joined = event->position;
}

bool is_done(const std::shared_ptr<Event>& event) {
  refuse_while_capturing("cudaEventQuery");
  const Lock lock(state().mutex);
  const bool done = find_stream(event->device, event->stream).executed >= event->position;
  if (done) join_host(event->past);
  return done;
}

bool is_idle(int device, int64_t id) {
  refuse_while_capturing("cudaStreamQuery");
  const Lock lock(state().mutex);
  Stream& stream = find_stream(device, id);
  const bool idle = stream.operations.empty();
  if (idle) join_host(races::snapshot(stream.timeline));
  return idle;
}

void finish_event(const char* what, const std::shared_ptr<Event>& event) {
  refuse_while_capturing(what);
  report_wait(what);
  const Lock lock(state().mutex);
  drain(find_stream(event->device, event->stream), event->position);
  join_host(event->past);
  check();
}

void finish_stream(const char* what, int device, int64_t id) {
  refuse_while_capturing(what);
  report_wait(what);
  const Lock lock(state().mutex);
  Stream& stream = find_stream(device, id);
  drain(stream, stream.enqueued);
  join_host(races::snapshot(stream.timeline));
  check();
}

void finish_device(const char* what, int device) {
  refuse_while_capturing(what);
  report_wait(what);
  const Lock lock(state().mutex);
  for (auto& [id, stream] : state().streams[device]) {
    drain(*stream, stream->enqueued);
    join_host(races::snapshot(stream->timeline));
  }
  check();
}

void drain_stream(int device, int64_t id) {
  const Lock lock(state().mutex);
  Stream& stream = find_stream(device, id);
  drain(stream, stream.enqueued);
}

void refuse_while_capturing(const char* what) {
  const Lock lock(state().mutex);
  if (state().num_captures > 0) throw capture_error(what);
}

bool is_capturing(int device, int64_t id) {
  const Lock lock(state().mutex);
  return find_stream(device, id).capture != nullptr;
}

}  // namespace pretend

// Graphs, for torch_cuda.py. A result that is not null is an error.

using pretend::state;

extern "C" {

void* pretend_begin_capture(int device, int64_t id) {
  const pretend::Lock lock(state().mutex);
  auto& stream = pretend::find_stream(device, id);
  state().graphs.push_back(std::make_unique<pretend::Graph>());
  stream.capture = state().graphs.back().get();
  stream.capture->origin = &stream;
  pretend::races::start_branch(stream.branch, *stream.capture);
  ++state().num_captures;
  return stream.capture;
}

const char* pretend_end_capture(void* graph) {
  const pretend::Lock lock(state().mutex);
  --state().num_captures;
  const char* error = nullptr;
  for (auto& streams : state().streams) {
    for (auto& [id, stream] : streams) {
      if (stream->capture != graph) continue;
      const bool is_origin = static_cast<pretend::Graph*>(graph)->origin == stream.get();
      if (!is_origin && stream->joined < stream->captured) {
        error = "CUDA error: capture sequence contains operations not joined to original stream";
      }
      pretend::races::end_branch(stream->branch, *stream->capture);
      stream->capture = nullptr;
      stream->captured = stream->joined = 0;
    }
  }
  return error;
}

void pretend_replay(void* graph, int device, int64_t id) {
  const pretend::Lock lock(state().mutex);
  auto& stream = pretend::find_stream(device, id);
  auto& captured = *static_cast<pretend::Graph*>(graph);
  auto operations = captured.operations;
  pretend::races::stamp_replay(captured, stream.timeline, operations);
  for (auto& operation : operations) pretend::push(stream, std::move(operation));
}

int pretend_is_capturing(int device, int64_t id) { return pretend::is_capturing(device, id); }
}
