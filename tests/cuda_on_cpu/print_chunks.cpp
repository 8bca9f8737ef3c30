// Prints the chunks that the CUDA step divides float32 tensors into, one line each: tensor, first element, end.
// The arguments are the tensors' numbers of elements.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "optim_step/gpu_table.h"

int main(int argc, char** argv) {
  using namespace loco;
  using namespace loco::optim_step;
  alignas(16) static float memory[4];  // nothing reads the elements themselves
  std::vector<TensorStep> tensors(argc - 1);
  for (int i = 0; i + 1 < argc; ++i) {
    tensors[i].numel = std::atoll(argv[i + 1]);
    tensors[i].w = tensors[i].g = {memory, DType::f32, nullptr};
  }
  const double row[] = {0, 0, 0, 0};
  GpuTable table;
  build(table, kCudaDivision, tensors, {row, 1, 4, {}}, false);
  const auto* const chunks = reinterpret_cast<const Chunk*>(table.bytes.data() + table.chunks);
  for (int64_t k = 0; k < (table.works.empty() ? 0 : table.works[0].count); ++k) {
    const Chunk& chunk = chunks[k];
    const int64_t begin = chunk.index * kPart, end = begin + chunk.parts * kPart;
    std::printf("%d %ld %ld\n", chunk.entry, begin, std::min(end, tensors[chunk.entry].numel));
  }
}
