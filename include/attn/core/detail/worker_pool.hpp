// attn: the threads of an execution, whichever they are.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The body of a for_each with its type erased: tasks are long, and the threading is compiled once.
struct task_body {
  void* body;
  void (*call)(void*, idx_t, int);
  void operator()(idx_t task, int worker) const { call(body, task, worker); }
  /// Every task on the caller's thread.
  void run_serially(idx_t tasks) const {
    for (idx_t task = 0; task < tasks; ++task) call(body, task, 0);
  }
  template <class Body>
  static void call_of(void* body, idx_t task, int worker) {
    (*static_cast<Body*>(body))(task, worker);
  }
};

/// Threads that share the tasks of a for_each. An execution knows no more of them, so a file that calls operators but
/// makes no execution with threads compiles no pool, which would be a tenth of its machine code.
class worker_pool {
 public:
  virtual ~worker_pool() = default;
  /// body(task, worker) for every task in [0, tasks), by `workers` threads at most. Throws what a task has thrown.
  virtual void run(idx_t tasks, int workers, const task_body& body) = 0;
  /// How long threads without work look for the next call. A pool of the caller's decides that itself.
  virtual void set_spin(double) {}
};

}}}  // namespace attn::ATTN_ISA::detail
