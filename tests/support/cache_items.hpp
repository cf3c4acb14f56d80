#pragma once
// Batch items of a cache or state are sequences of their own: fed with chunks of different lengths, branched,
// reordered, begun anew, each gives what a cache or state of one item gives.
#include <cmath>
#include <limits>

#include "support/catch.hpp"
#include "support/random.hpp"
#include "support/refusal.hpp"
#include "support/run.hpp"

namespace testing {

struct cache_shape {
  idx_t heads = 4, kv_heads = 2, dim = 20, value_dim = 12, chunk = 21;
};

// step(cache, q, k, v, out, lengths) feeds `cache`, of four items, and those of `alone`, of one; rows may differ by the
// tolerance.
template <class S, class Cache, class One, class Step>
void check_items(Cache& cache, const One& one, const Step& step, const cache_shape& s = {}, double tolerance = 0) {
  constexpr idx_t batch = 4;
  std::vector<One> alone(batch, one);
  random_source random(5);
  const auto at = [](auto& list, idx_t n) -> auto& { return list[static_cast<std::size_t>(n)]; };
  for (int round = 0; round < 24; ++round) {
    const idx_t count = round % 5 == 0 ? s.chunk : 1 + round % 4;
    const auto seed = static_cast<std::uint64_t>(3 * round);
    tensor<S> q = cast<S>(random_normal(seed, batch, s.heads, count, s.dim)),
              k = cast<S>(random_normal(seed + 1, batch, s.kv_heads, count, s.dim)),
              v = cast<S>(random_normal(seed + 2, batch, s.kv_heads, count, s.value_dim));
    tensor<S> out(batch, s.heads, count, s.value_dim, S(7));
    std::vector<idx_t> lengths(batch);
    for (idx_t& n : lengths) n = random.below(count + 1);
    at(lengths, round % batch) = count;
    for (auto* x : {&q, &k, &v})
      for (idx_t b = 0; b < batch; ++b)
        for (idx_t h = 0; h < x->heads(); ++h)
          for (idx_t t = at(lengths, b); t < count; ++t)
            for (idx_t d = 0; d < x->dim(); ++d) (*x)(b, h, t, d) = S(std::numeric_limits<float>::quiet_NaN());
    step(cache, view(std::as_const(q)), view(std::as_const(k)), view(std::as_const(v)), view(out), lengths);
    CAPTURE(round);
    double worst = 0;
    for (idx_t b = 0; b < batch; ++b) {
      const idx_t n = at(lengths, b);
      tensor<S> row(1, s.heads, n, s.value_dim, S(9));
      const auto part = [&](const tensor<S>& x) { return view(x).slice(0, b, 1).slice(2, 0, n); };
      step(at(alone, b), part(q), part(k), part(v), view(row), {});
      CHECK(cache.tokens(b) == at(alone, b).tokens());
      for (idx_t h = 0; h < s.heads; ++h)
        for (idx_t t = 0; t < count; ++t)
          for (idx_t d = 0; d < s.value_dim; ++d) {
            const auto found = static_cast<double>(out(b, h, t, d)),
                       wanted = t < n ? static_cast<double>(row(0, h, t, d)) : 0;
            const double difference = found == wanted ? 0 : std::abs(found - wanted);
            worst = difference <= worst ? worst : difference;  // NaN, too
          }
    }
    CHECK(worst <= tolerance);
    if (round == 8) cache.copy_item(0, 2), alone[2] = alone[0];
    if (round == 12 || round == 15) {
      // Two become the same and one is lost; then a cycle of three.
      const std::vector<idx_t> order = round == 12 ? std::vector<idx_t>{2, 0, 0, 1} : std::vector<idx_t>{1, 2, 0, 3};
      cache.reorder(order);
      const std::vector<One> before = alone;
      for (idx_t b = 0; b < batch; ++b) at(alone, b) = at(before, at(order, b));
    }
    if (round == 18) cache.reset(3), alone[3].reset();
    if constexpr (requires { cache.truncate(idx_t(1), idx_t(5)); })
      if (round == 20) cache.truncate(1, 30), alone[1].truncate(30);
  }
}

// A state of two items refuses items there are not, and lengths that do not fit, and stays as it was. step() as above,
// append(state, k, v, lengths) without queries.
struct state_names {
  const char *state, *step, *append;
};
template <class S, class State, class Step, class Append>
void check_item_refusals(State& state, const state_names& names, const Step& step, const Append& append,
                         const cache_shape& s = {}) {
  const tensor<S> q = cast<S>(random_normal(1, 2, s.heads, 5, s.dim)),
                  k = cast<S>(random_normal(2, 2, s.kv_heads, 5, s.dim)),
                  v = cast<S>(random_normal(3, 2, s.kv_heads, 5, s.value_dim));
  tensor<S> out(2, s.heads, 5, s.value_dim);
  const auto feed = [&](State& to, const std::vector<idx_t>& lengths) {
    step(to, view(q), view(k), view(v), view(out), lengths);
  };
  const auto answer = [&] {  // of all that follows
    State copy = state;
    feed(copy, {});
    return std::pair(out, std::pair(copy.tokens(0), copy.tokens(1)));
  };
  feed(state, {5, 2});
  const auto before = answer();
  const auto refuses = [&](const char* who, const char* says, auto&& call) {
    std::fill(out.data.begin(), out.data.end(), S(7));
    const std::string message = refusal(call);
    INFO(says << ": " << message);
    CHECK(well_formed(message, who));
    CHECK(message.find(says) != std::string::npos);
    CHECK(std::all_of(out.data.begin(), out.data.end(), [](S x) { return x == S(7); }));
    CHECK(answer() == before);
  };
  for (const std::vector<idx_t>& wrong : {std::vector<idx_t>{1}, {1, 2, 3}}) {
    refuses(names.step, "lengths, one per batch item: 2", [&] { feed(state, wrong); });
    refuses(names.append, "lengths, one per batch item: 2", [&] { append(state, view(k), view(v), wrong); });
  }
  for (const std::vector<idx_t>& wrong : {std::vector<idx_t>{1, 6}, {-1, 2}}) {
    refuses(names.step, "lengths from 0 to 5", [&] { feed(state, wrong); });
    refuses(names.append, "lengths from 0 to 5", [&] { append(state, view(k), view(v), wrong); });
  }
  for (idx_t item : {-1, 2}) {
    refuses(names.state, "a batch item from 0 to 1", [&] { (void)state.tokens(item); });
    refuses(names.state, "a batch item from 0 to 1", [&] { state.reset(item); });
    refuses(names.state, "a batch item from 0 to 1", [&] { state.copy_item(0, item); });
    refuses(names.state, "a batch item from 0 to 1", [&] { state.copy_item(item, 1); });
    refuses(names.state, "batch items from 0 to 1", [&] { state.reorder(std::vector<idx_t>{1, item}); });
    if constexpr (requires { state.rollback(item, item); }) {
      refuses(names.state, "a batch item from 0 to 1", [&] { (void)state.kept(item); });
      refuses(names.state, "a batch item from 0 to 1", [&] { state.rollback(item, 0); });
    }
  }
  for (const std::vector<idx_t>& wrong : {std::vector<idx_t>{0}, {0, 1, 0}})
    refuses(names.state, "order, one per batch item: 2", [&] { state.reorder(wrong); });
}

}  // namespace testing
