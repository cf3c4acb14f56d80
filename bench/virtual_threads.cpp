#include "virtual_threads.hpp"

#include <algorithm>
#include <cstddef>
#include <vector>

namespace bench {

attn::execution virtual_threads::make_execution(int threads) {
  return attn::execution(threads, [saved = saved_](int workers, const attn::pool_task& task) {
    constexpr double waking = 5e-6;  // until all have begun
    const double begin = seconds_now();
    std::vector<double> clocks(static_cast<std::size_t>(workers));
    for (bool found = true; found;) {
      const auto earliest = std::ranges::min_element(clocks);
      const double start = seconds_now();
      found = task.one(static_cast<int>(earliest - clocks.begin()));
      if (found) *earliest += seconds_now() - start;
    }
    *saved += seconds_now() - begin - std::ranges::max(clocks) - waking;
  });
}

}  // namespace bench
