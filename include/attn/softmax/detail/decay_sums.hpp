// attn: decays of the weights of keys by what follows them: a score gets c_(p_i) - c_j, c the running sums of log_decay
// over the keys of a head.
//
// c is summed in double, and stored in two numbers of T where T is float: differences of long sums keep the digits of a
// score. A log decay below -1e9, such as -infinity, hides all keys before its own from the queries at it and after it;
// the sum begins anew there.
#pragma once

#include <attn/core/detail/log_decays.hpp>
#include <attn/core/execution.hpp>
#include <attn/softmax/detail/packed_keys.hpp>

#include <algorithm>
#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The running sums of one head, high + low.
template <class T>
struct decay_row {
  static constexpr bool split = sizeof(T) < sizeof(double);
  static constexpr double hides = -1e9;
  static constexpr idx_t none = -1;

  T *high = nullptr, *low = nullptr;  // [keys]; low only where they are split
  idx_t* starts = nullptr;            // [keys]: the first key that a query sees; starts[0] is `none` where all see all
  idx_t keys = 0;

  /// Of `count` log decays; beyond them the sum stays.
  void add_up(const T* log_decay, idx_t stride, idx_t count) const {
    // Some parts of the row at once, so that additions do not wait for each other: their sums, then the running ones.
    constexpr idx_t parts = 8;
    const idx_t length = count / parts;
    const auto at = [&](idx_t part, idx_t n) { return static_cast<double>(log_decay[(part * length + n) * stride]); };
    double begin[parts] = {}, sums[parts] = {}, lowest[parts] = {};
    for (idx_t n = 0; n < length; ++n)
      for (idx_t part = 0; part < parts; ++part) {
        const double x = at(part, n);
        sums[part] += x;
        lowest[part] = (std::min)(lowest[part], x);
      }
    double least = *std::min_element(lowest, lowest + parts);
    for (idx_t n = parts * length; n < count; ++n) least = (std::min)(least, at(0, n));
    if (keys > 0) starts[0] = none;
    double last = 0;
    if (least < hides) {
      last = restart(log_decay, stride, count);
    } else {
      for (idx_t part = 1; part < parts; ++part) begin[part] = begin[part - 1] + sums[part - 1];
      for (idx_t n = 0; n < length; ++n)
        for (idx_t part = 0; part < parts; ++part) put(part * length + n, begin[part] += at(part, n));
      last = begin[parts - 1];
      for (idx_t n = parts * length; n < count; ++n) put(n, last += at(0, n));
    }
    for (idx_t n = count; n < keys; ++n) put(n, last);
  }

  idx_t position(idx_t p) const { return (std::min)(p, keys - 1); }
  /// c_p - c_j of a key that the query sees.
  T operator()(idx_t p, idx_t j) const {
    const T x = high[position(p)] - high[j];
    return split ? x + (low[position(p)] - low[j]) : x;
  }

 private:
  void put(idx_t n, double sum) const {
    high[n] = static_cast<T>(sum);
    if (split) low[n] = static_cast<T>(sum - static_cast<double>(high[n]));
  }
  /// The same, key by key, with sums that begin anew. Returns the last.
  [[gnu::noinline]] double restart(const T* log_decay, idx_t stride, idx_t count) const {
    double sum = 0;
    idx_t start = 0;
    for (idx_t n = 0; n < count; ++n) {
      const double x = static_cast<double>(log_decay[n * stride]);
      if (x < hides)
        sum = 0, start = n;
      else
        sum += x;
      put(n, sum), starts[n] = start;
    }
    std::fill(starts + count, starts + keys, start);
    return sum;
  }
};

/// Those of all heads of a call; null: none.
template <class T>
struct decay_sums {
  tensor_view<const T, 3> log_decay{};  // [B, H, Lk]
  decay_row<T> all{};                   // of all heads, one after the other

  explicit operator bool() const { return bool(log_decay); }
  bool summed() const { return all.high != nullptr; }

  static decay_sums layout(arena& memory, const tensor_view<const T, 3>& log_decay) {
    const idx_t count = log_decay ? log_decay.extent(0) * log_decay.extent(1) * log_decay.extent(2) : 0;
    T *const high = memory.allocate<T>(count), *const low = memory.allocate<T>(decay_row<T>::split ? count : 0);
    return {log_decay, {high, low, memory.allocate<idx_t>(count)}};
  }
  decay_row<T> head(idx_t b, idx_t h) const {
    const idx_t keys = log_decay.extent(2), first = (b * log_decay.extent(1) + h) * keys;
    return {all.high + first, all.low + first, all.starts + first, keys};
  }
  /// Adds up those of a head with `count` keys.
  void add_up(idx_t b, idx_t h, idx_t count) const {
    head(b, h).add_up(row_of(log_decay, b, h), log_decay.stride(2), count);
  }

  /// s[n] += factor (c_p - c_j) of the keys at slots slot + n, n < count.
  [[gnu::noinline]] void add(T* s, idx_t count, idx_t b, idx_t h, idx_t p, const index_map& positions, idx_t slot,
                             T factor) const {
    const decay_row<T> row = head(b, h);
    idx_t n = 0;
    if (!positions.list && positions.step == 1) {
      const idx_t j = positions[slot];
      const packet<T> high = broadcast<T>(row.high[row.position(p)]), times = broadcast<T>(factor);
      if constexpr (decay_row<T>::split) {
        const packet<T> low = broadcast<T>(row.low[row.position(p)]);
        for (; n + width<T> <= count; n += width<T>) {
          const packet<T> x = fma(sub(low, load<T>(row.low + j + n)), times, load<T>(s + n));
          store<T>(s + n, fma(sub(high, load<T>(row.high + j + n)), times, x));
        }
      } else {
        for (; n + width<T> <= count; n += width<T>)
          store<T>(s + n, fma(sub(high, load<T>(row.high + j + n)), times, load<T>(s + n)));
      }
    }
    for (; n < count; ++n) s[n] += row(p, positions[slot + n]) * factor;
  }
  /// Masks the keys before the last log decay that hides them.
  void hide(T* s, idx_t count, idx_t b, idx_t h, idx_t p, const index_map& positions, idx_t slot) const {
    const decay_row<T> row = head(b, h);
    if (row.starts[0] == decay_row<T>::none) return;
    const idx_t start = row.starts[row.position(p)];
    for (idx_t n = 0; n < count; ++n)
      if (positions[slot + n] < start) s[n] = -std::numeric_limits<T>::infinity();
  }
};

/// The sums of the gradient of final scores by query and by key, of which that of log_decay consists: it is the sum of
/// those of the queries at its position and after it, less those of the keys. Null: not wanted.
struct decay_gradients {
  double *queries = nullptr, *keys = nullptr;  // [Lq]; [Lk], or of the slots
  idx_t first = 0, end = 0;                    // the positions, or slots, of keys that count
  bool by_slot = false;
  std::span<const idx_t> listed{};  // where not empty, `queries` are those at these positions, which ascend

  explicit operator bool() const { return queries || keys; }

  /// d[n] of query i, at position p, and the keys at slots slot + n, n < count.
  template <class T>
  [[gnu::noinline]] void add(const T* d, idx_t count, idx_t i, idx_t p, const index_map& positions, idx_t slot) const {
    if (queries) {
      double sum = 0;
      for (idx_t n = 0; n < count; ++n) sum += static_cast<double>(d[n]);
      queries[listed.empty() ? i : std::lower_bound(listed.begin(), listed.end(), p) - listed.begin()] += sum;
    }
    if (!keys) return;
    if (by_slot || (!positions.list && positions.step == 1)) {
      const idx_t j = by_slot ? slot : positions[slot];
      const idx_t from = std::clamp(first - j, idx_t(0), count), to = std::clamp(end - j, from, count);
      for (idx_t n = from; n < to; ++n) keys[j + n] += static_cast<double>(d[n]);
      return;
    }
    for (idx_t n = 0; n < count; ++n) {
      if (d[n] == T(0)) continue;  // as beyond the last slot
      if (const idx_t j = positions[slot + n]; j >= first && j < end) keys[j] += static_cast<double>(d[n]);
    }
  }
};

}}}  // namespace attn::ATTN_ISA::detail
