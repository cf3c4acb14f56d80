// attn: dropout of the weights of one row (dropout.hpp), a vector of keys at a time.
#pragma once

#include <attn/softmax/detail/packed_keys.hpp>
#include <attn/softmax/dropout.hpp>

namespace attn { inline namespace ATTN_ISA { namespace detail {

/// x[n] becomes 0 where the weight of the key at slot slot + n is dropped, else `factor` times what it is.
template <class T>
[[gnu::noinline]] void drop_weights(const dropout_row& row, T* x, idx_t count, const index_map& positions, idx_t slot,
                                    T factor) {
  idx_t n = 0;
  if constexpr (width<T> > 1)
    if (!positions.list) {
      using words = typename lanes_of<std::uint32_t, width<T>>::type;
      using flags = typename lanes_of<std::conditional_t<sizeof(T) == 8, std::int64_t, std::int32_t>, width<T>>::type;
      using numbers = typename lanes_of<T, width<T>>::type;
      words keys{};
      for (int lane = 0; lane < width<T>; ++lane) keys[lane] = static_cast<std::uint32_t>(positions[slot + lane]);
      const auto step = static_cast<std::uint32_t>(positions.step * width<T>);
      for (; n + width<T> <= count; n += width<T>, keys += step) {
        const flags kept = __builtin_convertvector(row.numbers(keys) >= row.least, flags);
        numbers weights;
        std::memcpy(&weights, x + n, sizeof weights);
        weights = kept ? weights * factor : numbers{};
        std::memcpy(x + n, &weights, sizeof weights);
      }
    }
  for (; n < count; ++n) {
    const bool kept = row.keeps(static_cast<std::uint32_t>(positions[slot + n]));
    x[n] = kept ? x[n] * factor : T(0);
  }
}

}}}  // namespace attn::ATTN_ISA::detail
