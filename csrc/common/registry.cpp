#include "common/registry.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace loco {
namespace {

struct Registry {
  std::mutex mutex;
  std::unordered_map<int64_t, std::shared_ptr<Registered>> objects;
  int64_t next = 1;
};

// The registry is never destroyed, because other static objects may release handles in their destructors.
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

}  // namespace

int64_t register_object(std::shared_ptr<Registered> object) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  r.objects.emplace(r.next, std::move(object));
  return r.next++;
}

std::shared_ptr<Registered> find_registered(int64_t id) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.objects.find(id);
  return found == r.objects.end() ? nullptr : found->second;
}

void release(int64_t id) {
  Registry& r = registry();
  std::shared_ptr<Registered> last;  // destroyed after the lock is released
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.objects.find(id);
  if (found == r.objects.end()) return;
  last = std::move(found->second);
  r.objects.erase(found);
}

}  // namespace loco
