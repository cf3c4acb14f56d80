// The variants of one type of elements.
#include "variant.hpp"

#include <attn/core/detail/product_choice.hpp>

#include <algorithm>
#include <cmath>

#include "inputs.hpp"
#include "table.hpp"

namespace bench::inline ATTN_BENCH_TYPE {
namespace {

constexpr idx_t longest_linear = 1 << 20, longest_quadratic = 1 << 14, longest_cache = 1 << 18;
constexpr idx_t longest_backward = 1 << 16;
constexpr idx_t queries_per_kv_head = 4;  // of the decoders
constexpr double most_layers = 1024;

/// Where the caches hold everything, memory is not the bound.
double if_beyond_caches(double moved, double held) {
  return held > 2 * static_cast<double>(last_level_cache_bytes()) ? moved : 0;
}

#define ATTN_BENCH_TEXT_OF(x) #x
#define ATTN_BENCH_TEXT(x) ATTN_BENCH_TEXT_OF(x)
const std::string type_name = std::string(ATTN_BENCH_TEXT(ATTN_BENCH_TYPE)).substr(3);  // of_float
/// Behind the name of an operator.
const std::string type_suffix = std::same_as<element, float> ? "" : "_" + type_name;

input random_view(role r, idx_t heads, idx_t length, idx_t dim) {
  return {drawn_numbers<element>(r, static_cast<std::size_t>(heads * length * dim)), {1, heads, length, dim}};
}

output result_view(idx_t heads, idx_t length, idx_t dim, int slot = 0) {
  return {result_memory<element>(static_cast<std::size_t>(heads * length * dim), slot), {1, heads, length, dim}};
}

std::vector<float> numbers_in(output x) { return {x.data(), x.data() + x.size()}; }

double bytes(const problem& p) {
  return sizeof(element) * static_cast<double>(p.length) * static_cast<double>(p.heads + p.kv_heads) *
         static_cast<double>(p.dim + p.dim_v);
}

using shared_flags = std::shared_ptr<const flags>;

/// The problem of an operator at any length. Where it approximates softmax, key heads and the size of values are those
/// of --input.
struct problems {
  shared_flags set;
  bool causal;
  idx_t queries_per_kv_head = 1;
  bool approximates = false;

  problem operator()(idx_t length) const {
    if (approximates && set->kv_heads > 0)
      return {length, set->heads, set->kv_heads, set->dim, set->dim_v, causal, *set};
    return {length, queries_per_kv_head * set->heads, set->heads, set->dim, set->dim, causal, *set};
  }
};

/// What all variants of this type have in common.
variant typed_variant() {
  variant x;
  x.type = type_name;
  // Of float and double that of sums; of 16-bit types the roundings of q, k and v, of weights, and of the result.
  if constexpr (std::same_as<element, double>)
    x.products = arithmetic::of_double, x.rounding = 1e-13;
  else if constexpr (std::same_as<element, Eigen::bfloat16>)
    x.rounding = 1.5e-2;
  else
    x.rounding = std::same_as<element, float> ? 2e-6 : 2e-3;
  if (attn::detail::numbers_of<attn::detail::product_type<element>> > 1) x.products = arithmetic::of_bf16;
  return x;
}

/// Numbers [batch, heads, length, dim] of a dataset, rounded.
std::vector<element> rounded(const std::vector<float>& x) {
  std::vector<element> result(x.size());
  std::transform(x.begin(), x.end(), result.begin(), [](float y) { return static_cast<element>(y); });
  return result;
}

/// The error of what run(problem, q, k, v, out) makes of every batch item.
template <class Run>
double error_on(const dataset& data, bool causal, bool shared_keys, flags set, Run&& run) {
  set.dropout = 0;  // what it costs in time is of interest, not how far it is from what it is to regularise
  const problem p = data.problem_for(causal, set);
  const std::vector<element> q = rounded(data.q()), k = rounded(data.k()), v = rounded(data.v());
  std::vector<element> out(static_cast<std::size_t>(data.batch() * p.heads * p.length * p.dim_v));
  for (idx_t item = 0; item < data.batch(); ++item) {
    const auto of_item = [&](auto& x, idx_t heads, idx_t dim) {
      return attn::tensor_view(x.data() + item * heads * p.length * dim, {1, heads, p.length, dim});
    };
    run(p, input(of_item(q, p.heads, p.dim)), input(of_item(k, p.kv_heads, p.dim)),
        input(of_item(v, p.kv_heads, p.dim_v)), output(of_item(out, p.heads, p.dim_v)));
  }
  const std::vector<float> results(out.begin(), out.end());
  return data.distance(results, {causal, shared_keys});
}

double error_of(const operator_entry& entry, const dataset& data, bool causal, flags set,
                attn::precision precision = attn::precision::standard) {
  set.dropout = 0;
  attn::execution serial;
  serial.set_precision(precision);
  const runner run = entry.prepare(data.problem_for(causal, set));
  return error_on(data, causal, entry.shared_keys, set, [&](const problem&, input q, input k, input v, output out) {
    run(q, k, v, out, serial);
  });
}

/// Token by token, against causal full softmax.
double error_of(const decode_entry& entry, const dataset& data, const flags& set) {
  attn::execution serial;
  return error_on(data, true, false, set, [&](const problem& p, input q, input k, input v, output out) {
    const auto state = entry.prepare(p);
    for (idx_t t = 0; t < p.length; ++t)
      state->step(q.slice(2, t, 1), k.slice(2, t, 1), v.slice(2, t, 1), out.slice(2, t, 1), serial);
  });
}

variant make_variant(const operator_entry& entry, bool causal, const shared_flags& set) {
  const problems at{set, causal, 1, entry.approximates};
  const std::string suffix = (causal ? "_causal" : "") + type_suffix;
  variant x = typed_variant();
  x.name = x.form = entry.name + suffix;
  x.rival = "full_softmax" + suffix;
  x.operator_name = entry.name + type_suffix;
  x.colour = entry.colour;
  x.main = !causal || entry.only_causal;
  x.uses = entry.uses;
  x.label = describe(*set, entry.uses);
  x.exact = entry.exact;
  x.approximates = entry.approximates;
  x.longest = entry.cost == growth::linear ? longest_linear : longest_quadratic;
  x.flops = [&entry, at](idx_t length) { return entry.flops(at(length)); };
  x.memory_bytes = [&entry, at](idx_t length) {
    const problem p = at(length);
    return bytes(p) + (entry.parameter_bytes ? entry.parameter_bytes(p) : 0);
  };
  if (entry.moved_bytes) {
    x.moved_bytes = [&entry, at](idx_t length) {
      const double moved = entry.moved_bytes(at(length));
      return if_beyond_caches(moved, moved);
    };
    x.rewrites = true;
  }
  x.prepare = [&entry, at](idx_t length) -> workload {
    const problem p = at(length);
    const input q = random_view(role::query, p.heads, length, p.dim),
                k = random_view(role::key, p.kv_heads, length, p.dim),
                v = random_view(role::value, p.kv_heads, length, p.dim_v);
    const output out = result_view(p.heads, length, p.dim_v);
    return [=, run = entry.prepare(p)](attn::execution& exec) { run(q, k, v, out, exec); };
  };
  x.results = [at](idx_t length) -> decltype(x.results)::result_type {
    const problem p = at(length);
    return {{"", numbers_in(result_view(p.heads, length, p.dim_v))}};
  };
  x.error = [&entry, causal, set](const dataset& data) { return error_of(entry, data, causal, *set); };
  x.mean_error = [&entry, causal](const dataset& data) { return data.mean_error({causal, entry.shared_keys}); };
  return x;
}

variant make_backward_variant(const operator_entry& entry, bool causal, const shared_flags& set) {
  const variant forward = make_variant(entry, causal, set);
  const problems at{set, causal, 1, entry.approximates};
  variant x = forward;
  x.name = x.form = entry.name + "_backward" + (causal ? "_causal" : "") + type_suffix;
  x.rival = forward.name;
  x.exact = x.approximates = false;
  x.backward = true;
  x.main = false;
  x.longest = std::min(x.longest, longest_backward);
  x.moved_bytes = {};
  x.flops = [&entry, at](idx_t length) { return entry.backward.flops(at(length)); };
  x.memory_bytes = [forward](idx_t length) { return 2 * forward.memory_bytes(length); };
  x.prepare = [&entry, at](idx_t length) -> workload {
    const problem p = at(length);
    const training_views views{
        .q = random_view(role::query, p.heads, length, p.dim),
        .k = random_view(role::key, p.kv_heads, length, p.dim),
        .v = random_view(role::value, p.kv_heads, length, p.dim_v),
        .out = result_view(p.heads, length, p.dim_v),
        .lse = {result_memory<real>(static_cast<std::size_t>(p.heads * length), 1), {1, p.heads, length}},
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
  x.results = [at](idx_t length) -> decltype(x.results)::result_type {
    const problem p = at(length);
    return {{"q", numbers_in(result_view(p.heads, length, p.dim, 2))},
            {"k", numbers_in(result_view(p.kv_heads, length, p.dim, 3))},
            {"v", numbers_in(result_view(p.kv_heads, length, p.dim_v, 4))}};
  };
  return x;
}

double state_bytes(const decode_entry& entry, const problem& p) {
  return (entry.state_bytes ? entry.state_bytes : entry.cache_bytes)(p);
}

/// A model has a cache for every layer and comes back to each only after all the others. One cache alone would stay in
/// the processor's; so as many are used in turn as it takes to find each of them in memory.
double layers_of(const decode_entry& entry, const problem& p) {
  const double read = entry.reads_anew ? state_bytes(entry, p) : entry.cache_bytes(p);
  return std::clamp(std::ceil(4 * static_cast<double>(last_level_cache_bytes()) / read), 1.0, most_layers);
}

constexpr idx_t chunk = 4096;  // tokens a cache is filled with at once

/// Tokens of a step that ends with p.length tokens seen.
idx_t step_tokens(const problem& p) { return std::min(p.set.step_tokens, p.length); }

/// Tokens a state is filled with. Once it no longer grows, a step takes the same time whatever it has seen.
idx_t tokens_fed(const decode_entry& entry, const problem& p) {
  problem first = p;
  first.length = std::min(chunk, p.length);
  return (state_bytes(entry, first) == state_bytes(entry, p) ? first : p).length - step_tokens(p);
}

std::vector<std::unique_ptr<stream>> make_layers(const decode_entry& entry, const problem& p) {
  std::vector<std::unique_ptr<stream>> layers;
  layers.push_back(entry.prepare(p));
  const idx_t tokens = tokens_fed(entry, p);
  for (idx_t begin = 0; begin < tokens; begin += chunk) {
    const idx_t count = std::min(chunk, tokens - begin);
    layers[0]->feed(random_view(role::key, p.kv_heads, tokens, p.dim).slice(2, begin, count),
                    random_view(role::value, p.kv_heads, tokens, p.dim_v).slice(2, begin, count));
  }
  const auto count = static_cast<std::size_t>(layers_of(entry, p));
  while (layers.size() < count) layers.push_back(layers[0]->copy());
  return layers;
}

variant make_variant(const decode_entry& entry, const shared_flags& set) {
  const problems at{set, true, queries_per_kv_head};
  variant x = typed_variant();
  x.name = x.form = entry.name + type_suffix + (entry.cache_type.empty() ? "" : "_over_" + entry.cache_type);
  x.rival = "full_softmax_decode" + type_suffix;
  if (entry.rounding > 0) x.rounding = entry.rounding;
  x.uses = entry.uses;
  x.uses.push_back("step-tokens");
  x.label = describe(*set, x.uses);
  x.exact = entry.exact;
  x.approximates = entry.approximates;
  x.longest = longest_cache;
  x.sequences = entry.sequences;
  x.flops = [&entry, at](idx_t length) {
    double sum = 0;
    for (idx_t n = step_tokens(at(length)); n-- > 0;) sum += entry.flops(at(length - n));
    return sum;
  };
  x.moved_bytes = [&entry, at](idx_t length) {
    const problem p = at(length);
    return if_beyond_caches(entry.cache_bytes(p), layers_of(entry, p) * entry.cache_bytes(p));
  };
  x.rewrites = entry.rewritten;
  x.memory_bytes = [&entry, at](idx_t length) {
    const problem p = at(length);
    const double fed = sizeof(element) * static_cast<double>(tokens_fed(entry, p) * p.kv_heads * (p.dim + p.dim_v));
    return fed + layers_of(entry, p) * state_bytes(entry, p);
  };
  x.prepare = [&entry, at](idx_t length) -> workload {
    const problem p = at(length);
    const auto layers = std::make_shared<std::vector<std::unique_ptr<stream>>>(make_layers(entry, p));
    const idx_t tokens = step_tokens(p);
    const input q = random_view(role::query, p.heads, tokens, p.dim),
                k = random_view(role::key, p.kv_heads, tokens, p.dim),
                v = random_view(role::value, p.kv_heads, tokens, p.dim_v);
    const output out = result_view(p.heads, tokens, p.dim_v);
    return [=, turn = std::size_t{0}](attn::execution& exec) mutable {
      stream& layer = *(*layers)[turn++ % layers->size()];
      layer.rewind(length - tokens);
      layer.step(q, k, v, out, exec);
    };
  };
  x.results = [at](idx_t length) -> decltype(x.results)::result_type {
    const problem p = at(length);
    return {{"", numbers_in(result_view(p.heads, step_tokens(p), p.dim_v))}};
  };
  x.error = [&entry, set](const dataset& data) { return error_of(entry, data, *set); };
  x.mean_error = [](const dataset& data) { return data.mean_error({.causal = true}); };
  return x;
}

/// The same in precision::fast, compared with full softmax in standard precision.
variant make_fast_variant(const operator_entry& entry, bool causal, const shared_flags& set) {
  variant x = make_variant(entry, causal, set);
  x.name = x.form = x.name + "_fast";
  x.products = arithmetic::of_bf16;
  x.rounding = std::same_as<element, float> ? 4e-5 : 1.5e-2;
  x.prepare = [standard = x.prepare](idx_t length) -> workload {
    return [run = standard(length)](attn::execution& exec) mutable {
      exec.set_precision(attn::precision::fast);
      run(exec);
    };
  };
  x.error = [&entry, causal, set](const dataset& data) {
    return error_of(entry, data, causal, *set, attn::precision::fast);
  };
  return x;
}

std::vector<variant> variants_of_type(const flags& given) {
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
        variants.back().family = f.title;
        if (given.precision == "fast" && entry.has_fast && attn::detail::has_fast_products<element>())
          variants.push_back(make_fast_variant(entry, causal, set));
        add_settings(entry, causal);
      }
      for (int causal = first; causal < forms && entry.backward; ++causal)
        variants.push_back(make_backward_variant(entry, causal, set));
    }
    for (const decode_entry& entry : f.decoders)
      if (entry.cache_type.empty() || lists(given.cache_type, entry.cache_type))
        variants.push_back(make_variant(entry, set));
  }
  return variants;
}

const type_registration registration({type_name, variants_of_type});

}  // namespace

}  // namespace bench::ATTN_BENCH_TYPE
