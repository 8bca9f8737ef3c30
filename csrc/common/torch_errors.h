// Makes the text of an error inside torch without streams, for the reason in check.h, also where torch's headers call
// torch: this one comes before them.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include "common/check.h"

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call)                                            \
  if ((call) != TORCH_SUCCESS) {                                                \
    ::loco::fail(#call, " API call failed at ", __FILE__, ", line ", __LINE__); \
  }
