// attn: the attention-free transformer without biases.
//
//   out_t = sigmoid(q_t) * sum_t' e^(k_t') v_t' / sum_t' e^(k_t')       each channel on its own
//                                                                  Zhai et al. 2021, "An attention free transformer"
//
//   attn::aft_simple(q, k, v, out);
//   attn::aft_simple(q, k, v, out, {.causal = true}, threads);
//
// k may be of any size up to 5e37: nothing overflows. A k of -infinity masks; a row that sees no key is 0.
//
// Shapes   q, k, v, out [B, H, L, D]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float arithmetic.
// Cost     Two passes over memory: k and v, then q and out (causal: then k and v too). Scratch: 3 D numbers for
//          every 512 tokens.
// Throws   std::invalid_argument for shapes or options that do not fit, before anything is written.
#pragma once

#include <attn/aft/detail/aft_call.hpp>
#include <attn/aft/detail/sums_array.hpp>

namespace attn::inline ATTN_ISA {

/// Options of aft_simple for elements of type S.
template <class S>
struct aft_simple_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");

  /// Row t sees the keys up to t.
  bool causal = false;
  /// Multiply by sigmoid(q); without, q is not read.
  bool gate = true;
  /// True lengths, one per batch item. Rows of padding are 0 in out.
  list_view<index> lengths{};
};

namespace detail {

/// Tokens a task takes.
inline constexpr index simple_chunk = 512;

/// Adds rows [begin, end) to C packets of sums one by one and writes each row's own result.
template <class T, int C, class S>
void simple_rows_causal(const aft_head<S>& head, bool gate, index begin, index end, index c, T* sums) {
  read_channels<T, C>(head.k, head.v, c, [&](const auto& key, const auto& value) {
    write_channels<T, C>(head, gate, c, [&](const auto& write) {
      key_sums<T> s[C];
      unroll<C>([&](auto n) { s[n] = key_sums<T>::read(sums + n * key_sums<T>::size); });
      for (index t = begin; t < end; ++t)
        unroll<C>([&](auto n) {
          const packet<T> x = key(t, n);
          s[n].raise(nearest_power<T>(x));
          const packet<T> weight = weight_beside(x, sub(zero<T>(), s[n].top));
          const packet<T> v_t = fma(x, zero<T>(), value(t, n));  // an infinite key makes it NaN
          s[n].num = fma(weight, if_less(zero<T>(), weight, v_t, zero<T>()), s[n].num);
          s[n].den = add(s[n].den, weight);
          write(t, n, s[n].num, s[n].den);
        });
      unroll<C>([&](auto n) { s[n].write(sums + n * key_sums<T>::size); });
    });
  });
}

/// Rows [begin, end) of C packets that all have the same means.
template <class T, int C, class S>
void simple_rows(const aft_head<S>& head, bool gate, index begin, index end, index c, const T* sums) {
  write_channels<T, C>(head, gate, c, [&](const auto& write) {
    packet<T> mean[C];
    unroll<C>([&](auto n) {
      const auto s = key_sums<T>::read(sums + n * key_sums<T>::size);
      mean[n] = if_less(zero<T>(), s.den, div(s.num, s.den), s.den);
    });
    for (index t = begin; t < end; ++t) unroll<C>([&](auto n) { write(t, n, mean[n], broadcast<T>(T(1))); });
  });
}

template <class S>
void aft_simple(const validator& check, const tensor_view<const S>& q, const tensor_view<const S>& k,
                const tensor_view<const S>& v, const tensor_view<S>& out, const aft_simple_options<S>& options,
                execution& exec) {
  using T = compute_type<S>;
  const aft_call<S> call = check_aft(check, q, k, v, out, options);
  const index heads = call.batch * call.heads, parts = call.parts();
  const index chunks = (call.length + simple_chunk - 1) / simple_chunk;
  const auto sums =
      exec.shared_scratch([&](arena& memory) { return sums_array<T>::layout(memory, heads * chunks, parts); });
  const auto task_of = [&](index task, auto&& f) {
    const index b = task / chunks / call.heads, begin = task % chunks * simple_chunk;
    f(call.head(b, task / chunks % call.heads), begin,
      std::clamp(begin + simple_chunk, begin, std::max(begin, call.true_length(b))));
  };
  exec.for_each(heads * chunks, [&](index task, int) {
    task_of(task, [&](const aft_head<S>& head, index begin, index end) {
      sums.clear(task);
      add_line<T>(head, 0, begin, end, parts, sums.at(task));
    });
  });
  // Every chunk gets what lies before it, or the sum of all.
  exec.for_each(heads, [&](index head, int) {
    T* const first = sums.at(head * chunks);
    const index size = parts * key_sums<T>::size;
    if (call.causal) {
      for (index n = 1; n < chunks; ++n) sums_array<T>::merge(first + n * size, first + (n - 1) * size, parts);
      for (index n = chunks - 1; n > 0; --n) std::copy_n(first + (n - 1) * size, size, first + n * size);
      if (chunks > 0) sums.clear(head * chunks);
    } else {
      for (index n = 1; n < chunks; ++n) sums_array<T>::merge(first, first + n * size, parts);
      for (index n = 1; n < chunks; ++n) std::copy_n(first, size, first + n * size);
    }
  });
  exec.for_each(heads * chunks, [&](index task, int) {
    task_of(task, [&](const aft_head<S>& head, index begin, index end) {
      for_columns(parts, [&](auto count, index p) {
        T* const s = sums.at(task) + p * key_sums<T>::size;
        if (call.causal)
          simple_rows_causal<T, count.value>(head, call.gate, begin, end, p * width<T>, s);
        else
          simple_rows<T, count.value>(head, call.gate, begin, end, p * width<T>, s);
      });
      clear_rows(head.out, end, std::min(begin + simple_chunk, call.length));
    });
  });
}

}  // namespace detail

/// Attention-free mixing without biases, by an execution, which may be left out. See the top of the file.
template <viewable Q, viewable K, viewable V, viewable O>
void aft_simple(const Q& q, const K& k, const V& v, O&& out, const aft_simple_options<element_of<const Q&>>& options,
                execution& exec) {
  detail::require_one_element_type<const Q&, const K&, const V&, O>();
  using S = element_of<const Q&>;
  detail::aft_simple<S>(detail::validator("aft_simple"), as_view(q), as_view(k), as_view(v), as_view(out), options, exec);
}

template <viewable Q, viewable K, viewable V, viewable O>
void aft_simple(const Q& q, const K& k, const V& v, O&& out,
                const aft_simple_options<element_of<const Q&>>& options = {}) {
  execution serial;
  aft_simple(q, k, v, out, options, serial);
}

}  // namespace attn
