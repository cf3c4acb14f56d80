// attn: the online softmax of some rows: the state of each after some of its keys.
//
//   maximum   m = max_j s_j, of scores in base 2
//   sum       l = sum_j 2^(s_j - m)
//   out       o = sum_j 2^(s_j - m) v_j        the result is o / l
//
// Milakov, Gimelshein 2018, "Online normalizer calculation for softmax".
#pragma once

#include <attn/core/detail/compensated.hpp>
#include <attn/core/detail/exp.hpp>
#include <attn/core/detail/tile_product.hpp>
#include <attn/core/execution.hpp>
#include <attn/softmax/detail/score_loops.hpp>

#include <cmath>
#include <utility>

namespace attn { inline namespace ATTN_ISA { namespace detail {

template <class T>
inline constexpr T ln_2 = T(0.693147180559945309417232121458176568L);

/// The sum of a row may be stored as Lanes partial sums, one per lane of a vector.
template <class T, int Lanes = 1>
struct online_softmax {
  idx_t rows = 0, cols = 0, stride = 0;
  T* maximum = nullptr;  // [rows]
  T* sum = nullptr;      // [rows][Lanes]
  T* out = nullptr;      // [rows][stride]

  /// Rows of whole packets. `step` rounds their stride up further.
  static online_softmax layout(arena& memory, idx_t rows, idx_t cols, idx_t step = width<T>) {
    const idx_t stride = round_up(cols, step);
    return {.rows = rows, .cols = cols, .stride = stride, .maximum = memory.allocate<T>(rows),
            .sum = memory.allocate<T>(rows * Lanes), .out = memory.allocate<T>(rows * stride)};
  }

  T* row(idx_t r) const { return out + r * stride; }
  /// Rows [first, first + count).
  online_softmax part(idx_t first, idx_t count) const {
    return {count, cols, stride, maximum + first, sum + first * Lanes, row(first)};
  }
  T row_sum(idx_t r) const {
    if constexpr (Lanes == 1)
      return sum[r];
    else
      return sum_lanes(load<T>(sum + r * Lanes));
  }

  /// The first `count` rows have seen no key.
  void clear(idx_t count) const {
    std::fill_n(maximum, count, -std::numeric_limits<T>::infinity());
    std::fill_n(sum, count * Lanes, T(0));
    std::fill_n(out, count * stride, T(0));
  }
  void clear() const { clear(rows); }

  /// Copies row `from_row` of another state to row r.
  template <int Others>
  void copy_row(idx_t r, const online_softmax<T, Others>& from, idx_t from_row) const {
    const T* const source = from.row(from_row);
    for (idx_t d = 0; d < cols; d += width<T>) store<T>(row(r) + d, load<T>(source + d));
    std::fill_n(sum + r * Lanes, Lanes, T(0));
    sum[r * Lanes] = from.row_sum(from_row);
    maximum[r] = from.maximum[from_row];
  }

  /// Row r without the signs of zeros, which tell what was added to it.
  void clear_signs(idx_t r) const {
    for (idx_t d = 0; d < cols; ++d) row(r)[d] += T(0);
  }

  /// Merges another state of the same rows into this one.
  void merge(const online_softmax& other) const
    requires(Lanes == 1)
  {
    for (idx_t r = 0; r < rows; ++r) merge_row(r, other);
  }
  /// Merges row r of it. What roundings lose is added to the sums of `lost`, if given, whose maxima are this one's.
  void merge_row(idx_t r, const online_softmax& other, const online_softmax* lost = nullptr) const
    requires(Lanes == 1)
  {
    if (other.sum[r] == T(0)) return;  // it has seen no key; a sum of NaN is merged
    const T highest = (std::max)(maximum[r], other.maximum[r]);
    const T reference = highest == -std::numeric_limits<T>::infinity() ? T(0) : highest;
    const T own = std::exp2(maximum[r] - reference), others = std::exp2(other.maximum[r] - reference);
    maximum[r] = highest;
    if (lost) {
      const auto merge_number = [&](T& x, T& error, T y) {
        x *= own, error *= own;
        add_compensated(x, error, y * others);
      };
      merge_number(sum[r], lost->sum[r], other.sum[r]);
      for (idx_t d = 0; d < cols; ++d) merge_number(row(r)[d], lost->row(r)[d], other.row(r)[d]);
      return;
    }
    sum[r] = sum[r] * own + other.sum[r] * others;
    for (idx_t d = 0; d < cols; ++d) row(r)[d] = row(r)[d] * own + other.row(r)[d] * others;
  }
  /// Adds to row r what merge_row() has lost.
  void settle_row(idx_t r, const online_softmax& lost) const
    requires(Lanes == 1)
  {
    sum[r] = compensated_number(sum[r], lost.sum[r]);
    settle_compensated(row(r), lost.row(r), cols, row(r));
  }

  /// Ends row r: the output and the natural log-sum-exp, `sink` (a logit without a value, base e) included; one of
  /// -infinity is none. A row that has seen no key becomes 0 and its lse the sink, or -infinity. Where `maximum_to` is
  /// given, it becomes the maximum, and lse the logarithm of the sum beside it, both in base 2.
  template <class S>
  void finish_row(idx_t r, const T* sink, S* to, idx_t to_stride, T* lse, T* maximum_to = nullptr) const {
    T total = row_sum(r), highest = maximum[r], factor = T(1);
    const T logit = sink ? to_base_2(*sink) : -std::numeric_limits<T>::infinity(), higher = (std::max)(highest, logit);
    if (sink && higher != -std::numeric_limits<T>::infinity()) {
      factor = std::exp2(highest - higher);
      total = total * factor + std::exp2(logit - higher);
      highest = higher;
    }
    if (lse) *lse = maximum_to ? std::log2(total) : (highest + std::log2(total)) * ln_2<T>;
    if (maximum_to) *maximum_to = highest == -std::numeric_limits<T>::infinity() ? T(0) : highest;
    store_row(r, total == T(0) ? T(0) : factor / total, to, to_stride);
  }
  /// Stores the output of row r times `normal`; one without a key is 0.
  template <class S>
  ATTN_INLINE void store_row(idx_t r, T normal, S* to, idx_t to_stride) const {
    const T* const o = row(r);
    idx_t d = 0;
    if constexpr (std::same_as<S, T>)
      for (; to_stride == 1 && d + width<T> <= cols; d += width<T>)
        store<T>(to + d, mul(load<T>(o + d), broadcast<T>(normal)));
    else if (to_stride == 1)
      for (; d < cols; ++d) to[d] = static_cast<S>(o[d] * normal);
    for (; d < cols; ++d) to[d * to_stride] = static_cast<S>(o[d] * normal);
  }
};

/// The sums of rows so long that one large weight would swallow small ones: a state takes some keys, then add() moves
/// its sums here, with compensation; large weights come by themselves, by add_key(). Its maximum stays. A row that was
/// moved once keeps its sums to the last bit.
template <class T, int Lanes = 1>
struct long_softmax {
  online_softmax<T, Lanes> sums, errors;

  static long_softmax layout(arena& memory, idx_t rows, idx_t cols, idx_t step = width<T>) {
    using state = online_softmax<T, Lanes>;
    return {state::layout(memory, rows, cols, step), state::layout(memory, rows, cols, step)};
  }
  void clear(idx_t rows) const { sums.clear(rows), errors.clear(rows); }
  long_softmax part(idx_t first, idx_t count) const { return {sums.part(first, count), errors.part(first, count)}; }

  [[gnu::noinline]] void add(const online_softmax<T, Lanes>& state, idx_t rows) const {
    for (idx_t r = 0; r < rows; ++r) add_row(state, r);
  }
  /// Adds one key to row r of a state with this maximum; its value, in panels `next` numbers apart, with weight `kept`.
  [[gnu::noinline]] void add_key(idx_t r, T maximum, T weight, T kept, const T* value, idx_t next) const {
    const T factor = raise(r, maximum);
    T *const sum = sums.sum + r * Lanes, *const error = errors.sum + r * Lanes;
    for (int n = 0; n < Lanes; ++n) sum[n] *= factor, error[n] *= factor;
    add_compensated(*sum, *error, weight);
    for (idx_t d = 0; d < sums.cols; d += width<T>) {
      alignas(64) T x[width<T>];
      store<T>(x, kept == T(0) ? zero<T>()
                               : mul(broadcast<T>(kept),
                                     load<T>(value + d / panel_width<T> * next + d % panel_width<T>)));
      move_compensated(x, width<T>, factor, sums.row(r) + d, errors.row(r) + d);
    }
  }
  /// The weights of row r, of a state with this maximum.
  T row_sum(idx_t r, T maximum) const {
    const T before = sums.maximum[r];
    return sums.row_sum(r) * (before < maximum ? std::exp2(before - maximum) : T(1));
  }
  /// Adds those of the state, and sets it to the result; without an add() before (`added`), only rows with an
  /// add_key().
  [[gnu::noinline]] void settle(const online_softmax<T, Lanes>& state, idx_t rows, bool added) const {
    for (idx_t r = 0; r < rows; ++r) {
      if (!added && sums.maximum[r] == -std::numeric_limits<T>::infinity()) continue;
      add_row(state, r);
      if constexpr (Lanes == 1)
        state.sum[r] = compensated_number(sums.sum[r], errors.sum[r]);
      else
        settle_compensated(sums.sum + r * Lanes, errors.sum + r * Lanes, Lanes, state.sum + r * Lanes);
      settle_compensated(sums.row(r), errors.row(r), round_up(sums.cols, width<T>), state.row(r));
    }
  }

 private:
  void add_row(const online_softmax<T, Lanes>& state, idx_t r) const {
    const T factor = raise(r, state.maximum[r]);
    if constexpr (Lanes == 1) {
      sums.sum[r] *= factor, errors.sum[r] *= factor;
      add_compensated(sums.sum[r], errors.sum[r], std::exchange(state.sum[r], T(0)));
    } else {
      move_compensated(state.sum + r * Lanes, Lanes, factor, sums.sum + r * Lanes, errors.sum + r * Lanes);
    }
    move_compensated(state.row(r), round_up(sums.cols, width<T>), factor, sums.row(r), errors.row(r));
  }
  /// Sets the maximum of a row. Returns the factor of its sums.
  T raise(idx_t r, T highest) const {
    const T before = std::exchange(sums.maximum[r], highest);
    return before < highest ? std::exp2(before - highest) : T(1);
  }
};

/// Moves the sums of some rows of a state before they have taken more than `most` keys since.
template <class T, int Lanes = 1>
class long_sums {
 public:
  /// `begun`: goes on with a total that an earlier one has begun.
  long_sums(const online_softmax<T, Lanes>& state, const long_softmax<T, Lanes>& total, idx_t rows, idx_t most,
            bool begun = false)
      : state_(state), total_(total), rows_(rows), most_(most), begun_(begun) {}

  /// Moves the sums at multiples of `most` of the keys' places, of which the first is `place`.
  void start_at(idx_t place) { taken_ = place % most_; }
  /// The same where an earlier one has taken the keys up to there, from 0 on.
  void resume_at(idx_t place) {
    taken_ = place == 0 ? 0 : (place - 1) % most_ + 1;
    begun_ = added_ = place > most_;
  }

  /// Call before the first key where the kernel is to move large weights by themselves (move_large_weights).
  void begin() {
    begun_ = true;
    total_.clear(rows_);
  }
  bool begun() const { return begun_; }
  /// Call before the state takes `keys` more keys.
  void next(idx_t keys) {
    if (full(keys)) {
      if (!begun_) begin();
      total_.add(state_, rows_);
      added_ = true;
      taken_ = 0;
    }
    taken_ += keys;
  }
  /// Whether that moves the sums.
  bool full(idx_t keys) const { return taken_ > 0 && taken_ + keys > most_; }
  /// Call after the last one.
  void finish() const {
    if (begun_) total_.settle(state_, rows_, added_);
  }

 private:
  const online_softmax<T, Lanes>& state_;
  const long_softmax<T, Lanes>& total_;
  idx_t rows_, most_, taken_ = 0;
  bool begun_, added_ = false;
};

/// Keys that a state of the blockwise kernel takes: 32 of its tiles.
inline constexpr idx_t long_segment = 12288;

}}}  // namespace attn::ATTN_ISA::detail
