// dplr_state: fed with and without queries, copied, reset, written and read; bad input of steps.
#include "kernel/recurrence.hpp"
#include "support/refused.hpp"

namespace testing::dplr_state_tests {
namespace {

using recurrences::bytes_of;

constexpr attn::dplr_state_extents extents{.batch = 2, .heads = 2, .dim = 9, .value_dim = 5};

// A stream of 80 tokens for states of these extents.
template <class S>
struct dplr_stream {
  dplr_problem p = rounded<S>(random_dplr({.length = 80, .dim = 9, .value_dim = 5, .decays = 2}));
  dplr_memory<S> m{p};
  tensor<S> out{2, 2, 80, 5};

  void step(attn::dplr_state<S>& state, idx_t begin, idx_t count) {
    attn::execution serial;
    compiled_dplr<S>::step(state, m.views().tokens(begin, count), view(out).slice(2, begin, count),
                           m.step_options(begin, count), serial);
  }
  void append(attn::dplr_state<S>& state, idx_t begin, idx_t count) {
    attn::execution serial;
    compiled_dplr<S>::append(state, m.views().tokens(begin, count), m.step_options(begin, count), serial);
  }
};

}  // namespace

TEMPLATE_LIST_TEST_CASE("dplr_state: its numbers are those of the final state", "[dplr_state]", all_types) {
  dplr_stream<TestType> x;
  recurrences::check_numbers<TestType>(x, attn::dplr_state<TestType>(extents));
}

TEMPLATE_LIST_TEST_CASE("dplr_state: append feeds as a step does, without queries", "[dplr_state]", all_types) {
  dplr_stream<TestType> x;
  recurrences::check_append(x, attn::dplr_state<TestType>(extents));
}

TEST_CASE("dplr_state: a copy goes its own way, a reset starts anew, what was written is read again", "[dplr_state]") {
  dplr_stream<float> x;
  attn::dplr_state<float> state(extents);
  recurrences::check_copies(x, state);
  x.step(state, 0, 33);
  attn::delta_rule_state<float> other(extents);
  std::istringstream of_dplr(bytes_of(state));
  CHECK(well_formed(refusal([&] { other.read(of_dplr); }), "delta_rule_state"));
}

TEST_CASE("dplr_state refuses extents that no state has", "[refusals][dplr_state]") {
  using extents_type = attn::dplr_state_extents;
  for (const extents_type& wrong :
       {extents_type{.batch = -1, .dim = 4, .value_dim = 4}, extents_type{.heads = -1, .dim = 4, .value_dim = 4},
        extents_type{.dim = -4, .value_dim = 4}, extents_type{.dim = 4, .value_dim = 4, .keep = -1},
        extents_type{.dim = idx_t(1) << 40, .value_dim = idx_t(1) << 40}})
    CHECK(well_formed(refusal([&] { attn::dplr_state<float> state(wrong); }), "dplr_state"));
}

TEST_CASE("dplr_step refuses what does not fit, and changes nothing", "[refusals][dplr_state]") {
  struct inputs {
    tensor<float> rows{2, 2, 9, 8, 0.1f}, v{2, 2, 9, 5, 1}, out{2, 2, 9, 5, 7}, log_decay{2, 2, 9, 1, -0.5f};
    tensor<float> other{2, 4, 30, 30, 1};
    dplr_views<float> x;
    out_view<float> to = view(out);
    attn::dplr_step_options<float> options;
    attn::dplr_state<float> state{{.batch = 2, .heads = 2, .dim = 8, .value_dim = 5}};

    inputs() {
      const in_view<float> all = view(std::as_const(rows));
      x = {all, all, view(std::as_const(v)), all, all};
      options.log_decay = optional_view(log_decay);
    }
    inputs(const inputs&) = delete;
    std::vector<const tensor<float>*> written() const { return {&out}; }
    in_view<float> shaped(idx_t n, idx_t h, idx_t i, idx_t d) const { return {other.data.data(), {n, h, i, d}}; }
  };
  const std::vector<refused<inputs>> list = {
      {"another length of q", "query length", [](inputs& d) { d.x.q = d.shaped(2, 2, 8, 8); }},
      {"another length of a", "a of the shape of k", [](inputs& d) { d.x.a = d.shaped(2, 2, 8, 8); }},
      {"another dim of the state", "dim of the state",
       [](inputs& d) { d.x.q = d.x.k = d.x.a = d.x.b = d.shaped(2, 2, 9, 7); }},
      {"another value dim of the state", "value dim of the state",
       [](inputs& d) { d.x.v = d.shaped(2, 2, 9, 4), d.to = d.to.slice(3, 0, 4); }},
      {"a log decay above 0", "log_decay <= 0", [](inputs& d) { d.log_decay.data[20] = 0.5f; }},
      {"out that is v", "overlap", [](inputs& d) { d.x.v = view(std::as_const(d.out)); }},
      {"a null b", "null", [](inputs& d) { d.x.b = null_view(2, 2, 9, 8); }}};
  check_refused("dplr_step", list, [](inputs& d) {
    attn::execution serial;
    const std::string before = bytes_of(d.state);
    try {
      compiled_dplr<float>::step(d.state, d.x, d.to, d.options, serial);
    } catch (...) {
      CHECK(bytes_of(d.state) == before);
      throw;
    }
  });
}

}  // namespace testing::dplr_state_tests
