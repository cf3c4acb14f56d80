// attn: what the steps of the attention-free family share: sums of one row at a time, key piece by key piece.
#pragma once

#include <attn/aft/detail/aft_call.hpp>

namespace attn::inline ATTN_ISA {

/// Options of a step.
struct aft_step_options {
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
};

namespace detail {

/// Checks q, k, v and out of a step against one another and against the state.
template <class S>
aft_call<S> check_aft_step(const validator& check, index batch, index heads, index dim, const tensor_view<const S>& q,
                           const tensor_view<const S>& k, const tensor_view<const S>& v, const tensor_view<S>& out,
                           bool gate, bool one_key = false) {
  struct {
    list_view<index> lengths{};
    bool causal = true, gate;
  } const options{.gate = gate};
  const aft_call<S> call = check_aft(check, q, k, v, out, options, one_key);
  check.equal("query batch = state batch", batch, call.batch);
  check.equal("query heads = state heads", heads, call.heads);
  check.equal("query dim = state dim", dim, call.dim);
  return call;
}

/// What adding keys to the sums of one row takes.
template <class T>
struct row_scratch {
  split_keys<T> keys;
  split_biases<T> biases;

  static row_scratch layout(arena& memory) {
    return {split_keys<T>::layout(memory), split_biases<T>::layout(memory, 1)};
  }

  /// Adds rows [begin, end) of k and v to the sums in memory, `parts` packets of them; fill(j, n, to) gives the biases
  /// of rows j ....
  template <class S, class Fill>
  void add(const matrix_view<const S>& k, const matrix_view<const S>& v, index begin, index end, index parts, T* sums,
           Fill&& fill) const {
    for (index j = begin; j < end; j += key_piece) {
      const index count = std::min(key_piece, end - j);
      fill(j, count, biases.factor);
      biases.split(count);
      for (index p = 0; p < parts; ++p) {
        keys.take(k, v, p * width<T>, j, count);
        auto s = key_sums<T>::read(sums + p * key_sums<T>::size);
        add_keys(s, keys, biases, count);
        s.write(sums + p * key_sums<T>::size);
      }
    }
  }
};

/// Sums in memory become row t of the output.
template <class T, class S>
void write_row(const T* sums, index parts, bool gate, const aft_head<S>& head, index t) {
  for (index p = 0; p < parts; ++p) {
    const auto s = key_sums<T>::read(sums + p * key_sums<T>::size);
    write_channels<T, 1>(head, gate, p * width<T>, [&](const auto& write) { write(t, 0, s.num, s.den); });
  }
}

}  // namespace detail
}  // namespace attn
