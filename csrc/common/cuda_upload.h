// Bringing small tables to an NVIDIA GPU, and asking it whether all went well. Nothing here waits for it.
#pragma once

#include <cstdint>

namespace loco {

// Copies host bytes to the GPU as arguments of kernels: at once, without pinned memory, and into a graph if one is
// being captured. count is a multiple of 16, to is aligned to 16 bytes.
void upload(const unsigned char* from, unsigned char* to, int64_t count, void* stream);

// The error of the launches so far, or null.
const char* launch_error();

}  // namespace loco
