// attn: what the operators of the attention-free family share: views, their checks, heads that are computed together.
//   q, k, v, out [B, H, L, D]; parameters w as views of rank 2 to 4, whose missing axes are 1
#pragma once

#include <attn/aft/detail/aft_elements.hpp>
#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>

namespace attn::inline ATTN_ISA::detail {

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

/// A head of a view of rank 4.
inline matrix_view<const void> head_of(const memory_layout& x, index batch, index head) {
  const char* const origin = x.data ? x.data + (batch * x.strides[0] + head * x.strides[1]) * x.item : nullptr;
  return {origin, x.extents[2], x.extents[3], x.strides[2], x.strides[3]};
}

/// The views of one call and what they agree on.
template <class T>
struct aft_tensors {
  memory_layout q, k, v, out, w;
  const aft_elements<T>* elements;
  list_view<index> lengths{};
  bool causal = true, gate = true;
  index batch = 0, heads = 0, length = 0, dim = 0;

  index true_length(index b) const { return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)]; }
  aft_head head(index b, index h) const {
    const auto to = head_of(out, b, h);
    return {head_of(q, b, h), head_of(k, b, h), head_of(v, b, h),
            {const_cast<void*>(to.data), to.rows, to.cols, to.row_stride, to.col_stride}};
  }
  /// The biases of a head.
  bool shares_biases() const { return w.extents[1] == 1; }
  matrix_view<const void> biases(index h) const { return head_of(w, 0, shares_biases() ? 0 : h); }
  /// Packets of channels per head.
  index parts() const { return (dim + width<T> - 1) / width<T>; }
  /// For `pairs` of a row and a key per head; causal calls see half of them.
  work_estimate work(double pairs) const {
    const double channels = static_cast<double>(batch * heads) * static_cast<double>(dim);
    return {.operations = (causal ? 2 : 4) * channels * pairs, .bytes = 16 * channels * static_cast<double>(length)};
  }
};

/// The views of a call. The element types are checked where the compiler can.
template <class Q, class K, class V, class O, class W>
aft_tensors<compute_type<element_of<const Q&>>> tensors_of(const Q& q, const K& k, const V& v, O& out, const W& w) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  using S = element_of<const Q&>;
  static_assert(std::same_as<S, element_of<const W&>>, "attn: w must have the element type of q, k, v and out");
  using view = tensor_view<const S>;
  return {.q = view(as_view(q)),
          .k = view(as_view(k)),
          .v = view(as_view(v)),
          .out = tensor_view<S>(as_view(out)),
          .w = parameter_view(w),
          .elements = &elements_of<S>};
}
template <class Q, class K, class V, class O>
auto tensors_of(const Q& q, const K& k, const V& v, O& out) {
  return tensors_of(q, k, v, out, tensor_view<const element_of<const Q&>>());
}

/// A k of one channel as that of `dim` channels.
inline memory_layout for_all_channels(memory_layout k, index dim) {
  if (k.extents[3] == 1 && dim != 1) k.extents[3] = dim, k.strides[3] = 0;
  return k;
}

enum class aft_keys { per_channel, per_head_too };

/// Checks the views against one another, and sets the extents. `per_head_too`: a k of one channel serves all.
template <class T>
void check_aft(const validator& check, aft_tensors<T>& x, aft_keys keys = aft_keys::per_channel) {
  check.memory({{"out", x.out}}, {{"q", x.q}, {"k", x.k}, {"v", x.v}, {"w", x.w}});
  const auto& q = x.q.extents;
  x.batch = q[0], x.heads = q[1], x.length = q[2], x.dim = q[3];
  const bool one_key = keys == aft_keys::per_head_too && x.k.extents[3] != x.dim;
  if (one_key) check.broadcasts("key dim", x.dim, x.k.extents[3]);
  check.extents({{"key batch = query batch", x.batch, x.k.extents[0]},
                 {"key heads = query heads", x.heads, x.k.extents[1]},
                 {"key length = query length", x.length, x.k.extents[2]},
                 {"key dim = query dim", one_key ? 1 : x.dim, x.k.extents[3]},
                 {"value batch = query batch", x.batch, x.v.extents[0]},
                 {"value heads = query heads", x.heads, x.v.extents[1]},
                 {"value length = query length", x.length, x.v.extents[2]},
                 {"value dim = query dim", x.dim, x.v.extents[3]},
                 {"out batch = query batch", x.batch, x.out.extents[0]},
                 {"out heads = query heads", x.heads, x.out.extents[1]},
                 {"out length = query length", x.length, x.out.extents[2]},
                 {"out dim = query dim", x.dim, x.out.extents[3]}});
  check_length_list(check, "lengths", x.lengths, x.batch, x.length);
  if (one_key) x.k = for_all_channels(x.k, x.dim);
}

/// Checks the leading extents of biases w [rows, columns] or [H, rows, columns].
template <class T>
void check_biases(const validator& check, const aft_tensors<T>& x) {
  check.equal("w batch =", 1, x.w.extents[0]);
  check.broadcasts("w heads", x.heads, x.w.extents[1]);
}

/// Checks kernels w [H, width] or [1, width], whose width is odd; of images [H, height, width], the height too.
template <class T>
void check_kernels(const validator& check, aft_tensors<T>& x, bool image) {
  auto& w = x.w;
  check.equal("w batch =", 1, w.extents[0]);
  if (!image) {  // [H, 1, width]
    check.equal("w of rank 2, [heads, width], with leading extent", 1, w.extents[1]);
    std::swap(w.extents[1], w.extents[2]), std::swap(w.strides[1], w.strides[2]);
  }
  check.broadcasts("w heads", x.heads, w.extents[1]);
  if (w.extents[3] % 2 == 0) check.fail("w of odd width", w.extents[3]);
  if (w.extents[2] % 2 == 0) check.fail("w of odd height", w.extents[2]);
}

/// Channels whose sums are computed together: enough to make up for the exponentials of w, few enough for the cache.
inline constexpr index bundle_channels = 512;

/// Heads of one true length that share their biases, from entry `first` of the order of heads on.
struct head_bundle {
  index first = 0, heads = 0, length = 0;
};

/// The heads of a call in bundles. Heads that share their biases lie side by side: all of them, or the batch items of
/// one head.
template <class T>
struct head_bundles {
  head_bundle* list = nullptr;
  aft_head* heads = nullptr;  // in order
  index count = 0, most = 0;     // bundles; heads of the largest

  struct position {
    index batch, head;
  };
  static position at(const aft_tensors<T>& x, index n) {
    return x.shares_biases() ? position{n / x.heads, n % x.heads} : position{n % x.batch, n / x.batch};
  }

  static head_bundles make(const aft_tensors<T>& x, arena& memory) {
    head_bundles g;
    const index all = x.batch * x.heads;
    g.most = std::min(all, std::max<index>(1, bundle_channels / (std::max<index>(1, x.parts()) * width<T>)));
    g.list = memory.allocate<head_bundle>(all);
    g.heads = memory.allocate<aft_head>(all);
    if (!g.list) return g;
    for (index n = 0; n < all; ++n) {
      const position here = at(x, n);
      g.heads[n] = x.head(here.batch, here.head);
      const index length = x.true_length(here.batch);
      const bool joins = g.count > 0 && g.list[g.count - 1].length == length && g.list[g.count - 1].heads < g.most &&
                         (x.shares_biases() || here.head == at(x, n - 1).head);
      if (!joins) g.list[g.count++] = {.first = n, .heads = 0, .length = length};
      ++g.list[g.count - 1].heads;
    }
    return g;
  }

  std::span<const aft_head> of(const head_bundle& bundle) const {
    return {heads + bundle.first, static_cast<std::size_t>(bundle.heads)};
  }
};

}  // namespace attn::inline ATTN_ISA::detail
