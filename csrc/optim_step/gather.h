// From lists of tensors to TensorStep structs, with every check of memory safety on the way.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/overlap.h"
#include "common/stable.h"
#include "optim_step/cpu.h"

namespace loco::optim_step {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

// The arguments that every rule has.
struct Lists {
  const Tensors& params;
  const Tensors& grads;
  const Ints& group_index;
  const Tensor& hyper;
  const Tensors& maps;
  const Ints& map_index;  // index into maps for each parameter, -1: uniform
  const Ints& ordinals;
};

// One list of state tensors: as long as params, or empty where the rule keeps none.
struct StateList {
  const char* name;
  const Tensors& tensors;
};

class Gather {
 public:
  Gather(const Lists& lists, int columns, bool grads_written, bool logical);

  // Call once per list, in the order of TensorStep::state.
  void add_state(const StateList& list);

  // Adam's step counts, one-element tensors: read here, incremented by count_steps.
  void add_steps(const Tensors& steps);
  void count_steps() const;

  // Throws if memory that is to be written is used twice. Call it last, before anything is written.
  void check_overlap() const;

  std::vector<TensorStep>& steps() { return steps_; }
  const double* hyper() const { return hyper_; }

 private:
  struct Lead {  // what the parameter decides for its operands
    View view;
    int axes;
    int order[64];
  };

  void add_operand(const View& view, const char* list, size_t index, Operand& operand);
  void add_region(const View& view, const char* list, size_t index, bool written);
  void set_map(const Tensor& map, size_t index, int64_t which);
  bool same_strides(const View& view, const Lead& lead) const;

  std::vector<TensorStep> steps_;
  std::vector<Lead> leads_;
  std::vector<Region> regions_;
  std::vector<std::pair<const char*, size_t>> names_;
  std::vector<View> counters_;
  const double* hyper_ = nullptr;
  int state_ = 0;
};

}  // namespace loco::optim_step
