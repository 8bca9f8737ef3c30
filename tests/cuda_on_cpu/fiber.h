// A flow of control with a stack of its own.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

// Such a function is not instrumented: before a jump, AddressSanitizer would forget all it knows of the stack.
#define UNSANITIZED __attribute__((noinline, no_sanitize("address")))

namespace cuda_on_cpu {

[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::fflush(stdout);
  std::fputs("cuda_on_cpu: ", stderr);
  std::vfprintf(stderr, format, arguments);
  std::fputc('\n', stderr);
  va_end(arguments);
  std::abort();
}

class Fiber {
 public:
  // Stands for the stack that is in use already.
  Fiber() : begun_(true) {}

  // body must begin with arrive() and must not return.
  explicit Fiber(void (*body)()) : size_(kStack) {
    const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapped_ = kStack + page;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK;
    memory_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, flags, -1, 0);
    // Stacks grow down: the lowest page catches an overflow.
    if (memory_ == MAP_FAILED || mprotect(memory_, page, PROT_NONE) != 0) fail("no memory for a stack");
    bottom_ = static_cast<char*>(memory_) + page;
    getcontext(&context_);
    context_.uc_stack.ss_sp = static_cast<char*>(memory_) + page;
    context_.uc_stack.ss_size = kStack;
    makecontext(&context_, body, 0);
  }

  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;
  ~Fiber() {
    if (memory_ != nullptr) munmap(memory_, mapped_);
  }

  // Returns when somebody switches back to this fiber, which must be the running one.
  UNSANITIZED void switch_to(Fiber& next) {
    left_ = this;
    arriving_ = &next;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&fake_stack_, next.bottom_, next.size_);
#endif
    if (__builtin_setjmp(place_) == 0) next.go_on();
    arrive();
  }

  static void arrive() {
#if defined(__SANITIZE_ADDRESS__)
    // The bounds of the first stack of all become known as it is left for the first time.
    __sanitizer_finish_switch_fiber(arriving_->fake_stack_, &left_->bottom_, &left_->size_);
#endif
  }

 private:
  // The built-in jumps make no system call.
  UNSANITIZED void go_on() {
    if (begun_) __builtin_longjmp(place_, 1);
    begun_ = true;
    setcontext(&context_);
    fail("setcontext failed");
  }

  static constexpr size_t kStack = size_t{512} << 10;  // the arguments of a kernel may already take 32 KB
  static inline Fiber *left_ = nullptr, *arriving_ = nullptr;

  bool begun_ = false;
  ucontext_t context_ = {};  // context in which the fiber begins
  void* place_[5] = {};      // place where the fiber was left
  void* memory_ = nullptr;
  size_t mapped_ = 0;
  const void* bottom_ = nullptr;
  size_t size_ = 0;
  void* fake_stack_ = nullptr;
};

}  // namespace cuda_on_cpu
