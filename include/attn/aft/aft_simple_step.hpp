// attn: aft_simple over an endless stream, in memory that does not grow with it.
//
//   attn::aft_simple_state<float> state(batch, heads, dim);
//   attn::aft_simple_step(state, q_t, k_t, v_t, out_t);        // a token or a chunk: what causal aft_simple gives
//
// Memory   3 numbers of the compute type a channel, channels of a head rounded up to whole vectors.
#pragma once

#include <attn/aft/aft_simple.hpp>
#include <attn/aft/detail/aft_step.hpp>

#include <vector>

namespace attn::inline ATTN_ISA {

/// The sums over all tokens fed so far. One that was moved from may only be assigned to or destroyed.
template <element S>
class aft_simple_state {
  using T = compute_type<S>;

 public:
  /// The start of a stream. Throws std::invalid_argument for a negative extent or sizes no memory can hold.
  aft_simple_state(index batch, index heads, index dim) : batch_(batch), heads_(heads), dim_(dim) {
    const detail::validator check("aft_simple_state");
    detail::check_cache(check, batch, heads, dim, dim);
    sums_.resize(static_cast<std::size_t>(check.fits("state", {batch, heads, parts(), detail::key_sums<T>::size})));
    reset();
  }

  /// Tokens fed so far.
  index size() const { return size_; }
  index batch() const { return batch_; }
  index heads() const { return heads_; }
  index dim() const { return dim_; }
  std::size_t bytes() const { return sums_.size() * sizeof(T); }

  /// Back to the start of a stream.
  void reset() {
    size_ = 0;
    for (std::size_t at = 0; at < sums_.size(); at += detail::key_sums<T>::size)
      detail::key_sums<T>{}.write(sums_.data() + at);
  }

  /// Feeds tokens without asking anything: k, v [B, H, n, D].
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    const tensor_view<const S> keys = as_view(k), values = as_view(v);
    detail::check_tokens(detail::validator("aft_simple_state"), batch_, heads_, dim_, dim_, keys, values);
    for (index head = 0; head < batch_ * heads_; ++head) {
      const index b = head / heads_, h = head % heads_;
      const detail::aft_head<S> from{{}, detail::head_of(keys, b, h), detail::head_of(values, b, h), {}};
      detail::add_line<T>(from, 0, 0, keys.extent(2), parts(), sums(head));
    }
    advance(keys.extent(2));
  }

  // For the step.
  index parts() const { return (dim_ + detail::width<T> - 1) / detail::width<T>; }
  T* sums(index head) { return sums_.data() + head * parts() * detail::key_sums<T>::size; }
  void advance(index tokens) { size_ += tokens; }

 private:
  index batch_, heads_, dim_, size_ = 0;
  std::vector<T> sums_;
};

/// Feeds n tokens k, v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]: the next n rows of one causal
/// aft_simple over the whole stream. No scratch. Throws std::invalid_argument before anything, the state included,
/// changes.
template <element S, viewable Q, viewable K, viewable V, viewable O>
void aft_simple_step(aft_simple_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                     const aft_step_options& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  using T = compute_type<S>;
  const auto call =
      detail::check_aft_step<S>(detail::validator("aft_simple_step"), state.batch(), state.heads(), state.dim(), as_view(q),
                                as_view(k), as_view(v), as_view(out), options.gate);
  exec.for_each(call.batch * call.heads, [&](index head, int) {
    detail::for_columns(state.parts(), [&](auto count, index p) {
      detail::simple_rows_causal<T, count.value>(call.head(head / call.heads, head % call.heads), options.gate, 0,
                                                 call.length, p * detail::width<T>,
                                                 state.sums(head) + p * detail::key_sums<T>::size);
    });
  });
  state.advance(call.length);
}

template <element S, viewable Q, viewable K, viewable V, viewable O>
void aft_simple_step(aft_simple_state<S>& state, const Q& q, const K& k, const V& v, O&& out,
                     const aft_step_options& options = {}) {
  execution serial;
  aft_simple_step(state, q, k, v, out, options, serial);
}

}  // namespace attn
