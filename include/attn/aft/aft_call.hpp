// attn: what the operators of the attention-free family share: shapes, checks, and heads that are taken together.
//   q, k, v, out [B, H, L, D]; parameters w as views of rank 2 to 4, whose missing axes are 1
#pragma once

#include <attn/aft/aft_block.hpp>
#include <attn/core/attention_shape.hpp>

namespace attn::detail {

/// One call's views and what they agree on.
template <class S>
struct aft_call {
  tensor_view<const S> q, k, v;
  tensor_view<S> out;
  std::span<const index> lengths;
  bool causal = false, gate = true;
  index batch = 0, heads = 0, length = 0, dim = 0;

  index true_length(index b) const { return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)]; }
  aft_head<S> head(index b, index h) const {
    return {head_of(q, b, h), head_of(k, b, h), head_of(v, b, h), head_of(out, b, h)};
  }
  /// Packets of channels a head.
  index parts() const { return (dim + width<compute_type<S>> - 1) / width<compute_type<S>>; }
};

/// Checks the four views against one another. With `one_key`, a k of one channel serves all.
template <class S, class Options>
aft_call<S> check_aft(const door& at, const tensor_view<const S>& q, tensor_view<const S> k,
                      const tensor_view<const S>& v, const tensor_view<S>& out, const Options& options,
                      bool one_key = false) {
  at.readable("q", q);
  at.readable("k", k);
  at.readable("v", v);
  at.writable("out", out);
  const index batch = q.extent(0), heads = q.extent(1), length = q.extent(2), dim = q.extent(3);
  at.equal("key batch = query batch", batch, k.extent(0));
  at.equal("key heads = query heads", heads, k.extent(1));
  at.equal("key length = query length", length, k.extent(2));
  if (one_key)
    at.broadcasts("key dim", dim, k.extent(3));
  else
    at.equal("key dim = query dim", dim, k.extent(3));
  at.equal("value batch = query batch", batch, v.extent(0));
  at.equal("value heads = query heads", heads, v.extent(1));
  at.equal("value length = query length", length, v.extent(2));
  at.equal("value dim = query dim", dim, v.extent(3));
  at.equal("out batch = query batch", batch, out.extent(0));
  at.equal("out heads = query heads", heads, out.extent(1));
  at.equal("out length = query length", length, out.extent(2));
  at.equal("out dim = query dim", dim, out.extent(3));
  at.apart("out", out, "q", q);
  at.apart("out", out, "k", k);
  at.apart("out", out, "v", v);
  check_length_list(at, "lengths", options.lengths, batch, length);
  if (k.extent(3) != dim) k = {k.data(), {batch, heads, length, dim}, {k.stride(0), k.stride(1), k.stride(2), 0}};
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
void check_parameter(const door& at, const tensor_view<const S>& w, const tensor_view<S>& out) {
  at.readable("w", w);
  at.equal("w batch =", 1, w.extent(0));
  at.apart("out", out, "w", w);
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

  static aft_groups make(const aft_call<S>& call, bool shared, carver& memory) {
    using T = compute_type<S>;
    aft_groups g;
    const index all = call.batch * call.heads;
    g.most = std::min(all, std::max<index>(1, group_channels / (std::max<index>(1, call.parts()) * width<T>)));
    g.list = memory.take<aft_group>(all);
    g.heads = memory.take<aft_head<S>>(all);
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
