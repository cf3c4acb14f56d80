// An execution on threads of the caller's own: every task once, whatever the pool does with what it is given; nothing
// waits forever; a pool that does not do its part is told so.
#include <attn/core/threads.hpp>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if __has_include(<sys/wait.h>)
#include <sys/wait.h>
#include <unistd.h>
#endif

#include "support/catch.hpp"
#include "support/tensor.hpp"

namespace testing::own_pool_tests {
using attn::execution, attn::pool_task;

/// Threads that take jobs from a queue.
class job_queue {
 public:
  explicit job_queue(int threads) {
    for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { work(); });
  }
  ~job_queue() {
    {
      const std::lock_guard lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    for (std::thread& t : threads_) t.join();
  }
  void post(std::function<void()> job) {
    {
      const std::lock_guard lock(mutex_);
      jobs_.push_back(std::move(job));
    }
    changed_.notify_one();
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closed_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  bool closed_ = false;
  std::vector<std::thread> threads_;
};

/// How a pool with a queue is given to an execution.
auto queued(job_queue& jobs) {
  return [&jobs](int count, auto task) {
    for (int n = 1; n < count; ++n) jobs.post([=] { task(n); });
    task(0);
  };
}

const auto in_order = [](int count, auto task) {
  for (int n = 0; n < count; ++n) task(n);
};
const auto backwards = [](int count, auto task) {
  while (count-- > 0) task(count);
};
const auto new_threads = [](int count, auto task) {
  std::vector<std::thread> threads;
  for (int n = 0; n < count; ++n) threads.emplace_back(task, n);
  for (std::thread& t : threads) t.join();
};
const auto in_turns = [](int count, auto task) {
  for (int n = 0; task.one(n);) n = (n + 1) % count;
};
const auto one_then_all = [](int count, auto task) {
  for (int n = 0; n < count; ++n) task.one(n);
  task(count - 1);
};
const auto new_threads_in_turns = [](int count, auto task) {
  new_threads(count, [task](int n) {
    while (task.one(n)) std::this_thread::yield();
    task.one(n);  // there is none, and asking again is no fault
  });
};
const auto only_the_last = [](int count, auto task) { task(count - 1); };

void each_task_runs_once(execution& run) {
  for (idx_t tasks : {0, 1, 2, 7, 1000}) {
    CAPTURE(tasks);
    std::vector<int> times(static_cast<std::size_t>(tasks));
    std::vector<std::atomic<int>> busy(static_cast<std::size_t>(run.threads()));
    std::atomic<bool> alone = true;
    run.for_each(tasks, [&](idx_t task, int worker) {
      auto& here = busy.at(static_cast<std::size_t>(worker));
      if (here.exchange(1)) alone = false;
      ++times[static_cast<std::size_t>(task)];
      here = 0;
    });
    CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
    CHECK(alone);
  }
}

std::string caught(execution& run, const std::function<void(idx_t)>& body = [](idx_t) {}) {
  try {
    run.for_each(10, [&](idx_t task, int) { body(task); });
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("a pool of one's own runs every task once", "[own_pool]") {
  job_queue jobs(2);
  for (int threads : {1, 2, 5}) {
    CAPTURE(threads);
    execution queue(threads, queued(jobs)), order(threads, in_order), reverse(threads, backwards),
        fresh(threads, new_threads), last(threads, only_the_last), turns(threads, in_turns),
        mixed(threads, one_then_all), fresh_turns(threads, new_threads_in_turns);
    for (execution* run : {&queue, &order, &reverse, &fresh, &last, &turns, &mixed, &fresh_turns}) {
      REQUIRE(run->threads() == threads);
      each_task_runs_once(*run);
    }
    execution moved = std::move(queue);
    each_task_runs_once(moved);
  }
}

TEST_CASE("a pool runs a call's tasks one at a time, in ascending order, by the worker it names", "[own_pool]") {
  std::vector<int> workers;
  int found = 0;
  bool at_end = true, after_end = true;
  pool_task kept{nullptr};
  execution run(3, [&](int count, const pool_task& task) {
    for (int n : {2, 0, 2, 1, 2}) found += task.one(n % count) ? 1 : 0;
    at_end = task.one(0);
    kept = task;
  });
  std::vector<idx_t> order;
  run.for_each(4, [&](idx_t task, int worker) { order.push_back(task), workers.push_back(worker); });
  CHECK(order == std::vector<idx_t>{0, 1, 2, 3});
  CHECK(workers == std::vector<int>{2, 0, 2, 1});
  CHECK(found == 4);
  CHECK_FALSE(at_end);
  after_end = kept.one(0);
  CHECK_FALSE(after_end);
}

TEST_CASE("a call from within a pool's own jobs ends, though no thread is free", "[own_pool]") {
  job_queue jobs(2);
  std::atomic<int> done = 0;
  std::atomic<bool> both = false;
  for (int job = 0; job < 2; ++job)
    jobs.post([&] {
      ++done;
      while (done < 2) std::this_thread::yield();  // both threads are taken
      execution run(4, queued(jobs));
      std::atomic<int> tasks = 0;
      run.for_each(100, [&](idx_t, int) {
        execution inner(3, queued(jobs));
        inner.for_each(5, [&](idx_t, int) { ++tasks; });
      });
      if (tasks != 500) done = 100;
      if (++done == 4) both = true;
    });
  for (int wait = 0; wait < 2000 && !both; ++wait) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(both);
}

TEST_CASE("what a task throws reaches the caller, and the execution can be used again", "[own_pool]") {
  job_queue jobs(2);
  execution queue(3, queued(jobs)), fresh(3, new_threads), turns(3, in_turns);
  for (execution* run : {&queue, &fresh, &turns}) {
    for (idx_t bad : {0, 5, 9})
      CHECK(caught(*run, [&](idx_t task) {
              if (task == bad) throw std::runtime_error("task " + std::to_string(task));
            }) == "task " + std::to_string(bad));
    each_task_runs_once(*run);
  }
}

TEST_CASE("a pool that does not do its part is told so", "[own_pool]") {
  const std::string expected = "attn::execution: expected the pool to run ";
  execution none(3, [](int, const auto&) {});
  CHECK(caught(none) == expected + "the tasks it is given; found none run");
  execution twice(3, [](int count, auto task) {
    for (int n = 0; n < count; ++n) task(n), task(n);
  });
  std::atomic<int> done = 0;
  CHECK(caught(twice, [&](idx_t) { ++done; }).starts_with(expected + "each of tasks 0 to 2 once; found "));
  CHECK(done == 10);
  execution beyond(3, [](int count, auto task) { task(0), task(count); });
  CHECK(caught(beyond) == expected + "each of tasks 0 to 2 once; found 3");
  execution before(2, [](int, auto task) { task(1), task(-1); });
  CHECK(caught(before) == expected + "each of tasks 0 to 1 once; found -1");
  execution few(3, [](int, auto task) { task.one(0), task.one(1); });
  CHECK(caught(few) == expected + "the tasks it is given; found 2 of 10 run");
  execution one_beyond(3, [](int count, auto task) { task(0), task.one(count); });
  CHECK(caught(one_beyond) == expected + "each of tasks 0 to 2 once; found 3");
  const pool_task* of_within = nullptr;
  bool again = true;
  execution nested(3, [&](int, const pool_task& task) {
    of_within = &task;
    task(1);
  });
  CHECK(caught(nested, [&](idx_t n) { again = n == 0 ? of_within->one(1) : again; }) ==
        expected + "each of tasks 0 to 2 once; found 1 twice");
  CHECK_FALSE(again);  // worker 1 is at work
  execution throws(2, [](int, auto task) {
    task(0);
    throw std::runtime_error("the pool is closed");
  });
  CHECK(caught(throws) == "the pool is closed");
  for (int threads : {0, -3})
    CHECK_THROWS_AS(execution(threads, in_order), std::invalid_argument);
}

TEST_CASE("tasks that a pool runs after the call do nothing", "[own_pool]") {
  std::vector<std::function<void()>> late;
  execution run(4, [&](int count, auto task) {
    task(0);
    for (int n = 1; n < count; ++n) late.emplace_back([=] { task(n); });
  });
  each_task_runs_once(run);
  std::atomic<int> done = 0;
  run.for_each(20, [&](idx_t, int) { ++done; });
  for (const auto& job : late) job();
  CHECK(done == 20);
}

TEST_CASE("what is a pool", "[own_pool]") {
  STATIC_REQUIRE(attn::own_pool<std::remove_cvref_t<decltype(in_order)>>);
  STATIC_REQUIRE(attn::own_pool<std::function<void(int, const attn::pool_task&)>>);
  STATIC_REQUIRE_FALSE(attn::own_pool<double>);  // least_seconds of Eigen's pool
  STATIC_REQUIRE_FALSE(attn::own_pool<void (*)(int)>);
}

#if __has_include(<sys/wait.h>) && !defined(__SANITIZE_THREAD__)  // whose runtime ends a child with threads
TEST_CASE("After fork() the child does not call a pool made before", "[own_pool]") {
  job_queue* const jobs = new job_queue(2);  // whose threads the child does not have
  execution run(3, queued(*jobs));
  each_task_runs_once(run);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::atomic<int> done = 0;
    const auto caller = std::this_thread::get_id();
    bool here = true;
    run.for_each(50, [&](idx_t, int) { ++done, here = here && std::this_thread::get_id() == caller; });
    execution of_its_own(3, in_order);
    of_its_own.for_each(50, [&](idx_t, int) { ++done; });
    _exit(done == 100 && here ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  each_task_runs_once(run);
  delete jobs;
}
#endif

}  // namespace testing::own_pool_tests
