// attn: long-short attention.
//
//   out_i = softmax attention (full_softmax.hpp) over two sets of keys at once: those of a window around the query, and
//   r compressed ones that stand for the whole sequence, K' = P^T K, V' = P^T V with P = softmax over tokens of given
//   logits, per head. Each set may have a layer norm, of keys and values alike, after compression.
//                                                                    Zhu et al. 2021, "Long-Short Transformer"
//   With causal, every finished segment of a given size is compressed separately, to r keys, which are visible from the
//   segment's last token on.
//
//   attn::long_short(q, k, v, out, logits, {.left = 128, .right = 128});
//   attn::long_short(q, k, v, out, logits, {.causal = true, .left = 64, .block = 64, .segment = 16});
//
// Shapes   as full_softmax; logits [B, H, Lk, r].
// Cost     2 B H (D + Dv) operations for every token and compressed key it goes into, and for every visible key of a
//          query. Scratch per head, one head at a time or as many as keep the threads busy: about n r (D + Dv)
//          numbers, n = Lk / 256 + 2, causal 2 Lk / segment and, for segments above 256, Lk / 256 more; per thread:
//          about (2 (left + right) + 3 block + 500) (D + Dv), with a local norm twice that.
// Values   `out` is finite where |v| times the number of keys that a row sees, compressed ones included, is below the
//          largest number of the compute type (float: 3.4e38), for sums precede the division.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/low_rank/detail/long_short_run.hpp>

namespace attn { inline namespace ATTN_ISA {

template <class S>
struct long_short_options {
  using real = compute_type<S>;
  static constexpr unsigned shared = detail::fields::causal | detail::fields::lengths | detail::fields::key_mask |
                                     detail::fields::softcap | detail::fields::sinks | detail::fields::lse;

  std::optional<real> scale{};  // factor of q.k; 1 / sqrt(D) unless given
  bool causal = false;  // a query sees no key after its own position, and compressed keys of finished segments only
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  idx_t left = 128, right = 128;  // keys of the window before and after the query, >= 0
  /// If > 0, `left` and `right` are counted from the ends of the query's own block of this size, which is seen whole.
  idx_t block = 0;
  idx_t segment = 0;  // tokens of a segment, >= 1: causal only
  /// Layer norms, gamma (x - mean) / sqrt(variance + norm_eps) + beta: of the window's keys and values, and of the
  /// compressed ones. D numbers each, for D = Dv; beta may be left out.
  list_view<real> local_gamma{}, local_beta{}, global_gamma{}, global_beta{};
  real norm_eps = real(1e-5);
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes. Windows do not see the
  /// others, whose logits count as -infinity; compressed keys of a segment in which all are hidden are hidden, too.
  key_mask_view key_mask{};
  std::optional<real> softcap{};  // c tanh(s / c) on scale q.k
  list_view<real> sinks{};  // a logit per head that joins the denominator and has no value
  view_field<real, 3> lse{};  // written if given: the natural logarithm of the denominator, sink included, [B, H, Lq]
};

namespace detail {

/// Parameters of a layer norm; none where no gamma is given.
template <class T>
key_norm<T> check_norm(call_views& check, const char* gamma, std::span<const T> scales, const char* beta,
                       std::span<const T> shifts, T eps, const attention_shape& s) {
  if (scales.empty() && !shifts.empty()) check.fail({gamma, " where ", beta, " is given"}, "none");
  if (scales.empty()) return {};
  check.equal("value dim = key dim where keys and values are normed,", s.dim, s.dim_v);
  check.one_per(gamma, "dim", s.dim, static_cast<idx_t>(scales.size()));
  if (!shifts.empty()) check.one_per(beta, "dim", s.dim, static_cast<idx_t>(shifts.size()));
  check.read(gamma, list_layout(scales)), check.read(beta, list_layout(shifts));
  return {scales.data(), shifts.empty() ? nullptr : shifts.data(), eps};
}

inline void check_window(const validator& check, idx_t left, idx_t right, idx_t block, bool causal, idx_t segment) {
  check.at_least("left", 0, left);
  check.at_least("right", 0, right);
  check.at_least("block", 0, block);
  if (causal)
    check.at_least("segment", 1, segment);
  else if (segment != 0)
    check.fail("a segment with causal only", segment);
}

/// The driver of a call whose own options are checked here. In a backward call s is its shape, and `in` the forward
/// call, which computes lse.
template <class S>
long_short_call<S> checked_long_short(call_views& check, const attention_shape& s, const softmax_call<S, no_score>& in,
                                      const tensor_view<const S>& logits, const long_short_options<S>& given) {
  using T = compute_type<S>;
  check_window(check, given.left, given.right, given.block, given.causal, given.segment);
  check.read("logits", logits, {{"logits batch = query batch", s.batch}, {"logits heads = query heads", s.heads},
                                {"logits length = key length", s.keys}});
  check.fits("compressed keys", {s.keys, logits.extent(3), s.dim + s.dim_v + 1});
  if (!(given.norm_eps >= 0 && std::isfinite(given.norm_eps)))
    check.fail("a finite norm_eps >= 0", static_cast<double>(given.norm_eps));
  const auto norm = [&](const char* gamma, std::span<const T> scales, const char* beta, std::span<const T> shifts) {
    return check_norm<T>(check, gamma, scales, beta, shifts, given.norm_eps, s);
  };
  const key_norm<T> local = norm("local_gamma", given.local_gamma, "local_beta", given.local_beta);
  const key_norm<T> global = norm("global_gamma", given.global_gamma, "global_beta", given.global_beta);
  const idx_t all = s.queries + s.keys;
  return {.in = in, .logits = logits, .local = local, .global = global, .causal_segment = given.segment,
          .left = (std::min)(given.left, all), .right = given.causal ? 0 : (std::min)(given.right, all),
          .block = (std::min)(given.block, all), .key_mask = given.key_mask};
}

}  // namespace detail

template <viewable Q, viewable K, viewable V, viewable O, viewable L,
          class Options = long_short_options<element_of<const Q&>>>
void long_short(const Q& q, const K& k, const V& v, O&& out, const L& logits, Options&& options = {},
                execution_ref exec = {}) {
  using S = element_of<const Q&>;
  static_assert(std::same_as<element_of<const L&>, S>, "attn: logits must have the element type of q, k and v");
  const tensor_view<const S> weights = as_view(logits);
  detail::no_score none;
  auto call = detail::checked_call<long_short_options>("long_short", q, k, v, out, options, none, exec);
  const detail::seen_lengths lengths(call.options.key_mask, call.shape.batch, call.lengths, call.exec);
  detail::run_long_short(detail::checked_long_short<S>(call.views, call.shape, call, weights, call.options));
}

}}  // namespace attn::ATTN_ISA
