// multi_head_latent and its step against the reference, which makes the keys and values of every head.
#include "layers/multi_head_latent.hpp"

namespace testing::multi_head_latent_tests {
namespace {

template <class S>
latent_layer_problem rounded_to(latent_layer_problem p) {
  for (auto& x : p.inputs) x = rounded<S>(x);
  return p;
}

// Up to six roundings in a row, each within the tolerance; what is projected is rounded to the storage type.
template <class S>
constexpr double allowed = 6 * tolerance<S>::out;

template <class S>
double error_of(const latent_layer_problem& given) {
  const auto p = rounded_to<S>(given);
  attn::execution serial;
  return relative_error(run_latent_layer<S>(p, serial), p.by_reference(p.inputs));
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("multi_head_latent: weights that models have, in both forms", "[multi_head_latent]",
                        all_types) {
  for (int bits = 0; bits < 32; ++bits)
    for (const auto form : {attn::latent_form::expanded, attn::latent_form::absorbed}) {
      auto p = random_latent_layer({.low_rank = bool(bits & 1), .norms = bool(bits & 2), .output = bool(bits & 4),
                                    .rotated = bool(bits & 8), .causal = bool(bits & 16)});
      p.form = form;
      INFO(name_of(p) << ", form " << int(form));
      CHECK(error_of<TestType>(p) <= allowed<TestType>);
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head_latent: lengths, widths, scale", "[multi_head_latent]", all_types) {
  for (idx_t length : {0, 1, 2, 48, 65, 130})
    for (idx_t shared : {0, 2, 16}) {
      auto p = random_latent_layer({.length = length, .model = 33, .heads = 2, .key = 16, .value = 24,
                                    .shared = shared, .rank = 40, .rotated = shared > 0});
      if (shared == 2) p.scale = 0.3, p.lengths = {length / 2, length};
      INFO(name_of(p));
      CHECK(error_of<TestType>(p) <= allowed<TestType>);
    }
}

TEMPLATE_LIST_TEST_CASE("multi_head_latent_step: token by token and in chunks as all at once", "[multi_head_latent]",
                        all_types) {
  using S = TestType;
  for (bool rotated : {false, true}) {
    const auto p = rounded_to<S>(random_latent_layer({.length = 40, .rotated = rotated}));
    const tensor<double> wanted = p.by_reference(p.inputs);
    std::vector<tensor<S>> in;
    for (const auto& x : p.inputs) in.push_back(cast<S>(x));
    const auto w = latent_weights_of(p, in);
    const auto options = latent_options_of<S, attn::multi_head_latent_step_options<S>>(p);
    attn::kv_cache<S> cache({.batch = 2, .dim = 13, .value_dim = 7}, {.values_in_keys = true});
    attn::execution serial;
    tensor<S> out(2, 1, 40, 8, S(7));
    for (idx_t begin = 0, chunk = 1; begin < 40; begin += chunk, chunk = std::min<idx_t>(2 * chunk, 40 - begin))
      compiled_multi_head_latent<S>::step(cache, sequence(std::as_const(in[0])).slice(1, begin, chunk),
                                          sequence(out).slice(1, begin, chunk), w, options, serial);
    CAPTURE(rotated);
    CHECK(relative_error(out, wanted) <= allowed<S>);
    CHECK(cache.tokens() == 40);
  }
}

// A prompt is attended as the layer does, and goes on from the cache.
TEMPLATE_LIST_TEST_CASE("multi_head_latent_step: a prompt, then tokens", "[multi_head_latent]", all_types) {
  using S = TestType;
  auto p = rounded_to<S>(random_latent_layer({.length = 80}));
  for (bool padded : {false, true}) {
    if (padded) p.lengths = {66, 75};
    const tensor<double> wanted = [&] {
      auto all = p;
      for (idx_t& n : all.lengths) n += 5;
      return all.by_reference(all.inputs);
    }();
    std::vector<tensor<S>> in;
    for (const auto& x : p.inputs) in.push_back(cast<S>(x));
    const auto w = latent_weights_of(p, in);
    auto options = latent_options_of<S, attn::multi_head_latent_step_options<S>>(p);
    attn::kv_cache<S> cache({.batch = 2, .dim = 13, .value_dim = 7}, {.values_in_keys = true});
    attn::execution serial;
    tensor<S> out(2, 1, 80, 8, S(7)), last(2, 1, 5, 8), x(2, 1, 5, 10);
    compiled_multi_head_latent<S>::step(cache, sequence(std::as_const(in[0])).slice(1, 0, 75),
                                        sequence(out).slice(1, 0, 75), w, options, serial);
    options.attention.lengths = {};
    const auto begin = [&](idx_t b) { return padded ? p.lengths[static_cast<std::size_t>(b)] : 75; };
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t i = 0; i < 5; ++i)
        for (idx_t d = 0; d < 10; ++d) x(b, 0, i, d) = in[0](b, 0, begin(b) + i, d);
    compiled_multi_head_latent<S>::step(cache, sequence(std::as_const(x)), sequence(last), w, options, serial);
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t i = begin(b); i < 80; ++i)
        for (idx_t d = 0; d < 8; ++d) out(b, 0, i, d) = i < begin(b) + 5 ? last(b, 0, i - begin(b), d) : S(0);
    CAPTURE(padded);
    CHECK(relative_error(out, wanted) <= allowed<S>);
    CHECK(cache.tokens(0) == begin(0) + 5);
  }
}

TEST_CASE("multi_head_latent_step: a prompt that is refused leaves the cache as it was", "[multi_head_latent]") {
  const auto p = random_latent_layer({.batch = 1, .length = 75});
  std::vector<tensor<float>> in;
  for (const auto& x : p.inputs) in.push_back(cast<float>(x));
  auto options = latent_options_of<float, attn::multi_head_latent_step_options<float>>(p);
  const std::vector<float> sinks(2);  // of 3 heads
  options.attention.sinks = sinks;
  attn::execution serial;
  tensor<float> out(1, 1, 75, 8, 7.0f);
  const auto says = [&](idx_t dim, idx_t value_dim, bool values_in_keys) {
    attn::kv_cache<float> cache({.dim = dim, .value_dim = value_dim}, {.values_in_keys = values_in_keys});
    const auto step = [&] {
      compiled_multi_head_latent<float>::step(cache, sequence(std::as_const(in[0])), sequence(out),
                                              latent_weights_of(p, in), options, serial);
    };
    const std::string message = refusal(step);
    CHECK(cache.tokens() == 0);
    return message;
  };
  CHECK(says(13, 7, true).find("sinks, one per head: 3; found 2") != std::string::npos);
  CHECK(says(13, 7, false).find("a cache with values_in_keys") != std::string::npos);
  CHECK(says(14, 7, true).find("cache dim = latent dim + rotary dim 13; found 14") != std::string::npos);
  CHECK(out == tensor<float>(1, 1, 75, 8, 7.0f));
}

// Items of different lengths: each goes on at its own position; padding is neither fed nor seen, and its rows are 0.
TEST_CASE("multi_head_latent_step: items of different lengths", "[multi_head_latent]") {
  auto p = rounded_to<float>(random_latent_layer({.length = 9}));
  const tensor<double> wanted = p.by_reference(p.inputs);
  std::vector<tensor<float>> in;
  for (const auto& x : p.inputs) in.push_back(cast<float>(x));
  const auto w = latent_weights_of(p, in);
  auto options = latent_options_of<float, attn::multi_head_latent_step_options<float>>(p);
  attn::kv_cache<float> cache({.batch = 2, .dim = 13, .value_dim = 7}, {.values_in_keys = true});
  attn::execution serial;
  const std::vector<std::vector<idx_t>> fed = {{3, 0}, {0, 2}, {1, 4}, {4, 3}, {0, 0}};
  std::vector<idx_t> before = {0, 0};
  tensor<float> out(2, 1, 9, 8, 7.0f);
  for (const auto& lengths : fed) {
    tensor<float> x(2, 1, 4, 10, std::numeric_limits<float>::quiet_NaN()), some(2, 1, 4, 8, 7.0f);
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t i = 0; i < lengths[std::size_t(b)]; ++i)
        for (idx_t d = 0; d < 10; ++d) x(b, 0, i, d) = in[0](b, 0, before[std::size_t(b)] + i, d);
    options.attention.lengths = lengths;
    compiled_multi_head_latent<float>::step(cache, sequence(std::as_const(x)), sequence(some), w, options, serial);
    for (idx_t b = 0; b < 2; ++b)
      for (idx_t i = 0; i < 4; ++i)
        for (idx_t d = 0; d < 8; ++d)
          if (i < lengths[std::size_t(b)]) out(b, 0, before[std::size_t(b)] + i, d) = some(b, 0, i, d);
          else CHECK(some(b, 0, i, d) == 0);
    for (std::size_t b = 0; b < 2; ++b) before[b] += lengths[b];
  }
  for (idx_t i = 8; i < 9; ++i)
    for (idx_t d = 0; d < 8; ++d) out(0, 0, i, d) = static_cast<float>(wanted(0, 0, i, d));  // item 0 ends before
  CHECK(cache.tokens(0) == 8);
  CHECK(cache.tokens(1) == 9);
  CHECK(relative_error(out, wanted) <= allowed<float>);
}

}  // namespace testing::multi_head_latent_tests
