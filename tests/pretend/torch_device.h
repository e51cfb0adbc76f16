// What the two files of torch's side share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "device.h"

namespace pretend {

inline c10::Device cuda_device(int index) {
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

c10::Allocator* device_memory();

}  // namespace pretend
