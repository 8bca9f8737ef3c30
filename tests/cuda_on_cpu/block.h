// Runs the threads of one block, and lets those that meet at a barrier or a warp collective go on together.
//
// Threads that have returned are not waited for, as on GPUs since compute capability 7.0. All others must come to the
// same barrier, by its place in the source; the lanes that a collective's mask names must come to the same collective
// with the same mask. If no thread can go on, or a whole block waits at several barriers, that is reported.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "fiber.h"

// CUDA's built-in variables, those of the running thread.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_cpu {

constexpr int kNone = -1;
constexpr uint64_t kPoison = ~uint64_t{0};

struct Order {
  // eager: the thread that was let go last goes on first, so that a warp runs ahead of the others as far as it can.
  enum Kind { forward, reverse, shuffled, eager } kind;
  uint64_t seed;

  // splitmix64
  uint64_t random() {
    uint64_t z = seed += 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
};

// The call, and its operands, with which a thread waits for the other threads of its warp or block.
struct Meeting {
  const char* call;
  const char* file;
  int line;
  bool whole_block;
  uint32_t mask;   // of lanes, unless it is the whole block
  uint64_t value;  // others may read it; not zero counts as a vote
  int source;      // the lane whose value is wanted, or kNone: all votes of the warp as bits

  bool same_place(const Meeting& other) const {
    return line == other.line && mask == other.mask && whole_block == other.whole_block &&
           (call == other.call || std::strcmp(call, other.call) == 0) &&
           (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

class Block {
 public:
  using Body = void (*)(void* context);

  // Calls body(context) in each of `threads` threads. order is advanced.
  void run(const char* kernel, int threads, Body body, void* context, Order& order) {
    kernel_ = kernel, body_ = body, context_ = context, order_ = &order;
    threads_.assign(threads, Thread{});
    live_ = threads;
    at_barrier_ = 0;
    ready_.clear();
    release(0, threads, [](int) { return true; });
    give(pick());
    first_.switch_to(*idle_fiber());
  }

  // Waits for the others; returns the number of votes in the block, or what Meeting::source says.
  uint64_t meet(const Meeting& meeting) {
    const int self = running_;
    Thread& thread = threads_[self];
    Fiber* fiber = fiber_;
    thread.state = State::waiting;
    thread.at = meeting;
    thread.fiber = fiber;
    if (meeting.whole_block) {
      ++at_barrier_;
      try_barrier();
    } else {
      try_warp(self);
    }
    const int next = pick();
    give(next);
    Fiber* target = threads_[next].fiber;
    if (target == nullptr) target = idle_fiber();
    if (target != fiber) fiber->switch_to(*target);
    fiber_ = fiber;
    return thread.result;
  }

  int lane() const { return running_ % warpSize; }
  const char* kernel() const { return kernel_; }

 private:
  enum class State { ready, waiting, returned };

  struct Thread {
    State state = State::waiting;
    Fiber* fiber = nullptr;  // null: has not begun
    Meeting at = {};
    uint64_t result = 0;
  };

  // Every fiber's body: runs threads to their end, one after the other, as long as there are some that have not begun.
  static void work();

  void work_on(Fiber* self) {
    for (;;) {
      fiber_ = self;
      body_(context_);
      leave();
      const int next = pick();
      if (next != kNone) {
        give(next);
        if (threads_[next].fiber == nullptr) continue;
      }
      idle_.push_back(self);
      self->switch_to(next == kNone ? first_ : *threads_[next].fiber);
    }
  }

  Fiber* idle_fiber() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>(work));
      idle_.push_back(fibers_.back().get());
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    starting_ = fiber;
    return fiber;
  }

  // The thread to run next, or kNone when all have returned.
  int pick() {
    if (ready_.empty()) {
      if (live_ > 0) report_stuck();
      return kNone;
    }
    if (order_->kind == Order::shuffled) std::swap(ready_.front(), ready_[order_->random() % ready_.size()]);
    const bool last = order_->kind == Order::eager;
    const int thread = last ? ready_.back() : ready_.front();
    last ? ready_.pop_back() : ready_.pop_front();
    return thread;
  }

  void give(int thread) {
    const auto id = static_cast<unsigned>(thread);
    running_ = thread;
    threadIdx = {id % blockDim.x, id / blockDim.x % blockDim.y, id / blockDim.x / blockDim.y};
  }

  template <class Chosen>
  void release(int begin, int end, Chosen chosen) {
    for (int i = begin; i < end; ++i) {
      const int thread = order_->kind == Order::reverse ? begin + end - 1 - i : i;
      if (!chosen(thread)) continue;
      threads_[thread].state = State::ready;
      ready_.push_back(thread);
    }
  }

  void leave() {
    threads_[running_].state = State::returned;
    --live_;
    if (live_ > 0) try_barrier();
    const int first = running_ / warpSize * warpSize;
    for (int i = first; i < first + warpSize && i < size(); ++i) {
      if (threads_[i].state == State::waiting && !threads_[i].at.whole_block) try_warp(i);
    }
  }

  // Opens the barrier if all threads that are left wait at one.
  void try_barrier() {
    if (at_barrier_ != live_) return;
    const auto waits = [&](int i) { return threads_[i].state == State::waiting; };
    const Meeting* first = nullptr;
    uint64_t votes = 0;
    for (int i = 0; i < size(); ++i) {
      if (!waits(i)) continue;
      if (first == nullptr) first = &threads_[i].at;
      if (!threads_[i].at.same_place(*first)) report_stuck();
      votes += threads_[i].at.value != 0;
    }
    for (Thread& thread : threads_) thread.result = votes;
    at_barrier_ = 0;
    release(0, size(), waits);
  }

  // Lets the lanes that a waiting thread's mask names go on if they are all there.
  void try_warp(int waiting) {
    const Meeting& meeting = threads_[waiting].at;
    const int first = waiting / warpSize * warpSize;
    const int lanes = std::min(warpSize, size() - first);
    // Mostly some are on their way yet.
    for (int lane = 0; lane < lanes; ++lane) {
      if ((meeting.mask >> lane & 1) && threads_[first + lane].state == State::ready) return;
    }
    uint32_t present = 0, votes = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const Thread& thread = threads_[first + lane];
      if (!(meeting.mask >> lane & 1) || thread.state == State::returned) continue;
      if (thread.state != State::waiting || !thread.at.same_place(meeting)) return;
      present |= 1u << lane;
      votes |= static_cast<uint32_t>(thread.at.value != 0) << lane;
    }
    const auto is_present = [&](int lane) { return lane >= 0 && lane < warpSize && (present >> lane & 1); };
    for (int lane = 0; lane < warpSize; ++lane) {
      if (!is_present(lane)) continue;
      Thread& thread = threads_[first + lane];
      const int source = thread.at.source;
      // Reading from an absent lane is undefined: such a lane gets poison.
      thread.result = source == kNone ? votes : is_present(source) ? threads_[first + source].at.value : kPoison;
    }
    release(first, first + warpSize, [&](int i) { return is_present(i - first); });
  }

  [[noreturn]] void report_stuck() const {
    std::string text;
    std::vector<bool> told(threads_.size());
    int returned = 0;
    for (int i = 0; i < size(); ++i) {
      returned += threads_[i].state == State::returned;
      if (threads_[i].state != State::waiting || told[i]) continue;
      const Meeting& at = threads_[i].at;
      int count = 0;
      for (int k = i; k < size(); ++k) {
        if (threads_[k].state != State::waiting || !threads_[k].at.same_place(at)) continue;
        told[k] = true;
        ++count;
      }
      char line[512];
      std::snprintf(line, sizeof line, "\n  %d at %s, %s:%d, the first of them thread %d", count, at.call, at.file,
                    at.line, i);
      text += line;
      if (!at.whole_block) std::snprintf(line, sizeof line, " (mask %08x)", at.mask), text += line;
    }
    fail("%s, block (%u, %u, %u): divergent synchronisation, threads wait for others that never come:%s\n  %d returned",
         kernel_, blockIdx.x, blockIdx.y, blockIdx.z, text.c_str(), returned);
  }

  int size() const { return static_cast<int>(threads_.size()); }

  const char* kernel_ = "";
  Body body_ = nullptr;
  void* context_ = nullptr;
  Order* order_ = nullptr;
  std::vector<Thread> threads_;
  std::deque<int> ready_;
  int live_ = 0, at_barrier_ = 0, running_ = 0;
  Fiber first_;  // the caller's
  Fiber* fiber_ = nullptr;
  Fiber* starting_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

inline Block& block() {
  static Block only;
  return only;
}

inline void Block::work() {
  Fiber::arrive();
  block().work_on(block().starting_);
}

}  // namespace cuda_on_cpu
