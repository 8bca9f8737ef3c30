// Converts the arguments of a step to TensorStep structs and makes every check of memory safety.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "common/overlap.h"
#include "optim_step/step_args.h"
#include "ring_prox/penalty.h"

namespace loco::optim_step {

// The tensors of one step, read and checked.
class Gather {
 public:
  // Throws, before anything is written, unless the step can be executed. Rule: Sgd or Adam.
  template <class Rule>
  void read(const StepArgs& args);

  // Lets read_again read the gradients of further steps whose other tensors stay as they are.
  void keep_gradients();

  // Reads the gradients and hyper of such a step. Returns false, with nothing changed, unless each gradient has the
  // dtype, the sizes, the strides and the alignment of the one before, none shares memory with what is written, and
  // there are a scale and learning rates if there were. columns: of hyper.
  bool read_again(const StepArgs& args, int columns);

  const DeviceId& device() const { return device_; }

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

  struct GradLayout {
    std::vector<int64_t> sizes, strides;
    int64_t bytes;  // distance from the first byte to one past the last
  };

  // Memory from begin to one past the last byte.
  struct Interval {
    const char *begin, *end;
  };

  void read_hyper(const Tensor& hyper, int columns);
  void read_param(const StepArgs& args, size_t index);
  static void check_shapes(const TensorList& params, const Tensor& expected);
  void read_map(TensorRef map, size_t index, int64_t which);
  void read_penalty(size_t index, int64_t which);
  void read_counter(TensorRef counter, size_t index);
  void add_operand(const View& view, const char* list, size_t index, bool written, Operand& operand);
  void add_region(const View& view, const char* list, size_t index, bool written);
  Nest nest_of(const int64_t* strides, const char* list, size_t index) const;
  const Nest* keep_unless_flat(const int64_t* strides, const char* list, size_t index);
  void check_overlap() const;
  bool is_laid_out_as_before(const View& grad, size_t index) const;
  bool is_apart(const Interval& grad) const;

  DeviceId device_{};
  std::vector<TensorStep> steps_;
  Lead lead_;                       // of the parameter that is being read
  std::vector<const char*> lists_;  // names of the lists of tensors, in the order of each parameter's regions
  std::vector<Region> regions_;     // [parameter, list]
  std::deque<Nest> nests_;          // steps_ points to these
  std::vector<ring_prox::Penalty> penalties_;  // and to these
  const double* hyper_ = nullptr;
  int64_t groups_ = 0;
  bool writes_grads_ = false, has_lrs_ = false;
  std::vector<GradLayout> grad_layouts_;
  // The memory that is written, by its begin. The end is that of the longest among this one and all before it.
  std::vector<Interval> written_;
};

}  // namespace loco::optim_step
