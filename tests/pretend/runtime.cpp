// The CUDA runtime of the pretend devices: launches, copies, attributes and errors; and what Python
// sets and reads.
#include <cxxabi.h>
#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

#include "count_entries.h"
#include "cuda_runtime.h"
#include "state.h"

namespace pretend {

namespace {

constexpr size_t kDefaultSharedBytes = 48 * 1024, kMaxSharedBytes = 227 * 1024;

const char* (*python_line_callback)() = nullptr;
int (*wait_callback)(const char*) = nullptr;  // returns 1 to forbid it

thread_local int quiet_depth = 0;
thread_local const char* entry_now = nullptr;           // the last that this thread called
std::unordered_map<const void*, size_t> shared_limits;  // of kernels that asked for more
cudaError_t last_error = cudaSuccess;
std::string last_text;

// A function of the interpreter, which the process has and this library is not linked with.
template <typename Function>
Function* of_python(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
}

// Keeps the exception that this thread is raising while a callback runs Python: a tensor may be
// freed, and its line asked for, between the raise of an exception and its handler.
class ExceptionAside {
 public:
  ExceptionAside() {
    static auto* const ensure = of_python<int()>("PyGILState_Ensure");
    static auto* const fetch = of_python<void(void**, void**, void**)>("PyErr_Fetch");
    lock_ = ensure();
    fetch(&type_, &value_, &trace_);
  }
  ~ExceptionAside() {
    static auto* const restore = of_python<void(void*, void*, void*)>("PyErr_Restore");
    static auto* const release = of_python<void(int)>("PyGILState_Release");
    restore(type_, value_, trace_);
    release(lock_);
  }
  ExceptionAside(const ExceptionAside&) = delete;
  ExceptionAside& operator=(const ExceptionAside&) = delete;

 private:
  int lock_;
  void *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

bool is_forbidden(const char* wait) {
  if (wait_callback == nullptr) return false;
  const ExceptionAside aside;
  return wait_callback(wait) != 0;
}

State* make_state() {
  auto* made = new State;
  void* arenas = mmap(nullptr, (kDevices + 1) * kArenaBytes, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arenas == MAP_FAILED) throw std::runtime_error("pretend: no address range for devices");
  made->pinned_arena = static_cast<char*>(arenas) + kDevices * kArenaBytes;
  for (int device = 0; device < kDevices; ++device) {
    made->arenas[device] = static_cast<char*>(arenas) + device * kArenaBytes;
    made->protection_keys[device] = pkey_alloc(0, PKEY_DISABLE_ACCESS);
    auto stream = std::make_unique<Stream>();
    stream->device = device;
    stream->id = 0;
    races::start(stream->timeline);
    made->streams[device][0] = std::move(stream);
  }
  return made;
}

Stream& stream_of(cudaStream_t handle) {
  return handle == nullptr ? find_stream(current_device(), 0) : *reinterpret_cast<Stream*>(handle);
}

cudaError_t append(cudaStream_t handle, const char* name, std::function<void()> body, Kind kind) {
  const char* caller = python_line();
  const Lock lock(state().mutex);
  Stream& stream = stream_of(handle);
  if (stream.device != current_device()) {
    return fail(cudaErrorInvalidResourceHandle,
                "invalid resource handle: the stream is of cuda:" + std::to_string(stream.device) +
                    ", the current device is cuda:" + std::to_string(current_device()));
  }
  ++state().counts[(kind == Kind::kKernel ? "kernel " : "operation ") + std::string(name)];
  push(stream, {name, caller, std::move(body), nullptr, Reach::kOneDevice, kind});
  return cudaSuccess;
}

// The name of a kernel without its parameters; that of its entry if the kernel is local to a file.
const char* kernel_name(const void* kernel) {
  static std::unordered_map<const void*, const char*> names;
  const char*& name = names[kernel];
  if (name != nullptr) return name;
  Dl_info info{};
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr || info.dli_saddr != kernel) {
    if (entry_now == nullptr) return "a kernel";
    return interned(std::string("a kernel of ") + entry_now);
  }
  int status = 0;
  char* plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string text = status == 0 ? plain : info.dli_sname;
  std::free(plain);
  text = text.substr(0, text.find('('));
  const size_t space = text.find(' ');  // after the return type of a template
  return name = interned("kernel " + (space == std::string::npos ? text : text.substr(space + 1)));
}

std::string show(const dim3& d) {
  return "(" + std::to_string(d.x) + ", " + std::to_string(d.y) + ", " + std::to_string(d.z) + ")";
}

}  // namespace

State& state() {
  static State* made = make_state();
  return *made;
}

const char* interned(const std::string& text) {
  static std::mutex mutex;
  static std::set<std::string> texts;
  const std::lock_guard<std::mutex> lock(mutex);
  return texts.insert(text).first->c_str();
}

const char* python_line() {
  if (python_line_callback == nullptr) return "";
  const ExceptionAside aside;
  const char* line = python_line_callback();
  return line == nullptr ? "" : line;
}

QuietWaits::QuietWaits() { ++quiet_depth; }
QuietWaits::~QuietWaits() { --quiet_depth; }

bool waits_are_quiet() { return quiet_depth > 0; }

void report_wait(const char* what) {
  if (quiet_depth > 0) return;
  {
    const Lock lock(state().mutex);
    ++state().counts[std::string("wait ") + what];
  }
  if (is_forbidden(what)) {
    throw std::runtime_error(std::string("called a synchronizing CUDA operation: ") + what +
                             ", at " + python_line());
  }
}

void set_error(const std::string& text) {
  const Lock lock(state().mutex);
  if (state().error.empty()) state().error = text;
}

void check() {
  const Lock lock(state().mutex);
  if (state().error.empty()) return;
  throw std::runtime_error("CUDA error: " + std::exchange(state().error, ""));
}

void count_entry(const char* name, int calls) {
  if (calls > 0) entry_now = name;
  const Lock lock(state().mutex);
  state().entries[name] += calls;
}

cudaError_t fail(cudaError_t error, const std::string& text) {
  last_error = error;
  last_text = text;
  return error;
}

cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body) {
  return append(stream, name, std::move(body), Kind::kOther);
}

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> body) {
  const dim3 &grid = config.gridDim, &block = config.blockDim;
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 ||
      grid.z > 65535 || threads == 0 || threads > 1024 || block.z > 64) {
    return fail(cudaErrorInvalidConfiguration,
                "invalid configuration argument: grid " + show(grid) + ", block " + show(block));
  }
  if (config.numAttrs > 0) {
    const auto& cluster = config.attrs->val.clusterDim;
    if (config.numAttrs > 1 || config.attrs->id != cudaLaunchAttributeClusterDimension ||
        cluster.y != 1 || cluster.z != 1 || cluster.x == 0 || cluster.x > 8 ||
        grid.x % cluster.x != 0 || state().capability < 9) {
      return fail(cudaErrorInvalidConfiguration, "invalid configuration argument: cluster of " +
                                                     std::to_string(cluster.x) + ", grid " +
                                                     show(grid));
    }
  }
  const auto found = shared_limits.find(kernel);
  const size_t limit = found == shared_limits.end() ? kDefaultSharedBytes : found->second;
  if (config.dynamicSmemBytes > limit) {
    return fail(cudaErrorInvalidValue,
                "invalid argument: " + std::to_string(config.dynamicSmemBytes) +
                    " bytes of shared memory, " + std::to_string(limit) + " allowed");
  }
  return append(config.stream, kernel_name(kernel), std::move(body), Kind::kKernel);
}

}  // namespace pretend

using pretend::state;

extern "C" {

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : pretend::last_text.c_str();
}

cudaError_t cudaGetLastError() {
  const pretend::Lock lock(state().mutex);
  if (!state().error.empty()) {
    pretend::last_text = std::exchange(state().error, "");
    return cudaErrorLaunchFailure;
  }
  return std::exchange(pretend::last_error, cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* p) {
  auto* address = const_cast<void*>(p);
  *out = {cudaMemoryTypeUnregistered, -1, nullptr, nullptr};
  if (const int device = pretend::device_of(p); device >= 0) {
    *out = {cudaMemoryTypeDevice, device, address, nullptr};
  } else if (pretend::share_pinned(p)) {
    *out = {cudaMemoryTypeHost, pretend::current_device(), address, address};
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value =
      attribute == cudaDevAttrMultiProcessorCount ? state().multiprocessors : state().capability;
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  out->ptxVersion = state().capability * 10;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  const pretend::Lock lock(state().mutex);
  if (value < 0 || static_cast<size_t>(value) > pretend::kMaxSharedBytes) {
    return pretend::fail(cudaErrorInvalidValue, "invalid argument: more than 227 KB shared memory");
  }
  pretend::shared_limits[kernel] = static_cast<size_t>(value);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
  return pretend::enqueue(stream, "cudaMemsetAsync", [=] {
    pretend::note_write(p, bytes);
    std::memset(p, value, bytes);
  });
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  pretend::share_pinned(to);
  pretend::share_pinned(from);
  return pretend::enqueue(stream, "cudaMemcpyAsync", [=] {
    pretend::note_read(from, bytes);
    pretend::note_write(to, bytes);
    std::memcpy(to, from, bytes);
  });
}

// For Python.

void pretend_set_callbacks(const char* (*line)(), int (*wait)(const char*)) {
  pretend::python_line_callback = line;
  pretend::wait_callback = wait;
  pretend::install_fault_handler();
}

int pretend_set_schedule(const char* name, int seed) {
  static const std::unordered_map<std::string, pretend::Schedule> schedules = {
      {"eager", pretend::Schedule::kEager},
      {"lazy", pretend::Schedule::kLazy},
      {"sides_late", pretend::Schedule::kSidesLate},
      {"sides_early", pretend::Schedule::kSidesEarly},
      {"random", pretend::Schedule::kRandom},
  };
  const pretend::Lock lock(state().mutex);
  const auto found = schedules.find(name);
  if (found == schedules.end()) return 0;
  state().schedule = found->second;
  state().random.seed(static_cast<unsigned>(seed));
  return 1;
}

void pretend_set_memory(int poison, int aligned_to_end) {
  state().poison = poison;
  state().aligned_to_end = aligned_to_end != 0;
}

// From now on, accesses that nothing orders are errors.
void pretend_detect_races() {
  const pretend::Lock lock(state().mutex);
  if (pretend::races::enabled()) return;
  pretend::races::prepare_accesses(state().arenas[0],
                                   (pretend::kDevices + 1) * pretend::kArenaBytes);
  pretend::races::enable();
  state().pinned_key = pkey_alloc(0, PKEY_DISABLE_ACCESS);
  pretend::install_step_handler();
}

void pretend_set_multiprocessors(int n) { state().multiprocessors = n; }

void pretend_set_capability(int major) { state().capability = major; }

int pretend_has_protection_keys() { return state().protection_keys[0] >= 0; }

// One line per entry of csrc: its name, a tab and the number of calls.
const char* pretend_entries() {
  static std::string text;
  const pretend::Lock lock(state().mutex);
  text.clear();
  for (const auto& [name, n] : state().entries) text += name + "\t" + std::to_string(n) + "\n";
  return text.c_str();
}

// One line per kind of operation and wait: its name, a tab and how many there were.
const char* pretend_counts() {
  static std::string text;
  const pretend::Lock lock(state().mutex);
  text.clear();
  for (const auto& [name, n] : state().counts) text += name + "\t" + std::to_string(n) + "\n";
  return text.c_str();
}

void pretend_reset_counts() {
  const pretend::Lock lock(state().mutex);
  state().counts.clear();
}

int64_t pretend_live_bytes(int device) { return static_cast<int64_t>(state().live_bytes[device]); }

int pretend_num_pending() {
  const pretend::Lock lock(state().mutex);
  size_t n = 0;
  for (const auto& streams : state().streams) {
    for (const auto& [id, stream] : streams) n += stream->operations.size();
  }
  return static_cast<int>(n);
}

// Run everything; return the error that no call has raised, "" for none.
const char* pretend_settle() {
  static std::string text;
  for (int device = 0; device < pretend::kDevices; ++device) {
    for (auto& [id, stream] : state().streams[device]) pretend::drain_stream(device, id);
  }
  const pretend::Lock lock(state().mutex);
  pretend::free_reused();
  text = std::exchange(state().error, "");
  return text.c_str();
}
}
