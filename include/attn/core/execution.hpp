// attn: the threads an operator runs on and the scratch memory it may use.
//
//   attn::execution serial;        // the caller's thread; keeps its scratch memory between calls
//   attn::execution threads(4);    // the caller's thread and three of Eigen's pool
//
//   attn::full_softmax(q, k, v, out, {.causal = true}, threads);
//   attn::full_softmax(q, k, v, out, threads);                              // default options
//   attn::full_softmax(q, k, v, out, {.causal = true}, attn::execution(4)); // threads for this call only
//
// An operator called without an execution makes a serial one for the call. One execution serves one call at a time;
// separate executions are independent. Results do not depend on the number of threads, to the last bit: work is split
// at fixed places, and threads only decide which of them does which task. Calls whose work is smaller than waking a
// thread stay on the caller's thread. In a process that fork() made, an execution starts threads of its own; fork()
// must not be called while another thread runs a call.
//
//   threads.set_precision(attn::precision::fast);   // from here on; see precision
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/pages.hpp>
#include <attn/core/tensor_view.hpp>

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
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace attn { inline namespace ATTN_ISA {
namespace detail {

/// Aligned memory that only grows; growing loses its content.
class scratch_buffer {
 public:
  std::byte* grow(std::size_t bytes) {
    if (bytes > size()) {
      memory_.reset();  // so that old and new never exist together
      memory_ = allocate_block(bytes);
    }
    return memory_.get();
  }
  std::size_t size() const { return memory_ ? memory_.get_deleter().bytes : 0; }

 private:
  memory_block memory_;
};

/// Allocates aligned parts of a scratch buffer one after the other. With a null base it only counts bytes.
class arena {
 public:
  explicit arena(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* allocate(idx_t count) {
    const std::size_t begin = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + cache_line - 1) / cache_line * cache_line;
    return base_ ? reinterpret_cast<T*>(base_ + begin) : nullptr;
  }
  /// `count` objects made by layout(*this), which allocates what they point to.
  template <class Layout>
  auto* allocate_list(idx_t count, Layout&& layout) {
    using item = decltype(layout(*this));
    item* const list = allocate<item>(count);
    for (idx_t n = 0; n < count; ++n) {
      const item one = layout(*this);
      if (list) list[n] = one;
    }
    return list;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

/// The number of this process, on systems that have fork(); 0 elsewhere.
inline long this_process() {
#if __has_include(<unistd.h>)
  return static_cast<long>(::getpid());
#else
  return 0;
#endif
}

/// Eigen's pool of threads, with types of this namespace, so that its functions are of these instructions too (config.hpp).
struct pool_environment : Eigen::StlThreadEnvironment {
  struct Task : Eigen::StlThreadEnvironment::Task {};
  Task CreateTask(std::function<void()> f) { return {{std::move(f)}}; }
};
using eigen_pool = Eigen::ThreadPoolTempl<pool_environment>;

/// A pool belongs to the process that made it: a child has its memory after fork(), but none of its threads, and would
/// wait for them forever. The child therefore neither uses nor frees it.
struct pool_deleter {
  long process = 0;
  void operator()(eigen_pool* pool) const {
    if (process == this_process()) delete pool;
  }
};
using thread_pool = std::unique_ptr<eigen_pool, pool_deleter>;
inline thread_pool make_pool(int threads) { return {new eigen_pool(threads), {this_process()}}; }

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

class execution {
 public:
  /// Serial: everything on the caller's thread.
  execution() : buffers_(2) {}

  /// `threads` threads, the caller's included. Calls that take one thread less than about `least_seconds` stay on the
  /// caller's thread: waking the others takes some 30 us. Throws std::invalid_argument for fewer than 1 thread.
  explicit execution(int threads, double least_seconds = 60e-6)
      : buffers_(static_cast<std::size_t>(threads > 0 ? threads : 0) + 1), least_seconds_(least_seconds) {
    if (threads < 1)
      detail::raise<std::invalid_argument>("attn::execution: expected threads >= 1; found " + std::to_string(threads));
    if (threads > 1) pool_ = detail::make_pool(threads - 1);
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
  template <class Layout>
  static auto lay_out(detail::scratch_buffer& buffer, Layout& layout) {
    detail::arena count;
    (void)layout(count);
    detail::arena buffers(buffer.grow(count.used()));
    return layout(buffers);
  }

  /// A body with its type erased: tasks are long, and the threading is compiled once.
  struct any_body {
    void* body;
    void (*call)(void*, idx_t, int);
    void operator()(idx_t task, int worker) const { call(body, task, worker); }
  };

  [[gnu::noinline]] void run(idx_t tasks, const any_body& body) {
    const int helpers = static_cast<int>(std::min<idx_t>(active_threads(), tasks)) - 1;
    if (helpers <= 0) {
      for (idx_t task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    if (pool_.get_deleter().process != detail::this_process()) pool_ = detail::make_pool(threads() - 1);
    std::atomic<idx_t> next{0};
    std::exception_ptr error;
    std::atomic<bool> failed{false};
    const auto work = [&](int worker) {
      const std::exception_ptr thrown = detail::error_of([&] {
        for (idx_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker);
      });
      if (!thrown) return;
      next.store(tasks, std::memory_order_relaxed);
      if (!failed.exchange(true)) error = thrown;
    };
    Eigen::Barrier barrier(static_cast<unsigned>(helpers));
    int started = 0;
    const std::exception_ptr not_started = detail::error_of([&] {
      for (; started < helpers; ++started)
        pool_->Schedule([&work, &barrier, helper = started + 1] {
          {
            [[maybe_unused]] const detail::matrix_unit_use unit;
            work(helper);
          }
          barrier.Notify();
        });
    });
    if (not_started)  // those that run share the work
      for (int missing = started; missing < helpers; ++missing) barrier.Notify();
    work(0);
    barrier.Wait();
    if (error) std::rethrow_exception(error);
  }

  std::vector<detail::scratch_buffer> buffers_;  // one a worker, then the shared one
  std::vector<detail::scratch_buffer> kept_;     // one for each workspace that ever existed at the same time
  std::vector<execution> serial_;
  std::size_t workspaces_ = 0;
  int active_threads_ = 0;  // 0: all
  double least_seconds_ = 0;
  attn::precision precision_ = attn::precision::standard;
  detail::thread_pool pool_;
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
