// Keeps a step's tensors, read and checked, for steps in which only gradients, hyper-parameters and scalars differ.
//
// A cached step has the addresses of parameters and states but refers to none of them: whoever makes the step again has
// to know that all lie where they did (common/same_tensors.h). Gradients are read and checked in each step.
#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "optim_step/gather.h"

namespace loco::optim_step {

// Device::Prepared: what Device::step makes from the tensors for itself and uses again.
template <class Device>
class CachedStep {
 public:
  // Throws, with nothing written, unless the step can be made.
  explicit CachedStep(const StepArgs& args) : rule_(args.rule), options_(args.options) {
    rule_ == RuleId::sgd ? gather_.read<Sgd>(args) : gather_.read<Adam>(args);
  }

  void step(const StepArgs& args) {
    rule_ == RuleId::sgd ? Device::template step<Sgd>(gather_, args, prepared_)
                         : Device::template step<Adam>(gather_, args, prepared_);
  }

  // Prepares the next steps. maps: of the step, which it reads again.
  void keep(TensorList&& maps) {
    maps_ = std::move(maps);
    gather_.keep_gradients();
  }

  // Makes a further step, unless check is true. args: grads, hyper, lrs, lr_index, grad_scale and found_inf. Returns
  // false, with nothing written, unless the gradients are laid out as before and apart from all that is written.
  bool step_again(StepArgs& args, bool check) {
    args.rule = rule_;
    args.options = options_;
    if (!gather_.read_again(args, rule_ == RuleId::sgd ? Sgd::columns : Adam::columns)) return false;
    if (!check) step(args);
    return true;
  }

  const typename Device::Prepared& prepared() const { return prepared_; }

 private:
  RuleId rule_;
  Options options_;
  Gather gather_;
  typename Device::Prepared prepared_;
  TensorList maps_;
};

// The cached steps of a device. Each belongs to a tensor, whose data it is.
template <class Device>
class CachedSteps {
 public:
  static Tensor own(std::unique_ptr<CachedStep<Device>> cached) {
    CachedStep<Device>* const step = cached.get();
    const int64_t size = sizeof *step, stride = 1;
    Tensor owner = torch::stable::from_blob(step, {&size, 1}, {&stride, 1}, torch::headeronly::DeviceType::CPU,
                                            torch::headeronly::ScalarType::Byte, &forget);
    const std::lock_guard<std::mutex> lock(all().mutex);
    all().steps.insert(cached.release());
    return owner;
  }

  static CachedStep<Device>& of(const Tensor& owner) {
    void* const data = owner.mutable_data_ptr();
    const std::lock_guard<std::mutex> lock(all().mutex);
    LOCO_CHECK(all().steps.count(data) == 1, "cached: expected the result of optim_step_cached");
    return *static_cast<CachedStep<Device>*>(data);
  }

 private:
  struct All {
    std::mutex mutex;
    std::set<void*> steps;
  };

  static All& all() {
    static All* const known = new All;  // never destroyed: tensors may be freed as the process ends
    return *known;
  }

  static void forget(void* data) {
    {
      const std::lock_guard<std::mutex> lock(all().mutex);
      all().steps.erase(data);
    }
    delete static_cast<CachedStep<Device>*>(data);
  }
};

}  // namespace loco::optim_step
