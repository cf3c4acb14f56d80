// attn: what the steps of the attention-free family share: checks, the state, sums of one row at a time.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>
#include <attn/core/state_extents.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// Options of a step.
struct aft_step_options {
  bool gate = true;  ///< multiply by sigmoid(q); without, q is not read
};

namespace detail {

/// The views and options of a step over a state of element type S, checked against one another and against the state.
template <class S, class Options, class Q, class K, class V, class O, class... W>
auto step_tensors(const validator& check, const state_extents& state, bool one_key, const Options& options, const Q& q,
                  const K& k, const V& v, O& out, const W&... w) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  auto x = tensors_of(options, q, k, v, out, w...);
  x.one_key = one_key;
  check_aft(check, x);
  check.extents({{"query batch = state batch", state.batch, x.batch},
                 {"query heads = state heads", state.heads, x.heads},
                 {"query dim = state dim", state.dim, x.dim}});
  return x;
}

/// Tokens k, v to append, checked, as views of a call without queries. `one_key`: k may have one channel for all.
template <class S>
aft_tensors<compute_type<S>> tokens_of(const validator& check, const state_extents& state, bool one_key,
                                       const tensor_view<const S>& keys, const tensor_view<const S>& values) {
  memory_layout k = keys, v = values, none = tensor_view<const S>();
  if (one_key && k.extents[3] == 1) k.extents[3] = state.dim, k.strides[3] = 0;
  check_tokens(check, state.batch, state.heads, state.dim, state.dim, k, v);
  return {.q = none, .k = k, .v = v, .out = none, .w = none, .elements = &elements_of<S>,
          .batch = state.batch, .heads = state.heads, .length = k.extents[2], .dim = state.dim};
}

/// What the states share: for each packet of channels the sums over a stream, and room for `window` of its tokens.
template <class S>
class aft_state {
 public:
  using T = compute_type<S>;

  /// Tokens fed so far.
  index tokens() const { return tokens_; }
  index batch() const { return extents_.batch; }
  index heads() const { return extents_.heads; }
  index dim() const { return extents_.dim; }
  std::size_t bytes() const { return sums_.size() * sizeof(key_sums<T>); }
  const state_extents& extents() const { return extents_; }

  /// Back to the start of a stream.
  void reset() {
    tokens_ = 0;
    std::fill(sums_.begin(), sums_.end(), key_sums<T>{});
  }

  /// For the step: the sums of packet p of a head, the window behind them.
  key_sums<T>* sums(index head, index p = 0) { return sums_.data() + (head * parts() + p) * (window_ + 1); }
  void advance(index tokens) { tokens_ += tokens; }

 protected:
  aft_state(const validator& check, const state_extents& extents, index window)
      : check_(check), extents_(check_state_extents(check, extents)), window_(window) {
    check.equal("value_dim = dim", extents_.dim, extents_.value_dim);
    check.fits("window", {window, 2});
    check.fits("state", {batch(), heads(), parts(), sizeof(key_sums<T>), window + 1});
    sums_.resize(static_cast<std::size_t>(batch() * heads() * parts() * (window + 1)));
  }

  index parts() const { return (dim() + width<T> - 1) / width<T>; }

  validator check_;
  state_extents extents_;
  index window_, tokens_ = 0;
  std::vector<key_sums<T>> sums_;
};

/// Adds `count` keys to the sums of a row. keys(p) gives those of packet p; w points to their biases, `stride` elements
/// apart.
template <class T, class Keys>
void add_to_row(const aft_tensors<T>& x, const void* w, index stride, index count, const split_biases<T>& biases,
                key_sums<T>* sums, Keys&& keys) {
  x.elements->copy(w, stride, count, biases.factor);
  biases.split(count);
  for (index p = 0; p < x.parts(); ++p) add_keys(sums[p], keys(p), biases, count);
}

/// Sums become row t of the output.
template <class T>
void write_row(const aft_tensors<T>& x, const aft_head& head, index t, const key_sums<T>* sums) {
  for (index p = 0; p < x.parts(); ++p) x.elements->write(head, x.gate, p * width<T>, t, 1, sums + p);
}

/// The state of aft_local and aft_conv: the last `window` tokens of a stream in a ring, position t in entry t % window,
/// and the sums over those before them, which are only ever added to. OneKey: k may have one channel for all of a head.
template <class S, bool OneKey>
class aft_window_state : public aft_state<S> {
  using base = aft_state<S>;
  using typename base::T;
  using base::sums, base::window_, base::tokens_;

 public:
  /// Tokens with a bias of their own.
  index window() const { return window_; }

  /// Feeds tokens without attending: k, v [B, H, n, D].
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    const auto x = tokens_of<S>(base::check_, base::extents(), OneKey, as_view(k), as_view(v));
    for (index head = 0; head < x.batch * x.heads; ++head)
      for (index t = 0; t < x.length; ++t) put(x, x.head(head), head, t);
    base::advance(x.length);
  }

  /// Feeds the tokens of a call and writes its rows; bias(w, p, j) points to what w, that of a head, adds to key j for
  /// position p. For want of memory the state is reset.
  template <class Bias>
  void step(const aft_tensors<T>& x, execution& exec, Bias&& bias) {
    const auto limit = exec.limit_threads(x.work(4 * static_cast<double>(x.length * (window_ + 10))));
    try {
      exec.for_each(x.batch * x.heads, [&](index task, int worker) {
        const auto head = x.head(task);
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
            add_to_row(x, bias(head.w, position, from), head.w.col_stride, count, biases, row,
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

}  // namespace detail
}  // namespace attn::inline ATTN_ISA
