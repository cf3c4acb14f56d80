// attn: products of up to eight tokens and a weight that is read once, where it lies.
//
//   1. products_of_rows      numbers of a row of the weight are adjacent: dot products over packets of inputs
//   2. products_of_columns   numbers of a column are adjacent: packets of outputs, some inputs at a time
//   3. products_of_panels    weights packed before the call, of any storage: packets of outputs, kept in registers
//
// Each writes sums[t][o] = x[t] . W[begin + o] for o < end - begin, with sums [tokens_in_place][most_outputs_per_task].
#pragma once

#include <attn/core/detail/packing.hpp>
#include <attn/core/detail/quantised.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Products run over blocks of this many inputs: a tile of rows then stays in the first-level cache.
inline constexpr idx_t input_block = 512;
/// Sequences of up to this many tokens, as in decoding, are multiplied with the weight in place: packing it would take
/// longer than the products. They are taken four at a time, with what is in the first-level cache.
inline constexpr idx_t tokens_in_place = 8, tokens_together = 4;
/// Outputs of a task, where it reads columns; of others a few panels.
inline constexpr idx_t most_outputs_per_task = 512, outputs_per_task = 64;

template <int N, class T>
struct some_rows;

/// Up to tokens_in_place rows of numbers in the compute type, padded with zeros to whole packets, and their sums.
template <class T>
struct few_tokens_call {
  const T* x;
  idx_t x_stride, tokens, inputs, begin, end;
  T* sums;

  /// f(some_rows<N>) for all rows.
  template <class F>
  ATTN_INLINE void for_rows(F&& f) const {
    for (idx_t t = 0; t < tokens; t += tokens_together)
      if (tokens - t == 1)
        f(some_rows<1, T>(*this, t));
      else if (tokens - t == 2)
        f(some_rows<2, T>(*this, t));
      else
        f(some_rows<int(tokens_together), T>(*this, t));
  }
};

/// N of the rows, the last of them again to fill up, and their sums, `count` of them.
template <int N, class T>
struct some_rows {
  const T* x[array_size<N>];
  T* sums[array_size<N>];
  int count;

  some_rows(const few_tokens_call<T>& call, idx_t first)
      : count(static_cast<int>(std::min<idx_t>(N, call.tokens - first))) {
    for (int t = 0; t < N; ++t) {
      const idx_t row = first + (std::min)(t, count - 1);
      x[t] = call.x + row * call.x_stride, sums[t] = call.sums + row * most_outputs_per_task;
    }
  }
};

/// Adds the products of inputs [begin, end), for N tokens and rows [o, o + Rows) of the weight; the last row is
/// repeated for those beyond call.end. In one fold for all of the tile: a lambda for each element would take several
/// times as long to compile.
template <int Rows, int N, class T, class S>
void row_tile(const few_tokens_call<T>& call, const some_rows<N, T>& tokens, const S* weight, idx_t stride, idx_t o,
              idx_t begin, idx_t end) {
  [&]<int... At, int... J, int... R>(std::integer_sequence<int, At...>, std::integer_sequence<int, J...>,
                                    std::integer_sequence<int, R...>) {
    const S* const row[] = {weight + (std::min)(o + R, call.end - 1) * stride...};
    packet<T> acc[] = {(void(At), zero<T>())...};
    const idx_t whole = end - (end - begin) % width<T>;
    for (idx_t k = begin; k < whole; k += width<T>) {
      const packet<T> w[] = {load_as<T>(row[R] + k)...}, x[] = {load<T>(tokens.x[J] + k)...};
      ((acc[At] = fma(w[At / N], x[At % N], acc[At])), ...);
    }
    if (whole < end) {
      const packet<T> w[] = {gather_part<T>(row[R] + whole, 1, end - whole)...},
                      x[] = {load<T>(tokens.x[J] + whole)...};
      ((acc[At] = fma(w[At / N], x[At % N], acc[At])), ...);
    }
    for (int i = 0; i < Rows && o + i < call.end; ++i)
      for (int t = 0; t < tokens.count; ++t) {
        T& sum = tokens.sums[t][o + i - call.begin];
        sum = (begin == 0 ? T(0) : sum) + sum_lanes(acc[i * N + t]);
      }
  }(std::make_integer_sequence<int, Rows * N>{}, std::make_integer_sequence<int, N>{},
    std::make_integer_sequence<int, Rows>{});
}

template <class T, class S>
void products_of_rows(const few_tokens_call<T>& call, const S* weight, idx_t stride) {
  constexpr idx_t piece = 4096;  // of inputs: longer sums lose digits to what is large among them
  for (idx_t o = call.begin; o < call.end; o += 8)
    for (idx_t k = 0; k == 0 || k < call.inputs; k += piece)
      call.for_rows([&]<int N>(const some_rows<N, T>& tokens) {
        constexpr int rows = N == 1 ? 8 : 4;
        for (idx_t i = o; i < (std::min)(o + 8, call.end); i += rows)
          row_tile<rows>(call, tokens, weight, stride, i, k, (std::min)(k + piece, call.inputs));
      });
}

/// Inputs whose products are summed before they are added to those before them.
inline constexpr int column_group = 8;

/// Adds the products of a group of inputs and outputs [begin, end), whole packets, to the sums of N tokens. row[i]
/// points to the number of input i and output `begin`.
template <int N, class T, class S>
[[gnu::noinline]] void add_columns(const some_rows<N, T>& tokens, const T (&factors)[column_group][tokens_together],
                                   const S* const (&row)[column_group], idx_t begin, idx_t end) {
  [&]<int... At, int... J>(std::integer_sequence<int, At...>, std::integer_sequence<int, J...>) {
    const packet<T> factor[] = {broadcast<T>(factors[At / N][At % N])...};
    for (idx_t o = begin; o < end; o += width<T>) {
      const packet<T> w[] = {load_as<T>(row[J] + (o - begin))...};
      packet<T> acc[array_size<N>];
      for (packet<T>& x : acc) x = zero<T>();
      ((acc[At % N] = fma(factor[At], w[At / N], acc[At % N])), ...);
      for (int t = 0; t < N; ++t) acc[t] = add(load<T>(tokens.sums[t] + o), acc[t]);  // some may be of the same row
      for (int t = 0; t < N; ++t) store<T>(tokens.sums[t] + o, acc[t]);
    }
  }(std::make_integer_sequence<int, column_group * N>{}, std::make_integer_sequence<int, column_group>{});
}

/// Some inputs at a time over all outputs of the task, so that several rows of memory are read on side by side.
template <class T, class S>
void products_of_columns(const few_tokens_call<T>& call, const S* weight, idx_t stride) {
  const idx_t count = call.end - call.begin, whole = count / width<T> * width<T>;
  for (idx_t t = 0; t < call.tokens; ++t)
    std::fill_n(call.sums + t * most_outputs_per_task, round_up(count, width<T>), T(0));
  S rest[column_group][width<T>] = {}, none[most_outputs_per_task] = {};
  for (idx_t k = 0; k < call.inputs; k += column_group) {
    const S *row[column_group], *last[column_group];
    for (idx_t i = 0; i < column_group; ++i) {
      row[i] = k + i < call.inputs ? weight + (k + i) * stride + call.begin : none;
      std::copy_n(row[i] + whole, count - whole, rest[i]);
      last[i] = rest[i];
    }
    call.for_rows([&]<int N>(const some_rows<N, T>& tokens) {
      T factors[column_group][tokens_together] = {};
      for (idx_t i = 0; i < std::min<idx_t>(column_group, call.inputs - k); ++i)
        for (int t = 0; t < N; ++t) factors[i][t] = tokens.x[t][k + i];
      add_columns(tokens, factors, row, 0, whole);
      if (whole < count) add_columns(tokens, factors, last, whole, count);
    });
  }
}

// Packed weights ------------------------------------------------------------------------------------------------------

/// A panel of weights stored as Stored: numbers [input][panel_width], in bf16 pairs of them.
template <class Stored>
struct stored_panel {
  static constexpr bool in_pairs = std::same_as<Stored, Eigen::bfloat16>;
  using T = compute_type<Stored>;
  using number = std::conditional_t<in_pairs, bf16_pair, Stored>;
  static constexpr idx_t wide = panel_width<T>;
  static constexpr idx_t numbers(idx_t depth) { return in_pairs ? operands<bf16_pair>(depth) : depth; }

  const number* data;
  ATTN_INLINE packet<T> load(idx_t k, int n) const {
    if constexpr (in_pairs) {
      std::uint32_t bits[array_size<width<T>>];
      std::memcpy(bits, data + k / 2 * wide + n, sizeof bits);
      for (std::uint32_t& x : bits) x = k % 2 ? x & 0xffff0000u : x << 16;
      packet<T> x;
      std::memcpy(&x, bits, sizeof x);
      return x;
    } else if constexpr (std::same_as<Stored, std::int8_t>) {
      return load_codes(data + k * wide + n);
    } else {
      return load_as<T>(data + k * wide + n);
    }
  }
};

/// Panel after panel: panel(begin, k0) is that of outputs [begin, begin + wide) and the inputs of a block; scales, if
/// given, are those of the outputs.
template <class T, class Panel>
void products_of_panels(const few_tokens_call<T>& call, const Panel& panel, const T* scales) {
  constexpr idx_t wide = panel_width<T>;
  for (idx_t o = call.begin; o < call.end; o += wide)
    call.for_rows([&]<int N>(const some_rows<N, T>& tokens) {
      packet<T> sums[array_size<N>][2];
      unroll<N>([&](auto t) { sums[t][0] = sums[t][1] = zero<T>(); });
      for (idx_t k0 = 0; k0 < call.inputs; k0 += input_block) {
        const idx_t depth = (std::min)(input_block, call.inputs - k0);
        const auto weights = panel(o, k0);
        packet<T> acc[array_size<N>][2];
        unroll<N>([&](auto t) { acc[t][0] = acc[t][1] = zero<T>(); });
        for (idx_t k = 0; k < depth; ++k) {
          const packet<T> left = weights.load(k, 0), right = weights.load(k, width<T>);
          unroll<N>([&](auto t) __attribute__((always_inline)) {
            const packet<T> x = broadcast<T>(tokens.x[t][k0 + k]);
            acc[t][0] = fma(x, left, acc[t][0]), acc[t][1] = fma(x, right, acc[t][1]);
          });
        }
        unroll<N>([&](auto t) { sums[t][0] = add(sums[t][0], acc[t][0]), sums[t][1] = add(sums[t][1], acc[t][1]); });
      }
      for (int t = 0; t < tokens.count; ++t)
        for (int half = 0; half < 2; ++half) {
          const idx_t at = o + half * width<T>;
          store<T>(tokens.sums[t] + at - call.begin, scales ? mul(sums[t][half], load<T>(scales + at)) : sums[t][half]);
        }
    });
}

}}}  // namespace attn::ATTN_ISA::detail
