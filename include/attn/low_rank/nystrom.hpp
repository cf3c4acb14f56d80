// attn: softmax attention by way of landmarks.
//
//   out = softmax(scale Q K'^T) A^+ softmax(scale Q' K^T) V,  A = softmax(scale Q' K'^T)
//   Xiong et al. 2021, "Nystroemformer: A Nystroem-based algorithm for approximating self-attention"
//
// Q' and K' are the means of m segments of the true sequence: segment a holds the tokens from floor(a L / m) on, up to
// where the next begins.
//
//   attn::nystrom(q, k, v, out, {.landmarks = 64});
//   attn::nystrom(q, k, v, out, {.inverse = attn::pseudo_inverse::exact, .convolution = kernel}, threads);
//
// Where no more than m queries or keys are real, the result is that of full softmax: every token is a landmark.
//
// Shapes   q [B, H, Lq, D], k [B, Hkv, Lk, D], v [B, Hkv, Lk, Dv], out [B, H, Lq, Dv]; Hkv divides H. float, double, or
//          Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     2 m (Lq + Lk) (D + Dv) operations a head, and 8 iterations m^3 for the inverse; the exact one takes 8 to 20
//          sweeps (16 to 256 landmarks) of 9 m^3, in double. Scratch: per key head, up to 16 partial results of m Dv
//          numbers a query head, and a few matrices m x m: nothing grows with the length.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written. There is no causal
//          form: a landmark is a mean over tokens on both sides of a query.
#pragma once

#include <attn/low_rank/detail/landmarks.hpp>
#include <attn/low_rank/detail/pseudo_inverse.hpp>
#include <attn/softmax/detail/streaming.hpp>

namespace attn::inline ATTN_ISA {

/// How A is inverted.
enum class pseudo_inverse {
  per_head,     // iteration from A^T / (largest column sum * largest row sum) of the head
  whole_batch,  // the same with the largest sums of all heads and batch items, as the original: heads then depend on
                // each other
  exact         // by singular values, in double
};

/// Options of nystrom for elements of type S.
template <class S>
struct nystrom_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  using real = compute_type<S>;

  /// Factor of q.k; 1 / sqrt(D) unless given.
  std::optional<real> scale{};
  /// Refused if true: see the top of the file.
  bool causal = false;
  /// True lengths, one per batch item: for queries and keys alike, or apart. Rows of padding are 0 in out.
  list_view<index> lengths{}, query_lengths{}, key_lengths{};
  /// m.
  index landmarks = 64;
  pseudo_inverse inverse = pseudo_inverse::per_head;
  /// Steps of the iterative inverse.
  index iterations = 6;
  /// Exact inverse: singular values well below this times the largest hardly count; 0 inverts all of them, which real
  /// data seldom bears (pseudo_inverse.hpp has figures).
  real cutoff = real(0.03);
  /// Added to the result if given: the values convolved along the sequence, channel by channel, with one kernel a head,
  /// [H, width], width odd. Weight p meets the token p - width / 2 after the query's own; outside is 0.
  tensor_view<const real, 2> convolution{};
};

namespace detail {

/// One call, after its checks.
template <class S>
struct nystrom_call {
  using T = compute_type<S>;
  static constexpr index key_step = key_block;  // keys packed at a time

  const tensor_view<const S>&q, &k, &v;
  const tensor_view<S>& out;
  const nystrom_options<S>& options;
  attention_shape shape;
  sequence_lengths lengths;
  score_terms<T, no_score> terms;

  index m() const { return options.landmarks; }
  index most_queries() const { return std::min(m(), shape.queries); }
  index most_keys() const { return std::min(m(), shape.keys); }
  /// Every key is a landmark: softmax over them is all there is to do.
  bool few_keys(index b) const { return lengths.keys(b) <= m(); }
  /// Every query is one: what the landmarks get is the result.
  bool few_queries(index b) const { return lengths.queries(b) <= m(); }
  index query_landmarks(index b) const { return std::min(m(), lengths.queries(b)); }

  /// Keys with a softmax of their own, merged in order: at most 16 pieces of some segments each, cut by shape alone.
  index pieces() const { return std::clamp<index>(shape.keys / 2048, 1, std::min<index>(16, m())); }
  index piece_begin(index n) const { return segment_begin(n, m(), pieces()); }

  /// What is known of one batch item and key head.
  struct pair_state {
    T* queries = nullptr;  // [group][landmarks][dim]
    T* keys = nullptr;     // [landmarks][dim]
    online_softmax<T>* partial = nullptr;
    packed_keys<T>* slab = nullptr;  // one a query head; the first for all where every key is a landmark
  };
  pair_state layout(arena& memory) const {
    pair_state state;
    state.queries = memory.allocate<T>(shape.group() * most_queries() * shape.dim);
    state.keys = memory.allocate<T>(most_keys() * shape.dim);
    state.partial = memory.allocate<online_softmax<T>>(pieces());
    for (index n = 0; n < pieces(); ++n) {
      const auto one = online_softmax<T>::layout(memory, shape.group() * most_queries(), shape.dim_v);
      if (state.partial) state.partial[n] = one;
    }
    state.slab = memory.allocate<packed_keys<T>>(shape.group());
    for (index n = 0; n < shape.group(); ++n) {
      const auto one = packed_keys<T>::layout(memory, most_keys(), shape.dim, shape.dim_v);
      if (state.slab) state.slab[n] = one;
    }
    return state;
  }

  matrix_view<const T> query_means(const pair_state& state, index b, index member) const {
    return {state.queries + member * query_landmarks(b) * shape.dim, query_landmarks(b), shape.dim, shape.dim, 1};
  }
  matrix_view<const T> key_means(const pair_state& state) const { return {state.keys, m(), shape.dim, shape.dim, 1}; }

  /// Landmarks [first, last) of the queries of one head.
  void average_queries(const pair_state& state, index b, index kv, index member, index first, index last) const {
    const index count = query_landmarks(b);
    segment_means(head_of(q, b, kv * shape.group() + member), lengths.queries(b), count, first, std::min(last, count),
                  state.queries + member * count * shape.dim);
  }
  /// Landmarks [first, last) of the keys.
  void average_keys(const pair_state& state, index b, index kv, index first, index last) const {
    segment_means(head_of(k, b, kv), lengths.keys(b), m(), first, last, state.keys);
  }

  /// softmax(Q' K^T) V over one piece of the keys, and their landmarks on the way.
  void attend_piece(const pair_state& state, index b, index kv, index n, execution& exec, int worker) const {
    const index rows = shape.group() * query_landmarks(b), blocks = (rows + max_rows - 1) / max_rows;
    const index last = piece_begin(n + 1), keys = lengths.keys(b);
    index landmark = piece_begin(n);
    const index begin = segment_begin(landmark, keys, m()), end = segment_begin(last, keys, m());
    online_softmax<T>& to = state.partial[n];
    to.rows = rows;
    to.clear();
    packed_keys<T> slab;
    const auto block = exec.scratch(worker, [&](arena& memory) {
      slab = packed_keys<T>::layout(memory, std::min(key_step, shape.keys), shape.dim, shape.dim_v);
      return block_list(memory, blocks, shape.dim_v);
    });
    for (index i = 0; i < blocks; ++i) {
      const index count = std::min(max_rows, rows - i * max_rows);
      block[i].begin(matrix_view<const T>{state.queries, rows, shape.dim, shape.dim, 1}, {i * max_rows, 1, nullptr},
                     count, terms.query_factor());
    }
    for (index at = begin; at < end; at += key_step) {
      const index count = std::min(key_step, end - at);
      // Reads the rows just before they are packed: once from memory for both.
      for (; landmark < last && segment_begin(landmark, keys, m()) < at + count; ++landmark)
        if (!few_queries(b)) average_keys(state, b, kv, landmark, landmark + 1);
      slab.positions = {at, 1, nullptr};
      slab.pack(head_of(k, b, kv), head_of(v, b, kv), 0, count);
      // Here and for the queries: 4 % of the whole on one Zen 4 core.
      stream_prefetcher(head_of(k, b, kv), at + count, end).next(key_step);
      stream_prefetcher(head_of(v, b, kv), at + count, end).next(key_step);
      for (index i = 0; i < blocks; ++i) {
        std::fill_n(block[i].ranges, block[i].rows, key_range{0, count});
        attend(block[i], slab, terms);
      }
    }
    for (index i = 0; i < blocks; ++i)
      for (index r = 0; r < block[i].rows; ++r) {
        const index row = i * max_rows + r;
        to.copy_row(row, block[i].state, r);
      }
  }

  row_block<T>* block_list(arena& memory, index count, index dim_v) const {
    auto* list = memory.allocate<row_block<T>>(count);
    for (index n = 0; n < count; ++n) {
      const auto one = row_block<T>::layout(memory, shape.dim, dim_v);
      if (list) list[n] = one;
    }
    return list;
  }

  /// A = softmax(Q' K'^T) of one query head, [m, m]: the kernel with the identity for values. That is m^3 multiply-adds
  /// more than A needs, 1/24 of what 6 iterations take.
  struct weights_scratch {
    packed_keys<T> slab;
    row_block<T> block;
    T *identity = nullptr, *weights = nullptr, *sums = nullptr;
  };
  weights_scratch layout_weights(arena& memory) const {
    return {packed_keys<T>::layout(memory, m(), shape.dim, m()), row_block<T>::layout(memory, shape.dim, m()),
            memory.allocate<T>(2 * m()), memory.allocate<T>(m() * m()), memory.allocate<T>(m())};
  }
  void landmark_weights(const pair_state& state, index b, index member, weights_scratch& s) const {
    // Row i of the identity is a window on a line of zeros with a 1 in the middle.
    std::fill_n(s.identity, 2 * m(), T(0));
    s.identity[m()] = T(1);
    s.slab.pack(key_means(state), matrix_view<const T>{s.identity + m(), m(), m(), -1, 1}, 0, m());
    const matrix_view<T> to{s.weights, m(), m(), m(), 1};
    for (index r = 0; r < m(); r += max_rows) {
      s.block.begin(query_means(state, b, member), {r, 1, nullptr}, std::min(max_rows, m() - r), terms.query_factor());
      std::fill_n(s.block.ranges, s.block.rows, key_range{0, m()});
      attend(s.block, s.slab, terms);
      finish(s.block, to, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), 0);
    }
  }

  /// The keys and values that queries of one head attend to.
  void make_slab(const pair_state& state, index b, index kv, index member, const start_norms<T>& common,
                 execution& exec, int worker) const {
    packed_keys<T>& slab = state.slab[member];
    if (few_keys(b)) {
      if (member == 0) slab.pack(head_of(k, b, kv), head_of(v, b, kv), 0, lengths.keys(b));
      return;
    }
    if (few_queries(b)) return;
    const online_softmax<T>& values = state.partial[0];
    weights_scratch s;
    iterative_inverse<T> iterative;
    exact_inverse exact;
    exec.scratch(worker, [&](arena& memory) {
      s = layout_weights(memory);
      if (options.inverse == pseudo_inverse::exact)
        exact = exact_inverse::layout(memory, m(), shape.dim_v);
      else
        iterative = iterative_inverse<T>::layout(memory, m(), shape.dim_v);
      return 0;
    });
    landmark_weights(state, b, member, s);
    T* const first = values.out + member * m() * values.stride;
    for (index r = 0; r < m(); ++r) {
      const T normal = T(1) / values.sum[member * m() + r];
      for (index d = 0; d < shape.dim_v; ++d) first[r * values.stride + d] *= normal;
    }
    if (options.inverse == pseudo_inverse::exact)
      exact.apply(s.weights, static_cast<double>(options.cutoff), first, values.stride);
    else
      iterative.apply(
          s.weights,
          options.inverse == pseudo_inverse::whole_batch ? common : start_norms<T>::of(s.weights, m(), s.sums),
          options.iterations, first, values.stride);
    slab.pack(key_means(state), matrix_view<const T>{first, m(), shape.dim_v, values.stride, 1}, 0, m());
  }

  /// Adds `weight` times the convolved values of query i to o.
  void add_convolution(index b, index h, index i, T weight, T* o) const {
    const matrix_view<const S> values = head_of(v, b, h / shape.group());
    const index taps = options.convolution.extent(1), position = i + lengths.keys(b) - lengths.queries(b);
    const index first = position - taps / 2;
    const index begin = std::max<index>(0, -first), end = std::min(taps, lengths.keys(b) - first);
    for (index d = 0; d < shape.dim_v; d += width<T>) {
      packet<T> sum = zero<T>();
      for (index p = begin; p < end; ++p)
        sum = fma(broadcast<T>(options.convolution(h, p)),
                  load_part<T>(values.row(first + p) + d * values.col_stride, values.col_stride, shape.dim_v - d), sum);
      store<T>(o + d, fma(broadcast<T>(weight), sum, load<T>(o + d)));
    }
  }

  /// Queries [i0, i0 + max_rows) of one head.
  void attend_rows(const pair_state& state, index b, index h, index i0, execution& exec, int worker) const {
    const index queries = lengths.queries(b), i1 = std::min(i0 + max_rows, queries), member = h % shape.group();
    const matrix_view<S> to = head_of(out, b, h);
    if (i0 < i1 && few_queries(b) && !few_keys(b)) {
      const online_softmax<T>& known = state.partial[0];
      for (index i = i0; i < i1; ++i) {
        const index r = member * queries + i;
        T* const o = known.out + r * known.stride;
        if (options.convolution) add_convolution(b, h, i, known.sum[r], o);
        known.finish_row(r, nullptr, to.row(i), to.col_stride, nullptr);
      }
    } else if (i0 < i1) {
      auto block =
          exec.scratch(worker, [&](arena& memory) { return row_block<T>::layout(memory, shape.dim, shape.dim_v); });
      block.begin(head_of(q, b, h), {i0, 1, nullptr}, i1 - i0, terms.query_factor());
      std::fill_n(block.ranges, block.rows, key_range{0, std::min(m(), lengths.keys(b))});
      stream_prefetcher(head_of(q, b, h), i1, queries).next(max_rows);
      attend(block, state.slab[few_keys(b) ? 0 : member], terms);
      for (index r = 0; r < block.rows && options.convolution; ++r)
        add_convolution(b, h, i0 + r, block.state.row_sum(r), block.state.row(r));
      finish(block, to, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), 0);
    }
    clear_rows(to, std::max(i0, queries), std::min(i0 + max_rows, shape.queries));
  }

  /// Pairs [first, first + count) of batch item and key head.
  void run_pairs(index first, index count, const start_norms<T>& common, execution& exec) const {
    const index group = shape.group(), steps = (most_queries() + landmark_step - 1) / landmark_step;
    const index row_blocks = (shape.queries + max_rows - 1) / max_rows;
    const auto states = exec.shared_scratch([&](arena& memory) { return pair_list(memory, count); });
    const auto item = [&](index n) { return (first + n) / shape.kv_heads; };
    const auto head = [&](index n) { return (first + n) % shape.kv_heads; };
    exec.for_each(count * group * steps, [&](index task, int) {
      const index n = task / (group * steps), first_landmark = task % steps * landmark_step;
      if (few_keys(item(n))) return;
      average_queries(states[n], item(n), head(n), task / steps % group, first_landmark,
                      first_landmark + landmark_step);
    });
    exec.for_each(count * pieces(), [&](index task, int worker) {
      const index n = task / pieces();
      if (!few_keys(item(n))) attend_piece(states[n], item(n), head(n), task % pieces(), exec, worker);
    });
    exec.for_each(count, [&](index n, int) {
      if (few_keys(item(n))) return;
      for (index other = 1; other < pieces(); ++other) states[n].partial[0].merge(states[n].partial[other]);
    });
    exec.for_each(count * group, [&](index task, int worker) {
      const index n = task / group;
      make_slab(states[n], item(n), head(n), task % group, common, exec, worker);
    });
    exec.for_each(count * group * row_blocks, [&](index task, int worker) {
      const index n = task / (group * row_blocks), h = head(n) * group + task / row_blocks % group;
      attend_rows(states[n], item(n), h, task % row_blocks * max_rows, exec, worker);
    });
  }
  pair_state* pair_list(arena& memory, index count) const {
    auto* list = memory.allocate<pair_state>(count);
    for (index n = 0; n < count; ++n) {
      const auto one = layout(memory);
      if (list) list[n] = one;
    }
    return list;
  }

  /// The largest norms of all heads of all items.
  start_norms<T> common_norms(execution& exec) const {
    const index pairs = shape.batch * shape.kv_heads;
    start_norms<T>* const norms =
        exec.shared_scratch([&](arena& memory) { return memory.allocate<start_norms<T>>(pairs); });
    exec.for_each(pairs, [&](index n, int worker) {
      const index b = n / shape.kv_heads, kv = n % shape.kv_heads;
      norms[n] = {};
      if (few_keys(b) || few_queries(b)) return;
      pair_state state;
      auto s = exec.scratch(worker, [&](arena& memory) {
        state.queries = memory.allocate<T>(shape.group() * m() * shape.dim);
        state.keys = memory.allocate<T>(m() * shape.dim);
        return layout_weights(memory);
      });
      average_keys(state, b, kv, 0, m());
      for (index member = 0; member < shape.group(); ++member) {
        average_queries(state, b, kv, member, 0, m());
        landmark_weights(state, b, member, s);
        norms[n].raise(start_norms<T>::of(s.weights, m(), s.sums));
      }
    });
    start_norms<T> all;
    for (index n = 0; n < pairs; ++n) all.raise(norms[n]);
    return all;
  }

  void run(execution& exec) const {
    start_norms<T> common;
    if (options.inverse == pseudo_inverse::whole_batch) common = common_norms(exec);
    const index pairs = shape.batch * shape.kv_heads, wave = exec.threads() == 1 ? 1 : 4 * exec.threads();
    for (index n = 0; n < pairs; n += wave) run_pairs(n, std::min(wave, pairs - n), common, exec);
  }
};

template <class S>
void nystrom(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
             const tensor_view<const S>& v, const tensor_view<S>& out, const nystrom_options<S>& options,
             execution& exec) {
  const attention_shape shape = check_attention(check, q, k, v, out);
  const sequence_lengths lengths = check_lengths(check, shape, options);
  check_scale(check, options.scale);
  if (options.causal) check.fail("causal = false, as a landmark is a mean over tokens on both sides of a query", "true");
  check.at_least("landmarks", 1, options.landmarks);
  check.at_least("iterations", 0, options.iterations);
  if (!(options.cutoff >= 0 && options.cutoff < 1)) check.fail("a cutoff from 0 to below 1", options.cutoff);
  if (options.convolution) {
    check.readable("convolution", options.convolution);
    check.equal("heads of convolution = query heads", shape.heads, options.convolution.extent(0));
    if (options.convolution.extent(1) % 2 == 0) check.fail("a convolution of odd width", options.convolution.extent(1));
    check.no_alias("out", out, "convolution", options.convolution);
  }
  nystrom_call<S>{q,       k,     v,       out,
                  options, shape, lengths, terms_of<compute_type<S>>(options, shape.dim)}
      .run(exec);
}

}  // namespace detail

/// Nystroem attention. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O>
void nystrom(const Q& q, const K& k, const V& v, O&& out, const nystrom_options<element_of<const Q&>>& options,
             execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::nystrom<S>(detail::validator("nystrom"), as_view(q), as_view(k), as_view(v), as_view(out), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void nystrom(const Q& q, const K& k, const V& v, O&& out, const nystrom_options<element_of<const Q&>>& options = {}) {
  execution serial;
  nystrom(q, k, v, out, options, serial);
}

}  // namespace attn
