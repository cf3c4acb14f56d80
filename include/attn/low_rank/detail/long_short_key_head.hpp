// attn: the data of the backward pass of long_short: for one query head, for the heads that share keys, and for a block
// of tokens that go into compressed keys; and the backward pass of its layer norms.
#pragma once

#include <attn/low_rank/detail/few_rows_backward.hpp>
#include <attn/low_rank/detail/long_short_run.hpp>
#include <attn/softmax/detail/blockwise_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Gradients of gamma and beta, dim numbers each, one after the other.
template <class T>
struct norm_sums {
  T* gamma = nullptr;
  idx_t dim = 0;

  T* beta() const { return gamma + dim; }
  static idx_t size(idx_t dim) { return 2 * dim; }
  void clear() const { std::fill_n(gamma, size(dim), T(0)); }
  void add(const norm_sums& other) const {
    for (idx_t d = 0; d < size(dim); ++d) gamma[d] += other.gamma[d];
  }
};

/// From dy, the gradient of the norm of x: the gradient of x, which overwrites it, and those of gamma and beta, which
/// are added to `sums`.
template <class T>
[[gnu::noinline]] void norm_back(const key_norm<T>& norm, const T* x, idx_t dim, T* dy, const norm_sums<T>& sums) {
  const T share = T(1) / static_cast<T>(dim);
  const auto m = norm.measure(x, dim);
  const T factor = T(1) / std::sqrt(m.variance);
  T by = 0, by_x = 0, squares = 0;
  for (idx_t d = 0; d < dim; ++d) {
    const T normed = m.centre(x[d]) * factor;
    sums.gamma[d] += dy[d] * normed;
    sums.beta()[d] += dy[d];
    dy[d] *= norm.gamma[d];
    by += dy[d];
    by_x += dy[d] * normed;
    squares += dy[d] * dy[d];
  }
  by *= share, by_x *= share;
  T rest = 0;  // of the mean of dy
  if (squares * share < by * by * T(1.0625)) [[unlikely]]
    for (idx_t d = 0; d < dim; ++d) rest += (dy[d] - by) * share;
  for (idx_t d = 0; d < dim; ++d)
    dy[d] = factor * m.power * (dy[d] - by - rest - m.centre(x[d]) * factor * by_x);
}

/// One query head: its keys compressed, and their gradients.
template <class P>
struct long_short_query_head {
  using T = sum_type<P>;

  token_sums<T> sums;
  backward_keys<P> compressed;                         // normed, packed
  T *normed_keys = nullptr, *normed_values = nullptr;  // [row][padded], where there is a global norm
  sums_in_parts<T> d_keys, d_values;                   // of compressed rows, by parts
  T *maximum = nullptr, *share = nullptr;              // per row: of the logits, and 1 / the sum of weights
  unsigned char* seen = nullptr;                       // as in long_short_head
  T* delta = nullptr;                                  // per row: the sum over tokens of weights and their gradients
};

/// The sums of one part for the keys of its windows, rows [first, ...) of the sequence.
template <class T>
struct long_short_part {
  T *d_keys = nullptr, *d_values = nullptr;
  idx_t first = 0, end = 0;
};

/// One key head of one batch item.
template <class P>
struct long_short_key_head {
  using T = sum_type<P>;

  long_short_query_head<P>* query_heads = nullptr;  // [group]
  long_short_part<T>* parts = nullptr;
  T *d_keys = nullptr, *d_values = nullptr;  // [Lk][]: the gradients by the windows
  norm_sums<T>* local = nullptr;             // [blocks of keys]
};

/// Scratch of one worker: a block of tokens, and the gradients of the compressed keys and values they go into.
template <class T>
struct compressed_tokens {
  few_rows_scratch<T> block;
  few_rows<T> keys, values;
  idx_t rank = 0;
  T *logits = nullptr, *d_logits = nullptr;  // panels across: [token panel][rank][], [rank panel][token][]

  static compressed_tokens layout(arena& memory, idx_t rank, idx_t dim, idx_t dim_v) {
    compressed_tokens s;
    s.block = few_rows_scratch<T>::layout(memory, rank, dim, dim_v);
    s.keys = few_rows<T>::layout(memory, rank, dim), s.values = few_rows<T>::layout(memory, rank, dim_v);
    s.rank = rank;
    s.logits = memory.allocate<T>(few_rows_block * rank);
    s.d_logits = memory.allocate<T>(few_rows_block * round_up(rank, panel_width<T>));
    return s;
  }

  /// Weights of tokens [begin, begin + count): e^(logit - maximum) times share, of every compressed key.
  template <class S>
  [[gnu::noinline]] void weigh(const matrix_view<const S>& from, idx_t begin, idx_t count, const T* maximum,
                               const T* share) const {
    constexpr idx_t wide = panel_width<T>;
    if (rank == 0) return;
    pack_panels_across<T>([&](idx_t t) { return from.row(begin + t); }, count, rank, from.col_stride, logits);
    for (idx_t c = 0; c < rank; ++c)
      for (idx_t t = 0; t < count; t += width<T>) {
        const packet<T> x = load<T>(logits + t / wide * wide * rank + c * wide + t % wide);
        store<T>(block.weights + c * few_rows_stride + t,
                 mul(exp_weight<T>(sub(x, broadcast<T>(maximum[c]))), broadcast<T>(share[c])));
      }
  }
  /// The gradients of their logits, from the weights and the gradients of these.
  template <class S>
  [[gnu::noinline]] void store_logits(const matrix_view<S>& to, idx_t begin, idx_t count, const seen_range& seen,
                                      const T* delta, bool accumulate) const {
    constexpr idx_t wide = panel_width<T>;
    if (rank == 0) return;
    for (idx_t c = 0; c < rank; ++c)
      for (idx_t t = 0; t < count; t += width<T>) {
        T* const d = block.d_scores + c * few_rows_stride + t;
        store<T>(d, mul(load<T>(block.weights + c * few_rows_stride + t), sub(load<T>(d), broadcast<T>(delta[c]))));
      }
    const T* const rows = block.d_scores;
    pack_panels_across<T>([&](idx_t c) { return rows + c * few_rows_stride; }, rank, count, 1, d_logits);
    for (idx_t t = 0; t < count; ++t)
      for (idx_t c = 0; c < rank; ++c)
        store_gradient(to.row(begin + t)[c * to.col_stride],
                       seen.hides(t) ? T(0) : d_logits[(c / wide * count + t) * wide + c % wide], accumulate);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
