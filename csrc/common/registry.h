// Keeps objects alive between operator calls. Python holds an integer handle to each.
#pragma once

#include <cstdint>
#include <memory>

namespace loco {

struct Kept {
  virtual ~Kept() = default;
};

// Stores the object and returns its handle, which is never 0.
int64_t keep(std::shared_ptr<Kept> object);

// Returns null for a handle that was never issued or has been released.
std::shared_ptr<Kept> find_kept(int64_t id);

// Drops the registry's reference to the object. Does nothing if find_kept would return null.
void release(int64_t id);

}  // namespace loco
