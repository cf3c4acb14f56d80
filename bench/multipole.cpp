// Multipole attention: softmax over the keys that matter most and clusters of the others.
#include <attn/low_rank/multipole_backward.hpp>
#include <attn/low_rank/multipole_step.hpp>

#include <algorithm>
#include <memory>

#include "table.hpp"

namespace bench {
namespace {

// The flags, or the operator's defaults.
attn::multipole_options<float> options_of(const problem& p) {
  attn::multipole_options<float> o{.causal = p.causal};
  if (p.set.exact > 0) o.exact = p.set.exact;
  if (p.set.clusters > 0) o.clusters = p.set.clusters;
  if (p.set.probe > 0) o.probe = p.set.probe;
  return o;
}

// A query's products with keys taken, clusters and its own segment; those of the choice, one with every key for `probe`
// queries, or for a causal block for each mean; k-means.
double multipole_flops(const problem& p) {
  const auto o = options_of(p);
  const auto n = static_cast<double>(p.length), heads = static_cast<double>(p.heads);
  const auto pair = 2.0 * static_cast<double>(p.dim + p.dim_v), product = 2.0 * static_cast<double>(p.dim);
  const auto segment = static_cast<double>(o.segment), steps = static_cast<double>(o.iterations + 1);
  const auto exact = static_cast<double>(o.exact), probe = static_cast<double>(o.probe);
  if (!p.causal) {
    const auto clusters = static_cast<double>(o.clusters.value_or(64));
    return heads * (n * (std::min(n, exact) + clusters) * pair + n * n / probe * product + n * clusters * steps * product);
  }
  const auto clusters = static_cast<double>(o.clusters.value_or(8));
  const double past = std::max(0.0, n - segment) / 2, means = std::max(1.0, 32 / probe);
  return heads * (n * (std::min(past, exact) + past / segment * clusters + std::min(n, segment) / 2) * pair +
                  n / 128 * means * past * product + n * clusters * steps * product);
}

runner prepare_multipole(const problem& p) {
  return [o = options_of(p)](input q, input k, input v, output out, attn::execution& exec) {
    attn::multipole(q, k, v, out, o, exec);
  };
}

// Five products where the forward pass has two.
double multipole_backward_flops(const problem& p) {
  return multipole_flops(p) * static_cast<double>(3 * p.dim + 2 * p.dim_v) / static_cast<double>(p.dim + p.dim_v);
}

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
  attn::multipole_cache<float> cache;

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
  void rewind(index tokens) override { cache.truncate(tokens); }
};

// What a step reads of every query head's: the keys of candidates and the values of those taken; and of every key
// head's: its clusters and half a segment.
double rows_read(const problem& p, double candidates, double taken, double shared) {
  const auto dim = static_cast<double>(p.dim), dim_v = static_cast<double>(p.dim_v), n = static_cast<double>(p.length);
  return static_cast<double>(p.heads) * (std::min(n, candidates) * dim + std::min(n, taken) * dim_v) +
         static_cast<double>(p.kv_heads) * std::min(n, shared) * (dim + dim_v);
}
double candidates_of(const attn::multipole_cache_options& o) {
  return static_cast<double>(o.candidate_clusters * o.segment) / static_cast<double>(o.clusters);
}
double shared_of(const problem& p, const attn::multipole_cache_options& o) {
  return static_cast<double>(p.length * o.clusters) / static_cast<double>(o.segment) +
         static_cast<double>(o.segment) / 2;
}
double step_bytes(const problem& p) {
  const auto o = multipole_stream::settings(p);
  return sizeof(float) * rows_read(p, candidates_of(o), static_cast<double>(o.exact), shared_of(p, o));
}
double step_flops(const problem& p) {
  const auto o = multipole_stream::settings(p);
  problem every_head = p;
  every_head.kv_heads = p.heads;
  return 2 * rows_read(every_head, candidates_of(o), static_cast<double>(o.exact), shared_of(p, o));
}

}  // namespace

family multipole_family() {
  return {
      .operators = {{.name = "multipole",
                     .cost = growth::quadratic,
                     .has_causal = true,
                     .exact = false,
                     .uses = {"exact", "clusters", "probe"},
                     .flops = multipole_flops,
                     .prepare = prepare_multipole,
                     .backward = {multipole_backward_flops, train_multipole}}},
      .decoders = {{.name = "multipole_decode",
                    .exact = false,
                    .uses = {"exact", "clusters"},
                    .flops = step_flops,
                    .cache_bytes = step_bytes,
                    .prepare = [](const problem& p) -> std::unique_ptr<stream> {
                      return std::make_unique<multipole_stream>(p);
                    }}},
  };
}

}  // namespace bench
