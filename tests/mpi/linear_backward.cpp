// attn::mpi::linear_backward against linear_backward on the whole sequence: options, splits, types, what is refused.
#include <attn/core/threads.hpp>
#include <attn/mpi/linear_backward.hpp>

#include "mpi/spread.hpp"

namespace testing::linear_backward_tests {
namespace {

constexpr idx_t segment = 1024;

struct problem {
  idx_t tokens = 2 * segment + 300, batch = 2, heads = 4, kv_heads = 2;
  tensor<double> q = random_normal(1, batch, heads, tokens, 9), k = random_normal(2, batch, kv_heads, tokens, 9),
                 v = random_normal(3, batch, kv_heads, tokens, 5), d_out = random_normal(4, batch, heads, tokens, 5);
};

template <class S>
constexpr double bound = std::is_same_v<S, float> ? 1e-5 : 0x1p-7;

template <class S>
struct gradients {
  tensor<S> q, k, v;
  tensor<attn::compute_type<S>> decay;
};

struct case_options {
  idx_t decay_heads = 0;
  bool of_q = true, of_keys = true, accumulate = false;
  int threads = 1;
};

template <class S>
void check(const problem& p, attn::linear_options<S> options, const case_options& c = {}) {
  using T = attn::compute_type<S>;
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d_out = cast<S>(p.d_out);
  const auto decay = gates_near_one<T>(c.decay_heads, p.tokens);
  const auto run = [&](const tensor<S>& q_, const tensor<S>& k_, const tensor<S>& v_, const tensor<S>& d_,
                       const tensor<T>& decay_, const auto& call) {
    gradients<S> g{tensor<S>(p.batch, p.heads, c.of_q ? q_.length() : 0, 9, S(rubbish)),
                   tensor<S>(p.batch, p.kv_heads, k_.length(), 9, S(rubbish)),
                   tensor<S>(p.batch, p.kv_heads, k_.length(), 5, S(rubbish)),
                   tensor<T>(p.batch, c.decay_heads, k_.length(), 1, T(rubbish))};
    attn::linear_gradients<S> wanted{.accumulate = c.accumulate};
    if (c.of_q) wanted.q = view(g.q);
    if (c.of_keys) wanted.k = view(g.k), wanted.v = view(g.v);
    if (c.decay_heads > 0) options.decay = row_view(decay_), wanted.decay = row_view(g.decay);
    call(view(q_), view(k_), view(v_), view(d_), wanted);
    return g;
  };
  const gradients<S> all = run(q, k, v, d_out, decay, [&](const auto&... x) { attn::linear_backward(x..., options); });
  int number = 0;
  for (const own_range& r : splits(p.tokens, segment)) {
    CAPTURE(number++, r.begin, r.length, r.aligned);
    const auto own = [&](const auto& x) { return rows(x, r.begin, x.length() > 0 ? r.length : 0); };
    attn::execution exec(c.threads, 0);
    const gradients<S> g = run(own(q), own(k), own(v), own(d_out), own(decay), [&](const auto&... x) {
      attn::mpi::linear_backward(x..., MPI_COMM_WORLD, options, exec);
    });
    if (r.aligned) {
      CHECK(g.q == own(all.q));
      CHECK(g.k == own(all.k));
      CHECK(g.v == own(all.v));
      CHECK(g.decay == own(all.decay));
    } else {
      CHECK(relative_error(g.q, own(all.q)) <= bound<S>);
      CHECK(relative_error(g.k, own(all.k)) <= bound<S>);
      CHECK(relative_error(g.v, own(all.v)) <= bound<S>);
      CHECK(relative_error(g.decay, own(all.decay)) <= 10 * bound<S>);  // differences of sums
    }
  }
}

TEST_CASE("mpi linear_backward: options", "[linear_backward]") {
  const problem p;
  for (bool causal : {false, true})
    for (bool padded : {false, true}) {
      const std::vector<idx_t> lengths = {p.tokens - 700, causal ? 0 : 1500};
      CAPTURE(causal, padded);
      attn::linear_options<float> options{.causal = causal, .eps = 0.25f, .normalise = !padded};
      if (padded) options.lengths = lengths;
      check<float>(p, options, {.accumulate = padded});
      if (causal) check<float>(p, options, {.decay_heads = padded ? 2 : 4, .accumulate = padded});
    }
}

TEST_CASE("mpi linear_backward: some of the gradients", "[linear_backward]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<float>(p, {.causal = causal}, {.of_keys = false});
    check<float>(p, {.causal = causal}, {.of_q = false});
  }
}

TEST_CASE("mpi linear_backward: element types", "[linear_backward]") {
  const problem p;
  for (bool causal : {false, true}) {
    check<Eigen::bfloat16>(p, {.causal = causal});
  }
}

TEST_CASE("mpi linear_backward: threads within the processes", "[linear_backward]") {
  const problem p;
  for (bool causal : {false, true}) check<float>(p, {.causal = causal}, {.threads = 3});
}

TEST_CASE("mpi linear_backward: fewer queries than keys", "[linear_backward]") {
  const problem p;
  const idx_t more = 900, count = p.tokens - more, begin = std::min(own_rank() * segment, p.tokens),
              end = own_rank() == process_count() - 1 ? p.tokens : std::min(begin + segment, p.tokens);
  for (bool causal : {false, true}) {
    // Causal queries are those of the last keys; others are split at whole segments, too, for the sake of bits.
    const idx_t first = causal ? std::max<idx_t>(begin - more, 0) : std::min(begin, count),
                last = causal ? std::max<idx_t>(end - more, 0)
                              : own_rank() == process_count() - 1 ? count : std::min(end, count);
    const auto q = rows(cast<float>(p.q), 0, count), d_out = rows(cast<float>(p.d_out), 0, count), k = cast<float>(p.k),
               v = cast<float>(p.v);
    tensor<float> dq = q, dk = k, dv = v;
    attn::linear_backward(view(q), view(k), view(v), view(d_out),
                          {.q = view(dq), .k = view(dk), .v = view(dv)}, {.causal = causal});
    const auto own_q = rows(q, first, last - first), own_d = rows(d_out, first, last - first),
               own_k = rows(k, begin, end - begin), own_v = rows(v, begin, end - begin);
    tensor<float> gq = own_q, gk = own_k, gv = own_v;
    attn::mpi::linear_backward(view(own_q), view(own_k), view(own_v), view(own_d),
                               {.q = view(gq), .k = view(gk), .v = view(gv)}, MPI_COMM_WORLD,
                               {.causal = causal});
    CHECK(gq == rows(dq, first, last - first));
    CHECK(gk == rows(dk, begin, end - begin));
    CHECK(gv == rows(dv, begin, end - begin));
  }
}

TEST_CASE("mpi linear_backward: no bit depends on padding", "[linear_backward]") {
  problem p;
  const std::vector<idx_t> lengths = {700, 2100};
  for (tensor<double>* x : {&p.q, &p.k, &p.v, &p.d_out}) poison_padding(*x, lengths);
  for (bool causal : {false, true}) check<float>(p, {.causal = causal, .lengths = lengths});
}

TEST_CASE("mpi linear_backward: what is refused, is refused by all", "[linear_backward]") {
  const bool last = own_rank() == process_count() - 1;
  const tensor<float> x(1, 2, 10, 4, 1);
  tensor<float> dq(1, 2, 10, 4, rubbish), dk = dq, short_dk(1, 2, 9, 4, rubbish);
  const auto refused = [&](const attn::linear_gradients<float>& wanted, const attn::linear_options<float>& options) {
    return refusal_of_all("mpi::linear_backward", [&] {
      attn::mpi::linear_backward(view(x), view(x), view(x), view(x), wanted, MPI_COMM_WORLD, options);
    });
  };
  CHECK(contains(refused({.q = view(dq), .k = view(last ? short_dk : dk)}, {}), "the gradient of k"));
  CHECK(contains(refused({.q = view(dq), .k = view(last ? dq : dk)}, {}), "in separate memory"));
  tensor<float> decay(1, 2, 10, 1);
  CHECK(contains(refused({.q = view(dq), .decay = row_view(decay)}, {}), "decay"));
  CHECK(contains(refused({.q = view(dq)}, {.key_mask = seeing_mask(10)}), "no key_mask over processes"));
  tensor<float> state(1, 2, 4, 4);
  const auto alone = [&](auto set) {  // on the last process
    attn::linear_gradients<float> wanted{.q = view(dq)};
    if (last) set(wanted);
    return refused(wanted, {.causal = true});
  };
  for (const std::string& message :
       {alone([&](auto& g) { g.log_decay = view(state); }), alone([&](auto& g) { g.initial_state = view(state); }),
        alone([&](auto& g) { g.bonus = {state.data.data(), {2, 4}}; }),
        alone([&](auto& g) { g.initial_weights = row_view(decay); }),
        alone([&](auto& g) { g.d_final_state = view(std::as_const(state)); }),
        alone([&](auto& g) { g.d_final_weights = row_view(std::as_const(decay)); })})
    CHECK(contains(message, "gradients of q, k, v and decay over processes"));
  if (process_count() > 1) {
    attn::linear_gradients<float> some{.q = view(dq)};
    if (last) some.k = view(dk);
    CHECK(contains(refused(some, {}), "the same options on all processes"));
    CHECK(contains(refused({.q = view(dq)}, {.causal = last}), "the same options on all processes"));
  }
  CHECK(dq == tensor<float>(1, 2, 10, 4, rubbish));
  CHECK(dk == dq);
}

}  // namespace
}  // namespace testing::linear_backward_tests
