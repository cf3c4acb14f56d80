// Biases by distance: against a bias of every pair, and the buckets of T5.
#include <attn/softmax/relative_bias.hpp>

#include "support/catch.hpp"
#include "support/refusal.hpp"
#include "support/run_backward.hpp"

namespace testing::relative_bias_tests {
namespace {

// The same scores by the option bias, and its gradient summed by distance.
tensor<double> by_pairs(const tensor<double>& table, idx_t queries, idx_t keys) {
  const idx_t reach = table.dim() / 2;
  tensor<double> bias(1, table.length(), queries, keys);
  for (idx_t h = 0; h < table.length(); ++h)
    for (idx_t i = 0; i < queries; ++i)
      for (idx_t j = 0; j < keys; ++j)
        bias(0, h, i, j) = table(0, 0, h, std::clamp(j - (i + keys - queries), -reach, reach) + reach);
  return bias;
}
tensor<double> by_distance(const tensor<double>& d_bias, idx_t reach) {
  tensor<double> sums(1, 1, d_bias.heads(), 2 * reach + 1);
  for (idx_t h = 0; h < d_bias.heads(); ++h)
    for (idx_t i = 0; i < d_bias.length(); ++i)
      for (idx_t j = 0; j < d_bias.dim(); ++j)
        sums(0, 0, h, std::clamp(j - (i + d_bias.dim() - d_bias.length()), -reach, reach) + reach) +=
            d_bias(0, h, i, j);
  return sums;
}

}  // namespace

TEST_CASE("a relative bias is the bias of its pairs, within reach and beyond", "[relative_bias]") {
  for (idx_t reach : {0, 3, 64, 400})
    for (idx_t rows : {1, 4}) {
      CAPTURE(reach, rows);
      auto p =
          random_problem<full_softmax_problem>({.batch = 1, .queries = 40, .keys = 140, .dim = 8, .value_dim = 8}, 7);
      p.options.relative_bias = random_normal(5, 1, 1, rows, 2 * reach + 1);
      p = rounded<float>(p);
      auto pairs = p;
      pairs.options.bias = by_pairs(p.options.relative_bias, 40, 140), pairs.options.relative_bias = {};
      const auto found = run<float>(p), wanted = run<float>(pairs);
      CHECK(relative_error(found.out, wanted.out) <= 1e-6);
      CHECK(relative_error(found.lse, wanted.lse) <= 1e-6);

      const gradient_case c = case_of(p, true), of_pairs = case_of(pairs, true);
      tensors d = random_gradients(c.forward(independent(c.inputs)));
      round_results<float>(d);
      const named_tensors gradients = library_gradients<float>(p, c, d),
                          by_bias = library_gradients<float>(pairs, of_pairs, d);
      // Sums over all pairs of a distance, of both signs, which floats have rounded one by one in the other form.
      CHECK(relative_error(gradients.at("relative_bias"), by_distance(by_bias.at("bias"), reach)) <= 4e-6);
      CHECK(relative_error(gradients.at("q"), by_bias.at("q")) <= 1e-6);
      check_accumulate<float>(p);
    }
}

TEST_CASE("the gradient of a relative bias beyond a window is 0, and within it that of a score function's sums",
          "[relative_bias]") {
  for (idx_t dilation : {1, 3})
    for (const std::vector<idx_t>& globals : {std::vector<idx_t>{}, {2, 50}}) {
      CAPTURE(dilation, globals);
      auto p =
          random_problem<sliding_window_problem>({.batch = 1, .queries = 60, .keys = 60, .dim = 8, .value_dim = 8}, 4);
      p.options.left = 4, p.options.right = 2, p.options.dilation = {dilation}, p.options.global_positions = globals;
      p.options.relative_bias = random_normal(6, 1, 1, 4, 2 * 90 + 1);
      check_backward<float>(p);
    }
}

TEST_CASE("a relative bias may have any strides, and hide keys by distance", "[relative_bias]") {
  const tensor<float> q = cast<float>(random_normal(1, 1, 2, 40, 8)), k = cast<float>(random_normal(2, 1, 2, 40, 8)),
                      v = cast<float>(random_normal(3, 1, 2, 40, 8));
  std::vector<float> columns(2 * 21);  // [21, 2]
  for (std::size_t n = 0; n < columns.size(); ++n)
    columns[n] = n / 2 > 14 ? -std::numeric_limits<float>::infinity() : float(n % 7);
  tensor<float> out(1, 2, 40, 8), wanted(1, 2, 40, 8);
  attn::full_softmax(view(q), view(k), view(v), view(out), {.relative_bias = {columns.data(), {2, 21}, {1, 2}}});
  attn::full_softmax(view(q), view(k), view(v), view(wanted), {}, [&](float s, idx_t, idx_t h, idx_t i, idx_t j) {
    return s + columns[static_cast<std::size_t>(2 * (std::clamp<idx_t>(j - i, -10, 10) + 10) + h)];
  });
  CHECK(relative_error(cast<double>(out), cast<double>(wanted)) <= 1e-6);
}

TEST_CASE("T5's buckets", "[relative_bias]") {
  // Of 32 in both directions: the distances at which buckets begin, as the model's own function has them.
  const idx_t begins[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91};
  for (idx_t bucket = 0; bucket < 16; ++bucket) {
    CAPTURE(bucket);
    CHECK(attn::t5_bucket(-begins[bucket], 32) == bucket);
    if (bucket > 0) CHECK(attn::t5_bucket(1 - begins[bucket], 32) == bucket - 1);
    if (bucket > 0) CHECK(attn::t5_bucket(begins[bucket], 32) == 16 + bucket);
  }
  CHECK(attn::t5_bucket(-100000, 32) == 15);
  CHECK(attn::t5_bucket(5, 32, {.bidirectional = false}) == 0);
  CHECK(attn::t5_bucket(-15, 32, {.bidirectional = false}) == 15);
  CHECK(attn::t5_bucket(-127, 32, {.bidirectional = false}) == 31);

  // The gradient is the transpose of the expansion.
  const idx_t buckets = 8, heads = 3, reach = 40;
  std::vector<double> weights(buckets * heads), table(heads * (2 * reach + 1)), d_table(table.size()),
      d_weights(weights.size(), 7);
  random_source random(3);
  for (auto* x : {&weights, &d_table})
    for (double& number : *x) number = random.normal();
  for (bool bidirectional : {true, false}) {
    const attn::t5_bias_options options{.bidirectional = bidirectional, .max_distance = 20};
    const attn::tensor_view<double, 2> expanded(table.data(), {heads, 2 * reach + 1}),
        of(d_weights.data(), {buckets, heads});
    attn::t5_relative_bias<double>({weights.data(), {buckets, heads}}, expanded, options);
    attn::t5_relative_bias_backward<double>({d_table.data(), {heads, 2 * reach + 1}}, of, options);
    double forward = 0, backward = 0;
    for (std::size_t n = 0; n < table.size(); ++n) forward += table[n] * d_table[n];
    for (std::size_t n = 0; n < weights.size(); ++n) backward += weights[n] * d_weights[n];
    CHECK(std::abs(forward - backward) <= 1e-12 * static_cast<double>(table.size()));
    attn::t5_relative_bias_backward<double>({d_table.data(), {heads, 2 * reach + 1}}, of, options, true);
    double twice = 0;
    for (std::size_t n = 0; n < weights.size(); ++n) twice += weights[n] * d_weights[n];
    CHECK(std::abs(twice - 2 * backward) <= 1e-12 * static_cast<double>(table.size()));

    const auto refuses = [&](idx_t rows, idx_t cols, idx_t entries, const attn::t5_bias_options& wrong) {
      const std::string message = refusal([&] {
        attn::t5_relative_bias<double>({weights.data(), {rows, cols}}, {table.data(), {heads, entries}}, wrong);
      });
      INFO(message);
      CHECK(well_formed(message, "t5_relative_bias"));
    };
    refuses(buckets, 2, 9, options);
    refuses(buckets, heads, 8, options);
    refuses(1, heads, 9, options);
    refuses(buckets, heads, 9, {.bidirectional = bidirectional, .max_distance = bidirectional ? 2 : 4});
  }
}

}  // namespace testing::relative_bias_tests
