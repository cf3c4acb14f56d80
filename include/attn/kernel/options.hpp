// attn: what the operators of kernel attention check alike.
#pragma once

#include <attn/core/attention_shape.hpp>

#include <optional>

namespace attn::detail {

/// Gates [B, H or Hkv, L]: from 0 to 1 for every real token.
template <class T>
void check_gates(const door& at, const char* what, const tensor_view<const T, 3>& gate, const attention_shape& s,
                 const sequence_lengths& lengths) {
  at.readable(what, gate);
  if (gate.extent(0) != s.batch) at.refuse(text({what, " batch = query batch ", s.batch}), gate.extent(0));
  if (gate.extent(1) != s.heads && gate.extent(1) != s.kv_heads)
    at.refuse(text({what, " heads = query heads ", s.heads, " or key heads ", s.kv_heads}), gate.extent(1));
  if (gate.extent(2) != s.keys) at.refuse(text({what, " length = key length ", s.keys}), gate.extent(2));
  for (index b = 0; b < s.batch; ++b)
    for (index h = 0; h < gate.extent(1); ++h)
      for (index t = 0; t < lengths.keys(b); ++t)
        if (const T g = gate(b, h, t); !(g >= T(0) && g <= T(1)))
          at.refuse(text({what, " from 0 to 1"}), static_cast<double>(g));
}

template <class T>
void check_eps(const door& at, T eps, const char* what = "eps") {
  if (!(eps >= T(0)) || eps == std::numeric_limits<T>::infinity())
    at.refuse(text({what, " >= 0, and finite"}), static_cast<double>(eps));
}

/// Heads of sums a call needs: as the key heads, or one a query head where a
/// parameter differs between those.
inline index heads_of_sums(const attention_shape& s, std::initializer_list<index> parameter_heads) {
  for (index heads : parameter_heads)
    if (heads == s.heads && heads > s.kv_heads) return s.heads;
  return s.kv_heads;
}

}  // namespace attn::detail
