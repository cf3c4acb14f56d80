// attn: exact softmax attention.
//
//   out_i = sum_j softmax_j(scale q_i.k_j + bias_ij) v_j       Vaswani et al. 2017, "Attention is all you need"
//
//   attn::full_softmax(q, k, v, out);                          // Eigen matrices [length, dim]: one head
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax(q, k, v, out, {}, [](float s, auto b, auto h, auto i, auto j) { return i - j < 9 ? s : s - 1;
//   });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     2 B H Lq Lk (D + Dv) operations, half of it when causal. Scratch: the packed keys and values of one key head
//          (or of as many as fill the threads), about Lk (D + Dv) numbers; never Lq x Lk. With up to four queries, as
//          in decoding, the keys are read in place and scratch does not depend on Lk.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// A score function score(s, batch, head, i, j) may replace the score s of query row i and key row j after every other
// term; -infinity masks the key. It is inlined, called in no particular order and from all threads of the execution at
// once, not for keys that causal or lengths hide, and what it throws passes through, leaving out partly written.
#pragma once

#include <attn/softmax/detail/blockwise.hpp>
#include <attn/softmax/detail/streaming.hpp>
#include <attn/softmax/merge_softmax.hpp>

namespace attn::inline ATTN_ISA {

/// Options of full_softmax for elements of type S.
template <class S>
struct full_softmax_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Query i stands at i + Lk - Lq (true lengths) and sees the keys up to there.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// Added to the scores: [B or 1, H or 1, Lq or 1, Lk]; -infinity masks a key.
  tensor_view<const real> bias{};
  /// c tanh(s / c) on scale q.k, before bias and ALiBi.
  std::optional<real> softcap{};
  /// ALiBi (Press 2021): -slope |distance of positions|, one slope a head.
  list_view<real> alibi_slopes{};
  /// Attention sinks: a logit per head that joins the denominator and has no value.
  list_view<real> sinks{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  tensor_view<real, 3> lse{};
};

namespace detail {

/// Up to this many queries a head are attended where the keys lie (few_queries.hpp); more are worth packing the keys
/// for.
inline constexpr index few_queries = 4;

/// One call, after its checks.
template <class S, class Score>
struct full_call {
  using T = compute_type<S>;

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  const full_softmax_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, Score> terms;

  bool few(index b) const { return lengths.queries(b) <= few_queries; }
  /// The keys query i sees end here.
  index end_of(index b, index i) const {
    const index keys = lengths.keys(b);
    return options.causal ? std::clamp(i + keys - lengths.queries(b) + 1, index(0), keys) : keys;
  }
  const T* sink(index h) const { return per_head(options.sinks, h); }
  T* lse(index b, index h) const { return row_of(options.lse, b, h); }

  /// Pairs [first, first + count) of batch item and key head, by the blockwise kernel: packed, then attended.
  void attend_pairs(index first, index count, execution& exec) const {
    constexpr index pack_step = 512;
    const index group = shape.group(), packs = (shape.keys + pack_step - 1) / pack_step;
    const index row_blocks = (shape.queries + max_rows - 1) / max_rows;
    const auto slabs = exec.shared_scratch([&](arena& memory) {
      auto* list = memory.allocate<packed_keys<T>>(count);
      for (index n = 0; n < count; ++n) {
        const auto slab = packed_keys<T>::layout(memory, shape.keys, shape.dim, shape.dim_v);
        if (list) list[n] = slab;
      }
      return list;
    });
    exec.for_each(count * packs, [&](index task, int) {
      const index n = task / packs, b = (first + n) / shape.kv_heads, h = (first + n) % shape.kv_heads;
      const index begin = task % packs * pack_step, end = std::min(begin + pack_step, lengths.keys(b));
      if (begin < end && !few(b)) slabs[n].pack(head_of(k, b, h), head_of(v, b, h), begin, end);
    });
    // The last row blocks of a causal call are the longest: they go first.
    exec.for_each(count * group * row_blocks, [&](index task, int worker) {
      const index i0 = (row_blocks - 1 - task / (count * group)) * max_rows;
      const index n = task % (count * group) / group, b = (first + n) / shape.kv_heads;
      const index h = (first + n) % shape.kv_heads * group + task % group;
      const index queries = lengths.queries(b), i1 = std::min(i0 + max_rows, queries);
      if (i0 < i1 && !few(b)) {
        auto block =
            exec.scratch(worker, [&](arena& memory) { return row_block<T>::layout(memory, shape.dim, shape.dim_v); });
        block.begin(head_of(q, b, h), {i0, 1, nullptr}, i1 - i0, terms.query_factor());
        for (index i = i0; i < i1; ++i) block.ranges[i - i0] = {0, end_of(b, i)};
        attend(block, slabs[n], terms.for_head(b, h, lengths.keys(b) - queries));
        finish(block, head_of(out, b, h), sink(h), lse(b, h), options.lse.stride(2));
      }
      clear_rows(head_of(out, b, h), std::max(i0, queries), std::min(i0 + max_rows, shape.queries), lse(b, h),
                 options.lse.stride(2));
    });
  }

  /// The batch items with few queries, by the streaming kernel: waves of chunks of keys, merged in order.
  void attend_few(execution& exec) const {
    const index most = std::min(few_queries, shape.queries), most_rows = shape.group() * most;
    const index chunks = std::max<index>(1, (shape.keys + stream_chunk - 1) / stream_chunk);
    const index tasks = shape.batch * shape.kv_heads * chunks, wave = exec.threads() == 1 ? 1 : 4 * exec.threads();
    const auto states = exec.shared_scratch([&](arena& memory) {
      auto* list = memory.allocate<online_softmax<T>>(wave + 1);
      for (index n = 0; n <= wave; ++n) {
        const auto state = online_softmax<T>::layout(memory, most_rows, shape.dim_v);
        if (list) list[n] = state;
      }
      return list;
    });
    online_softmax<T>& total = states[wave];
    for (index first = 0; first < tasks; first += wave) {
      const index count = std::min(wave, tasks - first);
      exec.for_each(count, [&](index n, int worker) {
        const index pair = (first + n) / chunks, b = pair / shape.kv_heads, h = pair % shape.kv_heads;
        if (!few(b)) return;
        const index begin = (first + n) % chunks * stream_chunk, end = std::min(begin + stream_chunk, lengths.keys(b));
        states[n].rows = shape.group() * lengths.queries(b);
        states[n].clear();
        if (begin >= end) return;
        stream_queries<T> rows;
        const auto scratch = exec.scratch(worker, [&](arena& memory) {
          rows = stream_queries<T>::layout(memory, most_rows, shape.dim);
          return stream_scratch<T>::layout(memory, most_rows, shape.dim, shape.dim_v);
        });
        rows.begin(q, b, h * shape.group(), states[n].rows, lengths.queries(b), terms.query_factor());
        attend_stream(
            rows, head_of(k, b, h), head_of(v, b, h), {}, begin, end,
            terms.for_head(b, 0, lengths.keys(b) - lengths.queries(b)),
            options.causal ? stream_limit{lengths.keys(b) - lengths.queries(b) + 1, 1} : stream_limit{lengths.keys(b), 0},
            scratch, states[n]);
      });
      for (index n = 0; n < count; ++n) {
        const index pair = (first + n) / chunks, chunk = (first + n) % chunks, b = pair / shape.kv_heads;
        if (!few(b)) continue;
        if (chunk == 0) {
          total.rows = states[n].rows;
          total.clear();
        }
        total.merge(states[n]);
        if (chunk + 1 < chunks) continue;
        for (index r = 0; r < total.rows; ++r) {
          const index h = pair % shape.kv_heads * shape.group() + r / lengths.queries(b), i = r % lengths.queries(b);
          total.finish_row(r, sink(h), &out(b, h, i, 0), out.stride(3),
                           lse(b, h) ? lse(b, h) + i * options.lse.stride(2) : nullptr);
        }
      }
    }
  }

  void run(execution& exec) const {
    index few_items = 0;
    for (index b = 0; b < shape.batch; ++b) few_items += few(b);
    if (few_items > 0) attend_few(exec);
    // A wave of pairs keeps the threads busy; serial, it is one pair.
    const index pairs = shape.batch * shape.kv_heads, threads = exec.threads();
    const index bytes = std::max<index>(1, shape.keys * (shape.dim + shape.dim_v) * static_cast<index>(sizeof(T)));
    const index wave =
        threads == 1 ? 1 : std::clamp<index>((index(2) << 20) / bytes, threads, std::max(pairs, threads));
    if (few_items < shape.batch)
      for (index first = 0; first < pairs; first += wave) attend_pairs(first, std::min(wave, pairs - first), exec);
    else
      for (index b = 0; b < shape.batch; ++b)
        for (index h = 0; h < shape.heads; ++h)
          clear_rows(head_of(out, b, h), lengths.queries(b), shape.queries, lse(b, h), options.lse.stride(2));
  }
};

/// Everything full_softmax refuses, it refuses here.
template <class S>
std::pair<attention_shape, sequence_lengths> check_full_softmax(const validator& check, const tensor_view<const S>& q,
                                                                const tensor_view<const S>& k,
                                                                const tensor_view<const S>& v,
                                                                const tensor_view<S>& out,
                                                                const full_softmax_options<S>& options) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_softmax_options(check, shape, options, q, k, v, out);
  if (options.bias) {
    check.readable("bias", options.bias);
    check.broadcasts("bias batch", shape.batch, options.bias.extent(0));
    check.broadcasts("bias heads", shape.heads, options.bias.extent(1));
    check.broadcasts("bias query length", shape.queries, options.bias.extent(2));
    check.equal("bias key length = key length", shape.keys, options.bias.extent(3));
    check.no_alias("out", out, "bias", options.bias);
    check.no_alias("lse", options.lse, "bias", options.bias);
  }
  return {shape, lengths};
}

/// A call that has passed its checks. `query_origin` is what the score function calls query 0.
template <class S, class Score>
void run_full_softmax(const tensor_view<const S>& q, const tensor_view<const S>& k, const tensor_view<const S>& v,
                      const tensor_view<S>& out, const full_softmax_options<S>& options, const attention_shape& shape,
                      const sequence_lengths& lengths, Score& score, execution& exec, index query_origin = 0) {
  using T = compute_type<S>;
  score_terms<T, Score> terms = terms_of<T>(options, shape.dim, &score);
  terms.query_origin = query_origin;
  full_call<S, Score>{q, k, v, out, options, shape, lengths, terms}.run(exec);
}

/// What the caller gives as a score function, or nothing.
template <class Score, class T>
constexpr void require_score() {
  static_assert(score_function<std::remove_reference_t<Score>, T> || std::same_as<std::remove_cvref_t<Score>, no_score>,
                "attn: score must be callable as score(s, batch, head, i, j) and return a number");
}

}  // namespace detail

/// Exact softmax attention with a score function, by an execution; either may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax(const Q& q, const K& k, const V& v, O&& out,
                  const full_softmax_options<element_of<const Q&>>& options, Score&& score, execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::require_score<Score, compute_type<S>>();
  const tensor_view<const S> queries = as_view(q), keys = as_view(k), values = as_view(v);
  const tensor_view<S> to = as_view(out);
  const auto [shape, lengths] =
      detail::check_full_softmax(detail::validator("full_softmax"), queries, keys, values, to, options);
  detail::run_full_softmax(queries, keys, values, to, options, shape, lengths, score, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, class Score>
  requires(!std::same_as<std::remove_cvref_t<Score>, execution>)
void full_softmax(const Q& q, const K& k, const V& v, O&& out,
                  const full_softmax_options<element_of<const Q&>>& options, Score&& score) {
  execution serial;
  full_softmax(q, k, v, out, options, score, serial);
}

template <viewable Q, viewable K, viewable V, viewable O>
void full_softmax(const Q& q, const K& k, const V& v, O&& out,
                  const full_softmax_options<element_of<const Q&>>& options, execution& exec) {
  full_softmax(q, k, v, out, options, detail::no_score{}, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void full_softmax(const Q& q, const K& k, const V& v, O&& out,
                  const full_softmax_options<element_of<const Q&>>& options = {}) {
  execution serial;
  full_softmax(q, k, v, out, options, detail::no_score{}, serial);
}

}  // namespace attn
