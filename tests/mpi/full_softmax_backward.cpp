// attn::mpi::full_softmax_backward against attn::full_softmax_backward on the whole.
#include <attn/mpi/full_softmax_backward.hpp>

#include "softmax_problem.hpp"

namespace testing::full_softmax_backward_tests {
namespace {

template <class S>
struct gradients {
  using T = attn::compute_type<S>;
  tensor<S> q, k, v;
  std::vector<T> slopes, sinks;

  gradients(const tensor<S>& like_q, const tensor<S>& like_k, const tensor<S>& like_v, float start)
      : slopes(4, T(start)), sinks(4, T(start)) {
    q.extents = like_q.extents, k.extents = like_k.extents, v.extents = like_v.extents;
    for (tensor<S>* x : {&q, &k, &v})
      x->data.assign(static_cast<std::size_t>(x->batch() * x->heads() * x->length() * x->dim()), S(start));
  }
  template <class Gradients>
  Gradients views(bool parameters) {
    Gradients g;
    g.q = view(q), g.k = view(k), g.v = view(v);
    if (parameters) g.alibi_slopes = {slopes.data(), {4}}, g.sinks = {sinks.data(), {4}};
    return g;
  }
};

struct request {
  bool saved_lse = true, d_lse = true, accumulate = false;
  bool differ = false;  // processes want and lack different things
  bool fast = false;    // precision::fast
};

// What all processes share, from one process.
template <class S>
struct whole_call {
  using T = attn::compute_type<S>;
  const problem<S>& p;
  tensor<S> out, d_out;
  tensor<T> lse, d_lse;
  gradients<S> g;

  whole_call(const problem<S>& given, const request& r)
      : p(given), out(2, 4, p.q.length(), 12, S(7)), d_out(cast<S>(random_normal(9, 2, 4, p.q.length(), 12))),
        lse(2, 4, p.q.length(), 1, 7), d_lse(cast<T>(random_normal(10, 2, 4, p.q.length(), 1))),
        g(p.q, p.k, p.v, 0.25f) {
    auto o = p.template options<attn::full_softmax_options<S>>();
    o.lse = row_view(lse);
    auto asked = g.template views<attn::full_softmax_gradients<S>>(p.chosen.terms);
    asked.accumulate = r.accumulate;
    if (r.d_lse) asked.d_lse = row_view(d_lse);
    if (p.chosen.score) {
      attn::full_softmax(view(p.q), view(p.k), view(p.v), view(out), o, problem<S>::score);
      attn::full_softmax_backward(view(p.q), view(p.k), view(p.v), view(std::as_const(out)), view(std::as_const(d_out)),
                                  asked, o, problem<S>::score, problem<S>::score_backward);
    } else {
      attn::full_softmax(view(p.q), view(p.k), view(p.v), view(out), o);
      attn::full_softmax_backward(view(p.q), view(p.k), view(p.v), view(std::as_const(out)), view(std::as_const(d_out)),
                                  asked, o);
    }
  }

  gradients<S> own_part(spread how, const request& r, attn::execution& exec) const {
    const auto queries = own_rows(p.q.length(), how), keys = own_rows(p.k.length(), how);
    const tensor<S> q = rows(p.q, queries), k = rows(p.k, keys), v = rows(p.v, keys), o = rows(out, queries),
                    d = rows(d_out, queries);
    tensor<T> own_lse = rows(lse, queries), own_d_lse = rows(d_lse, queries);
    gradients<S> result(q, k, v, 0.25f);
    auto options = p.template options<attn::mpi::full_softmax_options<S>>();
    options.zigzag = how == spread::zigzag;
    if (r.saved_lse && !(r.differ && own_rank() == 0)) options.lse = row_view(own_lse);
    auto asked = result.template views<attn::mpi::full_softmax_gradients<S>>(p.chosen.terms);
    asked.accumulate = r.accumulate;
    if (r.d_lse) asked.d_lse = row_view(own_d_lse);
    if (r.differ && own_rank() == 0) asked.k = {}, asked.sinks = {};
    if (r.differ && own_rank() == 1) asked.q = {}, asked.v = {}, asked.alibi_slopes = {};
    if (p.chosen.score)
      attn::mpi::full_softmax_backward(view(q), view(k), view(v), view(o), view(d), asked, MPI_COMM_WORLD, options,
                                       problem<S>::score, problem<S>::score_backward, exec);
    else
      attn::mpi::full_softmax_backward(view(q), view(k), view(v), view(o), view(d), asked, MPI_COMM_WORLD, options,
                                       exec);
    return result;
  }
};

template <class S>
tensor<attn::compute_type<S>> list(const std::vector<attn::compute_type<S>>& x) {
  tensor<attn::compute_type<S>> all(1, 1, 1, std::ssize(x));
  all.data = x;
  return all;
}

// Gradients of scores are differences, in which rounding stays; those of one number per head are sums in which most
// cancels: the factors of the tests of one process.
template <class S>
void check(const problem<S>& p, spread how, const request& r = {}) {
  using T = attn::compute_type<S>;
  const whole_call<S> all(p, r);
  attn::execution serial;
  if (r.fast) serial.set_precision(attn::precision::fast);
  const gradients<S> part = all.own_part(how, r, serial);
  const auto queries = own_rows(p.q.length(), how), keys = own_rows(p.k.length(), how);
  CAPTURE(int(how), p.chosen.causal, p.chosen.terms, p.chosen.score, p.q.length(), p.k.length(), r.saved_lse, r.d_lse,
          r.accumulate, r.differ);
  const bool first = r.differ && own_rank() == 0, second = r.differ && own_rank() == 1;
  const tensor<S> untouched_k(2, p.k.heads(), std::ssize(keys), 9, S(0.25f));
  if (!second) CHECK(error_of_rows(part.q, all.g.q, queries) <= 2 * allowed<S>);
  if (!first) CHECK(error_of_rows(part.k, all.g.k, keys) <= 2 * allowed<S>);
  if (first) CHECK(part.k == untouched_k);
  if (!second) CHECK(error_of_rows(part.v, all.g.v, keys) <= allowed<S>);
  if (p.chosen.terms && !second) CHECK(relative_error(list<S>(part.slopes), list<S>(all.g.slopes)) <= 8 * allowed<T>);
  if (p.chosen.terms && !first) CHECK(relative_error(list<S>(part.sinks), list<S>(all.g.sinks)) <= 8 * allowed<T>);
}

template <class S>
void check_choices() {
  using choice = typename problem<S>::choice;
  for (spread how : spreads) {
    for (bool causal : {false, true}) {
      check<S>(problem<S>({.causal = causal}), how);
      check<S>(problem<S>({.causal = causal, .terms = true, .kv_heads = 1}), how, {.saved_lse = false, .d_lse = false});
      check<S>(problem<S>({.causal = causal, .terms = true, .score = true, .kv_heads = 4}), how, {.accumulate = true});
      check<S>(problem<S>({.causal = causal, .score = true, .queries = 23, .keys = 90}), how, {.saved_lse = false});
      check<S>(problem<S>({.causal = causal, .terms = true, .queries = 90, .keys = 23}), how, {.differ = true});
    }
    for (idx_t length : {0, 2}) check<S>(problem<S>(choice{.causal = true, .queries = length, .keys = length}), how);
  }
}

}  // namespace

TEST_CASE("mpi::full_softmax_backward: float gives what one process gives", "[full_softmax_backward]") {
  check_choices<float>();
}
TEST_CASE("mpi::full_softmax_backward: 16-bit elements are rounded once", "[full_softmax_backward]") {
  check_choices<Eigen::bfloat16>();
}

TEST_CASE("mpi::full_softmax_backward: with precision::fast gradients are those of standard products",
          "[full_softmax_backward]") {
  for (spread how : {spread::uneven, spread::zigzag})
    check<Eigen::half>(problem<Eigen::half>({.causal = true, .terms = true}), how, {.fast = true});
}

TEST_CASE("mpi::full_softmax_backward: long sequences, in pieces of heads", "[full_softmax_backward]") {
  for (spread how : {spread::uneven, spread::zigzag})
    check<float>(problem<float>({.causal = true, .queries = 2000, .keys = 2000}), how);
}

TEST_CASE("mpi::full_softmax_backward: the bits do not depend on threads, and one process has those of the call",
          "[full_softmax_backward]") {
  const problem<float> p({.causal = true, .terms = true, .queries = 700, .keys = 700});
  const whole_call<float> all(p, {});
  attn::execution serial, threads(2, 0);
  const gradients<float> one = all.own_part(spread::zigzag, {}, serial),
                         two = all.own_part(spread::zigzag, {}, threads);
  CHECK(one.q == two.q);
  CHECK(one.k == two.k);
  CHECK(one.v == two.v);
  CHECK(one.slopes == two.slopes);
  CHECK(one.sinks == two.sinks);
  std::vector<float> first = one.slopes;
  MPI_Bcast(first.data(), 4, MPI_FLOAT, 0, MPI_COMM_WORLD);
  CHECK(first == one.slopes);  // on every process
  if (process_count() == 1) CHECK((one.q == all.g.q && one.k == all.g.k && one.sinks == all.g.sinks));
}

TEST_CASE("mpi::full_softmax_backward: all processes refuse what does not fit one", "[full_softmax_backward]") {
  using options = attn::mpi::full_softmax_options<float>;
  const bool last = own_rank() + 1 == process_count();
  tensor<float> q(1, 2, 5, 8, 0.5f), k(1, 2, 6, 8, 0.25f), v(1, 2, 6, 7, 1), out(1, 2, 5, 7, 1), lse(1, 2, 5, 1, 1);
  tensor<float> dq(1, 2, 5, 8, 7), dk(1, 2, 6, 8, 7), dv(1, 2, 6, 7, 7), other(1, 2, 7, 8, 7);
  std::vector<float> sinks(2, 0.5f), d_sinks(2, 7);
  const auto check = [&](const char* says, const attn::mpi::full_softmax_gradients<float>& g, const options& o,
                         const tensor<float>& d_out) {
    check_all_refuse("mpi::full_softmax_backward", says, [&] {
      attn::mpi::full_softmax_backward(view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)),
                                       view(std::as_const(out)), view(d_out), g, MPI_COMM_WORLD, o);
    });
    for (const tensor<float>* x : {&dq, &dk, &dv, &other})
      CHECK(std::all_of(x->data.begin(), x->data.end(), [](float e) { return e == 7; }));
  };
  const tensor<float> longer(1, 2, 6, 7, 1);
  check("d_out", {.q = view(dq)}, {}, last ? longer : out);
  check("the gradient of k of the shape", {.q = view(dq), .k = view(last ? other : dk)}, {}, out);
  const attn::tensor_view<float> q_in_k(dk.data.data(), {1, 2, 5, 8});
  check("separate memory", {.q = last ? q_in_k : view(dq), .k = view(dk)}, {}, out);
  if (last)
    check("sinks, since its gradient is asked for", {.sinks = {d_sinks.data(), {2}}}, {}, out);
  else
    check("sinks, since its gradient is asked for", {}, {}, out);
  if (process_count() > 1) check("options", {}, {.zigzag = last}, out);
  check("softcap", {}, {.softcap = last ? 0.0f : 1.0f}, out);
}

}  // namespace testing::full_softmax_backward_tests
