// The table that describes a step's tensors to its GPU kernels, in CUDA and in Triton: one contiguous buffer that is
// copied to the GPU.
#pragma once

#include <cstdint>
#include <vector>

#include "common/platform.h"
#include "optim_step/tensor_step.h"
#include "ring_prox/gpu_table.h"

namespace loco::optim_step {

constexpr int64_t kPart = 512;          // a CUDA block steps a multiple of this number of elements
constexpr int64_t kChunk = 16 * kPart;  // and at most this many, not counting an entry's head

constexpr uint32_t kMostWidth = 8;  // most elements that a thread steps at a time
// Most coefficients of a cyclic map that a block caches in shared memory, in a step without and with a prox. A vector's
// coefficients follow each other there, also where the cycle begins again, which takes kMostWidth more.
constexpr uint32_t kCached = 2048, kCachedWithProx = 256;

LOCO_HD bool caches(int64_t period, uint32_t cached) { return period + kMostWidth <= cached; }

// Ways to look up the decay map's value at an element.
enum class MapKind : uint8_t {
  uniform,  // all elements have value 0 of the entry
  cyclic,   // an element has value element / run % period; the map is cached, or its runs have kMostWidth elements or
            // more
  nest      // an element has the value that the entry's nest kNestMap maps it to
};

// Combinations of dtypes of parameters, gradients and states. The first six have kernels that process 16 bytes at a
// time, which requires all operands to be flat and all but the gradient to reach a 16-byte boundary at the same
// element. Entries of any other kind (any, any_f64) are processed element by element.
enum class Types : uint8_t { f32, f64, bf16, f16, bf16_f32, f16_f32, any, any_f64 };

enum NestOf { kNestW, kNestG, kNestState, kNestLogical = kNestState + kStates, kNestMap, kNests };

constexpr int32_t kFlat = -1;
constexpr int64_t kSlotUnit = 16;  // sizes of slots are multiples of it, in bytes

// One parameter and its operands.
struct Entry {
  void* w;               // [numel]; element i is at the offset that nests[kNestW] gives, in elements
  void* state[kStates];  // [numel] each, likewise; null: absent
  void* counter;         // one float32 or float64 element: steps made so far; null: the rule counts none
  int64_t numel;
  int64_t map;            // index of its first value among the table's maps
  uint32_t run, period;   // for a cyclic map
  int32_t nests[kNests];  // indices into the table's nests, or kFlat
  int32_t group;          // row of hyper
  int32_t prox;           // index of the prox that ends the step, or -1
  uint32_t ordinal;       // for stochastic rounding
  uint8_t head;           // elements before the first one at a 16-byte boundary; 0 for any and any_f64
  bool g_aligned;         // whether the gradient reaches a boundary there too
  MapKind map_kind;
  Types types;
  bool first, counter_is_double;
  DType w_dtype, g_dtype, state_dtype[kStates];
};

// The prox of a penalty on filters of one shape.
struct Prox {
  int64_t taps, begins;    // where its ring order begins in these sections of the table
  int64_t plain, squared;  // where its thresholds t and q begin in their sections; squared is -1 without q
  uint32_t channels, tap_count;
  int32_t rings;
  bool channels_fastest;
};

// A range of an entry's elements. It begins at head + index * Division::part and has `parts` times Division::part
// elements, or fewer where the entry ends before; the chunk whose index is 0 also has the head. For an entry with a
// prox the chunk is the whole entry, and index is the number of filters of the launch that come before the entry's
// first.
struct Chunk {
  int32_t entry;
  int32_t index;
  int32_t parts;
};

// A float32 or float64 scalar in GPU memory; null: absent.
struct DeviceScalar {
  const void* data;
  int64_t is_double;
};

// Returns the bytes of one filter including its metrics, in the compute dtype.
LOCO_HD int64_t bytes_of_filter(int64_t weights, bool is_double, bool has_metric) {
  return (weights * (is_double ? 8 : 4) * (has_metric ? 2 : 1) + kSlotUnit - 1) / kSlotUnit * kSlotUnit;
}

// Consecutive chunks whose entries are of the same kind; one launch steps them.
struct Work {
  uint32_t kind;
  int64_t first, count;
};

// A backend's division of a step's elements among launches and blocks.
struct Division {
  int64_t part;        // elements
  int64_t most_parts;  // largest number of parts of a chunk
  // Returns the kind of an entry, and sets its types and head if the backend uses them.
  uint32_t (*kind_of)(const TensorStep& tensor, Entry& entry);
};

// Consecutive chunks of entries with a prox whose filters are stepped by the same launches.
struct ProxWork {
  bool is_double;        // whether the compute dtype is float64
  bool on_chip;          // shared memory can hold a filter
  unsigned threads;      // per block
  int64_t first, count;  // chunks
  int64_t filters;       // filters of all entries
  int64_t bytes;  // the most that a filter takes, with its solver in shared memory, or in a slot of global memory
  int64_t solver_bytes;  // the most that a solver takes in shared memory
};

struct GpuTable {
  std::vector<unsigned char> bytes;
  std::vector<Work> works;
  std::vector<ProxWork> prox_works;
  int64_t entry_count = 0;
  // Offsets of the sections in bytes. Sections that change most often come first.
  int64_t grads = 0, hyper = 0, lrs = 0, entries = 0, nests = 0, maps = 0, chunks = 0;
  int64_t proxes = 0, taps = 0, begins = 0, thresholds = 0;
  bool has_lrs = false;
};

struct Hyper {
  const double* rows;  // [groups, columns], contiguous
  int64_t groups;
  int columns;
  std::vector<DeviceScalar> lrs;  // [groups], or empty
};

// The division for the CUDA kernels; an entry's kind is its types.
extern const Division kCudaDivision;

// Builds the table. has_metric: the rule's proxes need a metric.
void build(GpuTable& table, const Division& division, const std::vector<TensorStep>& tensors, const Hyper& hyper,
           bool has_metric);

// Writes the addresses of the gradients and the hyper-parameters into a table that has been built from the same
// tensors. Returns false, with nothing changed, for an empty table.
bool refresh(GpuTable& table, const std::vector<TensorStep>& tensors, const Hyper& hyper);

}  // namespace loco::optim_step
