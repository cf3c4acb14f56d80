// Lists of single keys over caches in fewer bits: attention over what the cache keeps of the listed tokens.
#pragma once

#include <attn/softmax/selected_keys_step.hpp>

#include "support/catch.hpp"
#include "support/run.hpp"

namespace testing {

/// The last queries of p over some of its tokens, alone and in runs of up to five, through a cache of C; `kept` is p
/// with the keys and values that such a cache keeps.
template <class C>
void check_listed_keys(const full_softmax_problem& p, const full_softmax_problem& kept, double allowed) {
  const idx_t tokens = p.k.length(), queries = std::min<idx_t>(3, tokens);
  attn::kv_cache<C> cache(
      {.batch = p.k.batch(), .heads = p.k.heads(), .dim = p.k.dim(), .value_dim = p.v.dim()});
  const tensor<float> q = cast<float>(rows(p.q, tokens - queries, queries)), k = cast<float>(p.k),
                      v = cast<float>(p.v);
  cache.append(view(k), view(v));
  full_softmax_problem part = kept;
  part.q = rows(p.q, tokens - queries, queries);
  part.options.causal = false;
  part.options.bias = tensor<double>(1, 1, queries, tokens);
  std::vector<std::int32_t> list;
  for (idx_t j = 0; j < tokens; ++j) {
    const bool listed = j * j % 11 < 4;
    if (listed) list.push_back(static_cast<std::int32_t>(j));
    for (idx_t i = 0; i < queries; ++i)
      part.options.bias(0, 0, i, j) =
          listed && j <= tokens - queries + i ? 0 : -std::numeric_limits<double>::infinity();
  }
  tensor<float> out(q.batch(), q.heads(), queries, v.dim(), 7.0f);
  const attn::tensor_view<const std::int32_t> names(list.data(), {1, 1, queries, std::ssize(list)}, {0, 0, 0, 1});
  attn::selected_keys_cached(cache, view(q), view(out), names);
  CAPTURE(p.k.dim(), p.v.dim());
  CHECK(relative_error(cast<double>(out), expected(part).out) <= allowed);
}

}  // namespace testing
