// Runs the kernels of planted_kernels.h, right and with their mistakes, to test the runner itself.
//
//   planted CASE...    prints "CASE ok", or what is wrong, for each
//   planted order      the order of blocks and threads
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "planted_kernels.h"

namespace {

template <Fault fault>
bool sums() {
  const int blocks = 3;
  // The input is on the heap at its exact size, so that AddressSanitizer reports a read of one element too many.
  const int64_t count = 5000;
  const auto in = std::make_unique<float[]>(count);
  std::vector<float> out(blocks);
  float total = 0, expected = 0;
  for (int64_t i = 0; i < count; ++i) expected += in[i] = static_cast<float>(i % 17);
  LOCO_LAUNCH(block_sum<fault>, blocks, kThreads, nullptr, in.get(), count, out.data());
  for (const float value : out) total += value;
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

bool meetings_of_some() {
  int wrong = 0, passed = 0;
  LOCO_LAUNCH(meetings, 1, 40, nullptr, &wrong, &passed);
  return wrong == 0 && passed == 8;
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

template <Fault fault>
bool tickets() {
  const int blocks = 16;
  for (int repeat = 0; repeat < 10; ++repeat) {
    std::vector<float> parts(blocks);
    unsigned drawn[2] = {};
    float sum = 0;
    LOCO_LAUNCH(sum_by_last_block<fault>, blocks, 32, nullptr, parts.data(), drawn, &sum);
    if (sum != blocks) return false;
  }
  return true;
}

bool meets_without_end() {
  unsigned arrived = 0;
  LOCO_LAUNCH(meet_one_too_many, 3, 32, nullptr, &arrived);
  return true;
}

// Launches on a stream of `device`, which is the current one or not, while device 1 is current.
template <int device, bool stale>
bool streams() {
  cuda_on_cpu::current_device = 1;
  const void* const stream = cuda_on_cpu::change_stream(device);
  if (stale) cuda_on_cpu::change_stream(device);
  float x[2] = {};
  LOCO_LAUNCH(add_one, 1, 2, stream, x);
  cuda_on_cpu::current_device = 0;
  cuda_on_cpu::current_stream = nullptr;
  return x[1] == 1;
}

bool missing_kernel() {
  float x = 0;
  cuda_on_cpu::missing_kernel = "add_one";
  LOCO_LAUNCH(add_one, 1, 1, nullptr, &x);
  cuda_on_cpu::missing_kernel = nullptr;
  return cudaGetLastError() == cudaErrorNoKernelImageForDevice && x == 0;
}

// Memory of `owner` is used by the device, or by the host.
template <int owner, bool by_device>
bool uses_memory_of() {
  std::vector<float> x(32);
  const cuda_on_cpu::Owned owned(x.data(), x.size() * sizeof(float), owner);
  if (by_device) {
    LOCO_LAUNCH(add_one, 1, 32, nullptr, x.data());
  } else {
    x[3] += 1;
  }
  return true;
}

bool parameters() {
  Arguments arguments{};
  arguments.bytes[0] = 1, arguments.bytes[5] = 2;
  unsigned long long sum = 0;
  LOCO_LAUNCH(sum_arguments, 2, 3, nullptr, arguments, 1, &sum);
  return sum == 6 * 3 && arguments.bytes[0] == 1;
}

bool limits() {
  const int64_t refused[][2] = {{1, 1025}, {0, 32}, {int64_t{1} << 32, 32}, {int64_t{1} << 31, 32}, {-1, 32}, {1, 0}};
  float x = 0;
  for (const auto& [blocks, threads] : refused) {
    LOCO_LAUNCH(add_one, blocks, threads, nullptr, &x);
    if (cudaGetLastError() != cudaErrorInvalidConfiguration || cudaGetLastError() != cudaSuccess) return false;
  }
  return x == 0;
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

struct Case {
  const char* name;
  bool (*run)();
};

const Case kCases[] = {
    {"sum", sums<Fault::none>},
    {"copy", copies<Fault::none>},
    {"meetings", meetings_of_some},
    {"parameters", parameters},
    {"reverse", reverses<Fault::none>},
    {"repeat", repeats<Fault::none>},
    {"host_threads", host_threads},
    {"limits", limits},
    {"order", prints_order},
    {"sum_missing_barrier", sums<Fault::missing_barrier>},
    {"sum_divergent_barrier", sums<Fault::divergent_barrier>},
    {"sum_missing_lanes", sums<Fault::missing_lanes>},
    {"sum_wrong_mask", sums<Fault::wrong_mask>},
    {"sum_unwritten", sums<Fault::unwritten>},
    {"sum_shared_out_of_bounds", sums<Fault::shared_out_of_bounds>},
    {"copy_out_of_bounds", copies<Fault::out_of_bounds>},
    {"copy_wrong_tail", copies<Fault::wrong_tail>},
    {"copy_misaligned", copies<Fault::misaligned>},
    {"stack_out_of_bounds", stack_out_of_bounds},
    {"shared_limit", shared_limit},
    {"reverse_out_of_bounds", reverses<Fault::shared_out_of_bounds>},
    {"reverse_missing_barrier", reverses<Fault::missing_barrier>},
    {"repeat_missing_barrier", repeats<Fault::missing_barrier>},
    {"tickets", tickets<Fault::none>},
    {"tickets_early", tickets<Fault::early_ticket>},
    {"meets_without_end", meets_without_end},
    {"stream", streams<1, false>},
    {"stream_of_another_device", streams<0, false>},
    {"stream_before", streams<1, true>},
    {"missing_kernel", missing_kernel},
    {"memory_of_its_own", [] { return uses_memory_of<0, true>() && uses_memory_of<cuda_on_cpu::kHost, false>(); }},
    {"device_uses_host_memory", uses_memory_of<cuda_on_cpu::kHost, true>},
    {"device_uses_another_device", uses_memory_of<1, true>},
    {"host_uses_device_memory", uses_memory_of<0, false>},
};

}  // namespace

// Returns whether the case gave the right result.
extern "C" __attribute__((visibility("default"))) int planted(const char* name) {
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
