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

  /// body(item, its scratch, step, worker) for every step in [0, steps) of every item; early steps first.
  template <class Body>
  void for_each(idx_t steps, Body&& body) const {
    exec.for_each(count * steps, [&](idx_t task, int worker) {
      const idx_t n = task % count;
      body(first + n, scratch[n], task / count, worker);
    });
  }
};

/// body(wave) for [0, items), `size` at a time, each with scratch laid out by layout(arena&).
template <class Layout, class Body>
void for_each_wave(execution& exec, idx_t items, idx_t size, Layout&& layout, Body&& body) {
  size = (std::min)(size, items);
  auto* const list = exec.shared_scratch([&](arena& memory) { return memory.allocate_list(size, layout); });
  using scratch = std::remove_pointer_t<decltype(list)>;
  for (idx_t first = 0; first < items; first += size)
    body(wave<std::remove_const_t<scratch>>{exec, first, (std::min)(size, items - first), list});
}

}}}  // namespace attn::ATTN_ISA::detail
