// attn: decays of the weights of keys by what follows them: a score gets c_(p_i) - c_j, c the running sums of log_decay
// over the keys of a head.
//
// c is summed in double: differences of long sums keep the digits of a score. A log decay of -infinity hides all keys
// before its own from the queries at it and after it; the sum begins anew there.
#pragma once

#include <attn/core/execution.hpp>
#include <attn/softmax/detail/packed_keys.hpp>

#include <algorithm>
#include <cmath>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The running sums of one head.
struct decay_row {
  static constexpr idx_t none = -1;

  double* sums = nullptr;   // [keys]
  idx_t* starts = nullptr;  // [keys]: the first key a query at the position sees; starts[0] is `none` if all see all
  idx_t keys = 0;

  /// Of `count` log decays; beyond them the sum stays.
  template <class T>
  void add_up(const T* log_decay, idx_t stride, idx_t count) const {
    // Some parts of the row at once: their additions do not wait for each other.
    constexpr idx_t parts = 8;
    const idx_t length = count / parts;
    double sum[parts] = {};
    for (idx_t n = 0; n < length; ++n)
      for (idx_t part = 0; part < parts; ++part)
        sums[part * length + n] = sum[part] += static_cast<double>(log_decay[(part * length + n) * stride]);
    for (idx_t part = 1; part < parts && length > 0; ++part) {
      const double before = sums[part * length - 1];
      for (idx_t n = part * length; n < (part + 1) * length; ++n) sums[n] += before;
    }
    double last = length > 0 ? sums[parts * length - 1] : 0;
    for (idx_t n = parts * length; n < count; ++n) sums[n] = last += static_cast<double>(log_decay[n * stride]);
    if (keys > 0) starts[0] = none;
    if (!std::isfinite(last)) last = restart(log_decay, stride, count);
    std::fill(sums + count, sums + keys, last);
  }

  idx_t position(idx_t p) const { return std::min(p, keys - 1); }
  /// c_p - c_j of a key that the query sees.
  double operator()(idx_t p, idx_t j) const { return sums[position(p)] - sums[j]; }

 private:
  /// The same, key by key, with sums that begin anew after -infinity. Returns the last.
  template <class T>
  [[gnu::noinline]] double restart(const T* log_decay, idx_t stride, idx_t count) const {
    double sum = 0;
    idx_t start = 0;
    for (idx_t n = 0; n < count; ++n) {
      const double one = static_cast<double>(log_decay[n * stride]);
      if (one == -std::numeric_limits<double>::infinity())
        sum = 0, start = n;
      else
        sum += one;
      sums[n] = sum, starts[n] = start;
    }
    std::fill(starts + count, starts + keys, start);
    return sum;
  }
};

/// Those of all heads of a call; null: none.
template <class T>
struct decay_sums {
  tensor_view<const T, 3> log_decay{};  // [B, H, Lk]
  double* sums = nullptr;
  idx_t* starts = nullptr;

  explicit operator bool() const { return bool(log_decay); }

  static decay_sums layout(arena& memory, const tensor_view<const T, 3>& log_decay) {
    const idx_t count = log_decay ? log_decay.extent(0) * log_decay.extent(1) * log_decay.extent(2) : 0;
    return {log_decay, memory.allocate<double>(count), memory.allocate<idx_t>(count)};
  }
  decay_row head(idx_t b, idx_t h) const {
    const idx_t keys = log_decay.extent(2), first = (b * log_decay.extent(1) + h) * keys;
    return {sums + first, starts + first, keys};
  }
  /// Adds up those of a head with `count` keys.
  void add_up(idx_t b, idx_t h, idx_t count) const {
    head(b, h).add_up(row_of(log_decay, b, h), log_decay.stride(2), count);
  }

  /// s[n] += factor (c_p - c_j) of the keys at slots slot + n, n < count; finite scores stay finite.
  [[gnu::noinline]] void add(T* s, idx_t count, idx_t b, idx_t h, idx_t p, const index_map& positions, idx_t slot,
                             T factor) const {
    constexpr T lowest = std::numeric_limits<T>::lowest();
    const decay_row row = head(b, h);
    const double at = row.sums[row.position(p)];
    const auto decayed = [&](T x, double c) { return std::max(x + static_cast<T>(at - c) * factor, lowest); };
    idx_t n = 0;
    if (!positions.list && positions.step == 1) {
      const double* const c = row.sums + positions[slot];
      if constexpr (width<T> > 1) {
        // As many sums as fill a vector.
        constexpr int lanes = sizeof(T) == sizeof(double) ? width<T> : width<T> / 2;
        using numbers = typename lanes_of<T, lanes>::type;
        using wide = typename lanes_of<double, lanes>::type;
        for (; n + lanes <= count; n += lanes) {
          numbers x;
          wide sum;
          std::memcpy(&x, s + n, sizeof x);
          std::memcpy(&sum, c + n, sizeof sum);
          x += __builtin_convertvector(at - sum, numbers) * factor;
          x = x < lowest ? numbers{} + lowest : x;
          std::memcpy(s + n, &x, sizeof x);
        }
      }
      for (; n < count; ++n) s[n] = decayed(s[n], c[n]);
    } else {
      for (; n < count; ++n) s[n] = decayed(s[n], row.sums[positions[slot + n]]);
    }
  }
  /// Masks the keys before the last log decay of -infinity.
  void hide(T* s, idx_t count, idx_t b, idx_t h, idx_t p, const index_map& positions, idx_t slot) const {
    const decay_row row = head(b, h);
    if (row.starts[0] == decay_row::none) return;
    const idx_t start = row.starts[row.position(p)];
    for (idx_t n = 0; n < count; ++n)
      if (positions[slot + n] < start) s[n] = -std::numeric_limits<T>::infinity();
  }
};

/// The sums of the gradient of final scores by query and by key, of which that of log_decay consists: it is the sum of
/// those of the queries at its position and after it, less those of the keys. Null: not wanted.
struct decay_gradients {
  double *queries = nullptr, *keys = nullptr;                // [Lq]; [Lk], or of the slots
  idx_t first = 0, end = std::numeric_limits<idx_t>::max();  // the positions of keys that count
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
      const idx_t from = by_slot ? 0 : std::clamp(first - j, idx_t(0), count),
                  to = by_slot ? count : std::clamp(end - j, from, count);
      for (idx_t n = from; n < to; ++n) keys[j + n] += static_cast<double>(d[n]);
      return;
    }
    for (idx_t n = 0; n < count; ++n)
      if (const idx_t j = positions[slot + n]; d[n] != T(0) && j >= first && j < end)
        keys[j] += static_cast<double>(d[n]);
  }
};

}}}  // namespace attn::ATTN_ISA::detail
