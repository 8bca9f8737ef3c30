// What torch and CUDA say of the current GPU.
#pragma once

namespace loco {

// torch's current stream on the device, a cudaStream_t.
void* current_stream(int device_index);

// Whether a CUDA graph is being captured on the stream.
bool is_capturing(void* stream);

}  // namespace loco
