// attn: sums over stretches of keys, kept in memory and added up.
#pragma once

#include <attn/aft/detail/key_sums.hpp>

namespace attn::inline ATTN_ISA::detail {

/// f(integral_constant<int, C>, p) for packets p ... p + C - 1, until all are done.
template <class F>
void for_columns(index packets, F&& f) {
  index p = 0;
  for (; p + sum_columns <= packets; p += sum_columns) f(std::integral_constant<int, sum_columns>{}, p);
  for (; p < packets; ++p) f(std::integral_constant<int, 1>{}, p);
}

/// Adds columns [begin, end) of a line that starts at row `at` to sums in memory, `parts` packets of them.
template <class T, class S>
void add_line(const aft_head<S>& head, index at, index begin, index end, index parts, T* sums) {
  for_columns(parts, [&](auto count, index p) {
    add_plain_keys<T, count.value>(head.k, head.v, p * width<T>, at + begin, at + end, sums + p * key_sums<T>::size);
  });
}

/// Sums of `parts` packets, one array of which stands for one place.
template <class T>
struct sums_array {
  T* data = nullptr;
  index parts = 0;

  static sums_array layout(arena& memory, index count, index parts) {
    return {memory.allocate<T>(count * parts * key_sums<T>::size), parts};
  }
  T* at(index n) const { return data + n * parts * key_sums<T>::size; }
  void clear(index n) const {
    for (index p = 0; p < parts; ++p) key_sums<T>{}.write(at(n) + p * key_sums<T>::size);
  }
  /// to = to + from
  static void merge(T* to, const T* from, index parts) {
    for (index p = 0; p < parts; ++p) {
      auto sums = key_sums<T>::read(to + p * key_sums<T>::size);
      sums.merge(key_sums<T>::read(from + p * key_sums<T>::size));
      sums.write(to + p * key_sums<T>::size);
    }
  }
};

}  // namespace attn::detail
