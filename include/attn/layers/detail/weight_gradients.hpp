// attn: what the backward passes of the layers share: sums over tokens, which the gradients of weights are.
//
//   dW = sum over tokens of d^T x,   db = sum of d         d the gradient of the outputs of a token, x its inputs
//
// Tokens go in chunks of gradient_chunk. First every block of token_block tokens is packed, d as tiles and x as panels
// of the register-blocked product, columns where that has rows (and the gradient of x is computed on the way); then
// blocks of dW take the chunk in. Every number of dW is one sum per chunk, and the sum of these in the order of tokens,
// so neither threads nor how many chunks are packed at once change a bit.
//
// A token whose d is 0 adds nothing, whatever its inputs are: so NaN in padding reaches no weight.
#pragma once

#include <attn/core/detail/compensated.hpp>
#include <attn/layers/detail/token_products.hpp>

#include <cstring>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of one sum: whole blocks, and tiles of that depth stay in the first-level cache.
inline constexpr idx_t gradient_chunk = input_block / token_block * token_block;

/// A gradient in memory of any element type.
template <class T>
struct gradient_memory : any_rows<T> {
  bool accumulate;

  template <class S, int Rank>
  gradient_memory(const tensor_view<S, Rank>& x, bool add_to_it) : any_rows<T>(x), accumulate(add_to_it) {}

  /// Numbers [begin, begin + count) of row n.
  void put(idx_t n, idx_t begin, idx_t count, const T* from) const { this->store(n, begin, count, from, accumulate); }
};

template <class T>
bool is_zero(const T* row, idx_t count) {
  packet<T> sum = zero<T>();
  const idx_t whole = count / width<T> * width<T>;
  for (idx_t n = 0; n < whole; n += width<T>) sum = add(sum, abs(load<T>(row + n)));
  T all = sum_lanes(sum);
  for (idx_t n = whole; n < count; ++n) all += std::abs(row[n]);
  return all == T(0);
}

/// a += b
template <class T>
void add_row(T* a, const T* b, idx_t count) {
  const idx_t whole = count / width<T> * width<T>;
  for (idx_t n = 0; n < whole; n += width<T>) store<T>(a + n, add(load<T>(a + n), load<T>(b + n)));
  for (idx_t n = whole; n < count; ++n) a[n] += b[n];
}

/// Tokens that are the sum of two sequences, of which the second may be missing.
template <class T>
struct token_sum {
  input_tokens<T> first, second;

  token_sum(const input_tokens<T>& one) : first(one), second(tensor_view<const T, 3>()) {}
  token_sum(const input_tokens<T>& one, const input_tokens<T>& other) : first(one), second(other) {}

  /// `spare` is memory of one more token.
  void load(idx_t n, T* to, T* spare) const { load(n, 0, first.dim, to, spare); }
  /// Numbers [begin, begin + count) of a token.
  void load(idx_t n, idx_t begin, idx_t count, T* to, T* spare) const {
    first.load(n, begin, count, to);
    if (!second.data) return;
    second.load(n, begin, count, spare);
    add_row(to, spare, count);
  }
};

/// to = the sum; the memory of any of them may be the same.
template <class T>
void add_sequences(const token_sum<T>& sum, const gradient_memory<T>& to, execution& exec) {
  if (!to.given()) return;
  const idx_t dim = sum.first.dim;
  for_each_token<T>(sum.first.count, dim, 2, {.bytes = 3 * sizeof(T)}, exec, [&](idx_t n, idx_t stride, T* rows) {
    sum.load(n, rows, rows + stride);
    to.put(n, 0, dim, rows);
  });
}

/// Sums of `size` numbers over tasks, or none with 0. Those of some tasks are kept until they are added in order.
template <class T>
struct task_sums {
  idx_t size, together;
  T* data;

  task_sums(arena& memory, idx_t numbers, const execution& exec)
      : size(numbers),
        together(exec.active_threads() > 1 ? 4 * exec.active_threads() : 1),
        data(memory.allocate<T>(size > 0 ? (together + 2) * size : 0)) {}

  /// run(task, its sums, which are 0 or a null pointer, worker) for all tasks; returns the sums of all.
  template <class Run>
  T* add_up(idx_t tasks, execution& exec, Run&& run) const {
    if (size == 0) {
      exec.for_each(tasks, [&](idx_t task, int worker) { run(task, static_cast<T*>(nullptr), worker); });
      return nullptr;
    }
    T *const total = data + together * size, *const errors = total + size;
    std::fill_n(total, 2 * size, T(0));
    for (idx_t first = 0; first < tasks; first += together) {
      const idx_t here = (std::min)(together, tasks - first);
      exec.for_each(here, [&](idx_t n, int worker) {
        std::fill_n(data + n * size, size, T(0));
        run(first + n, data + n * size, worker);
      });
      for (idx_t n = 0; n < here; ++n) move_compensated(data + n * size, size, T(1), total, errors);
    }
    settle_compensated(total, errors, size, total);
    return total;
  }
};

// The two sides of a product over tokens ------------------------------------------------------------------------------

/// Where a block of tokens lies in a chunk of `depth` tokens.
struct chunk_place {
  idx_t chunk, depth, first;
};

/// Tokens of some chunks, their numbers in blocks of Wide columns, each [token][Wide]; of pairs two tokens are one.
template <class P, int Wide>
struct column_blocks {
  using T = sum_type<P>;

  idx_t columns = 0;
  P* data = nullptr;

  column_blocks() = default;
  /// With `chunks` 0 nothing is allocated.
  column_blocks(arena& memory, idx_t numbers, idx_t chunks)
      : columns(numbers),
        data(memory.allocate<P>(chunks > 0 ? chunks * operands<P>(gradient_chunk) * padded() + width<T> : 0)) {}

  idx_t padded() const { return round_up(columns, Wide); }
  P* chunk(idx_t n) const { return data + n * operands<P>(gradient_chunk) * padded(); }

  /// Columns [begin, begin + count) of `rows` tokens.
  void put(const chunk_place& place, const row_buffer<T>& from, idx_t rows, idx_t begin, idx_t count) const {
    const idx_t end = begin + count;
    for (idx_t c = begin, next; c < end; c = next) {
      const idx_t block = c / Wide, at = c % Wide;
      next = (std::min)((block + 1) * Wide, end);
      P* to = chunk(place.chunk) + (block * operands<P>(place.depth) + operands<P>(place.first)) * Wide + at;
      const idx_t filled = next - c, spare = next == columns ? Wide - at - filled : 0;
      for (idx_t r = 0; r < rows; r += numbers_of<P>, to += Wide) {
        put_rows(from.row(r) + (c - begin), r + 1 < rows ? from.row(r + 1) + (c - begin) : nullptr, filled, to);
        std::fill_n(to + filled, spare, P{});
      }
    }
  }

 private:
  /// `count` <= Wide numbers of one token, or of a pair of which the second may be missing.
  static void put_rows(const T* first, [[maybe_unused]] const T* second, idx_t count, P* to) {
    if constexpr (numbers_of<P> == 1) {
      if (count == Wide)
        std::memcpy(to, first, Wide * sizeof(T));
      else
        std::copy_n(first, count, to);
    } else {
      constexpr int whole = (Wide + width<T> - 1) / width<T> * width<T>;
      alignas(64) T numbers[2][array_size<whole>] = {};
      P pairs[array_size<whole>];
      std::copy_n(first, count, numbers[0]);
      if (second) std::copy_n(second, count, numbers[1]);
      unroll<whole / width<T>>([&](auto n) {
        const int at = n * width<T>;
        store<P>(pairs + at, pair_lanes(to_bf16(load<T>(numbers[0] + at)), to_bf16(load<T>(numbers[1] + at))));
      });
      std::copy_n(pairs, count, to);
    }
  }
};

template <class P>
using gradient_tiles = column_blocks<P, tile_rows>;
template <class P>
using input_panels = column_blocks<P, panel_width<P>>;

/// The sum of the numbers of an operand packet.
template <class P>
ATTN_INLINE packet<sum_type<P>> sum_of_operands(const packet<P>& x) {
  if constexpr (numbers_of<P> == 1)
    return x;
  else
    return multiply_add<P>(x, broadcast<P>(make_pair(1.0f, 1.0f)), zero<float>());
}

/// The sums of the gradients of one weight and its bias, either of which may be missing.
template <class P>
struct weight_sums {
  using T = sum_type<P>;
  /// dW is split into blocks, each [rows_per_block][columns_per_block].
  static constexpr idx_t rows_per_block = token_block, columns_per_block = 8 * panel_width<T>;

  gradient_memory<T> weight, bias;
  gradient_tiles<P> d;
  input_panels<P> x;
  T *sums, *bias_sums;

  /// The tokens' inputs are packed in `inputs`, which several weights may share.
  weight_sums(arena& memory, const gradient_memory<T>& to_weight, const gradient_memory<T>& to_bias, idx_t outputs,
              const input_panels<P>& inputs, idx_t chunks)
      : weight(to_weight), bias(to_bias), d(memory, outputs, wanted() ? chunks : 0), x(inputs) {
    sums = memory.allocate<T>(weight.given() ? blocks() * rows_per_block * columns_per_block : 0);
    bias_sums = memory.allocate<T>(bias.given() ? round_up(outputs, rows_per_block) : 0);
  }

  bool wanted() const { return weight.given() || bias.given(); }
  idx_t blocks_across() const {
    return weight.given() ? std::max<idx_t>(1, ceil_div(x.columns, columns_per_block)) : 1;
  }
  idx_t blocks() const { return wanted() ? ceil_div(d.columns, rows_per_block) * blocks_across() : 0; }

  struct block {
    idx_t row, rows, column, columns;
    T *sums, *bias_sums;  // null where missing
  };
  block block_at(idx_t n) const {
    const idx_t row = n / blocks_across() * rows_per_block, column = n % blocks_across() * columns_per_block;
    return {row,
            (std::min)(rows_per_block, d.columns - row),
            column,
            (std::min)(columns_per_block, x.columns - column),
            weight.given() ? sums + n * rows_per_block * columns_per_block : nullptr,
            bias.given() && column == 0 ? bias_sums + row : nullptr};
  }

  void clear(const block& p) const {
    if (p.sums) std::fill_n(p.sums, rows_per_block * columns_per_block, T(0));
    if (p.bias_sums) std::fill_n(p.bias_sums, rows_per_block, T(0));
  }

  /// One chunk of `depth` tokens.
  void add_chunk(const block& p, idx_t chunk, idx_t depth) const {
    depth = operands<P>(depth);
    const P* const tiles = d.chunk(chunk) + p.row * depth;
    if (p.sums && p.columns > 0) {
      row_buffer<T> to(p.sums, round_up(p.columns, panel_width<T>));
      const auto left = [&](idx_t r) { return left_operand<P, 1, tile_rows>{tiles + r * depth}; };
      add_products(left, p.rows, x.chunk(chunk) + p.column * depth, depth, to);
    }
    for (idx_t r = 0; p.bias_sums && r < p.rows; r += tile_rows) {
      constexpr int packets = (tile_rows + width<T> - 1) / width<T>;
      packet<T> sum[array_size<packets>];
      unroll<packets>([&](auto n) { sum[n] = zero<T>(); });
      for (const P* t = tiles + r * depth; t < tiles + (r + tile_rows) * depth; t += tile_rows)
        unroll<packets>([&](auto n) { sum[n] = add(sum[n], sum_of_operands<P>(load<P>(t + n * width<T>))); });
      alignas(64) T lanes[packets * width<T>];
      unroll<packets>([&](auto n) { store<T>(lanes + n * width<T>, sum[n]); });
      for (int i = 0; i < tile_rows; ++i) p.bias_sums[r + i] += lanes[i];
    }
  }

  void put(const block& p) const {
    const idx_t stride = round_up(p.columns, panel_width<T>);
    for (idx_t r = 0; p.sums && r < p.rows; ++r) weight.put(p.row + r, p.column, p.columns, p.sums + r * stride);
    if (p.bias_sums) bias.put(0, p.row, p.rows, p.bias_sums);
  }
};

/// Chunks that are packed at once: more threads share the blocks of more of them.
inline idx_t chunks_together(const execution& exec, idx_t tokens) {
  return std::clamp<idx_t>(ceil_div(tokens, gradient_chunk), 1, ceil_div(exec.active_threads(), 4));
}

/// body(first token, rows, place, worker) packs every block of tokens for the sums in `list`.
template <class P, class Body>
void sum_over_tokens(idx_t tokens, idx_t together, std::span<const weight_sums<P>> list, execution& exec, Body&& body) {
  idx_t blocks = 0;
  for (const auto& sums : list) blocks = (std::max)(blocks, sums.blocks());
  const auto for_each_block = [&](auto&& visit) {
    exec.for_each(blocks * std::ssize(list), [&](idx_t task, int) {
      const auto& sums = list[static_cast<std::size_t>(task / blocks)];
      if (const idx_t n = task % blocks; n < sums.blocks()) visit(sums, sums.block_at(n));
    });
  };
  // Without sums all blocks go at once.
  const idx_t step = blocks > 0 ? together * gradient_chunk : std::max<idx_t>(1, tokens);
  for_each_block([](const auto& sums, const auto& block) { sums.clear(block); });
  for (idx_t begin = 0; begin < tokens; begin += step) {
    const idx_t here = (std::min)(step, tokens - begin);
    const auto depth_of = [&](idx_t chunk) { return (std::min)(gradient_chunk, here - chunk * gradient_chunk); };
    exec.for_each(ceil_div(here, token_block), [&](idx_t task, int worker) {
      const idx_t first = task * token_block, chunk = first / gradient_chunk;
      body(begin + first, (std::min)(token_block, here - first),
           chunk_place{chunk, depth_of(chunk), first % gradient_chunk}, worker);
    });
    for_each_block([&](const auto& sums, const auto& block) {
      for (idx_t chunk = 0; chunk * gradient_chunk < here; ++chunk) sums.add_chunk(block, chunk, depth_of(chunk));
    });
  }
  for_each_block([](const auto& sums, const auto& block) { sums.put(block); });
}

/// sums += rows of d times the packed weight, all of its outputs.
template <class P>
void add_token_products(const packed_tokens<P>& d, const weight_panels<P>& weight,
                        const row_buffer<sum_type<P>>& sums) {
  for (idx_t k0 = 0; k0 < d.inputs; k0 += input_block)
    add_products(d.from(k0), d.rows, weight.block(k0), operands<P>((std::min)(input_block, d.inputs - k0)), sums);
}

template <class T>
void clear_buffer(const row_buffer<T>& sums, idx_t rows) {
  std::fill_n(sums.data, round_up(rows, tile_rows) * sums.stride, T(0));
}

}}}  // namespace attn::ATTN_ISA::detail
