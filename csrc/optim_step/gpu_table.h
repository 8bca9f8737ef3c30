// What the kernels of a step read about its tensors, as one stretch of bytes that is copied to the GPU.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "optim_step/tensor_step.h"
#include "ring_prox/gpu_table.h"

namespace loco::optim_step {

constexpr int64_t kChunk = 8192;  // elements that one block steps

// How the decay map's value at an element is found.
enum class MapKind : uint8_t {
  uniform,  // one value
  cyclic,   // number element / run % period
  nest      // by the nest
};

// The types of parameters, gradients and states for which there are kernels that take 16 bytes at a time: all operands
// must be flat and reach such a boundary together. Entries of any other kind are taken element by element.
enum class Types : uint8_t { f32, f64, bf16, f16, bf16_f32, f16_f32, any, any_f64 };

enum NestOf { kNestW, kNestG, kNestState, kNestLogical = kNestState + kStates, kNestMap, kNests };

constexpr int32_t kFlat = -1;
constexpr int64_t kHeldUnit = 16;

struct Entry {
  void* w;
  void* state[kStates];
  void* counter;
  int64_t numel;
  int64_t map;            // the first of its values among the table's
  uint32_t run, period;   // of a cyclic map
  int32_t nests[kNests];  // numbers of nests, or kFlat
  int32_t group;          // row of hyper
  int32_t prox;           // that ends the step: number among the table's, or -1
  uint32_t held;          // where its kernels are held if they are shrunk together, in units of kHeldUnit bytes
  uint32_t ordinal;       // for stochastic rounding
  uint8_t head;           // elements before the first at a 16-byte boundary; 0 for those taken one by one
  MapKind map_kind;
  Types types;
  bool first, counter_is_double;
  DType w_dtype, g_dtype, state_dtype[kStates];
};

// The prox of a penalty on kernels of one shape.
struct Prox {
  int64_t taps, begins;    // where its ring order begins among the table's
  int64_t plain, squared;  // the same of its thresholds; squared -1: none
  uint32_t channels, tap_count;
  int32_t rings;
  bool channels_fastest, linf;
};

// Elements begin .. end - 1 of an entry, where begin is 0 or head + a multiple of kChunk. Of an entry with a prox all,
// and index is the number of its first kernel in the launch.
struct Chunk {
  int32_t entry;
  int32_t index;
};

// A scalar in the GPU's memory, null: absent.
struct DeviceScalar {
  const void* data;
  int64_t is_double;
};

// That a kernel takes with its metrics in the type that arithmetic is done in.
LOCO_HD int64_t bytes_of_kernel(int64_t weights, bool is_double, bool has_metric) {
  return (weights * (is_double ? 8 : 4) * (has_metric ? 2 : 1) + kHeldUnit - 1) / kHeldUnit * kHeldUnit;
}

// And with the squares of its rings and their scale, where it is held.
LOCO_HD int64_t bytes_of_held_kernel(int64_t weights, int rings, bool is_double, bool has_metric) {
  return bytes_of_kernel(weights, is_double, has_metric) + (rings + 2) / 2 * kHeldUnit;
}

// Consecutive chunks whose entries have these types.
struct Work {
  Types types;
  int64_t first, count;
};

// Consecutive chunks of entries with a prox whose kernels are stepped by the same launches.
struct ProxWork {
  bool is_double;  // what arithmetic is done in
  bool on_chip;    // shared memory holds a kernel
  bool coupled;    // each entry's kernels are shrunk together
  unsigned threads;
  int64_t first, count;
  int64_t kernels;
  int64_t bytes;  // that a kernel takes there, or in a slot of global memory, at most
};

// The sections of a table while it is built.
struct Sections {
  // Distinct values of a decay map, from number begin of all maps' on.
  struct Map {
    const double* values;
    Nest source;
    int64_t begin;
  };

  // One for all parameters with the same penalty and as many channels in the same order.
  struct KnownProx {
    const ring_prox::Penalty* penalty;
    int64_t channels;
    bool channels_fastest;
  };

  std::vector<void*> grads;
  std::vector<Entry> entries;
  std::vector<Nest> nests;
  std::vector<double> maps;
  std::vector<Map> known_maps;
  std::vector<Chunk> chunks;
  std::vector<std::pair<Types, int32_t>> order;  // of entries that have elements and no prox
  std::vector<Prox> proxes;
  std::vector<KnownProx> known_proxes;  // in the order of proxes
  std::vector<ring_prox::Tap> taps;
  std::vector<uint32_t> begins;
  std::vector<double> thresholds;

  void clear() {
    grads.clear(), entries.clear(), nests.clear(), maps.clear(), known_maps.clear(), chunks.clear(), order.clear();
    proxes.clear(), known_proxes.clear(), taps.clear(), begins.clear(), thresholds.clear();
  }
};

struct GpuTable {
  std::vector<unsigned char> bytes;
  std::vector<Work> works;
  std::vector<ProxWork> prox_works;
  int64_t entry_count = 0;
  // Of the entries of a ProxWork whose kernels are shrunk together, at most: their number, that of their kernels, and
  // the bytes of these.
  int64_t layers = 0, layer_kernels = 0, held_bytes = 0;
  // Where sections begin among the bytes. Those that change most come first.
  int64_t grads = 0, hyper = 0, lrs = 0, entries = 0, nests = 0, maps = 0, chunks = 0;
  int64_t proxes = 0, taps = 0, begins = 0, thresholds = 0;
  bool has_lrs = false;
  Sections sections;
};

// lrs: as many as hyper has rows, or none. has_metric: the rule's proxes need one.
void build(GpuTable& table, const std::vector<TensorStep>& tensors, const double* hyper, int64_t groups, int columns,
           bool has_metric, const std::vector<DeviceScalar>& lrs);

}  // namespace loco::optim_step
