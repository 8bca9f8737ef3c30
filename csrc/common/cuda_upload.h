// Uploads small tables to an NVIDIA GPU, and queries CUDA. No function here synchronizes with the GPU.
#pragma once

#include <cstdint>

namespace loco {

// Copies host bytes to the GPU as kernel arguments. `from` may be changed or freed on return, need not be pinned, and
// becomes part of the CUDA graph if one is being captured. from, to: [count] bytes, contiguous; count is a multiple of
// 16, and `to` is aligned to 16 bytes.
void upload(const unsigned char* from, unsigned char* to, int64_t count, void* stream);

// Returns the text of the last launch error and clears it, or null if there is none.
const char* launch_error();

// Returns whether a CUDA graph is being captured on the stream.
bool is_capturing(void* stream);

}  // namespace loco
