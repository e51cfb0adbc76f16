// ATen's operations for the pretend GPUs: the kernels of the CPU on the memory of the device, when
// the stream reaches them. Shapes of results come from Meta kernels; operations without one run at
// once, and those whose shape depends on values are waits of the host, as on a GPU.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_embedding_bag_backward_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "torch_device.h"

namespace {

using at::Tensor;
using c10::Device;
using pretend::cuda_device;
using torch::jit::Stack;

int64_t stream_now(int device) { return pretend::current_stream(device); }

// Memory and copies

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, pretend::device_memory(),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, pretend::device_memory(),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// A tensor's memory as a kernel sees it: it keeps nothing alive.
struct View {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType type;

  explicit View(const Tensor& t)
      : data(t.numel() == 0 ? nullptr : const_cast<void*>(t.const_data_ptr())),
        sizes(t.sizes().vec()),
        strides(t.strides().vec()),
        type(t.scalar_type()) {}

  Tensor on_cpu() const {
    return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(type).device(at::kCPU));
  }

  // Tell the race detector of all its elements, dense parts as a whole.
  void note(bool is_write) const {
    if (data == nullptr) return;
    std::vector<std::pair<int64_t, int64_t>> outer;  // size and stride
    auto bytes = static_cast<int64_t>(c10::elementSize(type));
    const int64_t element = bytes;
    std::vector<size_t> order;
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (sizes[d] > 1 && strides[d] > 0) order.push_back(d);
    }
    std::sort(order.begin(), order.end(),
              [&](size_t a, size_t b) { return strides[a] < strides[b]; });
    for (const size_t d : order) {
      if (outer.empty() && strides[d] * element == bytes) {
        bytes *= sizes[d];
      } else {
        outer.emplace_back(sizes[d], strides[d] * element);
      }
    }
    note_each(static_cast<const char*>(data), outer, outer.size(), bytes, is_write);
  }

 private:
  static void note_each(const char* p, const std::vector<std::pair<int64_t, int64_t>>& outer,
                        size_t depth, int64_t bytes, bool is_write) {
    if (depth == 0) {
      is_write ? pretend::note_write(p, bytes) : pretend::note_read(p, bytes);
      return;
    }
    const auto [size, stride] = outer[depth - 1];
    for (int64_t i = 0; i < size; ++i) note_each(p + i * stride, outer, depth - 1, bytes, is_write);
  }
};

// Run with one thread, the one that may touch the device: others of a pool have no key to it.
template <class Work>
void run_alone(const Work& work) {
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  const int threads = at::get_num_threads();
  if (threads > 1) at::set_num_threads(1);
  try {
    work();
  } catch (...) {
    if (threads > 1) at::set_num_threads(threads);
    throw;
  }
  if (threads > 1) at::set_num_threads(threads);
}

std::function<void()> copy_of(const View& to, const View& from) {
  return [to, from] {
    from.note(false);
    to.note(true);
    run_alone([&] { to.on_cpu().copy_(from.on_cpu()); });
  };
}

void copy_between_devices(const Tensor& to, const Tensor& from) {
  const int device = to.get_device(), source = from.get_device();
  const bool same = device == source;
  const auto order = [](int before, int after) {
    pretend::wait(after, stream_now(after), pretend::record(before, stream_now(before)));
  };
  if (!same) order(source, device);
  pretend::enqueue_on(device, stream_now(device), "copy", copy_of(View(to), View(from)),
                      same ? pretend::Reach::kOneDevice : pretend::Reach::kAllDevices);
  if (!same) order(device, source);
}

void copy_to_device(const Tensor& to, const Tensor& from, bool non_blocking) {
  const int device = to.get_device();
  const void* memory = from.const_data_ptr();
  if (pretend::is_pinned(memory)) {
    pretend::enqueue_on(device, stream_now(device), "copy from pinned memory",
                        copy_of(View(to), View(from)), pretend::Reach::kOneDevice, memory);
  } else {
    pretend::refuse_while_capturing("a copy from pageable memory");
    const Tensor staged = from.clone();  // the driver reads it before the call returns
    pretend::enqueue_on(device, stream_now(device), "copy from pageable memory",
                        [staged, copy = copy_of(View(to), View(staged))] { copy(); });
  }
  if (!non_blocking) pretend::finish_stream("copy to the device", device, stream_now(device));
}

void copy_to_host(const Tensor& to, const Tensor& from, bool non_blocking) {
  const int device = from.get_device();
  const void* memory = to.const_data_ptr();
  const bool waits = !non_blocking || !pretend::is_pinned(memory);
  if (waits) pretend::refuse_while_capturing("a copy to the host");
  pretend::enqueue_on(device, stream_now(device), "copy to the host", copy_of(View(to), View(from)),
                      pretend::Reach::kOneDevice, memory);
  if (waits) pretend::finish_stream("copy to the host", device, stream_now(device));
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) return self;
  const Tensor from = src.sizes() == self.sizes() ? src : src.expand(self.sizes());
  const c10::DeviceGuard guard(self.is_cuda() ? self.device() : from.device());
  if (self.is_cuda() && from.is_cuda()) {
    copy_between_devices(self, from);
  } else if (self.is_cuda()) {
    copy_to_device(self, from, non_blocking);
  } else {
    copy_to_host(self, from, non_blocking);
  }
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  at::native::resize_(dst, self.sizes());
  Tensor to = dst;
  return to.copy_(self);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  const int device = self.get_device();
  const Tensor value = at::empty(self.sizes(), self.options().device(at::kCPU));
  pretend::refuse_while_capturing("item");
  pretend::enqueue_on(device, stream_now(device), "item",
                      [value, copy = copy_of(View(value), View(self))] { copy(); });
  pretend::finish_stream("item", device, stream_now(device));
  return value.item();
}

void record_stream(Tensor& self, c10::Stream stream) {
  const void* memory = self.storage().data_ptr().get();
  if (memory != nullptr) pretend::use_on(memory, stream.id());
}

// Those of ATen make an empty output and let its kernel resize it, which needs the host.
Tensor& arange_out(const at::Scalar& start, const at::Scalar& end, const at::Scalar& step,
                   Tensor& out) {
  const double steps = (end.toDouble() - start.toDouble()) / step.toDouble();
  const c10::DeviceGuard guard(out.device());
  at::native::resize_(out, {static_cast<int64_t>(std::ceil(steps))});
  pretend::enqueue_on(out.get_device(), stream_now(out.get_device()), "aten::arange.start_out",
                      [to = View(out), start, end, step] {
                        to.note(true);
                        run_alone([&] { to.on_cpu().copy_(at::arange(start, end, step)); });
                      });
  return out;
}

Tensor absolute(const Tensor& self) {
  Tensor out = at::empty_like(self, self.options().dtype(c10::toRealValueType(self.scalar_type())));
  return at::abs_out(out, self);
}

Tensor as_strided(const Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                  std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

// All other operations

// The shapes of their results are values on the device.
const std::set<std::string> kWaiting = {"aten::_assert_async",
                                        "aten::_unique2",
                                        "aten::bincount",
                                        "aten::equal",
                                        "aten::is_nonzero",
                                        "aten::masked_select",
                                        "aten::nonzero",
                                        "aten::unique_dim",
                                        "aten::repeat_interleave.Tensor",
                                        "aten::unique_consecutive"};

// Kernels of the CPU leave out a second result that Meta promises, which its gradient knows.
const std::set<std::string> kOtherShapes = {"aten::_embedding_bag",
                                            "aten::_embedding_bag_forward_only"};

std::string full_name(const c10::OperatorHandle& op) {
  const auto& [name, overload] = op.operator_name();
  return overload.empty() ? name : name + "." + overload;
}

bool has_mask(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (!value.isOptionalTensorList()) continue;
    for (const auto& t : value.toOptionalTensorVector()) {
      const bool is_mask =
          t && t->defined() && (t->scalar_type() == at::kBool || t->scalar_type() == at::kByte);
      if (is_mask) return true;
    }
  }
  return false;
}

bool waits_for_values(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.operator_name().name;
  return kWaiting.count(name) > 0 || kWaiting.count(full_name(op)) > 0 ||
         (name.rfind("aten::index", 0) == 0 && has_mask(arguments));
}

std::optional<Device> device_of(const c10::IValue& value) {
  if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
    return value.toTensor().device();
  }
  if (value.isTensorList()) {
    for (const Tensor& t : value.toTensorVector()) {
      if (t.defined() && t.is_cuda()) return t.device();
    }
  }
  return std::nullopt;
}

Device device_of_call(c10::ArrayRef<c10::IValue> arguments) {
  for (const auto& value : arguments) {
    if (const auto device = device_of(value)) return *device;
  }
  return cuda_device(pretend::current_device());
}

// Tensors of several devices may be compared here by what is not a kernel.
const std::set<std::string> kAnyDevices = {"aten::_has_compatible_shallow_copy_type"};

// Refuse what kernels of a GPU refuse: arguments on several devices, except numbers on the host.
// Indices and lists of tensors may be elsewhere.
void check_devices(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments) {
  const std::string& name = op.operator_name().name;
  if (name.rfind("aten::", 0) != 0 || kAnyDevices.count(name) > 0) return;
  std::optional<Device> first;
  for (const auto& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) continue;
    const Tensor& t = value.toTensor();
    if (!t.is_cuda() && t.dim() == 0) continue;
    TORCH_CHECK(!first || *first == t.device(), full_name(op),
                ": Expected all tensors to be on the same device, but found at least two devices, ",
                *first, " and ", t.device(), "!");
    first = t.device();
  }
}

Tensor as_meta(const Tensor& t) {
  return at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
}

// An argument as the work needs it later: views of tensors, anything else as it is.
struct Argument {
  enum Kind { kValue, kTensor, kList, kOptionalList } kind = kValue;
  c10::IValue value;
  std::vector<std::optional<View>> views;
  bool is_written = false;
  std::vector<Tensor> of_host;  // copies: a GPU reads what is on the host at the launch
  c10::IValue meta;

  Argument(const c10::IValue& given, const c10::AliasInfo* alias)
      : is_written(alias != nullptr && alias->isWrite()) {
    if (given.isTensor() && given.toTensor().defined()) {
      const Tensor& t = given.toTensor();
      kind = kTensor;
      add_view(t);
      meta = t.is_cuda() || t.dim() > 0 ? c10::IValue(as_meta(t)) : given;
    } else if (given.isTensorList()) {
      kind = kList;
      std::vector<Tensor> list;
      for (const Tensor& t : given.toTensorVector()) {
        add_view(t);
        list.push_back(as_meta(t));
      }
      meta = list;
    } else if (given.isOptionalTensorList()) {
      kind = kOptionalList;
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : given.toOptionalTensorVector()) {
        const bool is_given = t && t->defined();
        if (is_given) {
          add_view(*t);
        } else {
          views.emplace_back(std::nullopt);
        }
        list.push_back(is_given ? std::optional<Tensor>(as_meta(*t)) : std::nullopt);
      }
      meta = list;
    } else {
      value = given.isDevice() ? c10::IValue(Device(at::kCPU)) : given;
      meta = given.isDevice() ? c10::IValue(Device(at::kMeta)) : given;
    }
  }

  void note() const {
    for (const auto& view : views) {
      if (view) view->note(is_written);
    }
  }

  c10::IValue on_cpu() const {
    if (kind == kTensor) return views[0]->on_cpu();
    if (kind == kList) {
      std::vector<Tensor> list;
      for (const auto& view : views) list.push_back(view->on_cpu());
      return list;
    }
    if (kind == kOptionalList) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& view : views) {
        list.push_back(view ? std::optional<Tensor>(view->on_cpu()) : std::nullopt);
      }
      return list;
    }
    return value;
  }

 private:
  void add_view(const Tensor& t) {
    if (!t.is_cuda()) of_host.push_back(t.clone());
    views.emplace_back(t.is_cuda() ? t : of_host.back());
  }
};

// The argument that result `r` is an alias of, because the operation writes it. None if there is no
// such argument or if it is resized.
std::optional<Tensor> written_argument(const c10::OperatorHandle& op, size_t r,
                                       c10::ArrayRef<c10::IValue> arguments, const Tensor& like) {
  const auto& schema = op.schema();
  const auto* alias = schema.returns()[r].alias_info();
  if (!alias->isWrite()) return std::nullopt;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto* other = schema.arguments()[i].alias_info();
    const bool same = other != nullptr && other->isWrite() && *other == *alias;
    if (!same || !arguments[i].isTensor()) continue;
    const Tensor& given = arguments[i].toTensor();
    return given.sizes() == like.sizes() ? std::optional<Tensor>(given) : std::nullopt;
  }
  return std::nullopt;
}

struct Results {
  Stack values;
  std::vector<std::optional<View>> fresh;  // none for an argument that the operation writes
};

// Allocate the results of an operation like those of its Meta kernel; none if it has none.
std::optional<Results> make_results(const c10::OperatorHandle& op,
                                    const std::vector<Argument>& arguments,
                                    c10::ArrayRef<c10::IValue> given, int device) {
  Stack meta;
  for (const Argument& argument : arguments) meta.push_back(argument.meta);
  try {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &meta);
  } catch (const std::exception&) {
    return std::nullopt;
  }
  const auto& returns = op.schema().returns();
  if (meta.size() != returns.size()) return std::nullopt;
  Results results;
  for (size_t r = 0; r < meta.size(); ++r) {
    if (!meta[r].isTensor() || !meta[r].toTensor().defined()) return std::nullopt;
    const Tensor& like = meta[r].toTensor();
    if (returns[r].alias_info() != nullptr) {
      const auto written = written_argument(op, r, given, like);
      if (!written) return std::nullopt;
      results.values.emplace_back(*written);
      results.fresh.emplace_back(std::nullopt);
    } else {
      const Tensor out = at::empty_strided(like.sizes(), like.strides(),
                                           like.options().device(cuda_device(device)));
      results.values.emplace_back(out);
      results.fresh.emplace_back(View(out));
    }
  }
  return results;
}

// Append an operation to the stream of its device; false if its results are not known before.
bool enqueue(const c10::OperatorHandle& op, Stack* stack, c10::ArrayRef<c10::IValue> given,
             int device) {
  std::vector<Argument> arguments;
  for (size_t i = 0; i < given.size(); ++i) {
    arguments.emplace_back(given[i], op.schema().arguments()[i].alias_info());
  }
  auto results = make_results(op, arguments, given, device);
  if (!results) return false;
  const auto work = [op, arguments, fresh = results->fresh] {
    for (const Argument& argument : arguments) argument.note();
    for (const auto& view : fresh) {
      if (view) view->note(true);
    }
    run_alone([&] {
      Stack cpu;
      std::vector<std::pair<Tensor, Tensor>> outputs;  // of out=, and what the kernel may resize
      for (size_t i = 0; i < arguments.size(); ++i) {
        cpu.push_back(arguments[i].on_cpu());
        if (!op.schema().arguments()[i].is_out() || !cpu[i].isTensor()) continue;
        outputs.emplace_back(cpu[i].toTensor(), at::empty_like(cpu[i].toTensor()));
        cpu[i] = outputs.back().second;
      }
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &cpu);
      for (auto& [to, from] : outputs) to.copy_(from);
      for (size_t r = 0; r < fresh.size(); ++r) {
        // Meta kernels promise second outputs that kernels of the CPU sometimes leave out.
        const bool has = fresh[r] && cpu[r].toTensor().sizes() == fresh[r]->sizes;
        if (has) fresh[r]->on_cpu().copy_(cpu[r].toTensor());
      }
    });
  };
  pretend::enqueue_on(device, stream_now(device), pretend::interned(full_name(op)), work);
  stack->erase(stack->end() - static_cast<int64_t>(given.size()), stack->end());
  for (auto& value : results->values) stack->push_back(std::move(value));
  return true;
}

// Give a random operation a generator of the CPU.
void replace_generator(const c10::OperatorHandle& op, Stack* stack, int device) {
  const auto& arguments = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].name() != "generator") continue;
    c10::IValue& value =
        stack->end()[static_cast<int64_t>(i) - static_cast<int64_t>(arguments.size())];
    const at::Generator given = value.isNone() ? at::Generator() : value.toGenerator();
    value = pretend::generator_for_operation(given, device);
  }
}

void run_operation(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const auto arguments = stack->end() - static_cast<int64_t>(count);
  const Device on = device_of_call(Stack(arguments, stack->end()));
  check_devices(op, Stack(arguments, stack->end()));
  const c10::DeviceGuard guard(on);
  const int device = on.index();
  replace_generator(op, stack, device);
  const Stack given(arguments, stack->end());
  const bool waits = waits_for_values(op, given);
  const char* name = pretend::interned(full_name(op));
  const bool has_shapes = kOtherShapes.count(name) == 0;
  if (!waits && has_shapes && enqueue(op, stack, given, device)) return;
  if (waits) {
    pretend::finish_stream(name, device, stream_now(device));
  } else {
    // A GPU would not wait here, and a graph would hold it: only the pretend GPU cannot.
    pretend::refuse_while_capturing(name);
    pretend::enqueue_on(device, stream_now(device), name, nullptr);
    pretend::drain_stream(device, stream_now(device));
    pretend::check();
  }
  const pretend::QuietWaits quiet;
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("abs", absolute);
  m.impl("arange.start_out", arange_out);
  m.impl("as_strided", as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", resize_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("copy_", copy_);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("_embedding_bag_backward", at::native::_embedding_bag_backward_symint);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operation>());
}

// Operations that have a kernel for CUDA already, in a torch with CUDA all of them.
const int dense_kernels_replaced = [] {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                                __LINE__);
  static const std::set<std::string> here = {"aten::empty.memory_format",
                                             "aten::empty_strided",
                                             "aten::abs",
                                             "aten::arange.start_out",
                                             "aten::as_strided",
                                             "aten::view",
                                             "aten::_reshape_alias",
                                             "aten::unfold",
                                             "aten::resize_",
                                             "aten::set_.source_Tensor",
                                             "aten::set_.source_Storage",
                                             "aten::set_.source_Storage_storage_offset",
                                             "aten::copy_",
                                             "aten::_copy_from_and_resize",
                                             "aten::_local_scalar_dense",
                                             "aten::record_stream",
                                             "aten::_embedding_bag_backward"};
  const auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::CUDA)) {
    const std::string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    if (here.count(name) > 0 || name.rfind("aten::", 0) != 0) continue;
    library.impl(name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_operation>());
  }
  return 0;
}();
