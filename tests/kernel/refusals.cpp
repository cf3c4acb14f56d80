// Bad input is refused on entry: std::invalid_argument in one sentence, out and state untouched.
#include <algorithm>
#include <functional>
#include <sstream>

#include "support/call_kernel.hpp"
#include "support/refused.hpp"

namespace testing::refusals_tests {
namespace {

// A good call, to be spoilt in one place: batch 2, heads 4 over 2, lengths 6 and 9 (a step: 6 and 6), dims 8 and 5.
struct call_inputs {
  tensor<float> q{2, 4, 6, 8, 0.5f}, k{2, 2, 9, 8, 0.25f}, v{2, 2, 9, 5, 2}, out{2, 4, 6, 5, 7}, other{2, 4, 30, 30, 1};
  tensor<float> w{1, 1, 10, 8, 0.1f}, gate{2, 4, 9, 1, 0.5f};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> out_view_ = view(out);
  attn::tensor_view<const float, 3> features = features_of(w);
  std::vector<idx_t> indices;
  attn::linear_options<float> linear;
  attn::performer_options<float> performer;
  attn::rfa_options<float> rfa;

  call_inputs() = default;
  call_inputs(const call_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out}; }

  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
  std::span<const idx_t> list(std::vector<idx_t> values) { return indices = std::move(values); }
  attn::tensor_view<const float, 3> gates(idx_t b, idx_t h, idx_t n) const { return {gate.data.data(), {b, h, n}}; }
};

using refused = testing::refused<call_inputs>;

// What every one of them refuses.
std::vector<refused> common() {
  return {
      {"another batch of k", "batch", [](call_inputs& d) { d.k_view = d.shaped(1, 2, 9, 8); }},
      {"heads of k that do not divide", "heads",
       [](call_inputs& d) { d.k_view = d.shaped(2, 3, 9, 8), d.v_view = d.shaped(2, 3, 9, 5); }},
      {"other heads of v", "heads", [](call_inputs& d) { d.v_view = d.shaped(2, 4, 9, 5); }},
      {"another dim of k", "key dim = query dim 8; found 7", [](call_inputs& d) { d.k_view = d.shaped(2, 2, 9, 7); }},
      {"another length of v", "length", [](call_inputs& d) { d.v_view = d.shaped(2, 2, 8, 5); }},
      {"another dim of out", "dim", [](call_inputs& d) { d.out_view_ = d.out_view_.slice(3, 0, 4); }},
      {"a null q", "null", [](call_inputs& d) { d.q_view = null_view(2, 4, 6, 8); }},
      {"a null out", "null", [](call_inputs& d) { d.out_view_ = null_view(2, 4, 6, 5); }},
      {"out that is k", "overlap", [](call_inputs& d) { d.k_view = reshaped(d.out, 2, 2, 9, 8).strided(0, 0, 8, 1); }},
      {"out whose rows are one", "overlap",
       [](call_inputs& d) { d.out_view_ = reshaped(d.out, 2, 4, 6, 5).strided(120, 30, 0, 1); }}};
}

// The lengths of all three calls.
std::vector<refused> lengths() {
  const auto set = [](const char* what, const char* says, std::function<void(call_inputs&, std::span<const idx_t>)> put,
                      std::vector<idx_t> values) {
    return refused{what, says, [put, values](call_inputs& d) { put(d, d.list(values)); }};
  };
  const auto both = [](call_inputs& d, std::span<const idx_t> x) {
    d.linear.lengths = d.performer.lengths = d.rfa.lengths = x;
  };
  const auto queries = [](call_inputs& d, std::span<const idx_t> x) {
    d.linear.query_lengths = d.performer.query_lengths = d.rfa.query_lengths = x;
  };
  const auto keys = [](call_inputs& d, std::span<const idx_t> x) {
    d.linear.key_lengths = d.performer.key_lengths = d.rfa.key_lengths = x;
  };
  return {set("lengths for q and k of different length", "lengths", both, {6, 6}),
          set("too few query lengths", "query_lengths", queries, {6}),
          set("a query length beyond the buffer", "query_lengths", queries, {6, 7}),
          set("a negative key length", "key_lengths", keys, {-1, 9})};
}

std::vector<refused> features() {
  return {{"features of another dim", "feature columns = query dim 8; found 7",
           [](call_inputs& d) { d.features = reshaped(d.w, 1, 10, 7); }},
          {"no features", "features", [](call_inputs& d) { d.features = reshaped(d.w, 1, 0, 8); }},
          {"features not given", "features", [](call_inputs& d) { d.features = {}; }},
          {"features with a negative extent", "features", [](call_inputs& d) { d.features = reshaped(d.w, 1, -3, 8); }},
          {"features for other heads", "heads", [](call_inputs& d) { d.features = reshaped(d.w, 3, 2, 8); }},
          {"features for no heads, as many as queries have", "heads",
           [](call_inputs& d) {
             d.q_view = d.q_view.slice(1, 0, 0), d.out_view_ = d.out_view_.slice(1, 0, 0);
             d.features = {d.w.data.data(), {0, 10, 8}};
           }},
          {"features without end", "features",
           [](call_inputs& d) { d.features = reshaped(d.w, 1, idx_t(1) << 56, 8).strided(0, 0, 1); }},
          {"null features", "null", [](call_inputs& d) { d.features = null_view(1, 10, 8); }},
          {"out in the features", "overlap", [](call_inputs& d) { d.features = reshaped(d.out, 1, 10, 8); }}};
}

// `put` gives the call gates.
std::vector<refused> gates(const std::function<void(call_inputs&, attn::tensor_view<const float, 3>)>& put,
                           idx_t length) {
  const auto of_shape = [&](const char* what, const char* says, idx_t b, idx_t h, idx_t n) {
    return refused{what, says, [=](call_inputs& d) { put(d, d.gates(b, h, n)); }};
  };
  const auto with = [&](const char* what, float value) {
    return refused{what, "from 0 to 1", [=](call_inputs& d) {
                     d.gate.data[static_cast<std::size_t>(length)] = value;
                     put(d, d.gates(2, 4, length));
                   }};
  };
  return {of_shape("gates of another batch", "batch", 1, 4, length),
          of_shape("gates of other heads", "heads", 2, 3, length),
          of_shape("gates of no heads", "heads", 2, 0, length),
          {"gates of no heads, as many as queries have", "heads",
           [=](call_inputs& d) {
             d.q_view = d.q_view.slice(1, 0, 0), d.out_view_ = d.out_view_.slice(1, 0, 0);
             put(d, d.gates(2, 0, length));
           }},
          of_shape("gates of another length", "length", 2, 4, length - 1),
          with("a gate below 0", -0.01f),
          with("a gate above 1", 1.01f),
          with("a gate of NaN", std::numeric_limits<float>::quiet_NaN()),
          {"null gates", "null",
           [=](call_inputs& d) {
             put(d, {nullptr, {2, 4, length}});
           }},
          {"gates in out", "overlap", [=](call_inputs& d) {
             put(d, {d.out.data.data(), {2, 4, length}});
           }}};
}

template <class... Lists>
std::vector<refused> joined(const Lists&... lists) {
  std::vector<refused> all;
  (all.insert(all.end(), lists.begin(), lists.end()), ...);
  return all;
}

constexpr float nan = std::numeric_limits<float>::quiet_NaN(), infinite = std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("linear refuses what does not fit", "[refusals]") {
  const std::vector<refused> own = {
      {"a negative eps", "eps", [](call_inputs& d) { d.linear.eps = -1; }},
      {"an eps of NaN", "eps", [](call_inputs& d) { d.linear.eps = nan; }},
      {"decay without causal", "causal", [](call_inputs& d) { d.linear.decay = d.gates(2, 4, 9); }}};
  const auto decayed = [](call_inputs& d, attn::tensor_view<const float, 3> g) {
    d.linear.causal = true, d.linear.decay = g;
  };
  check_refused("linear", joined(common(), lengths(), gates(decayed, 9), own), [](call_inputs& d) {
    attn::execution serial;
    compiled_linear<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.linear,
                                 reference::linear_feature::elu_plus_one, serial);
  });
  struct map_of {
    idx_t count;
    idx_t features(idx_t) const { return count; }
    void operator()(std::span<const float>, std::span<float>) const {}
  };
  call_inputs d;
  for (idx_t count : {idx_t(-1), idx_t(1) << 56, std::numeric_limits<idx_t>::max()})
    CHECK(well_formed(refusal([&] { attn::linear(d.q_view, d.k_view, d.v_view, d.out_view_, {}, map_of{count}); }),
                      "linear"));
}

TEST_CASE("linear: gates of padding may be anything", "[refusals]") {
  call_inputs d;
  d.linear.causal = true;
  d.linear.key_lengths = d.list({4, 9});
  for (idx_t h = 0; h < 4; ++h) d.gate(0, h, 7, 0) = nan;
  d.linear.decay = d.gates(2, 4, 9);
  attn::execution serial;
  compiled_linear<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.linear,
                               reference::linear_feature::elu_plus_one, serial);
  CHECK(all_finite(d.out));
}

TEST_CASE("performer refuses what does not fit", "[refusals]") {
  using attn::performer_kernel;
  const std::vector<refused> own = {
      {"a negative eps", "eps", [](call_inputs& d) { d.performer.eps = -1; }},
      {"an infinite eps", "eps", [](call_inputs& d) { d.performer.eps = infinite; }},
      {"a negative scale", "scale", [](call_inputs& d) { d.performer.scale = -0.5f; }},
      {"a scale of NaN", "scale", [](call_inputs& d) { d.performer.scale = nan; }},
      {"a negative feature_eps", "feature_eps", [](call_inputs& d) { d.performer.feature_eps = -1; }},
      {"feature_eps of sines", "feature_eps",
       [](call_inputs& d) { d.performer.feature_eps = 0.1f, d.performer.kernel = performer_kernel::trigonometric; }},
      {"feature_eps of hyperbolic features", "feature_eps",
       [](call_inputs& d) { d.performer.feature_eps = 0.1f, d.performer.kernel = performer_kernel::hyperbolic; }},
      {"feature_eps, causal", "causal",
       [](call_inputs& d) { d.performer.feature_eps = 0.1f, d.performer.causal = true; }},
      {"centred keys, causal", "center_keys",
       [](call_inputs& d) { d.performer.center_keys = d.performer.causal = true; }}};
  check_refused("performer", joined(common(), lengths(), features(), own), [](call_inputs& d) {
    attn::execution serial;
    compiled_performer<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.features, d.performer, serial);
  });
}

TEST_CASE("rfa refuses what does not fit", "[refusals]") {
  const std::vector<refused> own = {
      {"a negative eps", "eps", [](call_inputs& d) { d.rfa.eps = -1; }},
      {"a negative norm_eps", "norm_eps", [](call_inputs& d) { d.rfa.norm_eps = -1; }},
      {"a gate without causal", "causal", [](call_inputs& d) { d.rfa.gate = d.gates(2, 4, 9); }}};
  const auto gated = [](call_inputs& d, attn::tensor_view<const float, 3> g) { d.rfa.causal = true, d.rfa.gate = g; };
  check_refused("rfa", joined(common(), lengths(), features(), gates(gated, 9), own), [](call_inputs& d) {
    attn::execution serial;
    compiled_rfa<float>::call(d.q_view, d.k_view, d.v_view, d.out_view_, d.features, d.rfa, serial);
  });
}

TEST_CASE("steps refuse what does not fit, and leave the state as it was", "[refusals]") {
  // A step of as many queries as keys; the state is what `make` says.
  const auto check = [](const std::string& name, auto make, auto step, const std::vector<refused>& list) {
    check_refused(name, list, [&](call_inputs& d) {
      if (d.k_view.extent(2) == 9) d.k_view = d.k_view.slice(2, 0, 6);
      if (d.v_view.extent(2) == 9) d.v_view = d.v_view.slice(2, 0, 6);
      auto state = make(2, 2, 5);
      std::ostringstream before, after;
      state.write(before);
      try {
        step(state, d);
      } catch (...) {
        state.write(after);
        CHECK(after.str() == before.str());
        throw;
      }
    });
    call_inputs d;
    d.k_view = d.k_view.slice(2, 0, 6), d.v_view = d.v_view.slice(2, 0, 6);
    for (auto [batch, heads, dim] : {std::array<idx_t, 3>{1, 2, 5}, {2, 3, 5}, {2, 1, 5}, {2, 2, 4}}) {
      auto state = make(batch, heads, dim);
      CHECK(well_formed(refusal([&] { step(state, d); }), name));
    }
    auto state = make(2, 2, 5);
    CHECK(well_formed(refusal([&] {
                        d.k_view = d.k_view.slice(2, 0, 5), d.v_view = d.v_view.slice(2, 0, 5);
                        step(state, d);
                      }),
                      name));
    CHECK(std::all_of(d.out.data.begin(), d.out.data.end(), [](float x) { return x == 7; }));
  };
  const std::vector<refused> some = {
      {"another dim of k", "dim", [](call_inputs& d) { d.k_view = d.shaped(2, 2, 6, 7); }},
      {"another batch of v", "batch", [](call_inputs& d) { d.v_view = d.shaped(1, 2, 6, 5); }},
      {"a null q", "null", [](call_inputs& d) { d.q_view = null_view(2, 4, 6, 8); }},
      {"out that is v", "overlap",
       [](call_inputs& d) { d.v_view = reshaped(d.out, 2, 2, 6, 5).strided(60, 30, 5, 1); }}};
  check(
      "linear_step",
      [](idx_t b, idx_t h, idx_t dim) {
        return attn::linear_state<float>({.batch = b, .heads = h, .features = 8, .value_dim = dim});
      },
      [](auto& state, call_inputs& d) {
        attn::execution serial;
        attn::linear_step_options<float> options;
        options.decay = d.linear.decay, options.eps = d.linear.eps;
        compiled_linear<float>::step(state, d.q_view, d.k_view, d.v_view, d.out_view_, options,
                                     reference::linear_feature::elu_plus_one, serial);
      },
      joined(some, std::vector<refused>{{"a negative eps", "eps", [](call_inputs& d) { d.linear.eps = -1; }},
                                        {"decay per query head for a state of key heads", "heads",
                                         [](call_inputs& d) { d.linear.decay = d.gates(2, 4, 6); }},
                                        {"a decay above 1", "from 0 to 1", [](call_inputs& d) {
                                           d.gate.data[3] = 1.5f, d.linear.decay = d.gates(2, 2, 6);
                                         }}}));
  check(
      "performer_step",
      [](idx_t b, idx_t h, idx_t dim) {
        return attn::performer_state<float>({.batch = b, .heads = h, .features = 10, .value_dim = dim});
      },
      [](auto& state, call_inputs& d) {
        attn::execution serial;
        compiled_performer<float>::step(state, d.q_view, d.k_view, d.v_view, d.out_view_, d.features, {}, serial);
      },
      joined(some, features(), std::vector<refused>{{"fewer features than the state's", "features", [](call_inputs& d) {
                                                       d.features = {d.w.data.data(), {1, 9, 8}};
                                                     }}}));
  check(
      "rfa_step",
      [](idx_t b, idx_t h, idx_t dim) {
        return attn::rfa_state<float>({.batch = b, .heads = h, .features = 10, .value_dim = dim});
      },
      [](auto& state, call_inputs& d) {
        attn::execution serial;
        compiled_rfa<float>::step(state, d.q_view, d.k_view, d.v_view, d.out_view_, d.features, {}, serial);
      },
      joined(some, features()));
}

TEST_CASE("a map of a wrong number of features for the state is refused", "[refusals]") {
  attn::linear_state<float> state({.heads = 1, .features = 7, .value_dim = 5});
  const tensor<float> k(1, 1, 1, 8, 1), v(1, 1, 1, 5, 1);
  tensor<float> out(1, 1, 1, 5, 7);
  CHECK(well_formed(refusal([&] { attn::linear_step(state, view(k), view(k), view(v), view(out)); }), "linear_step"));
  CHECK(out(0, 0, 0, 0) == 7);
}

}  // namespace testing::refusals_tests
