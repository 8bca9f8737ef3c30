// The inner loops: one update rule over a block of consecutive elements, vectorised for each x86-64 level.
#pragma once

#include <cstdint>

#include "optim_step/rules.h"

namespace loco::optim_step {

// Contiguous elements in the type that arithmetic is done in. state: momentum_buffer, or exp_avg, exp_avg_sq and
// max_exp_avg_sq; those that the rule lacks are null.
template <typename T>
struct Block {
  int64_t count;
  T* w;
  const T* g;
  T* state[3];
  const T* table;  // decay coefficients, used over and over, or null: uniform
  int64_t period;  // the table's length
  int64_t phase;   // the first element's place in it
  T uniform;
  T* metric;  // where Adam's denominators go, or null

  // To as many elements that come next; the metric is written anew.
  void advance() {
    T* const same = metric;
    *this = part(count, count);
    metric = same;
  }

  Block part(int64_t begin, int64_t length) const {
    Block result = *this;
    result.count = length;
    result.w += begin;
    result.g += begin;
    for (T*& s : result.state) s = s ? s + begin : nullptr;
    if (metric) result.metric += begin;
    if (table) result.phase = (phase + begin) % period;
    return result;
  }
};

void update(const Block<float>& block, SgdFlags flags, const SgdScalars<float>& scalars);
void update(const Block<double>& block, SgdFlags flags, const SgdScalars<double>& scalars);
void update(const Block<float>& block, AdamFlags flags, const AdamScalars<float>& scalars);
void update(const Block<double>& block, AdamFlags flags, const AdamScalars<double>& scalars);

// g = g / scale
void unscale(float* g, int64_t count, float scale);
void unscale(double* g, int64_t count, double scale);
// g = -g
void negate(float* g, int64_t count);
void negate(double* g, int64_t count);

// Four random words for each of `count` elements, whose logical indices stand in `elements`.
void random_words(const PhiloxKey& key, const int64_t* elements, int64_t count, uint32_t* const words[4]);
void store_stochastic(const float* from, const uint32_t* random, uint16_t* to, int64_t count);

}  // namespace loco::optim_step
