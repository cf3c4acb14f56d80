// attn: the data of the backward pass of nystrom for one query head, and for the heads that share keys.
#pragma once

#include <attn/low_rank/detail/few_rows_backward.hpp>
#include <attn/low_rank/detail/landmark_weights.hpp>
#include <attn/low_rank/detail/pseudo_inverse_backward.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// One query head.
template <class T>
struct nystrom_query_head {
  few_rows<T> values;  // A^+ softmax(scale Q' K^T) V, or all values
  attended_rows<T> landmarks;
  sums_in_parts<T> d_values, d_keys;           // of those values and of K', by parts of the queries
  sums_in_parts<T> d_queries;                  // of Q': part 0 through A, then by parts of the keys
  T *weights = nullptr, *d_weights = nullptr;  // A and its gradient, [m][m]
  start_norms<T> norms{};
  inverse_iterates<T> iterates{};
  exact_inverse decomposition{};

  static nystrom_query_head layout(arena& memory, const landmark_plan& plan, idx_t query_parts,
                               const landmark_inverse<T>& kind) {
    const attention_shape& s = plan.shape;
    const idx_t m = (std::min)(plan.landmarks, (std::max)(s.queries, s.keys));
    nystrom_query_head x;
    x.values = few_rows<T>::layout(memory, m, s.dim_v);
    x.landmarks = attended_rows<T>::layout(memory, m, s.dim, s.dim_v);
    x.d_values = sums_in_parts<T>::layout(memory, query_parts, m, s.dim_v);
    x.d_keys = sums_in_parts<T>::layout(memory, query_parts, m, s.dim);
    x.d_queries = sums_in_parts<T>::layout(memory, plan.parts() + 1, m, s.dim);
    x.weights = memory.allocate<T>(m * m), x.d_weights = memory.allocate<T>(m * m);
    if (kind.exact)
      x.decomposition = exact_inverse::layout(memory, m, s.dim_v);
    else
      x.iterates = inverse_iterates<T>::layout(memory, m, kind.iterations);
    return x;
  }

  /// A^+ W of landmarks Q' and K', of which `seen` are there, W being [m] rows of online softmax from row `first` on,
  /// divided by their sums.
  [[gnu::noinline]] void invert(const T* queries, const T* keys, idx_t seen, const online_softmax<T>& w, idx_t first,
                                const score_terms<T, no_score>& terms, const landmark_inverse<T>& kind, execution& exec,
                                int worker) {
    const idx_t m = values.capacity, cols = values.dim;
    landmark_weights<T> a;
    iterative_inverse_backward<T> by_iteration;
    panel_matrix<T> z, b;
    T* product = nullptr;
    exec.scratch(worker, [&](arena& memory) {
      a = landmark_weights<T>::layout(memory, m, landmarks.queries.dim);
      if (!kind.exact) by_iteration = iterative_inverse_backward<T>::layout(memory, m);
      z = panel_matrix<T>::layout(memory, m, m), b = panel_matrix<T>::layout(memory, m, cols);
      product = memory.allocate<T>(m * w.stride + panel_width<T>);
      return 0;
    });
    a.compute(queries, keys, seen, terms);
    std::copy_n(a.weights, m * m, weights);
    for (idx_t r = 0; r < m; ++r) {
      const T normal = T(1) / w.sum[first + r];
      for (idx_t d = 0; d < cols; ++d) w.row(first + r)[d] *= normal;
    }
    if (kind.exact) {
      std::copy_n(w.row(first), m * w.stride, product);
      decomposition.apply(weights, kind.cutoff, product, w.stride);
    } else {
      norms = kind.norms ? *kind.norms : a.norms();
      by_iteration.iterate(weights, norms, iterates);
      z.clear(), b.clear();
      transpose(iterates.z[kind.iterations], z);
      pack_panels<T>([&](idx_t i) { return w.row(first + i); }, 0, m, cols, 1, b.data, b.capacity);
      matrix_product(z, b, T(1), product, w.stride, panel_width<T>);
    }
    values.pack(matrix_view<const T>{product, m, cols, w.stride, 1}, seen, T(1));
  }

  /// Makes `rows` queries that have attended to all keys, with the gradients of their results, ready for
  /// backward_of_keys; d_out is overwritten.
  template <class S>
  void pack_landmarks(const matrix_view<const S>& queries, idx_t rows, const online_softmax<T>& w, idx_t first,
                      T* d_out, idx_t stride, T factor) {
    for (idx_t r = 0; r < rows; ++r) {
      const T share = T(1) / w.sum[first + r];
      T dot = T(0);
      for (idx_t d = 0; d < w.cols; ++d) {
        dot += d_out[r * stride + d] * w.row(first + r)[d];
        d_out[r * stride + d] *= share;
      }
      landmarks.maximum[r] = w.maximum[first + r];
      landmarks.delta[r] = dot * share;
    }
    landmarks.queries.pack(queries, rows, factor);
    landmarks.d_out.pack(matrix_view<const T>{d_out, rows, w.cols, stride, 1}, rows, T(1));
  }

  /// From the gradient of A^+ W computes that of W in `d_w` [m][stride] and, where `through_a`, that of A in d_weights.
  /// Returns minus the gradient of each norm by the start of the iteration, times that norm.
  [[gnu::noinline]] T invert_back(const online_softmax<T>& w, idx_t first, const landmark_inverse<T>& kind,
                                  bool through_a, T* d_w, idx_t stride, execution& exec, int worker) {
    if (kind.exact) {
      exact_inverse_backward b;
      with_outer<double>(
          w, first, exec, worker, [&](arena& memory) { b = exact_inverse_backward::layout(memory, values.capacity); },
          [&](const auto& d_u, const auto& w_across, const auto& product) {
            const auto spectrum =
                b.invert(decomposition, kind.cutoff, static_cast<double>(std::numeric_limits<T>::epsilon()));
            transpose(b.h, b.right);
            matrix_product(b.right, d_u, 0.0, 1.0, product);
            copy_out(product, d_w, stride);
            if (!through_a) return;
            matrix_product(d_u, w_across, 0.0, 1.0, b.d_h);
            b.back(weights, decomposition, kind.cutoff, spectrum);
            copy_out(b.y, d_weights, values.capacity);
          });
      return T(0);
    }
    T inner = T(0);
    iterative_inverse_backward<T> b;
    with_outer<T>(
        w, first, exec, worker,
        [&](arena& memory) { b = iterative_inverse_backward<T>::layout(memory, values.capacity); },
        [&](const auto& d_u, const auto& w_across, const auto& product) {
          b.clear();
          matrix_product(iterates.z[kind.iterations], d_u, T(0), T(1), product);
          copy_out(product, d_w, stride);
          if (!through_a) return;
          matrix_product(d_u, w_across, T(0), T(1), b.d_z);
          inner = b.back(iterates, norms);
          copy_out(b.d_a, d_weights, values.capacity);
        });
    return inner;
  }

  /// The gradient of the largest column sum goes to that column of A.
  void add_to_largest_column(T gradient) {
    const idx_t m = values.capacity;
    idx_t largest = 0;
    T highest = T(-1);
    for (idx_t j = 0; j < m; ++j) {
      T sum = T(0);
      for (idx_t i = 0; i < m; ++i) sum += weights[i * m + j];
      if (sum > highest) highest = sum, largest = j;
    }
    for (idx_t i = 0; i < m; ++i) d_weights[i * m + largest] += gradient;
  }

  /// The backward pass of A = softmax(scale Q' K'^T): adds to the gradients of Q' and K', which are without the scale.
  [[gnu::noinline]] void add_through_weights(const few_rows<T>& keys, execution& exec, int worker) {
    const idx_t m = values.capacity;
    panel_matrix<T> d, across;
    exec.scratch(worker, [&](arena& memory) {
      d = panel_matrix<T>::layout(memory, m, m), across = panel_matrix<T>::layout(memory, m, m);
      return 0;
    });
    d.clear();
    for (idx_t i = 0; i < m; ++i) {
      T dot = T(0);
      for (idx_t j = 0; j < m; ++j) dot += weights[i * m + j] * d_weights[i * m + j];
      for (idx_t j = 0; j < m; ++j) *d.at(i, j) = weights[i * m + j] * (d_weights[i * m + j] - dot);
    }
    across.clear();
    transpose(d, across);
    const auto add = [m](const panel_matrix<T>& x, const few_rows<T>& y, const sums_in_parts<T>& to) {
      panel_product<T>(
          [&](idx_t r) {
            return panel_rows<T>{x.at(r, 0), x.capacity * panel_width<T>};
          },
          m, y.panels, y.capacity, y.dim, y.count,
          [&](idx_t r, idx_t col, const auto& sum) {
            T* const c = to.row(r) + col;
            if (r < m) store<T>(c, detail::add(load<T>(c), sum));
          });
    };
    add(d, keys, d_queries);
    add(across, landmarks.queries, d_keys);
  }

 private:
  /// body(dU, W^T, room for the gradient of W), as matrices of R; layout(arena) adds to their scratch memory.
  template <class R, class Layout, class Body>
  void with_outer(const online_softmax<T>& w, idx_t first, execution& exec, int worker, const Layout& layout,
                  const Body& body) const {
    const idx_t m = values.capacity, cols = values.dim;
    panel_matrix<R> d_u, w_across, product;
    exec.scratch(worker, [&](arena& memory) {
      layout(memory);
      d_u = panel_matrix<R>::layout(memory, m, cols), product = panel_matrix<R>::layout(memory, m, cols);
      w_across = panel_matrix<R>::layout(memory, cols, m);
      return 0;
    });
    d_u.clear(), w_across.clear();
    for (idx_t r = 0; r < m; ++r)
      for (idx_t c = 0; c < cols; ++c) {
        *d_u.at(r, c) = static_cast<R>(d_values.row(r)[c]);
        *w_across.at(c, r) = static_cast<R>(w.row(first + r)[c]);
      }
    body(d_u, w_across, product);
  }
  template <class R>
  static void copy_out(const panel_matrix<R>& x, T* to, idx_t stride) {
    for (idx_t r = 0; r < x.rows; ++r)
      for (idx_t c = 0; c < x.cols; ++c) to[r * stride + c] = static_cast<T>(*x.at(r, c));
  }
};

/// One key head of one batch item.
template <class P>
struct nystrom_backward_head {
  using T = sum_type<P>;

  landmark_head<P> forward;  // Q', K' and softmax(scale Q' K^T) V
  few_rows<T> keys;          // K', or all keys
  nystrom_query_head<T>* query_heads = nullptr;
  T* d_keys = nullptr;     // of K', [m][]
  T* d_queries = nullptr;  // [group][queries][], without the part of Q' and without the scale
  T* d_w = nullptr;        // [group][m][]

  static nystrom_backward_head layout(arena& memory, const landmark_plan& plan, idx_t query_parts,
                                      const landmark_inverse<T>& kind, bool with_queries) {
    const attention_shape& s = plan.shape;
    const idx_t m = (std::min)(plan.landmarks, (std::max)(s.queries, s.keys)), stride = sums_stride<T>(s.dim);
    nystrom_backward_head p;
    p.forward = landmark_head<P>::layout(memory, plan);
    p.keys = few_rows<T>::layout(memory, m, s.dim);
    p.query_heads = memory.allocate_list(
        s.group(), [&](arena& from) { return nystrom_query_head<T>::layout(from, plan, query_parts, kind); });
    p.d_keys = memory.allocate<T>(m * stride);
    p.d_queries = memory.allocate<T>(with_queries ? s.group() * s.queries * stride : 0);
    p.d_w = memory.allocate<T>(s.group() * m * sums_stride<T>(s.dim_v));
    return p;
  }
};

}}}  // namespace attn::ATTN_ISA::detail
