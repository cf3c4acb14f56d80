// attn: the threads an operator runs on and the scratch memory it may use.
//
//   attn::execution serial;        // the caller's thread; keeps its scratch memory between calls
//   attn::execution threads(4);    // the caller's thread and three of Eigen's pool
//   attn::execution own(4, pool);  // four threads of a pool of your own: see own_pool
//
//   attn::full_softmax(q, k, v, out, {.causal = true}, threads);
//   attn::full_softmax(q, k, v, out, threads);                              // default options
//   attn::full_softmax(q, k, v, out, {.causal = true}, attn::execution(4)); // threads for this call only
//
// An operator called without an execution makes a serial one for the call. One execution serves one call at a time;
// separate executions are independent. Results do not depend on the number of threads, to the last bit: work is split
// at fixed places, and threads only decide which of them does which task. Calls whose work is smaller than waking a
// thread stay on the caller's thread. In a process that fork() made, an execution starts threads of its own, or, where
// it has a pool of yours, works on the caller's thread alone; fork() must not be called while another thread runs a
// call.
//
//   threads.set_precision(attn::precision::fast);   // from here on; see precision
#pragma once

#include <attn/core/detail/scratch.hpp>
#include <attn/core/detail/worker_pool.hpp>

#include <algorithm>
#include <concepts>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// The work of a call, roughly, from which the number of threads follows.
struct work_estimate {
  double operations = 0;  // multiplications and additions
  double bytes = 0;       // moved from or to memory

  double seconds() const { return operations / 5e10 + bytes / 2e10; }
};

}  // namespace detail

/// How accurate products are. `fast` trades accuracy for speed in forward passes of the softmax and low-rank families
/// (except multipole) and of the layers. It changes neither steps of up to four tokens nor gradients: backward passes
/// read the `out` that is given, and those of the softmax family compute lse again. In the backward passes of layers
/// only the forward operators that they call again are `fast`.
///
///   elements   become                               relative error   where
///   float      two bf16 numbers, three products     1e-5             the processor has AMX and the build its code
///   half       bf16                                 4e-3             the build has products of bf16 numbers
///
/// Sums and everything else stay float. Elsewhere, and for other elements, `fast` is `standard`. With `fast`, floats
/// beyond 3.38e38 and infinities give NaN.
enum class precision { standard, fast };

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

/// A pool of threads of your own: pool(count, task) lets task(0) to task(count - 1) run, each once, in any order, on
/// any threads, the calling one included. It may wait for them or not, but must have run one of them when it returns.
/// Those that have begun share all the work; those that have not are not waited for. So a pool without a free thread,
/// because it runs the very code that calls, costs time, but nothing waits forever. In place of task(n), task.one(n)
/// may be called until it returns false, by any threads, but not by two at a time with the same n:
///
///   [](int count, auto task) { tbb::parallel_for(0, count, task, tbb::simple_partitioner()); }
///   [&](int count, auto task) {                         // a pool with a queue: nobody need wait
///     for (int n = 1; n < count; ++n) asio::post(threads, [=] { task(n); });
///     task(0);
///   }
///   [](int, auto task) { while (task.one(0)) coroutine.yield(); }
template <class Pool>
concept own_pool = std::copy_constructible<Pool> && std::invocable<Pool&, int, const pool_task&>;

namespace detail {

/// The threads of such a pool, which are those of the process that made it.
class own_threads final : public worker_pool {
 public:
  explicit own_threads(std::function<void(int, const pool_task&)> pool) : pool_(std::move(pool)) {}

  void run(idx_t tasks, int workers, const task_body& body) override {
    if (process_ != this_process()) return body.run_serially(tasks);
    const auto shared = std::make_shared<shared_tasks>(tasks, workers, body);
    const std::exception_ptr thrown = error_of([&] { pool_(workers, pool_task(shared)); });
    shared->end();
    if (thrown) std::rethrow_exception(thrown);
    shared->check_pool();
  }

 private:
  std::function<void(int, const pool_task&)> pool_;
  long process_ = this_process();
};

}  // namespace detail

class execution {
 public:
  /// Serial: everything on the caller's thread.
  execution() : buffers_(2) {}

  /// `threads` threads, the caller's included, or as many of them as the system permits: threads() says how many there
  /// are. Calls that take one thread less than about `least_seconds` stay on the caller's thread: waking the others
  /// takes some 30 us. Throws std::invalid_argument for fewer than 1 thread, or more than 1024.
  explicit execution(int threads, double least_seconds = 60e-6) : buffers_(2), least_seconds_(least_seconds) {
    check_threads(threads, detail::eigen_threads::most);
    if (threads == 1) return;
    auto pool = std::make_unique<detail::eigen_threads>(threads - 1);
    buffers_.resize(static_cast<std::size_t>(pool->threads()) + 2);
    if (pool->threads() > 0) pool_ = std::move(pool);
  }

  /// The same on threads of a pool of your own, which is kept as a copy; `threads` is how many at most work at the same
  /// time. Calls throw std::runtime_error, as after any failure with caches as they were, where the pool runs a task
  /// twice, none at all, or by one(n) not every piece; what the pool throws is passed on.
  template <own_pool Pool>
  execution(int threads, Pool pool, double least_seconds = 60e-6) : execution(1, least_seconds) {
    check_threads(threads, (std::numeric_limits<int>::max)());
    buffers_.resize(static_cast<std::size_t>(threads) + 1);
    pool_ = std::make_unique<detail::own_threads>(std::move(pool));
  }

  /// A moved-from execution may only be assigned to or destroyed.
  execution(execution&&) noexcept = default;
  execution& operator=(execution&&) noexcept = default;

  int threads() const { return static_cast<int>(buffers_.size()) - 1; }

  attn::precision precision() const { return precision_; }
  void set_precision(attn::precision p) { precision_ = p; }

  /// Bytes of scratch memory allocated now; they grow to the largest call so far.
  std::size_t scratch_bytes() const {
    std::size_t bytes = 0;
    for (const auto& buffer : buffers_) bytes += buffer.size();
    for (const auto& buffer : kept_) bytes += buffer.size();
    for (const execution& serial : serial_) bytes += serial.scratch_bytes();
    return bytes;
  }

  /// Frees the scratch memory.
  void release() {
    for (auto& buffer : buffers_) buffer = {};
    for (auto& buffer : kept_) buffer = {};
    serial_.clear();
  }

  // For operators -----------------------------------------------------------------------------------------------------

  /// body(task, worker) for every task in [0, tasks), in any order, each once; returns when all are done. Tasks are
  /// claimed in ascending order, so put the long ones first. An exception stops further claims and is rethrown here.
  template <class Body>
  void for_each(idx_t tasks, Body&& body) {
    run(tasks, {&body, [](void* b, idx_t task, int worker) {
                  (*static_cast<std::remove_reference_t<Body>*>(b))(task, worker);
                }});
  }

  /// Scratch memory of one worker, laid out by layout(arena&); it is valid until the next call of scratch().
  template <class Layout>
  auto scratch(int worker, Layout&& layout) {
    return lay_out(buffers_[static_cast<std::size_t>(worker)], layout);
  }

  /// Scratch memory all workers see. Call it outside for_each.
  template <class Layout>
  auto shared_scratch(Layout&& layout) {
    return lay_out(buffers_.back(), layout);
  }

  /// A persistent workspace: scratch memory that keeps its content while the returned object lives, also through calls
  /// of operators by this execution. For layers, which are composed of operators. Call it outside for_each; workspaces
  /// are released in reverse order.
  template <class Layout>
  auto workspace(Layout&& layout) {
    if (workspaces_ == kept_.size()) kept_.emplace_back();
    return persistent_workspace<decltype(lay_out(kept_[0], layout))>(*this, lay_out(kept_[workspaces_], layout));
  }

  template <class Buffers>
  class persistent_workspace {
   public:
    ~persistent_workspace() { --exec_.workspaces_; }
    persistent_workspace(const persistent_workspace&) = delete;
    persistent_workspace& operator=(const persistent_workspace&) = delete;
    Buffers& operator*() { return buffers_; }
    Buffers* operator->() { return &buffers_; }
    const Buffers& operator*() const { return buffers_; }
    const Buffers* operator->() const { return &buffers_; }

   private:
    friend execution;
    persistent_workspace(execution& exec, Buffers buffers) : exec_(exec), buffers_(std::move(buffers)) {
      ++exec_.workspaces_;
    }
    execution& exec_;
    Buffers buffers_;
  };

  /// While the returned object lives, the execution uses as many threads as this much work is worth: all of them, or
  /// the caller's alone. Every operator makes one on entry; it also decides for the operators that are called within.
  [[nodiscard]] auto limit_threads(const detail::work_estimate& work) {
    return thread_limit(*this, work.seconds() < least_seconds_ ? 1 : threads());
  }

  class thread_limit {
   public:
    ~thread_limit() { exec_.active_threads_ = before_; }
    thread_limit(const thread_limit&) = delete;
    thread_limit& operator=(const thread_limit&) = delete;

   private:
    friend execution;
    thread_limit(execution& exec, int threads) : exec_(exec), before_(std::exchange(exec.active_threads_, threads)) {}
    execution& exec_;
    int before_;
    [[maybe_unused]] detail::matrix_unit_use unit_;
  };

  /// A serial execution for every worker, for operators that are called from within for_each. Call it outside for_each.
  std::span<execution> serial_executions() {
    if (serial_.empty()) serial_ = std::vector<execution>(static_cast<std::size_t>(threads()));
    for (execution& serial : serial_) serial.set_precision(precision_);
    return serial_;
  }

  /// The threads for_each uses now.
  int active_threads() const { return active_threads_ > 0 ? active_threads_ : threads(); }

 private:
  static void check_threads(int threads, int most) {
    if (threads < 1 || threads > most)
      detail::raise<std::invalid_argument>(
          (threads < 1 ? detail::error_text{"attn::execution: expected threads >= 1; found ", threads}
                       : detail::error_text{"attn::execution: expected threads <= ", most, "; found ", threads})
              .c_str());
  }
  template <class Layout>
  static auto lay_out(detail::scratch_buffer& buffer, Layout& layout) {
    detail::arena count;
    (void)layout(count);
    detail::arena buffers(buffer.grow(count.used()));
    return layout(buffers);
  }

  [[gnu::noinline]] void run(idx_t tasks, const detail::task_body& body) {
    const int workers = static_cast<int>(std::min<idx_t>(active_threads(), tasks));
    if (workers > 1)
      pool_->run(tasks, workers, body);
    else
      body.run_serially(tasks);
  }

  std::vector<detail::scratch_buffer> buffers_;  // one a worker, then the shared one
  std::vector<detail::scratch_buffer> kept_;     // one for each workspace that ever existed at the same time
  std::vector<execution> serial_;
  std::size_t workspaces_ = 0;
  int active_threads_ = 0;  // 0: all
  double least_seconds_ = 0;
  attn::precision precision_ = attn::precision::standard;
  std::unique_ptr<detail::worker_pool> pool_;  // of more than one thread
};

/// The execution of a call: one of the caller's, which may be a temporary, or a serial one for this call.
class execution_ref {
 public:
  execution_ref() = default;
  execution_ref(execution& exec) : given_(&exec) {}
  execution_ref(execution&& exec) : given_(&exec) {}

  execution& get() { return given_ ? *given_ : own_ ? *own_ : own_.emplace(); }

 private:
  execution* given_ = nullptr;
  std::optional<execution> own_;
};

}}  // namespace attn::ATTN_ISA
