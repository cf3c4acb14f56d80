// attn: the attention-free transformer with a learned bias for every pair of positions.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t' + w_tt') v_t' / sum_t' e^(k_t' + w_tt')       each channel separately
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_full(q, k, v, out, w);                             // Eigen matrices [length, dim], w [length, length]
//   attn::aft_full(q, k, v, out, w, {.causal = true}, threads);
//
// k and w may be of any size: nothing overflows, and no channel is lost where the largest k and the largest w belong to
// different keys (aft_block.hpp says why). Where k or w is beyond 1e7 (double: 5e15), sums k + w that differ by less than
// 2^-20 (double: 2^-49) of that size count as equal. A w of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]; w [L, L], one for all heads, or [H, L, L]. float, double, or Eigen::half /
//          Eigen::bfloat16 in memory with float arithmetic.
// Cost     4 B H L^2 D operations, half of it when causal, and L^2 exponentials for every 512 channels that share w.
//          Rows in which no e^(k + w) reaches 10^-25 of e^(max k + max w) are computed again, several times slower.
//          Scratch: 2 L numbers a channel, of 512 channels at a time.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>

namespace attn { inline namespace ATTN_ISA {

/// Options of aft_full for elements of type S.
template <class S>
struct aft_full_options {
  bool causal = false;         ///< row t sees the keys up to t
  list_view<idx_t> lengths{};  ///< true lengths, one per batch item; rows of padding are 0 in out
  bool gate = true;            ///< multiply by sigmoid(q); without, q is not read
  key_mask_view key_mask{};    ///< [B or 1, L] of bool or bytes; false for a key that no row sees
};

namespace detail {

/// The keys and biases that the rows of a block, from `first` on, see of `keys` keys.
template <class T>
struct full_bias {
  matrix_view<const void> w;
  const aft_elements<T>& elements;
  idx_t first, keys;
  bool causal;

  bool has_diagonal() const { return causal; }
  idx_t diagonal() const { return first; }
  template <class F>
  void ranges(F&& f) const {
    const idx_t end = causal ? first : keys;
    if (end > 0) f(idx_t(0), end);
  }
  void fill(idx_t row, idx_t begin, idx_t count, T* to) const {
    elements.numbers.load(elements.at(w, first + row, begin), w.col_stride, count, to);
  }
};

template <class T>
void check_full_biases(const validator& check, const aft_tensors<T>& x) {
  check_biases(check, x);
  check.extents({{"w rows = length", x.length, x.w.extents[2]}, {"w columns = length", x.length, x.w.extents[3]}});
}

template <class T>
struct aft_full_call {
  const aft_tensors<T>& x;
  head_bundles<T> bundles{};
  packed_chunk<T>* packed = nullptr;

  work_estimate work() const { return x.work(static_cast<double>(x.length) * static_cast<double>(x.length)); }
  // Chunks of keys end where blocks of rows end, so that a causal block sees whole chunks.
  idx_t chunk() const { return x.causal ? block_rows : product_keys; }

  void allocate(arena& memory) {
    bundles = head_bundles<T>::make(x, memory);
    packed = memory.allocate_list(ceil_div(x.length, chunk()), [&](auto& m) {
      return packed_chunk<T>::layout(m, bundles.most * x.parts(), chunk());
    });
  }

  /// The sums of all rows of a bundle; finish(rows, keys) is called for each block of them.
  template <class Finish>
  void attend(const head_bundle& bundle, execution& exec, Finish&& finish) const {
    const idx_t parts = x.parts(), length = bundle[0].length, heads = std::ssize(bundle);
    exec.for_each(ceil_div(length, chunk()) * heads, [&](idx_t task, int) {
      const idx_t n = task / heads, head = task % heads, begin = n * chunk();
      packed[n].pack(*x.elements, bundle.data()[head], head * parts, begin, std::min(chunk(), length - begin));
    });
    const idx_t blocks = ceil_div(length, block_rows);
    exec.for_each(blocks, [&](idx_t task, int worker) {
      const idx_t first = (blocks - 1 - task) * block_rows, end = std::min(first + block_rows, length);
      auto block = exec.scratch(
          worker, [&](arena& memory) { return aft_block<T>::layout(memory, bundles.most * parts, x.causal); });
      block.packets = heads * parts;
      block.begin(end - first);
      const full_bias<T> bias{
          .w = bundle[0].w, .elements = *x.elements, .first = first, .keys = length, .causal = x.causal};
      const aft_rows<T, full_bias<T>> rows{.block = block, .elements = *x.elements, .heads = bundle, .bias = bias,
                                           .first = first, .parts = parts, .outside = nullptr, .gate = x.gate};
      rows.find_row_exponents();
      const idx_t keys = x.causal ? first : length;
      for (idx_t begin = 0; begin < keys; begin += chunk())
        rows.add_chunk(packed[begin / chunk()], begin, std::min(chunk(), keys - begin));
      finish(rows, keys);
    });
  }

  void run(execution& exec) {
    const auto limit = exec.limit_threads(work());
    exec.shared_scratch([&](arena& memory) { return allocate(memory), 0; });
    for (idx_t b = 0; b < bundles.count; ++b) {
      const head_bundle& bundle = bundles.list[b];
      attend(bundle, exec, [](const auto& rows, idx_t keys) { rows.finish(keys); });
      if (bundle[0].length == x.length) continue;
      exec.for_each(std::ssize(bundle), [&](idx_t n, int) {
        const aft_head& head = bundle.data()[n];
        x.elements->clear(head, head.length, x.length);
      });
    }
  }
};

}  // namespace detail

/// Attention-free mixing with a bias for every pair. See the top of the file. Options and an execution may be left out.
template <viewable Q, viewable K, viewable V, viewable O, viewable W,
          class Options = aft_full_options<element_of<const Q&>>>
void aft_full(const Q& q, const K& k, const V& v, O&& out, const W& w, Options&& options = {},
              execution_ref exec = {}) {
  using S = element_of<const Q&>;
  auto call = detail::checked_aft<aft_full_options<S>>("aft_full", q, k, v, out, w, options, exec);
  detail::check_full_biases(call.views, call.x);
  detail::aft_full_call<compute_type<S>>{call.x}.run(call.exec);
}

}}  // namespace attn::ATTN_ISA
