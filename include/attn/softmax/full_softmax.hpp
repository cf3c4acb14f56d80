// attn: exact softmax attention.
//
//   out_i = sum_j softmax_j(s_ij) v_j,   s_ij = softcap(scale q_i.k_j) + bias_ij + t_(j - p_i) - slope |p_i - j|
//                                               + c_(p_i) - c_j, c the running sums of log_decay
//                                                              Vaswani et al. 2017, "Attention is all you need"
//
//   attn::full_softmax(q, k, v, out);                          // Eigen matrices [length, dim]: one head
//   attn::full_softmax(q, k, v, out, {.causal = true, .lse = lse}, threads);
//   attn::full_softmax(q, k, v, out, {}, [](float s, auto b, auto h, auto i, auto j) { return i - j < 9 ? s : s - 1; });
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float sums; where the processor multiplies bf16 numbers, weights
//          of bf16 values are rounded to bf16. Query i is at position p_i = i + Lk - Lq (true lengths), so that the
//          last query is at the last key; or at i + first_position.
// Cost     2 B H Lq Lk (D + Dv) operations, half of it when causal. Scratch: the packed keys and values of one key head
//          (or of as many as fill the threads), about Lk (D + Dv) numbers; never Lq x Lk. With up to four queries, as
//          in decoding, the keys are read in place and scratch does not depend on Lk.
// Result   A row that sees no key is 0 and its lse -infinity, whatever its sink; so are rows of padding. Scores must be
//          finite in the compute type, those beyond 2.3e38 in size count as that (double: 1.2e308); -infinity masks the
//          key. Over 524288 keys of which one has .99 of the weight, out and lse err by less than 2e-5 in float.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
//
// A score function score(s, batch, head, i, j) may replace the score s after every other term; -infinity masks the key.
// i is the position of the query (which may be negative or beyond the keys), j that of the key. It is inlined. It is
// called in no particular order, from all threads of the execution at once, and not for keys that causal or lengths
// hide. Its exceptions are passed on and leave out partly written.
#pragma once

#include <attn/core/detail/waves.hpp>
#include <attn/softmax/detail/softmax_call.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of full_softmax for elements of type S.
template <class S>
struct full_softmax_options {
  using real = compute_type<S>;

  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Query i sees the keys up to its position.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or separately. Rows of padding are 0 in out.
  list_view<idx_t> lengths{}, query_lengths{}, key_lengths{};
  /// Position of the first query of every batch item among its keys, which may be negative or beyond them; Lk - Lq
  /// (true lengths) unless given. merge_softmax() combines the results over several sets of keys.
  std::optional<idx_t> first_position{};
  /// Added to the scores: [B or 1, H or 1, Lq or 1, Lk]; -infinity masks a key.
  view_field<const real> bias{};
  /// Relative keys r [H or 1, 2R + 1, D]: the product becomes q_i.k_j + q'_i.r[clamp(j - p_i, -R, R) + R], with q' =
  /// relative_queries [B, H, Lq, D], q unless given (Shaw 2018; Transformer-XL, Conformer: q = query + u, q' = query + v).
  /// Scratch: up to (Lq + Lk) D numbers for each head of r; one product of Lq x Lk x D more.
  view_field<const real, 3> relative_keys{};
  view_field<const S> relative_queries{};
  /// Added to the scores by distance: entry clamp(j - p_i, -R, R) + R of [H or 1, 2R + 1]; R may exceed the lengths
  /// (relative_bias.hpp expands the buckets of T5). -infinity masks a key.
  view_field<const real, 2> relative_bias{};
  /// Forgetting (Lin 2025, "Forgetting Transformer"): key j loses the weight of the log decays of the positions from
  /// j + 1 to the query's, <= 0, [B, H, Lk]; one below -1e9 hides what is before it. Only where causal. Scratch: 16 bytes
  /// each.
  view_field<const real, 3> log_decay{};
  /// Which keys a query sees, in addition to causal and lengths: [B or 1, H or 1, Lq or 1, Lk] of bool or bytes
  /// (mask_view.hpp).
  mask_view mask{};
  /// Which keys are there at all, such as those of left padding: [B or 1, Lk] of bool or bytes.
  key_mask_view key_mask{};
  /// c tanh(s / c) on scale q.k, before bias and ALiBi.
  std::optional<real> softcap{};
  /// ALiBi (Press 2021): -slope |distance of positions|, one finite slope per head.
  list_view<real> alibi_slopes{};
  /// Attention sinks: a logit per head that joins the denominator and has no value. Finite, or -infinity for none.
  list_view<real> sinks{};
  /// Drops weights after the softmax (dropout.hpp).
  dropout_options dropout{};
  /// Written if given: the natural logarithm of the denominator, sink included, [B, H, Lq].
  view_field<real, 3> lse{};
};

namespace detail {

template <class S, class Score, class C = S, class P = product_type<S>>
struct full_call {
  using T = compute_type<S>;

  const softmax_call<S, Score, C>& in;
  const attention_shape& shape = in.shape;
  const sequence_lengths& lengths = in.lengths;

  bool few(idx_t b) const { return lengths.queries(b) <= few_queries && !in.maximum; }

  /// Packs rows [begin, end) of a head; rows in eight bits are first converted to numbers, some at a time.
  void pack(packed_keys<P>& keys, const cache_rows<const C>& k, const cache_rows<const C>& v, idx_t begin, idx_t end,
            int worker) const {
    if constexpr (!std::same_as<C, std::int8_t>) {
      keys.pack(k, v, begin, end);
    } else {
      constexpr idx_t some = 2 * panel_width<P>;
      const idx_t cols = std::max(shape.dim, shape.dim_v);
      float* const numbers =
          in.exec.scratch(worker, [&](arena& memory) { return memory.allocate<float>(some * cols); });
      const auto expand = [&](const cache_rows<const C>& x, idx_t from, idx_t to) {
        for (idx_t j = from; j < to;) {
          const quantised_rows rows = x.from(j);
          const idx_t count = std::min(to - j, rows.rows);
          rows.expand(0, count, numbers + (j - from) * cols, cols);
          j += count;
        }
      };
      for (idx_t from = begin; from < end; from += some) {
        const idx_t to = std::min(from + some, end);
        const auto row = [&](idx_t slot) { return numbers + slot * cols; };
        expand(k, from, to);
        keys.pack_keys(row, 1, from, to);
        expand(v, from, to);
        keys.pack_value_rows([&](idx_t slot) { return row(slot - from); }, 1, from, to);
      }
    }
  }

  /// A wave of key heads, by the blockwise kernel: keys are packed, then attended.
  void attend_wave(const wave<packed_keys<P>>& key_heads) const {
    constexpr idx_t pack_step = 512;
    const idx_t group = shape.group(), row_blocks = ceil_div(shape.queries, max_rows);
    const idx_t steps = ceil_div(shape.keys, pack_step);
    key_heads.for_each(steps, [&](idx_t key_head, packed_keys<P>& keys, idx_t step, int worker) {
      const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads;
      const idx_t begin = step * pack_step, end = std::min(begin + pack_step, in.visible_keys(b));
      if (begin < end && !few(b)) pack(keys, in.key_rows(b, h), in.value_rows(b, h), begin, end, worker);
    });
    // The last row blocks of a causal call are the longest: they go first.
    key_heads.for_each(row_blocks * group, [&](idx_t key_head, const packed_keys<P>& keys, idx_t step, int worker) {
      const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads * group + step % group;
      const idx_t i0 = (row_blocks - 1 - step / group) * max_rows, i1 = std::min(i0 + max_rows, lengths.queries(b));
      if (i0 < i1 && !few(b)) {
        auto block = in.exec.scratch(worker, [&](arena& memory) {
          return row_block<P>::layout(memory, shape.dim, shape.dim_v, bool(in.terms.by_distance));
        });
        in.begin(block, b, h, in.query(b, h), {i0, 1, nullptr}, i1 - i0);
        const idx_t all = lengths.keys(b), shift = in.shift(b);
        for (idx_t i = i0; i < i1; ++i)
          block.ranges[i - i0] = {0, in.causal ? std::clamp(i + shift + 1, idx_t(0), all) : all};
        attend(block, keys, in.terms.for_head(b, h, shift));
        in.finish(block, b, h);
      }
      in.clear_padding(b, h, i0, i0 + max_rows);
    });
  }

  /// The batch items with few queries, by the streaming kernel: waves of chunks of keys, merged in order.
  void attend_few() const {
    const idx_t most_rows = shape.group() * std::min(few_queries, shape.queries);
    const idx_t chunks = std::max<idx_t>(1, ceil_div(shape.keys, stream_chunk));
    const idx_t tasks = shape.batch * shape.kv_heads * chunks, threads = in.exec.active_threads();
    const auto layout = [&](arena& memory) { return online_softmax<T>::layout(memory, most_rows, shape.dim_v); };
    const auto workspace = in.exec.workspace(layout);
    online_softmax<T> total = *workspace;  // of the key head in progress, which may continue in the next wave
    for_each_wave(in.exec, tasks, threads == 1 ? 1 : 4 * threads, layout, [&](const wave<online_softmax<T>>& some) {
      some.for_each(1, [&](idx_t task, online_softmax<T>& state, idx_t, int worker) {
        attend_chunk(task / chunks, task % chunks, most_rows, state, worker);
      });
      for (idx_t n = 0; n < some.count; ++n) {
        const idx_t key_head = (some.first + n) / chunks, chunk = (some.first + n) % chunks;
        const idx_t b = key_head / shape.kv_heads;
        if (!few(b)) continue;
        if (chunk == 0) {
          total.rows = some.scratch[n].rows;
          total.clear();
        }
        total.merge(some.scratch[n]);
        if (chunk + 1 < chunks) continue;
        const idx_t h = key_head % shape.kv_heads * shape.group(), queries = lengths.queries(b);
        for (idx_t r = 0; r < total.rows; ++r) in.finish_row(total, r, b, h + r / queries, r % queries);
      }
    });
  }

  /// The few queries of one key head and one chunk of its keys.
  void attend_chunk(idx_t key_head, idx_t chunk, idx_t most_rows, online_softmax<T>& state, int worker) const {
    const idx_t b = key_head / shape.kv_heads, h = key_head % shape.kv_heads * shape.group();
    if (!few(b)) return;
    const idx_t seen = in.visible_keys(b), begin = chunk * stream_chunk, end = std::min(begin + stream_chunk, seen);
    state.rows = shape.group() * lengths.queries(b);
    state.clear();
    if (begin >= end) return;
    auto rows = in.exec.scratch(worker, [&](arena& memory) {
      return stream_queries<T, C>::layout(memory, most_rows, shape.dim, shape.dim_v, bool(in.relative_queries));
    });
    rows.begin(in.q, in.relative_queries, b, h, state.rows, lengths.queries(b), in.terms.query_factor());
    const auto limit = in.causal ? stream_limit{in.shift(b) + 1, 1} : stream_limit{lengths.keys(b), 0};
    const idx_t kv = key_head % shape.kv_heads;
    attend_stream(rows, in.key_rows(b, kv), in.value_rows(b, kv), {}, begin, end,
                  in.terms.for_head(b, 0, in.shift(b)), limit, state, seen);
  }

  void run() const {
    const auto limit = in.limit_threads(shape.keys, static_cast<double>(shape.keys));
    idx_t few_items = 0;
    for (idx_t b = 0; b < shape.batch; ++b) few_items += few(b);
    if (few_items > 0) attend_few();
    const idx_t key_heads = shape.batch * shape.kv_heads;
    const idx_t bytes = shape.keys * (shape.dim + shape.dim_v) * static_cast<idx_t>(sizeof(T));
    if (few_items < shape.batch)
      for_each_wave(
          in.exec, key_heads, wave_size(in.exec, key_heads, bytes),
          [&](arena& memory) { return packed_keys<P>::layout(memory, shape.keys, shape.dim, shape.dim_v); },
          [&](const wave<packed_keys<P>>& some) { attend_wave(some); });
    else
      for (idx_t b = 0; b < shape.batch; ++b)
        for (idx_t h = 0; h < shape.heads; ++h) in.clear_padding(b, h);
  }
};
template <class S, class Score, class C>
full_call(const softmax_call<S, Score, C>&) -> full_call<S, Score, C>;

template <class S, class Score, class C>
void attend_full(softmax_call<S, Score, C> call) {
  std::optional<distance_range> range;  // where an item has many queries
  for (idx_t b = 0; b < call.shape.batch; ++b)
    if (!full_call<S, Score, C>{call}.few(b)) range = {call.furthest()};
  const auto terms = call.exec.workspace([&](arena& memory) { return call.layout_terms(memory, range); });
  call.prepare_terms(*terms);
  with_products<S>(call.exec, [&]<class P>(std::type_identity<P>) { full_call<S, Score, C, P>{call}.run(); });
}

}  // namespace detail

/// Exact softmax attention; options, score and execution may each be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, class Options = full_softmax_options<element_of<const Q&>>,
          class Score = detail::no_score>
void full_softmax(const Q& q, const K& k, const V& v, O&& out, Options&& options = {}, Score&& score = {},
                  execution_ref exec = {}) {
  const auto call = detail::checked_call<full_softmax_options>("full_softmax", q, k, v, out, options, score, exec);
  detail::attend_full(call);
}

}}  // namespace attn::ATTN_ISA
