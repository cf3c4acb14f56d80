// attn: the attention-free transformer with a learned bias for every pair of positions.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_tt') v_t' / sum_t' e^(k_t' + w_tt')       each channel on its own
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_full(q, k, v, out, w);                             // Eigen matrices [length, dim], w [length, length]
//   attn::aft_full(q, k, v, out, w, {.causal = true}, threads);
//
// k and w may be of any size up to 5e37: nothing overflows, and no channel is lost where the largest k and the largest
// w do not meet (aft_block.hpp says why). A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]; w [L, L], one for all heads, or [H, L, L]. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L^2 D operations, half of it when causal, and L^2 exponentials for every 512 channels that share w.
//          Rows in which no e^(k + w) reaches 10^-25 of e^(max k + max w) are computed again, several times slower.
//          Scratch: 2 L numbers a channel, of 512 channels at a time.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_call.hpp>

namespace attn::inline ATTN_ISA {

/// Options of aft_full for elements of type S.
template <class S>
struct aft_full_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// Row t sees the keys up to t.
  bool causal = false;
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
  /// True lengths, one per batch item. Rows of padding are 0 in out.
  list_view<index> lengths{};
};

namespace detail {

/// What the rows of a block, `first` and on, see of `keys` keys.
template <class S>
struct full_bias {
  matrix_view<const S> w;
  index first, keys;
  bool causal;

  bool has_diagonal() const { return causal; }
  index diagonal() const { return first; }
  template <class F>
  void stretches(F&& f) const {
    const index end = causal ? first : keys;
    if (end > 0) f(index(0), end);
  }
  void fill(index row, index begin, index count, compute_type<S>* to) const {
    copy_biases(w.row(first + row) + begin * w.col_stride, w.col_stride, count, to);
  }
};

template <class S>
void aft_full(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
              const tensor_view<const S>& v, const tensor_view<S>& out, const tensor_view<const S>& w,
              const aft_full_options<S>& options, execution& exec) {
  using T = compute_type<S>;
  const aft_call<S> call = check_aft(check, q, k, v, out, options);
  check_parameter(check, w, out);
  check.broadcasts("w heads", call.heads, w.extent(1));
  check.equal("w rows = length", call.length, w.extent(2));
  check.equal("w columns = length", call.length, w.extent(3));

  // A causal block of rows sees whole pieces only if those end where blocks end.
  const index piece = call.causal ? block_rows : product_keys, pieces = (call.length + piece - 1) / piece;
  const bool shared = w.extent(1) == 1;
  const index parts = call.parts(), blocks = (call.length + block_rows - 1) / block_rows;
  packed_piece<T>* packed = nullptr;
  const auto groups = exec.shared_scratch([&](arena& memory) {
    const auto g = aft_groups<S>::make(call, shared, memory);
    packed = memory.allocate<packed_piece<T>>(pieces);
    for (index n = 0; n < pieces; ++n) {
      const auto one = packed_piece<T>::layout(memory, g.most * parts, piece);
      if (packed) packed[n] = one;
    }
    return g;
  });
  for (index g = 0; g < groups.count; ++g) {
    const aft_group group = groups.list[g];
    const auto heads = groups.of(group);
    exec.for_each(pieces * group.heads, [&](index task, int) {
      const index n = task / group.heads, head = task % group.heads, begin = n * piece;
      if (begin >= group.length) return;
      const auto& from = heads[static_cast<std::size_t>(head)];
      packed[n].pack(from.k, from.v, head * parts, begin, std::min(piece, group.length - begin));
    });
    exec.for_each(blocks, [&](index task, int worker) {
      const index first = (blocks - 1 - task) * block_rows, end = std::min(first + block_rows, group.length);
      if (first < end) {
        auto block = exec.scratch(
            worker, [&](arena& memory) { return aft_block<T>::layout(memory, groups.most * parts, call.causal); });
        block.packets = group.heads * parts;
        block.begin(end - first);
        const index head = aft_groups<S>::at(call, shared, group.first).head;
        const full_bias<S> bias{head_of(w, 0, shared ? 0 : head), first, group.length, call.causal};
        const aft_rows<S, full_bias<S>> rows{block, heads, bias, first, parts, nullptr, call.gate};
        rows.find_row_tops();
        const index keys = call.causal ? first : group.length;
        for (index n = 0; n * piece < keys; ++n) rows.take(packed[n], n * piece, std::min(piece, keys - n * piece));
        rows.finish(keys);
      }
      for (const auto& head : heads)
        clear_rows(head.out, std::max(first, group.length), std::min(first + block_rows, call.length));
    });
  }
}

}  // namespace detail

/// Attention-free mixing with a bias for every pair, by an execution, which may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_full(const Q& q, const K& k, const V& v, O&& out, const W& w,
              const aft_full_options<element_of<const Q&>>& options, execution& exec) {
  detail::require_aft_types<const Q&, const K&, const V&, O, const W&>();
  using S = element_of<const Q&>;
  detail::aft_full<S>(detail::validator("aft_full"), as_view(q), as_view(k), as_view(v), as_view(out),
                      detail::parameter_view(w), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O, viewable W>
void aft_full(const Q& q, const K& k, const V& v, O&& out, const W& w,
              const aft_full_options<element_of<const Q&>>& options = {}) {
  execution serial;
  aft_full(q, k, v, out, w, options, serial);
}

}  // namespace attn
