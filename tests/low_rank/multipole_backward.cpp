// multipole_backward against the reverse pass of its reference: every option with every other, odd lengths, all types;
// what is not asked for, padding, threads, batches.
#include "support/low_rank_gradient.hpp"
#include "support/pairwise.hpp"
#include "support/run_multipole.hpp"

namespace testing::multipole_backward_tests {

namespace {

template <class S>
struct form {
  using problem = multipole_problem;
  static constexpr bool has_lse = true;

  static gradient_case case_of(const problem& p) {
    gradient_case c{"multipole", {"q", "k", "v"}, {p.q, p.k, p.v}, {}};
    if (!p.options.sinks.empty()) {
      c.names.push_back("sinks");
      c.inputs.emplace_back(1, 1, 1, std::ssize(p.options.sinks));
      c.inputs.back().data = p.options.sinks;
    }
    c.forward = [o = p.options](const std::vector<tensor<variable>>& x) {
      reference::basic_multipole_options<variable> options;
      reference::copy_choices(o, options);
      if (!o.sinks.empty()) options.sinks = x[3].data;
      const auto result = reference::multipole(x[0], x[1], x[2], options);
      return std::vector{result.out, result.lse};
    };
    return c;
  }

  struct memory {
    tensor<S> q, k, v;
    std::vector<real<S>> sinks;

    memory(const problem& p, double before)
        : q(filled<S>(p.q, before)),
          k(filled<S>(p.k, before)),
          v(filled<S>(p.v, before)),
          sinks(p.options.sinks.size(), static_cast<real<S>>(before)) {}
    attn::multipole_gradients<S> views() {
      attn::multipole_gradients<S> g{.q = view(q), .k = view(k), .v = view(v)};
      if (!sinks.empty()) g.sinks = sinks;
      return g;
    }
    tensors all() const {
      tensors all{cast<double>(q), cast<double>(k), cast<double>(v)};
      if (!sinks.empty()) {
        all.emplace_back(1, 1, 1, std::ssize(sinks));
        all.back().data = cast<double>(sinks);
      }
      return all;
    }
  };
  static void keep(attn::multipole_gradients<S>& g, std::size_t n) {
    if (n != 0) g.q = {};
    if (n != 1) g.k = {};
    if (n != 2) g.v = {};
    if (n != 3) g.sinks = {};
  }
  static void call(const problem& p, const tensors& d_results, attn::multipole_gradients<S> wanted,
                   attn::execution& execution) {
    stored_multipole_options<S> stored(p.options);
    const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d = cast<S>(d_results[0]);
    tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
    tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7));
    stored.options.lse = row_view(lse);
    attn::execution of_forward;
    compiled_multipole<S>::call(view(q), view(k), view(v), view(out), stored.options, of_forward);
    if (without_lse) stored.options.lse = {};
    const tensor<real<S>> d_lse = cast<real<S>>(d_results[1]);
    wanted.d_lse = {d_lse.data.data(), {q.batch(), q.heads(), q.length()}};
    compiled_multipole<S>::backward(view(q), view(k), view(v), view(std::as_const(out)), view(d), wanted,
                                    stored.options, execution);
  }
  static inline bool without_lse = false;
};

multipole_problem problem_of_choice(int choice, idx_t queries, idx_t keys) {
  multipole_problem p = exact_choices({.queries = queries, .keys = keys, .dim = 9, .value_dim = 12}, 5, 3);
  choose(p.options, choice, queries, keys);
  choose_multipole(p.options, choice);
  return p;
}

#if !defined(ATTN_TEST_FEW_TYPES)
std::vector<int> choices() {
  std::vector<int> list;
  for (int choice : selected_bits(10, true))
    if (!(choice & (8 | 16))) list.push_back(choice);
  for (int choice : {0, 1, 64, 65, 128, 129, 256, 257, 1023 - 24}) list.push_back(choice);
  return list;
}
#endif

}  // namespace

TEST_CASE("multipole_backward: the reverse pass agrees with central differences", "[multipole_backward]") {
  for (int choice : {0, 1, 6, 7, 129, 257, 512}) {  // the assignment is given: it stays
    CAPTURE(choice);
    multipole_problem p = problem_of_choice(choice, 24, 24);
    // Small steps must not change choices: keys that are taken by far, those that are not.
    for (std::size_t n = 0; n < p.q.data.size(); ++n) p.q.data[n] += 1e-3 * std::sin(static_cast<double>(7 * n));
    check_central_differences(form<double>::case_of(p));
  }
}

#if !defined(ATTN_TEST_FEW_TYPES)
TEST_CASE("multipole_backward: every option with every other", "[multipole_backward]") {
  for (int choice : choices())
    for (const auto& [queries, keys] : {std::array<idx_t, 2>{40, 40}, {25, 38}, {45, 33}}) {
      CAPTURE(choice, queries, keys);
      check_form<form<double>, double>(problem_of_choice(choice, queries, keys));
    }
}

TEST_CASE("multipole_backward: odd lengths, dims and clusters", "[multipole_backward]") {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 65, 130}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  const idx_t clusters[] = {0, 1, 5, 13, 64};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t c = 0; c < std::size(clusters); ++c)
      for (bool causal : {false, true}) {
        problem_shape shape{.batch = 1, .heads = 2, .kv_heads = 1, .queries = lengths[n], .keys = lengths[n]};
        shape.dim = dims[(n + c) % 5], shape.value_dim = dims[(n + 3 * c) % 8];
        multipole_problem p = multipole_of(shape, n + 1);
        auto& o = p.options;
        o.causal = causal, o.clusters = clusters[c], o.exact = 1 + static_cast<idx_t>(13 * n + 5 * c) % 60;
        o.block = 1 + static_cast<idx_t>(11 * n + 7 * c) % 140, o.probe = 1 + static_cast<idx_t>(3 * n + c) % 20;
        o.lookback = 1 + static_cast<idx_t>(n + 3 * c) % 30, o.iterations = static_cast<idx_t>(n + c) % 4;
        if (causal) o.segment = 1 + static_cast<idx_t>(37 * n + 11 * c) % 40;
        CAPTURE(shape.queries, shape.dim, shape.value_dim, o.clusters, causal, o.segment, o.exact, o.block, o.probe);
        check_form<form<double>, double>(p);
      }
}
#endif

TEMPLATE_LIST_TEST_CASE("multipole_backward: all types, few changed clusters and pieces", "[multipole_backward]",
                        all_types) {
  for (idx_t exact : {0, 3, 20}) {
    multipole_problem p = exact_choices({.batch = 1, .queries = 64, .keys = 64, .dim = 16}, 8, 9);
    auto& o = p.options;
    o.causal = true, o.segment = 8, o.exact = exact, o.block = 4, o.probe = 1, o.lookback = 1;
    CAPTURE(exact);
    check_form<form<TestType>, TestType>(p);
    o.causal = false, o.block = 1;
    check_form<form<TestType>, TestType>(p);
    o.sinks = {0.5, -1, 2, 0}, o.softcap = 2;
    check_form<form<TestType>, TestType>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("multipole_backward: pieces add up", "[multipole_backward]", exact_types) {
  for (bool causal : {false, true}) {
    multipole_problem p = exact_choices(
        {.batch = 1, .heads = 2, .kv_heads = 1, .queries = 4200, .keys = 64, .dim = 4, .value_dim = 4}, 3);
    p.options.exact = 8, p.options.block = 64, p.options.probe = 64, p.options.causal = causal, p.options.segment = 16;
    p.options.lookback = 1;
    if (causal) p.q = random_normal(1, 1, 2, 64, 4), round_to_eighths(p.q);
    check_form<form<TestType>, TestType>(p);
  }
}

TEST_CASE("multipole_backward: queries of other blocks, and without a key, by which blocks choose",
          "[multipole_backward]") {
  for (idx_t lookback : {3, 40}) {
    multipole_problem p = multipole_of({.batch = 2, .heads = 4, .kv_heads = 2, .queries = 70, .keys = 61, .dim = 9});
    auto& o = p.options;
    o.causal = true, o.segment = 8, o.clusters = 3, o.exact = 5, o.block = 3, o.lookback = lookback, o.probe = 7;
    CAPTURE(lookback);
    check_form<form<widest_type>, widest_type>(p);
    o.softcap = 1;
    check_form<form<widest_type>, widest_type>(p);
  }
}

TEMPLATE_LIST_TEST_CASE("multipole_backward: without lse, alone, added, threads, padding, batches",
                        "[multipole_backward]", exact_types) {
  for (int choice : {5, 132, 4, 1}) {
    CAPTURE(choice);
    multipole_problem p = problem_of_choice(choice, 40, 40);
    p.options.lengths = {33, 40}, p.options.query_lengths = {}, p.options.key_lengths = {};
    check_form_alone<form<TestType>>(p);
    check_form_accumulates<form<TestType>, TestType>(p);
    check_form_threads_and_padding<form<TestType>>(p);
    check_form_independent<form<TestType>>(p, [&](multipole_problem& alone, idx_t b, idx_t first, idx_t count) {
      alone.options.assignment = heads_of_item(p.options.assignment, b, first / count, 1);
      if (!p.options.sinks.empty())
        alone.options.sinks.assign(p.options.sinks.begin() + first, p.options.sinks.begin() + first + count);
    });
    form<TestType>::without_lse = true;
    check_form<form<TestType>, TestType>(p, 2);
    form<TestType>::without_lse = false;
  }
}

TEST_CASE("multipole_backward: a scale of 0 and a softcap", "[multipole_backward]") {
  const auto numbers = [](std::uint64_t seed) { return cast<float>(random_normal(seed, 1, 1, 64, 4)); };
  const tensor<float> q = numbers(1), k = numbers(2), v = numbers(3), d_out = numbers(4);
  tensor<float> out(1, 1, 64, 4), dq = out, dk = out, dv = out;
  attn::multipole_options<float> o{.scale = 0.0f};
  o.exact = 4, o.clusters = 4, o.softcap = 2.0f;
  attn::execution serial;
  compiled_multipole<float>::call(view(q), view(k), view(v), view(out), o, serial);
  compiled_multipole<float>::backward(view(q), view(k), view(v), view(std::as_const(out)), view(d_out),
                                      {.q = view(dq), .k = view(dk), .v = view(dv)}, o, serial);
  for (const auto* x : {&dq, &dk}) CHECK(x->data == std::vector<float>(256));  // scores do not depend on q and k
  CHECK(std::abs(std::accumulate(dv.data.begin(), dv.data.end(), 0.0f) -
                 std::accumulate(d_out.data.begin(), d_out.data.end(), 0.0f)) <= 1e-3f);
}

TEST_CASE("multipole_backward refuses what does not fit", "[multipole_backward]") {
  struct one_call {
    tensor<float> q{1, 2, 8, 4}, k{1, 1, 8, 4}, v{1, 1, 8, 4}, out{1, 2, 8, 4}, d_out{1, 2, 8, 4};
    tensor<float> dq{1, 2, 8, 4, 7}, dk{1, 1, 8, 4, 7}, dv{1, 1, 8, 4, 7}, d_sinks{1, 1, 1, 2, 7};
    std::vector<float> sinks{1, 2};
    attn::multipole_gradients<float> g{.q = view(dq), .k = view(dk), .v = view(dv)};
    attn::multipole_options<float> o{};

    void run() {
      attn::execution serial;
      compiled_multipole<float>::backward(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)),
                                          view(std::as_const(out)), view(std::as_const(d_out)), g, o, serial);
    }
    std::vector<const tensor<float>*> written() const { return {&dq, &dk, &dv, &d_sinks}; }
  };
  check_gradients_refused<one_call>(
      "multipole_backward", {{"the gradient of q", [](auto& c) { c.g.q = view(c.dk); }},
                             {"the gradient of k", [](auto& c) { c.g.k = view(c.dq); }},
                             {"separate memory", [](auto& c) { c.g.v = c.g.k; }},
                             {"separate memory", [](auto& c) { c.g.k = view(c.k); }},
                             {"sinks, since its gradient is asked for",
                              [](auto& c) { c.g.sinks = reshaped(c.d_sinks, 2); }},
                             {"d_out of the shape of out", [](auto& c) { c.d_out = tensor<float>(1, 2, 7, 4); }},
                             {"exact >= 0", [](auto& c) { c.o.exact = -1; }},
                             {"clusters >= 0", [](auto& c) { c.o.clusters = -1; }}});
}

}  // namespace testing::multipole_backward_tests
