// The wrapper of every op, and allocation of tensors. `EMB_IMPL(m, emb, tbe_lookup)` registers the
// function emb::tbe_lookup, inside the wrapper, as the op of that name. Before the call the wrapper
// rejects tensors with elements outside their storage. It changes two kinds of errors that the
// function throws, so that they name the op: failed allocations, and failed calls into torch. It
// recognises the latter by "API call failed" in the message, and adds torch's message if torch
// offers it (from 2.13 on). All other errors pass unchanged.
#pragma once

#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace emb {

// Return torch's message for the call into torch that just failed on this thread; "" for versions
// before torch 2.13, which do not expose it.
inline std::string torch_error_message() {
  using Getter = const char* (*)();
  static const auto get =
      reinterpret_cast<Getter>(dlsym(RTLD_DEFAULT, "torch_exception_get_what_without_backtrace"));
  const char* message = get == nullptr ? nullptr : get();
  return message == nullptr ? "" : message;
}

// Thrown by `allocate`; the wrapper adds the name of the op.
struct AllocationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Return a contiguous, uninitialised tensor of at most 4 dimensions on the device of `like`, of
// dtype `type`, or of the dtype of `like` without a `type`. Throws AllocationError, with the reason
// if torch gives one. On a GPU, work that is enqueued on torch's current stream after the tensor
// was freed may reuse its memory. torch's `new_empty` is not used because it looks the operator up
// by name at every call.
inline torch::stable::Tensor allocate(
    const torch::stable::Tensor& like, const std::vector<int64_t>& sizes,
    std::optional<torch::headeronly::ScalarType> type = std::nullopt) {
  constexpr size_t kMaxDims = 4;
  STD_TORCH_CHECK(sizes.size() <= kMaxDims, "emblib: tensors have at most 4 dimensions");
  int64_t strides[kMaxDims];
  uint64_t stride = 1;  // unsigned, because it may overflow; then torch returns an error
  for (size_t d = sizes.size(); d-- > 0; stride *= sizes[d] > 0 ? sizes[d] : 1)
    strides[d] = static_cast<int64_t>(stride);
  int32_t dtype = 0, device_type = 0, device_index = 0;  // codes of torch's stable ABI
  AtenTensorHandle tensor = nullptr;
  const bool is_allocated =
      aoti_torch_get_dtype(like.get(), &dtype) == 0 &&
      aoti_torch_get_device_type(like.get(), &device_type) == 0 &&
      aoti_torch_get_device_index(like.get(), &device_index) == 0 &&
      aoti_torch_empty_strided(
          static_cast<int64_t>(sizes.size()), sizes.data(), strides,
          type ? torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type)) : dtype,
          device_type, device_index, &tensor) == 0;
  if (is_allocated) return torch::stable::Tensor(tensor);
  std::string shape;
  for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  const std::string message = torch_error_message();
  throw AllocationError("can't allocate memory for a tensor of [" + shape + "] elements" +
                        (message.empty() ? "" : ": " + message));
}

// Return a tensor as `allocate` does, filled with zeros.
inline torch::stable::Tensor allocate_zeros(
    const torch::stable::Tensor& like, const std::vector<int64_t>& sizes,
    std::optional<torch::headeronly::ScalarType> type = std::nullopt) {
  torch::stable::Tensor tensor = allocate(like, sizes, type);
  torch::stable::zero_(tensor);
  return tensor;
}

// Check that the elements of a tensor lie inside its storage, which `untyped_storage().resize_()`
// may have shrunk since the tensor was created. `op` and `argument`, the position in the schema,
// are for the message. The overloads check the tensors of lists and of optional arguments.
inline void check_storage(const char* op, int argument, const torch::stable::Tensor& tensor) {
  const int64_t numel = tensor.numel();
  if (numel == 0) return;
  int64_t storage_bytes = 0, offset = 0, last_element = numel - 1;
  if (aoti_torch_get_storage_size(tensor.get(), &storage_bytes) != 0 ||
      aoti_torch_get_storage_offset(tensor.get(), &offset) != 0) {
    STD_TORCH_CHECK(false, op, ": argument ", argument, " is a tensor without a storage");
  }
  if (!tensor.is_contiguous()) {
    last_element = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d)
      last_element += (tensor.size(d) - 1) * tensor.stride(d);
  }
  const int64_t needed_bytes =
      (offset + last_element + 1) * static_cast<int64_t>(tensor.element_size());
  STD_TORCH_CHECK(needed_bytes <= storage_bytes, op, ": argument ", argument,
                  " of the schema needs ", needed_bytes, " bytes, but its storage has ",
                  storage_bytes,
                  "; it was resized or freed since the tensor was made (FSDP does so between "
                  "uses): give the storage its size back before the call");
}

// Arguments without tensors. An argument of another type needs an overload of its own.
template <class Value>
  requires std::is_arithmetic_v<Value> || std::is_enum_v<Value>
void check_storage(const char*, int, Value) {}

template <class Value>
void check_storage(const char* op, int argument, const std::vector<Value>& values) {
  for (const Value& value : values) check_storage(op, argument, value);
}

template <class Value>
void check_storage(const char* op, int argument, const std::optional<Value>& value) {
  if (value) check_storage(op, argument, *value);
}

// Entry<function, Name>::call is `function` with the checks and errors of the wrapper: it throws
// std::runtime_error, or what `function` or check_storage throws. Name::get() returns the op's
// name.
template <auto function, class Name>
struct Entry;

template <class Result, class... Arguments, Result (*function)(Arguments...), class Name>
struct Entry<function, Name> {
  static Result call(Arguments... arguments) {
    const char* op = Name::get();
    int argument = 0;
    (check_storage(op, argument++, arguments), ...);
    try {
      return function(std::forward<Arguments>(arguments)...);
    } catch (const AllocationError& error) {
      throw std::runtime_error(std::string(op) + ": " + error.what());
    } catch (const std::runtime_error& error) {
      const std::string text = error.what(), message = torch_error_message();
      if (text.find("API call failed") == std::string::npos) throw;
      throw std::runtime_error(std::string(op) + ": " +
                               (message.empty() ? text : message + " (" + text + ")"));
    } catch (const std::bad_alloc&) {
      throw std::runtime_error(std::string(op) +
                               ": can't allocate memory for its work (std::bad_alloc)");
    }
  }
};

}  // namespace emb

// Register function space::name as the implementation of op `name` in `library`, the argument of a
// STABLE_TORCH_LIBRARY_IMPL block.
#define EMB_IMPL(library, space, name)                                       \
  do {                                                                       \
    struct Name {                                                            \
      static const char* get() { return #name; }                             \
    };                                                                       \
    library.impl(#name, TORCH_BOX((&emb::Entry<&space::name, Name>::call))); \
  } while (false)
