// Makes the text of an error inside torch without streams, for the reason in check.h, also where torch's headers call
// torch: this one comes before them.
#pragma once

#include <torch/headeronly/util/shim_utils.h>
#if __has_include(<torch/csrc/stable/macros.h>)
#include <torch/csrc/stable/macros.h>
#endif

#include "common/check.h"

// torch's text of this thread's last error; null where torch is older than 2.13.
extern "C" [[gnu::weak]] const char* torch_exception_get_what_without_backtrace();

namespace loco {

// Throws torch's own text, from which callers tell that memory ran out, with the call that failed.
[[noreturn]] inline void fail_in_torch(const char* call, const char* file, int line) {
  if (torch_exception_get_what_without_backtrace == nullptr) {
    fail(call, " API call failed at ", file, ", line ", line);
  }
  fail(torch_exception_get_what_without_backtrace(), " (", call, " at ", file, ", line ", line, ")");
}

}  // namespace loco

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                  \
  if ((call) != TORCH_SUCCESS) {                      \
    ::loco::fail_in_torch(#call, __FILE__, __LINE__); \
  }

// From torch 2.14 on, torch's headers check calls by this one.
#undef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
