// What the two files of torch's side share.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "device.h"

namespace pretend {

inline c10::Device cuda_device(int index) {
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

c10::Allocator* device_memory();

// Return a generator of the CPU for one random operation, whose numbers follow from the state that
// a generator of a device has now; an undefined one stands for the default generator of `device`.
at::Generator generator_for_operation(at::Generator generator, int device);

}  // namespace pretend
