// attn: the tasks of one for_each, shared by the threads of a pool: Eigen's, or one of the caller's own.
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/worker_pool.hpp>
#include <attn/core/errors.hpp>

#include <atomic>
#include <cfenv>
#include <memory>
#include <thread>
#include <utility>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// While it lives, the thread rounds as another one does.
class rounding_use {
 public:
  explicit rounding_use(int mode) : before_(std::fegetround()), changed_(mode != before_) {
    if (changed_) std::fesetround(mode);
  }
  ~rounding_use() {
    if (changed_) std::fesetround(before_);
  }
  rounding_use(const rounding_use&) = delete;
  rounding_use& operator=(const rounding_use&) = delete;

 private:
  int before_;
  bool changed_;
};

/// Workers claim tasks in ascending order until none is left. None of them waits for another, so they may run on as few
/// threads as there are; one that begins after the end of the call does nothing.
class shared_tasks {
 public:
  shared_tasks(idx_t tasks, int workers, const task_body& body)
      : tasks_(tasks),
        workers_(workers),
        body_(body),
        begun_(new std::atomic<bool>[static_cast<std::size_t>(workers)]) {
    for (int worker = 0; worker < workers; ++worker) begun_[static_cast<std::size_t>(worker)] = false;
  }

  /// What is left of the tasks, by a worker that has not begun; or one of them, and then it may begin again. Returns
  /// whether it has done one.
  bool work(int worker, bool only_one = false) noexcept {
    bool found = false;
    if (!(running_.fetch_add(2) & ended)) {
      if (worker < 0 || worker >= workers_ || begun_[static_cast<std::size_t>(worker)].exchange(true)) {
        wrong_worker_ = worker, has_wrong_worker_ = true;
      } else if (std::this_thread::get_id() == caller_) {  // whose use of the matrix unit the call has
        found = claim(worker, only_one);
      } else {
        [[maybe_unused]] const matrix_unit_use unit;
        [[maybe_unused]] const rounding_use rounding(rounding_);
        found = claim(worker, only_one);
      }
    }
    if (running_.fetch_sub(2) - 2 == ended) running_.notify_all();
    return found;
  }

  /// Ends the call: waits for the workers that have begun, and throws what a task has thrown.
  void end() {
    running_.fetch_or(ended);
    for (int now; (now = running_.load()) != ended;) running_.wait(now);
    // Not kept: a worker that comes late may be the last to have this object.
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

  /// After the end: throws if a pool of the caller's did not do what it was asked to.
  void check_pool() const {
    const idx_t worker = wrong_worker_, run = next_;
    if (has_wrong_worker_)
      fail({"each of tasks 0 to ", workers_ - 1, " once; found ", worker,
            worker < 0 || worker >= workers_ ? "" : " twice"});
    if (run == 0 && tasks_ > 0) fail({"the tasks it is given; found none run"});
    if (run < tasks_) fail({"the tasks it is given; found ", run, " of ", tasks_, " run"});
  }

 private:
  [[noreturn, gnu::cold, gnu::noinline]] static void fail(std::initializer_list<word> expected) {
    raise<std::runtime_error>(error_text{"attn::execution: expected the pool to run ", error_text(expected)}.c_str());
  }

  bool claim(int worker, bool only_one) noexcept {
    bool found = false;
    const std::exception_ptr thrown = error_of([&] {
      for (idx_t task; !(found && only_one) && (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) {
        found = true;
        body_.call(body_.body, task, worker);
      }
    });
    if (thrown) {
      next_.store(tasks_, std::memory_order_relaxed);
      if (!failed_.exchange(true)) error_ = thrown;
    }
    if (only_one) begun_[static_cast<std::size_t>(worker)] = false;
    return found;
  }

  static constexpr int ended = 1;

  idx_t tasks_;
  int workers_;
  task_body body_;
  std::thread::id caller_ = std::this_thread::get_id();
  int rounding_ = std::fegetround();  // the caller's
  std::unique_ptr<std::atomic<bool>[]> begun_;
  std::atomic<idx_t> next_{0};
  std::atomic<int> running_{0};  // twice the workers at work, and `ended`
  std::atomic<int> wrong_worker_{0};
  std::atomic<bool> has_wrong_worker_{false}, failed_{false};
  std::exception_ptr error_;
};

}}}  // namespace attn::ATTN_ISA::detail
