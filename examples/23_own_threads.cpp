// Threads of your own: a program that has a pool of threads already gives it to attn, which then starts none itself.
// The result is the same to the last bit.
//
// An execution takes any callable that lets task(0) to task(count - 1) run; these are three. OpenMP and oneTBB are used
// where the compiler has them (-fopenmp, -ltbb); the queue stands for the jobs of an engine or a server.
#include <attn/core/tensor.hpp>
#include <attn/core/threads.hpp>
#include <attn/softmax/full_softmax.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#if __has_include(<tbb/parallel_for.h>) && defined(WITH_TBB)
#include <tbb/parallel_for.h>
#endif

#ifdef _OPENMP
void run_by_openmp(int count, const attn::pool_task& task) {
#pragma omp parallel for num_threads(count) schedule(static, 1)
  for (int n = 0; n < count; ++n) task(n);
}
#endif
#if __has_include(<tbb/parallel_for.h>) && defined(WITH_TBB)
void run_by_tbb(int count, const attn::pool_task& task) {
  tbb::parallel_for(0, count, task, tbb::simple_partitioner());
}
#endif

// Threads that take jobs from a queue.
class job_queue {
 public:
  explicit job_queue(int threads) {
    for (int n = 0; n < threads; ++n) threads_.emplace_back([this] { work(); });
  }
  ~job_queue() {
    for (std::size_t n = 0; n < threads_.size(); ++n) post(nullptr);
    for (std::thread& t : threads_) t.join();
  }
  void post(std::function<void()> job) {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    changed_.notify_one();
  }

  // For attn. The jobs need not be waited for: those that find no free thread in time do nothing, so that attn may be
  // called from jobs as well.
  auto for_attn() {
    return [this](int count, const attn::pool_task& task) {
      for (int n = 1; n < count; ++n) post([=] { task(n); });
      task(0);
    };
  }

 private:
  void work() {
    for (;;) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !jobs_.empty(); });
      const std::function<void()> job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      if (!job) return;
      job();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> jobs_;
  std::vector<std::thread> threads_;
};

int main() {
  const attn::idx_t heads = 8, length = 1024, dim = 64;
  attn::tensor<float> q({1, heads, length, dim}), k = q, v = q, exact = q;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (auto* x : {&q, &k, &v}) std::generate_n(x->data(), x->size(), [&] { return normal(random); });
  attn::full_softmax(q, k, v, exact);

  const auto report = [&](const char* name, attn::execution& exec) {
    attn::tensor<float> out({1, heads, length, dim});
    double best = 1e9;
    for (int run = 0; run < 5; ++run) {
      const auto start = std::chrono::steady_clock::now();
      attn::full_softmax(q, k, v, out, exec);
      const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
      best = std::min(best, time.count());
    }
    const bool same = std::memcmp(out.data(), exact.data(), sizeof(float) * static_cast<std::size_t>(out.size())) == 0;
    std::printf("%-24s%8.2f ms   %s\n", name, best, same ? "the same bits" : "other bits");
    return same;
  };

  const int threads = 2;
  attn::execution serial, eigen(threads);
  bool same = report("one thread", serial) && report("Eigen's pool", eigen);
  job_queue jobs(threads - 1);
  attn::execution queue(threads, jobs.for_attn());
  same = report("a queue of jobs", queue) && same;
#ifdef _OPENMP
  attn::execution openmp(threads, run_by_openmp);
  same = report("OpenMP", openmp) && same;
#endif
#if __has_include(<tbb/parallel_for.h>) && defined(WITH_TBB)
  attn::execution tbb(threads, run_by_tbb);
  same = report("oneTBB", tbb) && same;
#endif

  // From within a job of the same queue.
  std::promise<bool> done;
  jobs.post([&] {
    attn::execution within(threads, jobs.for_attn());
    done.set_value(report("within a job", within));
  });
  return done.get_future().get() && same ? 0 : 1;
}
