// Errors that callers of the operators see.
#pragma once

#include <cstdio>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace loco {

template <typename T>
void append_text(std::string& text, const T& part) {
  if constexpr (std::is_floating_point_v<T>) {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%g", static_cast<double>(part));
    text += digits;
  } else if constexpr (std::is_integral_v<T>) {
    text += std::to_string(part);
  } else {
    text += part;
  }
}

// Throws std::runtime_error, from which torch makes Python's RuntimeError. The text is made without streams, unlike
// that of torch's STD_TORCH_CHECK: where a compiler links the C++ library statically, there is a second one beside
// torch's, and a stream that prints a number crashes.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  throw std::runtime_error(text);
}

}  // namespace loco

// Unless the condition holds, throws an error whose text is the other arguments one after another.
#define LOCO_CHECK(condition, ...)               \
  do {                                           \
    if (!(condition)) ::loco::fail(__VA_ARGS__); \
  } while (false)
