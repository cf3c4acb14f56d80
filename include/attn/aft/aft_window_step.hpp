// attn: aft_local and aft_conv over an endless stream, in memory that does not grow with it.
//
//   attn::aft_window_state<float> state(batch, heads, dim, 128);
//   attn::aft_local_step(state, q_t, k_t, v_t, out_t, w, {.band = true});    // as causal aft_local with window = 128
//
//   attn::aft_window_state<float> past(batch, heads, dim, width / 2 + 1);
//   attn::aft_conv_step(past, q_t, k_t, v_t, out_t, w);                      // as causal aft_conv with this width
//
// Memory   3 (window + 1) numbers of the compute type a channel (channels of a head rounded up to whole vectors): keys
//          and values of the window, their exponentials taken once, and the sums over all before them.
#pragma once

#include <attn/aft/aft_conv.hpp>
#include <attn/aft/aft_local.hpp>
#include <attn/aft/detail/aft_step.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// The last tokens of a stream and the sums over those before them, which only ever add. One that was moved from may
/// only be assigned to or destroyed.
template <element S>
class aft_window_state {
  using T = compute_type<S>;

 public:
  /// The start of a stream with biases for the last `window` >= 1 tokens. Throws std::invalid_argument for extents that
  /// do not fit or sizes no memory can hold.
  aft_window_state(index batch, index heads, index dim, index window)
      : batch_(batch), heads_(heads), dim_(dim), window_(window) {
    const detail::validator check("aft_window_state");
    detail::check_cache(check, batch, heads, dim, dim);
    check.at_least("window", 1, window);
    ring_.resize(
        static_cast<std::size_t>(check.fits("window", {batch, heads, parts(), detail::key_sums<T>::size, window})));
    sums_.resize(static_cast<std::size_t>(check.fits("state", {batch, heads, parts(), detail::key_sums<T>::size})));
    reset();
  }

  /// Tokens fed so far.
  index size() const { return size_; }
  index batch() const { return batch_; }
  index heads() const { return heads_; }
  index dim() const { return dim_; }
  index window() const { return window_; }
  std::size_t bytes() const { return (ring_.size() + sums_.size()) * sizeof(T); }

  /// Back to the start of a stream.
  void reset() {
    size_ = 0;
    for (std::size_t at = 0; at < sums_.size(); at += detail::key_sums<T>::size)
      detail::key_sums<T>{}.write(sums_.data() + at);
  }

  /// Feeds tokens without asking anything: k [B, H, n, D] or [B, H, n, 1], v [B, H, n, D].
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    tensor_view<const S> keys = as_view(k);
    const tensor_view<const S> values = as_view(v);
    if (keys.extent(3) == 1) keys = detail::for_all_channels(keys, dim_);
    detail::check_tokens(detail::validator("aft_window_state"), batch_, heads_, dim_, dim_, keys, values);
    for (index head = 0; head < batch_ * heads_; ++head) {
      const index b = head / heads_, h = head % heads_;
      const detail::aft_head<S> from{{}, detail::head_of(keys, b, h), detail::head_of(values, b, h), {}};
      for (index t = 0; t < keys.extent(2); ++t) put(from, head, t);
    }
    advance(keys.extent(2));
  }

  // For the step ------------------------------------------------------------------------------------------------------

  index parts() const { return (dim_ + detail::width<T> - 1) / detail::width<T>; }
  /// Sums over the tokens that have left the window.
  T* sums(index head) { return sums_.data() + head * parts() * detail::key_sums<T>::size; }
  /// The window of packet p of a head; position t lies in row t % window.
  detail::split_keys<T> keys(index head, index p) {
    T* const first = ring_.data() + (head * parts() + p) * detail::key_sums<T>::size * window_;
    return {first, first + window_ * detail::width<T>, first + 2 * window_ * detail::width<T>};
  }

  /// Row t of a chunk comes into the window; the token that leaves it goes to the sums.
  void put(const detail::aft_head<S>& from, index head, index t) {
    const index position = size_ + t, row = position % window_;
    for (index p = 0; p < parts(); ++p) {
      const auto here = keys(head, p).from(row);
      T* const past = sums(head) + p * detail::key_sums<T>::size;
      if (position >= window_) {
        auto s = detail::key_sums<T>::read(past);
        detail::add_key(s, here);
        s.write(past);
      }
      here.take(from.k, from.v, p * detail::width<T>, t, 1);
    }
  }
  void advance(index tokens) { size_ += tokens; }

 private:
  index batch_, heads_, dim_, window_, size_ = 0;
  std::vector<T> ring_, sums_;
};

/// Options of aft_local_step.
struct aft_local_step_options {
  /// w is a band [L, 2 window - 1] instead of [L, L].
  bool band = false;
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
};

namespace detail {

/// Feeds the tokens of a call, which has passed its checks; bias(h, p, j) points to what head h
/// adds to key j for position p, `stride` before that of key j + 1.
template <class S, class Bias>
void step_window(aft_window_state<S>& state, const aft_call<S>& call, index stride, execution& exec, Bias&& bias) {
  using T = compute_type<S>;
  const index parts = state.parts(), window = state.window();
  try {
    exec.for_each(call.batch * call.heads, [&](index task, int worker) {
      const auto head = call.head(task / call.heads, task % call.heads);
      T* sums = nullptr;
      const auto biases = exec.scratch(worker, [&](arena& memory) {
        sums = memory.allocate<T>(parts * key_sums<T>::size);
        return split_biases<T>::layout(memory, 1);
      });
      for (index t = 0; t < call.length; ++t) {
        state.put(head, task, t);
        const index p = state.size() + t;
        std::copy_n(state.sums(task), parts * key_sums<T>::size, sums);
        for (index from = std::max<index>(0, p - window + 1); from <= p;) {  // the ring's end cuts the window
          const index row = from % window, count = std::min({p + 1 - from, window - row, key_piece});
          copy_biases(bias(task % call.heads, p, from), stride, count, biases.factor);
          biases.split(count);
          for (index part = 0; part < parts; ++part) {
            auto s = key_sums<T>::read(sums + part * key_sums<T>::size);
            add_keys(s, state.keys(task, part).from(row), biases, count);
            s.write(sums + part * key_sums<T>::size);
          }
          from += count;
        }
        write_row(sums, parts, call.gate, head, t);
      }
    });
  } catch (...) {  // no memory: the ring may have lost what the chunk pushed out
    state.reset();
    throw;
  }
  state.advance(call.length);
}

}  // namespace detail

/// Feeds n tokens k, v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]: the next n rows of one causal
/// aft_local over the whole stream. w is that of the longest sequence: [L, L], [H, L, L], or as band [L, 2 window - 1],
/// [H, L, 2 window - 1], with L >= tokens so far + n; row t belongs to the t-th token since the start. Cost and scratch
/// do not depend on how many tokens there were. Throws std::invalid_argument before anything, the state included,
/// changes; for want of memory the state is reset.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_local_step(aft_window_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                    const aft_local_step_options& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  const detail::validator check("aft_local_step");
  const tensor_view<const S> biases = detail::parameter_view(w);
  const tensor_view<S> to = as_view(out);
  const auto call = detail::check_aft_step<S>(check, state.batch(), state.heads(), state.dim(), as_view(q), as_view(k),
                                              as_view(v), to, options.gate);
  detail::check_parameter(check, biases, to);
  check.broadcasts("w heads", call.heads, biases.extent(1));
  check.at_least("w rows", state.size() + call.length, biases.extent(2));
  if (options.band)
    check.equal("w columns = 2 * window - 1 =", 2 * state.window() - 1, biases.extent(3));
  else
    check.at_least("w columns", state.size() + call.length, biases.extent(3));
  detail::step_window(state, call, biases.stride(3), exec, [&](index h, index p, index j) {
    return &biases(0, biases.extent(1) == 1 ? 0 : h, p, options.band ? j - p + state.window() - 1 : j);
  });
}

template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_local_step(aft_window_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                    const aft_local_step_options& options = {}) {
  execution serial;
  aft_local_step(state, q, k, v, out, w, options, serial);
}

/// Feeds n tokens k [B, H, n, D] or [B, H, n, 1], v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]:
/// the next n rows of one causal aft_conv over the whole stream. w [H, width] or [1, width] with width / 2 + 1 the
/// window of the state. Cost, scratch and what it throws: as aft_local_step.
template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_conv_step(aft_window_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                   const aft_step_options& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  const detail::validator check("aft_conv_step");
  const tensor_view<const S> kernels = detail::parameter_view(w);
  const tensor_view<S> to = as_view(out);
  const auto call = detail::check_aft_step<S>(check, state.batch(), state.heads(), state.dim(), as_view(q), as_view(k),
                                              as_view(v), to, options.gate, true);
  detail::check_parameter(check, kernels, to);
  detail::check_kernels(check, kernels, call.heads, false);
  check.equal("w width / 2 + 1 = window", state.window(), kernels.extent(3) / 2 + 1);
  detail::step_window(state, call, kernels.stride(3), exec, [&](index h, index p, index j) {
    return &kernels(0, 0, kernels.extent(2) == 1 ? 0 : h, j - p + state.window() - 1);
  });
}

template <element S, viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_conv_step(aft_window_state<S>& state, const Q& q, const K& k, const V& v, O&& out, const W& w,
                   const aft_step_options& options = {}) {
  execution serial;
  aft_conv_step(state, q, k, v, out, w, options, serial);
}

}  // namespace attn
