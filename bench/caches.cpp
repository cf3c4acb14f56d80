// Decoding with other caches than one contiguous one: in pages, of many sequences of unequal length, and of many that
// share what they begin with.
#include <attn/core/paged_cache.hpp>
#include <attn/softmax/full_softmax_step.hpp>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

constexpr idx_t page_tokens = 64, sequences = 16;

double token_bytes(const problem& p) { return static_cast<double>(p.kv_heads * (p.dim + p.dim_v)) * sizeof(element); }

/// A sequence has a sixteenth, two, ... of the length.
idx_t length_of(idx_t sequence, idx_t longest) { return (sequence + 1) * longest / sequences; }
double all_tokens(const problem& p) {
  double sum = 0;
  for (idx_t n = 0; n < sequences; ++n) sum += static_cast<double>(length_of(n, p.length));
  return sum;
}

/// The same for all sequences.
input repeated(input x) {
  return {x.data(), {sequences, x.extent(1), x.extent(2), x.extent(3)}, {0, x.stride(1), x.stride(2), x.stride(3)}};
}

/// Feeds another stream the tokens of the first sequence, page by page.
void feed_pages(stream& other, const attn::paged_cache<element>& cache) {
  for (idx_t begin = 0; begin < cache.tokens(0); begin += page_tokens) {
    const idx_t page = cache.table(0)[static_cast<std::size_t>(begin / page_tokens)],
                count = std::min(page_tokens, cache.tokens(0) - begin);
    const auto rows = [&](const attn::tensor_view<element>& x) { return x.slice(0, page, 1).slice(2, 0, count); };
    other.feed(rows(cache.pool().keys()), rows(cache.pool().values()));
  }
}

struct paged_stream final : stream {
  problem p;
  attn::page_pool<element> pool;
  attn::paged_cache<element> cache;

  explicit paged_stream(const problem& x)
      : p(x),
        pool({.pages = x.length / page_tokens + 1,
              .page_tokens = page_tokens,
              .heads = x.kv_heads,
              .dim = x.dim,
              .value_dim = x.dim_v}),
        cache(pool, 1) {}
  std::unique_ptr<stream> copy() const override {
    auto other = std::make_unique<paged_stream>(p);
    feed_pages(*other, cache);
    return other;
  }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::full_softmax_step(cache, q, k, v, out, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

/// One step of all sequences, of which the last gives `out`.
template <class Cache>
void step_all(Cache& cache, std::vector<element>& results, input q, input k, input v, output out,
              attn::execution& exec) {
  const output all(results.data(), {sequences, out.extent(1), out.extent(2), out.extent(3)});
  attn::full_softmax_step(cache, repeated(q), repeated(k), repeated(v), all, exec);
  for (idx_t h = 0; h < out.extent(1); ++h)
    for (idx_t t = 0; t < out.extent(2); ++t)
      for (idx_t d = 0; d < out.extent(3); ++d) out(0, h, t, d) = all(sequences - 1, h, t, d);
}

struct ragged_stream final : stream {
  idx_t longest, step_tokens;
  attn::kv_cache<element> cache;
  std::vector<element> results;

  explicit ragged_stream(const problem& p)
      : longest(p.length),
        step_tokens(std::min(p.set.step_tokens, p.length)),
        cache({.batch = sequences, .heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}),
        results(static_cast<std::size_t>(sequences * p.heads * step_tokens * p.dim_v)) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<ragged_stream>(*this); }

  void feed(input k, input v) override {
    std::vector<idx_t> lengths;
    for (idx_t n = 0; n < sequences; ++n)
      lengths.push_back(std::clamp(length_of(n, longest) - step_tokens - cache.tokens(n), idx_t(0), k.extent(2)));
    cache.append(repeated(k), repeated(v), {.lengths = lengths});
  }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    step_all(cache, results, q, k, v, out, exec);
  }
  void rewind(idx_t) override {
    for (idx_t n = 0; n < sequences; ++n)
      cache.truncate(n, std::min(cache.tokens(n), std::max<idx_t>(0, length_of(n, longest) - step_tokens)));
  }
};

/// Sequences that share fifteen sixteenths of their tokens.
struct shared_stream final : stream {
  problem p;
  idx_t common, own_pages;
  attn::page_pool<element> pool;
  attn::paged_cache<element> cache;
  std::vector<element> results;

  static idx_t common_of(const problem& p) {
    return std::min(p.length * 15 / 16, p.length - std::min(p.set.step_tokens, p.length));
  }
  explicit shared_stream(const problem& x)
      : p(x),
        common(common_of(x)),
        own_pages((x.length - common) / page_tokens + 2),
        pool({.pages = common / page_tokens + 1 + sequences * own_pages,
              .page_tokens = page_tokens,
              .heads = x.kv_heads,
              .dim = x.dim,
              .value_dim = x.dim_v}),
        cache(pool, sequences),
        results(static_cast<std::size_t>(sequences * x.heads * std::min(x.set.step_tokens, x.length) * x.dim_v)) {}
  std::unique_ptr<stream> copy() const override {
    auto other = std::make_unique<shared_stream>(p);
    feed_pages(*other, cache);
    return other;
  }
  void feed(input k, input v) override {
    const idx_t shared = std::clamp(common - cache.tokens(0), idx_t(0), k.extent(2)), own = k.extent(2) - shared;
    std::vector<idx_t> lengths(static_cast<std::size_t>(sequences), 0);
    lengths[0] = shared;
    cache.append(repeated(k), repeated(v), {.lengths = lengths});
    for (idx_t n = 1; n < sequences && shared > 0; ++n) cache.copy_item(0, n);
    if (own > 0) cache.append(repeated(k.slice(2, shared, own)), repeated(v.slice(2, shared, own)));
  }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    step_all(cache, results, q, k, v, out, exec);
  }
  void rewind(idx_t tokens) override {
    for (idx_t n = 0; n < sequences; ++n) cache.truncate(n, std::min(cache.tokens(n), tokens));
  }
};

/// With execution::set_invariant().
struct invariant_stream final : stream {
  attn::kv_cache<element> cache;

  explicit invariant_stream(const problem& p)
      : cache({.batch = 1, .heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<invariant_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    exec.set_invariant(true);
    attn::full_softmax_step(cache, q, k, v, out, exec);
    exec.set_invariant(false);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

/// Tokens that a step of those reads.
double tokens_read(const problem& p) {
  const idx_t common = shared_stream::common_of(p);
  return static_cast<double>(common + sequences * (p.length - common));
}

}  // namespace

family cache_family() {
  return {
      .title = "caches",
      .operators = {},
      .decoders = {
          {.name = "full_softmax_paged_decode",
           .exact = true,
           .uses = {},
           .flops = [](const problem& p) { return score_flops(p, static_cast<double>(p.length)); },
           .cache_bytes = [](const problem& p) { return static_cast<double>(p.length) * token_bytes(p); },
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<paged_stream>(p); }},
          {.name = "full_softmax_invariant_decode",
           .exact = true,
           .uses = {},
           .flops = [](const problem& p) { return score_flops(p, static_cast<double>(p.length)); },
           .cache_bytes = [](const problem& p) { return static_cast<double>(p.length) * token_bytes(p); },
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<invariant_stream>(p); }},
          {.name = "full_softmax_ragged_decode",
           .exact = true,
           .uses = {},
           .sequences = sequences,
           .flops = [](const problem& p) { return score_flops(p, all_tokens(p)); },
           .cache_bytes = [](const problem& p) { return all_tokens(p) * token_bytes(p); },
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<ragged_stream>(p); },
           .approximates = false},
          {.name = "full_softmax_shared_decode",
           .exact = true,
           .uses = {},
           .sequences = sequences,
           .flops = [](const problem& p) { return sequences * score_flops(p, static_cast<double>(p.length)); },
           .cache_bytes = [](const problem& p) { return tokens_read(p) * token_bytes(p); },
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<shared_stream>(p); },
           .approximates = false}}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
