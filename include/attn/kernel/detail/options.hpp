// attn: what the operators of kernel attention check alike.
#pragma once

#include <attn/core/detail/attention_shape.hpp>

#include <optional>

namespace attn::inline ATTN_ISA::detail {

/// Is a parameter there for every query head, or for every key head? Of queries of 0 heads, which a step may have that
/// only takes in, there are none to have one.
inline bool fits_heads(index parameter_heads, const attention_shape& s) {
  return parameter_heads == s.kv_heads || (parameter_heads == s.heads && s.heads > 0);
}

/// So many features that memory can hold their sums, for some thousand threads.
inline void check_feature_count(const validator& check, index features, const attention_shape& s) {
  check.at_least("features", 0, features);
  check.fits("features", {features, std::max<index>(s.dim_v, 64), index(1) << 16});
}

/// Features [H, Hkv or 1, count, dim] of the caller.
template <class T, class S>
void check_features(const validator& check, const tensor_view<const T, 3>& w, const attention_shape& s,
                    const tensor_view<S>& out) {
  check.readable("features", w);
  if (w.extent(0) != 1 && !fits_heads(w.extent(0), s))
    check.fail(text({"features for 1, ", s.heads, " or ", s.kv_heads, " heads"}), w.extent(0));
  check.at_least("features", 1, w.extent(1));
  check_feature_count(check, w.extent(1), s);
  check.equal("feature columns = query dim", s.dim, w.extent(2));
  check.no_alias("out", out, "features", w);
}

/// Gates [B, H or Hkv, L]: from 0 to 1 for every real token.
template <class T>
void check_gates(const validator& check, const char* what, const tensor_view<const T, 3>& gate, const attention_shape& s,
                 const sequence_lengths& lengths) {
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

/// Heads of sums a call needs: as the key heads, or one a query head where a parameter differs between those.
inline index heads_of_sums(const attention_shape& s, std::initializer_list<index> parameter_heads) {
  for (index heads : parameter_heads)
    if (heads == s.heads && heads > s.kv_heads) return s.heads;
  return s.kv_heads;
}

}  // namespace attn::detail
