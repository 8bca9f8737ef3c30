// The optimizer step on the CPU: w, state <- rule(w, g, state) for each element (math.h), followed by the prox of each
// filter where there is a penalty (ring_prox/math.h).
//
// w, g and states are [numel]; element i is at the offset that the operand's nest gives, or at i if it is flat
// (common/operand.h). The map is read through map_nest. hyper is [groups, columns] and lrs [groups], both contiguous.
//
// One parallel region covers all tensors and gives each thread a share. Each element, or each filter with a penalty, is
// processed independently of all others, so neither the shares nor the number of threads affects the result.
#include "optim_step/cpu.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "common/staging.h"
#include "optim_step/blocks.h"
#include "optim_step/decay_table.h"
#include "optim_step/random.h"
#include "ring_prox/filter_solver.h"

namespace loco::optim_step {
namespace {

// Work is measured in elements. kSegmentCost is the fixed cost of a tensor.
constexpr int64_t kSegmentCost = 128;
constexpr int64_t kLeastShare = 32768;  // waking a thread for less work costs more than it saves
constexpr int64_t kSmallTensor = 8192;  // tensors up to this size are not split
constexpr int64_t kSplitGranularity = 64;

// Elements begin .. end - 1 of a tensor.
struct Segment {
  int64_t tensor, begin, end;
};

using Share = std::vector<Segment>;

// Divides the tensors into one share per thread. Thread k gets the k-th slice of every tensor, as in torch's own
// operators, because what the thread has read or written in the forward and backward passes may still be in its caches.
// Small tensors go to the share with the least work. Tensors with a penalty are split between filters only.
std::vector<Share> make_shares(const TensorStep* tensors, int64_t count, int64_t threads) {
  int64_t total = 0;
  for (int64_t t = 0; t < count; ++t) total += tensors[t].numel + kSegmentCost;
  const int64_t shares = std::max<int64_t>(1, std::min(threads, total / kLeastShare));
  std::vector<Share> result(shares);
  std::vector<int64_t> cost(shares, 0);
  const auto add = [&](int64_t share, int64_t t, int64_t begin, int64_t end) {
    if (begin >= end) return;
    result[share].push_back({t, begin, end});
    cost[share] += end - begin + kSegmentCost;
  };
  for (int64_t t = 0; t < count; ++t) {
    const int64_t numel = tensors[t].numel;
    if (shares == 1 || numel <= kSmallTensor) {
      add(std::min_element(cost.begin(), cost.end()) - cost.begin(), t, 0, numel);
      continue;
    }
    const int64_t granule = tensors[t].penalty ? numel / tensors[t].filters : kSplitGranularity;
    const int64_t granules = (numel + granule - 1) / granule;
    const int64_t slice = (granules + shares - 1) / shares * granule;
    for (int64_t k = 0; k < shares; ++k) add(k, t, std::min(numel, k * slice), std::min(numel, (k + 1) * slice));
  }
  return result;
}

// State shared by all blocks of one tensor.
template <class Rule>
struct Job {
  const TensorStep* tensor;
  typename Rule::Flags flags;
  typename Rule::template Scalars<double> scalars;
  Coefficients coefficients;
  double uniform;     // the coefficient if the map is null or constant
  const void* table;  // T*, [period], or null
  int64_t period;     // the table's length
  bool fill;          // coefficients are computed block by block
  bool stochastic;    // bfloat16 operands are rounded stochastically
  double lr;
  void* metric;  // T*, output from element `origin` on; null: not needed
  int64_t origin;
};

template <typename T>
struct Workspace {
  alignas(64) T operands[2 + kStates][kBlock];  // so that vectors do not straddle two cache lines
  T coefficients[kBlock];
  int64_t elements[kBlock];
  uint32_t words[4][kBlock];
};

// Shrinks the filters of one parameter, one at a time. w and metric arguments are [numel] of one filter, contiguous.
// T: the compute dtype.
template <class Rule, typename T>
class Shrinkage {
 public:
  Shrinkage(const TensorStep& tensor, const double* row, double lr)
      : squares_(!tensor.penalty->squared.empty()), solver_(tensor.shape()) {
    const double step = Rule::prox_step(row, lr, tensor.state[0].data != nullptr);
    for (int n = 0; n < tensor.penalty->rings(); ++n) {
      plain_[n] = step * tensor.penalty->plain[n];
      if (squares_) squared_[n] = std::sqrt(step) * tensor.penalty->squared[n];
    }
  }

  // Shrinks a filter that has been updated. metric: null if the rule has none.
  void apply(T* w, const T* metric) { solver_.prox(w, metric, {plain_, squares_ ? squared_ : nullptr}, false, w); }

 private:
  const bool squares_;
  ring_prox::FilterSolver<T> solver_;
  double plain_[ring_prox::kMaxRings], squared_[ring_prox::kMaxRings];
};

template <class Rule>
class Step {
 public:
  explicit Step(const Call& call) : call_(call) {
    jobs_.reserve(call.count);
    for (int64_t i = 0; i < call.count; ++i) jobs_.push_back(make_job(call.tensors[i]));
  }

  void run_segment(const Segment& segment) const {
    call_.tensors[segment.tensor].w.dtype == DType::f64 ? run<double>(segment) : run<float>(segment);
  }

 private:
  Job<Rule> make_job(const TensorStep& t) {
    const double* row = call_.hyper + t.group * Rule::columns;
    const double lr = call_.lrs ? call_.lrs[t.group] : row[0];
    const Coefficients c = Rule::coefficients(call_.options, row, lr);
    const bool repeats = !jobs_.empty() && jobs_.back().tensor->group == t.group && jobs_.back().tensor->step == t.step;
    const auto scalars = repeats ? jobs_.back().scalars : Rule::scalars(row, lr, t.step);
    const auto flags = Rule::flags(call_.options, c.decay, t.state[0].data != nullptr, t.first);
    const bool stochastic = call_.rounding.stochastic && t.w.dtype == DType::bf16;
    Job<Rule> job{&t, flags, scalars, c, c.at(1), nullptr, 0, false, stochastic, lr, nullptr, 0};
    if (t.map == nullptr || t.numel == 0 || c.decay == Decay::none) return job;
    const Nest part = repeating_part(*t.map_nest);
    if (part.count == 0) {
      job.uniform = c.at(*t.map);
    } else if (part.length() > kTable) {
      job.fill = true;
    } else if (t.w.dtype == DType::f64) {
      set_table(job, doubles_.find_or_make(t.map, part, t.group, c));
    } else {
      set_table(job, floats_.find_or_make(t.map, part, t.group, c));
    }
    return job;
  }

  template <typename T>
  static void set_table(Job<Rule>& job, const std::vector<T>& table) {
    job.table = table.data();
    job.period = static_cast<int64_t>(table.size());
  }

  template <typename T>
  void run(const Segment& segment) const {
    const Job<Rule>& job = jobs_[segment.tensor];
    if (job.tensor->penalty && job.lr != 0) return step_filters<T>(job, segment.begin, segment.end);
    run_blocks<T>(job, segment.begin, segment.end);
  }

  // Steps one filter after another and applies its prox while it is still in the caches. Weights of another dtype or
  // that are not flat are copied to a buffer in the compute dtype meanwhile, so that they are rounded once, after the
  // prox.
  template <typename T>
  void step_filters(const Job<Rule>& job, int64_t begin, int64_t end) const {
    const TensorStep& t = *job.tensor;
    const int64_t numel = t.numel / t.filters;
    TensorStep filter_tensor = t;
    Job<Rule> filter_job = job;
    filter_job.tensor = &filter_tensor;
    std::vector<T> values, metric(Rule::has_metric ? numel : 0);
    filter_job.metric = Rule::has_metric ? metric.data() : nullptr;
    Shrinkage<Rule, T> shrinkage(t, call_.hyper + t.group * Rule::columns, job.lr);
    for (int64_t at = begin; at < end; at += numel) {
      filter_job.origin = at;
      T* const w = fetch(t.w, at, numel, values);
      if (!in_place<T>(t.w)) filter_tensor.w = {w - at, dtype_of<T>, nullptr};
      run_blocks<T>(filter_job, at, at + numel);
      shrinkage.apply(w, static_cast<const T*>(filter_job.metric));
      put_back(job, w, at, numel);
    }
  }

  // Returns `numel` elements of the operand in the compute dtype: in place, or copied to `values`.
  template <typename T>
  static T* fetch(const Operand& operand, int64_t begin, int64_t numel, std::vector<T>& values) {
    if (in_place<T>(operand)) return static_cast<T*>(operand.data) + begin;
    values.resize(numel);
    stage_in(operand, begin, numel, values.data());
    return values.data();
  }

  // Writes the weights `w`, [numel], back to the parameter unless they are there already.
  template <typename T>
  void put_back(const Job<Rule>& job, const T* w, int64_t begin, int64_t numel) const {
    const Operand& operand = job.tensor->w;
    if (in_place<T>(operand)) return;
    Workspace<T> space;
    for (int64_t i = 0; i < numel; i += kBlock) {
      const int64_t count = std::min(kBlock, numel - i);
      if (job.stochastic) draw(*job.tensor, begin + i, count, space);
      write(operand, begin + i, count, w + i, job.stochastic ? space.words[0] : nullptr);
    }
  }

  template <typename T>
  void run_blocks(const Job<Rule>& job, int64_t begin, int64_t end) const {
    if (!is_staged<T>(job)) return run_block<T>(job, begin, end - begin, nullptr);
    Workspace<T> space;
    for (int64_t at = begin; at < end; at += kBlock) run_block(job, at, std::min(kBlock, end - at), &space);
  }

  // Returns whether the update needs an operand or the coefficients in a buffer.
  template <typename T>
  bool is_staged(const Job<Rule>& job) const {
    const TensorStep& t = *job.tensor;
    bool staged = job.fill || call_.options.maximize || call_.grad_scale != 0 || !in_place<T>(t.w) || !in_place<T>(t.g);
    for (const Operand& state : t.state) staged = staged || (state.data && !in_place<T>(state));
    return staged;
  }

  // space: null if nothing is staged; count is at most kBlock otherwise.
  template <typename T>
  void run_block(const Job<Rule>& job, int64_t begin, int64_t count, Workspace<T>* space) const {
    const TensorStep& t = *job.tensor;
    const auto stage = [&](const Operand& o, int buffer) -> T* {
      if (o.data == nullptr) return nullptr;
      if (in_place<T>(o)) return static_cast<T*>(o.data) + begin;
      stage_in(o, begin, count, space->operands[buffer]);
      return space->operands[buffer];
    };
    Block<T> block{};
    block.count = count;
    block.w = stage(t.w, 0);
    block.g = space ? gradient(t.g, begin, count, space->operands[1]) : stage(t.g, 1);
    for (int k = 0; k < kStates; ++k) block.state[k] = stage(t.state[k], 2 + k);
    block.table = static_cast<const T*>(job.table);
    block.period = job.period;
    block.phase = job.table ? begin % job.period : 0;
    block.uniform = static_cast<T>(job.uniform);
    block.metric = job.metric ? static_cast<T*>(job.metric) + (begin - job.origin) : nullptr;
    if (job.fill) {
      fill_coefficients(t.map, *t.map_nest, job.coefficients, begin, count, space->coefficients);
      block.table = space->coefficients;
      block.period = count;
    }
    update(block, job.flags, Rule::template as<T>(job.scalars));
    if (space) write_back(job, begin, block, *space);
  }

  // Returns the gradient divided by grad_scale and negated to maximize. The divided gradient is written back, as
  // torch's fused optimizers do.
  template <typename T>
  const T* gradient(const Operand& g, int64_t begin, int64_t count, T* block) const {
    stage_in(g, begin, count, block);
    if (call_.grad_scale != 0) {
      blocks<T>().unscale(block, count, static_cast<T>(call_.grad_scale));
      stage_out(g, begin, count, block);
    }
    if (call_.options.maximize) blocks<T>().negate(block, count);
    return block;
  }

  // Writes the block's parameter and states back unless they are used in place.
  template <typename T>
  void write_back(const Job<Rule>& job, int64_t begin, const Block<T>& block, Workspace<T>& space) const {
    const TensorStep& t = *job.tensor;
    if (job.stochastic) draw(t, begin, block.count, space);
    const auto back = [&](const Operand& o, const T* values, int word) {
      if (o.data == nullptr || in_place<T>(o)) return;
      write(o, begin, block.count, values, job.stochastic ? space.words[word] : nullptr);
    };
    back(t.w, block.w, 0);
    for (int k = 0; k < kStates; ++k) back(t.state[k], block.state[k], 1 + k);
  }

  // Writes `values`, [count], to the operand. random: [count], words for stochastic rounding to bfloat16, or null.
  template <typename T>
  static void write(const Operand& operand, int64_t begin, int64_t count, const T* values, const uint32_t* random) {
    if constexpr (std::is_same_v<T, float>) {
      if (random != nullptr && operand.dtype == DType::bf16) {
        return for_blocks<true>(operand, begin, count, [&](void* to, int64_t at, int64_t some) {
          random_kernels().store_stochastic(values + at, random + at, static_cast<uint16_t*>(to), some);
        });
      }
    }
    stage_out(operand, begin, count, values);
  }

  // Draws random words for `count` elements into space.words.
  template <typename T>
  void draw(const TensorStep& t, int64_t begin, int64_t count, Workspace<T>& space) const {
    if (t.logical_nest == nullptr) {
      std::iota(space.elements, space.elements + count, begin);
    } else {
      for_runs(*t.logical_nest, begin, count, [&](int64_t position, int64_t offset, int64_t stride, int64_t run) {
        for (int64_t i = 0; i < run; ++i) space.elements[position + i] = offset + i * stride;
      });
    }
    uint32_t* words[4] = {space.words[0], space.words[1], space.words[2], space.words[3]};
    random_kernels().random_words(call_.rounding.key(t.ordinal), space.elements, count, words);
  }

  const Call& call_;
  std::vector<Job<Rule>> jobs_;
  DecayTables<float> floats_;
  DecayTables<double> doubles_;
};

}  // namespace

template <class Rule>
void step_cpu(const Call& call) {
  const Step<Rule> step(call);
  const std::vector<Share> shares = make_shares(call.tensors, call.count, call.threads);
  run_parallel(call.parallel_for, static_cast<int64_t>(shares.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      for (const Segment& segment : shares[k]) step.run_segment(segment);
    }
  });
}

template void step_cpu<Sgd>(const Call& call);
template void step_cpu<Adam>(const Call& call);

}  // namespace loco::optim_step
