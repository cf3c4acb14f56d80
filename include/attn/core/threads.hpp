// attn: executions with threads: Eigen's, or those of a pool of your own.
//
//   attn::execution threads(4);    // the caller's thread and three of Eigen's pool
//   attn::execution own(4, pool);  // four threads of a pool of your own
//
// A pool of your own: pool(count, task) lets task(0) to task(count - 1) run, each once, in any order, on any threads,
// the calling one included. It may wait for them or not, but must have run one of them when it returns. Those that have
// begun share all the work; those that have not are not waited for. So a pool without a free thread, because it runs
// the very code that calls, costs time, but nothing waits forever. In place of task(n), task.one(n) may be called until
// it returns false, by any threads, but not by two at a time with the same n:
//
//   [](int count, auto task) { tbb::parallel_for(0, count, task, tbb::simple_partitioner()); }
//   [&](int count, auto task) {                         // a pool with a queue: nobody need wait
//     for (int n = 1; n < count; ++n) asio::post(threads, [=] { task(n); });
//     task(0);
//   }
//   [](int, auto task) { while (task.one(0)) coroutine.yield(); }
//
// `threads` is then how many at most work at the same time. Calls throw std::runtime_error, as after any failure with
// caches as they were, where the pool runs a task twice, none at all, or by one(n) not every piece; what the pool throws
// is passed on.
//
// In a process that fork() made, an execution starts threads of its own, or, where it has a pool of yours, works on the
// caller's thread alone; fork() must not be called while another thread runs a call.
#pragma once

#include <attn/core/detail/eigen_threads.hpp>
#include <attn/core/detail/shared_tasks.hpp>
#include <attn/core/execution.hpp>

#include <concepts>
#include <functional>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>

namespace attn { inline namespace ATTN_ISA {

/// What a pool of your own is given: task(n) does the n-th share of a call. Or, piece by piece, task.one(n) does the
/// next piece of work as the n-th worker and returns whether there was one: for pools that interleave calls, limit
/// them, or measure them. It may be copied; once the call has returned it does nothing.
class pool_task {
 public:
  explicit pool_task(std::shared_ptr<detail::shared_tasks> tasks) : tasks_(std::move(tasks)) {}
  void operator()(int n) const { tasks_->work(n); }
  bool one(int n) const { return tasks_->work(n, true); }

 private:
  std::shared_ptr<detail::shared_tasks> tasks_;
};

/// A pool of threads of your own, as above.
template <class Pool>
concept own_pool = std::copy_constructible<Pool> && std::invocable<Pool&, int, const pool_task&>;

namespace detail {

/// The threads of such a pool, which are those of the process that made it.
class own_threads final : public worker_pool {
 public:
  explicit own_threads(std::function<void(int, const pool_task&)> pool) : pool_(std::move(pool)) {}

  bool run(idx_t tasks, int workers, const task_body& body) override {
    if (process_ != this_process()) return false;
    const auto shared = std::make_shared<shared_tasks>(tasks, workers, body);
    const std::exception_ptr thrown = error_of([&] { pool_(workers, pool_task(shared)); });
    shared->end();
    if (thrown) std::rethrow_exception(thrown);
    shared->check_pool();
    return true;
  }

 private:
  std::function<void(int, const pool_task&)> pool_;
  long process_ = this_process();
};

struct thread_start {
  static execution_threads start(int threads) {
    validate(threads, eigen_threads::most);
    if (threads == 1) return {};
    auto pool = std::make_unique<eigen_threads>(threads - 1);
    const int started = pool->threads();
    if (started == 0) return {};
    return {started + 1, std::move(pool)};
  }
  template <class Pool>
  static execution_threads start(int threads, Pool pool) {
    static_assert(own_pool<Pool>, "attn::execution: a pool of your own is called as pool(int, attn::pool_task)");
    validate(threads, (std::numeric_limits<int>::max)());
    return {threads, std::make_unique<own_threads>(std::move(pool))};
  }

 private:
  static void validate(int threads, int most) {
    if (threads < 1 || threads > most)
      raise<std::invalid_argument>(
          (threads < 1 ? error_text{"attn::execution: expected threads >= 1; found ", threads}
                       : error_text{"attn::execution: expected threads <= ", most, "; found ", threads})
              .c_str());
  }
};

}  // namespace detail

}}  // namespace attn::ATTN_ISA
