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
// Shapes   as full_softmax; e and f [H or 1, rank, Lk]: one per query head, or one for all; any rank >= 1.
// Cost     2 rank (Lq + Lk) (D + Dv) operations per head. Scratch: the projected keys and values, rank (D + Dv) numbers
//          per head, twice, of one batch item at a time, or of several with 32 heads together; and E and F packed for
//          some tokens at a time: 2^20 numbers, or 256 tokens of every head's E and F, if that is more.
// Lengths  A sequence of n keys is projected by the first n columns of E and F. A sequence without keys gives zeros.
//          Hidden keys are projected as zeros: as without their columns of E and F, which must be finite.
// Values   `out` is finite where the sums of its formula, which precede the division, are in the range of the compute
//          type (float: 3.4e38).
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form, and no such option: every projected key mixes all tokens, also those after a query.
#pragma once

#include <attn/low_rank/detail/attention_call.hpp>
#include <attn/low_rank/detail/project.hpp>
#include <attn/low_rank/draw_projection.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of linformer for elements of type S.
template <class S>
struct linformer_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Factor of q.(E k); 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes.
  key_mask_view key_mask{};
  /// Written if given: the natural logarithm of the denominator, [B, H, Lq].
  view_field<real, 3> lse{};
};

namespace detail {

/// Projected keys and values of one batch item, as project() computes them and packed for the kernel.
template <class P>
struct linformer_item {
  sum_type<P> *keys = nullptr, *values = nullptr;
  packed_keys<P>* packed = nullptr;  // [max(heads of keys, heads of values)]
};

/// One call, after its checks.
template <class S, class P>
struct linformer_call {
  using T = compute_type<S>;

  const attention_views<S>& views;
  tensor_view<T, 3> lse;
  score_terms<T, no_score> terms;
  sequence_projection<S, P> keys, values;
  bool shared;  // E is F

  void run(execution& exec) {
    const attention_shape& shape = views.shape;
    const double scores = static_cast<double>(keys.rank()) * static_cast<double>(shape.queries + shape.keys);
    const auto limit = exec.limit_threads({.operations = scores * shape.operations_per_score()});
    const idx_t heads = (std::max)(keys.heads, values.heads), rank = keys.rank();
    const auto packed = exec.workspace([&](arena& memory) {
      P* const first = memory.allocate<P>(keys.packed_size());
      return std::array{first, shared ? first : memory.allocate<P>(values.packed_size())};
    });
    keys.packed = (*packed)[0], values.packed = (*packed)[1];
    const auto packed_head = [&](arena& memory) {
      return packed_keys<P>::layout(memory, rank, shape.dim, shape.dim_v);
    };
    const auto layout = [&](arena& memory) {
      return linformer_item<P>{.keys = memory.allocate<T>(keys.memory_size()),
                               .values = memory.allocate<T>(values.memory_size()),
                               .packed = memory.allocate_list(heads, packed_head)};
    };
    // 32 heads share the packing of E and F.
    for_each_wave(exec, shape.batch, std::max<idx_t>(1, 32 / shape.heads), layout,
                  [&](const wave<linformer_item<P>>& w) { run_wave(w, heads); });
  }

  /// `heads` are those of the packed keys.
  void run_wave(const wave<linformer_item<P>>& w, idx_t heads) const {
    project(keys, values, shared, views.lengths, w);
    w.for_each(heads, [&](idx_t, const linformer_item<P>& item, idx_t h, int) {
      item.packed[h].pack(keys.result(item.keys, h * keys.heads / heads),
                          values.result(item.values, h * values.heads / heads), 0, keys.rank());
    });
    // All rows of one head are computed before the next: its packed keys stay in the cache.
    const idx_t all = views.shape.heads, row_blocks = ceil_div(views.shape.queries, max_rows);
    w.exec.for_each(w.count * all * row_blocks, [&](idx_t task, int worker) {
      const idx_t n = task / row_blocks / all, h = task / row_blocks % all, b = w.first + n;
      attend_rows(views, b, h, task % row_blocks * max_rows, w.scratch[n].packed[h * heads / all],
                        views.lengths.keys(b) > 0 ? keys.rank() : 0, terms, lse, w.exec, worker, [](auto&) {});
    });
  }
};

inline void check_projections(call_views& views, const attention_shape& s, const memory_layout& e,
                              const memory_layout& f) {
  views.read("e", e, {{"heads of e", s.heads, or_one}});
  views.read("f", f, {{"heads of f", s.heads, or_one}});
  views.at_least("rank of e", 1, e.extents[1]);
  views.at_least("rank of f", 1, f.extents[1]);
  views.extents({{"projection columns = key length", s.keys, e.extents[2]},
                 {"projection columns of f = key length", s.keys, f.extents[2]},
                 {"rank of f = rank of e", e.extents[1], f.extents[1]}});
}

/// Whether E and F are one matrix.
template <class S>
bool shared_projection(const tensor_view<const S, 3>& e, const tensor_view<const S, 3>& f) {
  return e.data() == f.data() && e.extents() == f.extents() && e.strides() == f.strides();
}

}  // namespace detail

/// Linformer attention. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable E, viewable F,
          class Options = linformer_options<element_of<const Q&>>>
void linformer(const Q& q, const K& k, const V& v, O&& out, const E& e, const F& f, Options&& options = {},
               execution_ref exec = {}) {
  using S = element_of<const Q&>;
  const tensor_view<const S, 3> by_e = detail::projection_view<S>(e), by_f = detail::projection_view<S>(f);
  auto call = detail::checked_call<linformer_options>("linformer", q, k, v, out, options, exec);
  const detail::attention_shape& s = call.shape;
  detail::check_softmax_options(call.views, s, call.options);
  detail::check_projections(call.views, s, by_e, by_f);
  if (s.heads == 0) return;
  const detail::key_flags seen(call.options.key_mask);
  const detail::seen_lengths lengths(call.options.key_mask, s.batch, call.lengths, call.exec);
  const auto heads = [&](const auto& projection) { return projection.extent(0) == 1 ? s.kv_heads : s.heads; };
  detail::with_products<S>(call.exec, [&]<class P>(std::type_identity<P>) {
    detail::linformer_call<S, P>{.views = call, .lse = call.options.lse,
                                 .terms = detail::terms_of_sums<compute_type<S>>(call.options, s.dim),
                                 .keys = {.e = by_e, .x = call.k, .heads = heads(by_e), .seen = seen},
                                 .values = {.e = by_f, .x = call.v, .heads = heads(by_f), .seen = seen},
                                 .shared = detail::shared_projection(by_e, by_f)}
        .run(call.exec);
  });
}

}}  // namespace attn::ATTN_ISA
