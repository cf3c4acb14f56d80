#pragma once
// The gradients of performer and rfa over processes, against those of a single process on the whole sequence.
#include <attn/kernel/draw_features.hpp>

#include "mpi/spread.hpp"

namespace testing {

struct features_problem {
  idx_t tokens = 2 * 1024 + 200;
  tensor<double> q = random_normal(1, 2, 4, tokens, 9, 0.7), k = random_normal(2, 2, 2, tokens, 9, 0.7),
                 v = random_normal(3, 2, 2, tokens, 5), d_out = random_normal(4, 2, 4, tokens, 5);
};

// alone(q, k, v, features, d_out, gradients, gates) and the same of spread: Gradients has q, k, v and features, and
// where there are gates, gate. Bitwise where ranges begin at segments, but for the features, which are summed up over
// processes.
template <class S, class Gradients, class Alone, class Spread>
void check_gradients(const features_problem& p, idx_t feature_heads, idx_t gate_heads, double bound, const Alone& alone,
                     const Spread& spread) {
  using T = attn::compute_type<S>;
  const tensor<S> q = cast<S>(p.q), k = cast<S>(p.k), v = cast<S>(p.v), d_out = cast<S>(p.d_out);
  const auto features = attn::draw_features<S>(20, 9, {.seed = 7, .heads = feature_heads});
  const auto gates = gates_near_one<T>(gate_heads, p.tokens);
  struct result {
    tensor<S> q, k, v, features;
    tensor<T> gate;
  };
  const auto run = [&](const auto& part, const auto& call) {
    const tensor<S> own_q = part(q), own_k = part(k), own_v = part(v), own_d = part(d_out);
    const tensor<T> own_gates = part(gates);
    result g{own_q, own_k, own_v, tensor<S>(1, feature_heads, 20, 9), own_gates};
    Gradients wanted{.q = view(g.q), .k = view(g.k), .v = view(g.v)};
    wanted.features = {g.features.data.data(), {feature_heads, 20, 9}};
    if constexpr (requires { wanted.gate; })
      if (gate_heads > 0) wanted.gate = row_view(g.gate);
    call(view(own_q), view(own_k), view(own_v), features, view(own_d), wanted, row_view(own_gates));
    return g;
  };
  const result all = run([](const auto& x) { return x; }, alone);
  int number = 0;
  for (const own_range& range : splits(p.tokens, 1024)) {
    CAPTURE(number++, range.begin, range.length, range.aligned);
    const auto own = [&](const auto& x) { return rows(x, range.begin, range.length); };
    const result g = run(own, spread);
    if (range.aligned) {
      CHECK(g.q == own(all.q));
      CHECK(g.k == own(all.k));
      CHECK(g.v == own(all.v));
      CHECK(g.gate == own(all.gate));
    } else {
      CHECK(relative_error(g.q, own(all.q)) <= bound);
      CHECK(relative_error(g.k, own(all.k)) <= bound);
      CHECK(relative_error(g.v, own(all.v)) <= bound);
      CHECK(relative_error(g.gate, own(all.gate)) <= bound);
    }
    CHECK(relative_error(g.features, all.features) <= bound);
    tensor<S> of_first = g.features;  // the same on every process, to the last bit
    MPI_Bcast(of_first.data.data(), static_cast<int>(of_first.data.size() * sizeof(S)), MPI_BYTE, 0, MPI_COMM_WORLD);
    CHECK(g.features == of_first);
  }
}

}  // namespace testing
