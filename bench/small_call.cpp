// attn_bench: what a call costs beside its work.
#include <attn/softmax/full_softmax.hpp>

#include <algorithm>
#include <vector>

#include "machine.hpp"
#include "sweep.hpp"

namespace bench {

double small_call_seconds() {
  constexpr int calls = 1000, times = 50;
  std::vector<float> numbers(4 * 16, 0.5f);
  const auto token = [&](int n) { return attn::tensor_view<float>(numbers.data() + 16 * n, {1, 1, 1, 16}); };
  attn::execution exec;
  double best = 1;
  for (int t = 0; t < times; ++t) {
    const double begin = seconds_now();
    for (int n = 0; n < calls; ++n) attn::full_softmax(token(0), token(1), token(2), token(3), {}, exec);
    best = std::min(best, (seconds_now() - begin) / calls);
  }
  return best;
}

}  // namespace bench
