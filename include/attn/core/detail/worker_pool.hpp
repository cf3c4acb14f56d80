// attn: the threads of an execution, whichever they are.
#pragma once

#include <attn/core/tensor_view.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The body of a for_each with its type erased, so that threading is compiled once: call(body, task, worker) does one
/// task.
struct task_body {
  const void* body;
  void (*call)(const void*, idx_t, int);

  template <class Body>
  task_body(const Body& one) : body(&one), call(call_of<Body>) {}
  template <class Body>
  static void call_of(const void* body, idx_t task, int worker) {
    (*static_cast<const Body*>(body))(task, worker);
  }
};

/// Threads that share the tasks of a for_each. An execution knows no more of them, so a file that calls operators but
/// makes no execution with threads compiles no pool, which would be a tenth of its machine code.
class worker_pool {
 public:
  virtual ~worker_pool() = default;
  /// body(task, worker) for every task in [0, tasks), by `workers` threads at most. Throws what a task has thrown.
  /// False where there are no threads but the caller's: then it has done nothing.
  [[nodiscard]] virtual bool run(idx_t tasks, int workers, const task_body& body) = 0;
  /// How long threads without work look for the next call. A pool of the caller's decides that itself.
  virtual void set_spin(double) {}
};

}}}  // namespace attn::ATTN_ISA::detail
