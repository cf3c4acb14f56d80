// attn: the threads an operator runs on and the scratch memory it may use.
//
//   attn::execution serial;        // the caller's thread; keeps its scratch memory between calls
//   attn::execution threads(4);    // the caller's thread and three more: with <attn/core/threads.hpp>
//
//   attn::full_softmax(q, k, v, out, {.causal = true}, threads);
//   attn::full_softmax(q, k, v, out, threads);                              // default options
//   attn::full_softmax(q, k, v, out, {.causal = true}, attn::execution(4)); // threads for this call only
//
// An operator called without an execution makes a serial one for the call. One execution serves one call at a time;
// separate executions are independent. Results do not depend on the number of threads, to the last bit: work is split
// at fixed places, and threads only decide which of them does which task. Calls whose work is smaller than waking a
// thread stay on the caller's thread.
//
//   threads.set_precision(attn::precision::fast);   // from here on; see precision
//   threads.set_invariant(true);                    // from here on; see set_invariant()
//   threads.set_spin(50e-6);                        // threads look for the next call so long before they sleep
#pragma once

#include <attn/core/detail/amx.hpp>
#include <attn/core/detail/scratch.hpp>
#include <attn/core/detail/worker_pool.hpp>

#include <algorithm>
#include <concepts>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
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

namespace detail {

/// Starts the threads of an execution: defined by threads.hpp.
struct thread_start;

/// The threads of an execution; no pool where the caller's is the only one.
struct execution_threads {
  int count = 1;
  std::unique_ptr<worker_pool> pool;
};

template <class Start, class... Arguments>
execution_threads start_threads(Arguments&&... arguments) {
  constexpr bool defined = requires { sizeof(Start); };
  static_assert(defined, "attn::execution: threads need #include <attn/core/threads.hpp>");
  if constexpr (defined)
    return Start::start(std::forward<Arguments>(arguments)...);
  else
    return {};
}

}  // namespace detail

class execution {
 public:
  /// Serial: everything on the caller's thread.
  execution() : buffers_(2) {}

  /// `threads` threads, the caller's included, or as many of them as the system permits: threads() says how many there
  /// are. Calls that take one thread less than about `least_seconds` stay on the caller's thread: waking the others
  /// takes some 30 us. Throws std::invalid_argument for fewer than 1 thread, or more than 1024. Needs threads.hpp.
  template <class Start = detail::thread_start>
  explicit execution(int threads, double least_seconds = 60e-6)
      : execution(detail::start_threads<Start>(threads), least_seconds) {}

  /// The same on threads of a pool of your own, which is kept as a copy: see threads.hpp.
  template <std::copy_constructible Pool, class Start = detail::thread_start>
    requires(!std::is_arithmetic_v<Pool>)
  execution(int threads, Pool pool, double least_seconds = 60e-6)
      : execution(detail::start_threads<Start>(threads, std::move(pool)), least_seconds) {}

  /// A moved-from execution may only be assigned to or destroyed.
  execution(execution&&) noexcept = default;
  execution& operator=(execution&&) noexcept = default;

  int threads() const { return static_cast<int>(buffers_.size()) - 1; }

  attn::precision precision() const { return precision_; }
  void set_precision(attn::precision p) { precision_ = p; }

  /// With true, a row of a result has the same bits however it is asked for: they depend on its own inputs and on the
  /// keys that it sees, not on how many queries a call has, on chunks, padding, the batch, threads, or on whether keys
  /// lie in a tensor, a cache or pages. Operators without such a form refuse the call. include/attn/README.md lists the
  /// operators and what it costs.
  bool invariant() const { return invariant_; }
  void set_invariant(bool on) { invariant_ = on; }

  /// For so many seconds after a call the threads look for the next one before they sleep: 50e-6 where the calls of a
  /// model follow one another, so that none of them waits for threads to wake. They keep their processors busy
  /// meanwhile, so 0 is the default. A pool of your own is not told.
  void set_spin(double seconds) {
    if (pool_) pool_->set_spin(seconds);
  }

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
  /// body is called as const.
  [[gnu::noinline]] void for_each(idx_t tasks, const detail::task_body& body) {
    const int workers = static_cast<int>(std::min<idx_t>(active_threads(), tasks));
    if (workers > 1 && pool_->run(tasks, workers, body)) return;
    for (idx_t task = 0; task < tasks; ++task) body.call(body.body, task, 0);
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
    return thread_limit(*this, threads() == 1 || work.seconds() < least_seconds_ ? 1 : threads());
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
    for (execution& serial : serial_) serial.set_precision(precision_), serial.set_invariant(invariant_);
    return serial_;
  }

  /// The threads for_each uses now.
  int active_threads() const { return active_threads_ > 0 ? active_threads_ : threads(); }

 private:
  execution(detail::execution_threads threads, double least_seconds)
      : buffers_(static_cast<std::size_t>(threads.count) + 1),
        least_seconds_(least_seconds),
        pool_(std::move(threads.pool)) {}

  template <class Layout>
  static auto lay_out(detail::scratch_buffer& buffer, Layout& layout) {
    detail::arena count;
    (void)layout(count);
    detail::arena buffers(buffer.grow(count.used()));
    return layout(buffers);
  }

  std::vector<detail::scratch_buffer> buffers_;  // one a worker, then the shared one
  std::vector<detail::scratch_buffer> kept_;     // one for each workspace that ever existed at the same time
  std::vector<execution> serial_;
  std::size_t workspaces_ = 0;
  int active_threads_ = 0;  // 0: all
  double least_seconds_ = 0;
  attn::precision precision_ = attn::precision::standard;
  bool invariant_ = false;
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
