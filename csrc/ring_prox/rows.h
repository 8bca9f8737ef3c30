// Sums over contiguous weights and their shrinkage, vectorised for each x86-64 level. Sums are in float64, of 16
// interleaved parts, so that the level changes no bit.
#pragma once

#include <cstdint>

#include "ring_prox/math.h"

namespace loco::ring_prox {

// sum x^2. Floats are summed in float64 four by four: a vector holds twice as many, but their squares must neither
// vanish nor overflow. Those of the wide sum may.
double squares(const float* x, int64_t count);
double squares(const double* x, int64_t count);
double wide_squares(const float* x, int64_t count);
double wide_squares(const double* x, int64_t count);
// The same for each tap: by_tap[k] = sum over channels of x[channel * taps + k]^2
void tap_squares(const float* x, int64_t channels, int taps, double* by_tap);
void tap_squares(const double* x, int64_t channels, int taps, double* by_tap);
void wide_tap_squares(const float* x, int64_t channels, int taps, double* by_tap);
void wide_tap_squares(const double* x, int64_t channels, int taps, double* by_tap);
// sum (d u)^2
double weighed_squares(const float* u, const float* d, int64_t count);
double weighed_squares(const double* u, const double* d, int64_t count);
// See Damped. The terms of the narrow sums are in the type of the weights, and four of them are summed in it.
Damped damped_sums(const float* u, const float* d, int64_t count, double c);
Damped damped_sums(const double* u, const double* d, int64_t count, double c);
Damped wide_damped_sums(const float* u, const float* d, int64_t count, double c);
Damped wide_damped_sums(const double* u, const double* d, int64_t count, double c);
// Of min(|u|, cap) where that exceeds level; d may be null: ones.
Above above(const float* u, const float* d, int64_t count, double cap, double level);
Above above(const double* u, const double* d, int64_t count, double cap, double level);
// min x, of which none is NaN
double smallest(const float* x, int64_t count);
double smallest(const double* x, int64_t count);
// max |x|; NaN if any is
double largest(const float* x, int64_t count);
double largest(const double* x, int64_t count);
// out = x * factor. Here and below out may be x or u.
void multiply(const float* x, int64_t count, float factor, float* out);
void multiply(const double* x, int64_t count, double factor, double* out);
// out[channel * taps + k] = x[channel * taps + k] * by_tap[k]
void multiply_taps(const float* x, int64_t channels, int taps, const float* by_tap, float* out);
void multiply_taps(const double* x, int64_t channels, int taps, const double* by_tap, double* out);
// out = (sqrt(v) / correction + eps) / lr, Adam's metric; out may be v.
void adam_metric(const float* v, int64_t count, float correction, float eps, float lr, float* out);
void adam_metric(const double* v, int64_t count, double correction, double eps, double lr, double* out);
// out = u d / (d + c)
void damp(const float* u, const float* d, int64_t count, double c, float* out);
void damp(const double* u, const double* d, int64_t count, double c, double* out);
// out = u, its size at most cap
void clip(const float* u, int64_t count, float cap, float* out);
void clip(const double* u, int64_t count, double cap, double* out);

}  // namespace loco::ring_prox
