// attn: the states of kernel attention, token by token in constant memory.
//
//   auto branch = state;                  // a copy: another continuation of the same sequences
//   state.merge(later);                   // sequences in two parts, as if fed in one
//   state.write(file); state.read(file);
//   state.rollback(2); // as if the last two tokens had not been fed; needs .keep = 2 or more
//
// Batch items are independent sequences, of any number of tokens each:
//
//   linear_step(state, q, k, v, out, {.lengths = n});   // item b is fed the first n[b] tokens; the rest is padding
//   state.reset(1); state.rollback(0, 2); state.copy_item(0, 1); state.reorder(beams); state.tokens(1)
//
// The state has, for every batch item and head, S = sum_j phi(k_j) v_j^T [features, value dim], z = sum_j phi(k_j)
// [features], for exponential features a log scale (a power of two) for each of them, and the product of all gates,
// which is NaN where gates were per channel.
//
// Memory   about (value dim + 2) features numbers per head, value dim rounded up to two vectors, and as much again for
//          every token kept; bytes() is exact.
// Rounding Sums are not compensated, which would double the memory that a step reads and writes. A sum of n terms of
//          one sign loses up to n / 2 units in the last place when fed token by token, about sqrt(n) where terms vary;
//          fed in chunks of c <= 1024 tokens, n / c + 80 instead of n.
//
// In a stream (detail/state_stream.hpp) the numbers of a batch item and head are the product of gates, z [features], S
// [features][value dim], and, where features have log scales, those [features]. Of delta_rule and dplr there is S alone,
// whose features are the dims of keys.
#pragma once

#include <attn/kernel/detail/kernel_items.hpp>

namespace attn { inline namespace ATTN_ISA {

/// The sums of one kind of kernel attention; T is float (also for 16-bit elements) or double: the base of linear_state,
/// performer_state and rfa_state. A moved-from state may only be assigned to or destroyed.
template <class T>
class kernel_state : public detail::state_sequences<T> {
  using base = detail::state_sequences<T>;
  using base::name_, base::sums, base::gate;

 public:
  using base::batch, base::heads, base::features, base::value_dim;

  /// Element (r, d) of S, and r of z, of one head; with log scales, times 2^log_scale(r).
  T sum(idx_t b, idx_t h, idx_t r, idx_t d) const {
    return sums(b, h).value(r, d);
  }
  T weight(idx_t b, idx_t h, idx_t r) const { return sums(b, h).weights[r]; }
  T log_scale(idx_t b, idx_t h, idx_t r) const {
    const auto s = sums(b, h);
    return s.log_scale && s.log_scale[r] > detail::no_log_scale<T> ? s.log_scale[r] : T(0);
  }

  /// Adds the state of the tokens that followed: `later` was fed the tokens after those fed to *this. Without gates the
  /// order does not matter. Throws std::invalid_argument for a state of another kind or shape, and if `later` was fed
  /// with decays per channel, because a state has only one product of decays per head.
  void merge(const kernel_state& later) {
    const detail::validator check{name_};
    if (later.kind() != this->kind()) check.fail("a state of the same kind and feature kernel", "another");
    check.extents({{"batch of the other state =", batch(), later.batch()},
                   {"heads of the other state =", heads(), later.heads()},
                   {"features of the other state =", features(), later.features()},
                   {"value dim of the other state =", value_dim(), later.value_dim()}});
    const auto each_head = [&](auto&& f) {
      for (idx_t b = 0; b < batch(); ++b)
        for (idx_t h = 0; h < heads(); ++h) f(b, h);
    };
    each_head([&](idx_t b, idx_t h) {
      if (std::isnan(later.gate(b, h)))
        check.fail("a later state whose decays were per token", "one with decays per channel");
    });
    std::vector<T> factors(static_cast<std::size_t>(2 * detail::kernel_sums<T>::lanes(features())));
    each_head([&](idx_t b, idx_t h) {
      auto mine = sums(b, h);
      detail::combine(mine, later.gate(b, h), later.sums(b, h), mine, factors.data());
      gate(b, h) *= later.gate(b, h);
    });
    this->forget_kept();
    for (idx_t b = 0; b < batch(); ++b) this->length(b) += later.length(b);
  }

 protected:
  kernel_state(const char* name, detail::state_kind which, const kernel_state_extents& extents, idx_t per_feature = 1)
      : base(name, which, extents, per_feature) {}
};

}}  // namespace attn::ATTN_ISA
