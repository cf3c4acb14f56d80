// attn: products of tokens and weights, x W^T + b, in two ways.
//
//   1. packed_weight, packed_tokens, multiply_tokens   many tokens: operands packed for the register-blocked product
//   2. few_token_products                              few tokens: the weight read once, in place
//
// Every number is one sum whose order depends on which of the two is used and on the number of inputs, not on other
// rows. Compiled for the operands P and the sums T of products; only the functions that read a weight from memory,
// behind the pointers of linear_weight, depend on its element type.
#pragma once

#include <attn/layers/detail/sequence.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of a task: whole tiles, enough of them to use a panel several times while it is in the caches.
inline constexpr idx_t token_block = 48;
/// Products run over blocks of this many inputs: a tile of rows then stays in the first-level cache.
inline constexpr idx_t input_block = 512;
/// Sequences of up to this many tokens, as in decoding, are multiplied with the weight in place: packing it would take
/// longer than the products.
inline constexpr idx_t tokens_in_place = 4;
/// Outputs of a task of few_token_products.
inline constexpr idx_t outputs_per_task = 64;

/// A weight [outputs, inputs] and its bias [outputs] in memory of any element type.
template <class P>
struct linear_weight {
  using T = sum_type<P>;

  memory_layout weight;
  any_rows<T> bias;
  idx_t outputs, inputs;
  /// Packs panels of outputs [begin, begin + count) and inputs [k0, k0 + depth).
  void (*pack)(const linear_weight&, idx_t begin, idx_t count, idx_t k0, idx_t depth, P* panels);
  /// sums[t][o] = x[t] . W[begin + o] for o < end - begin, sums being [tokens_in_place][outputs_per_task]. Rows of x
  /// are padded with zeros to whole packets.
  void (*multiply)(const linear_weight&, const T* x, idx_t x_stride, idx_t tokens, idx_t begin, idx_t end, T* sums);

  template <class S>
  linear_weight(const tensor_view<const S, 2>& w, const tensor_view<const S, 1>& b)
      : weight(w),
        bias(b),
        outputs(w.extent(0)),
        inputs(w.extent(1)),
        pack(pack_as<S>),
        multiply(multiply_as<S>) {}

  bool readable_in_place() const { return weight.strides[1] == 1; }

  void load_bias(idx_t begin, idx_t count, T* to) const { bias.load_or(T(0), begin, count, to); }

 private:
  template <class S>
  const S* row(idx_t i) const {
    return reinterpret_cast<const S*>(weight.data) + i * weight.strides[0];
  }

  template <class S>
  static void pack_as(const linear_weight& w, idx_t begin, idx_t count, idx_t k0, idx_t depth, P* panels) {
    const idx_t stride = w.weight.strides[1];
    if (w.weight.strides[0] != 1) {
      const auto row = [&](idx_t i) { return w.row<S>(begin + i) + k0 * stride; };
      return pack_panels_across<P>(row, count, depth, stride, panels);
    }
    // A transposed weight: numbers that are needed together are adjacent.
    const auto row = [&](idx_t k) { return w.row<S>(begin) + (k0 + k) * stride; };
    const idx_t length = operands<P>(depth);
    pack_panels<P>(row, 0, depth, count, 1, panels, round_up(depth, numbers_of<P>));
    constexpr idx_t wide = panel_width<T>;
    const idx_t filled = round_up(count, width<T>);
    for (idx_t k = 0; filled < round_up(count, wide) && k < length; ++k)
      std::fill_n(panels + (filled / wide) * length * wide + k * wide + filled % wide, width<T>, P{});
  }

  template <class S>
  static void multiply_as(const linear_weight& w, const T* x, idx_t x_stride, idx_t tokens, idx_t begin, idx_t end,
                          T* sums) {
    if (tokens == 1)
      dot_products<1, S>(w, x, x_stride, tokens, begin, end, sums);
    else
      dot_products<tokens_in_place, S>(w, x, x_stride, tokens, begin, end, sums);
  }

  /// For N tokens, the last of `tokens` again to fill up, and all outputs, some rows of the weight at a time.
  template <int N, class S>
  static void dot_products(const linear_weight& w, const T* x, idx_t x_stride, idx_t tokens, idx_t begin, idx_t end,
                           T* sums) {
    constexpr int rows = N == 1 ? 8 : 4;
    const T* token[array_size<N>];
    for (int t = 0; t < N; ++t) token[t] = x + std::min<idx_t>(t, tokens - 1) * x_stride;
    const idx_t whole = w.inputs / width<T> * width<T>;
    for (idx_t o = begin; o < end; o += rows) {
      const S* row[array_size<rows>];
      for (int i = 0; i < rows; ++i) row[i] = w.template row<S>(std::min(o + i, end - 1));
      packet<T> acc[array_size<rows>][array_size<N>];
      unroll<rows>([&](auto i) { unroll<N>([&](auto t) { acc[i][t] = zero<T>(); }); });
      // GCC 12 keeps the lambdas of the second call out of line unless told: 1.6 times as slow
      const auto step = [&](idx_t k, auto load_weight) __attribute__((always_inline)) {
        unroll<rows>([&](auto i) __attribute__((always_inline)) {
          const packet<T> factor = load_weight(row[i] + k);
          unroll<N>([&](auto t)
                        __attribute__((always_inline)) { acc[i][t] = fma(factor, load<T>(token[t] + k), acc[i][t]); });
        });
      };
      for (idx_t k = 0; k < whole; k += width<T>) step(k, [](const S* p) { return load_as<T>(p); });
      if (whole < w.inputs) step(whole, [&](const S* p) { return gather_part<T>(p, 1, w.inputs - whole); });
      for (int i = 0; i < rows && o + i < end; ++i)
        for (int t = 0; t < N && t < tokens; ++t) sums[t * outputs_per_task + o + i - begin] = sum_lanes(acc[i][t]);
    }
  }
};

/// Rows of numbers in scratch memory, their stride a multiple of `step`.
template <class T>
struct row_buffer {
  idx_t stride;
  T* data;

  row_buffer(arena& memory, idx_t rows, idx_t count, idx_t step = 1)
      : stride(round_up(count, step)), data(memory.allocate<T>(rows * stride)) {}
  row_buffer(T* memory, idx_t numbers) : stride(numbers), data(memory) {}
  T* row(idx_t r) const { return data + r * stride; }

  /// Begins whole tiles of sums with the bias.
  void begin(const T* bias, idx_t rows) const {
    for (idx_t r = 0; r < round_up(rows, tile_rows); ++r) std::copy(bias, bias + stride, row(r));
  }
};

// Many tokens ---------------------------------------------------------------------------------------------------------

/// A weight and its bias, packed: blocks of input_block inputs, each as panels [input][panel_width].
template <class P>
struct packed_weight {
  using T = sum_type<P>;
  static constexpr idx_t wide = panel_width<T>, outputs_per_block = 4 * wide;

  const linear_weight<P>* from;
  P* panels;
  T* bias;

  packed_weight(arena& memory, const linear_weight<P>& w)
      : from(&w), panels(memory.allocate<P>(padded() * operands<P>(w.inputs))), bias(memory.allocate<T>(padded())) {}

  idx_t padded() const { return round_up(from->outputs, wide); }
  P* block(idx_t k0) const { return panels + operands<P>(k0) * padded(); }

  /// Packing is split into blocks of outputs.
  idx_t blocks() const { return ceil_div(from->outputs, outputs_per_block); }

  void pack(idx_t number) const {
    const idx_t begin = number * outputs_per_block, count = std::min(outputs_per_block, from->outputs - begin);
    for (idx_t k0 = 0; k0 < from->inputs; k0 += input_block) {
      const idx_t depth = std::min(input_block, from->inputs - k0);
      from->pack(*from, begin, count, k0, depth, block(k0) + begin * operands<P>(depth));
    }
    from->load_bias(begin, count, bias + begin);
    std::fill(bias + begin + count, bias + std::min(begin + outputs_per_block, padded()), T(0));
  }
};

template <class P>
void pack_weights(std::span<const packed_weight<P>> list, execution& exec) {
  idx_t blocks = 0;
  for (const auto& weight : list) blocks = std::max(blocks, weight.blocks());
  exec.for_each(blocks * std::ssize(list), [&](idx_t task, int) {
    const auto& weight = list[static_cast<std::size_t>(task / blocks)];
    if (const idx_t block = task % blocks; block < weight.blocks()) weight.pack(block);
  });
}

/// Up to token_block rows as the left side of products: blocks of inputs as above, each as tiles [input][tile_rows].
template <class P>
struct packed_tokens {
  using T = sum_type<P>;

  P* data;
  idx_t inputs, rows = 0;

  packed_tokens(arena& memory, idx_t numbers)
      : data(memory.allocate<P>(token_block * row_operands<P>(numbers))), inputs(numbers) {}

  P* tile(idx_t k0, idx_t row) const {
    return data + operands<P>(k0) * token_block + row * row_operands<P>(std::min(input_block, inputs - k0));
  }

  /// The block of inputs from k0 on as left operands.
  auto from(idx_t k0) const {
    return [=, this](idx_t row) { return packed_rows<P>{tile(k0, row)}; };
  }

  /// row(r) points to row r; its numbers, `stride` apart, are what `pack_tile` reads.
  template <class Row>
  void pack(Row&& row, idx_t count, idx_t stride = 1,
            typename token_packing<T>::template pack<P>* pack_tile = pack_token_tile<P, T>()) {
    rows = count;
    for (idx_t k0 = 0; k0 < inputs; k0 += input_block)
      for (idx_t r = 0; r < rows; r += tile_rows) {
        const idx_t here = std::min<idx_t>(tile_rows, rows - r);
        const void* pointers[tile_rows];
        for (idx_t i = 0; i < here; ++i) pointers[i] = row(r + i);
        pack_tile(pointers, here, k0, std::min(input_block, inputs - k0), stride, tile(k0, r));
      }
  }
};

/// sums += rows x panels over one block of `depth` operands; left(r) is the left operand from row r on.
template <class P, class Left>
[[gnu::noinline]] void add_products(const Left& left, idx_t rows, const P* panels, idx_t depth,
                                    const row_buffer<sum_type<P>>& sums) {
  using T = sum_type<P>;
  constexpr idx_t wide = panel_width<T>;
  for (idx_t n = 0; n < sums.stride; n += wide)
    for (idx_t r = 0; r < rows; r += tile_rows)
      with_tile_height(std::min<idx_t>(tile_rows, rows - r), [&](auto height) {
        T* const corner = sums.row(r) + n;
        tile_product<P, height.value, 2>(left(r), panels + n * depth, depth, [&](auto m, auto half, const auto& x) {
          T* const s = corner + m * sums.stride + half * width<T>;
          store<T>(s, add(load<T>(s), x));
        });
      });
}

/// sums = bias + rows of x times the weight, for its outputs [first, first + count).
template <class P>
void multiply_tokens(const packed_tokens<P>& x, const packed_weight<P>& weight, idx_t first, idx_t count,
                     row_buffer<sum_type<P>>& sums) {
  sums.stride = round_up(count, panel_width<P>);
  sums.begin(weight.bias + first, x.rows);
  for (idx_t k0 = 0; k0 < x.inputs; k0 += input_block) {
    const idx_t depth = operands<P>(std::min(input_block, x.inputs - k0));
    add_products(x.from(k0), x.rows, weight.block(k0) + first * depth, depth, sums);
  }
}

// Few tokens ----------------------------------------------------------------------------------------------------------

/// done(row, output, count, values) for the outputs of `rows` rows of x, bias included, some of them at a time: values
/// are those of outputs [output, output + count). Tasks share the outputs. Rows of x are of whole packets.
template <class T, class P>
void few_token_products(const row_buffer<T>& x, idx_t rows, const linear_weight<P>& weight, execution& exec,
                        function_ref<void(idx_t row, idx_t output, idx_t count, T* values)> done) {
  for (idx_t r = 0; r < rows; ++r) std::fill(x.row(r) + weight.inputs, x.row(r) + x.stride, T(0));
  exec.for_each(ceil_div(weight.outputs, outputs_per_task), [&](idx_t task, int) {
    const idx_t begin = task * outputs_per_task, end = std::min(begin + outputs_per_task, weight.outputs);
    T bias[outputs_per_task], sums[tokens_in_place][outputs_per_task];
    weight.load_bias(begin, end - begin, bias);
    for (idx_t r = 0; r < rows; r += tokens_in_place) {
      const idx_t count = std::min(tokens_in_place, rows - r);
      weight.multiply(weight, x.row(r), x.stride, count, begin, end, sums[0]);
      for (idx_t t = 0; t < count; ++t) {
        for (idx_t o = 0; o < end - begin; ++o) sums[t][o] = bias[o] + sums[t][o];
        done(r + t, begin, end - begin, sums[t]);
      }
    }
  });
}

}}}  // namespace attn::ATTN_ISA::detail
