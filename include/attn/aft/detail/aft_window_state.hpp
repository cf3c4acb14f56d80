// attn: the states of aft_local and aft_conv: the last tokens of a stream and the sums over those before them, which are
// only ever added to.
//
// Memory   3 (window + 1) numbers of the compute type per channel (channels of a head rounded up to whole vectors): keys
//          and values of the window, their exponentials computed once, and the sums over all before them.
#pragma once

#include <attn/aft/detail/aft_step.hpp>

namespace attn::inline ATTN_ISA::detail {

/// The last `window` tokens are kept in a ring: position t in entry t % window.
template <class T>
class aft_window_state : public aft_state<T> {
  using base = aft_state<T>;
  using base::sums, base::window_, base::tokens_;

 public:
  /// Tokens with a bias of their own.
  index window() const { return window_; }

  /// Feeds the tokens of a call and writes its rows; bias(h, p, j) points to what head h adds to key j for position p,
  /// `stride` elements before that of key j + 1. For want of memory the state is reset.
  template <class Bias>
  void step(const aft_tensors<T>& x, index stride, execution& exec, Bias&& bias) {
    const auto limit = exec.limit_threads(x.work(4 * static_cast<double>(x.length * (window_ + 10))));
    try {
      exec.for_each(x.batch * x.heads, [&](index task, int worker) {
        const auto head = x.head(task / x.heads, task % x.heads);
        key_sums<T>* row = nullptr;
        const auto biases = exec.scratch(worker, [&](arena& memory) {
          row = memory.allocate<key_sums<T>>(x.parts());
          return split_biases<T>::layout(memory, 1);
        });
        for (index t = 0; t < x.length; ++t) {
          put(x, head, task, t);
          const index position = tokens_ + t;
          for (index p = 0; p < x.parts(); ++p) row[p] = *sums(task, p);
          for (index from = std::max<index>(0, position - window_ + 1), count; from <= position; from += count) {
            const index entry = from % window_;  // the ring's end cuts the window
            count = std::min({position + 1 - from, window_ - entry, key_piece});
            add_to_row(x, bias(task % x.heads, position, from), stride, count, biases, row,
                       [&](index p) { return sums(task, p) + 1 + entry; });
          }
          write_row(x, head, t, row);
        }
      });
    } catch (...) {  // the ring may have lost what the chunk pushed out
      base::reset();
      throw;
    }
    base::advance(x.length);
  }

 protected:
  aft_window_state(const validator& check, const state_extents& extents, index window)
      : base(check, extents, (check.at_least("window", 1, window), window)) {}

  void append_tokens(const aft_tensors<T>& x) {
    for (index head = 0; head < x.batch * x.heads; ++head)
      for (index t = 0; t < x.length; ++t) put(x, x.head(head / x.heads, head % x.heads), head, t);
    base::advance(x.length);
  }

 private:
  /// Row t of a chunk enters the window; the token that leaves it is added to the sums.
  void put(const aft_tensors<T>& x, const aft_head& from, index head, index t) {
    const index position = tokens_ + t;
    for (index p = 0; p < x.parts(); ++p) {
      key_sums<T>*const past = sums(head, p), *const entry = past + 1 + position % window_;
      if (position >= window_) past->merge(*entry);
      x.elements->split(from, p * width<T>, t, 1, entry);
    }
  }
};

}  // namespace attn::inline ATTN_ISA::detail
