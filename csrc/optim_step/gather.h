// Converts lists of tensors to TensorStep structs and makes every check of memory safety.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "common/overlap.h"
#include "common/stable.h"
#include "optim_step/tensor_step.h"
#include "ring_prox/held_penalty.h"

namespace loco::optim_step {

using Tensors = std::vector<Tensor>;
using Ints = std::vector<int64_t>;

// The tensors of a step other than its gradients, and the indices that link them. All lists but maps have one entry per
// parameter. Lists of states (momentum_buffers; or exp_avgs, exp_avg_sqs, max_exp_avg_sqs) and steps are empty if the
// rule has none.
struct Lists {
  Tensors params;
  Tensors states[kStates];
  Tensors steps;     // Adam's counters
  Ints group_index;  // row of hyper
  Tensors maps;
  Ints map_index;  // index into maps; -1: uniform decay
  Ints penalties;  // handles to penalties, 0: none; may be empty
  Ints ordinals;   // needed only for stochastic rounding
};

// Properties of a rule that reading its lists depends on.
struct Layout {
  const char* state_names[kStates];
  int columns;  // number of columns of hyper
};

// Reads and checks the lists of one step.
class Gather {
 public:
  // Throws, before anything is written, unless the step can be executed. hyper and maps are expected on the CPU, all
  // other tensors on the device of the first parameter. logical: stochastic rounding needs logical indices.
  void read(const Lists& lists, const Tensors& grads, const Tensor& hyper, const Layout& layout, bool grads_written,
            bool logical);

  const Place& place() const { return place_; }

  std::vector<TensorStep>& steps() { return steps_; }
  const double* hyper() const { return hyper_; }
  int64_t groups() const { return groups_; }

 private:
  // The parameter's view and the order of its dimensions in memory, which all its operands are walked in.
  struct Lead {
    View view;
    int axes;
    int8_t order[kMaxDims];
  };

  void read_hyper(const Tensor& hyper, int columns);
  void read_param(const Lists& lists, size_t index, bool logical);
  void read_map(const Tensor& map, size_t index, int64_t which);
  void read_penalty(const Ints& penalties, size_t index);
  void read_states(const Lists& lists, const Layout& layout);
  void read_steps(const Tensors& steps);
  void add_operand(const View& view, const char* list, size_t index, bool written, Operand& operand);
  void add_region(const View& view, const char* list, size_t index, bool written);
  const Nest* keep_nest(const Lead& lead, const int64_t* strides, const char* list, size_t index);
  const Nest* keep_unless_flat(const Lead& lead, const int64_t* strides, const char* list, size_t index);
  void check_overlap() const;

  Place place_{};
  std::vector<TensorStep> steps_;
  std::vector<Lead> leads_;
  std::vector<Region> regions_;
  std::vector<std::pair<const char*, size_t>> names_;
  std::deque<Nest> nests_;                                                // steps_ points to these
  std::vector<std::shared_ptr<const ring_prox::HeldPenalty>> penalties_;  // and to these
  const double* hyper_ = nullptr;
  int64_t groups_ = 0;
};

}  // namespace loco::optim_step
