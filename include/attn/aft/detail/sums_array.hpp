// attn: sums over ranges of keys, kept in memory and merged.
#pragma once

#include <attn/aft/detail/key_sums.hpp>

namespace attn::inline ATTN_ISA::detail {

/// Arrays of sums of `parts` packets each.
template <class T>
struct sums_array {
  T* data = nullptr;
  index parts = 0;

  static sums_array layout(arena& memory, index count, index parts) {
    return {memory.allocate<T>(count * parts * key_sums<T>::size), parts};
  }
  T* at(index n) const { return data + n * parts * key_sums<T>::size; }
  void clear(index n) const { clear(at(n), parts); }

  static void clear(T* sums, index parts) {
    for (index p = 0; p < parts; ++p) key_sums<T>{}.write(sums + p * key_sums<T>::size);
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

}  // namespace attn::inline ATTN_ISA::detail
