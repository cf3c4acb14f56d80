// attn: where an operator runs and the scratch memory it may use.
//
//   attn::execution serial;        // the caller's thread; keeps its scratch memory between calls
//   attn::execution threads(4);    // the caller's thread and three of Eigen's pool
//
// An operator called without an execution makes a serial one for the call. One execution serves one call at a time;
// separate executions are independent. Results do not depend on the number of threads, to the last bit: work is split
// at fixed places and threads only choose who does which piece.
#pragma once

#include <attn/core/tensor_view.hpp>

#if __has_include(<Eigen/ThreadPool>)
#include <Eigen/ThreadPool>
#else
#include <unsupported/Eigen/CXX11/ThreadPool>
#endif

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace attn {
namespace detail {

inline constexpr std::size_t cache_line = 64;

/// Aligned memory that only grows, and forgets its content when it does.
class scratch_buffer {
 public:
  std::byte* grow(std::size_t bytes) {
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(static_cast<std::byte*>(::operator new(bytes, std::align_val_t(cache_line))));
      size_ = bytes;
    }
    return memory_.get();
  }
  std::size_t size() const { return size_; }

 private:
  struct free {
    void operator()(std::byte* p) const { ::operator delete(p, std::align_val_t(cache_line)); }
  };
  std::unique_ptr<std::byte, free> memory_;
  std::size_t size_ = 0;
};

/// Hands out aligned pieces of a scratch buffer one after the other. Run over a null base it only counts.
class carver {
 public:
  explicit carver(std::byte* base = nullptr) : base_(base) {}

  template <class T>
  T* take(index count) {
    const std::size_t at = used_;
    used_ += (static_cast<std::size_t>(count) * sizeof(T) + cache_line - 1) / cache_line * cache_line;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  std::size_t used() const { return used_; }

 private:
  std::byte* base_;
  std::size_t used_ = 0;
};

}  // namespace detail

class execution {
 public:
  /// Serial: everything on the caller's thread.
  execution() : buffers_(2) {}

  /// `threads` threads, the caller's included. Throws std::invalid_argument below 1.
  explicit execution(int threads) : buffers_(static_cast<std::size_t>(threads > 0 ? threads : 0) + 1) {
    if (threads < 1)
      throw std::invalid_argument("attn::execution: expected threads >= 1; found " + std::to_string(threads));
    if (threads > 1) pool_ = std::make_unique<Eigen::ThreadPool>(threads - 1);
  }

  /// One that was moved from may only be assigned to or destroyed.
  execution(execution&&) noexcept = default;
  execution& operator=(execution&&) noexcept = default;

  int threads() const { return static_cast<int>(buffers_.size()) - 1; }

  /// Scratch memory held now; it grows to the largest call so far.
  std::size_t scratch_bytes() const {
    std::size_t bytes = 0;
    for (const auto& buffer : buffers_) bytes += buffer.size();
    for (const auto& buffer : held_) bytes += buffer.size();
    return bytes;
  }

  /// Gives the scratch memory back.
  void release() {
    for (auto& buffer : buffers_) buffer = {};
    for (auto& buffer : held_) buffer = {};
  }

  // For operators -----------------------------------------------------------------------------------------------------

  /// body(task, worker) for every task in [0, tasks), in any order, each once; returns when all are done. Tasks are
  /// claimed in ascending order, so put the long ones first. An exception stops further claims and is rethrown here.
  template <class Body>
  void for_each(index tasks, Body&& body) {
    run(tasks, {&body, [](void* b, index task, int worker) {
                  (*static_cast<std::remove_reference_t<Body>*>(b))(task, worker);
                }});
  }

  /// Scratch memory of one worker, laid out by layout(carver&); what it held before is lost.
  template <class Layout>
  auto scratch(int worker, Layout&& layout) {
    return carve(buffers_[static_cast<std::size_t>(worker)], layout);
  }

  /// Scratch memory all workers see. Call it outside for_each.
  template <class Layout>
  auto shared_scratch(Layout&& layout) {
    return carve(buffers_.back(), layout);
  }

  /// Scratch memory that keeps its content while the holder lives, through calls of operators by this execution too:
  /// for what is composed of operators. Call it outside for_each; the last holder made goes first.
  template <class Layout>
  auto hold(Layout&& layout) {
    if (holders_ == held_.size()) held_.emplace_back();
    return holder<decltype(carve(held_[0], layout))>(*this, carve(held_[holders_], layout));
  }

  template <class Pieces>
  class holder {
   public:
    ~holder() { --where_.holders_; }
    holder(const holder&) = delete;
    holder& operator=(const holder&) = delete;
    Pieces& operator*() { return pieces_; }
    Pieces* operator->() { return &pieces_; }
    const Pieces& operator*() const { return pieces_; }
    const Pieces* operator->() const { return &pieces_; }

   private:
    friend execution;
    holder(execution& where, Pieces pieces) : where_(where), pieces_(std::move(pieces)) { ++where_.holders_; }
    execution& where_;
    Pieces pieces_;
  };

 private:
  template <class Layout>
  static auto carve(detail::scratch_buffer& buffer, Layout& layout) {
    detail::carver count;
    (void)layout(count);
    detail::carver pieces(buffer.grow(count.used()));
    return layout(pieces);
  }

  /// A body without its type: tasks are coarse, and the threading is compiled once.
  struct any_body {
    void* body;
    void (*call)(void*, index, int);
    void operator()(index task, int worker) const { call(body, task, worker); }
  };

  void run(index tasks, const any_body& body) {
    const int helpers = static_cast<int>(std::min<index>(threads(), tasks)) - 1;
    if (helpers <= 0) {
      for (index task = 0; task < tasks; ++task) body(task, 0);
      return;
    }
    std::atomic<index> next{0};
    std::exception_ptr error;
    std::atomic<bool> failed{false};
    const auto work = [&](int worker) {
      try {
        for (index task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task, worker);
      } catch (...) {
        next.store(tasks, std::memory_order_relaxed);
        if (!failed.exchange(true)) error = std::current_exception();
      }
    };
    Eigen::Barrier barrier(static_cast<unsigned>(helpers));
    int started = 0;
    try {
      for (; started < helpers; ++started)
        pool_->Schedule([&work, &barrier, helper = started + 1] {
          work(helper);
          barrier.Notify();
        });
    } catch (...) {  // no memory to start one: those that run share the work
      for (int missing = started; missing < helpers; ++missing) barrier.Notify();
    }
    work(0);
    barrier.Wait();
    if (error) std::rethrow_exception(error);
  }

  std::vector<detail::scratch_buffer> buffers_;  // one a worker, then the shared one
  std::vector<detail::scratch_buffer> held_;     // one for each holder alive, at most so far
  std::size_t holders_ = 0;
  std::unique_ptr<Eigen::ThreadPool> pool_;
};

}  // namespace attn
