// The devices that the host chooses between, their streams, and whose memory is whose.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

namespace cuda_on_cpu {

constexpr int kDevices = 2, kHost = -1;

struct Stream {
  int device;
};

// Null is the stream of any device.
inline int current_device = 0;
inline const void* current_stream = nullptr;

// Makes a stream of a device the current one; it is another one than before.
inline const void* change_stream(int device) {
  static Stream streams[kDevices][4];
  static unsigned changes = 0;
  Stream& stream = streams[device][++changes % 4];
  stream.device = device;
  return current_stream = &stream;
}

inline void check_stream(const char* kernel, const void* stream) {
  if (stream != current_stream) {
    fail("%s: launched on the stream %p, which is not the current one, %p", kernel, stream, current_stream);
  }
  if (stream != nullptr && static_cast<const Stream*>(stream)->device != current_device) {
    fail("%s: launched on a stream of device %d while device %d is the current one", kernel,
         static_cast<const Stream*>(stream)->device, current_device);
  }
}

// Kernels whose names contain this are built for no device; null: none are missing.
inline const char* missing_kernel = nullptr;

inline bool is_missing(const char* kernel) {
  return missing_kernel != nullptr && std::strstr(kernel, missing_kernel) != nullptr;
}

// Memory that only the host or only one device may access. AddressSanitizer reports ("use-after-poison") any other
// access; without it, nothing is seen.
class Owned {
 public:
  Owned(const void* memory, size_t size, int owner) : memory_(memory), size_(size), owner_(owner) {
    all().push_back(this);
    permit(kHost);
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() {
    unpoison();
    for (size_t i = 0; i < all().size(); ++i) {
      if (all()[i] == this) all().erase(all().begin() + static_cast<int64_t>(i));
    }
  }

  // Lets `who` access its own memory and no other.
  static void permit_all(int who) {
    for (Owned* one : all()) one->permit(who);
  }

 private:
  static std::vector<Owned*>& all() {
    static std::vector<Owned*> known;
    return known;
  }

  void unpoison() const {
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(memory_, size_);
#endif
  }

  void permit(int who) const {
    unpoison();
#if defined(__SANITIZE_ADDRESS__)
    if (who != owner_) ASAN_POISON_MEMORY_REGION(memory_, size_);
#else
    static_cast<void>(who);
#endif
  }

  const void* memory_;
  size_t size_;
  int owner_;
};

// The time in which a kernel runs on the current device.
struct OnDevice {
  OnDevice() { Owned::permit_all(current_device); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() { Owned::permit_all(kHost); }
};

}  // namespace cuda_on_cpu
