// attn: products of tokens and weights, x W^T + b, in three ways.
//
//   1. weight_panels, packed_tokens, multiply_tokens   many tokens: operands packed for the register-blocked product
//   2. few_token_products                              up to token_block tokens: the weight packed a few panels at a
//                                                      time, which stay in the second-level cache: the same sums
//   3. few_token_kernels.hpp                           sequences of up to eight: the weight read once, in place
//
// Every number is one sum whose order depends on the length of its sequence, the number of inputs and the weight's
// strides, not on other rows. Compiled for the operands P and the sums T of products; only the functions that read a
// weight from memory, behind the pointers of linear_weight, depend on its element type.
#pragma once

#include <attn/core/detail/prefetch.hpp>
#include <attn/layers/detail/sequence.hpp>
#include <attn/layers/weight_field.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// Tokens of a task: whole tiles, enough of them to use a panel several times while it is in the caches.
inline constexpr idx_t token_block = 48;

/// A weight [outputs, inputs] and its bias [outputs] in memory of any element type, or packed before.
template <class P>
struct linear_weight {
  using T = sum_type<P>;

  memory_layout weight;
  any_rows<T> bias;
  idx_t outputs, inputs;
  const packed_panels<T>* packed = nullptr;
  /// Packs panels of outputs [begin, begin + count) and inputs [k0, k0 + depth): those of a block.
  void (*pack)(const linear_weight&, idx_t begin, idx_t count, idx_t k0, idx_t depth, P* panels);
  /// A product of few tokens.
  void (*multiply)(const linear_weight&, const few_tokens_call<T>& call);

  template <class S>
  linear_weight(const tensor_view<const S, 2>& w, const tensor_view<const S, 1>& b)
      : weight(w),
        bias(b),
        outputs(w.extent(0)),
        inputs(w.extent(1)),
        pack(pack_as<S>),
        multiply(multiply_as<S>) {}
  template <class S>
  linear_weight(const weight_field<S>& w, const tensor_view<const S, 1>& b)
      : linear_weight(static_cast<const tensor_view<const S, 2>&>(w), b) {
    packed = w.packed();
    if (packed) pack = convert_panels, multiply = multiply_packed;
  }

  bool has_rows() const { return weight.strides[1] == 1; }
  bool has_columns() const { return weight.strides[0] == 1; }
  /// Whether products with sequences of this length read the weight in place. Where its panels are operands already, a
  /// tile of eight rows is as fast for six tokens. Sums in place have an order of their own.
  bool in_place(idx_t length, const execution& exec) const {
    if (exec.invariant()) return false;
    return packed ? length <= (panels(0, 0, 0) ? tokens_together + 1 : tokens_in_place)
                  : length <= tokens_in_place && (has_rows() || has_columns());
  }

  /// The panels of outputs from `begin` on and inputs [k0, k0 + depth), if they were packed before.
  const P* panels(idx_t begin, idx_t k0, idx_t depth) const {
    const P* const all = packed ? packed->template as<P>() : nullptr;
    return all ? all + operands<P>(k0) * round_up(outputs, panel_width<T>) + begin * operands<P>(depth) : nullptr;
  }

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
    // A transposed weight: numbers that are needed together are adjacent. What the next inputs need is fetched, for the
    // processor does not see a pattern in short pieces of rows.
    constexpr idx_t piece = 32;
    const auto row = [&](idx_t k) { return w.row<S>(begin) + (k0 + k) * stride; };
    const idx_t length = operands<P>(depth);
    for (idx_t k = 0; k < depth; k += piece) {
      for (idx_t next = k + piece; next < (std::min)(k + 2 * piece, depth); ++next)
        prefetch_bytes<cache_level::second>(reinterpret_cast<const char*>(row(next)), count * idx_t(sizeof(S)));
      pack_panels<P>(row, k, (std::min)(piece, depth - k), count, 1, panels, round_up(depth, numbers_of<P>));
    }
    constexpr idx_t wide = panel_width<T>;
    const idx_t filled = round_up(count, width<T>);
    for (idx_t k = 0; filled < round_up(count, wide) && k < length; ++k)
      std::fill_n(panels + (filled / wide) * length * wide + k * wide + filled % wide, width<T>, P{});
  }

  /// Packed weights of another storage, in pieces that stay in the first-level cache.
  static void convert_panels(const linear_weight& w, idx_t begin, idx_t count, idx_t k0, idx_t depth, P* panels) {
    constexpr idx_t wide = panel_width<T>, piece = 64;
    for (idx_t o = begin; o < begin + count; o += wide, panels += operands<P>(depth) * wide)
      if constexpr (std::same_as<P, T>) {
        w.packed->load(*w.packed, o, k0, depth, panels);
      } else {
        alignas(64) T numbers[array_size<piece * wide>];
        for (idx_t k = 0; k < depth; k += piece) {
          const idx_t here = (std::min)(piece, depth - k);
          w.packed->load(*w.packed, o, k0 + k, here, numbers);
          pack_panels<P>([&](idx_t i) { return numbers + (i - k) * wide; }, k, here, wide, 1, panels,
                         round_up(depth, numbers_of<P>));
        }
      }
  }

  template <class S>
  static void multiply_as(const linear_weight& w, const few_tokens_call<T>& call) {
    if (w.has_rows())
      products_of_rows(call, w.template row<S>(0), w.weight.strides[0]);
    else
      products_of_columns(call, w.template row<S>(0), w.weight.strides[1]);
  }
  static void multiply_packed(const linear_weight& w, const few_tokens_call<T>& call) {
    w.packed->multiply(*w.packed, call);
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
struct weight_panels {
  using T = sum_type<P>;
  static constexpr idx_t wide = panel_width<T>, outputs_per_block = 4 * wide;

  const linear_weight<P>* from;
  P* own;  // null where the weight was packed before
  const P* panels;
  T* bias;

  weight_panels(arena& memory, const linear_weight<P>& w)
      : from(&w),
        own(w.panels(0, 0, w.inputs) ? nullptr : memory.allocate<P>(padded() * operands<P>(w.inputs))),
        panels(own ? own : w.panels(0, 0, w.inputs)),
        bias(memory.allocate<T>(padded())) {}

  idx_t padded() const { return round_up(from->outputs, wide); }
  const P* block(idx_t k0) const { return panels + operands<P>(k0) * padded(); }

  /// Packing is split into blocks of outputs.
  idx_t blocks() const { return ceil_div(from->outputs, outputs_per_block); }

  void pack(idx_t number) const {
    const idx_t begin = number * outputs_per_block, count = (std::min)(outputs_per_block, from->outputs - begin);
    for (idx_t k0 = 0; own && k0 < from->inputs; k0 += input_block) {
      const idx_t depth = (std::min)(input_block, from->inputs - k0);
      from->pack(*from, begin, count, k0, depth, own + operands<P>(k0) * padded() + begin * operands<P>(depth));
    }
    from->load_bias(begin, count, bias + begin);
    std::fill(bias + begin + count, bias + (std::min)(begin + outputs_per_block, padded()), T(0));
  }
};

template <class P>
void pack_weights(std::span<const weight_panels<P>> list, execution& exec) {
  idx_t blocks = 0;
  for (const auto& weight : list) blocks = (std::max)(blocks, weight.blocks());
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
    return data + operands<P>(k0) * token_block + row * row_operands<P>((std::min)(input_block, inputs - k0));
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
        pack_tile(pointers, here, k0, (std::min)(input_block, inputs - k0), stride, tile(k0, r));
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

/// sums = bias + rows of x times a weight, for `count` outputs; panels(k0, depth) are those of a block of inputs.
template <class P, class Panels>
void multiply_tokens(const packed_tokens<P>& x, const sum_type<P>* bias, idx_t count, Panels&& panels,
                     row_buffer<sum_type<P>>& sums) {
  sums.stride = round_up(count, panel_width<P>);
  sums.begin(bias, x.rows);
  for (idx_t k0 = 0; k0 < x.inputs; k0 += input_block) {
    const idx_t depth = (std::min)(input_block, x.inputs - k0);
    add_products(x.from(k0), x.rows, panels(k0, depth), operands<P>(depth), sums);
  }
}
/// The same for outputs [first, first + count) of a packed weight.
template <class P>
void multiply_tokens(const packed_tokens<P>& x, const weight_panels<P>& weight, idx_t first, idx_t count,
                     row_buffer<sum_type<P>>& sums) {
  const auto panels = [&](idx_t k0, idx_t depth) { return weight.block(k0) + first * operands<P>(depth); };
  multiply_tokens(x, weight.bias + first, count, panels, sums);
}

// Few tokens ----------------------------------------------------------------------------------------------------------

/// Whether few_token_products is used. Its sums are those of multiply_tokens, except where it reads a weight in place,
/// which the length of a sequence decides, not the number of all tokens: a batch gives what its items alone give.
template <class P>
bool has_few_tokens(const input_tokens<sum_type<P>>& x, const linear_weight<P>& weight, const execution& exec) {
  return x.count <= token_block || weight.in_place(x.length, exec);
}

/// A worker's panels of a block of inputs, and sums of up to token_block rows.
template <class P>
struct few_outputs {
  using T = sum_type<P>;
  static constexpr idx_t wide = panel_width<T>, outputs = std::max<idx_t>(outputs_per_task, wide);

  P* panels;
  row_buffer<T> sums;
  T* bias;

  few_outputs(arena& memory, const linear_weight<P>& w)
      : panels(memory.allocate<P>(outputs * operands<P>((std::min)(input_block, w.inputs)))),
        sums(memory, token_block, outputs),
        bias(memory.allocate<T>(outputs)) {}

  /// sums = bias + rows of x times the weight, for its outputs [begin, begin + count).
  void run(const packed_tokens<P>& x, const linear_weight<P>& w, idx_t begin, idx_t count) {
    w.load_bias(begin, count, bias);
    std::fill(bias + count, bias + round_up(count, wide), T(0));
    const auto panels_of = [&](idx_t k0, idx_t depth) {
      const P* const before = w.panels(begin, k0, depth);
      if (!before) w.pack(w, begin, count, k0, depth, panels);
      return before ? before : panels;
    };
    multiply_tokens(x, bias, count, panels_of, sums);
  }
};

/// done(row, output, count, values) for the outputs of `rows` rows of x, up to token_block, bias included, some of them
/// at a time: values are those of outputs [output, output + count). Tasks share the outputs. Rows of x are of whole
/// packets, and belong to sequences of `length` tokens; `packed` is memory to pack them into.
template <class T, class P>
void few_token_products(const row_buffer<T>& x, idx_t rows, idx_t length, const linear_weight<P>& weight,
                        packed_tokens<P>& packed, execution& exec,
                        function_ref<void(idx_t row, idx_t output, idx_t count, T* values)> done) {
  const auto for_outputs = [&](idx_t together, auto&& run) {
    exec.for_each(ceil_div(weight.outputs, together), [&](idx_t task, int worker) {
      run(task * together, (std::min)(together, weight.outputs - task * together), worker);
    });
  };
  if (!weight.in_place(length, exec)) {
    packed.inputs = weight.inputs;
    packed.pack([&](idx_t r) { return x.row(r); }, rows);
    return for_outputs(few_outputs<P>::outputs, [&](idx_t begin, idx_t count, int worker) {
      auto outputs = exec.scratch(worker, [&](arena& m) { return few_outputs<P>(m, weight); });
      outputs.run(packed, weight, begin, count);
      for (idx_t r = 0; r < rows; ++r) done(r, begin, count, outputs.sums.row(r));
    });
  }
  for (idx_t r = 0; r < rows; ++r) std::fill(x.row(r) + weight.inputs, x.row(r) + x.stride, T(0));
  const bool columns = !weight.packed && !weight.has_rows();
  const idx_t share = round_up(ceil_div(weight.outputs, exec.threads()), outputs_per_task);
  for_outputs(columns ? std::clamp(share, outputs_per_task, most_outputs_per_task) : outputs_per_task,
              [&](idx_t begin, idx_t count, int) {
                alignas(64) T bias[most_outputs_per_task], sums[tokens_in_place][most_outputs_per_task];
                weight.load_bias(begin, count, bias);
                for (idx_t r = 0; r < rows; r += tokens_in_place) {
                  const idx_t here = (std::min)(tokens_in_place, rows - r);
                  weight.multiply(weight, {x.row(r), x.stride, here, weight.inputs, begin, begin + count, sums[0]});
                  for (idx_t t = 0; t < here; ++t) {
                    for (idx_t o = 0; o < count; ++o) sums[t][o] = bias[o] + sums[t][o];
                    done(r + t, begin, count, sums[t]);
                  }
                }
              });
}

}}}  // namespace attn::ATTN_ISA::detail
