// The part of torch's stable ABI that the CPU ops use, without torch: tensors of exactly the memory
// they need, and threads that a sanitizer understands. The unchanged ops run in a program that is
// built with AddressSanitizer, UBSan or ThreadSanitizer as a whole.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace torch::headeronly {

enum class ScalarType { Byte, Bool, Int, Long, Half, BFloat16, Float, Double };

}  // namespace torch::headeronly

namespace torch::stable {

using torch::headeronly::ScalarType;

inline int64_t size_of(ScalarType type) {
  switch (type) {
    case ScalarType::Byte:
    case ScalarType::Bool:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    default:
      return 8;
  }
}

struct Device {
  bool operator==(const Device&) const { return true; }
};

class Tensor {
 public:
  Tensor() = default;
  Tensor(std::vector<int64_t> sizes, ScalarType type) : sizes_(std::move(sizes)), type_(type) {
    data_.reset(new uint8_t[nbytes()]);
  }
  explicit Tensor(Tensor* owned) : Tensor(*owned) { delete owned; }

  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t numel() const {
    int64_t product = 1;
    for (int64_t size : sizes_) product *= size;
    return product;
  }
  int64_t element_size() const { return size_of(type_); }
  int64_t nbytes() const { return numel() * element_size(); }
  int64_t stride(int64_t) const { return 1; }
  bool is_contiguous() const { return true; }
  const Tensor* get() const { return this; }
  ScalarType scalar_type() const { return type_; }
  Device device() const { return {}; }
  const void* const_data_ptr() const { return data_.get(); }
  void* mutable_data_ptr() const { return data_.get(); }
  template <class T>
  const T* const_data_ptr() const {
    return reinterpret_cast<const T*>(data_.get());
  }
  template <class T>
  T* mutable_data_ptr() const {
    return reinterpret_cast<T*>(data_.get());
  }

 private:
  std::vector<int64_t> sizes_;
  ScalarType type_ = ScalarType::Float;
  std::shared_ptr<uint8_t[]> data_;  // shared by copies, as torch's
};

namespace detail {

inline int64_t from(ScalarType type) { return static_cast<int64_t>(type); }
template <class T>
T to(int64_t value) {
  return static_cast<T>(value);
}

}  // namespace detail

inline Tensor contiguous(const Tensor& tensor) { return tensor; }

inline void zero_(Tensor& tensor) {
  std::fill_n(tensor.mutable_data_ptr<uint8_t>(), tensor.nbytes(), uint8_t{0});
}

inline int& thread_count() {
  static int count = 1;
  return count;
}

inline uint32_t get_num_threads() { return static_cast<uint32_t>(thread_count()); }

template <class Body>
void parallel_for(int64_t begin, int64_t end, int64_t, const Body& body) {
  const int64_t n = end - begin, parts = n < thread_count() ? n : thread_count();
  std::vector<std::thread> threads;
  for (int64_t part = 0; part < parts; ++part) {
    threads.emplace_back(body, begin + n * part / parts, begin + n * (part + 1) / parts);
  }
  for (std::thread& thread : threads) thread.join();
}

using AnyFunction = void (*)();

inline std::map<std::string, AnyFunction>& registered_ops() {
  static std::map<std::string, AnyFunction> ops;
  return ops;
}

struct Library {
  explicit Library(void (*fill)(Library&)) { fill(*this); }
  template <class Function>
  void impl(const char* name, Function function) {
    registered_ops()[name] = reinterpret_cast<AnyFunction>(function);
  }
};

}  // namespace torch::stable

// Tensors here have exactly the memory they need.
inline int aoti_torch_get_storage_size(const torch::stable::Tensor* tensor, int64_t* nbytes) {
  *nbytes = tensor->nbytes();
  return 0;
}

inline int aoti_torch_get_storage_offset(const torch::stable::Tensor*, int64_t* offset) {
  *offset = 0;
  return 0;
}

using AtenTensorHandle = torch::stable::Tensor*;

inline int aoti_torch_get_dtype(const torch::stable::Tensor* tensor, int32_t* dtype) {
  *dtype = static_cast<int32_t>(tensor->scalar_type());
  return 0;
}

inline int aoti_torch_get_device_type(const torch::stable::Tensor*, int32_t* type) {
  *type = 0;
  return 0;
}

inline int aoti_torch_get_device_index(const torch::stable::Tensor*, int32_t* index) {
  *index = 0;
  return 0;
}

inline int aoti_torch_empty_strided(int64_t dims, const int64_t* sizes, const int64_t*,
                                    int32_t dtype, int32_t, int32_t, AtenTensorHandle* tensor) {
  *tensor = new torch::stable::Tensor(std::vector<int64_t>(sizes, sizes + dims),
                                      static_cast<torch::headeronly::ScalarType>(dtype));
  return 0;
}

#define TORCH_BOX(function) (function)
#define STABLE_TORCH_LIBRARY_IMPL(name, key, m)              \
  static void fill_library(torch::stable::Library& m);       \
  static const torch::stable::Library library(fill_library); \
  static void fill_library(torch::stable::Library& m)

template <class... Parts>
[[noreturn]] void fail_check(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}
#define STD_TORCH_CHECK(condition, ...)        \
  do {                                         \
    if (!(condition)) fail_check(__VA_ARGS__); \
  } while (false)
