// Queries torch and CUDA about streams.
#pragma once

namespace loco {

// Returns torch's current stream on the device, a cudaStream_t.
void* current_stream(int device_index);

// Returns whether a CUDA graph is being captured on the stream.
bool is_capturing(void* stream);

}  // namespace loco
