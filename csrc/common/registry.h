// Objects kept alive between operator calls under an integer that Python holds.
#pragma once

#include <cstdint>
#include <memory>

namespace loco {

struct Kept {
  virtual ~Kept() = default;
};

int64_t keep(std::shared_ptr<Kept> object);

// Null for an identifier that was never given or has been released.
std::shared_ptr<Kept> find_kept(int64_t id);

void release(int64_t id);

}  // namespace loco
