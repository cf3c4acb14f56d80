// attn: a bias by distance, t[h, clamp(j - p_i, -R, R) + R] of the key at position j for the query at p_i.
#pragma once

#include <attn/softmax/detail/packed_keys.hpp>

#include <algorithm>
#include <optional>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// The table of one call, [H or 1, 2R + 1]; null: none.
template <class T>
struct relative_bias {
  tensor_view<const T, 2> table{};
  const idx_t* places = nullptr;  // those of tokens, whose differences are the distances; null: their positions

  explicit operator bool() const { return bool(table); }
  idx_t reach() const { return table.extent(1) / 2; }
  /// From the query at position p to the key at j.
  idx_t distance(idx_t p, idx_t j) const { return places ? places[j] - places[p] : j - p; }
  T operator()(idx_t head, idx_t distance) const {
    return table(row(head), std::clamp(distance, -reach(), reach()) + reach());
  }

  /// The entries of the keys at slots slot + n, n < count, if they are adjacent; else null.
  const T* adjacent(idx_t head, idx_t position, const index_map& positions, idx_t slot, idx_t count) const {
    if (table.stride(1) != 1) return nullptr;
    if (places ? distance(positions[slot], positions[slot + count - 1]) != count - 1
               : positions.list || positions.step != 1)
      return nullptr;
    const idx_t first = distance(position, positions[slot]) + reach();
    return first >= 0 && first + count <= table.extent(1) ? &table(row(head), first) : nullptr;
  }
  /// Their entry, if they are all as far as the table reaches or farther, on one side.
  std::optional<T> constant(idx_t head, idx_t position, const index_map& positions, idx_t slot, idx_t count) const {
    if (places || positions.list || positions.step != 1) return {};
    const idx_t first = positions[slot] - position, last = first + count - 1;
    if (last > -reach() && first < reach()) return {};
    return (*this)(head, first);
  }
  /// Copies them.
  [[gnu::noinline]] void copy(idx_t head, idx_t position, const index_map& positions, idx_t slot, idx_t count,
                              T* to) const {
    if (!places && !positions.list && positions.step == 1 && table.stride(1) == 1) {  // run by run
      const idx_t first = positions[slot] - position, low = std::clamp(-reach() - first, idx_t(0), count),
                  high = std::clamp(reach() + 1 - first, low, count);
      std::fill_n(to, low, (*this)(head, -reach()));
      if (high > low) std::copy_n(&table(row(head), first + low + reach()), high - low, to + low);
      return void(std::fill_n(to + high, count - high, (*this)(head, reach())));
    }
    for (idx_t n = 0; n < count; ++n) to[n] = (*this)(head, distance(position, positions[slot + n]));
  }

 private:
  idx_t row(idx_t head) const { return table.extent(0) == 1 ? 0 : head; }
};

}}}  // namespace attn::ATTN_ISA::detail
