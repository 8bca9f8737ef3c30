#pragma once

#include <torch/csrc/stable/library.h>

namespace loco::ring_prox {

void implement_cuda(torch::stable::detail::StableLibrary& library);

}  // namespace loco::ring_prox
