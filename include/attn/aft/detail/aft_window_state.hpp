// attn: the states of aft_local and aft_conv: the last tokens of a stream and the sums over those before them, which are
// only ever added to.
//
// Memory   3 (window + 1) numbers of the compute type per channel (channels of a head rounded up to whole vectors): keys
//          and values of the window, their exponentials computed once, and the sums over all before them.
#pragma once

#include <attn/aft/detail/aft_step.hpp>

#include <vector>

namespace attn::inline ATTN_ISA::detail {

/// A ring of the last `window` tokens.
template <class T>
class aft_window_state {
 public:
  /// Tokens fed so far.
  index tokens() const { return tokens_; }
  index batch() const { return extents_.batch; }
  index heads() const { return extents_.heads; }
  index dim() const { return extents_.dim; }
  /// Tokens with a bias of their own.
  index window() const { return window_; }
  std::size_t bytes() const { return (ring_.size() + sums_.size()) * sizeof(T); }

  /// Back to the start of a stream.
  void reset() {
    tokens_ = 0;
    sums_array<T>::clear(sums_.data(), batch() * heads() * parts());
  }

  // For the step ------------------------------------------------------------------------------------------------------

  const state_extents& extents() const { return extents_; }

  /// Feeds the tokens of a call and writes its rows; bias(h, p, j) points to what head h adds to key j for position p,
  /// `stride` elements before that of key j + 1. For want of memory the state is reset.
  template <class Bias>
  void step(const aft_tensors<T>& x, index stride, execution& exec, Bias&& bias) {
    const auto limit = exec.limit_threads(x.work(4 * static_cast<double>(x.length * (window_ + 10))));
    try {
      exec.for_each(x.batch * x.heads, [&](index task, int worker) {
        const auto head = x.head(task / x.heads, task % x.heads);
        T* sums = nullptr;
        const auto biases = exec.scratch(worker, [&](arena& memory) {
          sums = memory.allocate<T>(parts() * key_sums<T>::size);
          return split_biases<T>::layout(memory, 1);
        });
        for (index t = 0; t < x.length; ++t) {
          put(x, head, task, t);
          const index p = tokens_ + t;
          std::copy_n(sums_of(task), parts() * key_sums<T>::size, sums);
          for (index from = std::max<index>(0, p - window_ + 1), count; from <= p; from += count) {
            const index row = from % window_;  // the ring's end cuts the window
            count = std::min({p + 1 - from, window_ - row, key_piece});
            x.elements->copy(bias(task % x.heads, p, from), stride, count, biases.factor);
            biases.split(count);
            for (index part = 0; part < parts(); ++part) {
              auto s = key_sums<T>::read(sums + part * key_sums<T>::size);
              add_keys(s, keys(task, part).from(row), biases, count);
              s.write(sums + part * key_sums<T>::size);
            }
          }
          write_row(x, head, t, sums);
        }
      });
    } catch (...) {  // the ring may have lost what the chunk pushed out
      reset();
      throw;
    }
    tokens_ += x.length;
  }

 protected:
  aft_window_state(const validator& check, const state_extents& extents, index window)
      : extents_(check_aft_state(check, extents)), window_(window) {
    check.at_least("window", 1, window);
    const index numbers = key_sums<T>::size;
    ring_.resize(static_cast<std::size_t>(check.fits("window", {batch(), heads(), parts(), numbers, window})));
    sums_.resize(static_cast<std::size_t>(check.fits("state", {batch(), heads(), parts(), numbers})));
    reset();
  }

  void append_tokens(const aft_tensors<T>& x) {
    for (index head = 0; head < batch() * heads(); ++head)
      for (index t = 0; t < x.length; ++t) put(x, x.head(head / heads(), head % heads()), head, t);
    tokens_ += x.length;
  }

 private:
  index parts() const { return (dim() + width<T> - 1) / width<T>; }
  /// Sums over the tokens that have left the window.
  T* sums_of(index head) { return sums_.data() + head * parts() * key_sums<T>::size; }
  /// The window of packet p of a head; position t is in row t % window.
  split_keys<T> keys(index head, index p) {
    T* const first = ring_.data() + (head * parts() + p) * key_sums<T>::size * window_;
    return {first, first + window_ * width<T>, first + 2 * window_ * width<T>};
  }

  /// Row t of a chunk enters the window; the token that leaves it is added to the sums.
  void put(const aft_tensors<T>& x, const aft_head& from, index head, index t) {
    const index position = tokens_ + t, row = position % window_;
    for (index p = 0; p < parts(); ++p) {
      const auto here = keys(head, p).from(row);
      T* const past = sums_of(head) + p * key_sums<T>::size;
      if (position >= window_) {
        auto s = key_sums<T>::read(past);
        add_key(s, here);
        s.write(past);
      }
      x.elements->split(from, p * width<T>, t, 1, here);
    }
  }

  state_extents extents_;
  index window_, tokens_ = 0;
  std::vector<T> ring_, sums_;
};

}  // namespace attn::inline ATTN_ISA::detail
