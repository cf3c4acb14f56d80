#include "variant.hpp"

#include <algorithm>
#include <cmath>

#include "inputs.hpp"

namespace bench {
namespace {

constexpr index longest_linear = 1 << 20, longest_quadratic = 1 << 14, longest_cache = 1 << 18;
constexpr index queries_per_kv_head = 4;  // of the decoders
constexpr double most_layers = 1024;

/// Where the caches hold everything, memory is not the bound.
double if_beyond_caches(double moved, double held) {
  return held > 2 * static_cast<double>(last_level_cache_bytes()) ? moved : 0;
}

input random_view(role r, index heads, index length, index dim) {
  return {normal_numbers(r, static_cast<std::size_t>(heads * length * dim)), {1, heads, length, dim}};
}

output result_view(index heads, index length, index dim, int slot = 0) {
  return {result_memory(static_cast<std::size_t>(heads * length * dim), slot), {1, heads, length, dim}};
}

double bytes(const problem& p) {
  return sizeof(float) * static_cast<double>(p.length) * static_cast<double>(p.heads + p.kv_heads) *
         static_cast<double>(p.dim + p.dim_v);
}

using shared_flags = std::shared_ptr<const flags>;

/// The problem of an operator at any length.
struct problems {
  shared_flags set;
  bool causal;
  index queries_per_kv_head = 1;

  problem operator()(index length) const {
    return {length, queries_per_kv_head * set->heads, set->heads, set->dim, set->dim, causal, *set};
  }
};

variant make_variant(const operator_entry& entry, bool causal, const shared_flags& set) {
  const problems at{set, causal};
  const std::string suffix = causal ? "_causal" : "";
  variant x;
  x.name = x.form = entry.name + suffix;
  x.rival = "full_softmax" + suffix;
  x.label = describe(*set, entry.uses);
  x.exact = entry.exact;
  x.approximates = entry.approximates;
  x.longest = entry.cost == growth::linear ? longest_linear : longest_quadratic;
  x.flops = [&entry, at](index length) { return entry.flops(at(length)); };
  x.memory_bytes = [&entry, at](index length) {
    const problem p = at(length);
    return bytes(p) + (entry.parameter_bytes ? entry.parameter_bytes(p) : 0);
  };
  if (entry.moved_bytes) {
    x.moved_bytes = [&entry, at](index length) {
      const double moved = entry.moved_bytes(at(length));
      return if_beyond_caches(moved, moved);
    };
    x.rewrites = true;
  }
  x.prepare = [&entry, at](index length) -> workload {
    const problem p = at(length);
    const input q = random_view(role::query, p.heads, length, p.dim),
                k = random_view(role::key, p.kv_heads, length, p.dim),
                v = random_view(role::value, p.kv_heads, length, p.dim_v);
    const output out = result_view(p.heads, length, p.dim_v);
    return [=, run = entry.prepare(p)](attn::execution& exec) { run(q, k, v, out, exec); };
  };
  x.error = [&entry, causal, set](const dataset& data) { return data.error(entry, causal, *set); };
  x.mean_error = [&entry, causal](const dataset& data) { return data.mean_error({causal, entry.shared_keys}); };
  return x;
}

variant make_backward_variant(const operator_entry& entry, bool causal, const shared_flags& set) {
  const variant forward = make_variant(entry, causal, set);
  const problems at{set, causal};
  variant x = forward;
  x.name = x.form = entry.name + "_backward" + (causal ? "_causal" : "");
  x.rival = forward.name;
  x.exact = x.approximates = false;
  x.backward = true;
  x.moved_bytes = {};
  x.flops = [&entry, at](index length) { return entry.backward.flops(at(length)); };
  x.memory_bytes = [forward](index length) { return 2 * forward.memory_bytes(length); };
  x.prepare = [&entry, at](index length) -> workload {
    const problem p = at(length);
    const training_views views{
        .q = random_view(role::query, p.heads, length, p.dim),
        .k = random_view(role::key, p.kv_heads, length, p.dim),
        .v = random_view(role::value, p.kv_heads, length, p.dim_v),
        .out = result_view(p.heads, length, p.dim_v),
        .lse = {result_memory(static_cast<std::size_t>(p.heads * length), 1), {1, p.heads, length}},
        .d_out = random_view(role::gradient, p.heads, length, p.dim_v),
        .dq = result_view(p.heads, length, p.dim, 2),
        .dk = result_view(p.kv_heads, length, p.dim, 3),
        .dv = result_view(p.kv_heads, length, p.dim_v, 4)};
    const training_runner run = entry.backward.prepare(p);
    if (run.forward) {
      attn::execution serial;
      run.forward(views, serial);
    }
    return [views, backward = run.backward](attn::execution& exec) { backward(views, exec); };
  };
  return x;
}

/// A model has a cache for every layer and comes back to each only after all the others. One cache alone would stay in
/// the processor's; so as many are used in turn as it takes to find each of them in memory.
double layers_of(const decode_entry& entry, const problem& p) {
  return std::clamp(std::ceil(4 * static_cast<double>(last_level_cache_bytes()) / entry.cache_bytes(p)), 1.0,
                    most_layers);
}

constexpr index chunk = 4096;  // tokens a cache is filled with at once

/// Tokens a state is filled with. Once it no longer grows, a step takes the same time whatever it has seen.
index tokens_fed(const decode_entry& entry, const problem& p) {
  problem first = p;
  first.length = std::min(chunk, p.length);
  return (entry.cache_bytes(first) == entry.cache_bytes(p) ? first : p).length - 1;
}

double state_bytes(const decode_entry& entry, const problem& p) {
  return (entry.state_bytes ? entry.state_bytes : entry.cache_bytes)(p);
}

std::vector<std::unique_ptr<stream>> make_layers(const decode_entry& entry, const problem& p) {
  std::vector<std::unique_ptr<stream>> layers;
  layers.push_back(entry.prepare(p));
  const index tokens = tokens_fed(entry, p);
  for (index begin = 0; begin < tokens; begin += chunk) {
    const index count = std::min(chunk, tokens - begin);
    layers[0]->feed(random_view(role::key, p.kv_heads, tokens, p.dim).slice(2, begin, count),
                    random_view(role::value, p.kv_heads, tokens, p.dim_v).slice(2, begin, count));
  }
  const auto count = static_cast<std::size_t>(layers_of(entry, p));
  while (layers.size() < count) layers.push_back(layers[0]->copy());
  return layers;
}

variant make_variant(const decode_entry& entry, const shared_flags& set) {
  const problems at{set, true, queries_per_kv_head};
  variant x;
  x.name = x.form = entry.name;
  x.rival = "full_softmax_decode";
  x.label = describe(*set, entry.uses);
  x.exact = entry.exact;
  x.approximates = entry.approximates;
  x.longest = longest_cache;
  x.flops = [&entry, at](index length) { return entry.flops(at(length)); };
  x.moved_bytes = [&entry, at](index length) {
    const problem p = at(length);
    return if_beyond_caches(entry.cache_bytes(p), layers_of(entry, p) * entry.cache_bytes(p));
  };
  x.rewrites = entry.rewritten;
  x.memory_bytes = [&entry, at](index length) {
    const problem p = at(length);
    const double fed = sizeof(float) * static_cast<double>(tokens_fed(entry, p) * p.kv_heads * (p.dim + p.dim_v));
    return fed + layers_of(entry, p) * state_bytes(entry, p);
  };
  x.prepare = [&entry, at](index length) -> workload {
    const problem p = at(length);
    const auto layers = std::make_shared<std::vector<std::unique_ptr<stream>>>(make_layers(entry, p));
    const input q = random_view(role::query, p.heads, 1, p.dim), k = random_view(role::key, p.kv_heads, 1, p.dim),
                v = random_view(role::value, p.kv_heads, 1, p.dim_v);
    const output out = result_view(p.heads, 1, p.dim_v);
    return [=, turn = std::size_t{0}](attn::execution& exec) mutable {
      stream& layer = *(*layers)[turn++ % layers->size()];
      layer.rewind(length - 1);
      layer.step(q, k, v, out, exec);
    };
  };
  x.error = [&entry, set](const dataset& data) { return data.error(entry, *set); };
  x.mean_error = [](const dataset& data) { return data.mean_error({.causal = true}); };
  return x;
}

}  // namespace

std::optional<traffic> traffic_of(const variant& x, index length, double seconds, const machine& m) {
  const double bytes_moved = x.moved_bytes ? x.moved_bytes(length) : 0;
  if (bytes_moved == 0) return {};
  const double rate = bytes_moved / seconds, most = x.rewrites ? m.rewrite_bandwidth() : m.read_bandwidth();
  return traffic{rate, rate / most, x.rewrites ? "read-and-write bandwidth" : "read bandwidth"};
}

std::vector<variant> make_variants(const flags& given) {
  static const std::vector<family> all = families();
  const auto set = std::make_shared<const flags>(given);
  std::vector<variant> variants;
  const auto add_settings = [&](const operator_entry& entry, bool causal) {
    for (const setting& s : causal && !entry.causal_settings.empty() ? entry.causal_settings : entry.settings) {
      const auto other = std::make_shared<const flags>(with(given, s));
      variant x = make_variant(entry, causal, other);
      if (x.label == describe(given, entry.uses)) continue;
      x.name += '/' + name_of(s);
      variants.push_back(std::move(x));
    }
  };
  for (const family& f : all) {
    for (const operator_entry& entry : f.operators) {
      const int first = entry.only_causal ? 1 : 0, forms = entry.has_causal ? 2 : 1;
      for (int causal = first; causal < forms; ++causal) {
        variants.push_back(make_variant(entry, causal, set));
        add_settings(entry, causal);
      }
      for (int causal = first; causal < forms && entry.backward; ++causal)
        variants.push_back(make_backward_variant(entry, causal, set));
    }
    for (const decode_entry& entry : f.decoders) variants.push_back(make_variant(entry, set));
  }
  return variants;
}

}  // namespace bench
