// Kernels that take more than they should, for the test of budgets: registers, local memory, shared memory.
__global__ void modest(float* x) { x[threadIdx.x] += 1; }

__global__ void shares(float* x) {
  __shared__ float s[512];
  s[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s[511 - threadIdx.x];
}

// The array is indexed at run time, so that it cannot be in registers.
__global__ void stacks(float* x, const int* at, int count) {
  float values[64];
  for (int i = 0; i < 64; ++i) values[i] = x[i];
  for (int i = 0; i < count; ++i) values[at[i] & 63] += 1;
  for (int i = 0; i < 64; ++i) x[i] = values[i];
}

// 100 values live at once in 32 registers.
template <int values>
__global__ void __launch_bounds__(1024, 2) spills(float* x) {
  float v[values];
#pragma unroll
  for (int i = 0; i < values; ++i) v[i] = x[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < values; ++i) x[i * 1024 + threadIdx.x] = v[(i * 7 + 3) % values] * v[i];
}

template __global__ void spills<100>(float*);
