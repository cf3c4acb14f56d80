#pragma once
// What the tests of the low-rank operators' gradients share. A Form<S> is an operator in element type S:
//   problem                           what it is given
//   case_of(problem)                  as a case of the reverse pass
//   memory(problem, before)           gradients whose memory starts as `before`: views(), all(), in the case's order
//   keep(gradients, n)                leaves only gradient n of them
//   call(problem, d_results, gradients, execution)
#include <algorithm>
#include <array>

#include "support/gradient.hpp"
#include "support/refused.hpp"
#include "support/run_backward.hpp"

namespace testing {

// Memory of the shape of x.
template <class S>
tensor<S> filled(const tensor<double>& x, double value) {
  tensor<S> to = cast<S>(x);
  std::fill(to.data.begin(), to.data.end(), static_cast<S>(value));
  return to;
}

template <class Form>
tensors run_gradients(const typename Form::problem& p, const tensors& d_results, attn::execution& execution,
                      bool accumulate = false) {
  typename Form::memory stored(p, accumulate ? 0.5 : 7);  // rubbish that must be written over
  auto wanted = stored.views();
  wanted.accumulate = accumulate;
  Form::call(p, d_results, wanted, execution);
  return stored.all();
}

// Gradients of out, and of lse where the operator has one.
template <class Form>
tensors random_d_results(const typename Form::problem& p) {
  tensors all{random_normal(99, p.q.batch(), p.q.heads(), p.q.length(), p.v.dim())};
  if (Form::has_lse) all.push_back(random_normal(98, p.q.batch(), p.q.heads(), p.q.length(), 1));
  return all;
}

// Every gradient against the reverse pass. Results are rounded once; the rest is in the compute type.
template <class Form, class S>
void check_form(const typename Form::problem& given, double factor = 1) {
  const auto p = rounded<S>(given);
  const double exact = gradient_tolerance<real<S>>::value;
  check_gradients(
      Form::case_of(p), product_gradient_tolerance<S> + (factor - 1) * exact,
      [&](const tensors&, const tensors& d_results) {
        attn::execution serial;
        return run_gradients<Form>(p, d_results, serial);
      },
      [](tensors& d) { d[0] = rounded<S>(d[0]); });
}

// Each gradient alone is what it is with the others, and nothing else is written.
template <class Form>
void check_form_alone(const typename Form::problem& p) {
  attn::execution serial;
  const tensors d_results = random_d_results<Form>(p), all = run_gradients<Form>(p, d_results, serial);
  for (std::size_t n = 0; n <= all.size(); ++n) {
    typename Form::memory stored(p, 7);
    auto wanted = stored.views();
    Form::keep(wanted, n);
    Form::call(p, d_results, wanted, serial);
    const tensors one = stored.all();
    for (std::size_t other = 0; other < all.size(); ++other) {
      CAPTURE(n, other);
      if (other == n)
        CHECK(one[other] == all[other]);
      else
        CHECK(std::all_of(one[other].data.begin(), one[other].data.end(), [](double x) { return x == 7; }));
    }
  }
}

template <class Form, class S>
void check_form_accumulates(const typename Form::problem& given) {
  const auto p = rounded<S>(given);
  attn::execution serial;
  const tensors d_results = random_d_results<Form>(p);
  tensors written = run_gradients<Form>(p, d_results, serial);
  const tensors added = run_gradients<Form>(p, d_results, serial, true);
  for (std::size_t n = 0; n < written.size(); ++n) {
    for (double& x : written[n].data) x += 0.5;
    CAPTURE(n);
    CHECK(relative_error(added[n], written[n]) <= 2 * gradient_tolerance<S>::value);
  }
}

// Threads change no bit, nor does what lies in the padding of `lengths`.
template <class Form>
void check_form_threads_and_padding(typename Form::problem p) {
  attn::execution serial, two(2, 0), seven(7, 0);
  tensors d_results = random_d_results<Form>(p);
  const tensors alone = run_gradients<Form>(p, d_results, serial);
  CHECK(run_gradients<Form>(p, d_results, two) == alone);
  CHECK(run_gradients<Form>(p, d_results, seven) == alone);
  std::vector<tensor<double>*> padded{&p.q, &p.k, &p.v};
  for (auto& d : d_results) padded.push_back(&d);
  if constexpr (requires { p.options.logits; }) padded.push_back(&p.options.logits);
  for (tensor<double>* x : padded) poison_padding(*x, p.options.lengths);
  CHECK(run_gradients<Form>(p, d_results, serial) == alone);
}

// Gradients with a key_mask: no bit depends on threads nor on what is hidden, whose gradients are 0, beside NaN too;
// nor do gradients of an item whose keys are all hidden.
template <class Form>
void check_form_hidden(typename Form::problem p) {
  attn::execution serial, seven(7, 0);
  const tensors d_results = random_d_results<Form>(p), alone = run_gradients<Form>(p, d_results, serial);
  CHECK(run_gradients<Form>(p, d_results, seven) == alone);
  p = poisoned(p);
  CHECK(run_gradients<Form>(p, d_results, serial) == alone);
  for (const auto& g : alone) CHECK(all_finite(g));
  for (idx_t j = 0; j < p.v.length(); ++j)
    if (!reference::key_hidden(p.options.key_mask, 0, j)) p.v(0, 0, j, 0) = std::numeric_limits<double>::quiet_NaN();
  const tensors beside_nan = run_gradients<Form>(p, d_results, serial);
  for (idx_t j = 0; j < p.v.length(); ++j)
    for (idx_t b = 0; b < p.v.batch(); ++b)
      for (idx_t h = 0; h < p.v.heads() && reference::key_hidden(p.options.key_mask, b, j); ++h) {
        for (idx_t d = 0; d < p.k.dim(); ++d) CHECK(beside_nan[1](b, h, j, d) == 0);
        for (idx_t d = 0; d < p.v.dim(); ++d) CHECK(beside_nan[2](b, h, j, d) == 0);
      }
}

// One item of x, heads [first, first + count).
inline tensor<double> heads_of_item(const tensor<double>& x, idx_t b, idx_t first, idx_t count) {
  tensor<double> to(1, count, x.length(), x.dim());
  for (idx_t h = 0; h < count; ++h)
    for (idx_t i = 0; i < x.length(); ++i)
      for (idx_t d = 0; d < x.dim(); ++d) to(0, h, i, d) = x(b, first + h, i, d);
  return to;
}

// Every item and key head alone, made by one(item, first query head, count, key head), has the bits of gradients q, k
// and v that it has in the batch.
template <class Form, class One>
void check_form_independent(const typename Form::problem& p, One&& one) {
  attn::execution serial;
  const tensors d_results = random_d_results<Form>(p), all = run_gradients<Form>(p, d_results, serial);
  const idx_t group = p.q.heads() / p.k.heads();
  for (idx_t b = 0; b < p.q.batch(); ++b)
    for (idx_t kv = 0; kv < p.k.heads(); ++kv) {
      typename Form::problem alone = p;
      alone.q = heads_of_item(p.q, b, kv * group, group);
      alone.k = heads_of_item(p.k, b, kv, 1), alone.v = heads_of_item(p.v, b, kv, 1);
      if (!p.options.lengths.empty()) alone.options.lengths = {p.options.lengths[static_cast<std::size_t>(b)]};
      one(alone, b, kv * group, group);
      tensors d;
      for (const auto& x : d_results) d.push_back(heads_of_item(x, b, kv * group, group));
      const tensors of_one = run_gradients<Form>(alone, d, serial);
      CAPTURE(b, kv);
      CHECK(of_one[0] == heads_of_item(all[0], b, kv * group, group));
      CHECK(of_one[1] == heads_of_item(all[1], b, kv, 1));
      CHECK(of_one[2] == heads_of_item(all[2], b, kv, 1));
    }
}

// The views of a call that is spoilt in one place at a time: what it is refused with, and that nothing is written.
template <class Call>
struct refused_gradient {
  const char* says;
  std::function<void(Call&)> alter;
};
template <class Call>
void check_gradients_refused(const std::string& name, const std::vector<refused_gradient<Call>>& list) {
  std::vector<refused<Call>> all;
  for (const auto& bad : list) all.push_back({bad.says, bad.says, bad.alter});
  check_refused(name, all, [](Call& c) { c.run(); });
}

}  // namespace testing
