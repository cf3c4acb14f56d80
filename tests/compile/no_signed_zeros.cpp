// Compiled with -fno-signed-zeros: what the sign bit of a scale says about a row of codes, also that of a zero, is read
// and written as a bit.
#include <attn/core/kv_cache.hpp>

#include <cstdio>
#include <vector>

namespace {

/// The number of cached tokens that differ from those given, which any code has exactly.
template <class C>
int wrong() {
  constexpr attn::idx_t tokens = 3, dim = 2;
  const std::vector<float> given = {1, 2, 0, 0, 1, 2};
  const attn::tensor_view<const float> x(given.data(), {1, 1, tokens, dim});
  attn::kv_cache<C> cache({.dim = dim});
  cache.append(x, x);
  int count = 0;
  for (const bool of_keys : {true, false}) {
    std::vector<float> found(given.size());
    attn::detail::cache_rows<const C>(of_keys ? cache.keys() : cache.values(), 0, 0, dim, of_keys, {})
        .from(0)
        .expand(0, tokens, found.data(), dim);
    for (std::size_t n = 0; n < given.size(); ++n)
      if (!(std::abs(found[n] - given[n]) <= 0.01f)) ++count;
  }
  if (count > 0)
    std::printf("%d numbers are wrong, codes up to %d\n", count, int(attn::detail::row_format<C>::largest_code));
  return count;
}

}  // namespace

int main() { return wrong<std::int8_t>() + wrong<attn::int8_channels>() + wrong<attn::int4>() == 0 ? 0 : 1; }
