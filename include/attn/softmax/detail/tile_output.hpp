// attn: step 4 of blockwise attention: out = out * rescale + weights times values.
#pragma once

#include <attn/softmax/detail/keys_in_place.hpp>
#include <attn/softmax/detail/online_softmax.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

inline constexpr idx_t max_rows = 96;    // of a block, a multiple of every tile height
inline constexpr idx_t key_block = 384;  // keys a tile takes at a time
/// Rows of a tile fall into different cache sets, and begin a cache line.
inline constexpr int score_stride = key_block + 32;

/// Keys a tile of operands P takes. Fewer for the matrix unit, whose loads cost more than its products: the operands of
/// a tile then come from the first-level cache more often.
template <class P>
inline constexpr idx_t tile_keys = rows_for_matrix_unit<P> ? 192 : key_block;

/// One tile of work: some rows of a block and the slots any of them sees.
struct tile {
  idx_t row, rows;             // the first of at most tile_rows rows
  idx_t low, high;             // slots seen
  idx_t first = 0, count = 0;  // the same in whole vectors
  bool masked = false;         // whether there are slots among them that a row does not see
  bool fixed = false;          // whether `first` and `count` are whole panels (execution::set_invariant)
};

/// The weights of a tile, on the left of the product with the values.
template <class P>
using weight_rows = left_operand<P, operands<P>(score_stride), 1>;

/// Step 4: out[m] = out[m] * rescale[m] + weights of row m times the values of slots [low, high); of pairs both are
/// even. From column first_col on.
template <class P>
void add_output(const P* weights, const sum_type<P>* rescale, const packed_keys<P>& keys, idx_t low, idx_t high,
                idx_t rows, sum_type<P>* out, idx_t out_stride, idx_t first_col = 0) {
  using T = sum_type<P>;
  products_of_rows<P>(rows, weight_rows<P>{weights}, keys.value_panel(0, low),
                      operands<P>(keys.capacity) * panel_width<T>, first_col, keys.dim_v, operands<P>(high - low),
                      [&](auto m, idx_t col, const auto& x) {
                        T* const o = out + m * out_stride + col;
                        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), x));
                      });
}

/// Slots with weight 0 in a row are skipped for that row.
template <class Left>
auto seen_by_weight(const Left& left) {
  return [left](idx_t m, idx_t k) { return seen_by(left.at(static_cast<int>(m), k)); };
}
template <class P>
inline constexpr idx_t seen_depth = operands<P>((std::max)(key_block, max_rows));

/// Step 4 where a value is not finite: weight by weight, skipping those that are 0. Same sums, to the last bit.
template <class P>
[[gnu::noinline]] void careful_output(const P* weights, const sum_type<P>* rescale, const packed_keys<P>& keys,
                                      idx_t low, idx_t high, idx_t rows, sum_type<P>* out, idx_t out_stride) {
  using T = sum_type<P>;
  constexpr idx_t step = numbers_of<P>;
  if constexpr (step > 1) {
    const weight_rows<P> left{weights};
    for (idx_t col = 0; col < keys.dim_v; col += panel_width<T>)
      seen_product<seen_depth<P>>(left, rows, keys.value_panel(col, low), col + width<T> < keys.dim_v ? 2 : 1,
                               operands<P>(high - low), seen_by_weight(left), [&](idx_t m, idx_t half, const auto& x) {
                     T* const o = out + m * out_stride + col + half * width<T>;
                     store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), x));
                   });
  } else {
    for (idx_t m = 0; m < rows; ++m)
      for (idx_t col = 0; col < keys.dim_v; col += width<T>) {
        packet<T> x = zero<T>();
        for (idx_t n = low; n < high; ++n) {
          const P weight = weights[m * score_stride + n - low];
          if (weight == P(0)) continue;
          const P* const values = keys.value_panel(col / panel_width<T> * panel_width<T>, n) + col % panel_width<T>;
          x = multiply_add<P>(broadcast<P>(weight), load<P>(values), x);
        }
        T* const o = out + m * out_stride + col;
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), x));
      }
  }
}

/// Step 4 of a tile, after its weights were computed. The matrix unit does it in small steps while the weights of the
/// next tile are computed, so that nothing waits for its loads (1.1 times as fast, full_softmax on Sapphire Rapids).
template <class P, class Keys = packed_keys<P>>
class tile_output {
 public:
  using T = sum_type<P>;

  tile_output(const online_softmax<T, width<T>>& to, const Keys& from) : state(to), keys(from) {}

  /// Begins a tile: `first_weights` are those of its first slot, `factors` those of its rows, in whole packets.
  void begin(const tile& t, const P* first_weights, const T* factors) {
    // The matrix unit adds whole panels of pairs in an order of its own.
    const idx_t step = rows_for_matrix_unit<P> && t.fixed ? panel_width<T> : numbers_of<P>;
    row = t.row, rows = t.rows;
    low = t.low / step * step, high = round_up(t.high, step);
    weights = first_weights + operands<P>(low - t.first);
    std::copy_n(factors, std::size(rescale), rescale);
    finite = keys.all_finite(low, high);
    col = depth = steps = 0;
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<P>)
      if (const idx_t pairs = operands<P>(high - low); finite && pairs % unit_pairs == 0 && prepare_matrix_unit())
        steps = pairs / unit_pairs * (keys.dim_v / columns);
#endif
    steps_per_row = ceil_div(steps, tile_rows);
  }

  const P* weights_in_use() const { return rows > 0 ? weights : nullptr; }

  /// The steps for which there is time while the weights of another row are computed.
  void resume() {
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<P>)
      for (idx_t n = (std::min)(steps, steps_per_row); n > 0; --n) unit_step();
#endif
  }

  void finish() {
    if (rows == 0) return;
#if ATTN_HAS_AMX
    if constexpr (rows_for_matrix_unit<P>)
      while (steps > 0) unit_step();
#endif
    T* const out = state.row(row);
    if constexpr (may_be_rows<Keys>)
      if (keys.value_rows) {
        with_tile_height(std::exchange(rows, 0), [&](auto M) {
          output_in_place<P, M.value>(weight_rows<P>{weights}, rescale, keys, low, high, out, state.stride);
        });
        return;
      }
    if (finite) [[likely]]
      add_output<P>(weights, rescale, keys, low, high, rows, out, state.stride, col);
    else
      careful_output(weights, rescale, keys, low, high, rows, out, state.stride);
    rows = 0;
  }

 private:
#if ATTN_HAS_AMX
  static constexpr idx_t columns = 4 * unit_columns;

  void unit_step() {
    const unit_product<4, panel_width<T>, P, weight_rows<P>> product{
        {weights}, keys.value_panel(col, low), operands<P>(keys.capacity) * panel_width<T>};
    if (depth == 0) product.begin();
    product.step(depth);
    --steps;
    depth += unit_pairs;
    if (depth < operands<P>(high - low)) return;
    alignas(64) float sums[unit_rows * columns];
    product.end(sums, columns);
    for (idx_t m = 0; m < rows; ++m)
      unroll<4>([&](auto n) {
        T* const o = state.row(row + m) + col + n * width<T>;
        store<T>(o, fma(load<T>(o), broadcast<T>(rescale[m]), load<T>(sums + m * columns + n * width<T>)));
      });
    depth = 0, col += columns;
  }
#endif

  const online_softmax<T, width<T>>& state;
  const Keys& keys;
  idx_t row = 0, rows = 0;     // no tile where there are no rows
  idx_t low = 0, high = 0;     // slots; pairs begin at an even slot; weights of unseen slots are 0
  const P* weights = nullptr;  // from slot `low` on
  alignas(64) T rescale[round_up(tile_rows, width<T>)] = {};
  bool finite = true;                  // whether all values are finite
  idx_t col = 0, depth = 0;            // progress of the matrix unit
  idx_t steps = 0, steps_per_row = 0;  // steps that remain
};

}}}  // namespace attn::ATTN_ISA::detail
