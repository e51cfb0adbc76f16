// The part of the CUDA runtime that the entries of csrc use, for the pretend GPU. Kernels run in
// the emulation of core/simt_host.h when the schedule of their stream says so.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <tuple>
#include <utility>

#include "core/simt_host.h"

using dim3 = emb::simt::Dim3;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidResourceHandle = 400,
  cudaErrorLaunchFailure = 719,
  cudaErrorStreamCaptureUnsupported = 900,
};
struct CUstream_st;
using cudaStream_t = CUstream_st*;
enum cudaMemoryType {
  cudaMemoryTypeUnregistered = 0,
  cudaMemoryTypeHost = 1,
  cudaMemoryTypeDevice = 2,
  cudaMemoryTypeManaged = 3
};
struct cudaPointerAttributes {
  cudaMemoryType type;
  int device;
  void *devicePointer, *hostPointer;
};
enum cudaMemcpyKind {
  cudaMemcpyHostToHost,
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
  cudaMemcpyDefault
};
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaFuncAttributes {
  int ptxVersion;
};
enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
union cudaLaunchAttributeValue {
  struct {
    unsigned x, y, z;
  } clusterDim;
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  cudaLaunchAttributeValue val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

// In a process whose torch has a real CUDA runtime, that runtime has these symbols already.
#define cudaGetErrorString pretend_cudaGetErrorString
#define cudaGetLastError pretend_cudaGetLastError
#define cudaPointerGetAttributes pretend_cudaPointerGetAttributes
#define cudaDeviceGetAttribute pretend_cudaDeviceGetAttribute
#define cudaFuncSetAttribute pretend_cudaFuncSetAttribute
#define cudaFuncGetAttributes pretend_cudaFuncGetAttributes
#define cudaMemsetAsync pretend_cudaMemsetAsync
#define cudaMemcpyAsync pretend_cudaMemcpyAsync

extern "C" {
const char* cudaGetErrorString(cudaError_t);
cudaError_t cudaGetLastError();
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes*, const void*);
cudaError_t cudaDeviceGetAttribute(int*, cudaDeviceAttr, int device);
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int);
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void*);
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t);
cudaError_t cudaMemcpyAsync(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t);
}

namespace pretend {

// Check a launch as the driver does and append it to its stream.
cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> body);

// Return `error` with the text that cudaGetErrorString has for it from now on.
cudaError_t fail(cudaError_t error, const std::string& text);

// Append the work of a library such as CUB to a stream; `name` is a literal.
cudaError_t enqueue(cudaStream_t stream, const char* name, std::function<void()> body);

// Tell the race detector what the running operation accesses in functions that are not
// instrumented, such as memcpy.
void note_read(const void* p, size_t bytes);
void note_write(const void* p, size_t bytes);

// The search for torch's own CUDA library must fail, so that launch.h asks the pretend GPU for the
// current stream.
inline void* find_no_library(const char*, int) { return nullptr; }

}  // namespace pretend

#define dlopen pretend::find_no_library

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  // Copied at the launch, as the driver does.
  std::tuple<std::decay_t<Parameters>...> copies(std::forward<Arguments>(arguments)...);
  const cudaLaunchConfig_t at = *config;
  const unsigned cluster = config->numAttrs == 0 ? 1 : config->attrs->val.clusterDim.x;
  const auto run = [=]() mutable {
    emb::simt::Machine::get().run(
        at.gridDim, at.blockDim, at.dynamicSmemBytes, [&] { std::apply(kernel, copies); }, cluster);
  };
  return pretend::launch(at, reinterpret_cast<const void*>(kernel), run);
}
