// Keeps objects alive between operator calls. Python holds an integer handle to each.
#pragma once

#include <cstdint>
#include <memory>

namespace loco {

struct Registered {
  virtual ~Registered() = default;
};

// Stores the object and returns its handle, which is never 0.
int64_t register_object(std::shared_ptr<Registered> object);

// Returns null for a handle that was never issued or has been released.
std::shared_ptr<Registered> find_registered(int64_t id);

// Drops the registry's reference to the object. Does nothing if find_registered would return null.
void release(int64_t id);

}  // namespace loco
