// Bad input to multipole, its cache and its step: std::invalid_argument in one sentence; out, lse and the cache stay as
// they were.
#include "support/call_multipole.hpp"
#include "support/refusals.hpp"

namespace testing::multipole_refusals_tests {
namespace {

struct multipole_call_of_test : call_inputs<attn::multipole_options<float>> {
  void assign(idx_t b, idx_t h, idx_t j, idx_t value) {
    indices.assign(static_cast<std::size_t>(b * h * j), 0);
    if (!indices.empty()) indices.back() = value;
    options.assignment = {indices.data(), {b, h, j}};
  }
};

struct multipole_form {
  using options = attn::multipole_options<float>;
  static void call(multipole_call_of_test& d, attn::execution& execution) {
    compiled_multipole<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.options, execution);
  }
};

bool untouched(const tensor<float>& x) {
  return std::all_of(x.data.begin(), x.data.end(), [](float value) { return value == 7; });
}

}  // namespace

TEST_CASE("multipole refuses what does not fit", "[multipole_refusals]") {
  using here = multipole_call_of_test;
  auto list = common_refusals<here>();
  list.push_back({"negative exact", "exact >= 0; found -1", [](here& d) { d.options.exact = -1; }});
  list.push_back({"negative clusters", "clusters >= 0; found -2", [](here& d) { d.options.clusters = -2; }});
  list.push_back({"too many clusters", "clusters <= 16777216", [](here& d) { d.options.clusters = idx_t(1) << 25; }});
  list.push_back({"neither", "exact keys or clusters; found neither",
                  [](here& d) { d.options.exact = 0, d.options.clusters = 0; }});
  list.push_back({"no block", "block >= 1; found 0", [](here& d) { d.options.block = 0; }});
  list.push_back({"no probe", "probe >= 1; found 0", [](here& d) { d.options.probe = 0; }});
  list.push_back(
      {"negative candidates", "candidate_clusters >= 0; found -3", [](here& d) { d.options.candidate_clusters = -3; }});
  list.push_back(
      {"no segment", "segment >= 1; found 0", [](here& d) { d.options.causal = true, d.options.segment = 0; }});
  list.push_back(
      {"no lookback", "lookback >= 1; found 0", [](here& d) { d.options.causal = true, d.options.lookback = 0; }});
  list.push_back({"a lookback not causal", "a lookback with causal only", [](here& d) { d.options.lookback = 3; }});
  list.push_back({"a segment not causal", "a segment with causal only", [](here& d) { d.options.segment = 3; }});
  list.push_back({"negative iterations", "iterations >= 0; found -1", [](here& d) { d.options.iterations = -1; }});
  list.push_back({"an assignment beyond the clusters", "assignment from 0 to 63; found 64",
                  [](here& d) { d.assign(2, 2, 9, 64); }});
  list.push_back(
      {"a negative assignment", "assignment from 0 to 63; found -1", [](here& d) { d.assign(2, 2, 9, -1); }});
  list.push_back({"an assignment to no clusters", "clusters > 0 with an assignment; found 0",
                  [](here& d) { d.assign(2, 2, 9, 0), d.options.clusters = 0; }});
  list.push_back({"an assignment of another batch", "assignment batch = key batch 2; found 1",
                  [](here& d) { d.assign(1, 2, 9, 0); }});
  list.push_back({"an assignment of query heads", "assignment heads = key heads 2; found 4",
                  [](here& d) { d.assign(2, 4, 9, 0); }});
  list.push_back({"an assignment of another length", "assignment length = key length 9; found 6",
                  [](here& d) { d.assign(2, 2, 6, 0); }});
  check_refused<multipole_form, 9, here>("multipole", list);
}

TEST_CASE("multipole_cache refuses what does not fit", "[multipole_refusals]") {
  const auto made = [](attn::multipole_cache_options o, attn::state_extents e = {.dim = 4}) {
    return refusal([&] { attn::multipole_cache<float> cache(e, o); });
  };
  CHECK(made({}) == "");
  for (const auto& [message, says] : {std::pair{made({.exact = -1}), "exact >= 0"},
                                      {made({.clusters = -1}), "clusters >= 0"},
                                      {made({.exact = 0, .clusters = 0}), "exact keys or clusters"},
                                      {made({.segment = 0}), "segment >= 1"},
                                      {made({.candidate_clusters = -1}), "candidate_clusters >= 0"},
                                      {made({.iterations = -1}), "iterations >= 0"}}) {
    INFO(message);
    CHECK(well_formed(message, "multipole_cache"));
    CHECK(message.find(says) != std::string::npos);
  }
  CHECK(made({}, {.batch = -1, .dim = 4}) != "");

  attn::multipole_cache<float> cache({.batch = 1, .heads = 2, .dim = 4}, {.clusters = 2, .segment = 2});
  const tensor<float> k(1, 2, 3, 4, 0.5f), other(1, 1, 3, 4, 0.5f);
  cache.append(view(k), view(k));
  CHECK(refusal([&] { cache.append(view(other), view(k)); }).find("heads") != std::string::npos);
  CHECK(refusal([&] { cache.append(cache.keys(), cache.values()); }).find("separate memory") != std::string::npos);
  CHECK(well_formed(refusal([&] { cache.truncate(4); }), "multipole_cache"));
  CHECK(well_formed(refusal([&] { cache.truncate(-1); }), "multipole_cache"));
  CHECK(cache.tokens() == 3);
}

TEST_CASE("multipole_step refuses what does not fit", "[multipole_refusals]") {
  attn::multipole_cache<float> cache({.batch = 1, .heads = 2, .dim = 4}, {.clusters = 2, .segment = 2});
  const tensor<float> some(1, 4, 5, 8, 0.5f);
  const auto shaped = [&](idx_t b, idx_t h, idx_t i, idx_t d) {
    return in_view<float>(some.data.data(), {b, h, i, d});
  };
  cache.append(shaped(1, 2, 3, 4), shaped(1, 2, 3, 4));
  tensor<float> out(1, 4, 1, 4, 7), lse(1, 4, 1, 1, 7);
  struct inputs {
    in_view<float> q, k, v;
    attn::multipole_step_options<float> o{};
  };
  const inputs good{shaped(1, 4, 1, 4), shaped(1, 2, 1, 4), shaped(1, 2, 1, 4), {}};
  const auto refused_by = [&](const std::function<void(inputs&)>& alter) {
    inputs x = good;
    x.o.lse = row_view(lse);
    alter(x);
    attn::execution serial;
    const std::string message =
        refusal([&] { compiled_multipole<float>::step(cache, x.q, x.k, x.v, view(out), x.o, serial); });
    CHECK(cache.tokens() == 3);
    CHECK(untouched(out));
    CHECK(untouched(lse));
    return message;
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::pair<const char*, std::function<void(inputs&)>> list[] = {
      {"heads", [&](inputs& x) { x.k = shaped(1, 1, 1, 4); }},
      {"heads", [&](inputs& x) { x.q = shaped(1, 3, 1, 4); }},
      {"dim", [&](inputs& x) { x.v = shaped(1, 2, 1, 5); }},
      {"length", [&](inputs& x) { x.q = shaped(1, 4, 2, 4); }},
      {"scale", [&](inputs& x) { x.o.scale = nan; }},
      {"softcap", [&](inputs& x) { x.o.softcap = 0.0f; }},
      {"separate memory",
       [&](inputs& x) { x.q = reshaped(cache.keys().data(), 1, 4, 1, 4).strided(0, 0, 4, 1); }},
  };
  for (const auto& [says, alter] : list) {
    const std::string message = refused_by(alter);
    INFO(says << " | " << message);
    CHECK(well_formed(message, "multipole_step"));
    CHECK(message.find(says) != std::string::npos);
  }
}

}  // namespace testing::multipole_refusals_tests
