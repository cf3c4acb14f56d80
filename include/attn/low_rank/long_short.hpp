// attn: long-short attention.
//
//   out_i = softmax attention (full_softmax.hpp) over two sets of keys at once: those of a window around the query, and
//   r compressed ones that stand for the whole sequence, K' = P^T K, V' = P^T V with P = softmax over tokens of given
//   logits, per head. Each set may have a layer norm, of keys and values alike, after compression.
//                                                                    Zhu et al. 2021, "Long-Short Transformer"
//   Causal, every finished segment of a given size is compressed for itself, to r keys; they are visible from the
//   segment's last token on.
//
//   attn::long_short(q, k, v, out, logits, {.left = 128, .right = 128});
//   attn::long_short(q, k, v, out, logits, {.left = 64, .block = 64, .causal = true, .segment = 16});
//
// Shapes   as full_softmax; logits [B, H, Lk, r].
// Cost     2 B H (D + Dv) operations for every token and compressed key it goes into, and for every pair of query and
//          key it sees. Scratch a head under way: about n r (D + Dv) numbers, n = Lk / 256 + 2, causal 2 Lk / segment
//          and, for segments above 256, Lk / 256 more; a thread: about (2 (left + right) + 3 block + 500) (D + Dv),
//          with a local norm twice that.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/low_rank/detail/token_softmax.hpp>
#include <attn/softmax/full_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Options of long_short for elements of type S.
template <class S>
struct long_short_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Keys of the window before and after the query, >= 0.
  index left = 128, right = 128;
  /// If given: they are counted from the ends of the query's own block of this size, which is seen whole.
  index block = 0;
  /// Nothing after the query's own position; compressed keys of finished segments only.
  bool causal = false;
  /// Tokens of a segment, >= 1: causal only.
  index segment = 0;
  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Layer norms, gamma (x - mean) / sqrt(variance + norm_eps) + beta: of the window's keys and values, and of the
  /// compressed ones. D numbers each, for D = Dv; beta may be left out.
  list_view<real> local_gamma{}, local_beta{}, global_gamma{}, global_beta{};
  real norm_eps = real(1e-5);
  /// c tanh(s / c) on scale q.k.
  std::optional<real> softcap{};
  /// A logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// gamma (x - mean) / sqrt(variance + eps) + beta over the `dim` numbers from x on. Without gamma, x itself.
template <class T, class S>
void norm_row(const S* x, index stride, index dim, std::span<const T> gamma, std::span<const T> beta, T eps, T* to) {
  for (index d = 0; d < dim; ++d) to[d] = static_cast<T>(x[d * stride]);
  if (gamma.empty()) return;
  T sum = 0, squares = 0;
  for (index d = 0; d < dim; ++d) sum += to[d];
  const T mean = sum / static_cast<T>(dim);
  for (index d = 0; d < dim; ++d) squares += (to[d] - mean) * (to[d] - mean);
  const T factor = T(1) / std::sqrt(squares / static_cast<T>(dim) + eps);
  for (index d = 0; d < dim; ++d) {
    const auto n = static_cast<std::size_t>(d);
    to[d] = (to[d] - mean) * factor * gamma[n] + (beta.empty() ? T(0) : beta[n]);
  }
}

/// What the threads share of one head under way.
template <class T>
struct long_short_head {
  token_sums<T> sums;
  packed_keys<T> compressed;
};

/// Scratch of one thread in the second phase: rows, and the keys of their windows.
template <class T>
struct long_short_scratch {
  row_block<T> block;
  packed_keys<T> window;
  T *keys, *values;  // [slots][dim], normed
};

/// One call, after its checks.
template <class S>
struct long_short_call {
  using T = compute_type<S>;

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  const tensor_view<const S>& logits;
  const long_short_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, no_score> terms;
  index left, right, block, chunk;  // the window, cut to what can occur; queries a task takes

  index rank() const { return logits.extent(3); }
  index segment(index keys) const { return options.causal ? options.segment : std::max<index>(1, keys); }
  /// Segments that are finished after `tokens` tokens of a sequence of `keys`.
  index finished(index keys, index tokens) const {
    return keys == 0 ? 0 : std::clamp<index>(tokens, 0, keys) / segment(keys);
  }
  index slots() const { return std::min(shape.keys, chunk + left + right + 2 * block); }
  bool local_norm() const { return !options.local_gamma.empty(); }

  long_short_head<T> head_layout(arena& memory) const {
    const index segments = finished(shape.keys, shape.keys);
    return {token_sums<T>::layout(memory, segments, segment(shape.keys), rank(), shape.dim, shape.dim_v),
            packed_keys<T>::layout(memory, segments * rank(), shape.dim, shape.dim_v)};
  }
  long_short_scratch<T> scratch_layout(arena& memory) const {
    const index normed = local_norm() ? slots() : 0;
    return {row_block<T>::layout(memory, shape.dim, shape.dim_v),
            packed_keys<T>::layout(memory, slots(), shape.dim, shape.dim_v), memory.allocate<T>(normed * shape.dim),
            memory.allocate<T>(normed * shape.dim_v)};
  }

  /// Ends the compressed keys of one segment: sums of its parts, normed.
  void finish_segment(const long_short_head<T>& head, index b, index n) const {
    head.sums.merge(n, segment(lengths.keys(b)));
    for (index c = 0; c < rank(); ++c) {
      T *const key = head.sums.keys(n, c), *const value = head.sums.values(n, c);
      norm_row<T>(key, 1, shape.dim, options.global_gamma, options.global_beta, options.norm_eps, key);
      norm_row<T>(value, 1, shape.dim_v, options.global_gamma, options.global_beta, options.norm_eps, value);
    }
  }

  /// The keys of the window of the query at position p.
  key_range window(index p, index keys) const {
    const index first = block ? floor_div(p, block) * block : p, last = block ? first + block - 1 : p;
    const index end = std::clamp(options.causal ? p + 1 : last + right + 1, index(0), keys);
    return {std::clamp(first - left, index(0), end), end};
  }

  /// Queries [begin, end) of one head.
  void attend_rows(const long_short_head<T>& head, index b, index h, index begin, index end,
                   long_short_scratch<T>& s) const {
    const index n = lengths.keys(b), shift = n - lengths.queries(b), kv = h / shape.group();
    const auto key = head_of(k, b, kv), value = head_of(v, b, kv);
    const index first = window(begin + shift, n).begin, count = window(end - 1 + shift, n).end - first;
    if (count > 0 && local_norm()) {
      for (index j = 0; j < count; ++j) {
        norm_row<T>(key.row(first + j), key.col_stride, shape.dim, options.local_gamma, options.local_beta,
                    options.norm_eps, s.keys + j * shape.dim);
        norm_row<T>(value.row(first + j), value.col_stride, shape.dim_v, options.local_gamma, options.local_beta,
                    options.norm_eps, s.values + j * shape.dim_v);
      }
      s.window.positions = {0, 1, nullptr};
      s.window.pack(matrix_view<const T>{s.keys, count, shape.dim, shape.dim, 1},
                    matrix_view<const T>{s.values, count, shape.dim_v, shape.dim_v, 1}, 0, count);
    } else if (count > 0) {
      s.window.positions = {first, 1, nullptr};
      s.window.pack(key, value, 0, count);
    }
    for (index i = begin; i < end; i += max_rows) {
      const index rows = std::min(max_rows, end - i);
      s.block.begin(head_of(q, b, h), {i, 1, nullptr}, rows, terms.query_factor());
      for (index r = 0; r < rows; ++r) {
        const key_range seen = window(i + r + shift, n);
        s.block.ranges[r] = {seen.begin - first, seen.end - first};
      }
      attend(s.block, s.window, terms);
      for (index r = 0; r < rows; ++r)
        s.block.ranges[r] = {0, rank() * finished(n, options.causal ? i + r + shift + 1 : n)};
      attend(s.block, head.compressed, terms);
      finish(s.block, head_of(out, b, h), per_head(options.sinks, h), row_of(options.lse, b, h), options.lse.stride(2));
    }
  }

  /// Heads [begin, begin + count) of all batch items.
  void attend_heads(index begin, index count, const long_short_head<T>* heads, execution& exec) const {
    const auto each = [&](index parts, auto&& body) {  // body(head, its batch item and number, part, worker)
      exec.for_each(count * parts, [&](index task, int worker) {
        const index n = task % count, at = begin + n;
        body(heads[n], at / shape.heads, at % shape.heads, task / count, worker);
      });
    };
    const auto finished_of = [&](index b) { return finished(lengths.keys(b), lengths.keys(b)); };
    index segments = 0, parts = 0;  // of the batch item that has most
    for (index b = begin / shape.heads; b <= (begin + count - 1) / shape.heads; ++b) {
      segments = std::max(segments, finished_of(b));
      parts = std::max(parts, finished_of(b) * token_sums<T>::parts(segment(lengths.keys(b))));
    }
    each(parts, [&](const long_short_head<T>& head, index b, index h, index part, int worker) {
      const index size = segment(lengths.keys(b)), kv = h / shape.group();
      if (part >= finished_of(b) * token_sums<T>::parts(size)) return;
      const auto scratch = exec.scratch(
          worker, [&](arena& memory) { return token_sums_scratch<T>::layout(memory, shape.dim, shape.dim_v); });
      head.sums.add_part(part, size, head_of(logits, b, h), head_of(k, b, kv), head_of(v, b, kv), scratch);
    });
    each(segments, [&](const long_short_head<T>& head, index b, index, index n, int) {
      if (n < finished_of(b)) finish_segment(head, b, n);
    });
    each(1, [&](const long_short_head<T>& head, index b, index, index, int) {
      const index rows = finished_of(b) * rank();
      packed_keys<T> slab = head.compressed;
      if (rows > 0)
        slab.pack(matrix_view<const T>{head.sums.all_keys, rows, shape.dim, head.sums.padded(), 1},
                  matrix_view<const T>{head.sums.all_values, rows, shape.dim_v, head.sums.padded_v(), 1}, 0, rows);
    });
    each(ceil_div(shape.queries, chunk), [&](const long_short_head<T>& head, index b, index h, index part, int worker) {
      const index from = part * chunk, queries = lengths.queries(b), to = std::min(from + chunk, queries);
      if (from < to) {
        auto scratch = exec.scratch(worker, [&](arena& memory) { return scratch_layout(memory); });
        attend_rows(head, b, h, from, to, scratch);
      }
      clear_rows(head_of(out, b, h), std::max(from, queries), std::min(from + chunk, shape.queries),
                 row_of(options.lse, b, h), options.lse.stride(2));
    });
  }

  void run(execution& exec) const {
    // A wave of heads keeps the threads busy; serial, it is one head.
    const index all = shape.batch * shape.heads;
    const index wave = std::min<index>(all, exec.threads() == 1 ? 1 : 2 * exec.threads());
    const auto heads = exec.shared_scratch([&](arena& memory) {
      auto* list = memory.allocate<long_short_head<T>>(wave);
      for (index n = 0; n < wave; ++n) {
        const auto head = head_layout(memory);
        if (list) list[n] = head;
      }
      return list;
    });
    for (index begin = 0; begin < all; begin += wave) attend_heads(begin, std::min(wave, all - begin), heads, exec);
  }
};

template <class T>
void check_norm(const validator& check, const char* gamma, std::span<const T> scales, const char* beta,
                std::span<const T> shifts, const attention_shape& shape, const memory_layout& out,
                const memory_layout& lse) {
  if (scales.empty() && shifts.empty()) return;
  if (scales.empty()) check.fail(text({gamma, " where ", beta, " is given"}), "none");
  check.equal("value dim = key dim where keys and values are normed,", shape.dim, shape.dim_v);
  check.one_per(gamma, "dim", shape.dim, static_cast<index>(scales.size()));
  if (!shifts.empty()) check.one_per(beta, "dim", shape.dim, static_cast<index>(shifts.size()));
  check_no_alias(check, gamma, scales, out, lse);
  check_no_alias(check, beta, shifts, out, lse);
}

template <class S>
void long_short(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
                const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<const S>& logits,
                const long_short_options<S>& options, execution& exec) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_softmax_options(check, shape, options, q, k, v, out);
  check.at_least("left", 0, options.left);
  check.at_least("right", 0, options.right);
  check.at_least("block", 0, options.block);
  if (options.causal)
    check.at_least("segment", 1, options.segment);
  else if (options.segment != 0)
    check.fail("a segment with causal only", options.segment);
  check.readable("logits", logits);
  check.equal("logits batch = query batch", shape.batch, logits.extent(0));
  check.equal("logits heads = query heads", shape.heads, logits.extent(1));
  check.equal("logits length = key length", shape.keys, logits.extent(2));
  check.fits("compressed keys", {shape.keys, logits.extent(3), shape.dim + shape.dim_v + 1});
  check.no_alias("out", out, "logits", logits);
  check.no_alias("lse", options.lse, "logits", logits);
  check_norm(check, "local_gamma", options.local_gamma, "local_beta", options.local_beta, shape, out, options.lse);
  check_norm(check, "global_gamma", options.global_gamma, "global_beta", options.global_beta, shape, out, options.lse);
  if (!(options.norm_eps >= 0 && std::isfinite(options.norm_eps)))
    check.fail("a finite norm_eps >= 0", static_cast<double>(options.norm_eps));

  const index all = shape.queries + shape.keys, left = std::min(options.left, all);
  const index right = options.causal ? 0 : std::min(options.right, all), block = std::min(options.block, all);
  const index chunk = round_up(std::clamp<index>(left + right + block, 4 * max_rows, 20 * max_rows), max_rows);
  long_short_call<S>{q,     k,       v,
                     out,   logits,  options,
                     shape, lengths, terms_of<compute_type<S>>(options, shape.dim),
                     left,  right,   block,
                     chunk}
      .run(exec);
}

}  // namespace detail

/// Long-short attention by an execution, which may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable L>
void long_short(const Q& q, const K& k, const V& v, O&& out, const L& logits,
                const long_short_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  static_assert(std::same_as<element_of<const L&>, S>, "attn: logits must have the element type of q, k and v");
  detail::long_short<S>(detail::validator("long_short"), as_view(q), as_view(k), as_view(v), as_view(out), as_view(logits),
                        options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, viewable L>
void long_short(const Q& q, const K& k, const V& v, O&& out, const L& logits,
                const long_short_options<element_of<const Q&>>& options = {}) {
  execution serial;
  long_short(q, k, v, out, logits, options, serial);
}

}  // namespace attn
