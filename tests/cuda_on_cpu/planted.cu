// Small kernels, each right or with a mistake planted in it, to test the runner itself.
//
//   planted CASE...    prints "CASE ok", or what is wrong, for each
//   planted order      the order of blocks and threads
//   planted time       how long a block of 256 threads with a warp reduction takes
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr unsigned kAll = 0xffffffff;
constexpr int kThreads = 256, kWarps = kThreads / 32;

enum class Fault {
  none,
  missing_barrier,
  divergent_barrier,
  missing_lanes,
  wrong_mask,
  unwritten,
  out_of_bounds,
  shared_out_of_bounds,
  wrong_tail,
  misaligned
};

template <class T>
__device__ T warp_sum(T value) {
  for (int offset = warpSize / 2; offset > 0; offset /= 2) value += __shfl_down_sync(kAll, value, offset);
  return value;
}

// out[block] = sum of in over the block's share.
template <Fault fault, class T>
__global__ void __launch_bounds__(kThreads) block_sum(const T* in, int64_t count, T* out) {
  __shared__ T sums[kWarps];
  const int lane = threadIdx.x % warpSize, warp = threadIdx.x / warpSize;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  T sum = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) sum += in[i];
  if constexpr (fault == Fault::wrong_mask) {
    sum += __shfl_xor_sync(0xffff, sum, 1);
  } else if (fault != Fault::missing_lanes || lane < 16) {
    sum = warp_sum(sum);
  }
  if (lane == 0 && (fault != Fault::unwritten || warp != 1)) {
    sums[warp + (fault == Fault::shared_out_of_bounds ? 1 : 0)] = sum;
  }
  if constexpr (fault == Fault::divergent_barrier) {
    if (warp == 0) {
      __syncthreads();
    } else {
      __syncthreads();
    }
  } else if constexpr (fault != Fault::missing_barrier) {
    __syncthreads();
  }
  if (warp != 0) return;
  sum = warp_sum(lane < kWarps ? sums[lane] : T(0));
  if (lane == 0) out[blockIdx.x] = sum;
}

// In 16-byte accesses between the first and the last boundary; from and to lie equally far from one.
template <Fault fault>
__global__ void copy_bytes(const unsigned char* from, unsigned char* to, int64_t count) {
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t past = reinterpret_cast<uintptr_t>(to) % 16, gap = (16 - past) % 16;
  const int64_t head = fault == Fault::misaligned ? 0 : gap < count ? gap : count;
  const int64_t vectors = (count - head) / 16 + (fault == Fault::out_of_bounds ? 1 : 0), tail = head + vectors * 16;
  if (thread < head) to[thread] = from[thread];
  for (int64_t i = thread; i < vectors; i += step) {
    __stcs(reinterpret_cast<uint4*>(to + head) + i, __ldg(reinterpret_cast<const uint4*>(from + head) + i));
  }
  if (tail + thread < count - (fault == Fault::wrong_tail ? 1 : 0)) to[tail + thread] = from[tail + thread];
}

template <Fault fault>
__global__ void histogram(const uint8_t* values, int64_t count, unsigned* bins) {
  __shared__ unsigned mine[256];
  if constexpr (fault != Fault::unwritten) mine[threadIdx.x] = 0;
  __syncthreads();
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) atomicAdd(&mine[values[i]], 1);
  if constexpr (fault != Fault::missing_barrier) __syncthreads();
  atomicAdd(&bins[threadIdx.x], mine[threadIdx.x]);
}

// Everything that a warp can do together, in a block whose last warp is not full and whose first threads return early.
__global__ void collectives(int* wrong) {
  const int lane = threadIdx.x % warpSize;
  const bool last = threadIdx.x >= 32;
  const unsigned all = last ? 0xff : kAll;
  const auto expect = [&](bool right) { *wrong += !right; };
  expect(__ballot_sync(kAll, lane % 2) == (0xaaaaaaaa & all));
  expect(__any_sync(kAll, lane == 3) && !__any_sync(kAll, lane == 40));
  expect(__all_sync(kAll, lane < 32) && !__all_sync(kAll, lane == 3));
  expect(__shfl_sync(kAll, lane, 5) == 5);
  expect(__shfl_sync(kAll, lane, 1, 8) == lane / 8 * 8 + 1);
  expect(__shfl_up_sync(kAll, lane, 1u, 4) == (lane % 4 == 0 ? lane : lane - 1));
  expect(__shfl_down_sync(kAll, double(lane), 1u, 4) == (lane % 4 == 3 ? lane : lane + 1));
  expect(__shfl_xor_sync(kAll, static_cast<long long>(lane), 3) == (lane ^ 3));
  const unsigned half = lane < 4 ? 0xf : ~0xfu;
  expect(__ballot_sync(half, 1) == (half & all));
  __syncwarp();
  expect(__syncthreads_count(lane == 0) == 2);
  expect(__syncthreads_or(threadIdx.x == 39) && !__syncthreads_or(0));
  expect(__syncthreads_and(1) && !__syncthreads_and(threadIdx.x != 39));
  if (threadIdx.x < 8) return;
  expect(__syncthreads_count(1) == 32);
  expect(__shfl_sync(last ? 0xff : 0xffffff00, lane, lane) == lane);
  expect(__ballot_sync(kAll, 1) == (last ? 0xff : 0xffffff00));
}

// Barriers wait only for threads that have not returned.
__global__ void early_return(int* passed) {
  if (threadIdx.x < 16) return;
  __syncthreads();
  if (threadIdx.x < 32) return __syncwarp();
  __syncthreads();
  ++*passed;
}

__global__ void note_order(std::string* note) {
  *note += std::to_string(blockIdx.x) + '.' + std::to_string(threadIdx.x) + ' ';
}

// What AddressSanitizer knows of a stack must outlive a wait.
__global__ void overrun_stack(int* out, int count) {
  int local[4] = {};
  int* volatile at = local;
  __syncthreads();
  for (int i = 0; i < count; ++i) at[i] += i;
  out[threadIdx.x] = at[0];
}

__global__ void index_sum(unsigned long long* sums, uint3 size) {
  const unsigned long long block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const unsigned long long thread = threadIdx.x + size.x * (threadIdx.y + size.y * threadIdx.z);
  atomicAdd(&sums[block], thread);
}

__global__ void big_shared(float* out) {
  __shared__ float big[13000];
  for (int i = threadIdx.x; i < 13000; i += blockDim.x) big[i] = 1;
  __syncthreads();
  out[threadIdx.x] = big[threadIdx.x];
}

// Turns a block's values round in memory that the launch has asked for.
template <Fault fault>
__global__ void reverse_block(const float* in, float* out) {
  LOCO_SHARED(memory);
  auto* values = reinterpret_cast<float*>(memory);
  values[threadIdx.x + (fault == Fault::shared_out_of_bounds ? 1 : 0)] = in[threadIdx.x];
  if constexpr (fault != Fault::missing_barrier) __syncthreads();
  out[threadIdx.x] = values[blockDim.x - 1 - threadIdx.x];
}

// Each sum takes two barriers, or one and two buffers in turn; with one of either a warp that is ahead spoils it.
template <Fault fault>
__global__ void repeated_sum(float* out) {
  __shared__ float sums[2];
  float total = 0;
  for (int i = 0; i < 4; ++i) {
    const float sum = warp_sum(static_cast<float>(i));
    if (threadIdx.x % warpSize == 0) sums[threadIdx.x / warpSize] = sum;
    __syncthreads();
    total += sums[0] + sums[1];
    if constexpr (fault != Fault::missing_barrier) __syncthreads();
  }
  out[threadIdx.x] = total;
}

struct alignas(16) Arguments {
#if defined(PLANTED_BIG_PARAMETERS)
  unsigned char bytes[32752];
#else
  unsigned char bytes[32736];
#endif
};

// 32736 + 8 + 8 bytes of parameters. The copy is the thread's own.
__global__ void sum_arguments(Arguments arguments, int first, unsigned long long* sum) {
  for (unsigned i = first; i < sizeof arguments.bytes; ++i) arguments.bytes[0] ^= arguments.bytes[i];
  *sum += arguments.bytes[0];
}

template <Fault fault, class T = float>
bool sums() {
  const int blocks = 3;
  // On the heap, at its exact size: AddressSanitizer sees the first element too many.
  const int64_t count = 5000;
  const auto in = std::make_unique<T[]>(count);
  std::vector<T> out(blocks);
  T total = 0, expected = 0;
  for (int64_t i = 0; i < count; ++i) expected += in[i] = static_cast<T>(i % 17);
  LOCO_LAUNCH((block_sum<fault, T>), blocks, kThreads, nullptr, in.get(), count, out.data());
  for (const T value : out) total += value;
  return total == expected;
}

template <Fault fault>
bool copies() {
  const int lengths[] = {0, 1, 15, 16, 17, 63, 1000};
  for (int64_t shift : {0, 1, 15}) {
    for (int64_t count : lengths) {
      if (fault != Fault::none && (count != 1000 || shift != 1)) continue;
      const auto from = std::make_unique<uint4[]>((count + shift + 15) / 16 + 1);
      auto* begin = reinterpret_cast<unsigned char*>(from.get()) + shift;
      for (int64_t i = 0; i < count; ++i) begin[i] = static_cast<unsigned char>(i * 7 + 1);
      // malloc gives 16-byte boundaries.
      const auto to = std::make_unique<unsigned char[]>(count + shift);
      LOCO_LAUNCH(copy_bytes<fault>, 2, 48, nullptr, begin, to.get() + shift, count);
      if (std::memcmp(begin, to.get() + shift, count) != 0) return false;
    }
  }
  return true;
}

template <Fault fault>
bool histograms() {
  std::vector<uint8_t> values(10000);
  std::vector<unsigned> bins(256), expected(256);
  for (size_t i = 0; i < values.size(); ++i) ++expected[values[i] = static_cast<uint8_t>(i * i)];
  LOCO_LAUNCH(histogram<fault>, 4, 256, nullptr, values.data(), values.size(), bins.data());
  return bins == expected;
}

bool warps() {
  int wrong = 0;
  LOCO_LAUNCH(collectives, 1, 40, nullptr, &wrong);
  return wrong == 0;
}

bool returns_early() {
  int passed = 0;
  LOCO_LAUNCH(early_return, 1, 48, nullptr, &passed);
  return passed == 16;
}

bool dimensions() {
  const dim3 blocks(2, 3, 2), threads(4, 2, 5);
  std::vector<unsigned long long> sums(12);
  LOCO_LAUNCH(index_sum, blocks, threads, nullptr, sums.data(), uint3{4, 2, 5});
  for (const unsigned long long sum : sums) {
    if (sum != 40 * 39 / 2) return false;
  }
  return true;
}

template <Fault fault>
bool reverses() {
  std::vector<float> in(64), out(64);
  for (int i = 0; i < 64; ++i) in[i] = static_cast<float>(i);
  LOCO_LAUNCH_SHARED(reverse_block<fault>, 1, 64, 64 * sizeof(float), nullptr, in.data(), out.data());
  for (int i = 0; i < 64; ++i) {
    if (out[i] != in[63 - i]) return false;
  }
  return true;
}

template <Fault fault>
bool repeats() {
  std::vector<float> out(64);
  LOCO_LAUNCH(repeated_sum<fault>, 1, 64, nullptr, out.data());
  for (const float total : out) {
    if (total != 64 * (0 + 1 + 2 + 3)) return false;
  }
  return true;
}

bool requested_limit() {
  std::vector<float> values(64);
  LOCO_LAUNCH_SHARED(reverse_block<Fault::none>, 1, 64, (48 << 10) + 16, nullptr, values.data(), values.data());
  return true;
}

bool parameters() {
  Arguments arguments{};
  arguments.bytes[0] = 1, arguments.bytes[5] = 2;
  unsigned long long sum = 0;
  LOCO_LAUNCH(sum_arguments, 2, 3, nullptr, arguments, 1, &sum);
  return sum == 6 * 3 && arguments.bytes[0] == 1;
}

template <class Blocks>
bool refused(Blocks blocks, dim3 threads) {
  std::vector<unsigned long long> sums(1);
  LOCO_LAUNCH(index_sum, blocks, threads, nullptr, sums.data(), uint3{});
  return cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess;
}

bool limits() {
  return refused(1, 1025) && refused(0, 32) && refused(int64_t{1} << 32, 32) && refused(1u << 31, 32) &&
         refused(-1, 32) && refused(1, dim3(64, 32)) && refused(1, dim3(1, 1, 65)) && refused(dim3(1, 65536), 1) &&
         refused(1, 0);
}

bool shared_limit() {
  std::vector<float> out(32);
  LOCO_LAUNCH(big_shared, 1, 32, nullptr, out.data());
  return true;
}

bool stack_out_of_bounds() {
  std::vector<int> out(64);
  LOCO_LAUNCH(overrun_stack, 1, 64, nullptr, out.data(), 5);
  return true;
}

bool prints_order() {
  std::string note;
  LOCO_LAUNCH(note_order, 2, 3, nullptr, &note);
  std::printf("%s\n", note.c_str());
  return true;
}

// Launches from several threads of the host, each of which has shared memory of its own.
bool host_threads() {
  bool right[2];
  std::thread first([&] { right[0] = sums<Fault::none>(); });
  std::thread second([&] { right[1] = sums<Fault::none>(); });
  first.join();
  second.join();
  return right[0] && right[1];
}

bool measure() {
  const int blocks = 100;
  std::vector<float> in(blocks * kThreads), out(blocks);
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    LOCO_LAUNCH((block_sum<Fault::none, float>), blocks, kThreads, nullptr, in.data(), int64_t(in.size()), out.data());
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    std::printf("%.1f microseconds per block\n", took.count() / blocks);
  }
  return true;
}

struct Case {
  const char* name;
  bool (*run)();
};

const Case kCases[] = {
    {"sum", sums<Fault::none>},
    {"sum_of_doubles", sums<Fault::none, double>},
    {"copy", copies<Fault::none>},
    {"histogram", histograms<Fault::none>},
    {"warps", warps},
    {"dimensions", dimensions},
    {"parameters", parameters},
    {"returns_early", returns_early},
    {"reverse", reverses<Fault::none>},
    {"repeat", repeats<Fault::none>},
    {"host_threads", host_threads},
    {"limits", limits},
    {"order", prints_order},
    {"time", measure},
    {"sum_missing_barrier", sums<Fault::missing_barrier>},
    {"sum_divergent_barrier", sums<Fault::divergent_barrier>},
    {"sum_missing_lanes", sums<Fault::missing_lanes>},
    {"sum_wrong_mask", sums<Fault::wrong_mask>},
    {"sum_unwritten", sums<Fault::unwritten>},
    {"sum_shared_out_of_bounds", sums<Fault::shared_out_of_bounds>},
    {"copy_out_of_bounds", copies<Fault::out_of_bounds>},
    {"copy_wrong_tail", copies<Fault::wrong_tail>},
    {"copy_misaligned", copies<Fault::misaligned>},
    {"histogram_unwritten", histograms<Fault::unwritten>},
    {"histogram_missing_barrier", histograms<Fault::missing_barrier>},
    {"stack_out_of_bounds", stack_out_of_bounds},
    {"shared_limit", shared_limit},
    {"reverse_out_of_bounds", reverses<Fault::shared_out_of_bounds>},
    {"reverse_missing_barrier", reverses<Fault::missing_barrier>},
    {"repeat_missing_barrier", repeats<Fault::missing_barrier>},
    {"requested_limit", requested_limit},
};

}  // namespace

// Whether the case gave the right result.
extern "C" int planted(const char* name) {
  for (const Case& c : kCases) {
    if (std::strcmp(c.name, name) != 0) continue;
    const bool right = c.run();
    std::printf("%s %s\n", name, right ? "ok" : "wrong");
    std::fflush(stdout);
    return right;
  }
  std::printf("%s is no case\n", name);
  return false;
}

int main(int argc, char** argv) {
  bool right = argc > 1;
  for (int i = 1; i < argc; ++i) right = planted(argv[i]) && right;
  return right ? 0 : 1;
}
