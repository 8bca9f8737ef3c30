// The CUDA optimizer step against the CPU's, both on the CPU, on random calls: argument 1 is the first seed, 2 the
// number of calls. They are the same bit by bit but for parameters that a penalty shrinks, whose last bits depend on
// the order of sums; zeros are the same there. Every tensor has its own memory of exactly its size, so that a sanitizer
// sees accesses beside it. Prints a number made of all bits of the results, which must be the same in every order of
// blocks and threads.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "common/cuda_upload.h"
#include "optim_step/cpu.h"
#include "optim_step/cuda.h"
#include "random_checks.h"

namespace {

using namespace loco;
using namespace loco::optim_step;

// Elements from a random element on behind a 16-byte boundary, with nothing behind them.
class Storage {
 public:
  Storage(Random& random, DType dtype, int64_t elements, bool shifted)
      : size_(elements * element_size(dtype)),
        shift_(shifted ? below(random, 8) * element_size(dtype) : 0),
        memory_(allocate(shift_ + size_)) {}
  char* data() const { return reinterpret_cast<char*>(memory_.get()) + shift_; }
  void copy_from(const Storage& other) const {
    if (size_ > 0) std::memcpy(data(), other.data(), size_);
  }
  bool equals(const Storage& other) const { return size_ == 0 || std::memcmp(data(), other.data(), size_) == 0; }
  int64_t size() const { return size_; }

 private:
  int64_t size_, shift_;
  Bytes memory_;
};

void fill(Random& random, DType dtype, const Storage& storage, int64_t elements, bool positive, double scale) {
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < elements; ++i) {
    const double drawn = scale * normal(random);
    set(dtype, storage.data() + i * element_size(dtype), positive ? drawn * drawn + 0.1 : drawn);
  }
}

// Two copies of a call's tensors: what the CPU's kernels step, and what the GPU's do.
struct Twins {
  std::vector<TensorStep> cpu, gpu;
  std::deque<Storage> cpu_storages, gpu_storages;
  std::deque<Nest> nests;
  std::deque<std::vector<double>> maps;
  std::deque<ring_prox::Penalty> penalties;
  std::vector<int> shrunk;  // numbers of the memory of their parameters
};

// Three dimensions, walked from the last; the operand's own order of dimensions and gaps are random.
struct Shape {
  int64_t sizes[3];
  int64_t numel() const { return sizes[0] * sizes[1] * sizes[2]; }
};

const Nest* random_nest(Random& random, const Shape& shape, Twins& twins, int64_t& elements) {
  elements = shape.numel();
  if (!chance(random, 4) || elements == 0) return nullptr;
  int order[3] = {0, 1, 2};
  for (int i = 2; i > 0; --i) std::swap(order[i], order[below(random, i + 1)]);
  int64_t stride = 1 + below(random, 2), strides[3];
  for (const int d : order) strides[d] = stride, stride *= shape.sizes[d];
  Nest nest{};
  for (int d = 2; d >= 0; --d) {
    if (shape.sizes[d] > 1) nest.axes[nest.count++] = {shape.sizes[d], strides[d]};
  }
  elements = 1;
  for (int a = 0; a < nest.count; ++a) elements += (nest.axes[a].size - 1) * nest.axes[a].stride;
  if (nest.flat()) return nullptr;
  twins.nests.push_back(nest);
  return &twins.nests.back();
}

void add_operand(Random& random, DType dtype, const Shape& shape, bool positive, double scale, Twins& twins,
                 Operand& cpu, Operand& gpu) {
  int64_t elements;
  const Nest* nest = random_nest(random, shape, twins, elements);
  const bool shifted = chance(random, 4);
  twins.cpu_storages.emplace_back(random, dtype, elements, shifted);
  twins.gpu_storages.emplace_back(random, dtype, elements, shifted);
  fill(random, dtype, twins.cpu_storages.back(), elements, positive, scale);
  twins.gpu_storages.back().copy_from(twins.cpu_storages.back());
  cpu = {twins.cpu_storages.back().data(), dtype, nest};
  gpu = {twins.gpu_storages.back().data(), dtype, nest};
}

void add_map(Random& random, const Shape& shape, Twins& twins, TensorStep& t) {
  t.map = nullptr;
  t.map_nest = nullptr;
  if (chance(random, 3)) return;
  Nest nest{};
  int64_t values = 1;
  for (int d = 2; d >= 0; --d) {
    if (shape.sizes[d] == 1) continue;
    const bool broadcast = chance(random, 2);
    nest.axes[nest.count++] = {shape.sizes[d], broadcast ? 0 : values};
    if (!broadcast) values *= shape.sizes[d];
  }
  std::vector<double>& map = twins.maps.emplace_back();
  for (int64_t i = 0; i < values; ++i) map.push_back(0.25 * static_cast<double>(1 + below(random, 8)));
  twins.nests.push_back(nest);
  t.map = map.data();
  t.map_nest = &twins.nests.back();
}

// Returns random thresholds, some zero. A step multiplies them by its learning rate, which brings them to the order of
// the groups' norms.
std::vector<double> thresholds(Random& random, int64_t count, double size) {
  std::vector<double> values;
  const auto parts = static_cast<double>(count);
  for (int64_t n = 0; n < count; ++n) values.push_back(chance(random, 4) ? 0 : size * unit(random) / parts);
  return values;
}

void add_penalty(Random& random, const Shape& shape, Twins& twins, TensorStep& t) {
  if (shape.numel() == 0 || !chance(random, 2)) return;
  t.filters = shape.sizes[0];
  t.channels_fastest = chance(random, 2);
  const int64_t taps = shape.sizes[t.channels_fastest ? 1 : 2];
  const auto numel = static_cast<double>(shape.numel() / t.filters);
  const int rings = static_cast<int>(chance(random, 20) ? ring_prox::kMaxRings : 1 + below(random, 6));
  ring_prox::Penalty& penalty = twins.penalties.emplace_back();
  for (int64_t k = 0; k < taps; ++k) penalty.ring_of_tap.push_back(static_cast<int>(below(random, rings)));
  const double size = std::sqrt(numel);
  const bool shrinks = !chance(random, 5);
  penalty.plain = thresholds(random, rings, shrinks ? 8 * size : 0);
  if (chance(random, 3)) penalty.squared = thresholds(random, rings, shrinks ? 1 : 0);
  t.penalty = &penalty;
}

bool shrinks(const ring_prox::Penalty* penalty) {
  const auto any = [](const std::vector<double>& of) {
    return std::any_of(of.begin(), of.end(), [](double t) { return t != 0; });
  };
  return penalty != nullptr && (any(penalty->plain) || any(penalty->squared));
}

struct Settings {
  bool adam;
  DType w, g, state;
  int states;
  Options options;
  Rounding rounding;
  double grad_scale;
  bool found_inf;
};

void add_tensor(Random& random, const Settings& s, int64_t groups, Twins& twins) {
  static const int64_t sizes[] = {1, 1, 2, 3, 5, 9, 16, 33, 100};
  Shape shape;
  for (int64_t& size : shape.sizes) size = sizes[below(random, 9)];
  if (shape.numel() > 4 * kChunk) shape.sizes[0] = 1 + below(random, 3);
  if (chance(random, 12)) shape.sizes[1] = 0;
  if (chance(random, 12)) shape = {{1, 1, 8192 + below(random, 9000)}};
  if (chance(random, 12)) shape = {{2, 9, 1150}};  // with a penalty more than shared memory holds
  TensorStep cpu{}, gpu{};
  cpu.numel = shape.numel();
  cpu.group = below(random, groups);
  cpu.first = !s.adam && s.states > 0 && chance(random, 4);
  cpu.step = s.adam ? static_cast<double>(1 + below(random, 100)) : 0;
  cpu.ordinal = static_cast<uint32_t>(random());
  int64_t unused;
  cpu.logical_nest = s.rounding.stochastic ? random_nest(random, {{3, 5, 7}}, twins, unused) : nullptr;
  if (cpu.logical_nest != nullptr && cpu.numel != 105) cpu.logical_nest = nullptr;
  add_map(random, shape, twins, cpu);
  add_penalty(random, shape, twins, cpu);
  if (shrinks(cpu.penalty)) twins.shrunk.push_back(static_cast<int>(twins.cpu_storages.size()));
  gpu = cpu;
  // Some steps are zero, and some are so small that quotients and their remainders underflow.
  const double scale = !chance(random, 4) ? 1 : chance(random, 4) ? 0 : 0x1p-125;
  add_operand(random, s.w, shape, false, scale, twins, cpu.w, gpu.w);
  add_operand(random, s.g, shape, false, scale, twins, cpu.g, gpu.g);
  for (int k = 0; k < s.states; ++k) {
    add_operand(random, s.state, shape, k > 0, scale, twins, cpu.state[k], gpu.state[k]);
  }
  if (s.adam) {
    gpu.counter_dtype = chance(random, 2) ? DType::f64 : DType::f32;
    twins.cpu_storages.emplace_back(random, gpu.counter_dtype, 1, true);
    twins.gpu_storages.emplace_back(random, gpu.counter_dtype, 1, true);
    for (const auto& [memory, count] : {std::pair(&twins.gpu_storages.back(), cpu.step - 1),
                                        std::pair(&twins.cpu_storages.back(), s.found_inf ? cpu.step - 1 : cpu.step)}) {
      set(gpu.counter_dtype, memory->data(), count);
    }
    gpu.counter = twins.gpu_storages.back().data();
  }
  twins.cpu.push_back(cpu);
  twins.gpu.push_back(gpu);
}

Settings random_settings(Random& random) {
  static const DType types[] = {DType::f32, DType::f32, DType::bf16, DType::bf16, DType::f16, DType::f64};
  Settings s;
  s.adam = chance(random, 2);
  s.w = types[below(random, 6)];
  s.g = chance(random, 4) ? types[below(random, 6)] : s.w;
  s.state = chance(random, 4) ? types[below(random, 6)] : chance(random, 3) ? DType::f32 : s.w;
  s.states = static_cast<int>(s.adam ? 2 + below(random, 2) : below(random, 2));
  s.options = {chance(random, 2), chance(random, 3), chance(random, 2), s.states == 3, chance(random, 2)};
  s.options.l1 = s.options.l1 && !(s.adam && s.options.decoupled);
  s.rounding = {chance(random, 2), random(), static_cast<uint32_t>(random())};
  s.grad_scale = chance(random, 4) ? 4.0 : 0.0;
  s.found_inf = chance(random, 10);
  return s;
}

// One row of hyper-parameters for each group; the second has no decay, the third its learning rate elsewhere.
std::vector<double> rows(bool adam) {
  if (adam) return {0.05, 0.3, 0.9, 0.99, 1e-8, 0.02, 0, 0.4, 0.9, 1e-6, 0.5, 0.1, 0, 0.5, 1e-3};
  return {0.05, 0.3, 0.9, 0.1, 0.02, 0, 0.5, 0, 0.5, 0.1, 0.9, 0};
}

void run_serially(int64_t begin, int64_t end, int64_t, void (*body)(int64_t, int64_t, void*), void* context) {
  body(begin, end, context);
}

template <class Rule>
void step_on_cpu(const Settings& s, const std::vector<double>& hyper, const double* lrs, const Twins& twins) {
  if (s.found_inf) return;
  Call call;
  call.tensors = twins.cpu.data();
  call.count = static_cast<int64_t>(twins.cpu.size());
  call.hyper = hyper.data();
  call.lrs = lrs;
  call.options = s.options;
  call.grad_scale = s.grad_scale;
  call.rounding = s.rounding;
  call.parallel_for = run_serially;
  call.threads = 1;
  step_cpu<Rule>(call);
}

template <class Rule>
void step_on_gpu(const Settings& s, const std::vector<double>& hyper, const std::vector<DeviceScalar>& lrs,
                 const Twins& twins) {
  GpuTable table;
  build(table, kCudaDivision, twins.gpu, {hyper.data(), 3, Rule::columns, lrs}, Rule::has_metric);
  const auto size = static_cast<int64_t>(table.bytes.size());
  const Bytes memory = allocate(size), scratch = allocate(scratch_bytes<Rule>(table));
  upload(table.bytes.data(), memory.get(), size, nullptr);
  const double scale = s.grad_scale;
  const float found = s.found_inf ? 1 : 0;
  const cuda_on_cpu::Owned table_on_host(table.bytes.data(), table.bytes.size(), cuda_on_cpu::kHost);
  const cuda_on_cpu::Owned hyper_on_host(hyper.data(), hyper.size() * sizeof(double), cuda_on_cpu::kHost);
  std::deque<cuda_on_cpu::Owned> of_tensors;
  for (const Storage& storage : twins.gpu_storages) of_tensors.emplace_back(storage.data(), storage.size(), 0);
  for (const Storage& storage : twins.cpu_storages)
    of_tensors.emplace_back(storage.data(), storage.size(), cuda_on_cpu::kHost);
  CudaCall call{&table,      memory.get(), scratch.get(), s.options, {scale != 0 ? &scale : nullptr, 1},
                {&found, 0}, s.rounding,   nullptr};
  step_cuda<Rule>(call);
  if (launch_error() != nullptr) std::abort();
}

// Returns whether two parameters are as near as sums in another order allow, and zero in the same places. Sums are in
// double for every type: a sum of n terms is wrong by at most n half units in the last place.
bool near(const Storage& a, const Storage& b, DType dtype) {
  const double spacing = dtype == DType::f16 ? 0x1p-10 : dtype == DType::bf16 ? 0x1p-7 : 0;
  const int64_t step = element_size(dtype);
  const double rounding = dtype == DType::f64 ? 0x1p-53 * std::fmax(128, a.size() / step) : 0x1p-17;
  double largest = 1;
  for (int64_t at = 0; at < a.size(); at += step) largest = std::fmax(largest, std::fabs(get(dtype, a.data() + at)));
  for (int64_t at = 0; at < a.size(); at += step) {
    const double x = get(dtype, a.data() + at), y = get(dtype, b.data() + at);
    if (!(std::fabs(x - y) <= spacing * std::fabs(x) + rounding * largest) || (x == 0) != (y == 0)) return false;
  }
  return true;
}

template <class Rule>
bool check(Random& random, const Settings& s, Digest& digest) {
  Twins twins;
  const int64_t count = 1 + below(random, 5);
  for (int64_t i = 0; i < count; ++i) add_tensor(random, s, 3, twins);
  const std::vector<double> hyper = rows(s.adam);
  const float lr = 0.125f;
  const double lrs[] = {hyper[0], hyper[Rule::columns], lr};
  step_on_cpu<Rule>(s, hyper, lrs, twins);
  step_on_gpu<Rule>(s, hyper, {{nullptr, 0}, {nullptr, 0}, {&lr, 0}}, twins);
  size_t next = 0;
  for (size_t i = 0; i < twins.cpu_storages.size(); ++i) {
    digest.add(twins.gpu_storages[i].data(), twins.gpu_storages[i].size());
    const bool shrunk = next < twins.shrunk.size() && twins.shrunk[next] == static_cast<int>(i);
    next += shrunk;
    const bool same = shrunk ? near(twins.cpu_storages[i], twins.gpu_storages[i], s.w)
                             : twins.cpu_storages[i].equals(twins.gpu_storages[i]);
    if (!same) return false;
  }
  return true;
}

}  // namespace

int main(int, char** arguments) {
  return check_seeds(arguments, [](Random& random, Digest& digest) {
    const Settings settings = random_settings(random);
    return settings.adam ? check<Adam>(random, settings, digest) : check<Sgd>(random, settings, digest);
  });
}
