// attn: work on many heads (or other items, such as segments) whose scratch memory all threads share.
//
// A wave is as many items at once as keep the threads busy and fit in the caches. Every step of a wave is split into
// tasks over its items.
#pragma once

#include <attn/core/execution.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Items of a wave: one on a single thread, else as many as fit in 2 MiB, at least one per thread.
inline idx_t wave_size(const execution& exec, idx_t items, idx_t bytes_per_item) {
  const idx_t threads = exec.active_threads();
  if (threads == 1) return std::min<idx_t>(1, items);
  return std::clamp<idx_t>((idx_t(2) << 20) / std::max<idx_t>(1, bytes_per_item), threads, (std::max)(items, threads));
}

/// Items first ... first + count - 1 with their scratch memory.
template <class Scratch>
struct wave {
  execution& exec;
  idx_t first, count;
  Scratch* scratch;

  /// Task number `task` of a step of all items: early steps come first.
  struct item_step {
    idx_t item;
    Scratch& scratch;
    idx_t step;
  };
  item_step at(idx_t task) const { return {first + task % count, scratch[task % count], task / count}; }

  /// body(item, its scratch, step, worker) for every step in [0, steps) of every item; early steps first.
  template <class Body>
  void for_each(idx_t steps, Body&& body) const {
    exec.for_each(count * steps, [&](idx_t task, int worker) {
      const auto [item, its, step] = at(task);
      body(item, its, step, worker);
    });
  }
};

/// Items [0, items), a wave after the other: for (const auto& some : waves_of(...)) some.for_each(...).
template <class Scratch>
class wave_range {
 public:
  wave_range(execution& exec, idx_t items, idx_t size, Scratch* scratch)
      : exec_(exec), items_(items), size_(size), scratch_(scratch) {}

  struct iterator {
    const wave_range& all;
    idx_t first;
    wave<Scratch> operator*() const {
      return {all.exec_, first, (std::min)(all.size_, all.items_ - first), all.scratch_};
    }
    void operator++() { first += all.size_; }
    bool operator!=(const iterator& end) const { return first < end.first; }
  };
  iterator begin() const { return {*this, 0}; }
  iterator end() const { return {*this, items_}; }

 private:
  execution& exec_;
  idx_t items_, size_;
  Scratch* scratch_;
};

/// Waves of `size` items, each item with scratch laid out by layout(arena&).
template <class Layout>
auto waves_of(execution& exec, idx_t items, idx_t size, Layout&& layout) {
  size = (std::min)(size, items);
  auto* const list = exec.shared_scratch([&](arena& memory) { return memory.allocate_list(size, layout); });
  return wave_range(exec, items, size, list);
}

/// As large as suits the scratch of an item.
template <class Layout>
auto waves_of(execution& exec, idx_t items, Layout&& layout) {
  arena one;
  layout(one);
  return waves_of(exec, items, wave_size(exec, items, static_cast<idx_t>(one.used())), layout);
}

}}}  // namespace attn::ATTN_ISA::detail
