// attn: the linear layer.
//
//   out = x W^T + b
//
//   attn::project(x, w, out);                       // Eigen matrices: x [length, n], w [m, n], out [length, m]
//   attn::project(x, w, out, {.bias = b}, threads);
//
// Shapes   x [B, L, n], weight [m, n] (a row for every output, as most frameworks keep it; a transposed view serves as
//          well), bias [m], out [B, L, m]. float, double, or Eigen::half / Eigen::bfloat16 in memory with float
//          arithmetic.
// Cost     2 B L n m operations. Scratch: the packed weight, about n m numbers, and 48 (n + m) numbers a thread. With L
//          up to four, as in decoding, the weight is read in place, if its columns have stride 1; scratch is then 48 n
//          numbers at most, and threads share the outputs, 64 a task.
// Throws   std::invalid_argument for shapes that do not fit, before anything is written.
//
// Every number of out is one sum in an order that L, n and the weight's strides decide, whatever stands in the other
// rows. That, and that nothing is allocated, is what Eigen's products cannot promise; these are as fast with Clang 14
// (0.82 of a core's peak) and 1.3 to 1.6 times as fast with GCC 12 (512 x 512 weights, 4096 tokens, AVX-512).
#pragma once

#include <attn/core/detail/tile_product.hpp>
#include <attn/layers/detail/sequence.hpp>

namespace attn::inline ATTN_ISA {

/// Options of project for elements of type S.
template <class S>
struct project_options {
  static_assert(element<S>, "attn: elements must be float, double, Eigen::half or Eigen::bfloat16");
  /// Added to every token's output, [m].
  tensor_view<const S, 1> bias{};
};

namespace detail {

/// Rows of x a task takes: whole tiles, enough of them to use a panel several times while it is near.
inline constexpr index token_block = 48;
/// Products run over this many inputs at a time: a tile of rows then stays in the first-level cache.
inline constexpr index input_stretch = 512;

/// A weight [m, n] and its bias, packed: stretches of input_stretch inputs, each as panels [input][panel_width].
template <class T>
struct packed_weight {
  static constexpr index wide = panel_width<T>, pack_step = 4 * wide;

  T* panels = nullptr;
  T* bias = nullptr;
  index outputs = 0, inputs = 0;

  static packed_weight layout(arena& memory, index outputs, index inputs) {
    packed_weight w;
    w.outputs = outputs;
    w.inputs = inputs;
    w.panels = memory.allocate<T>(w.padded() * inputs);
    w.bias = memory.allocate<T>(w.padded());
    return w;
  }

  index padded() const { return round_up(outputs, wide); }
  const T* stretch(index k0) const { return panels + k0 * padded(); }

  /// Packing falls into pieces of pack_step outputs.
  index pieces() const { return (outputs + pack_step - 1) / pack_step; }

  template <class S>
  void pack(const matrix_view<const S>& weight, const tensor_view<const S, 1>& b, index piece) const {
    const index begin = piece * pack_step, count = std::min(pack_step, outputs - begin);
    for (index k0 = 0; k0 < inputs; k0 += input_stretch) {
      const index depth = std::min(input_stretch, inputs - k0);
      const auto row = [&](index i) { return weight.row(begin + i) + k0 * weight.col_stride; };
      pack_panels_across<T>(row, count, depth, weight.col_stride, panels + k0 * padded() + begin * depth);
    }
    for (index i = begin; i < std::min(begin + pack_step, padded()); ++i)
      bias[i] = b && i < outputs ? static_cast<T>(b(i)) : T(0);
  }
};

/// Up to token_block rows as the left side of products: stretches as above, each as tiles [input][tile_rows].
template <class T>
struct packed_tokens {
  T* data = nullptr;
  index rows = 0, inputs = 0;

  static packed_tokens layout(arena& memory, index inputs) {
    packed_tokens x;
    x.inputs = inputs;
    x.data = memory.allocate<T>(token_block * inputs + width<T>);
    return x;
  }

  T* tile(index k0, index row) const { return data + k0 * token_block + row * std::min(input_stretch, inputs - k0); }

  template <class Row>
  void pack(Row&& row, index count, index col_stride) {
    rows = count;
    for (index k0 = 0; k0 < inputs; k0 += input_stretch)
      for (index r = 0; r < rows; r += tile_rows) {
        const auto part = [&](index i) { return row(r + i) + k0 * col_stride; };
        pack_rows<T>(part, std::min<index>(tile_rows, rows - r), std::min(input_stretch, inputs - k0), col_stride, T(1),
                     tile(k0, r));
      }
  }
};

/// What products are added to: token_block rows of numbers, begun with the bias.
template <class T>
struct output_sums {
  T* data = nullptr;
  index stride = 0;

  static output_sums layout(arena& memory, index outputs) {
    output_sums s;
    s.stride = round_up(outputs, panel_width<T>);
    s.data = memory.allocate<T>(token_block * s.stride);
    return s;
  }

  T* row(index r) const { return data + r * stride; }

  void begin(const T* bias, index rows) const {
    for (index r = 0; r < round_up(rows, tile_rows); ++r) std::copy(bias, bias + stride, row(r));
  }
};

/// sums += tiles x panels over one stretch of `depth` inputs. Tile r lies at tiles + r * depth.
template <class T>
void add_products(const T* tiles, index rows, const T* panels, index depth, const output_sums<T>& sums) {
  constexpr index wide = panel_width<T>;
  for (index n = 0; n < sums.stride; n += wide)
    for (index r = 0; r < rows; r += tile_rows)
      with_tile_height(std::min<index>(tile_rows, rows - r), [&](auto height) {
        T* const corner = sums.row(r) + n;
        tile_product<T, height.value, 2>(packed_rows<T>{tiles + r * depth}, panels + n * depth, depth,
                                         [&](auto m, auto half, const auto& x) {
                                           T* const s = corner + m * sums.stride + half * width<T>;
                                           store<T>(s, add(load<T>(s), x));
                                         });
      });
}

/// sums = bias + rows of x times the weight, for packed rows.
template <class T>
void multiply_tokens(const packed_tokens<T>& x, const packed_weight<T>& weight, const output_sums<T>& sums) {
  sums.begin(weight.bias, x.rows);
  for (index k0 = 0; k0 < x.inputs; k0 += input_stretch)
    add_products(x.tile(k0, 0), x.rows, weight.stretch(k0), std::min(input_stretch, x.inputs - k0), sums);
}

/// Sequences of up to this many tokens, as in decoding, are multiplied with the weight where it lies: packing it would
/// take longer than the products.
inline constexpr index tokens_in_place = 4;

/// Rows of numbers, each filled up with zeros to whole packets.
template <class T>
struct padded_rows {
  T* data = nullptr;
  index stride = 0;

  static padded_rows layout(arena& memory, index rows, index count) {
    padded_rows r;
    r.stride = round_up(count, width<T>);
    r.data = memory.allocate<T>(rows * r.stride);
    return r;
  }
  T* row(index r) const { return data + r * stride; }
  void clear_padding(index rows, index count) const {
    for (index r = 0; r < rows; ++r) std::fill(row(r) + count, row(r) + stride, T(0));
  }
};

/// Outputs a task of dot products takes.
inline constexpr index dot_step = 64;

/// done(token, output, sum) for N tokens from `first` on, the last of `count` again to fill up, and all of outputs
/// [begin, end), some rows of the weight at a time.
template <class T, int N, class S, class Done>
void dot_products(const padded_rows<T>& x, index first, index count, const matrix_view<const S>& weight, index begin,
                  index end, Done&& done) {
  constexpr int group = N == 1 ? 8 : 4;
  const T* tokens[N];
  for (int t = 0; t < N; ++t) tokens[t] = x.row(first + std::min<index>(t, count - 1));
  const index whole = weight.cols / width<T> * width<T>;
  for (index o = begin; o < end; o += group) {
    const S* outputs[group];
    for (int i = 0; i < group; ++i) outputs[i] = weight.row(std::min(o + i, end - 1));
    packet<T> sums[group][N];
    unroll<group>([&](auto i) { unroll<N>([&](auto t) { sums[i][t] = zero<T>(); }); });
    const auto step = [&](index k, auto load_weight) {
      unroll<group>([&](auto i) {
        const packet<T> w = load_weight(outputs[i] + k);
        unroll<N>([&](auto t) { sums[i][t] = fma(w, load<T>(tokens[t] + k), sums[i][t]); });
      });
    };
    for (index k = 0; k < whole; k += width<T>) step(k, [](const S* p) { return load_as<T>(p); });
    if (whole < weight.cols) step(whole, [&](const S* p) { return gather_part<T>(p, 1, weight.cols - whole); });
    for (int i = 0; i < group && o + i < end; ++i)
      for (int t = 0; t < N && t < count; ++t) done(first + t, o + i, sum_lanes(sums[i][t]));
  }
}

template <class T, class S, class Done>
void dot_products(const padded_rows<T>& x, index rows, const matrix_view<const S>& weight, index begin, index end,
                  Done&& done) {
  for (index r = 0; r < rows; r += tokens_in_place) {
    const index count = std::min(tokens_in_place, rows - r);
    if (count == 1)
      dot_products<T, 1>(x, r, count, weight, begin, end, done);
    else
      dot_products<T, tokens_in_place>(x, r, count, weight, begin, end, done);
  }
}

template <class S>
compute_type<S> bias_of(const tensor_view<const S, 1>& bias, index output) {
  return bias ? static_cast<compute_type<S>>(bias(output)) : compute_type<S>(0);
}

/// One of the projections of a sequence.
template <class S>
struct token_projection {
  tensor_view<const S, 2> weight;
  tensor_view<const S, 1> bias;
  tensor_view<S, 3> out;
};

/// A projection with the weight where it lies, token_block rows at a time.
template <class S>
void project_in_place(const tensor_view<const S, 3>& x, const token_projection<S>& p, execution& exec) {
  using T = compute_type<S>;
  const index inputs = x.extent(2), outputs = p.weight.extent(0), rows = tokens(x);
  const auto from = exec.shared_scratch(
      [&](arena& memory) { return padded_rows<T>::layout(memory, std::min(token_block, rows), inputs); });
  for (index first = 0; first < rows; first += token_block) {
    const index count = std::min(token_block, rows - first);
    for (index r = 0; r < count; ++r) load_row(token(x, first + r), x.stride(2), inputs, from.row(r));
    from.clear_padding(count, inputs);
    exec.for_each((outputs + dot_step - 1) / dot_step, [&](index task, int) {
      const index begin = task * dot_step, end = std::min(begin + dot_step, outputs);
      dot_products<T>(from, count, matrix_of(p.weight), begin, end, [&](index r, index o, T sum) {
        token(p.out, first + r)[o * p.out.stride(2)] = static_cast<S>(bias_of(p.bias, o) + sum);
      });
    });
  }
}

/// Several projections of one sequence, with the weights packed.
template <class S>
void project_packed(const tensor_view<const S, 3>& x, std::span<const token_projection<S>> list, execution& exec) {
  using T = compute_type<S>;
  const index inputs = x.extent(2), rows = tokens(x);
  index pieces = 0, widest = 0;
  const auto weights = exec.shared_scratch([&](arena& memory) {
    auto* packed = memory.allocate<packed_weight<T>>(std::ssize(list));
    for (std::size_t n = 0; n < list.size(); ++n) {
      const auto w = packed_weight<T>::layout(memory, list[n].weight.extent(0), inputs);
      if (packed) packed[n] = w;
    }
    return packed;
  });
  for (std::size_t n = 0; n < list.size(); ++n) {
    pieces = std::max(pieces, weights[n].pieces());
    widest = std::max(widest, weights[n].outputs);
  }
  exec.for_each(pieces * std::ssize(list), [&](index task, int) {
    const auto n = static_cast<std::size_t>(task / pieces);
    if (task % pieces < weights[n].pieces()) weights[n].pack(matrix_of(list[n].weight), list[n].bias, task % pieces);
  });
  exec.for_each((rows + token_block - 1) / token_block, [&](index task, int worker) {
    const index begin = task * token_block, count = std::min(token_block, rows - begin);
    auto [packed, sums] = exec.scratch(worker, [&](arena& memory) {
      auto tiles = packed_tokens<T>::layout(memory, inputs);
      return std::pair{tiles, output_sums<T>::layout(memory, widest)};
    });
    packed.pack([&](index r) { return token(x, begin + r); }, count, x.stride(2));
    for (std::size_t n = 0; n < list.size(); ++n) {
      sums.stride = weights[n].padded();
      multiply_tokens(packed, weights[n], sums);
      for (index r = 0; r < count; ++r)
        store_row(sums.row(r), weights[n].outputs, token(list[n].out, begin + r), list[n].out.stride(2));
    }
  });
}

/// Several projections of one sequence, after their checks.
template <class S>
void run_projections(const tensor_view<const S, 3>& x, std::span<const token_projection<S>> list, execution& exec) {
  if (tokens(x) == 0) return;
  if (x.extent(1) > tokens_in_place) return project_packed(x, list, exec);
  for (const auto& p : list)  // each on its own, so that no weight's strides decide over the results of another
    if (p.weight.stride(1) == 1)
      project_in_place(x, p, exec);
    else
      project_packed<S>(x, {&p, 1}, exec);
}

/// A weight [m, n] for inputs of n, and its bias if given.
template <class S>
void check_weight(const validator& check, const char* what, const tensor_view<const S, 2>& weight, const char* bias_name,
                  const tensor_view<const S, 1>& bias, index inputs, const tensor_view<S, 3>& out) {
  check_parameter(check, what, weight, "out", out);
  if (weight.extent(1) != inputs) check.fail(text({what, " columns = dim of its input ", inputs}), weight.extent(1));
  check.fits(what, {round_up(weight.extent(0), panel_width<compute_type<S>>), inputs});
  if (!bias) return;
  check_parameter(check, bias_name, bias, "out", out);
  check.one_per(bias_name, "row of its weight", weight.extent(0), bias.extent(0));
}

}  // namespace detail

/// out = x W^T + b, by an execution, which may be left out. See the top of the file.
template <viewable X, viewable W, viewable O>
void project(const X& x, const W& weight, O&& out, const project_options<element_of<const X&>>& options,
             execution& exec) {
  detail::require_sequences<const X&, O>();
  using S = element_of<const X&>;
  static_assert(std::same_as<element_of<const W&>, S>, "attn: a weight must have the element type of x");
  const tensor_view<const S, 3> from = as_sequence(x);
  const tensor_view<S, 3> to = as_sequence(out);
  const tensor_view<const S, 2> w(weight);
  const detail::validator check("project");
  detail::check_sequences<S>(check, from, to, w.extent(0));
  detail::check_weight(check, "weight", w, "bias", options.bias, from.extent(2), to);
  check.no_alias("out", to, "x", from);
  const detail::token_projection<S> one{w, options.bias, to};
  detail::run_projections<S>(from, {&one, 1}, exec);
}

template <viewable X, viewable W, viewable O>
void project(const X& x, const W& weight, O&& out, const project_options<element_of<const X&>>& options = {}) {
  execution serial;
  project(x, weight, out, options, serial);
}

}  // namespace attn
