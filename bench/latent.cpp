// Latent attention: keys and values of all heads from latents that they share.
#include <attn/layers/latent_attention_step.hpp>

#include <memory>

#include "flops.hpp"
#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

/// In the proportions of DeepSeek: a latent has four times the dims of a head, half of whose dims more are rotated.
struct latent_sizes {
  idx_t heads, latent, rotary, dim, dim_v;

  explicit latent_sizes(const problem& p)
      : heads(p.heads), latent(4 * p.dim), rotary(p.dim / 2), dim(p.dim), dim_v(p.dim_v) {}
  idx_t cached() const { return latent + rotary; }
};
struct latent_inputs : latent_sizes {
  input latents, q_rotary;  // latents with the rotated dims behind, of a sequence
  attn::tensor_view<const element, 3> w_key, w_value;

  latent_inputs(const problem& p, idx_t length)
      : latent_sizes(p), latents(drawn(role::key, {1, 1, length, cached()})),
        q_rotary(drawn(role::gradient, {1, heads, length, rotary})),
        w_key(drawn_numbers<element>(role::parameter, std::size_t(heads * dim * latent)), {heads, dim, latent}),
        w_value(drawn_numbers<element>(role::parameter, std::size_t(heads * dim_v * latent)), {heads, dim_v, latent}) {}
  input c() const { return latents.slice(3, 0, latent); }
  input k_rotary() const { return latents.slice(3, latent, rotary); }

 private:
  static input drawn(role of, const std::array<idx_t, 4>& extents) {
    return {drawn_numbers<element>(of, std::size_t(extents[0] * extents[1] * extents[2] * extents[3])), extents};
  }
};

double latent_flops(const problem& p) {
  const latent_sizes s(p);
  const auto n = static_cast<double>(p.length), pairs = p.causal ? n * (n + 1) / 2 : n * n;
  return score_flops(p, pairs) +
         2 * static_cast<double>(s.heads) * (pairs * double(s.rotary) + n * double(s.latent * (s.dim + s.dim_v)));
}
runner prepare_latent(const problem& p) {
  return [x = latent_inputs(p, p.length), causal = p.causal](input q, input, input, output out, attn::execution& exec) {
    attn::latent_attention(q, x.q_rotary, x.c(), x.k_rotary(), x.w_key, x.w_value, out, {.causal = causal}, exec);
  };
}

struct latent_stream final : stream {
  latent_inputs x;
  attn::kv_cache<element> cache;

  explicit latent_stream(const problem& p)
      : x(p, p.length), cache({.dim = x.cached(), .value_dim = x.latent}, {.values_in_keys = true}) {
    cache.reserve(p.length);
  }
  std::unique_ptr<stream> copy() const override { return std::make_unique<latent_stream>(*this); }
  void feed(input k, input) override {
    const input some = x.latents.slice(2, 0, k.extent(2));
    cache.append(some, some.slice(3, 0, x.latent));
  }
  void step(input q, input, input, output out, attn::execution& exec) override {
    attn::latent_attention_step(cache, q, x.q_rotary.slice(2, 0, 1), x.c().slice(2, 0, 1), x.k_rotary().slice(2, 0, 1),
                                x.w_key, x.w_value, out, exec);
  }
  void rewind(idx_t tokens) override { cache.truncate(tokens); }
};
double latent_step_flops(const problem& p) {
  const latent_sizes s(p);
  return 2.0 * static_cast<double>(s.heads) *
         (double(p.length) * double(2 * s.latent + s.rotary) + double(s.latent * (s.dim + s.dim_v)));
}
double latent_cache_bytes(const problem& p) {
  return static_cast<double>(p.length * latent_sizes(p).cached()) * sizeof(element);
}

}  // namespace

std::vector<operator_entry> latent_operators() {
  return {{.name = "latent_attention",
           .colour = "#6d4c41",
           .cost = growth::quadratic,
           .has_causal = true,
           .exact = false,
           .uses = {},
           .flops = latent_flops,
           .prepare = prepare_latent,
           .approximates = false}};
}
std::vector<decode_entry> latent_decoders() {
  return {{.name = "latent_attention_decode",
           .exact = false,
           .uses = {},
           .flops = latent_step_flops,
           .cache_bytes = latent_cache_bytes,
           .prepare = [](const problem& p) -> std::unique_ptr<stream> { return std::make_unique<latent_stream>(p); },
           .approximates = false}};
}

}  // namespace bench::inline ATTN_BENCH_TYPE
