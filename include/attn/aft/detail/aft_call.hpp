// attn: what the operators of the attention-free family share: shapes, checks, and heads that are taken together.
//   q, k, v, out [B, H, L, D]; parameters w as views of rank 2 to 4, whose missing axes are 1
#pragma once

#include <attn/aft/detail/aft_block.hpp>
#include <attn/core/detail/attention_shape.hpp>

namespace attn::inline ATTN_ISA::detail {

/// One call's views and what they agree on.
template <class S>
struct aft_call {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  list_view<index> lengths;
  bool causal = false, gate = true;
  index batch = 0, heads = 0, length = 0, dim = 0;

  index true_length(index b) const { return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)]; }
  aft_head<S> head(index b, index h) const {
    return {head_of(q, b, h), head_of(k, b, h), head_of(v, b, h), head_of(out, b, h)};
  }
  /// Packets of channels a head.
  index parts() const { return (dim + width<compute_type<S>> - 1) / width<compute_type<S>>; }
};

/// A k of one channel as that of `dim` channels.
template <class S>
tensor_view<const S> for_all_channels(const tensor_view<const S>& k, index dim) {
  return {k.data(), {k.extent(0), k.extent(1), k.extent(2), dim}, {k.stride(0), k.stride(1), k.stride(2), 0}};
}

/// Checks the four views against one another. With `one_key`, a k of one channel serves all.
template <class S, class Options>
aft_call<S> check_aft(const validator& check, const tensor_view<const S>& q, tensor_view<const S> k,
                      const tensor_view<const S>& v, const tensor_view<S>& out, const Options& options,
                      bool one_key = false) {
  check.readable("q", q);
  check.readable("k", k);
  check.readable("v", v);
  check.writable("out", out);
  const index batch = q.extent(0), heads = q.extent(1), length = q.extent(2), dim = q.extent(3);
  check.equal("key batch = query batch", batch, k.extent(0));
  check.equal("key heads = query heads", heads, k.extent(1));
  check.equal("key length = query length", length, k.extent(2));
  if (one_key)
    check.broadcasts("key dim", dim, k.extent(3));
  else
    check.equal("key dim = query dim", dim, k.extent(3));
  check.equal("value batch = query batch", batch, v.extent(0));
  check.equal("value heads = query heads", heads, v.extent(1));
  check.equal("value length = query length", length, v.extent(2));
  check.equal("value dim = query dim", dim, v.extent(3));
  check.equal("out batch = query batch", batch, out.extent(0));
  check.equal("out heads = query heads", heads, out.extent(1));
  check.equal("out length = query length", length, out.extent(2));
  check.equal("out dim = query dim", dim, out.extent(3));
  check.no_alias("out", out, "q", q);
  check.no_alias("out", out, "k", k);
  check.no_alias("out", out, "v", v);
  check_length_list(check, "lengths", options.lengths, batch, length);
  if (k.extent(3) != dim) k = for_all_channels(k, dim);
  return {q, k, v, out, options.lengths, options.causal, options.gate, batch, heads, length, dim};
}

/// A parameter as a view of rank 4.
template <class W>
auto parameter_view(const W& w) {
  const auto given = as_view(w);
  using element_type = const typename decltype(given)::value_type;
  constexpr int rank = decltype(given)::rank;
  std::array<index, 4> extents{1, 1, 1, 1}, strides{};
  for (int axis = 0; axis < rank; ++axis) {
    extents[static_cast<std::size_t>(4 - rank + axis)] = given.extent(axis);
    strides[static_cast<std::size_t>(4 - rank + axis)] = given.stride(axis);
  }
  return tensor_view<element_type>(given.data(), extents, strides);
}

template <class S>
void check_parameter(const validator& check, const tensor_view<const S>& w, const tensor_view<S>& out) {
  check.readable("w", w);
  check.equal("w batch =", 1, w.extent(0));
  check.no_alias("out", out, "w", w);
}

/// The types of a call, checked where the compiler can.
template <class Q, class K, class V, class O, class W>
constexpr void require_aft_types() {
  require_one_element_type<Q, K, V, O>();
  static_assert(std::same_as<element_of<Q>, element_of<W>>, "attn: w must have the element type of q, k, v and out");
}

/// Channels whose sums are taken together: enough to make up for the exponentials of w, few enough for the cache.
inline constexpr index group_channels = 512;

/// Heads of one true length that share their biases, from entry `first` of the order of heads on.
struct aft_group {
  index first = 0, heads = 0, length = 0;
};

/// The heads of a call in groups. Heads that share their biases stand side by side: all of them, or batch items of
/// one head.
template <class S>
struct aft_groups {
  aft_group* list = nullptr;
  aft_head<S>* heads = nullptr;  // in order
  index count = 0, most = 0;     // groups; heads of the largest

  struct place {
    index batch, head;
  };
  static place at(const aft_call<S>& call, bool shared, index n) {
    return shared ? place{n / call.heads, n % call.heads} : place{n % call.batch, n / call.batch};
  }

  static aft_groups make(const aft_call<S>& call, bool shared, arena& memory) {
    using T = compute_type<S>;
    aft_groups g;
    const index all = call.batch * call.heads;
    g.most = std::min(all, std::max<index>(1, group_channels / (std::max<index>(1, call.parts()) * width<T>)));
    g.list = memory.allocate<aft_group>(all);
    g.heads = memory.allocate<aft_head<S>>(all);
    if (!g.list) return g;
    for (index n = 0; n < all; ++n) {
      const place here = at(call, shared, n);
      g.heads[n] = call.head(here.batch, here.head);
      const index length = call.true_length(here.batch);
      const bool joins = g.count > 0 && g.list[g.count - 1].length == length && g.list[g.count - 1].heads < g.most &&
                         (shared || here.head == at(call, shared, n - 1).head);
      if (!joins) g.list[g.count++] = {n, 0, length};
      ++g.list[g.count - 1].heads;
    }
    return g;
  }

  std::span<const aft_head<S>> of(const aft_group& group) const {
    return {heads + group.first, static_cast<std::size_t>(group.heads)};
  }
};

}  // namespace attn::detail
