// Runs the threads of a grid, and lets those that meet at a barrier or a shuffle of a warp go on together.
//
// One or several blocks are resident at a time. In a shuffled order, a thread of another resident block may go on
// wherever a thread waits or is about to make an atomic operation.
//
// Threads that have returned are not waited for, as on GPUs since compute capability 7.0. All others must come to the
// same barrier, by its place in the source; the lanes that a shuffle's mask names must come to the same shuffle with
// the same mask. If no thread can go on, a whole block waits at several barriers, or threads wait for one another by
// atomic operations without end, that is reported.
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
#include "shared_memory.h"

// CUDA's built-in variables, those of the running thread.
inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

namespace cuda_on_cpu {

constexpr int kNone = -1;  // no thread
// With several resident blocks, the running one continues this many times on average before another one does: at
// barriers and shuffles, which all threads of a block pass, and at atomic operations.
constexpr uint64_t kStayAtMeetings = 64, kStayAtAtomics = 2;
// Limit on atomic operations without a barrier or shuffle between them.
constexpr int64_t kMostAtomics = 1'000'000;
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
  // A shuffle has the lanes that take part, this lane's value, and the lane whose value is wanted.
  uint32_t mask;
  uint64_t value;
  int source;

  bool same_place(const Meeting& other) const {
    return line == other.line && mask == other.mask && whole_block == other.whole_block &&
           (call == other.call || std::strcmp(call, other.call) == 0) &&
           (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

class Grid {
 public:
  using Body = void (*)(void* context);

  // Calls body(context) in each of `threads` threads of each of the blocks, at most `most` of which are resident at a
  // time. blocks: their numbers, in the order in which they begin. order is advanced.
  void run(const char* kernel, const std::vector<uint64_t>& blocks, int most, int threads, Body body, void* context,
           Order& order, SharedMemory& shared) {
    if (blocks.empty()) return;
    kernel_ = kernel, body_ = body, context_ = context, order_ = &order, shared_ = &shared;
    blocks_ = &blocks, begun_ = 0, thread_count_ = threads, atomics_ = 0;
    residents_.assign(std::min<size_t>(most, blocks.size()), Resident{});
    for (Resident& resident : residents_) {
      if (resident_ != nullptr) shared_->take_away(number());
      begin(resident);
    }
    give(pick());
    first_.switch_to(*idle_fiber());
    residents_.clear();
    resident_ = nullptr;
  }

  // Lets other threads go on before the running one does, in a shuffled order.
  void yield() {
    if (++atomics_ > kMostAtomics) report_waiting();
    if (resident_ == nullptr || order_->kind != Order::shuffled) return;
    Thread& thread = threads()[running_];
    thread.state = State::ready;
    thread.fiber = fiber_;
    resident_->ready.push_back(running_);
    go_on_elsewhere(kStayAtAtomics);
  }

  // Waits for the others; returns the value that a shuffle wants.
  uint64_t meet(const Meeting& meeting) {
    const int self = running_;
    atomics_ = 0;
    Thread& thread = threads()[self];
    thread.state = State::waiting;
    thread.at = meeting;
    thread.fiber = fiber_;
    if (meeting.whole_block) {
      ++resident_->at_barrier;
      try_barrier();
    } else {
      try_warp(self);
    }
    go_on_elsewhere(kStayAtMeetings);
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

  struct Resident {
    uint64_t block = 0;
    std::vector<Thread> threads;
    std::deque<int> ready;
    int live = 0, at_barrier = 0;
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
        if (threads()[next].fiber == nullptr) continue;
      }
      idle_.push_back(self);
      self->switch_to(next == kNone ? first_ : *threads()[next].fiber);
    }
  }

  // Runs other threads until it is the running thread's turn again.
  void go_on_elsewhere(uint64_t stay) {
    Fiber* const fiber = fiber_;
    const int next = pick(stay);
    give(next);
    Fiber* target = threads()[next].fiber;
    if (target == nullptr) target = idle_fiber();
    if (target != fiber) fiber->switch_to(*target);
    fiber_ = fiber;
  }

  // Begins the next block in the place of a resident one.
  void begin(Resident& resident) {
    resident_ = &resident;
    resident.block = (*blocks_)[begun_++];
    resident.threads.assign(thread_count_, Thread{});
    resident.live = thread_count_;
    resident.at_barrier = 0;
    shared_->begin(number());
    enter();
    release(0, thread_count_, [](int) { return true; });
  }

  // Makes the resident block's number that of the running one.
  void enter() { blockIdx = {static_cast<unsigned>(resident_->block), 0, 0}; }

  void change_to(Resident& other) {
    if (&other == resident_) return;
    if (resident_->live > 0) shared_->take_away(number());
    resident_ = &other;
    shared_->put_back(number());
    enter();
  }

  int number() const { return static_cast<int>(resident_ - residents_.data()); }
  std::vector<Thread>& threads() const { return resident_->threads; }

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

  // The thread of the resident block to run next, or kNone when all threads of all blocks have returned.
  int pick(uint64_t stay = kStayAtMeetings) {
    if (resident_->live == 0 && !next_block()) return kNone;
    if (residents_.size() > 1 && order_->random() % stay == 0) {
      Resident& other = residents_[order_->random() % residents_.size()];
      if (other.live > 0) change_to(other);
    }
    std::deque<int>& ready = resident_->ready;
    if (ready.empty()) report_stuck();
    if (order_->kind == Order::shuffled) std::swap(ready.front(), ready[order_->random() % ready.size()]);
    const bool last = order_->kind == Order::eager;
    const int thread = last ? ready.back() : ready.front();
    last ? ready.pop_back() : ready.pop_front();
    return thread;
  }

  // Ends the running block, and goes on to a new one or another; returns false if there is none.
  bool next_block() {
    shared_->end();
    if (begun_ < blocks_->size()) return begin(*resident_), true;
    for (Resident& other : residents_) {
      if (other.live > 0) return change_to(other), true;
    }
    return false;
  }

  void give(int thread) {
    running_ = thread;
    threadIdx = {static_cast<unsigned>(thread), 0, 0};
  }

  template <class Chosen>
  void release(int begin, int end, Chosen chosen) {
    for (int i = begin; i < end; ++i) {
      const int thread = order_->kind == Order::reverse ? begin + end - 1 - i : i;
      if (!chosen(thread)) continue;
      threads()[thread].state = State::ready;
      resident_->ready.push_back(thread);
    }
  }

  void leave() {
    threads()[running_].state = State::returned;
    --resident_->live;
    if (resident_->live > 0) try_barrier();
    const int first = running_ / warpSize * warpSize;
    for (int i = first; i < first + warpSize && i < size(); ++i) {
      if (threads()[i].state == State::waiting && !threads()[i].at.whole_block) try_warp(i);
    }
  }

  // Opens the barrier if all threads that are left wait at one.
  void try_barrier() {
    if (resident_->at_barrier != resident_->live) return;
    const auto waits = [&](int i) { return threads()[i].state == State::waiting; };
    const Meeting* first = nullptr;
    for (int i = 0; i < size(); ++i) {
      if (!waits(i)) continue;
      if (first == nullptr) first = &threads()[i].at;
      if (!threads()[i].at.same_place(*first)) report_stuck();
    }
    resident_->at_barrier = 0;
    release(0, size(), waits);
  }

  // Lets the lanes that a waiting thread's mask names go on if they are all there.
  void try_warp(int waiting) {
    const Meeting& meeting = threads()[waiting].at;
    const int first = waiting / warpSize * warpSize;
    const int lanes = std::min(warpSize, size() - first);
    // Mostly some are on their way yet.
    for (int lane = 0; lane < lanes; ++lane) {
      if ((meeting.mask >> lane & 1) && threads()[first + lane].state == State::ready) return;
    }
    uint32_t present = 0;
    for (int lane = 0; lane < lanes; ++lane) {
      const Thread& thread = threads()[first + lane];
      if (!(meeting.mask >> lane & 1) || thread.state == State::returned) continue;
      if (thread.state != State::waiting || !thread.at.same_place(meeting)) return;
      present |= 1u << lane;
    }
    const auto is_present = [&](int lane) { return (present >> lane & 1) != 0; };
    for (int lane = 0; lane < lanes; ++lane) {
      if (!is_present(lane)) continue;
      Thread& thread = threads()[first + lane];
      const int source = thread.at.source;
      // Reading from an absent lane is undefined: such a lane gets poison.
      thread.result = is_present(source) ? threads()[first + source].at.value : kPoison;
    }
    release(first, first + lanes, [&](int i) { return is_present(i - first); });
  }

  [[noreturn]] void report_stuck() const {
    std::string text;
    std::vector<bool> told(threads().size());
    int returned = 0;
    for (int i = 0; i < size(); ++i) {
      returned += threads()[i].state == State::returned;
      if (threads()[i].state != State::waiting || told[i]) continue;
      const Meeting& at = threads()[i].at;
      int count = 0;
      for (int k = i; k < size(); ++k) {
        if (threads()[k].state != State::waiting || !threads()[k].at.same_place(at)) continue;
        told[k] = true;
        ++count;
      }
      char line[512];
      std::snprintf(line, sizeof line, "\n  %d at %s, %s:%d, the first of them thread %d", count, at.call, at.file,
                    at.line, i);
      text += line;
      if (!at.whole_block) std::snprintf(line, sizeof line, " (mask %08x)", at.mask), text += line;
    }
    fail("%s, block %u: divergent synchronisation, threads wait for others that never come:%s\n  %d returned", kernel_,
         blockIdx.x, text.c_str(), returned);
  }

  [[noreturn]] void report_waiting() const {
    fail("%s, block %u: %ld atomic operations without progress, threads wait for others that never come", kernel_,
         blockIdx.x, kMostAtomics);
  }

  int size() const { return thread_count_; }

  const char* kernel_ = "";
  Body body_ = nullptr;
  void* context_ = nullptr;
  Order* order_ = nullptr;
  SharedMemory* shared_ = nullptr;
  const std::vector<uint64_t>* blocks_ = nullptr;
  size_t begun_ = 0;
  int thread_count_ = 0;
  int64_t atomics_ = 0;  // since a thread last came to a barrier or a shuffle
  std::vector<Resident> residents_;
  Resident* resident_ = nullptr;  // the one that the running thread belongs to
  int running_ = 0;
  Fiber first_;  // the caller's
  Fiber* fiber_ = nullptr;
  Fiber* starting_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
};

inline Grid& grid() {
  static Grid only;
  return only;
}

inline void Grid::work() {
  Fiber::arrive();
  grid().work_on(grid().starting_);
}

}  // namespace cuda_on_cpu
