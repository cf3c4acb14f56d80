// attn: aft_simple over an endless stream, in memory that does not grow with it.
//
//   attn::aft_simple_state<float> state({.batch = 1, .heads = 8, .dim = 64});
//   attn::aft_simple_step(state, q_t, k_t, v_t, out_t);        // a token or a chunk: what causal aft_simple gives
//
// Memory   3 numbers of the compute type per channel, channels of a head rounded up to whole vectors.
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
  /// The start of a stream. Throws std::invalid_argument for a negative extent, a value_dim other than dim, or sizes no
  /// memory can hold.
  explicit aft_simple_state(const state_extents& extents) {
    const detail::validator check("aft_simple_state");
    extents_ = detail::check_aft_state(check, extents);
    const index count = check.fits("state", {batch(), heads(), parts(), detail::key_sums<T>::size});
    sums_.resize(static_cast<std::size_t>(count));
    reset();
  }

  /// Tokens fed so far.
  index tokens() const { return tokens_; }
  index batch() const { return extents_.batch; }
  index heads() const { return extents_.heads; }
  index dim() const { return extents_.dim; }
  std::size_t bytes() const { return sums_.size() * sizeof(T); }

  /// Back to the start of a stream.
  void reset() {
    tokens_ = 0;
    detail::sums_array<T>::clear(sums_.data(), batch() * heads() * parts());
  }

  /// Feeds tokens without attending: k, v [B, H, n, D].
  template <viewable K, viewable V>
  void append(const K& k, const V& v) {
    const auto x = detail::tokens_of<S>(detail::validator("aft_simple_state"), extents_, as_view(k), as_view(v));
    for (index head = 0; head < batch() * heads(); ++head)
      detail::add_rows<T, S>(x.head(head / heads(), head % heads()), 0, x.length, parts(), sums(head));
    advance(x.length);
  }

  // For the step.
  const state_extents& extents() const { return extents_; }
  T* sums(index head) { return sums_.data() + head * parts() * detail::key_sums<T>::size; }
  void advance(index tokens) { tokens_ += tokens; }

 private:
  index parts() const { return (dim() + detail::width<T> - 1) / detail::width<T>; }

  state_extents extents_;
  index tokens_ = 0;
  std::vector<T> sums_;
};

/// Feeds n tokens k, v [B, H, n, D] and writes the rows of their queries q [B, H, n, D]: the next n rows of one causal
/// aft_simple over the whole stream. No scratch. Throws std::invalid_argument before anything, the state included,
/// changes.
template <element S, viewable Q, viewable K, viewable V, viewable O, class Options = aft_step_options>
void aft_simple_step(aft_simple_state<S>& state, const Q& q, const K& k, const V& v, O&& out, Options&& options = {},
                     execution_ref exec = {}) {
  static_assert(std::same_as<S, element_of<const Q&>>, "attn: the state and q must have one element type");
  auto x = detail::tensors_of(q, k, v, out);
  x.gate = detail::options_or_default<aft_step_options>(options).gate;
  detail::check_aft_step(detail::validator("aft_simple_step"), state.extents(), x);
  execution& e = detail::execution_of(exec, options);
  const auto limit = e.limit_threads(x.work(20 * static_cast<double>(x.length)));
  e.for_each(x.batch * x.heads, [&](index head, int) {
    detail::simple_rows<compute_type<S>, S, true>(x.head(head / x.heads, head % x.heads), x.gate, 0, x.length, x.parts(),
                                                  state.sums(head));
  });
  state.advance(x.length);
}

}  // namespace attn::inline ATTN_ISA
