// Implements torch.ops.loco_ext.optim_step_table and optim_step_table_again: the table of a step's tensors for the
// Triton kernels, which are launched from Python.
#include "optim_step/bind.h"

namespace loco::optim_step {
namespace {

constexpr int64_t kBlock = 2048;  // elements that one program steps
// Most elements whose indices, up to the end of the last block, fit into 32 bits.
constexpr int64_t kNarrow = (int64_t{1} << 31) - kBlock;

bool is_aligned(const Operand& operand) { return reinterpret_cast<uintptr_t>(operand.data) % 16 == 0; }

// Entries of the same kind share a compiled kernel. From the lowest bit: 1 + DType of parameter, gradient and states, 0
// for those that are absent, 3 bits each; whether all operands are flat; whether they also begin at 16-byte boundaries;
// whether element indices need 64 bits.
uint32_t triton_kind(const TensorStep& t, Entry&) {
  uint32_t kind = 0;
  bool flat = true, aligned = true;
  int bit = 0;
  for (const Operand* operand : {&t.w, &t.g, &t.state[0], &t.state[1], &t.state[2]}) {
    if (operand->data != nullptr) {
      kind |= (1 + static_cast<uint32_t>(operand->dtype)) << bit;
      flat = flat && operand->flat();
      aligned = aligned && is_aligned(*operand);
    }
    bit += 3;
  }
  kind |= static_cast<uint32_t>(flat) << bit | static_cast<uint32_t>(flat && aligned) << (bit + 1);
  return kind | static_cast<uint32_t>(t.numel > kNarrow) << (bit + 2);
}

// Builds the table of a step without making the step; the caller launches the kernels.
struct Triton {
  struct Prepared {
    GpuTable table;
    Tensor bytes;                 // uint8, on the CPU; written again by each further step
    std::vector<int64_t> layout;  // offsets of the sections, then kind, first chunk and number of chunks of each launch
  };

  template <class Rule>
  static void step(Gather& gather, const StepArgs& args, Prepared& prepared) {
    // The kernels read these themselves; here they are only checked.
    if (args.grad_scale) scalar_view(*args.grad_scale, "grad_scale", 0, gather.device());
    if (args.found_inf) scalar_view(*args.found_inf, "found_inf", 0, gather.device());
    GpuTable& table = prepared.table;
    const Hyper hyper = read_hyper(gather, args, Rule::columns);
    if (!refresh(table, gather.steps(), hyper)) {
      build(table, {kBlock, 1, triton_kind}, gather.steps(), hyper, Rule::has_metric);
      prepared.bytes = new_bytes(args.hyper, static_cast<int64_t>(table.bytes.size()));
      prepared.layout = {table.hyper, table.has_lrs ? table.lrs : -1, table.entries, table.nests, table.maps,
                         table.chunks};
      for (const Work& work : table.works) {
        prepared.layout.insert(prepared.layout.end(), {work.kind, work.first, work.count});
      }
    }
    std::copy(table.bytes.begin(), table.bytes.end(), static_cast<unsigned char*>(prepared.bytes.mutable_data_ptr()));
  }
};

void optim_step_table(StableIValue* stack, uint64_t, uint64_t) {
  auto cached = make_cached<Triton>(stack);
  const Triton::Prepared prepared = cached->prepared();
  stack[0] = torch::stable::detail::from(prepared.bytes);
  stack[1] = torch::stable::detail::from(prepared.layout);
  stack[2] = torch::stable::detail::from(CachedSteps<Triton>::own(std::move(cached)));
}

}  // namespace
}  // namespace loco::optim_step

STABLE_TORCH_LIBRARY_IMPL(loco_ext, CompositeExplicitAutograd, m) {
  m.impl("optim_step_table", &loco::optim_step::optim_step_table);
  m.impl("optim_step_table_again", &loco::optim_step::boxed_again<loco::optim_step::Triton>);
}
