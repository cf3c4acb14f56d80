// attn: the threads of Eigen's pool.
#pragma once

#include <attn/core/detail/spinning_worker.hpp>

#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool>
#else
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif
#if __has_include(<unistd.h>)
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The number of this process, on systems that have fork(); 0 elsewhere.
inline long this_process() {
#if __has_include(<unistd.h>)
  return static_cast<long>(::getpid());
#else
  return 0;
#endif
}

/// A thread that waits for what it is to run: it exists before a pool relies on it.
class started_thread {
 public:
  started_thread() : thread_([this] { run(); }) {}
  /// Waits for what it runs; where it was given nothing, it ends.
  ~started_thread() {
    if (!given_) give(nullptr);
    thread_.join();
  }
  void give(std::function<void()>&& body) noexcept {
    body_ = std::move(body);
    given_ = 1;
    given_.notify_one();
  }
  void OnCancel() {}  // which pools of Eigen call

 private:
  void run() {
    given_.wait(0);
    if (body_) body_();
  }

  std::function<void()> body_;
  std::atomic<int> given_{0};
  std::thread thread_;  // last, since it uses the others
};

/// What Eigen's pool of threads is made of, with types of this namespace, so that its functions are of these
/// instructions too (config.hpp). The pool's constructor must not throw once it has a thread, which it would leave
/// waiting for work; so threads are started before it, and as many as the system permits.
class pool_environment {
 public:
  using EnvThread = started_thread;
  struct Task {
    std::function<void()> f;
  };

  explicit pool_environment(int threads) {
    threads_->reserve(static_cast<std::size_t>(threads));
    (void)error_of([&] {
      while (started() < threads) threads_->push_back(std::make_unique<started_thread>());
    });
  }
  int started() const { return static_cast<int>(threads_->size()); }

  EnvThread* CreateThread(std::function<void()> body) noexcept {
    EnvThread* const thread = threads_->back().release();
    threads_->pop_back();
    thread->give(std::move(body));
    return thread;
  }
  Task CreateTask(std::function<void()> f) { return {std::move(f)}; }
  void ExecuteTask(const Task& task) { task.f(); }

 private:
  std::shared_ptr<std::vector<std::unique_ptr<started_thread>>> threads_ =
      std::make_shared<std::vector<std::unique_ptr<started_thread>>>();
};

/// `threads` of them beside the caller's, or as many as the system permits. They belong to the process that made them:
/// a child has their memory after fork(), but none of the threads, and would wait for them forever. It therefore
/// neither uses nor frees them.
class eigen_threads final : public worker_pool {
 public:
  /// Of more, starting them and the memory of Eigen's pool, whose lists grow with the square, take seconds.
  static constexpr int most = 1024;

  explicit eigen_threads(int threads) { start(threads); }
  ~eigen_threads() override {
    for (int n = 0; n < threads_; ++n) places_[static_cast<std::size_t>(n)].close();
  }
  int threads() const { return threads_; }
  void set_spin(double seconds) override { spin_ = seconds; }

  bool run(idx_t tasks, int workers, const task_body& body) override {
    if (pool_.get_deleter().process != this_process()) start(threads_);
    workers = (std::min)(workers, threads_ + 1);
    if (workers == 1) return false;
    const auto shared = std::make_shared<shared_tasks>(tasks, workers, body);
    (void)error_of([&] {  // where memory runs out, those that were asked share the work
      for (int worker = 1; worker < workers; ++worker) {
        spinning_worker& at = places_[static_cast<std::size_t>(worker - 1)];
        if (at.give(shared)) continue;
        pool_->Schedule([shared, worker, &at, spin = spin_] { at.work(shared, worker, spin); });
      }
    });
    shared->work(0);
    shared->end();
    return true;
  }

 private:
  using pool = Eigen::ThreadPoolTempl<pool_environment>;
  struct deleter {
    long process;
    void operator()(pool* p) const {
      if (process == this_process()) delete p;
    }
  };
  void start(int threads) {
    const pool_environment environment(threads);
    threads_ = environment.started();
    places_.reset(new spinning_worker[static_cast<std::size_t>(threads_)]);
    pool_ = {threads_ > 0 ? new pool(threads_, environment) : nullptr, {this_process()}};
  }

  int threads_ = 0;
  double spin_ = 0;
  std::unique_ptr<spinning_worker[]> places_;  // of all workers but the caller
  std::unique_ptr<pool, deleter> pool_{nullptr, {0}};
};

}}}  // namespace attn::ATTN_ISA::detail
