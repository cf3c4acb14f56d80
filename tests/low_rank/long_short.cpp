// long_short against its reference: every option alone and in combination, odd lengths, all types.
#include "reference/long_short.hpp"

#include "support/call_long_short.hpp"
#include "support/catch.hpp"
#include "support/refusals.hpp"
#include "support/run_long_short.hpp"

namespace testing::long_short_tests {
namespace {

long_short_problem problem_of(const problem_shape& s, idx_t rank, std::uint64_t seed = 1) {
  long_short_problem p = random_problem<long_short_problem>(s, seed);
  p.options.logits = random_normal(seed + 1000, s.batch, s.heads, s.keys, rank, 3);
  return p;
}

template <class S>
void check(const long_short_problem& p) {
  const errors e = long_short_errors<S>(p);
  CHECK(e.out <= made_keys_tolerance<S>::out);
  CHECK(e.lse <= made_keys_tolerance<S>::lse);
}

// Bits beyond the common ones: 64 block, 128 local norm, 256 global norm, 512 their shifts.
template <class S>
void check_choice(int choice, idx_t queries, idx_t keys, const tensor<double>& key_mask = {}) {
  CAPTURE(choice, queries, keys);
  const bool norms = choice & (128 | 256);
  long_short_problem p =
      problem_of({.queries = queries, .keys = keys, .dim = 9, .value_dim = norms ? idx_t(9) : idx_t(12)}, 3);
  auto& o = p.options;
  choose(o, choice, queries, keys);
  o.alibi_slopes = {}, o.score = {};
  o.left = 4, o.right = 3;
  if (o.causal) o.segment = 8;
  if (choice & 64) o.block = 5;
  if (choice & 128) o.local_gamma = random_values(1, 9);
  if (choice & 256) o.global_gamma = random_values(2, 9);
  if ((choice & 512) && (choice & 128)) o.local_beta = random_values(3, 9);
  if ((choice & 512) && (choice & 256)) o.global_beta = random_values(4, 9);
  o.key_mask = key_mask;
  check<S>(p);
  if (key_mask.empty()) return;
  attn::execution seven(7, 0);
  const reference::result alone = run_long_short<S>(p), others = run_long_short<S>(poisoned(p), seven);
  CHECK(alone.out == others.out);
  CHECK(alone.lse == others.lse);
}

}  // namespace

TEMPLATE_LIST_TEST_CASE("long_short: every combination of options", "[long_short]", exact_types) {
  for (int choice = 0; choice < 1024; ++choice) {
    if (choice & (8 | 16)) continue;  // no ALiBi, no score
    check_choice<TestType>(choice, 40, 40);
    check_choice<TestType>(choice, 25, 38);
  }
}

TEMPLATE_LIST_TEST_CASE("long_short: 16-bit storage computes in float", "[long_short]", storage_types) {
  for (int choice = 0; choice < 1024; ++choice)
    if (!(choice & (2 | 8 | 16))) check_choice<TestType>(choice, 21, 21);
}

TEST_CASE("long_short: keys and values without spread become what norms add", "[long_short]") {
  long_short_problem p = problem_of({.queries = 40, .keys = 40, .dim = 77, .value_dim = 77}, 3);
  for (double& x : p.k.data) x = 3.3;
  for (double& x : p.v.data) x = 0.1;
  p.options.local_gamma.assign(77, 1), p.options.global_gamma.assign(77, 1), p.options.norm_eps = 1e-12;
  for (double x : run_long_short<float>(p).out.data) CHECK(std::abs(x) <= 1e-6);
}

TEMPLATE_LIST_TEST_CASE("long_short: odd lengths, dims, ranks and segments", "[long_short]", exact_types) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257, 530}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t ranks[] = {0, 1, 5, 12, 13, 64};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(ranks); ++c)
      for (bool causal : {false, true}) {
        problem_shape shape{.batch = 1, .queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + c) % 8], shape.value_dim = dims[(n + 3 * c) % 8];
        long_short_problem p = problem_of(shape, ranks[c], n + 1);
        auto& o = p.options;
        o.left = 20, o.right = 9, o.block = c % 2 ? 0 : 24;
        if (causal) o.causal = true, o.segment = 1 + static_cast<idx_t>(37 * n + 11 * c) % 300;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, ranks[c], causal, o.segment);
        check<TestType>(p);
      }
}

TEMPLATE_LIST_TEST_CASE("long_short: queries and keys of different lengths", "[long_short]", exact_types) {
  const std::array<idx_t, 2> both_lengths[] = {{1, 300},  {2, 129}, {5, 1}, {300, 1},
                                               {129, 60}, {0, 9},   {9, 0}, {77, 530}};
  for (auto [queries, keys] : both_lengths)
    for (bool causal : {false, true}) {
      long_short_problem p = problem_of({.queries = queries, .keys = keys, .dim = 20, .value_dim = 24}, 7);
      p.options.left = 33, p.options.right = 4, p.options.causal = causal;
      if (causal) p.options.segment = 16;
      CAPTURE(queries, keys, causal);
      check<TestType>(p);
    }
}

TEST_CASE("long_short: huge windows and blocks do not overflow", "[long_short]") {
  const idx_t most = std::numeric_limits<idx_t>::max();
  for (auto [left, right, block] : {std::array<idx_t, 3>{most, most, 0}, {most, 0, most}, {3, most / 2, 7}})
    for (idx_t queries : {60, 90, 110})
      for (bool causal : {false, true}) {
        long_short_problem p = problem_of({.queries = queries, .keys = 90}, 4), cut = p;
        p.options.left = left, p.options.right = right, p.options.block = block, p.options.causal = causal;
        if (causal) p.options.segment = most;
        auto& o = cut.options = p.options;  // the reference adds them up
        o.left = std::min<idx_t>(left, 1000), o.right = std::min<idx_t>(right, 1000),
        o.block = std::min<idx_t>(block, 1000);
        if (causal) o.segment = 1000;
        const reference::result wanted = reference::long_short(cut.q, cut.k, cut.v, o);
        CHECK(relative_error(run_long_short<widest_type>(p).out, wanted.out) <= tolerance<widest_type>::out);
      }
}

TEMPLATE_LIST_TEST_CASE("long_short: a NaN logit reaches those who see its segment", "[long_short]", exact_types) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN();
  const idx_t head = 1, column = 2;
  for (auto [length, token, segment] :  // one part and several, of which one has NaN
       {std::array<idx_t, 3>{100, 37, 0}, {300, 37, 0}, {300, 299, 0}, {100, 37, 16}, {900, 301, 300}}) {
    long_short_problem p = problem_of({.batch = 1, .queries = length, .keys = length}, 3);
    p.options.causal = segment > 0, p.options.segment = segment;
    const reference::result clean = run_long_short<TestType>(p);
    // In one token of a part, and in all of one.
    for (idx_t count : {idx_t(1), segment > 0 ? segment : length}) {
      long_short_problem spoilt = p;
      const idx_t first = segment > 0 ? token / segment * segment : 0;
      const idx_t last = (segment > 0 ? first + segment : length) - 1, visible = segment > 0 ? last : 0;
      for (idx_t t = count == 1 ? token : first; t <= (count == 1 ? token : last); ++t)
        spoilt.options.logits(0, head, t, column) = nan;
      const reference::result result = run_long_short<TestType>(spoilt);
      CAPTURE(length, token, segment, count);
      idx_t wrong = 0;
      for (idx_t h = 0; h < clean.out.heads(); ++h)
        for (idx_t i = 0; i < length; ++i)
          for (idx_t d = 0; d < clean.out.dim(); ++d) {
            const double x = result.out(0, h, i, d);
            wrong += h == head && i >= visible ? !std::isnan(x) : x != clean.out(0, h, i, d);
          }
      CHECK(wrong == 0);
    }
  }
}

TEMPLATE_LIST_TEST_CASE("long_short: logits of -infinity leave tokens out", "[long_short]", exact_types) {
  constexpr double minus_infinity = -std::numeric_limits<double>::infinity();
  for (idx_t length : {100, 600})
    for (idx_t segment : {0, 16, 300}) {
      long_short_problem p = problem_of({.batch = 1, .queries = length, .keys = length}, 5);
      auto& o = p.options;
      o.causal = segment > 0, o.segment = segment;
      for (idx_t h = 0; h < 4; ++h)
        for (idx_t t = 0; t < length; ++t) {
          if (t % 16 != 5) o.logits(0, h, t, 0) = minus_infinity;  // one token in a segment
          if (t % 3 == 0) o.logits(0, h, t, 1) = minus_infinity;
          if (t % 300 < 256 && segment != 16) o.logits(0, h, t, 2) = t == 7 ? 1 : minus_infinity;
        }
      CAPTURE(length, segment);
      check<TestType>(p);
    }
}

TEMPLATE_LIST_TEST_CASE("long_short: keys that are hidden", "[long_short][key_mask]", all_types) {
  for (int choice = 0; choice < 1024; ++choice) {
    if (choice & (8 | 16)) continue;
    check_choice<TestType>(choice, 40, 40, gapped_key_mask(2, 40, 1));
    check_choice<TestType>(choice, 25, 38, gapped_key_mask(choice & 4 ? 1 : 2, 38));
  }
}

TEMPLATE_LIST_TEST_CASE("long_short: segments without a key that is seen", "[long_short][key_mask]", exact_types) {
  for (idx_t segment : {0, 20, 300}) {
    long_short_problem p = problem_of({.queries = 900, .keys = 900}, 5);
    auto& o = p.options;
    o.causal = segment > 0, o.segment = segment, o.left = 30;
    o.global_gamma = random_values(2, 16), o.global_beta = random_values(4, 16);
    o.key_mask = gapped_key_mask(2, 900);
    for (idx_t t = 0; t < 300; ++t) o.key_mask(0, 0, 0, t) = 0;  // padding on the left
    CAPTURE(segment);
    check<TestType>(p);
  }
}

TEST_CASE("long_short: a compressed key of no token is 0", "[long_short]") {
  for (idx_t length : {100, 600}) {
    long_short_problem p = problem_of({.batch = 1, .queries = length, .keys = length}, 2);
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t d = 0; d < p.k.dim(); ++d) p.k(0, h, 5, d) = 0;
    for (idx_t h = 0; h < 2; ++h)
      for (idx_t d = 0; d < p.v.dim(); ++d) p.v(0, h, 5, d) = 0;
    for (idx_t h = 0; h < 4; ++h)
      for (idx_t t = 0; t < length; ++t) p.options.logits(0, h, t, 1) = -std::numeric_limits<double>::infinity();
    const reference::result none = run_long_short<widest_type>(p);
    for (idx_t h = 0; h < 4; ++h) p.options.logits(0, h, 5, 1) = 0;  // the token of zeros alone
    CHECK(none.out == run_long_short<widest_type>(p).out);
  }
}

namespace {

// long_short with the logits of the good call.
struct long_short_form {
  using options = attn::long_short_options<float>;
  static void call(in_view<float> q, in_view<float> k, in_view<float> v, out_view<float> out, const options& chosen,
                   const score_of<float>&, attn::execution& execution) {
    const tensor<float> logits(2, 4, 9, 3);
    compiled_long_short<float>::call(q, k, v, out, view(logits), chosen, execution);
  }
};

}  // namespace

TEST_CASE("long_short refuses what does not fit", "[refusals]") {
  using here = call_inputs<long_short_form::options>;
  auto list = common_refusals<here>();
  for (const auto& bad : key_mask_refusals<here>()) list.push_back(bad);
  const auto with = [](auto set) { return [=](here& d) { set(d.options); }; };
  list.push_back({"a negative left", "left", with([](auto& o) { o.left = -1; })});
  list.push_back({"a negative right", "right", with([](auto& o) { o.right = -1; })});
  list.push_back({"a negative block", "block", with([](auto& o) { o.block = -1; })});
  list.push_back({"causal without a segment", "segment >= 1; found 0", with([](auto& o) { o.causal = true; })});
  list.push_back({"a negative segment", "segment", with([](auto& o) { o.causal = true, o.segment = -3; })});
  list.push_back({"a segment without causal", "segment with causal only", with([](auto& o) { o.segment = 4; })});
  list.push_back({"a negative norm_eps", "norm_eps", with([](auto& o) { o.norm_eps = -1; })});
  list.push_back({"a shift without a scale", "local_gamma", [](here& d) { d.options.local_beta = d.values(8); }});
  list.push_back(
      {"norms where the dims differ", "value dim = key dim", [](here& d) { d.options.global_gamma = d.values(8); }});
  check_refused<long_short_form>("long_short", list);
}

TEST_CASE("long_short refuses logits and norms that do not fit", "[refusals]") {
  const tensor<float> x(2, 4, 9, 8, 1), logits(2, 4, 9, 3, 1);
  tensor<float> out(2, 4, 9, 8, 7);
  const std::vector<float> short_list(7), list(8);
  attn::execution serial;
  const auto says = [&](in_view<float> given, const attn::long_short_options<float>& o) {
    const std::string message =
        refusal([&] { compiled_long_short<float>::call(view(x), view(x), view(x), view(out), given, o, serial); });
    INFO(message);
    CHECK(well_formed(message, "long_short"));
    CHECK(out == tensor<float>(2, 4, 9, 8, 7));
    return message;
  };
  const in_view<float> good = view(logits);
  CHECK(says(good.slice(0, 0, 1), {}).find("logits batch") != std::string::npos);
  CHECK(says(good.slice(1, 0, 2), {}).find("logits heads") != std::string::npos);
  CHECK(says(good.slice(2, 0, 8), {}).find("logits length = key length 9; found 8") != std::string::npos);
  CHECK(says({nullptr, {2, 4, 9, 3}}, {}).find("null") != std::string::npos);
  CHECK(says({out.data.data(), {2, 4, 9, 3}}, {}).find("overlap") != std::string::npos);
  CHECK(says(good, {.local_gamma = short_list}).find("local_gamma, one per dim: 8; found 7") != std::string::npos);
  CHECK(says(good, {.local_gamma = list, .local_beta = short_list}).find("local_beta") != std::string::npos);
  CHECK(says(good, {.global_gamma = short_list}).find("global_gamma") != std::string::npos);
  tensor<float> lse(2, 4, 9, 1, 7);
  for (const std::span<const float> read : {std::span(out.data).last(8), std::span(lse.data).first(8)}) {
    const auto rows = row_view(lse);
    CHECK(says(good, {.local_gamma = read, .lse = rows}).find("local_gamma in separate") != std::string::npos);
    CHECK(says(good, {.local_gamma = list, .local_beta = read, .lse = rows}).find("overlap") != std::string::npos);
    CHECK(says(good, {.global_gamma = read, .lse = rows}).find("overlap") != std::string::npos);
    CHECK(says(good, {.global_gamma = list, .global_beta = read, .lse = rows}).find("overlap") != std::string::npos);
  }
}

}  // namespace testing::long_short_tests
