#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"

namespace testing::bigbird_law {
namespace {

template <class T>
void add_bigbird(std::vector<law_operator<T>>& all) {
  using options = reference::bigbird_options;
  const auto sized = [](idx_t size, idx_t globals, idx_t random, bool causal,
                        bool more = false) -> options_for<options> {
    return [=](const law_shape& s) {
      options o;
      o.size = size, o.global_blocks = globals, o.causal = causal;
      o.random = block_table(s.first_head, s.heads, (s.keys + size - 1) / size, random);
      if (more) set_scores(s, o);
      return o;
    };
  };
  all.push_back(pattern_operator<T>("bigbird", sized(8, 1, 2, false)));
  for (bool causal : {false, true})
    all.back().limits.push_back(full_limit<T>("every block global", sized(10, 13, 0, causal)));
  // The last blocks are those of the whole length, whose queries see everything: with `causal` as without, the future
  // takes no part in it.
  all.push_back(pattern_operator<T>("bigbird causal", sized(16, 1, 3, true)));
  all.push_back(pattern_operator<T>("bigbird masked, with a score function", sized(12, 1, 1, false), true));
  all.push_back(pattern_operator<T>("bigbird of everything", sized(5, 0, 2, true, true)));
  all.back().long_rows.push_back(long_form<T>("every block global", sized(4096, 200, 0, false)));
  all.back().without = {{"stream", "there is no step"}};
}
const law_entries entries("bigbird", [](auto& all) { add_bigbird(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_bigbird, S>("bigbird causal", true, [](auto& o) { o.size = 16; }));
}
const stored_entries stored_form("bigbird", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::bigbird_law
