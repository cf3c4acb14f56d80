// attn: the driver of aft_simple: keys are summed up chunk by chunk, then rows read the sums of the keys they see.
#pragma once

#include <attn/aft/detail/aft_tensors.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Adds rows [begin, end) to C packets of sums one by one and writes each row's own result. Sums with large exponents
/// are rare, and are computed by a second pass. Sums beside those of earlier chunks would err by less, but take two
/// products and two sums more of a packet: 8 % of its operations.
template <class T, class S, int C, bool Large = false>
void simple_rows_causal(const aft_head& head, bool gate, idx_t begin, idx_t end, idx_t c, key_sums<T>* sums) {
  if (begin == end) return;
  bool large = false;
  read_channels<T, S, C>(c, [&](const auto& key, const auto& value) {
    write_channels<T, S, C>(head, gate, c, [&](const auto& write) {
      key_sums<T> s[array_size<C>];
      packet<T> size = zero<T>();  // of the exponents, which only grow: the largest is the first or the last
      unroll<C>([&](auto n) { s[n] = sums[n]; });
      if (end - begin > 1)
        unroll<C>([&](auto n) { size = (max)(size, abs((max)(s[n].exponent, nearest_power<T>(key(begin, n))))); });
      for (idx_t t = begin; t < end; ++t)
        unroll<C>([&](auto n) {
          const packet<T> x = key(t, n), exponent = nearest_power<T>(x);
          s[n].raise(Large ? lower_large<T>(exponent) : exponent);
          const packet<T> weight = weight_beside(x, sub(zero<T>(), s[n].exponent));
          const packet<T> v_t = fma(x, zero<T>(), value(t, n));  // an infinite key makes it NaN
          s[n].num = fma(weight, if_less(zero<T>(), weight, v_t, zero<T>()), s[n].num);
          s[n].den = add(s[n].den, weight);
          write(t, n, s[n].num, s[n].den);
        });
      unroll<C>([&](auto n) { size = (max)(size, abs(s[n].exponent)); });
      large = !Large && max_lanes(size) > large_exponent<T>;
      if (!large) unroll<C>([&](auto n) { sums[n] = s[n]; });
    });
  }, head.k, head.v);
  if constexpr (!Large)
    for (int n = 0; large && n < C; ++n)
      simple_rows_causal<T, S, 1, true>(head, gate, begin, end, c + n * width<T>, sums + n);
}

/// Rows [begin, end) of C packets that all have the same means.
template <class T, class S, int C>
void simple_rows_shared(const aft_head& head, bool gate, idx_t begin, idx_t end, idx_t c, const key_sums<T>* sums) {
  write_channels<T, S, C>(head, gate, c, [&](const auto& write) {
    packet<T> mean[array_size<C>];
    unroll<C>([&](auto n) { mean[n] = if_less(zero<T>(), sums[n].den, div(sums[n].num, sums[n].den), sums[n].den); });
    for (idx_t t = begin; t < end; ++t) unroll<C>([&](auto n) { write(t, n, mean[n], broadcast<T>(T(1))); });
  });
}

/// Rows [begin, end) of out, from the sums of `parts` packets: of all keys, or causal of those before `begin`.
template <class T, class S, bool Causal>
void simple_rows(const aft_head& head, bool gate, idx_t begin, idx_t end, idx_t parts, key_sums<T>* sums) {
  const auto rows = [&](idx_t first, idx_t last, bool hidden) {  // a hidden key leaves the means as they are
    for_columns(parts, [&](auto count, idx_t p) {
      if constexpr (Causal)
        if (!hidden) return simple_rows_causal<T, S, count.value>(head, gate, first, last, p * width<T>, sums + p);
      simple_rows_shared<T, S, count.value>(head, gate, first, last, p * width<T>, sums + p);
    });
  };
  if constexpr (Causal)
    head.keys.runs(begin, end, rows);
  else
    rows(begin, end, true);
}

inline constexpr idx_t simple_chunk = 256;  // tokens of a task

/// Every chunk from `first` on gets the sum of the chunks before it where causal, else of all.
template <class T>
void share_sums(const sums_array<T>& sums, idx_t first, idx_t chunks, bool causal) {
  const idx_t end = first + chunks;
  sums.accumulate(first, chunks);
  for (idx_t n = end - 1; causal && n > first; --n) std::copy_n(sums.at(n - 1), sums.parts, sums.at(n));
  for (idx_t n = first; !causal && n + 1 < end; ++n) std::copy_n(sums.at(end - 1), sums.parts, sums.at(n));
  if (causal && chunks > 0) sums.clear(first);
}

template <class S>
struct aft_simple_driver {
  using T = compute_type<S>;

  const aft_tensors<T>& x;

  void run(execution& exec) const {
    run(exec, [](arena&) {}, [&](const sums_array<T>& sums, idx_t chunks) {
      exec.for_each(x.batch * x.heads, [&](idx_t head, int) { share_sums(sums, head * chunks, chunks, x.causal); });
    });
  }

  /// join(sums of all chunks, chunks of a head): every chunk gets the sum of the chunks before it, or of all chunks.
  /// `layout` lays out shared scratch memory for it.
  template <class Layout, class Join>
  void run(execution& exec, const Layout& layout, const Join& join) const {
    const auto limit = exec.limit_threads(x.work(10 * static_cast<double>(x.length)));
    const idx_t heads = x.batch * x.heads, parts = x.parts(), chunks = ceil_div(x.length, simple_chunk);
    const auto sums = exec.shared_scratch([&](arena& memory) {
      layout(memory);
      return sums_array<T>::layout(memory, heads * chunks, parts);
    });
    // body(head, its rows [begin, end), its sums) for every chunk of every head
    const auto for_each_chunk = [&](auto&& body) {
      exec.for_each(heads * chunks, [&](idx_t task, int) {
        const aft_head head = x.head(task / chunks);
        const idx_t begin = task % chunks * simple_chunk;
        body(head, begin, std::clamp(head.length, begin, begin + simple_chunk), sums.at(task));
      });
    };
    for_each_chunk([&](const aft_head& head, idx_t begin, idx_t end, key_sums<T>* s) {
      std::fill_n(s, parts, key_sums<T>{});
      x.elements->add_rows(head, begin, end, parts, s);
    });
    join(sums, chunks);
    for_each_chunk([&](const aft_head& head, idx_t begin, idx_t end, key_sums<T>* s) {
      if (x.causal)
        simple_rows<T, S, true>(head, x.gate, begin, end, parts, s);
      else
        simple_rows<T, S, false>(head, x.gate, begin, end, parts, s);
      x.clear_padding(head, end, (std::min)(begin + simple_chunk, x.length));
    });
  }
};

template <class S>
void run_aft_simple(const aft_tensors<compute_type<S>>& call, execution& exec) {
  aft_simple_driver<S>{call}.run(exec);
}

}}}  // namespace attn::ATTN_ISA::detail

#define ATTN_RUN(S) void run_aft_simple<S>(const aft_tensors<compute_type<S>>&, execution&)
#include <attn/core/detail/compiled.hpp>
