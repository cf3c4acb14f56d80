#pragma once
// The gradients of the softmax family: a problem as a case of the reverse pass (gradient.hpp), and through the library.
#include "support/gradient.hpp"
#include "support/run.hpp"

namespace testing {

// Of gradient_tolerance: the gradients of scores are differences, in which the rounding of `out` stays; those of one
// number per head are sums in which most cancels.
template <class S>
double gradient_factor(const std::string& of) {
  if (of == "alibi_slopes" || of == "sinks") return 4;
  return sizeof(S) == 2 && !of.starts_with("v") ? 2 : 1;
}

// A lone key has weight 1 whatever its score, whose gradient is d_lse: what is left of two equal sums over the values'
// dims. Of few terms it keeps its digits.
inline constexpr idx_t lone_key_value_dim = 3;

// The score function of all these tests, which masks some keys and is not linear in the score, and d times its
// derivative.
struct smooth_score {
  static bool masks(idx_t h, idx_t i, idx_t j) { return (i * 3 + j * 5 + h) % 11 == 0; }

  template <class N>
  N operator()(const N& s, idx_t b, idx_t h, idx_t i, idx_t j) const {
    using std::sin;
    if (masks(h, i, j)) return -reference::infinity;
    return 0.5 * s + sin(s) + 0.01 * static_cast<double>(b + i - j);
  }
  static double backward(double s, double d, idx_t h, idx_t i, idx_t j) {
    return masks(h, i, j) ? 0 : d * (0.5 + std::cos(s));
  }
};

// f(name, x) for all that a problem may be differentiated by: tensors, and lists per head.
template <class Problem, class F>
void each_input(Problem& p, F&& f) {
  f("q", p.q), f("k", p.k), f("v", p.v);
  if constexpr (requires { p.options.bias; }) f("bias", p.options.bias);
  f("alibi_slopes", p.options.alibi_slopes), f("sinks", p.options.sinks);
  f("relative_bias", p.options.relative_bias), f("log_decay", p.options.log_decay);
  f("relative_keys", p.options.relative_keys), f("relative_queries", p.options.relative_queries);
  f("position_queries", p.options.position_queries);
  if constexpr (requires { p.options.q_global; })
    f("q_global", p.options.q_global), f("k_global", p.options.k_global), f("v_global", p.options.v_global);
}
// The same of the library's gradients: views of four axes, two or one.
template <class Gradients, class F>
void each_gradient(Gradients& g, F&& f) {
  f("q", g.q);
  if constexpr (requires { g.k; }) f("k", g.k);
  f("v", g.v);
  if constexpr (requires { g.bias; }) f("bias", g.bias);
  if constexpr (requires { g.alibi_slopes; }) f("alibi_slopes", g.alibi_slopes);
  if constexpr (requires { g.relative_bias; }) f("relative_bias", g.relative_bias);
  if constexpr (requires { g.log_decay; }) f("log_decay", g.log_decay);
  if constexpr (requires { g.relative_keys; })
    f("relative_keys", g.relative_keys), f("relative_queries", g.relative_queries),
        f("position_queries", g.position_queries);
  f("sinks", g.sinks);
  if constexpr (requires { g.q_global; })
    f("q_global", g.q_global), f("k_global", g.k_global), f("v_global", g.v_global);
}

namespace detail {

template <class Options>
struct over_variable;
template <template <class> class Options>
struct over_variable<Options<double>> {
  tensor<variable> q, k, v;
  Options<variable> options;
};

inline void add_input(gradient_case& c, const char* name, const tensor<double>& x) {
  if (x.extents == tensor<double>().extents) return;  // not given
  c.names.push_back(name), c.inputs.push_back(x);
}
inline void add_input(gradient_case& c, const char* name, const std::vector<double>& x) {
  if (x.empty()) return;
  tensor<double> list(1, 1, 1, std::ssize(x));
  list.data = x;
  add_input(c, name, list);
}
inline void set_input(tensor<variable>& to, const tensor<variable>& from) { to = from; }
inline void set_input(std::vector<variable>& to, const tensor<variable>& from) { to = from.data; }

}  // namespace detail

// The reference of an operator, by the type of its options.
template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_full_softmax_options<N>& o) {
  return reference::full_softmax(q, k, v, o);
}
template <class N>
auto reference_of(const tensor<N>& q, const tensor<N>& k, const tensor<N>& v,
                  const reference::basic_sliding_window_options<N>& o) {
  return reference::sliding_window(q, k, v, o);
}

// The results are out, and lse if that has a gradient too.
template <class Options>
gradient_case case_of(const problem<Options>& p, bool with_lse, std::string name = {}) {
  gradient_case c;
  c.name = std::move(name);
  each_input(p, [&](const char* of, const auto& x) { detail::add_input(c, of, x); });
  c.forward = [p, with_lse, names = c.names](const std::vector<tensor<variable>>& inputs) {
    detail::over_variable<Options> x;
    copy_choices(p.options, x.options);
    if (p.options.score) x.options.score = smooth_score{};
    each_input(x, [&](const char* of, auto& to) {
      for (std::size_t n = 0; n < names.size(); ++n)
        if (names[n] == of) detail::set_input(to, inputs[n]);
    });
    auto r = reference_of(x.q, x.k, x.v, x.options);
    std::vector<tensor<variable>> results{std::move(r.out)};
    if (with_lse) results.push_back(std::move(r.lse));
    return results;
  };
  return c;
}

// How the library is asked.
struct backward_request {
  bool saved_lse = true;  // what the forward call wrote is given; otherwise it is computed again
  bool accumulate = false;
  double start = 7;                 // in the gradients before the call
  std::vector<std::string> only{};  // none: all there are
};

// How the library is called for a problem: its options, the forward call and the backward one.
template <class S, class Options>
struct library_operator : stored_options<S, Options> {
  using form = compiled<S, Options>;
  using stored_options<S, Options>::stored_options;

  void forward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, tensor<S>& out,
               attn::execution& exec) const {
    form::call(view(q), view(k), view(v), view(out), this->options, this->score, exec);
  }
  void backward(const tensor<S>& q, const tensor<S>& k, const tensor<S>& v, const tensor<S>& out,
                const tensor<S>& d_out, const typename form::gradients& gradients,
                const score_backward_of<S>& score_backward, attn::execution& exec) const {
    form::backward(view(q), view(k), view(v), view(out), view(d_out), gradients, this->options, this->score,
                   score_backward, exec);
  }
};

// The library's gradients of a case made of `p`, those asked for, from the gradients of its results.
template <class S, class Options>
named_tensors library_gradients(const problem<Options>& p, const gradient_case& c, const tensors& d_results,
                                const backward_request& request, attn::execution& exec) {
  library_operator<S, Options> op(p.options);
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d_out = cast<S>(d_results[0]);
  tensor<S> out(q.batch(), q.heads(), q.length(), v.dim(), S(7));
  tensor<real<S>> lse(q.batch(), q.heads(), q.length(), 1, real<S>(7)), d_lse;
  op.options.lse = row_view(lse);
  op.forward(q, k, v, out, exec);
  if (!request.saved_lse) op.options.lse = {};

  typename library_operator<S, Options>::form::gradients gradients;
  std::map<std::string, tensor<S>> elements;
  std::map<std::string, tensor<real<S>>> parameters;
  each_gradient(gradients, [&](const std::string& name, auto& to) {
    using asked = std::remove_reference_t<decltype(to)>;
    const auto& only = request.only;
    if (!only.empty() && std::find(only.begin(), only.end(), name) == only.end()) return;
    for (std::size_t n = 0; n < c.names.size(); ++n) {
      if (c.names[n] != name) continue;
      const auto set = [&](auto& memory) {
        memory.extents = c.inputs[n].extents;
        using number = typename asked::value_type;
        memory.data.assign(c.inputs[n].data.size(), static_cast<number>(static_cast<float>(request.start)));
        if constexpr (asked::rank == 1)
          to = {memory.data.data(), {memory.dim()}};
        else if constexpr (asked::rank == 3)
          to = name == "log_decay" ? row_view(memory)
                                   : attn::tensor_view<number, 3>(memory.data.data(),
                                                                  {memory.heads(), memory.length(), memory.dim()});
        else if constexpr (asked::rank == 2)
          to = {memory.data.data(), {memory.length(), memory.dim()}};
        else
          to = view(memory);
      };
      if constexpr (std::is_same_v<typename asked::value_type, S>)
        set(elements[name]);
      else
        set(parameters[name]);
    }
  });
  if (d_results.size() > 1) {
    d_lse = cast<real<S>>(d_results[1]);
    gradients.d_lse = row_view(d_lse);
  }
  gradients.accumulate = request.accumulate;
  score_backward_of<S> score_backward;
  if (p.options.score)
    score_backward = [](real<S> s, real<S> d, idx_t, idx_t h, idx_t i, idx_t j) {
      return static_cast<real<S>>(smooth_score::backward(static_cast<double>(s), static_cast<double>(d), h, i, j));
    };
  op.backward(q, k, v, out, d_out, gradients, score_backward, exec);

  named_tensors all;
  for (const auto& [name, x] : elements) all[name] = cast<double>(x);
  for (const auto& [name, x] : parameters) all[name] = cast<double>(x);
  return all;
}
template <class S, class Options>
named_tensors library_gradients(const problem<Options>& p, const gradient_case& c, const tensors& d_results,
                                const backward_request& request = {}) {
  attn::execution serial;
  return library_gradients<S>(p, c, d_results, request, serial);
}

// What the element type makes of the gradients of the results.
template <class S>
void round_results(tensors& d) {
  d[0] = rounded<S>(d[0]);
  if (d.size() > 1) d[1] = rounded<real<S>>(d[1]);
}

// Every gradient the library has, against the reverse pass of the reference on the same rounded inputs.
template <class S, class Options>
void check_backward(const problem<Options>& given, bool with_lse = false, const backward_request& request = {},
                    attn::execution* exec = nullptr) {
  const problem<Options> p = rounded<S>(given);
  const gradient_case c = case_of(p, with_lse);
  const reference_gradients wanted = gradients_of(c, round_results<S>);
  attn::execution serial;
  const named_tensors actual = library_gradients<S>(p, c, wanted.d_results, request, exec ? *exec : serial);
  for (std::size_t n = 0; n < c.names.size(); ++n) {
    INFO("gradient of " << c.names[n]);
    CAPTURE(relative_error(actual.at(c.names[n]), wanted.gradients[n]));
    const double factor = gradient_factor<S>(c.names[n]);
    CHECK(relative_error(actual.at(c.names[n]), wanted.gradients[n]) <= factor * product_gradient_tolerance<S>);
  }
}

// `accumulate` adds once, at the end: to 0.25 what is otherwise written over, with at most the rounding of that sum to
// come between. The gradient of a bias that is broadcast has no other memory for its sum than where it goes: what is
// there comes first in it.
template <class T, class Options>
void check_accumulate(const problem<Options>& given, bool with_lse = true) {
  const problem<Options> p = rounded<T>(given);
  const gradient_case c = case_of(p, with_lse);
  tensors d_results = random_gradients(c.forward(independent(c.inputs)));
  round_results<T>(d_results);
  const named_tensors written = library_gradients<T>(p, c, d_results),
                      added = library_gradients<T>(p, c, d_results, {.accumulate = true, .start = 0.25});
  for (const auto& [name, x] : written) {
    INFO("gradient of " << name);
    tensor<double> sum = x;
    for (double& number : sum.data) number = static_cast<double>(T(0.25) + static_cast<T>(number));
    const double one_rounding = static_cast<double>(std::numeric_limits<T>::epsilon());
    CHECK(relative_error(added.at(name), sum) <= (name == "bias" ? gradient_tolerance<T>::value : one_rounding));
  }
}

// Each gradient alone is what it is together with the others, bit by bit, with lse that is saved and with lse computed
// anew, which is in two parts and therefore more exact.
template <class T, class Options>
void check_each_alone(const problem<Options>& given, bool with_lse = true) {
  const problem<Options> p = rounded<T>(given);
  const gradient_case c = case_of(p, with_lse);
  const tensors d_results = random_gradients(c.forward(independent(c.inputs)));
  for (bool saved_lse : {true, false}) {
    const named_tensors all = library_gradients<T>(p, c, d_results, {.saved_lse = saved_lse});
    for (const std::string& name : c.names) {
      INFO("gradient of " << name << ", lse saved: " << saved_lse);
      const named_tensors alone = library_gradients<T>(p, c, d_results, {.saved_lse = saved_lse, .only = {name}});
      CHECK(alone.size() == 1);
      CHECK(alone.at(name) == all.at(name));
    }
  }
}

}  // namespace testing
