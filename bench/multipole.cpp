// Multipole attention: softmax over the keys that matter most and clusters of the others.
#include <attn/low_rank/multipole_backward.hpp>
#include <attn/low_rank/multipole_step.hpp>

#include <algorithm>
#include <cmath>
#include <memory>

#include "flops.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

// The flags, or the operator's defaults.
attn::multipole_options<element> options_of(const problem& p) {
  attn::multipole_options<element> o{.causal = p.causal};
  if (p.set.exact > 0) o.exact = p.set.exact;
  if (p.set.clusters > 0) o.clusters = p.set.clusters;
  if (p.set.probe > 0) o.probe = p.set.probe;
  if (p.set.query_block > 0) o.block = p.set.query_block;
  return o;
}

// A query's products with keys taken, clusters and its own segment.
double attended_flops(const problem& p) {
  const auto o = options_of(p);
  const auto n = static_cast<double>(p.length), exact = static_cast<double>(o.exact);
  if (!p.causal) return score_flops(p, n * (std::min(n, exact) + static_cast<double>(o.clusters.value_or(64))));
  const auto clusters = static_cast<double>(o.clusters.value_or(8)),
             segment = static_cast<double>(o.segment.value_or(256));
  const double past = std::max(0.0, n - segment) / 2;
  return score_flops(p, n * (std::min(past, exact) + past / segment * clusters + std::min(n, segment) / 2));
}

// Those of k-means, and of the choice: one with every key for `probe` queries, or for each mean of a causal block.
double choice_flops(const problem& p) {
  const auto o = options_of(p);
  const auto n = static_cast<double>(p.length), probe = static_cast<double>(o.probe);
  const auto clusters = static_cast<double>(o.clusters.value_or(p.causal ? 8 : 64));
  const auto block = static_cast<double>(o.block.value_or(128)), segment = static_cast<double>(o.segment.value_or(256));
  const double ranked =
      p.causal ? std::max(0.0, n - segment) / 2 / block * std::ceil(std::min(32.0, block) / probe) : n / probe;
  return 2.0 * static_cast<double>(p.dim * p.heads) * n * (ranked + clusters * static_cast<double>(o.iterations + 1));
}

double multipole_flops(const problem& p) { return attended_flops(p) + choice_flops(p); }

runner prepare_multipole(const problem& p) {
  return [o = options_of(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::multipole(q, k, v, out, o, exec);
  };
}

double multipole_backward_flops(const problem& p) { return five_for_two(attended_flops(p), p) + choice_flops(p); }

training_runner train_multipole(const problem& p) {
  const auto options = [o = options_of(p)](const training_views& x) {
    auto with_lse = o;
    with_lse.lse = x.lse;
    return with_lse;
  };
  return {
      [=](const training_views& x, attn::execution& exec) { attn::multipole(x.q, x.k, x.v, x.out, options(x), exec); },
      [=](const training_views& x, attn::execution& exec) {
        attn::multipole_backward(x.q, x.k, x.v, x.out, x.d_out, {.q = x.dq, .k = x.dk, .v = x.dv}, options(x), exec);
      }};
}

struct multipole_stream final : stream {
  attn::multipole_cache<element> cache;

  explicit multipole_stream(const problem& p)
      : cache({.heads = p.kv_heads, .dim = p.dim, .value_dim = p.dim_v}, settings(p)) {
    cache.reserve(p.length);
  }
  static attn::multipole_cache_options settings(const problem& p) {
    attn::multipole_cache_options o;
    if (p.set.exact > 0) o.exact = p.set.exact;
    if (p.set.clusters > 0) o.clusters = p.set.clusters;
    return o;
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<multipole_stream>(*this); }
  void feed(input k, input v) override { cache.append(k, v); }
  void step(input q, input k, input v, output out, attn::execution& exec) override {
    attn::multipole_step(cache, q, k, v, out, {}, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};

// Numbers a step reads: for every query head, the keys of the candidates and the values of those taken; for each of
// `shared_heads`, the clusters of the segments before and the tokens of its own.
double numbers_read(const problem& p, idx_t shared_heads) {
  const auto o = multipole_stream::settings(p);
  const idx_t segments = (p.length - 1) / o.segment, past = segments * o.segment;
  const double candidates = static_cast<double>(std::min(past, o.candidate_clusters * o.segment / o.clusters)),
               taken = static_cast<double>(std::min(past, o.exact)),
               shared = static_cast<double>(segments * o.clusters + p.length - past);
  return static_cast<double>(p.heads) *
             (candidates * static_cast<double>(p.dim) + taken * static_cast<double>(p.dim_v)) +
         static_cast<double>(shared_heads * (p.dim + p.dim_v)) * shared;
}
double step_flops(const problem& p) { return 2 * numbers_read(p, p.heads); }
double step_bytes(const problem& p) { return sizeof(element) * numbers_read(p, p.kv_heads); }
double cache_bytes(const problem& p) {
  const auto o = multipole_stream::settings(p);
  const auto rows = static_cast<double>(p.length + p.length / o.segment * o.clusters);
  return sizeof(element) * rows * static_cast<double>(p.kv_heads * (p.dim + p.dim_v));
}

// Choices that are worth their time: more keys taken, by means of fewer queries.
setting choice(idx_t exact, idx_t clusters, idx_t probe) {
  return {{&flags::exact, exact}, {&flags::clusters, clusters}, {&flags::probe, probe}};
}

}  // namespace

family multipole_family() {
  return {
      .title = "low rank",
      .operators = {{.name = "multipole",
                     .colour = "#ff4f1f",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"exact", "clusters", "probe", "query-block"},
                     .flops = multipole_flops,
                     .prepare = prepare_multipole,
                     .backward = {multipole_backward_flops, train_multipole},
                     .settings = {choice(32, 16, 96), choice(64, 32, 64), choice(128, 32, 64), choice(256, 64, 16),
                                  choice(384, 64, 16), choice(512, 64, 8)},
                     .causal_settings = {choice(64, 8, 32), choice(128, 8, 32), choice(256, 16, 8),
                                         choice(384, 16, 4)}}},
      .decoders = {{.name = "multipole_decode",
                    .exact = false,
                    .uses = {"exact", "clusters"},
                    .flops = step_flops,
                    .cache_bytes = step_bytes,
                    .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                      return std::make_unique<multipole_stream>(p);
                    },
                    .state_bytes = cache_bytes}},
  };
}

}  // namespace bench::inline ATTN_BENCH_TYPE
