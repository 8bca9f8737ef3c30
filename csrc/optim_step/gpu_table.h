// What the kernels of a step read about its tensors, as one stretch of bytes that is copied to the GPU when it changes.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "optim_step/tensor_step.h"

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

struct Entry {
  void* w;
  void* state[kStates];
  void* counter;
  int64_t numel;
  int64_t map;            // the first of its values among the table's
  uint32_t run, period;   // of a cyclic map
  int32_t nests[kNests];  // numbers of nests, or kFlat
  int32_t group;          // row of hyper
  uint32_t ordinal;       // for stochastic rounding
  uint8_t head;           // elements before the first at a 16-byte boundary; 0 for those taken one by one
  MapKind map_kind;
  Types types;
  bool first, counter_is_double;
  DType w_dtype, g_dtype, state_dtype[kStates];
};

// Elements begin .. end - 1 of an entry, where begin is 0 or head + a multiple of kChunk.
struct Chunk {
  int32_t entry;
  int32_t index;
};

// A scalar in the GPU's memory, null: absent.
struct DeviceScalar {
  const void* data;
  int64_t is_double;
};

// Consecutive chunks whose entries have these types.
struct Work {
  Types types;
  int64_t first, count;
};

// The sections of a table while it is built; their memory serves the next table, too.
struct Sections {
  // Distinct values of a decay map, from number begin of all maps' on.
  struct Map {
    const double* values;
    Nest source;
    int64_t begin;
  };

  std::vector<void*> grads;
  std::vector<Entry> entries;
  std::vector<Nest> nests;
  std::vector<double> maps;
  std::vector<Map> known_maps;
  std::vector<Chunk> chunks;
  std::vector<std::pair<Types, int32_t>> order;  // of entries that have elements

  void clear() {
    grads.clear(), entries.clear(), nests.clear(), maps.clear(), known_maps.clear(), chunks.clear(), order.clear();
  }
};

struct GpuTable {
  std::vector<unsigned char> bytes;
  std::vector<Work> works;
  int64_t entry_count = 0;
  // Where sections begin among the bytes. Those that change most come first.
  int64_t grads = 0, hyper = 0, lrs = 0, entries = 0, nests = 0, maps = 0, chunks = 0;
  bool has_lrs = false;
  Sections sections;
};

// lrs: as many as hyper has rows, or none.
void build(GpuTable& table, const std::vector<TensorStep>& tensors, const double* hyper, int64_t groups, int columns,
           const std::vector<DeviceScalar>& lrs);

}  // namespace loco::optim_step
