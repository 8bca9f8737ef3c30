// Runs CUDA kernels on the CPU, so that their indexing, synchronisation and arithmetic are tested where there is no
// GPU, and under AddressSanitizer and UndefinedBehaviorSanitizer. CUDA's own headers are needed, its compiler is not:
//
//   g++ -x c++ -std=c++17 -isystem <cuda>/include -include cuda_on_cpu.h kernel.cu
//
// Threads are fibers (fiber.h): each runs until it waits at a barrier or a shuffle (block.h), then the next one does.
// In which order is chosen by CUDA_ON_CPU_ORDER=forward|reverse|eager|SEED or set_order() (launch.h), so that a missing
// barrier shows in one of them. Blocks run one after another, but with a SEED three of them at a time, in random order:
// threads of another block go on at barriers, shuffles and atomic operations. CUDA_ON_CPU_LAST_BLOCKS=N lets only the
// last N blocks of every grid run.
//
// There are two devices (devices.h). Reported with a message and abort(): barriers and shuffles that can never be
// left, waiting without end by atomic operations, lanes that are missing from their own mask, more than 48 KB of shared
// memory, launches on a stream that is not the current one or belongs to another device than the current one. Launches
// that a GPU refuses set cudaErrorInvalidConfiguration, those of kernels that missing_kernel names
// cudaErrorNoKernelImageForDevice.
//
// Static __shared__ variables hold NaN patterns when a block begins. Under AddressSanitizer they have its redzones
// instead, only one block runs at a time, and memory may belong to the host or to a device alone (Owned in devices.h).
//
// CONTRIBUTING.md lists what is not seen.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdlib>
#include <type_traits>

// These definitions must follow CUDA's headers, which define most of the names as nothing for other compilers.
#undef __shared__
#undef __launch_bounds__
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static __attribute__((used))
#else
// Only thread-local variables, including those of templates, are contiguous in memory and can be found at run time.
// `used` keeps them although the compiler sees no one write to them.
#define __shared__ static thread_local __attribute__((used))
#endif
#define __launch_bounds__(...)

#include "intrinsics.h"
#include "launch.h"
#include "runtime.h"

namespace cuda_on_cpu {

// A number for the name of a mistake, so that comparing costs kernels nothing (FNV-1a).
constexpr uint64_t hash(const char* name) {
  uint64_t number = 0xcbf29ce484222325;
  for (; *name; ++name) number = (number ^ static_cast<unsigned char>(*name)) * 0x100000001b3;
  return number;
}

// The mistake that this run makes, named by CUDA_ON_CPU_MISTAKE.
inline const uint64_t mistake = hash(std::getenv("CUDA_ON_CPU_MISTAKE") ? std::getenv("CUDA_ON_CPU_MISTAKE") : "");

}  // namespace cuda_on_cpu

#define LOCO_MISTAKE(name) (cuda_on_cpu::mistake == std::integral_constant<uint64_t, cuda_on_cpu::hash(#name)>::value)
