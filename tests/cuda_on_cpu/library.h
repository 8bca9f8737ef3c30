// The devices that library.cpp and module.cpp take tensors for.
#pragma once

#include <cstdint>
#include <map>

namespace cuda_on_cpu {

// The devices of tensors, by the addresses of their data. All other tensors are on the CPU, and on any device.
inline std::map<uintptr_t, int>& device_of() {
  static std::map<uintptr_t, int> devices;
  return devices;
}

}  // namespace cuda_on_cpu
