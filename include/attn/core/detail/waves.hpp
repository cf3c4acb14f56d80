// attn: work on many heads (or other items, such as segments) whose scratch memory all threads share.
//
// A wave is as many items at once as keep the threads busy and fit in the caches. Every step of a wave is split into
// tasks over its items.
#pragma once

#include <attn/core/execution.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Items of a wave: one on a single thread, else as many as fit in 2 MiB, at least one per thread.
inline index wave_size(const execution& exec, index items, index bytes_per_item) {
  const index threads = exec.active_threads();
  if (threads == 1) return std::min<index>(1, items);
  return std::clamp<index>((index(2) << 20) / std::max<index>(1, bytes_per_item), threads, std::max(items, threads));
}

/// Items first ... first + count - 1 with their scratch memory.
template <class Scratch>
struct wave {
  execution& exec;
  index first, count;
  Scratch* scratch;

  /// body(item, its scratch, step, worker) for every step in [0, steps) of every item; early steps first.
  template <class Body>
  void for_each(index steps, Body&& body) const {
    exec.for_each(count * steps, [&](index task, int worker) {
      const index n = task % count;
      body(first + n, scratch[n], task / count, worker);
    });
  }
};

/// body(wave) for [0, items), `size` at a time, each with scratch laid out by layout(arena&).
template <class Layout, class Body>
void for_each_wave(execution& exec, index items, index size, Layout&& layout, Body&& body) {
  size = std::min(size, items);
  auto* const list = exec.shared_scratch([&](arena& memory) { return memory.allocate_list(size, layout); });
  using scratch = std::remove_pointer_t<decltype(list)>;
  for (index first = 0; first < items; first += size)
    body(wave<std::remove_const_t<scratch>>{exec, first, std::min(size, items - first), list});
}

}  // namespace attn::inline ATTN_ISA::detail
