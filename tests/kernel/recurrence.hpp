#pragma once
// What delta_rule and dplr are tested for alike. How a problem is drawn, run and compared is each one's own
// (support/call_*.hpp).
#include <sstream>

#include "support/call_dplr.hpp"
#include "support/catch.hpp"

namespace testing::recurrences {

// The tokens of p in the chunks given.
template <class S>
tensor<double> streamed(const delta_rule_problem& p, const std::vector<idx_t>& chunks) {
  const delta_rule_memory<S> m(p);
  const auto& v = p.x.v;
  attn::delta_rule_state<S> state({.batch = v.batch(), .heads = v.heads(), .dim = p.x.k.dim(), .value_dim = v.dim()});
  tensor<S> out(v.batch(), v.heads(), v.length(), v.dim(), S(7));
  attn::execution serial;
  for (idx_t count : chunks) {
    const idx_t begin = state.tokens();
    const auto part = [&](auto x) { return x.slice(2, begin, count); };
    compiled_delta_rule<S>::step(state, part(view(m.q)), part(view(m.k)), part(view(m.v)), part(view(out)),
                                 m.step_options(begin, count), serial);
    CHECK(state.tokens() == begin + count);
  }
  return cast<double>(out);
}
template <class S>
tensor<double> streamed(const dplr_problem& p, const std::vector<idx_t>& chunks) {
  const dplr_memory<S> m(p);
  const auto& v = p.x.v;
  attn::dplr_state<S> state({.batch = v.batch(), .heads = v.heads(), .dim = p.x.k.dim(), .value_dim = v.dim()});
  tensor<S> out(v.batch(), v.heads(), v.length(), v.dim(), S(7));
  attn::execution serial;
  for (idx_t count : chunks) {
    const idx_t begin = state.tokens();
    compiled_dplr<S>::step(state, m.views().tokens(begin, count), view(out).slice(2, begin, count),
                           m.step_options(begin, count), serial);
    CHECK(state.tokens() == begin + count);
  }
  return cast<double>(out);
}

template <class S, class Problem>
void check(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  const reference::result actual = run_serially<S>(p), wanted = expected(p);
  // Of delta_rule, a triangular system is solved for every chunk, which loses somewhat more than a sum.
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.final_state, wanted.final_state) <= tolerance<real<S>>::out);
}

// draw(shape, seed): a problem.
template <class S, class Shape, class Draw>
void check_odd_shapes(Draw&& draw) {
  const idx_t lengths[] = {0, 1, 2, 7, 16, 63, 64, 65, 127, 130, 257}, dims[] = {1, 3, 8, 16, 33, 64, 80, 128};
  for (std::size_t n = 0; n < std::size(lengths); ++n)
    for (std::size_t step : {0u, 3u, 5u}) {
      Shape shape{.length = lengths[n], .state = true, .decays = static_cast<int>(n + step) % 3};
      shape.dim = dims[(n + step) % 8], shape.value_dim = dims[(n + 3 * step) % 8];
      CAPTURE(shape.length, shape.dim, shape.value_dim, shape.decays);
      check<S>(draw(shape, n + 1));
    }
}

// p has a key_mask: what it hides is NaN in hidden_rows, members of Problem::x.
template <class S, class Problem, class Rows>
void check_hidden_keys(Problem p, const Rows& hidden_rows) {
  p = rounded<S>(p);
  const reference::result wanted = expected(p);
  for (auto row : hidden_rows) {
    tensor<double>& x = p.x.*row;
    for (idx_t b = 0; b < x.batch(); ++b)
      for (idx_t h = 0; h < x.heads(); ++h)
        for (idx_t t = 0; t < x.length(); ++t)
          for (idx_t d = 0; d < x.dim() && reference::key_hidden(p.options.key_mask, b, t); ++d)
            x(b, h, t, d) = std::numeric_limits<double>::quiet_NaN();
  }
  const reference::result actual = run_serially<S>(p);
  CHECK(relative_error(actual.out, wanted.out) <= tolerance<S>::out);
  CHECK(relative_error(actual.final_state, wanted.final_state) <= tolerance<real<S>>::out);
  for (const auto& chunks : {std::vector<idx_t>(150, 1), {70, 2, 78}})
    CHECK(relative_error(streamed<S>(p, chunks), wanted.out) <= tolerance<S>::out);
}

// p has decays: each of them g.
template <class S, class Problem>
void check_decays_of(Problem p) {
  for (double g : {-reference::infinity, -200.0, -30.0, 0.0}) {
    std::fill(p.x.log_decay.data.begin(), p.x.log_decay.data.end(), g);
    CAPTURE(g);
    check<S>(p);
  }
}

// p has an initial state.
template <class S, class Problem>
void check_padding(Problem p) {
  p.options.lengths = {0, 71};
  const reference::result clean = run_serially<S>(p);
  for (tensor<double>* x : rows_of(p)) poison_padding(*x, p.options.lengths);
  const reference::result padded = run_serially<S>(p);
  CHECK(padded.out == clean.out);
  CHECK(padded.final_state == clean.final_state);
  const tensor<double> before = rounded<real<S>>(p.x.initial_state);
  for (idx_t h = 0; h < before.heads(); ++h) CHECK(head(clean.final_state, 0, h) == head(before, 0, h));
}

template <class S, class Problem>
void check_threads(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  const reference::result serial = run_serially<S>(p);
  if (p.x.v.heads() == 1) {
    const reference::result wanted = expected(p);
    CHECK(relative_error(serial.out, wanted.out) <= tolerance<S>::out);
    CHECK(relative_error(serial.final_state, wanted.final_state) <= tolerance<S>::out);
  }
  for (int count : {2, 3}) {
    attn::execution threads(count, 0);
    const reference::result shared = run<S>(p, threads);
    CHECK(shared.out == serial.out);
    CHECK(shared.final_state == serial.final_state);
  }
}

// Token by token, in chunks and at once.
template <class S, class Problem>
void check_streams(const Problem& problem) {
  const Problem p = rounded<S>(problem);
  const tensor<double> wanted = expected(p).out;
  const idx_t length = p.x.v.length();
  std::vector<idx_t> mixed;
  for (idx_t fed = 0, next = 1; fed < length; fed += mixed.back(), next = next * 3 % 50)
    mixed.push_back(std::min(next, length - fed));
  for (const auto& chunks : {std::vector<idx_t>(static_cast<std::size_t>(length), 1), {length}, mixed}) {
    CAPTURE(length, chunks.size());
    CHECK(relative_error(streamed<S>(p, chunks), wanted) <= tolerance<S>::out);
  }
}

template <class State>
std::string bytes_of(const State& state) {
  std::ostringstream stream;
  state.write(stream);
  return stream.str();
}

// x has a problem p of 80 tokens, which step and append feed to a state that has none yet.
template <class S, class Stream, class State>
void check_numbers(Stream& x, State state) {
  CHECK(state.tokens() == 0);
  x.step(state, 0, 70);
  x.step(state, 70, 10);
  CHECK(state.tokens() == 80);
  const tensor<double> wanted = expected(x.p).final_state;
  tensor<double> actual = wanted;
  for (idx_t b = 0; b < wanted.batch(); ++b)
    for (idx_t h = 0; h < wanted.heads(); ++h)
      for (idx_t d = 0; d < wanted.length(); ++d)
        for (idx_t e = 0; e < wanted.dim(); ++e) actual(b, h, d, e) = static_cast<double>(state.value(b, h, d, e));
  CHECK(relative_error(actual, wanted) <= tolerance<real<S>>::out);
}

template <class Stream, class State>
void check_append(Stream& x, State asked) {
  State fed = asked;
  for (const auto& [begin, count] : {std::pair<idx_t, idx_t>{0, 1}, {1, 70}, {71, 3}, {74, 0}, {74, 6}}) {
    x.step(asked, begin, count), x.append(fed, begin, count);
    CHECK(fed.tokens() == asked.tokens());
    CHECK(bytes_of(fed) == bytes_of(asked));
  }
}

// Copied, written and read, reset.
template <class Stream, class State>
void check_copies(Stream& x, State state) {
  State reader = state;
  const std::string empty = bytes_of(state);
  x.step(state, 0, 33);
  const std::string before = bytes_of(state);
  State branch = state;
  x.step(branch, 33, 20);
  CHECK(bytes_of(state) == before);
  CHECK(bytes_of(branch) != before);
  std::istringstream stream(before);
  reader.read(stream);
  CHECK(bytes_of(reader) == before);
  CHECK(reader.tokens() == 33);
  for (State* each : {&state, &reader}) {
    x.step(*each, 33, 20);
    CHECK(bytes_of(*each) == bytes_of(branch));
  }
  state.reset();
  CHECK(bytes_of(state) == empty);
  x.step(state, 0, 33);
  CHECK(bytes_of(state) == before);
}

}  // namespace testing::recurrences
