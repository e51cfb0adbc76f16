// Sparse tensors on the pretend GPUs. What only looks at indices and values uses torch's kernels;
// any other operation runs on copies in host memory, as one whose result depends on values.
#include <ATen/ATen.h>
#include <ATen/SparseTensorImpl.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "torch_device.h"

namespace {

using at::Tensor;
using torch::jit::Stack;

Tensor with_parts(const Tensor& like, const Tensor& indices, const Tensor& values) {
  return at::_sparse_coo_tensor_unsafe(indices, values, like.sizes(),
                                       values.options().layout(at::kSparse))
      ._coalesced_(like.is_coalesced());
}

Tensor move_to(const Tensor& t, c10::Device device) {
  if (!t.defined() || (t.is_cuda() == device.is_cuda() && t.device().type() == device.type())) {
    return t;
  }
  if (!t.is_sparse()) return t.to(device);
  return with_parts(t, t._indices().to(device), t._values().to(device));
}

c10::IValue move_value(const c10::IValue& value, c10::Device device) {
  if (value.isTensor()) return move_to(value.toTensor(), device);
  if (value.isDevice()) return device;
  if (!value.isTensorList()) return value;
  std::vector<Tensor> list;
  for (const Tensor& t : value.toTensorVector()) list.push_back(move_to(t, device));
  return list;
}

// Give a tensor of the device the contents of its copy, which an operation has changed.
void assign(const Tensor& to, const Tensor& host) {
  if (!to.is_sparse()) {
    Tensor dense = to;
    dense.copy_(host);
    return;
  }
  auto* sparse = static_cast<at::SparseTensorImpl*>(to.unsafeGetTensorImpl());
  sparse->raw_resize_(host.sparse_dim(), host.dense_dim(), host.sizes());
  sparse->set_indices_and_values_unsafe(host._indices().to(to.device()),
                                        host._values().to(to.device()));
  sparse->set_coalesced(host.is_coalesced());
}

bool is_written(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

c10::Device device_of_call(const Stack& arguments) {
  for (const auto& value : arguments) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) {
      return value.toTensor().device();
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return value.toDevice();
  }
  return pretend::cuda_device(pretend::current_device());
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  const Stack given(stack->end() - static_cast<int64_t>(count), stack->end());
  stack->erase(stack->end() - static_cast<int64_t>(count), stack->end());
  const c10::Device device = device_of_call(given);
  const c10::DeviceGuard guard(device);
  pretend::finish_stream(pretend::interned(schema.name()), device.index(),
                         pretend::current_stream(device.index()));
  const pretend::QuietWaits quiet;
  const c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  Stack host;
  for (const auto& value : given) host.push_back(move_value(value, c10::Device(at::kCPU)));
  Stack results = host;
  op.callBoxed(&results);
  for (size_t i = 0; i < count; ++i) {
    if (!is_written(schema.arguments()[i].alias_info()) || !given[i].isTensor()) continue;
    if (given[i].toTensor().is_cuda()) assign(given[i].toTensor(), host[i].toTensor());
  }
  for (size_t r = 0; r < results.size(); ++r) {
    if (!is_written(schema.returns()[r].alias_info())) {
      stack->push_back(move_value(results[r], device));
      continue;
    }
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (is_written(alias) && *alias == *schema.returns()[r].alias_info()) {
        stack->push_back(given[i]);
      }
    }
  }
}

// The constructors make tensors on the current device.

Tensor empty_sparse(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                    std::optional<at::Layout> layout, std::optional<c10::Device> device,
                    std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::native::empty_sparse_symint(size, dtype, layout, device, pin, format);
}

Tensor with_dims(int64_t sparse_dim, int64_t dense_dim, c10::IntArrayRef size,
                 std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                 std::optional<c10::Device> device, std::optional<bool> pin) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::native::new_with_dims_sparse(sparse_dim, dense_dim, size, dtype, layout, device, pin);
}

Tensor with_tensors(int64_t sparse_dim, int64_t dense_dim, c10::SymIntArrayRef size,
                    const Tensor& indices, const Tensor& values,
                    std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                    std::optional<c10::Device>, std::optional<bool> pin,
                    std::optional<bool> is_coalesced) {
  const c10::DeviceGuard guard(values.device());
  return at::native::new_with_dims_and_tensor_sparse_symint(sparse_dim, dense_dim, size, indices,
                                                            values, dtype, layout, values.device(),
                                                            pin, is_coalesced);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparseCUDA, m) {
  m.impl("empty.memory_format", empty_sparse);
  m.impl("_sparse_coo_tensor_with_dims", with_dims);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", with_tensors);
  m.impl("_indices", at::native::_indices_sparse);
  m.impl("indices", at::native::indices_sparse);
  m.impl("_values", at::native::_values_sparse);
  m.impl("values", at::native::values_sparse);
  m.impl("_nnz", at::native::_nnz_sparse);
  m.impl("sparse_dim", at::native::sparse_dim_sparse);
  m.impl("dense_dim", at::native::dense_dim_sparse);
  m.impl("_dimI", at::native::sparse_dim_sparse);
  m.impl("_dimV", at::native::dense_dim_sparse);
  m.impl("is_coalesced", at::native::is_coalesced_sparse);
  m.impl("_coalesced_", at::native::_coalesced_sparse_);
}

// What has a kernel for sparse tensors of the CPU; torch's general kernels would take their place.
const int sparse_kernels_replaced = [] {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::SparseCUDA,
                                __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : dispatcher.getRegistrationsForDispatchKey(c10::DispatchKey::SparseCPU)) {
    const std::string name = op.overload_name.empty() ? op.name : op.name + "." + op.overload_name;
    const auto found = dispatcher.findSchema(op);
    if (name.rfind("aten::", 0) != 0 ||
        found->hasKernelForDispatchKey(c10::DispatchKey::SparseCUDA)) {
      continue;
    }
    library.impl(name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
  return 0;
}();
