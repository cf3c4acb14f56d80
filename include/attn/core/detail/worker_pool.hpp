// attn: the threads of an execution, whichever they are, and those of Eigen's pool.
#pragma once

#include <attn/core/detail/shared_tasks.hpp>

#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool>
#else
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif
#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <functional>
#include <memory>
#include <utility>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The number of this process, on systems that have fork(); 0 elsewhere.
inline long this_process() {
#if __has_include(<unistd.h>)
  return static_cast<long>(::getpid());
#else
  return 0;
#endif
}

/// Threads that share the tasks of a for_each. An execution knows no more of them, so a file that calls operators but
/// makes no execution with threads compiles no pool, which would be a tenth of its machine code.
class worker_pool {
 public:
  virtual ~worker_pool() = default;
  /// body(task, worker) for every task in [0, tasks), by `workers` threads at most. Throws what a task has thrown.
  virtual void run(idx_t tasks, int workers, const task_body& body) = 0;
};

/// Eigen's pool of threads, with types of this namespace, so that its functions are of these instructions too
/// (config.hpp).
struct pool_environment : Eigen::StlThreadEnvironment {
  struct Task : Eigen::StlThreadEnvironment::Task {};
  Task CreateTask(std::function<void()> f) { return {{std::move(f)}}; }
};

/// `threads` of them beside the caller's. They belong to the process that made them: a child has their memory after
/// fork(), but none of the threads, and would wait for them forever. It therefore neither uses nor frees them.
class eigen_threads final : public worker_pool {
 public:
  explicit eigen_threads(int threads) : threads_(threads), pool_(make()) {}

  void run(idx_t tasks, int workers, const task_body& body) override {
    const auto shared = std::make_shared<shared_tasks>(tasks, workers, body);
    if (pool_.get_deleter().process != this_process()) pool_ = make();
    (void)error_of([&] {  // where one cannot be started, those that run share the work
      for (int worker = 1; worker < workers; ++worker) pool_->Schedule([shared, worker] { shared->work(worker); });
    });
    shared->work(0);
    shared->end();
  }

 private:
  using pool = Eigen::ThreadPoolTempl<pool_environment>;
  struct deleter {
    long process = 0;
    void operator()(pool* p) const {
      if (process == this_process()) delete p;
    }
  };
  std::unique_ptr<pool, deleter> make() const { return {new pool(threads_), {this_process()}}; }

  int threads_;
  std::unique_ptr<pool, deleter> pool_;
};

}}}  // namespace attn::ATTN_ISA::detail
