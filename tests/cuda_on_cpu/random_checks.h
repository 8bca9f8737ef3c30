// The frame of programs that compare the CUDA kernels with the CPU's on random calls: random numbers, elements of any
// dtype, memory at its exact size, a number made of all bits of the results, and the loop over seeds.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>

#include "common/dtype.h"

namespace loco {

using Random = std::mt19937_64;

inline int64_t below(Random& random, int64_t n) { return static_cast<int64_t>(random() % n); }
inline bool chance(Random& random, int64_t one_in) { return below(random, one_in) == 0; }
inline double unit(Random& random) { return static_cast<double>(random() >> 11) * 0x1p-53; }

inline double get(DType dtype, const void* at) {
  return with_dtype(dtype, [&](auto type) { return widened<type(), double>(*static_cast<const Stored<type()>*>(at)); });
}

inline void set(DType dtype, void* at, double value) {
  with_dtype(dtype, [&](auto type) { *static_cast<Stored<type()>*>(at) = narrowed<type()>(value); });
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

using Bytes = std::unique_ptr<unsigned char, Free>;

// Returns memory that begins at a 16-byte boundary, with nothing behind it.
inline Bytes allocate(int64_t size) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 16, size) != 0) std::abort();
  return Bytes(static_cast<unsigned char*>(memory));
}

class Digest {
 public:
  void add(const void* bytes, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      value_ = (value_ ^ static_cast<const unsigned char*>(bytes)[i]) * 0x100000001b3u;
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// Calls check(random, digest) for as many seeds as argument 2 says, from argument 1 on, and prints the digest, which
// must be the same in every order of blocks and threads. Returns the program's exit code: 1 after a check that returns
// false.
template <class Check>
int check_seeds(char** arguments, const Check& check) {
  const uint64_t first = std::strtoull(arguments[1], nullptr, 10), count = std::strtoull(arguments[2], nullptr, 10);
  Digest digest;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Random random(seed);
    if (!check(random, digest)) {
      std::printf("seed %llu: results differ\n", static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("%llu calls, %016llx\n", static_cast<unsigned long long>(count),
              static_cast<unsigned long long>(digest.value()));
  return 0;
}

}  // namespace loco
