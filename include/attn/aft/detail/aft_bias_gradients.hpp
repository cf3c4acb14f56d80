// attn: the gradient of the biases of a call of the attention-free family.
#pragma once

#include <attn/aft/detail/aft_gradients.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The gradient of one head of w: written directly, or summed first.
template <class T>
struct aft_bias_sink {
  matrix_view<void> to{};
  const number_access<T>* access = nullptr;
  bool accumulate = false;
  T* sums = nullptr;  // [rows][columns]

  void add(idx_t row, idx_t column, idx_t count, const T* values) const {
    if (sums) {
      T* const s = sums + row * to.cols + column;
      for (idx_t j = 0; j < count; ++j) s[j] += values[j];
    } else {
      store(row, column, count, values);
    }
  }
  void store(idx_t row, idx_t column, idx_t count, const T* values) const {
    void* const first = static_cast<char*>(to.data) + (row * to.row_stride + column * to.col_stride) * access->size;
    access->store(values, count, first, to.col_stride, accumulate);
  }
};

/// The gradients of all heads of w, one after the other. Where one bundle of heads has all that share a head of w,
/// every entry is written once; otherwise, and where an entry belongs to many weights, it is summed first and rounded
/// once.
template <class T>
struct aft_bias_gradients {
  const aft_tensors<T>* x = nullptr;
  aft_bias_sink<T> sink{};
  bool wanted = false;
  idx_t rows = 0, columns = 0;  // that belong to tokens

  static aft_bias_gradients layout(arena& memory, const aft_tensors<T>& x, idx_t most_heads,
                                   bool many_weights) {
    aft_bias_gradients g{.x = &x, .wanted = x.wants(x.dw), .rows = x.dw.extents[2], .columns = x.dw.extents[3]};
    idx_t longest = 0;
    for (idx_t b = 0; b < x.batch; ++b) longest = (std::max)(longest, x.taken(b));
    if (!many_weights) g.rows = (std::min)(g.rows, longest);
    const idx_t sharing = x.batch * (x.shares_biases() ? x.heads : 1);
    const auto lengths = x.lengths;
    const bool differ = std::any_of(lengths.begin(), lengths.end(), [&](idx_t n) { return n != lengths[0]; });
    if (g.wanted && (many_weights || differ || sharing > most_heads))
      g.sink.sums = memory.allocate<T>(x.dw.extents[2] * x.dw.extents[3]);
    g.sink.access = &x.elements->numbers, g.sink.accumulate = x.accumulate;
    return g;
  }

  /// Zeros everywhere, for entries that belong to no weight.
  void clear(execution& exec) const {
    if (!wanted || x->accumulate) return;
    exec.for_each(x->dw.extents[1] * x->dw.extents[2], [&](idx_t task, int) {
      const idx_t row = task % x->dw.extents[2];
      sink.access->clear(writable_head_of(x->dw, 0, task / x->dw.extents[2]), row, row + 1);
    });
  }

  /// Call before and after bundle b: the first and the last bundle that share a head of w begin and end its sums.
  void begin(const head_bundles<T>& bundles, idx_t b, execution& exec) {
    const idx_t head = bundles.list[b][0].bias_head;
    if (!wanted || (b > 0 && bundles.list[b - 1][0].bias_head == head)) return;
    sink.to = writable_head_of(x->dw, 0, head);
    if (sink.sums)
      exec.for_each(rows, [&](idx_t row, int) { std::fill_n(sink.sums + row * sink.to.cols, columns, T(0)); });
  }
  void end(const head_bundles<T>& bundles, idx_t b, execution& exec) const {
    const idx_t head = bundles.list[b][0].bias_head;
    if (!wanted || !sink.sums || (b + 1 < bundles.count && bundles.list[b + 1][0].bias_head == head)) return;
    exec.for_each(rows, [&](idx_t row, int) { sink.store(row, 0, columns, sink.sums + row * sink.to.cols); });
  }
};

/// Zeros in all padding of the gradients of q, k and v; where there are no channels, in that of one key for all of
/// them.
template <class T>
void clear_all_padding(const aft_tensors<T>& x, execution& exec) {
  if (x.lengths.empty() && x.dim > 0) return;
  exec.for_each(x.batch * x.heads, [&](idx_t n, int) {
    const aft_head head = x.head(n);
    x.clear_padding(head, x.dim > 0 ? head.length : 0, x.length);
  });
}

}}}  // namespace attn::ATTN_ISA::detail
