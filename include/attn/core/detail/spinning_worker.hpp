// attn: a worker that looks for the next call before its thread sleeps: execution::set_spin.
#pragma once

#include <attn/core/detail/shared_tasks.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#if defined(__SSE2__) || defined(_M_X64)
#include <immintrin.h>
#endif

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Lets the other thread of the core work, where there is one.
inline void pause_thread() {
#if defined(__SSE2__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield" ::: "memory");
#else
  std::this_thread::yield();
#endif
}

/// The place of one worker of an execution. Its thread works, then waits there; a call of the execution finds it there,
/// or has to wake a thread.
class spinning_worker {
 public:
  /// By the thread: its share of `tasks`, and of every call that begins within `seconds` after the last.
  void work(std::shared_ptr<shared_tasks> tasks, int worker, double seconds) {
    for (;;) {
      tasks->work(worker);
      tasks.reset();
      int expected = absent;
      // Another thread may be here, where a call did not wait for this one.
      if (!(seconds > 0) || !state_.compare_exchange_strong(expected, waiting)) return;
      if (!next_call(seconds)) return;
      tasks = std::move(next_);
      expected = given;
      state_.compare_exchange_strong(expected, absent);  // unless it has been closed meanwhile, for good
    }
  }

  /// By the caller: no thread waits here any longer.
  void close() { state_ = closed; }

  /// By the caller: whether a thread is here and has taken it.
  bool give(const std::shared_ptr<shared_tasks>& tasks) {
    if (state_ != waiting) return false;
    next_ = tasks;
    int expected = waiting;
    if (state_.compare_exchange_strong(expected, given)) return true;
    next_.reset();
    return false;
  }

 private:
  static constexpr int absent = 0, waiting = 1, given = 2, closed = 3;

  bool next_call(double seconds) {
    using clock = std::chrono::steady_clock;
    constexpr double most = 1e6;  // which a clock can count
    const auto end = clock::now() + std::chrono::duration_cast<clock::duration>(
                                        std::chrono::duration<double>((std::min)(seconds, most)));
    do {
      for (int n = 0; n < 64; ++n, pause_thread())
        if (const int now = state_; now != waiting) return now == given;
    } while (clock::now() < end);
    int expected = waiting;
    return !state_.compare_exchange_strong(expected, absent) && expected == given;
  }

  std::atomic<int> state_{absent};
  std::shared_ptr<shared_tasks> next_;  // the caller's while the state is `waiting`, the thread's once it is `given`
};

}}}  // namespace attn::ATTN_ISA::detail
