// attn: what the operators of kernel attention take and check alike.
#pragma once

#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>
#include <attn/kernel/detail/stored_rows.hpp>

#include <optional>

namespace attn::inline ATTN_ISA::detail {

/// The arguments of a call as views.
template <class S>
struct kernel_views {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
};

/// What stands for the state of a call without one.
struct no_state {
  index heads() const { return 0; }
};

/// The shape parameters are checked against: tokens appended without queries have as many query heads as the state.
template <class State>
attention_shape shape_of_parameters(attention_shape s, const State* state) {
  if (state && s.heads == 0 && s.kv_heads > 0 && state->heads() % s.kv_heads == 0) s.heads = state->heads();
  return s;
}

/// Is a parameter there for every query head, or for every key head?
inline bool fits_heads(index parameter_heads, const attention_shape& s) {
  return parameter_heads == s.kv_heads || (parameter_heads == s.heads && s.heads > 0);
}

/// So many features that memory can hold their sums, for some thousand threads.
inline void check_feature_count(const validator& check, index features, const attention_shape& s) {
  check.at_least("features", 0, features);
  check.fits("features", {features, std::max<index>(s.dim_v, 64), index(1) << 16});
}

/// Features [H, Hkv or 1, count, dim] of the caller as a view.
template <class S, class W>
tensor_view<const S, 3> view_of_features(const W& w) {
  constexpr bool fits = std::convertible_to<const W&, tensor_view<const S, 3>>;
  static_assert(
      fits,
      "attn: performer and rfa take random features after out: a view [heads or 1, features, dim] or an Eigen "
      "matrix [features, dim] of the element type of q, such as attn::draw_features<float>(256, 64)");
  if constexpr (fits)
    return w;
  else
    return {};
}

template <class S>
void check_features(const validator& check, const tensor_view<const S, 3>& w, const attention_shape& s,
                    const tensor_view<S>& out) {
  check.readable("features", w);
  if (w.extent(0) != 1 && !fits_heads(w.extent(0), s))
    check.fail(text({"features for 1, ", s.heads, " or ", s.kv_heads, " heads"}), w.extent(0));
  check.at_least("features", 1, w.extent(1));
  check_feature_count(check, w.extent(1), s);
  check.equal("feature columns = query dim", s.dim, w.extent(2));
  check.no_alias("out", out, "features", w);
}

/// The same as one tensor [1, heads, count, dim].
template <class S>
stored_tensor<compute_type<S>> stored_features(const tensor_view<const S, 3>& w) {
  return tensor_view<const S>(w.data(), {1, w.extent(0), w.extent(1), w.extent(2)},
                              {0, w.stride(0), w.stride(1), w.stride(2)});
}

/// Gates [B, H or Hkv, L]: from 0 to 1 for every real token.
template <class T>
void check_gates(const validator& check, const char* what, const tensor_view<const T, 3>& gate,
                 const attention_shape& s, const sequence_lengths& lengths) {
  check.readable(what, gate);
  if (gate.extent(0) != s.batch) check.fail(text({what, " batch = query batch ", s.batch}), gate.extent(0));
  if (!fits_heads(gate.extent(1), s))
    check.fail(text({what, " heads = query heads ", s.heads, " or key heads ", s.kv_heads}), gate.extent(1));
  if (gate.extent(2) != s.keys) check.fail(text({what, " length = key length ", s.keys}), gate.extent(2));
  for (index b = 0; b < s.batch; ++b)
    for (index h = 0; h < gate.extent(1); ++h)
      for (index t = 0; t < lengths.keys(b); ++t)
        if (const T g = gate(b, h, t); !(g >= T(0) && g <= T(1)))
          check.fail(text({what, " from 0 to 1"}), static_cast<double>(g));
}

template <class T>
void check_eps(const validator& check, T eps, const char* what = "eps") {
  if (!(eps >= T(0)) || eps == std::numeric_limits<T>::infinity())
    check.fail(text({what, " >= 0, and finite"}), static_cast<double>(eps));
}

/// Heads of sums a call needs: as the key heads, or one per query head where a parameter differs between those.
inline index heads_of_sums(const attention_shape& s, std::initializer_list<index> parameter_heads) {
  for (index heads : parameter_heads)
    if (heads == s.heads && heads > s.kv_heads) return s.heads;
  return s.kv_heads;
}

}  // namespace attn::inline ATTN_ISA::detail
