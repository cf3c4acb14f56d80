// attn: softmax attention over keys and values projected along the sequence.
//
//   out_i = sum_r softmax_r(scale q_i.(E k)_r) (F v)_r        Wang et al. 2020, "Linformer: Self-attention with linear
//                                                              complexity"
//   const auto e = attn::draw_projection<float>(256, length, {.seed = 7});
//   attn::linformer(q, k, v, out, e, f);                       // Eigen matrices [length, dim], e and f [rank, length]
//   attn::linformer(q, k, v, out, e, e, {.lengths = lengths}, threads);  // one projection for keys and values
//
// E and F belong to a trained model: random ones, as drawn by draw_projection, are where training starts.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. e and f
//          [H or 1, rank, Lk]: one a query head, or one for all; any rank >= 1. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     2 rank (Lq + Lk) (D + Dv) operations a head. Scratch: the projected keys and values, rank (D + Dv) numbers a
//          head, twice, of one batch item at a time, or of several with 32 heads together; and E and F packed a stretch
//          of tokens at a time: 2^20 numbers, or 256 tokens of every head's E and F, if that is more.
// Lengths  A sequence of n keys is projected by the first n columns of E and F. One of no keys gives zeros.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form: every projected key mixes all tokens, also those after a query.
#pragma once

#include <attn/low_rank/detail/project.hpp>
#include <attn/low_rank/draw_projection.hpp>
#include <attn/softmax/detail/blockwise.hpp>

namespace attn::inline ATTN_ISA {

/// Options of linformer for elements of type S.
template <class S>
struct linformer_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Factor of q.(E k); 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Refused if true: see the top of the file.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Written if given: the natural logarithm of the denominator, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// One call, after its checks.
template <class S>
struct linformer_call {
  using T = compute_type<S>;

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  const tensor_view<const S, 3>&e, &f;
  const linformer_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, no_score> terms;

  index rank() const { return e.extent(1); }
  /// Heads of projected keys or values: the key heads where all share one projection, else one a query head.
  index projected_heads(const tensor_view<const S, 3>& by) const {
    return by.extent(0) == 1 ? shape.kv_heads : shape.heads;
  }

  /// Batch items [first, first + items).
  void run(index first, index items, execution& exec) const {
    const index key_heads = projected_heads(e), value_heads = projected_heads(f);
    const index heads = std::max(key_heads, value_heads), group = shape.heads / heads;
    const bool shared = e.data() == f.data() && e.extents() == f.extents() && e.strides() == f.strides();
    sequence_projection<S> keys(e, k, first, items, key_heads), values(f, v, first, items, value_heads);
    const auto slabs = exec.shared_scratch([&](arena& memory) {
      keys.layout(memory);
      values.layout(memory, shared ? &keys : nullptr);
      auto* list = memory.allocate<packed_keys<T>>(items * heads);
      for (index n = 0; n < items * heads; ++n) {
        const auto slab = packed_keys<T>::layout(memory, rank(), shape.dim, shape.dim_v);
        if (list) list[n] = slab;
      }
      return list;
    });
    project<S>({&keys, &values}, shared, lengths, exec);

    exec.for_each(items * heads, [&](index n, int) {
      const index b = n / heads, h = n % heads;
      slabs[n].pack(keys.result(b, h * key_heads / heads), values.result(b, h * value_heads / heads), 0, rank());
    });
    const index row_blocks = (shape.queries + max_rows - 1) / max_rows;
    exec.for_each(items * shape.heads * row_blocks, [&](index task, int worker) {
      const index n = task / row_blocks, i0 = task % row_blocks * max_rows;
      const index b = first + n / shape.heads, h = n % shape.heads;
      attend_rows(b, h, i0, slabs[n / shape.heads * heads + h / group], exec, worker);
    });
  }

  void attend_rows(index b, index h, index i0, const packed_keys<T>& slab, execution& exec, int worker) const {
    const index queries = lengths.queries(b), seen = lengths.keys(b) > 0 ? rank() : 0;
    const index i1 = std::min(i0 + max_rows, queries);
    T* const lse = row_of(options.lse, b, h);
    if (i0 < i1) {
      auto block =
          exec.scratch(worker, [&](arena& memory) { return row_block<T>::layout(memory, shape.dim, shape.dim_v); });
      block.begin(head_of(q, b, h), {i0, 1, nullptr}, i1 - i0, terms.query_factor());
      std::fill_n(block.ranges, block.rows, key_range{0, seen});
      attend(block, slab, terms);
      finish(block, head_of(out, b, h), static_cast<const T*>(nullptr), lse, options.lse.stride(2));
    }
    clear_rows(head_of(out, b, h), std::max(i0, queries), std::min(i0 + max_rows, shape.queries), lse,
               options.lse.stride(2));
  }
};

template <class S>
void linformer(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
               const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<const S, 3>& e,
               const tensor_view<const S, 3>& f, const linformer_options<S>& options, execution& exec) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_scale(check, options.scale);
  check_lse<S>(check, shape, options.lse, q, k, v, out);
  if (options.causal) check.fail("causal = false, as every projected key mixes all tokens", "true");
  check_projection(check, words_of_e, e, shape, out);
  check_projection(check, words_of_f, f, shape, out);
  check.equal("rank of f = rank of e", e.extent(1), f.extent(1));
  if (options.lse) {
    check.no_alias("lse", options.lse, "e", e);
    check.no_alias("lse", options.lse, "f", f);
  }
  if (shape.heads == 0) return;
  const linformer_call<S> call{
      q, k, v, out, e, f, options, shape, lengths, terms_of<compute_type<S>>(options, shape.dim)};
  const index wave = std::max<index>(1, 32 / std::max<index>(1, shape.heads));  // items
  for (index b = 0; b < shape.batch; b += wave) call.run(b, std::min(wave, shape.batch - b), exec);
}

}  // namespace detail

/// Linformer attention. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F>
void linformer(const Q& q, const K& k, const V& v, O&& out, const E& e, const F& f,
               const linformer_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::linformer<S>(detail::validator("linformer"), as_view(q), as_view(k), as_view(v), as_view(out),
                       detail::projection_view<S>(e), detail::projection_view<S>(f), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F>
void linformer(const Q& q, const K& k, const V& v, O&& out, const E& e, const F& f,
               const linformer_options<element_of<const Q&>>& options = {}) {
  execution serial;
  linformer(q, k, v, out, e, f, options, serial);
}

}  // namespace attn
