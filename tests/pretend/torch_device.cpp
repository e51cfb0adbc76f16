// The device interfaces of torch for the pretend GPUs: current device and stream, events, device
// and pinned memory, and the hooks by which torch asks for CUDA.
#include "torch_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using pretend::cuda_device;

int index_of(Device d) { return d.has_index() ? d.index() : pretend::current_device(); }

Stream make_stream(int device, int64_t id) {
  return Stream(Stream::UNSAFE, cuda_device(device), id);
}

using EventPtr = std::shared_ptr<pretend::Event>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override {
    const Device before = getDevice();
    setDevice(d);
    return before;
  }
  Device getDevice() const override { return cuda_device(pretend::current_device()); }
  void setDevice(Device d) const override {
    if (d.has_index()) pretend::set_device(d.index());
  }
  void uncheckedSetDevice(Device d) const noexcept override { setDevice(d); }
  Stream getStream(Device d) const override {
    return make_stream(index_of(d), pretend::current_stream(index_of(d)));
  }
  Stream getDefaultStream(Device d) const override { return make_stream(index_of(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override {
    return make_stream(index_of(d), pretend::new_stream(index_of(d)));
  }
  Stream exchangeStream(Stream s) const override {
    const int device = index_of(s.device());
    return make_stream(device, pretend::exchange_stream(device, s.id()));
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return pretend::stream_handle(index_of(s.device()), s.id());
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<EventPtr*>(event);
  }
  void record(void** event, const Stream& s, const DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new EventPtr;
    *static_cast<EventPtr*>(*event) = pretend::record(index_of(s.device()), s.id());
  }
  void block(void* event, const Stream& s) const override {
    if (event != nullptr && *static_cast<EventPtr*>(event)) {
      pretend::wait(index_of(s.device()), s.id(), *static_cast<EventPtr*>(event));
    }
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || pretend::is_done(*static_cast<EventPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) pretend::finish_event("event", *static_cast<EventPtr*>(event));
  }
  DeviceIndex deviceCount() const noexcept override { return pretend::kDevices; }
  bool queryStream(const Stream& s) const override {
    return pretend::is_idle(index_of(s.device()), s.id());
  }
  void synchronizeStream(const Stream& s) const override {
    pretend::finish_stream("stream", index_of(s.device()), s.id());
  }
  bool isStreamCapturing(const Stream& s) const override {
    return pretend::is_capturing(index_of(s.device()), s.id());
  }
  void synchronizeDevice(const DeviceIndex d) const override {
    pretend::finish_device("device", d < 0 ? pretend::current_device() : d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (data.get() != nullptr) pretend::use_on(data.get(), s.id());
  }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct DeviceMemory final : c10::Allocator {
  static void free_block(void* block) { pretend::release(static_cast<pretend::Block*>(block)); }

  c10::DataPtr allocate(size_t bytes) override {
    const int device = pretend::current_device();
    if (bytes == 0) return {nullptr, cuda_device(device)};
    pretend::Block* block = pretend::allocate(device, pretend::current_stream(device), bytes);
    return {pretend::address(block), block, &free_block, cuda_device(device)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const int device = pretend::current_device();
    pretend::enqueue_on(device, pretend::current_stream(device), "copy of a storage", [=] {
      pretend::note_read(from, bytes);
      pretend::note_write(to, bytes);
      std::memcpy(to, from, bytes);
    });
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* p = bytes == 0 ? nullptr : pretend::allocate_pinned(bytes);
    return {p, p, &pretend::release_pinned, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &pretend::release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

const int allocator_registered = [] {
  c10::SetAllocator(DeviceType::CUDA, pretend::device_memory(), 100);
  return 0;
}();

// What a fault leaves behind in a thread: guards of the dispatcher and a number of threads.
const int snapshot_registered = [] {
  pretend::set_thread_snapshot([] {
    const auto keys = c10::impl::tls_local_dispatch_key_set();
    const int threads = at::get_num_threads();
    return [keys, threads] {
      c10::impl::_force_tls_local_dispatch_key_set(keys);
      if (at::get_num_threads() != threads) at::set_num_threads(threads);
    };
  });
  return 0;
}();

// Change the size of the storage of `t` as `torch.UntypedStorage.resize_` does, which a torch
// without CUDA refuses.
void resize_storage(const at::Tensor& t, int64_t bytes) {
  const c10::DeviceGuard guard(t.device());
  c10::StorageImpl* storage = t.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = pretend::device_memory()->allocate(static_cast<size_t>(bytes));
  const size_t kept = std::min(static_cast<size_t>(bytes), storage->nbytes());
  if (kept > 0) pretend::device_memory()->copy_data(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(static_cast<size_t>(bytes));
}

// A generator of a device. Each operation that takes numbers gets a generator of its own, seeded
// with the next number of `seeds` when it is enqueued: later changes of the state do not matter.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator seeds;

  DeviceGenerator(int device, at::Generator of_cpu)
      : GeneratorImpl(cuda_device(device), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        seeds(std::move(of_cpu)) {}
  uint64_t next_seed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return at::check_generator<at::CPUGeneratorImpl>(seeds)->random64();
  }
  void set_current_seed(uint64_t seed) override { seeds.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { seeds.set_offset(offset); }
  uint64_t get_offset() const override { return seeds.get_offset(); }
  uint64_t current_seed() const override { return seeds.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(seeds).seed(); }
  void set_state(const c10::TensorImpl& state) override {
    seeds.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return seeds.unsafeGetGeneratorImpl()->get_state();
  }
  DeviceGenerator* clone_impl() const override {
    return new DeviceGenerator(device().index(), seeds.clone());
  }
};

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
  static const at::Generator generators[pretend::kDevices] = {new_generator(0), new_generator(1)};
  return generators[device];
}

}  // namespace

c10::Allocator* pretend::device_memory() {
  static auto* memory = new DeviceMemory;
  return memory;
}

at::Generator pretend::generator_for_operation(at::Generator generator, int device) {
  if (!generator.defined()) generator = default_generator(device);
  if (!generator.device().is_cuda()) return generator;
  auto* of_device = static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl());
  return at::detail::createCPUGenerator(of_device->next_seed());
}

namespace at {

struct PretendHooks final : CUDAHooksInterface {
  explicit PretendHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return pretend::kDevices; }
  int getNumGPUs() const override { return pretend::kDevices; }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(pretend::current_device());
  }
  void setCurrentDevice(DeviceIndex d) const override { pretend::set_device(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    const auto before = getCurrentDevice();
    pretend::set_device(d);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return exchangeDevice(d); }
  bool isPinnedPtr(const void* p) const override { return pretend::is_pinned(p); }
  Allocator* getPinnedMemoryAllocator() const override {
    static auto* memory = new PinnedMemory;
    return memory;
  }
  Allocator* getCUDADeviceAllocator() const override { return pretend::device_memory(); }
  Device getDeviceFromPtr(void* p) const override {
    const int device = pretend::device_of(p);
    TORCH_CHECK(device >= 0, "not a device pointer");
    return cuda_device(device);
  }
  const Generator& getDefaultGenerator(DeviceIndex d) const override {
    return default_generator(d < 0 ? pretend::current_device() : d);
  }
  // The first of a device is its default one, for which torch_cuda.py makes an object of Python.
  Generator getNewGenerator(DeviceIndex d) const override {
    static bool is_made[pretend::kDevices] = {};
    const int device = d < 0 ? pretend::current_device() : d;
    return std::exchange(is_made[device], true) ? new_generator(device) : default_generator(device);
  }
  void deviceSynchronize(DeviceIndex d) const override { pretend::finish_device("device", d); }
};
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED,
                                 PretendHooks)

}  // namespace at

TORCH_LIBRARY(pretend, m) {
  m.def("resize_storage(Tensor(a!) t, int bytes) -> ()");
  m.impl("resize_storage", c10::DispatchKey::CUDA, resize_storage);
}

// Hooks that torch has made already, for a torch with CUDA or because someone asked for CUDA before
// this library was loaded, behave like these from now on.
const int hooks_replaced = [] {
  static at::PretendHooks hooks{at::CUDAHooksArgs{}};
  auto* made = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(made), static_cast<const void*>(&hooks), sizeof(void*));
  return 0;
}();

// launch.h asks for the current stream by this name, as it asks a torch with CUDA.
extern "C" int aoti_torch_get_current_cuda_stream(int32_t device, void** stream) {
  const c10::DeviceGuard guard(cuda_device(device));
  *stream = pretend::stream_handle(device, pretend::current_stream(device));
  return 0;
}
