#include "laws/operators/patterns.hpp"
#include "laws/stored.hpp"

namespace testing::block_law {
namespace {

template <class T>
void add_block(std::vector<law_operator<T>>& all) {
  using options = reference::block_options;
  const auto sized = [](idx_t size, idx_t neighbours, bool causal) -> options_for<options> {
    return [=](const law_shape&) {
      options o;
      o.size = size, o.neighbours = neighbours, o.causal = causal;
      return o;
    };
  };
  const auto permuted = [](bool causal) -> options_for<options> {
    return [=](const law_shape& s) {
      options o;
      o.size = 20, o.causal = causal;
      const tensor<idx_t> drawn = block_table(s.first_head, s.heads, 160, 1);  // more than any law asks for
      o.permutation = tensor<idx_t>(1, s.heads, (s.keys + 19) / 20, 1);
      for (idx_t h = 0; h < s.heads; ++h)  // a block not after the query's own: every query sees a key
        for (idx_t a = 0; a < o.permutation.length(); ++a)
          o.permutation(0, h, a, 0) = std::clamp<idx_t>(drawn(0, h, a, 0), 0, a);
      if (causal) set_scores(s, o);
      return o;
    };
  };
  all.push_back(pattern_operator<T>("block", sized(16, 1, false)));
  for (bool causal : {false, true})
    all.back().limits.push_back(full_limit<T>("blocks of the length", sized(300, 0, causal)));
  all.push_back(pattern_operator<T>("block causal", sized(50, 1, true)));
  all.push_back(pattern_operator<T>("block masked, with a score function", sized(20, 1, false), true));
  all.push_back(pattern_operator<T>("block permuted", permuted(false)));
  all.push_back(pattern_operator<T>("block of everything", permuted(true)));
  all.back().long_rows.push_back(long_form<T>("one block", sized(idx_t(1) << 20, 0, false)));
  all.back().without = {{"stream", "there is no step"}};
}
const law_entries entries("block", [](auto& all) { add_block(all); });

template <class S>
void add_stored(std::vector<stored_operator<S>>& all) {
  all.push_back(stored_softmax<compiled_block, S>("block", false, [](auto& o) { o.size = 20; }));
}
const stored_entries stored_form("block", [](auto& all) { add_stored(all); });

}  // namespace
}  // namespace testing::block_law
