// delta_rule_state: fed with and without queries, copied, reset, written and read; bad input of steps.
#include "kernel/recurrence.hpp"
#include "support/refused.hpp"

namespace testing::delta_rule_state_tests {
namespace {

using recurrences::bytes_of;

constexpr attn::delta_rule_state_extents extents{.batch = 2, .heads = 4, .dim = 9, .value_dim = 5};

// A stream of 80 tokens for states of these extents.
template <class S>
struct delta_rule_stream {
  delta_rule_problem p =
      rounded<S>(random_delta_rule({.group = 2, .length = 80, .dim = 9, .value_dim = 5, .decays = 2}));
  delta_rule_memory<S> m{p};
  tensor<S> out{2, 4, 80, 5};

  void step(attn::delta_rule_state<S>& state, idx_t begin, idx_t count) {
    attn::execution serial;
    const auto part = [&](auto x) { return x.slice(2, begin, count); };
    compiled_delta_rule<S>::step(state, part(view(m.q)), part(view(m.k)), part(view(m.v)), part(view(out)),
                                 m.step_options(begin, count), serial);
  }
  void append(attn::delta_rule_state<S>& state, idx_t begin, idx_t count) {
    attn::execution serial;
    compiled_delta_rule<S>::append(state, view(m.k).slice(2, begin, count), view(m.v).slice(2, begin, count),
                                   m.step_options(begin, count), serial);
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("delta_rule_state: its numbers are those of the final state", "[delta_rule_state]", all_types) {
  delta_rule_stream<TestType> x;
  recurrences::check_numbers<TestType>(x, attn::delta_rule_state<TestType>(extents));
}

TEMPLATE_LIST_TEST_CASE("delta_rule_state: append feeds as a step does, without queries", "[delta_rule_state]",
                        all_types) {
  delta_rule_stream<TestType> x;
  recurrences::check_append(x, attn::delta_rule_state<TestType>(extents));
}

TEST_CASE("delta_rule_state: a copy goes its own way, a reset starts anew, what was written is read",
          "[delta_rule_state]") {
  delta_rule_stream<float> x;
  recurrences::check_copies(x, attn::delta_rule_state<float>(extents));
}

TEST_CASE("delta_rule_state: what does not fit is not read", "[delta_rule_state]") {
  delta_rule_stream<float> x;
  attn::delta_rule_state<float> state(extents), reader(extents);
  x.step(state, 0, 50);
  const std::string good = bytes_of(state);
  std::istringstream stream(good);
  reader.read(stream);

  auto narrow_extents = extents;
  narrow_extents.dim = 8;
  attn::delta_rule_state<float> narrow(narrow_extents);
  std::istringstream other(good);
  CHECK(well_formed(refusal([&] { narrow.read(other); }), "delta_rule_state"));
  for (std::size_t at : {std::size_t(0), std::size_t(9), good.size() / 2, good.size() - 1}) {
    std::string damaged = good;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    std::istringstream bad(damaged);
    CHECK_THROWS(reader.read(bad));
    CHECK(bytes_of(reader) == good);
  }
}

TEST_CASE("delta_rule_state refuses extents that no state has", "[refusals][delta_rule_state]") {
  using extents_type = attn::delta_rule_state_extents;
  for (const extents_type& wrong :
       {extents_type{.batch = -1, .dim = 4, .value_dim = 4}, extents_type{.heads = -1, .dim = 4, .value_dim = 4},
        extents_type{.dim = -4, .value_dim = 4}, extents_type{.dim = 4, .value_dim = -4},
        extents_type{.dim = idx_t(1) << 40, .value_dim = idx_t(1) << 40}})
    CHECK(well_formed(refusal([&] { attn::delta_rule_state<float> state(wrong); }), "delta_rule_state"));
}

namespace {

// A good step of 9 tokens, to be spoilt in one place.
struct delta_rule_step_inputs {
  tensor<float> q{2, 2, 9, 8, 0.1f}, k{2, 2, 9, 8, 0.1f}, v{2, 4, 9, 5, 1}, out{2, 4, 9, 5, 7};
  tensor<float> beta{2, 4, 9, 1, 0.5f}, log_decay{2, 4, 9, 1, -0.5f}, other{2, 4, 30, 30, 1};
  in_view<float> q_view = view(std::as_const(q)), k_view = view(std::as_const(k)), v_view = view(std::as_const(v));
  out_view<float> to = view(out);
  attn::delta_rule_step_options<float> options;
  attn::delta_rule_state<float> state{{.batch = 2, .heads = 4, .dim = 8, .value_dim = 5}};

  delta_rule_step_inputs() { options.beta = optional_rows(beta), options.log_decay = optional_view(log_decay); }
  delta_rule_step_inputs(const delta_rule_step_inputs&) = delete;
  std::vector<const tensor<float>*> written() const { return {&out}; }
  in_view<float> shaped(idx_t b, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {b, h, i, d}}; }
};

}  // namespace

TEST_CASE("delta_rule_step refuses what does not fit, and changes nothing", "[refusals][delta_rule_state]") {
  using inputs = delta_rule_step_inputs;
  const std::vector<refused<inputs>> list = {
      {"another length of q", "query length", [](inputs& d) { d.q_view = d.shaped(2, 2, 8, 8); }},
      {"another dim of the state", "dim of the state",
       [](inputs& d) { d.q_view = d.k_view = d.shaped(2, 2, 9, 7); }},
      {"other heads of the state", "heads of the state",
       [](inputs& d) { d.v_view = d.shaped(2, 2, 9, 5), d.to = d.to.slice(1, 0, 2), d.options = {}; }},
      {"another value dim of the state", "value dim of the state",
       [](inputs& d) { d.v_view = d.shaped(2, 4, 9, 4), d.to = d.to.slice(3, 0, 4); }},
      {"another batch of the state", "batch of the state",
       [](inputs& d) {
         d.q_view = d.k_view = d.shaped(1, 2, 9, 8), d.v_view = d.shaped(1, 4, 9, 5), d.to = d.to.slice(0, 0, 1);
         d.options = {};
       }},
      {"beta of another length", "beta length", [](inputs& d) { d.options.beta = d.options.beta.slice(2, 0, 8); }},
      {"a log decay above 0", "log_decay <= 0", [](inputs& d) { d.log_decay.data[70] = 0.5f; }},
      {"a negative unit_norm_eps", "unit_norm_eps", [](inputs& d) { d.options.unit_norm_eps = -1.0f; }},
      {"out that is v", "overlap", [](inputs& d) { d.v_view = view(std::as_const(d.out)); }},
      {"a null k", "null", [](inputs& d) { d.k_view = null_view(2, 2, 9, 8); }}};
  check_refused("delta_rule_step", list, [](inputs& d) {
    attn::execution serial;
    const std::string before = bytes_of(d.state);
    try {
      compiled_delta_rule<float>::step(d.state, d.q_view, d.k_view, d.v_view, d.to, d.options, serial);
    } catch (...) {
      CHECK(bytes_of(d.state) == before);
      throw;
    }
  });
}

}  // namespace testing::delta_rule_state_tests
