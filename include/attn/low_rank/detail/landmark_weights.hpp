// attn: landmarks, the means of balanced segments of a sequence, and what is computed from them: A = softmax(scale Q'
// K'^T), its pseudo-inverse, and the keys and values the queries of one head attend to. Landmarks are in the compute
// type.
#pragma once

#include <attn/core/detail/compensated.hpp>
#include <attn/core/detail/sums_in_parts.hpp>
#include <attn/low_rank/detail/pseudo_inverse.hpp>
#include <attn/low_rank/detail/attend_rows.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t landmark_step = 16;  // landmarks of a task

/// The mean of those of rows [begin, end) of x that are seen, `count` of them: several packets of columns at a time, so
/// that rows are read from end to end. Sums of 64 rows are added as two numbers each: however long the sequence is,
/// roundings do not add up.
template <class T, class S>
void mean_of_rows(const matrix_view<const S>& x, idx_t begin, idx_t end, const seen_range& seen, idx_t count,
                  T* mean) {
  constexpr int w = width<T>, together = 4;
  const packet<T> share = broadcast<T>(T(1) / static_cast<T>(count));
  for (idx_t d = 0; d < x.cols; d += together * w) {
    packet<T> sum[together], total[together], error[together];
    unroll<together>([&](auto n) { total[n] = error[n] = zero<T>(); });
    const bool whole = x.col_stride == 1 && d + together * w <= x.cols;
    for (idx_t i = begin; i < end;) {
      const idx_t piece = std::min<idx_t>(i + 64, end);
      unroll<together>([&](auto n) { sum[n] = zero<T>(); });
      for (; i < piece; ++i) {
        const idx_t hidden = begin + seen.next_hidden(i - begin, piece - begin);
        for (; i < hidden && whole; ++i)
          unroll<together>([&](auto n) { sum[n] = add(sum[n], load_as<T>(x.row(i) + d + n * w)); });
        for (; i < hidden; ++i)
          for (int n = 0; n < together && d + n * w < x.cols; ++n)
            sum[n] = add(sum[n], load_part<T>(x.row(i) + (d + n * w) * x.col_stride, x.col_stride, x.cols - d - n * w));
      }
      i = piece;
      unroll<together>([&](auto n) { add_compensated(total[n], error[n], sum[n]); });
    }
    alignas(64) T lanes[array_size<together * w>];
    unroll<together>([&](auto n) { store<T>(lanes + n * w, mul(compensated_sum<T>(total[n], error[n]), share)); });
    std::copy_n(lanes, std::min<idx_t>(together * w, x.cols - d), mean + d);
  }
}

/// Row a of `means`, for a in [first, last), becomes the mean of segment a of x; of the keys that are seen where x is
/// those of batch item b.
template <class T, class S>
void segment_means(const matrix_view<const S>& x, idx_t length, idx_t count, idx_t first, idx_t last, T* means,
                   const key_flags& keys = {}, idx_t b = 0) {
  for (idx_t a = first; a < last; ++a) {
    const idx_t begin = segment_begin(a, length, count), end = segment_begin(a + 1, length, count);
    mean_of_rows(x, begin, end, keys.range(b, begin, end), keys.count(b, begin, end), means + a * x.cols);
  }
}

/// The landmarks of keys that are seen: all of them where there is no list.
struct landmark_list {
  idx_t count = 0;
  idx_t* rows = nullptr;
  seen_range keys{};  // of the sequence

  index_map map() const { return {0, 1, rows}; }
  /// Moves these rows to the front.
  template <class T>
  void gather(T* x, idx_t stride) const {
    for (idx_t n = 0; rows && n < count; ++n)
      if (rows[n] != n) std::copy_n(x + rows[n] * stride, stride, x + n * stride);
  }
  /// Moves them back, among `all` rows; the others become 0.
  template <class T>
  void scatter(T* x, idx_t stride, idx_t all) const {
    for (idx_t to = rows ? all : 0, n = count; to-- > 0;)
      if (n > 0 && rows[n - 1] == to) {
        if (--n != to) std::copy_n(x + n * stride, stride, x + to * stride);
      } else {
        std::fill_n(x + to * stride, stride, T(0));
      }
  }
};

/// The shape of a call, and how it is divided into tasks.
struct landmark_plan {
  attention_shape shape;
  sequence_lengths lengths;
  idx_t landmarks = 0;
  key_flags seen{};

  idx_t most_queries() const { return (std::min)(landmarks, shape.queries); }
  /// Whether every key is a landmark: the result is then the softmax over them.
  bool few_keys(idx_t b) const { return lengths.keys(b) <= landmarks; }
  /// Whether every query is a landmark: the result is then what the landmarks attend to.
  bool few_queries(idx_t b) const { return lengths.queries(b) <= landmarks; }
  idx_t query_landmarks(idx_t b) const { return (std::min)(landmarks, lengths.queries(b)); }

  /// Parts of the keys with a softmax of their own, merged in order: at most 16, each of several segments, depending on
  /// the shape alone.
  idx_t parts() const { return parts_of(shape.keys, std::min<idx_t>(16, landmarks), 512); }
  idx_t part_begin(idx_t n) const { return segment_begin(n, landmarks, parts()); }

  landmark_list list_layout(arena& memory) const {
    return {.rows = seen ? memory.allocate<idx_t>((std::min)(landmarks, shape.keys)) : nullptr};
  }
  /// Lists the segments of keys that have one that is seen; where every key is a landmark, each is a segment.
  void list_seen(idx_t b, landmark_list& to) const {
    const idx_t keys = lengths.keys(b), all = (std::min)(landmarks, keys);
    to.count = seen ? 0 : all;
    to.keys = seen.range(b, 0, keys);
    for (idx_t a = 0; seen && a < all; ++a)
      if (seen.any(b, segment_begin(a, keys, all), segment_begin(a + 1, keys, all))) to.rows[to.count++] = a;
  }
};

/// The data of one key head of one batch item.
template <class P>
struct landmark_head {
  using T = sum_type<P>;

  T *queries = nullptr, *keys = nullptr;  // [group][landmarks][dim], [landmarks][dim]
  online_softmax<T>* partial = nullptr;   // [part], of rows [group][landmarks]
  packed_keys<P>* packed = nullptr;       // [group]; the first one serves all where every key is a landmark
  landmark_list* seen = nullptr;          // of keys

  static landmark_head layout(arena& memory, const landmark_plan& plan) {
    const attention_shape& s = plan.shape;
    const idx_t rows = s.group() * plan.most_queries(), keys = (std::min)(plan.landmarks, s.keys);
    const auto partial = [&](arena& m) { return online_softmax<T>::layout(m, rows, s.dim_v); };
    const auto packed = [&](arena& m) { return packed_keys<P>::layout(m, keys, s.dim, s.dim_v); };
    return {memory.allocate<T>(rows * s.dim), memory.allocate<T>(keys * s.dim),
            memory.allocate_list(plan.parts(), partial), memory.allocate_list(s.group(), packed),
            memory.allocate_list(1, [&](arena& m) { return plan.list_layout(m); })};
  }
};

/// A = softmax(scale Q' K'^T) of one query head, [m, m]: the kernel with the identity for values. That is m^3
/// multiply-adds more than A needs, 1/24 of what 6 iterations take.
template <class T>
struct landmark_weights {
  idx_t m = 0;
  packed_keys<T> packed;
  row_block<T> block;
  T *identity = nullptr, *weights = nullptr, *sums = nullptr;

  static landmark_weights layout(arena& memory, idx_t m, idx_t dim) {
    return {m, packed_keys<T>::layout(memory, m, dim, m), row_block<T>::layout(memory, dim, m),
            memory.allocate<T>(2 * m), memory.allocate<T>(m * m), memory.allocate<T>(m)};
  }
  /// `seen` of the landmarks of keys are there; the columns after them are 0.
  [[gnu::noinline]] void compute(const T* queries, const T* keys, idx_t seen, const score_terms<T, no_score>& terms) {
    const idx_t dim = packed.dim;
    // Row i of the identity is a window on a line of zeros with a 1 in the middle.
    std::fill_n(identity, 2 * m, T(0));
    identity[m] = T(1);
    packed.pack(matrix_view<const T>{keys, m, dim, dim, 1}, matrix_view<const T>{identity + m, m, m, -1, 1}, 0, seen);
    for (idx_t r = 0; r < m; r += max_rows) {
      block.begin(matrix_view<const T>{queries, m, dim, dim, 1}, {r, 1, nullptr}, (std::min)(max_rows, m - r),
                  terms.query_factor());
      std::fill_n(block.ranges, block.rows, key_range{0, seen});
      attend(block, packed, terms);
      finish(block, matrix_view<T>{weights, m, m, m, 1}, static_cast<const T*>(nullptr), static_cast<T*>(nullptr), 0);
    }
  }
  start_norms<T> norms() const { return start_norms<T>::of(weights, m, sums); }
};

/// How A is inverted.
template <class T>
struct landmark_inverse {
  bool exact = false;
  idx_t iterations = 0;
  double cutoff = 0;
  std::optional<start_norms<T>> norms{};  // that the iteration starts from: those of the whole batch, or of A

  /// Packs the keys and values that the queries of head `in_group` of a group attend to: landmarks K', and
  /// A^+ softmax(scale Q' K^T) V.
  template <class P>
  [[gnu::noinline]] void pack(const landmark_head<P>& head, idx_t in_group, idx_t m,
                              const score_terms<T, no_score>& terms, execution& exec, int worker) const {
    packed_keys<P>& packed = head.packed[in_group];
    const idx_t dim = packed.dim, dim_v = packed.dim_v;
    const online_softmax<T>& known = head.partial[0];
    landmark_weights<T> a;
    iterative_inverse<T> by_iteration;
    exact_inverse by_values;
    exec.scratch(worker, [&](arena& memory) {
      a = landmark_weights<T>::layout(memory, m, dim);
      if (exact)
        by_values = exact_inverse::layout(memory, m, dim_v);
      else
        by_iteration = iterative_inverse<T>::layout(memory, m, dim_v);
      return 0;
    });
    const idx_t seen = head.seen->count;
    a.compute(head.queries + in_group * m * dim, head.keys, seen, terms);
    T* const values = known.out + in_group * m * known.stride;
    for (idx_t r = 0; r < m; ++r) {
      const T normal = T(1) / known.sum[in_group * m + r];
      for (idx_t d = 0; d < dim_v; ++d) values[r * known.stride + d] *= normal;
    }
    if (exact)
      by_values.apply(a.weights, cutoff, values, known.stride);
    else
      by_iteration.apply(a.weights, norms ? *norms : a.norms(), iterations, values, known.stride);
    packed.positions = {};
    packed.pack(matrix_view<const T>{head.keys, m, dim, dim, 1},
                matrix_view<const T>{values, m, dim_v, known.stride, 1}, 0, seen);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
