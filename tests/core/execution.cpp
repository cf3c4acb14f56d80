// An execution runs every task once, on as many threads as it has, and keeps its scratch memory.
#include <attn/core/threads.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if __has_include(<sys/wait.h>)
#include <sys/wait.h>
#include <unistd.h>
#endif

// A limit of threads is the system's or a container's, and root has none: here pthread_create itself refuses them.
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define ATTN_TEST_SANITIZED  // these have a pthread_create of their own
#endif
#endif
#if defined(__GLIBC__) && !defined(ATTN_TEST_SANITIZED) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define ATTN_TEST_REFUSED_THREADS
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#endif

#include "support/catch.hpp"
#include "support/tensor.hpp"

#ifdef ATTN_TEST_REFUSED_THREADS
namespace testing::execution_tests {
std::atomic<int> permitted_threads{1 << 30};
}
extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                              void* argument) noexcept {
  static const auto create = reinterpret_cast<decltype(&pthread_create)>(dlsym(RTLD_NEXT, "pthread_create"));
  if (testing::execution_tests::permitted_threads.fetch_sub(1) <= 0) return EAGAIN;
  return create(thread, attributes, body, argument);
}
#endif

namespace testing::execution_tests {
using attn::execution;

TEST_CASE("every task runs once, whatever the threads", "[execution]") {
  for (int threads : {1, 2, 3, 8})
    for (idx_t tasks : {0, 1, 2, 7, 1000}) {
      CAPTURE(threads, tasks);
      execution run(threads);
      REQUIRE(run.threads() == threads);
      std::vector<int> times(static_cast<std::size_t>(tasks));
      run.for_each(tasks, [&](idx_t task, int) { ++times[static_cast<std::size_t>(task)]; });
      CHECK(std::all_of(times.begin(), times.end(), [](int n) { return n == 1; }));
    }
}

TEST_CASE("a worker is one of the threads and runs one task at a time", "[execution]") {
  execution run(4);
  std::vector<std::atomic<int>> busy(4);
  std::atomic<bool> good = true;
  run.for_each(2000, [&](idx_t, int worker) {
    if (worker < 0 || worker >= 4 || busy[static_cast<std::size_t>(worker)].exchange(1)) good = false;
    std::this_thread::yield();
    busy[static_cast<std::size_t>(worker)] = 0;
  });
  CHECK(good);
}

TEST_CASE("threads that look for the next call find it, or sleep", "[execution]") {
  execution run(4);
  for (double spin : {1e-3, 1e-6, 0.0, 5e-5}) {  // found always; hardly ever; not looked for; by some
    CAPTURE(spin);
    run.set_spin(spin);
    bool good = true;
    for (int call = 0; call < 300; ++call) {
      const idx_t tasks = call % 7;
      std::vector<std::atomic<int>> times(static_cast<std::size_t>(tasks)), busy(4);
      run.for_each(tasks, [&](idx_t task, int worker) {
        if (busy[static_cast<std::size_t>(worker)].exchange(1)) times[static_cast<std::size_t>(task)] = 100;
        ++times[static_cast<std::size_t>(task)];
        if (call % 3 == 0) std::this_thread::yield();
        busy[static_cast<std::size_t>(worker)] = 0;
      });
      for (const auto& n : times) good = good && n == 1;
    }
    CHECK(good);
    CHECK_THROWS_AS(run.for_each(9, [](idx_t, int) { throw std::runtime_error("a task"); }), std::runtime_error);
  }
  execution serial;
  serial.set_spin(1);  // has no threads
  run.set_spin(10);
  const auto begin = std::chrono::steady_clock::now();
  run.for_each(4, [](idx_t, int) {});
  run = execution(2);  // threads that look are told to end
  CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(5));
}

TEST_CASE("serial work stays on the caller's thread, in order", "[execution]") {
  execution run;
  std::vector<idx_t> order;
  const auto caller = std::this_thread::get_id();
  run.for_each(5, [&](idx_t task, int worker) {
    CHECK(worker == 0);
    CHECK(std::this_thread::get_id() == caller);
    order.push_back(task);
  });
  CHECK(order == std::vector<idx_t>{0, 1, 2, 3, 4});
}

TEST_CASE("an exception reaches the caller, and the execution can be used again", "[execution]") {
  for (int threads : {1, 3}) {
    execution run(threads);
    for (idx_t bad : {0, 41, 99}) {
      CAPTURE(threads, bad);
      std::string caught;
      try {
        run.for_each(100, [&](idx_t task, int) {
          if (task == bad) throw std::runtime_error("task " + std::to_string(task));
        });
      } catch (const std::runtime_error& error) {
        caught = error.what();
      }
      CHECK(caught == "task " + std::to_string(bad));
    }
    std::atomic<int> done = 0;
    run.for_each(10, [&](idx_t, int) { ++done; });
    CHECK(done == 10);
  }
}

TEST_CASE("scratch memory grows once and is reused, aligned", "[execution]") {
  execution run;
  CHECK(run.scratch_bytes() == 0);
  const auto floats = [](idx_t count) {
    return [count](auto& pieces) { return pieces.template allocate<float>(count); };
  };
  float* first = run.scratch(0, floats(1000));
  const std::size_t held = run.scratch_bytes();
  CHECK(held >= 4000);
  CHECK(reinterpret_cast<std::uintptr_t>(first) % 64 == 0);
  CHECK(run.scratch(0, floats(10)) == first);
  CHECK(run.scratch_bytes() == held);
  run.scratch(0, floats(5000));
  CHECK(run.scratch_bytes() >= 20000);
  run.release();
  CHECK(run.scratch_bytes() == 0);
}

TEST_CASE("workers have scratch of their own, and one they share", "[execution]") {
  execution run(3);
  const auto one = [](auto& pieces) { return pieces.template allocate<double>(1); };
  std::vector<double*> places{run.scratch(0, one), run.scratch(1, one), run.scratch(2, one), run.shared_scratch(one)};
  std::sort(places.begin(), places.end());
  CHECK(std::adjacent_find(places.begin(), places.end()) == places.end());
}

TEST_CASE("an execution moves with its threads and scratch", "[execution]") {
  execution first(3);
  first.scratch(1, [](auto& pieces) { return pieces.template allocate<char>(100); });
  const std::size_t held = first.scratch_bytes();
  execution second = std::move(first);
  CHECK(second.threads() == 3);
  CHECK(second.scratch_bytes() == held);
  std::atomic<int> done = 0;
  second.for_each(50, [&](idx_t, int) { ++done; });
  CHECK(done == 50);
  STATIC_REQUIRE_FALSE(std::is_copy_constructible_v<execution>);
}

TEST_CASE("fewer than one thread is refused", "[execution]") {
  for (int threads : {0, -1, -100}) {
    CAPTURE(threads);
    try {
      execution run(threads);
      CHECK(false);
    } catch (const std::invalid_argument& error) {
      CHECK(error.what() == "attn::execution: expected threads >= 1; found " + std::to_string(threads));
    }
  }
}

TEST_CASE("more threads than any machine has are refused, but for a pool that brings them", "[execution]") {
  try {
    execution run(4000);
    CHECK(false);
  } catch (const std::invalid_argument& error) {
    CHECK(std::string(error.what()) == "attn::execution: expected threads <= 1024; found 4000");
  }
  execution own(4000, [](int count, const attn::pool_task& task) {
    for (int n = 0; n < count; ++n) task(n);
  });
  CHECK(own.threads() == 4000);
}

TEST_CASE("little work stays on the caller's thread", "[execution]") {
  execution threads(3), eager(3, 0);
  const auto used = [](execution& exec, double operations) {
    const auto limit = exec.limit_threads({.operations = operations});
    std::atomic<int> others = 0;
    const auto caller = std::this_thread::get_id();
    exec.for_each(100, [&](idx_t, int worker) { others += worker == 0 && std::this_thread::get_id() != caller; });
    CHECK(others == 0);
    return exec.active_threads();
  };
  CHECK(used(threads, 1e5) == 1);
  CHECK(used(threads, 1e9) == 3);
  CHECK(threads.active_threads() == 3);  // the limit ends with the call
  CHECK(used(eager, 0) == 3);
  execution serial;
  CHECK(used(serial, 1e9) == 1);
}

TEST_CASE("the precision is the serial executions' too", "[execution]") {
  execution threads(2);
  CHECK(threads.precision() == attn::precision::standard);
  CHECK(threads.serial_executions()[1].precision() == attn::precision::standard);
  threads.set_precision(attn::precision::fast);
  CHECK(threads.precision() == attn::precision::fast);
  for (const execution& serial : threads.serial_executions()) CHECK(serial.precision() == attn::precision::fast);
}

TEST_CASE("large scratch memory begins at a large page", "[execution]") {
  execution exec;
  const auto address = [&](idx_t bytes) {
    return reinterpret_cast<std::uintptr_t>(
        exec.shared_scratch([&](attn::detail::arena& memory) { return memory.allocate<char>(bytes); }));
  };
  CHECK(address(1000) % attn::detail::cache_line == 0);
  CHECK(address(3 << 20) % attn::detail::large_page == 0);
  CHECK(exec.scratch_bytes() >= 3 << 20);
}

#if __has_include(<sys/wait.h>) && !defined(__SANITIZE_THREAD__)  // whose runtime ends a child with threads
TEST_CASE("An execution that was used before fork() has threads in the child", "[execution]") {
  execution run(2);
  const auto all_run = [&] {
    std::atomic<idx_t> done{0};
    run.for_each(50, [&](idx_t, int) { ++done; });
    return done == 50;
  };
  REQUIRE(all_run());
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a child that waits for threads it does not have ends
    bool good = all_run();
    { const execution moved = std::move(run); }
    _exit(good ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  CHECK(all_run());
}
#endif

#ifdef ATTN_TEST_REFUSED_THREADS
struct thread_permit {  // of so many threads from now on
  explicit thread_permit(int threads) { permitted_threads = threads; }
  ~thread_permit() { permitted_threads = 1 << 30; }
};
bool every_task_runs(execution& run, idx_t tasks = 200) {
  std::vector<std::atomic<int>> times(static_cast<std::size_t>(tasks));
  std::atomic<bool> known = true;
  run.for_each(tasks, [&](idx_t task, int worker) {
    ++times[static_cast<std::size_t>(task)];
    if (worker < 0 || worker >= run.threads()) known = false;
  });
  return known && std::all_of(times.begin(), times.end(), [](const auto& n) { return n == 1; });
}

TEST_CASE("Where the system refuses threads, work goes on with those there are", "[execution]") {
  for (int asked : {2, 8, 100})
    for (int permitted : {0, 1, 3, 20}) {
      CAPTURE(asked, permitted);
      const int there = std::min(asked, permitted + 1);
      {
        const thread_permit permit(permitted);
        execution run(asked, 0.0);
        CHECK(run.threads() == there);
        CHECK(run.serial_executions().size() == static_cast<std::size_t>(there));
        CHECK(every_task_runs(run));
        execution moved = std::move(run);
        CHECK(every_task_runs(moved));
      }
      execution later(asked, 0.0);
      CHECK(later.threads() == asked);
      CHECK(every_task_runs(later));
    }
  const thread_permit none(0);
  const auto tasks = [](attn::execution_ref exec) { return every_task_runs(exec.get()); };
  CHECK(tasks(execution(4, 0.0)));
  execution own(4, [](int count, const attn::pool_task& task) {
    for (int n = 0; n < count; ++n) task(n);
  });
  CHECK(own.threads() == 4);
  CHECK(every_task_runs(own));
}

TEST_CASE("Where the system refuses threads to a process made by fork(), too", "[execution]") {
  execution run(4, 0.0);
  REQUIRE(every_task_runs(run));
  for (int permitted : {0, 1, 2}) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      permitted_threads = permitted;
      const bool good = every_task_runs(run) && every_task_runs(run);
      _exit(good && every_task_runs(*std::make_unique<execution>(3, 0.0)) ? 0 : 1);
    }
    int status = -1;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
  }
  CHECK(every_task_runs(run));
}
#endif

}  // namespace testing::execution_tests
