// attn: what the operators of the attention-free family share: views, their checks, heads that are computed together.
//   q, k, v, out [B, H, L, D]; parameters w as views of rank 2 to 4, whose missing axes are 1
#pragma once

#include <attn/aft/detail/aft_block.hpp>
#include <attn/aft/detail/aft_parameters.hpp>
#include <attn/core/detail/arguments.hpp>
#include <attn/core/detail/attention_shape.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// A parameter as a view of rank 4.
inline memory_layout of_rank_4(memory_layout x) {
  for (; x.rank < 4; ++x.rank) {
    std::copy_backward(x.extents, x.extents + 3, x.extents + 4);
    std::copy_backward(x.strides, x.strides + 3, x.strides + 4);
    x.extents[0] = 1, x.strides[0] = 0;
  }
  return x;
}

/// A head of a view of rank 4.
inline matrix_view<const void> head_of(const memory_layout& x, idx_t batch, idx_t head) {
  const char* const origin = x.data ? x.data + (batch * x.strides[0] + head * x.strides[1]) * x.item : nullptr;
  return {origin, x.extents[2], x.extents[3], x.strides[2], x.strides[3]};
}

inline matrix_view<void> writable_head_of(const memory_layout& x, idx_t batch, idx_t head) {
  const auto m = head_of(x, batch, head);
  return {const_cast<void*>(m.data), m.rows, m.cols, m.row_stride, m.col_stride};
}

/// How the biases of a window lie in memory.
enum class aft_window_layout {
  square,  // row t, column t'
  band,    // row t, column t' - t + side
  kernel   // row: lines from t to t', column: columns from t to t', counted from the farthest
};

template <class T>
struct aft_gradient_elements;

/// The views of one call and their common extents; in a backward call `out` is d_out.
template <class T>
struct aft_tensors {
  memory_layout q, k, v, out, w;
  memory_layout dq{}, dk{}, dv{}, dw{};
  const aft_elements<T>* elements = nullptr;
  const aft_gradient_elements<T>* gradients = nullptr;  // of a backward call
  list_view<idx_t> lengths{};
  key_flags key_mask{};
  bool causal = true, gate = true;
  bool one_key = false;  // a k of one channel serves all of a head
  bool backward = false, accumulate = false;
  idx_t batch = 0, heads = 0, length = 0, dim = 0;

  /// Head n of all heads of the batch.
  aft_head head(idx_t n) const {
    const idx_t b = n / heads, h = n % heads;
    return {.q = head_of(q, b, h), .k = head_of(k, b, h), .v = head_of(v, b, h), .out = writable_head_of(out, b, h),
            .w = head_of(w, 0, shares_biases() ? 0 : h),
            .dq = writable_head_of(dq, b, h), .dk = writable_head_of(dk, b, h), .dv = writable_head_of(dv, b, h),
            .length = taken(b), .number = n, .bias_head = shares_biases() ? 0 : h, .keys = key_mask.from(b, 0)};
  }
  static bool wants(const memory_layout& gradient) { return gradient.data && !gradient.empty(); }
  /// Zeros in rows [begin, end) of padding of the result, or of the gradients unless what is there stays.
  void clear_padding(const aft_head& of, idx_t begin, idx_t end) const {
    if (!backward) return elements->clear(of.out, begin, end);
    for (const auto* to : {&of.dq, &of.dk, &of.dv})
      if (!accumulate && to->data && begin < end) elements->clear(*to, begin, end);
  }
  /// Tokens of an item.
  idx_t taken(idx_t b) const { return lengths.empty() ? length : lengths[static_cast<std::size_t>(b)]; }
  bool shares_biases() const { return w.extents[1] == 1; }
  /// Packets of channels per head.
  idx_t parts() const { return (dim + width<T> - 1) / width<T>; }
  /// For `weights` of a row and a key per head; causal calls see half of them.
  work_estimate work(double weights) const {
    const double channels = static_cast<double>(batch * heads) * static_cast<double>(dim);
    return {.operations = (causal ? 2 : 4) * channels * weights, .bytes = 16 * channels * static_cast<double>(length)};
  }
};

/// A checked call, and what its own checks and its driver need.
template <class T>
struct aft_call {
  aft_tensors<T> x;
  call_views views;
  execution& exec;
};

/// The views and parameters of a call; w may be the null view.
template <class S, class W>
aft_call<compute_type<S>> aft_call_of(const char* name, const memory_layout& q, const memory_layout& k,
                                      const memory_layout& v, const memory_layout& out, const W& w,
                                      const aft_parameters& given, execution& exec) {
  static_assert(std::same_as<S, element_of<const W&>>, "attn: w must have the element type of q, k, v and out");
  return {{.q = q, .k = k, .v = v, .out = out, .w = of_rank_4(as_view(w)), .elements = &elements_of<S>,
           .lengths = given.lengths, .key_mask = given.key_mask, .causal = given.causal, .gate = given.gate,
           .one_key = given.one_key}, call_views(name), exec};
}

/// The arguments of a call, whose types are checked here.
template <class Options, class Q, class K, class V, class O, class W, class Given>
auto unchecked_aft(const char* name, const Q& q, const K& k, const V& v, O& out, const W& w, Given& options,
                   execution_ref& exec) {
  require_one_element_type<const Q&, const K&, const V&, O&>();
  return aft_call_of<element_of<const Q&>>(name, as_view(q), as_view(k), as_view(v), as_view(out), w,
                                           options_or_default<Options>(options),
                                           plain_execution_of(name, exec, options));
}

/// Checks the views against one another, and sets the extents.
template <class T>
void check_aft(call_views& check, aft_tensors<T>& x) {
  check.read("q", x.q), check.read("k", x.k), check.read("v", x.v), check.read("w", x.w);
  if (x.backward) {
    check.read("d_out", x.out);
    check.gradient("q", x.dq, x.q), check.gradient("k", x.dk, x.k);
    check.gradient("v", x.dv, x.v), check.gradient("w", x.dw, x.w);
  } else {
    check.write("out", x.out);
  }
  const auto& [batch, heads, length, dim] = x.q.extents;
  x.batch = batch, x.heads = heads, x.length = length, x.dim = dim;
  if (x.one_key && x.k.extents[3] != dim) {
    check.broadcasts("key dim", dim, x.k.extents[3]);
    x.k.extents[3] = dim, x.k.strides[3] = 0;
  }
  const auto &k = x.k.extents, &v = x.v.extents, &out = x.out.extents;
  check.extents({{"key batch = query batch", batch, k[0]}, {"key heads = query heads", heads, k[1]},
                 {"key length = query length", length, k[2]}, {"key dim = query dim", dim, k[3]},
                 {"value batch = query batch", batch, v[0]}, {"value heads = query heads", heads, v[1]},
                 {"value length = query length", length, v[2]}, {"value dim = query dim", dim, v[3]}});
  constexpr const char* axes[] = {"batch", "heads", "length", "dim"};
  for (int n = 0; n < 4; ++n)
    if (out[n] != x.q.extents[n])
      check.equal(error_text{x.backward ? "d_out " : "out ", axes[n], " = query ", axes[n]}.c_str(), x.q.extents[n],
                  out[n]);
  check_length_list(check, "lengths", x.lengths, batch, length);
}

template <class Options, class Q, class K, class V, class O, class W, class Given>
auto checked_aft(const char* name, const Q& q, const K& k, const V& v, O& out, const W& w, Given& options,
                 execution_ref& exec) {
  auto call = unchecked_aft<Options>(name, q, k, v, out, w, options, exec);
  check_aft(call.views, call.x);
  call.x.key_mask.validate(call.views, call.x.batch, call.x.length);
  return call;
}

/// Checks the leading extents of biases w [rows, columns] or [H, rows, columns].
template <class T>
void check_biases(const validator& check, const aft_tensors<T>& x) {
  check.equal("w batch =", 1, x.w.extents[0]);
  check.broadcasts("w heads", x.heads, x.w.extents[1]);
}

/// Checks kernels w [H, width] or [1, width], whose width is odd; of images [H, height, width], the height too. They
/// become [1, H, height, width].
template <class T>
void check_kernels(const validator& check, aft_tensors<T>& x, bool image) {
  auto& w = x.w;
  check.equal("w batch =", 1, w.extents[0]);
  if (!image) check.equal("w of rank 2, [heads, width], with leading extent", 1, w.extents[1]);
  if (!image)
    for (auto* kernels : {&w, &x.dw})
      std::swap(kernels->extents[1], kernels->extents[2]), std::swap(kernels->strides[1], kernels->strides[2]);
  check.broadcasts("w heads", x.heads, w.extents[1]);
  if (w.extents[3] % 2 == 0) check.fail("w of odd width", w.extents[3]);
  if (w.extents[2] % 2 == 0) check.fail("w of odd height", w.extents[2]);
}

/// The heads of a call in bundles. Heads that share their biases lie side by side: all of them, or the batch items of
/// one head.
template <class T>
struct head_bundles {
  /// Channels of a bundle, at most: enough to make up for the exponentials of w, few enough for the cache.
  static constexpr idx_t channels = 512;

  head_bundle* list = nullptr;
  aft_head* heads = nullptr;  // in order
  idx_t count = 0, most = 0;  // bundles; heads of the largest

  static head_bundles make(const aft_tensors<T>& x, arena& memory) {
    head_bundles g;
    const idx_t all = x.batch * x.heads;
    g.most = (std::min)(all, std::max<idx_t>(1, channels / (std::max<idx_t>(1, x.parts()) * width<T>)));
    g.list = memory.allocate<head_bundle>(all);
    g.heads = memory.allocate<aft_head>(all);
    if (!g.list) return g;
    for (idx_t n = 0, first = 0; n < all; ++n) {
      g.heads[n] = x.shares_biases() ? x.head(n) : x.head(n % x.batch * x.heads + n / x.batch);
      const aft_head &here = g.heads[n], &start = g.heads[first];
      const bool joins =
          n > 0 && n < first + g.most && here.length == start.length && here.bias_head == start.bias_head;
      if (!joins) first = n, ++g.count;
      g.list[g.count - 1] = {g.heads + first, static_cast<std::size_t>(n - first + 1)};
    }
    return g;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
